"""Prefill calls of serving engines, copied from their sources, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.fp8 import Fp8Batch
from helpers.batches.low_precision import BF16
from helpers.batches.low_precision import E4M3 as FP8
from helpers.batches.prefill import CAUSAL, FULL, Batch, starts, window
from helpers.calls.entries import KV_LENS, Q_LENS, context, cudnn, elements


def padded(data: Batch, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an output with rows for more tokens, as in full graphs."""
    return torch.full((data.tokens + 6, data.heads, data.head_dim), 7.0, dtype=BF16, device=data.device).to(dtype)


@pytest.mark.parametrize("out_dtype", [None, BF16, FP8], ids=str)
def test_vllm_context(out_dtype: torch.dtype | None, device: str) -> None:
    """K and V are halves of the rows of one cache; queries and cache have 8 bits if ``out_dtype`` is given.

    The workspace is zeroed, and the counters are for other kernels.
    """
    is_fp8 = out_dtype is not None
    data = (Fp8Batch if is_fp8 else Batch)(Q_LENS, KV_LENS, 4, 2, device=device)
    key, value, table = data.pages(16)
    cache = torch.cat((key, value), -1)
    out = padded(data, out_dtype or data.dtype)
    client: dict[str, Any] = dict(
        workspace_buffer=torch.zeros(1 << 20, dtype=torch.uint8, device=device),
        window_left=-1,
        sinks=None,
        o_sf_scale=None,
        out=out[: data.tokens],
        kv_cache_sf=None,
        multi_ctas_kv_counter_buffer=torch.zeros(64, dtype=torch.uint8, device=device),
    )
    if is_fp8:
        client["query"], cache = data.q.to(FP8), cache.to(FP8)
    context(data, cache.split(data.head_dim, -1), table, kv_layout="HND", **client)
    if isinstance(data, Fp8Batch):
        data.check_fp8(out[: data.tokens], CAUSAL)
    else:
        data.expected().check(out[: data.tokens])
    assert (out[data.tokens :].float() == 7).all()


@pytest.mark.parametrize("left", [-1, 40])
def test_sglang_context(left: int, device: str) -> None:
    """SGLang's default call on Blackwell works: NHD pools as HND views, sinks or none, other kernels' arguments by
    name.
    """
    data = Batch(Q_LENS, KV_LENS, 4, 2, device=device)
    key, value, table = data.pages(16)
    pair = tuple(pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (key, value))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device) if left >= 0 else None
    options: dict[str, Any] = dict(sinks=sinks, window_left=left, out_dtype=data.dtype, kv_cache_sf=None, causal=True)
    options |= dict(skip_softmax_threshold_scale_factor=None)
    out = context(data, pair, table, **options)
    data.expected(window(left) if left >= 0 else CAUSAL, sinks=sinks).check(out)


@pytest.mark.parametrize("head_dim", [72, 80])
def test_vision_encoders_with_padding_requests(head_dim: int, device: str) -> None:
    """SGLang and TokenSpeed pad a batch with requests of length 0, which all start after the last token.

    Offsets have the shape [batch + 1, 1, 1, 1]. 16 heads of 1152 columns are 72 wide.
    """
    lengths = [70, 130]
    data = Batch(lengths, lengths, 4, 4, head_dim, device=device)
    ends = [*starts(lengths), *[data.tokens] * 3]
    offsets = elements(data, ends, 4 * head_dim).view(-1, 1, 1, 1)
    all_lengths = data.ints([*lengths, *[0] * 3]).view(-1, 1, 1, 1)
    out, none = cudnn(
        data,
        torch.cat(data.k),
        torch.cat(data.v),
        causal=False,
        return_lse=False,
        actual_seq_lens_q=all_lengths,
        actual_seq_lens_kv=all_lengths,
        **{f"batch_offsets_{name}": offsets for name in "qkvo"},
    )
    assert none is None
    data.expected(FULL).check(out)
