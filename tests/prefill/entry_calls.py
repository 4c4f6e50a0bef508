"""The entry points called with a batch, as users call them."""

from __future__ import annotations

from typing import Any

import torch
from batches import Batch, starts

import hopwell

WORKSPACE = torch.empty(0, dtype=torch.uint8)


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


def context(data: Batch, kv_cache: Any, table: torch.Tensor, **more: Any) -> torch.Tensor:
    arguments = dict(query=data.q, kv_cache=kv_cache, block_tables=table, **_common(data))
    return hopwell.trtllm_batch_context_with_kv_cache(**(arguments | more))


def fmha_v2(data: Batch, qkv: Any, layout: str, **more: Any) -> Any:
    """The output, with its statistics where ``more`` asks for them."""
    arguments = dict(qkv=qkv, input_layout=layout, **_common(data))
    return hopwell.trtllm_fmha_v2_prefill(**(arguments | more))
