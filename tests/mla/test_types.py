"""Every type of queries and caches with all options of a call at once, against float64.

The options are uneven new tokens, requests with fewer keys and without any, sinks, the log-sum-exp, and small and large
pages with NaN between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from helpers.batches.fp8 import E4M3, Fp8MlaBatch
from helpers.batches.mla import MlaBatch, PackedBatch, draw_topk
from helpers.batches.prefill import starts
from helpers.calls.entries import repeated
from helpers.cases.mla import DIMS, FEW_HEADS, MANY_HEADS, SPARSE_DIMS, TOP_K

import hopwell

MAIN, NARROW, UNROTATED = SPARSE_DIMS
Q_LENS, KV_LENS = [3, 0, 1, 2, 3], [1, 40, 0, 130, 70]


class Types(NamedTuple):
    query: torch.dtype
    cache: torch.dtype

    @property
    def wide(self) -> torch.dtype:
        return torch.bfloat16 if self.query == E4M3 else self.query


FP16, BF16 = torch.float16, torch.bfloat16
TYPES = {
    "fp16": Types(FP16, FP16),
    "bf16 over e4m3": Types(BF16, E4M3),
    "fp16 over e4m3": Types(FP16, E4M3),
    "e4m3": Types(E4M3, E4M3),
    "656 bytes": Types(BF16, torch.uint8),
}
# Kernels are shared with other tests of entries, so none is compiled only here.
COMMON = [
    ("fp16", FEW_HEADS, 0, 64),
    ("fp16", MANY_HEADS, TOP_K, 1),
    ("bf16 over e4m3", FEW_HEADS, TOP_K, 1024),
    ("fp16 over e4m3", MANY_HEADS, 0, 1),
    ("e4m3", FEW_HEADS, 0, 512),
    ("e4m3", MANY_HEADS, TOP_K, 8),
    ("656 bytes", FEW_HEADS, TOP_K, 1),
    ("656 bytes", MANY_HEADS, 0, 1024),
]
OTHERS = [
    (name, heads, top_k, dims)
    for name in TYPES
    for heads, top_k, dims in (
        (FEW_HEADS, 0, NARROW),
        (MANY_HEADS, 0, NARROW),
        (MANY_HEADS, TOP_K, NARROW),
        (FEW_HEADS, TOP_K, UNROTATED),
        (MANY_HEADS, 0, MAIN),
        (FEW_HEADS, TOP_K, MAIN),
    )
    if name != "656 bytes" or dims == MAIN
]


def batch(types: Types, heads: int, top_k: int, dims: tuple[int, int], device: str) -> MlaBatch:
    requests = enumerate(zip(Q_LENS, KV_LENS, strict=True))
    topk_indices = [draw_topk("any", *sizes, top_k, seed) for seed, sizes in requests] if top_k else None
    sizes = dict(heads=heads, head_dim=dims[0], v_head_dim=dims[1], topk_indices=topk_indices, device=device)
    if types.cache == torch.uint8:
        return PackedBatch(Q_LENS, KV_LENS, **sizes)
    if types.query == E4M3:
        return Fp8MlaBatch(Q_LENS, KV_LENS, **sizes)
    kv_dtype = E4M3 if types.cache == E4M3 else None
    return MlaBatch(Q_LENS, KV_LENS, dtype=types.wide, kv_dtype=kv_dtype, **sizes)


def check(types: Types, heads: int, top_k: int, dims: tuple[int, int], page_size: int, device: str) -> None:
    data = batch(types, heads, top_k, dims, device)
    problem = data.decode(page_size, ragged=True)
    sinks = torch.linspace(-1.0, 2.0, heads, device=device)
    arguments: dict[str, Any] = dict(
        query=problem.query,
        kv_cache=data.packed(page_size) if isinstance(data, PackedBatch) else problem.key,
        workspace_buffer=data.workspace(2**15),
        qk_nope_head_dim=128,
        kv_lora_rank=dims[1],
        qk_rope_head_dim=dims[0] - dims[1],
        block_tables=problem.token_table if top_k else problem.page_table.key,
        seq_lens=problem.kv_lens,
        max_seq_len=max(KV_LENS),
        sparse_mla_top_k=top_k,
        bmm1_scale=data.scale,
        sinks=sinks,
        return_lse=True,
        cum_seq_lens_q=data.ints(starts(Q_LENS)),
        max_q_len=max(Q_LENS),
    )
    out, lse = repeated(hopwell.trtllm_batch_decode_with_kv_cache_mla, data, arguments)
    assert out.dtype == types.wide
    expected = data.expected_mla(sinks=sinks)
    expected.check(out)
    expected.check_lse(lse, natural=False)


@pytest.mark.parametrize(("name", "heads", "top_k", "page_size"), COMMON)
def test_all_at_once(name: str, heads: int, top_k: int, page_size: int, device: str) -> None:
    check(TYPES[name], heads, top_k, DIMS[0], page_size, device)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 24, 1024])
@pytest.mark.parametrize(("name", "heads", "top_k", "dims"), OTHERS)
def test_other_dims(name: str, heads: int, top_k: int, dims: tuple[int, int], page_size: int) -> None:
    check(TYPES[name], heads, top_k, dims, page_size, "cuda")
