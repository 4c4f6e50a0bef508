"""Calls of the entry points with a batch, as from user code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hopwell
from helpers.batches.decode import DecodeBatch
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import Batch, starts
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels.problem import AttentionProblem

WORKSPACE = torch.empty(0, dtype=torch.uint8)
LATENT_CAPACITY = 2**15  # larger than the token capacity of every table in these calls

# Query and KV lengths: two tiles of queries, three of keys, rows and whole requests without keys or queries.
Q_LENS, KV_LENS = [5, 0, 130, 9, 1, 64], [77, 3, 300, 4, 200, 0]


def cache_forms(key: torch.Tensor, value: torch.Tensor) -> list[tuple[Any, str]]:
    """Return the pages in every form that the entry accepts, with the name of its layout."""
    nhd = [pool.transpose(1, 2).contiguous() for pool in (key, value)]
    pairs = [((key, value), "HND"), (tuple(nhd), "NHD")]
    if key.shape != value.shape:
        return pairs
    return [*pairs, (torch.stack((key, value), 1), "HND"), (torch.stack(nhd, 1), "NHD")]


def repeated(entry: Callable[..., Any], data: Batch, arguments: dict[str, Any]) -> Any:
    """Return the result of the last of three calls: one is checked, one found by its key, one recognised without."""
    first, *later = [entry(**arguments) for _ in range(1 if data.device == "cpu" else 3)]
    for result in later:
        outs = [part[0] if isinstance(part, tuple) else part for part in (first, result)]
        outs = [part.data if isinstance(part, hopwell.FP4Tensor) else part for part in outs]
        assert torch.equal(*(part.contiguous().view(torch.uint8) for part in outs)), "a repeated call gives other bits"
    return later[-1] if later else first


def _common(data: Batch) -> dict[str, Any]:
    return dict(
        workspace_buffer=WORKSPACE,
        seq_lens=data.ints(data.kv_lens),
        max_q_len=max(data.q_lens),
        max_kv_len=max(data.kv_lens),
        bmm1_scale=data.scale,
        bmm2_scale=1.0,
        batch_size=data.size,
        cum_seq_lens_q=data.ints(starts(data.q_lens)),
        cum_seq_lens_kv=data.ints(starts(data.kv_lens)),
    )


def context_arguments(data: Batch, kv_cache: Any, table: torch.Tensor, **more: Any) -> dict[str, Any]:
    return dict(query=data.q, kv_cache=kv_cache, block_tables=table, **_common(data)) | more


def context(data: Batch, kv_cache: Any, table: torch.Tensor, **more: Any) -> torch.Tensor:
    arguments = context_arguments(data, kv_cache, table, **more)
    return repeated(hopwell.trtllm_batch_context_with_kv_cache, data, arguments)


def fmha_v2_arguments(data: Batch, qkv: Any, layout: str, **more: Any) -> dict[str, Any]:
    return dict(qkv=qkv, input_layout=layout, **_common(data)) | more


def fmha_v2(data: Batch, qkv: Any, layout: str, **more: Any) -> Any:
    """Return the output, with its statistics if ``more`` asks for them."""
    return repeated(hopwell.trtllm_fmha_v2_prefill, data, fmha_v2_arguments(data, qkv, layout, **more))


def cudnn_arguments(data: Batch, k_cache: torch.Tensor, v_cache: torch.Tensor, **more: Any) -> dict[str, Any]:
    q_starts = starts(data.q_lens)
    arguments: dict[str, Any] = dict(
        q=data.q,
        k_cache=k_cache,
        v_cache=v_cache,
        scale=data.scale,
        workspace_buffer=WORKSPACE,
        max_token_per_sequence=max(data.q_lens),
        max_sequence_kv=max(data.kv_lens),
        actual_seq_lens_q=data.ints(data.q_lens).view(-1, 1, 1, 1),
        actual_seq_lens_kv=data.ints(data.kv_lens).view(-1, 1, 1, 1),
        causal=True,
        return_lse=True,
        batch_offsets_q=elements(data, q_starts, data.heads * data.head_dim),
        batch_offsets_o=elements(data, q_starts, data.heads * data.v_head_dim),
    )
    return arguments | more


def cudnn(data: Batch, k_cache: torch.Tensor, v_cache: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    """Return the output and the log-sum-exp."""
    return repeated(hopwell.cudnn_batch_prefill_with_kv_cache, data, cudnn_arguments(data, k_cache, v_cache, **more))


def ragged_offsets(data: Batch, begins: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Return the start of each request's keys and values: at these tokens, or without gaps."""
    begins = begins or starts(data.kv_lens)
    return dict(
        batch_offsets_k=elements(data, begins, data.kv_heads * data.head_dim),
        batch_offsets_v=elements(data, begins, data.kv_heads * data.v_head_dim),
    )


def ragged_rows(data: Batch, padded: torch.Tensor) -> torch.Tensor:
    """Return the rows of a padded log-sum-exp that belong to a request."""
    return torch.cat([padded[i, :n] for i, n in enumerate(data.q_lens)])


def elements(data: Batch, tokens: list[int], unit: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return the offsets in elements of places in tokens."""
    return data.ints([token * unit for token in tokens], dtype)


def xqa(data: DecodeBatch, problem: AttentionProblem, q_len: int = 1, entry: str = "xqa", **more: Any) -> torch.Tensor:
    """Return the output of a decode entry: XQA, or "trtllm"."""
    table, (kv_heads, page_size) = problem.page_table.key, problem.key.shape[1:3]
    size = xqa_workspace_bytes(data.heads, kv_heads, data.v_head_dim, table.shape[1] * page_size, q_len, data.device)
    arguments: dict[str, Any] = dict(
        query=data.q,
        kv_cache=(problem.key, problem.value),
        workspace_buffer=torch.full((size,), 0xFF, dtype=torch.uint8, device=data.device),
        block_tables=table,
        seq_lens=problem.kv_lens,
        max_seq_len=max(data.kv_lens),
        bmm1_scale=data.scale,
        kv_layout="HND",
        q_len_per_req=q_len,
    )
    if q_len > 1 and "mask" not in more:
        arguments["mask"] = problem.draft_mask.view(data.size, q_len, -1)
    if problem.kv_scales is not None:
        arguments["kv_cache_sf"] = problem.kv_scales.key, problem.kv_scales.value
    return repeated(getattr(hopwell, f"{entry}_batch_decode_with_kv_cache"), data, arguments | more)


def mla_arguments(data: MlaBatch, problem: AttentionProblem, **more: Any) -> dict[str, Any]:
    q_len = data.q_lens[0]
    tokens = None if data.topk_indices is None else problem.token_table
    return (
        dict(
            query=data.q.view(data.size, q_len, data.heads, data.head_dim),
            kv_cache=problem.key,
            workspace_buffer=data.workspace(LATENT_CAPACITY),
            qk_nope_head_dim=128,
            kv_lora_rank=data.v_head_dim,
            qk_rope_head_dim=data.head_dim - data.v_head_dim,
            block_tables=problem.page_table.key if tokens is None else tokens.view(data.size, q_len, -1),
            seq_lens=problem.kv_lens,
            max_seq_len=max(data.kv_lens),
            sparse_mla_top_k=0 if tokens is None else tokens.shape[-1],
            bmm1_scale=data.scale,
        )
        | more
    )


def mla(data: MlaBatch, problem: AttentionProblem, **more: Any) -> torch.Tensor:
    return repeated(hopwell.trtllm_batch_decode_with_kv_cache_mla, data, mla_arguments(data, problem, **more))
