"""Options of a call over an e4m3 or NVFP4 cache, bitwise equal to the same values in 16 bits.

The options are separate page ids of K and V, scales and sinks on the device, the log-sum-exp, skip-softmax, and an
NVFP4 output.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.low_precision import (
    BF16,
    E4M3,
    FP16,
    NVFP4,
    LowPrecisionBatch,
    check_bits_of_16_bits,
    check_nvfp4_output,
)
from helpers.batches.prefill import CAUSAL, LN_2, window
from helpers.calls.entries import context

from hopwell import layouts
from hopwell.kernels.config.base import KvType

DIMS = (64, 64)
KV_TYPES = {E4M3: KvType.E4M3, NVFP4: KvType.NVFP4}
CACHES = pytest.mark.parametrize("kv_dtype", [E4M3, NVFP4], ids=["e4m3", "nvfp4"])
Pages = tuple[torch.Tensor, torch.Tensor]


def batch(device: str, **changes: Any) -> LowPrecisionBatch:
    sizes = dict(q_lens=[130, 0, 5, 7], kv_lens=[265, 3, 0, 4], heads=4, kv_heads=2, head_dim=64, v_head_dim=64)
    return LowPrecisionBatch(device=device, **sizes | dict(q_dtype=BF16) | changes)


def scales_of(data: LowPrecisionBatch, layout: str, order: int = 0) -> Pages | None:
    return data.block_scales(16, layout, order=order) if data.kv_dtype is NVFP4 else None


def dequantized(data: LowPrecisionBatch, cache: Pages, scales: Pages | None, dtype: torch.dtype = BF16) -> Pages:
    """Return the same pages in 16 bits, in which unreadable data is still NaN."""
    if scales is None:
        return cache[0].to(dtype), cache[1].to(dtype)
    key, value = (layouts.dequantize_nvfp4(*part, dtype=dtype) for part in zip(cache, scales, strict=True))
    return key, value


@CACHES
def test_pages_scales_and_statistics(kv_dtype: torch.dtype, device: str) -> None:
    """K's pages are in another order than V's, and block scales have gaps between heads."""
    data = batch(device, kv_dtype=kv_dtype)
    (key, _, key_table), (_, value, value_table) = (data.pages(16, order=order) for order in (0, 5))
    given: dict[str, Any] = dict(
        uses_shared_paged_kv_idx=False,
        sinks=torch.linspace(-2.0, 2.0, data.heads, device=device),
        bmm1_scale=torch.tensor([data.scale], device=device),
        bmm2_scale=torch.tensor([1.5], device=device),
        return_lse=True,
        window_left=100,
    )
    table = torch.stack((key_table, value_table), 1)
    narrow, pair = dict(given), None
    if kv_dtype is NVFP4:
        pair = data.block_scales(16, "linear")[0], data.block_scales(16, "linear", order=5)[1]
        gaps = torch.nn.functional.pad(pair[0].view(torch.uint8), (0, 0, 0, 4), value=0x7F).view(E4M3)[:, :, :16]
        narrow["kv_block_scales"] = gaps, data.block_scales(16, "interleaved", order=5)[1]
    out, lse = context(data, (key, value), table, **narrow)
    wide_out, wide_lse = context(data, dequantized(data, (key, value), pair), table, **given)
    check_bits_of_16_bits(out, wide_out, 64, KV_TYPES[kv_dtype])
    assert torch.equal(lse, wide_lse)
    want = data.expected_low(window(100), sinks=given["sinks"]).lse / LN_2
    finite = want.isfinite()
    assert torch.allclose(lse.double()[finite], want[finite], atol=1e-4)


@CACHES
def test_skip_softmax(kv_dtype: torch.dtype, device: str) -> None:
    """Skipped tiles exist, and are the same as with 16 bits."""
    data = batch(device, kv_dtype=kv_dtype, q_lens=[128, 64], kv_lens=[640, 700], magnitude=2.0)
    small = [torch.where((torch.arange(len(k), device=device) % 300 < 200)[:, None, None], k / 64, k) for k in data.k]
    data.store(small, data.v)
    key, value, table = data.pages(16)
    linear, scales = scales_of(data, "linear"), scales_of(data, "interleaved")
    narrow = dict(kv_block_scales=scales) if scales is not None else {}
    wide = dequantized(data, (key, value), linear)
    outs = []
    for factor in (100.0, None):
        given: dict[str, Any] = dict(skip_softmax_threshold_scale_factor=factor)
        outs.append(context(data, (key, value), table, **narrow, **given))
        check_bits_of_16_bits(outs[-1], context(data, wide, table, **given), 64, KV_TYPES[kv_dtype])
    assert not torch.equal(*outs), "nothing was left out"
    data.expected_low(CAUSAL).check(outs[1])


def test_nvfp4_output_over_an_nvfp4_cache(device: str) -> None:
    """Codes and scales equal the quantizer's."""
    data = batch(device, q_dtype=E4M3, kv_dtype=NVFP4)
    key, value, table = data.pages(16)
    given: dict[str, Any] = dict(kv_block_scales=scales_of(data, "interleaved"), bmm1_scale=data.scale)
    wide = context(data, (key, value), table, out_dtype=FP16, **given)
    out = context(data, (key, value), table, out_dtype="nvfp4", o_sf_scale=3.0, **given)
    check_nvfp4_output(out, wide, 3.0)


def test_requests_and_pages_change_no_bit(device: str) -> None:
    """Pages in another order, and a request alone."""
    data = batch(device, kv_dtype=NVFP4)

    def call(one: LowPrecisionBatch, order: int) -> torch.Tensor:
        key, value, table = one.pages(16, order=order)
        return context(one, (key, value), table, kv_block_scales=scales_of(one, "interleaved", order))

    out = call(data, 0)
    assert torch.equal(out, call(data, 9))
    first = LowPrecisionBatch.request(data, 0)
    first.store([data.k[0]], [data.v[0]])
    assert torch.equal(out[:130], call(first, 3))
