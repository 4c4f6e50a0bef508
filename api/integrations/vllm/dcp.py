"""Decode context parallelism (DCP) of the backend HOPWELL: ranks share the keys of each request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

import hopwell

if TYPE_CHECKING:
    from hopwell.integrations.vllm.batch_metadata import HopwellMetadata


def combine_function() -> Callable[..., Any]:
    """Return the function that combines outputs [tokens, all heads, head_size] of ranks by their log-sum-exp.

    It returns the rank's own heads, with their log-sum-exp [tokens, heads] for ``return_lse=True``.
    """
    config = get_current_vllm_config_or_none()
    by_all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    reduce = dcp_a2a_lse_reduce if by_all_to_all else cp_lse_ag_out_rs

    def combine(out: torch.Tensor, lse: torch.Tensor, return_lse: bool = False) -> Any:
        return reduce(out, lse, get_dcp_group(), return_lse=return_lse, is_lse_base_on_e=True)

    return combine


def all_heads(query: torch.Tensor) -> torch.Tensor:
    """Gather the query heads of all ranks: [tokens, heads, head_size] to [tokens, ranks * heads, head_size]."""
    return get_dcp_group().all_gather(query.contiguous(), dim=1)


def add_new_tokens(
    out: torch.Tensor,
    context: torch.Tensor,
    context_lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    meta: HopwellMetadata,
    scale: float,
) -> None:
    """Merge attention to the cached context with causal attention to the new tokens.

    Args:
        out: [tokens, heads, head_size] to write into.
        context: the same for the context of all ranks.
        context_lse: float32 [tokens, heads], its natural log-sum-exp.
        query: [tokens, heads, head_size], new tokens request by request.
        key: [tokens, kv_heads, head_size].
        value: the same.
        meta: of the batch.
        scale: factor on q k^T.
    """
    tokens, heads, _ = query.shape
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    new, _ = hopwell.cudnn_batch_prefill_with_kv_cache(
        query,
        key,
        value,
        scale,
        meta.workspace,
        max_token_per_sequence=meta.max_query_len,
        max_sequence_kv=meta.max_query_len,
        actual_seq_lens_q=None,
        actual_seq_lens_kv=None,
        causal=True,
        return_lse=True,
        batch_offsets_q=meta.query_start_loc,
        batch_offsets_k=meta.query_start_loc,
        batch_offsets_stats=meta.query_start_loc,
        lse=lse,
        batch_offsets_units="tokens",
    )
    merge_attn_states(out, context, context_lse.t().contiguous(), new, lse.t().contiguous())
