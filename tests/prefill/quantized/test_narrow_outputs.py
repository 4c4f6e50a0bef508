"""e4m3 and NVFP4 outputs of 16-bit queries, over caches of every type."""

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
    check_nvfp4_output,
)
from helpers.batches.prefill import CAUSAL
from helpers.calls.entries import context, cudnn, fmha_v2, ragged_offsets

LARGEST = torch.finfo(E4M3).max


def batch(device: str, query: torch.dtype, cache: torch.dtype, dim: int = 64, **changes: Any) -> LowPrecisionBatch:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries."""
    sizes = dict(q_lens=[70, 0, 5, 7], kv_lens=[135, 3, 0, 4], heads=4, kv_heads=2, head_dim=dim, v_head_dim=dim)
    types: dict[str, Any] = dict(q_dtype=query, kv_dtype=cache, v_scale=1.5)
    return LowPrecisionBatch(device=device, **sizes | types | changes)


def check(data: LowPrecisionBatch, cache: torch.dtype) -> None:
    """Compare an e4m3 output with float64, and an NVFP4 output with the quantizer."""
    key, value, table = data.pages(16)
    given: dict[str, Any] = data.options(CAUSAL)
    if cache is NVFP4:
        given["kv_block_scales"] = data.block_scales(16, "interleaved")
    out = context(data, (key, value), table, out_dtype=E4M3, **given)
    data.expected_low(CAUSAL).check(out)
    wide = context(data, (key, value), table, out_dtype=FP16, **given)
    check_nvfp4_output(context(data, (key, value), table, out_dtype="nvfp4", o_sf_scale=3.0, **given), wide, 3.0)
    assert (out.double() - wide.double()).abs().max() <= 2.0**-4 * wide.double().abs().max()


@pytest.mark.parametrize(("query", "cache", "dim"), [(BF16, BF16, 64), (FP16, E4M3, 128), (BF16, NVFP4, 64)], ids=str)
def test_context_entry(query: torch.dtype, cache: torch.dtype, dim: int, device: str) -> None:
    check(batch(device, query, cache, dim), cache)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_context_entry_of_other_architectures(arch: str) -> None:
    """tcgen05 kernels of sm_100a, and mma.sync kernels of sm_120a with packed heads."""
    from hopwell import emulator

    with emulator.use(arch):
        check(batch("cpu", BF16, BF16, q_lens=[3, 1, 0, 2], kv_lens=[70, 1, 5, 0]), BF16)


@pytest.mark.emulator
def test_rows_that_are_no_multiple_of_16_bytes() -> None:
    """tcgen05 kernels store such rows by 8 bytes."""
    from hopwell import emulator

    data = batch("cpu", BF16, BF16, dim=40)
    key, value, table = data.pages(16)
    with emulator.use("sm_100a"):
        out = context(data, (key, value), table, out_dtype=E4M3, **data.options(CAUSAL))
    data.expected_low(CAUSAL).check(out)


def test_other_entries(device: str) -> None:
    """Ragged keys, an output of the caller, and values beyond the e4m3 range, which saturate."""
    data = batch(device, BF16, BF16, v_scale=1.0)
    key, value, _ = data.ragged()
    out, _ = cudnn(data, key, value, o_data_type=E4M3, **ragged_offsets(data))
    data.expected_low(CAUSAL).check(out)
    given = torch.zeros_like(out)
    assert fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", out=given) is given
    assert torch.equal(given.view(torch.uint8), out.view(torch.uint8))
    large = fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", out_dtype="float8_e4m3fn", bmm2_scale=1e4).float()
    assert not large.isnan().any()
    assert large.abs().max() == LARGEST
