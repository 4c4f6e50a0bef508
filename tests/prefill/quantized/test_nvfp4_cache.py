"""Prefill over NVFP4 caches, and with NVFP4 outputs."""

from __future__ import annotations

from dataclasses import replace
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
from helpers.batches.prefill import CAUSAL, window
from helpers.calls.entries import context
from helpers.cases.prefill import LINEAR_CASES, LINEAR_EMULATED, NVFP4_CASES, NVFP4_EMULATED

from hopwell import FP4Tensor, layouts
from hopwell._entries.context import dequantized_query
from hopwell.kernels.capability import samples
from hopwell.kernels.config.base import KvType
from hopwell.kernels.problem import Mask
from hopwell.kernels.registry import resolve


def batch(dims: tuple[int, int], device: str, **changes: Any) -> LowPrecisionBatch:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries."""
    settings = dict(q_lens=[130, 0, 5, 7], kv_lens=[265, 3, 0, 4], kv_dtype=NVFP4, q_dtype=BF16) | changes
    heads = dict(heads=4, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1])
    return LowPrecisionBatch(device=device, **heads, **settings)


def wide(data: LowPrecisionBatch, page_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache's pages in 16 bits, which represent codes times their scales exactly. Poison is NaN."""
    key, value, _ = data.pages(page_size)
    k_scales, v_scales = data.block_scales(page_size, "linear")
    return tuple(layouts.dequantize_nvfp4(*part, dtype=dtype) for part in ((key, k_scales), (value, v_scales)))


def check(
    dims: tuple[int, int],
    page_size: int,
    mask: Mask,
    q_dtype: torch.dtype,
    device: str,
    v_scale_layout: str = "interleaved",
) -> None:
    data = batch(dims, device, q_dtype=q_dtype, k_scale=0.5, v_scale=2.0)
    key, value, table = data.pages(page_size)
    scales = dict(kv_block_scales=data.block_scales(page_size, v_scale_layout), v_scale_layout=v_scale_layout)
    given = data.options(mask) | dict(out_dtype=BF16)
    out = context(data, (key, value), table, **scales, **given)
    reference_data = replace(data)
    reference_data.q = data.q.to(FP16) if q_dtype is E4M3 else data.q
    reference_data.k, reference_data.v = data.k, data.v
    dense = wide(data, page_size, reference_data.q.dtype)
    check_bits_of_16_bits(out, context(reference_data, dense, table, **given), dims[0], KvType.NVFP4)
    if q_dtype is not E4M3:
        data.expected_low(mask).check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("case", NVFP4_CASES, ids=str)
def test_bits_are_those_of_16_bits(case: tuple) -> None:
    check(*case, device="cuda")


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "case"), NVFP4_EMULATED, ids=str)
def test_bits_are_those_of_16_bits_emulated(arch: str, case: tuple) -> None:
    from hopwell import emulator

    with emulator.use(arch, race=True, proxy=True, strict=True, schedule="random", seed=3):
        check(*case, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LINEAR_CASES, ids=str)
def test_linear_scales_give_the_bits_of_16_bits(case: tuple) -> None:
    check(*case, device="cuda", v_scale_layout="linear")


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "case"), LINEAR_EMULATED, ids=str)
def test_linear_scales_give_the_bits_of_16_bits_emulated(arch: str, case: tuple) -> None:
    from hopwell import emulator

    with emulator.use(arch, race=True, proxy=True, strict=True, schedule="random", seed=3):
        check(*case, device="cpu", v_scale_layout="linear")


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_queries_are_dequantized_by_kernels_or_by_a_copy(arch: str) -> None:
    """Hopper's kernels read e4m3 queries over NVFP4 themselves; such a kernel is a separate one."""
    from hopwell import emulator

    data = batch((128, 128), "cpu", q_dtype=E4M3)
    with emulator.use(arch):
        query = dequantized_query(data.q)
    assert (query is data.q) == (arch == "sm_90a")
    assert torch.equal(query.float(), data.q.float())
    names = [resolve(samples.prefill(query=dtype, kv=NVFP4, out=BF16), "sm_90a").name for dtype in (E4M3, FP16)]
    assert names[0].replace("_q_e4m3", "") == names[1] != names[0]


def test_window_and_sinks_of_narrow_queries(device: str) -> None:
    """Kernels dequantize the queries; all bits equal the result of queries and cache in float16."""
    data = batch((128, 128), device, q_dtype=E4M3)
    key, value, table = data.pages(16)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device)
    given = data.options(window(70)) | dict(sinks=sinks, out_dtype=FP16)
    out = context(data, (key, value), table, kv_block_scales=data.block_scales(16, "interleaved"), **given)
    half = replace(data)
    half.q, half.k, half.v = data.q.to(FP16), data.k, data.v
    check_bits_of_16_bits(out, context(half, wide(data, 16, FP16), table, **given), 128, KvType.NVFP4)
    assert not torch.equal(out, context(half, wide(data, 16, FP16), table, **given | dict(sinks=None)))


def test_strides_of_narrow_queries(device: str) -> None:
    """Heads before tokens, and rows between foreign rows; tiles of one head, and packed heads."""
    for q_lens in ([70, 0, 5, 7], [3, 1, 0, 2]):
        data = batch((128, 128), device, q_dtype=E4M3, q_lens=q_lens)
        key, value, table = data.pages(16)
        given = data.options(CAUSAL) | dict(kv_block_scales=data.block_scales(16, "interleaved"), out_dtype=BF16)
        out = context(data, (key, value), table, **given)
        narrow, (tokens, heads, width) = data.q, data.q.shape
        for shape, order in (((tokens, heads, width + 32), (0, 1, 2)), ((heads, tokens, width), (1, 0, 2))):
            room = torch.full(shape, torch.nan, device=device).to(E4M3)
            data.q = room.permute(order)[..., :width]
            data.q.copy_(narrow)
            assert torch.equal(out, context(data, (key, value), table, **given))


@pytest.mark.parametrize("few", [False, True], ids=["plain", "packed"])
def test_forms_of_the_cache_give_the_same_bits(device: str, few: bool) -> None:
    """Caches are stacked or NHD, scales are bytes or have their other name; the output is e4m3 by default."""
    changes = dict(q_lens=[3, 1, 2], kv_lens=[300, 1, 70]) if few else {}
    data = batch((64, 64), device, q_dtype=E4M3, **changes)
    key, value, table = data.pages(16)
    k_scales, v_scales = data.block_scales(16, "interleaved")
    given = data.options(CAUSAL)
    out = context(data, (key, value), table, kv_block_scales=(k_scales, v_scales), **given)
    assert out.dtype == E4M3
    octets = torch.stack((k_scales.view(torch.uint8), v_scales.view(torch.uint8)), 1)
    assert torch.equal(out, context(data, torch.stack((key, value), 1), table, kv_cache_sf=octets, **given))
    nhd = [part.transpose(1, 2).contiguous() for part in (key, value)]
    nhd_scales = [part.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3) for part in (k_scales, v_scales)]
    forms = dict(kv_layout="NHD", kv_block_scales=tuple(nhd_scales))
    assert torch.equal(out, context(data, tuple(nhd), table, **forms, **given))
    assert torch.equal(
        out, context(data, (key, value), table, kv_block_scales=(k_scales, v_scales), lse_base="ln", **given)
    )


@pytest.mark.parametrize(("dims", "few"), [((64, 64), False), ((256, 256), False), ((80, 80), True)], ids=str)
def test_nvfp4_output(device: str, dims: tuple[int, int], few: bool) -> None:
    """Codes and scales equal the quantizer's; foreign rows do not change. Few queries give packed heads."""
    changes = dict(q_lens=[3, 1, 0, 2], kv_lens=[300, 1, 5, 0]) if few else {}
    data = batch(dims, device, q_dtype=E4M3, kv_dtype=E4M3, v_scale=1.5, **changes)
    key, value, table = data.pages(16)
    given = data.options(CAUSAL) | dict(return_lse=True)
    if few:
        given["bmm2_scale"] = torch.tensor([1.5], device=device)
    wide_out, wide_lse = context(data, (key, value), table, out_dtype=FP16, **given)
    factor = 3.0
    blocks, first = data.heads * dims[1] // 16, 100
    scales = torch.full((384, -(-blocks // 4) * 4), 7.0, device=device).to(E4M3)
    codes = torch.zeros(data.tokens, data.heads, dims[1] // 2, dtype=torch.uint8, device=device)
    given_out = FP4Tensor(codes, scales, first, data.q.shape)
    out, lse = context(data, (key, value), table, out=given_out, o_sf_scale=factor, **given)
    assert torch.equal(lse, wide_lse)
    assert out.data.data_ptr() == codes.data_ptr()
    assert out.scale_start_index == first
    check_nvfp4_output(out, wide_out, factor)
    rows = torch.arange(384, device=device)
    others = layouts.unswizzle_128x4(out.scale, 384, blocks)[(rows < first) | (rows >= first + data.tokens)]
    assert (others.float() == 7.0).all()
    # Equal to earlier calls, except for the output's place.
    other = FP4Tensor(torch.zeros_like(codes), torch.full_like(scales.float(), 7.0).to(E4M3), first, data.q.shape)
    context(data, (key, value), table, out=other, o_sf_scale=factor, **given)
    assert torch.equal(other.data, out.data)
    assert torch.equal(other.scale.float(), out.scale.float())
    fresh, _ = context(data, (key, value), table, out_dtype="nvfp4", o_sf_scale=factor, **given)
    assert torch.equal(fresh.data, out.data)
    again = layouts.unswizzle_128x4(fresh.scale, data.tokens, blocks)
    assert torch.equal(again.float(), layouts.unswizzle_128x4(out.scale, data.tokens, blocks, first).float())


def with_gaps(scales: torch.Tensor) -> torch.Tensor:
    """Return HND scales 4 bytes off a multiple of 16, with gaps of NaN.

    Gaps are 4 bytes after each row, and a row after each head and page.
    """
    pages, heads, tokens, blocks = scales.shape
    room = torch.full((pages + 1, heads + 1, tokens + 1, blocks + 4), 0x7F, dtype=torch.uint8, device=scales.device)
    view = room[:pages, :heads, :tokens, 4:]
    view.copy_(scales.view(torch.uint8))
    return view.view(E4M3)


@pytest.mark.parametrize("page_size", [4, 16])
def test_strides_of_scales_change_no_bit(page_size: int, device: str) -> None:
    """Scales need only multiples of 4 bytes, as in HND views of NHD storage."""
    data = batch((64, 64), device, q_dtype=E4M3)
    key, value, table = data.pages(page_size)
    dense = data.block_scales(page_size, "interleaved")
    given = data.options(CAUSAL) | dict(out_dtype=BF16)
    out = context(data, (key, value), table, kv_block_scales=dense, **given)
    apart = [with_gaps(part) for part in dense]
    assert all(stride % 16 for part in apart for stride in (part.data_ptr(), *part.stride()[:3]))
    nhd = [part.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2).view(E4M3) for part in dense]
    for scales in (apart, nhd, (dense[0], apart[1]), (nhd[0], dense[1])):
        assert torch.equal(out, context(data, (key, value), table, kv_block_scales=tuple(scales), **given))


def test_scales_off_their_unit_are_refused() -> None:
    data = batch((64, 64), "cpu")
    key, value, table = data.pages(16)
    k_scales, v_scales = data.block_scales(16, "interleaved")
    shifted = torch.zeros(k_scales.numel() + 1, dtype=torch.uint8)[1:].view(k_scales.shape).view(E4M3)
    nhd_caches, nhd_scales = ([part.transpose(1, 2) for part in pair] for pair in ((key, value), (shifted, v_scales)))
    for layout, caches, scales in (("HND", (key, value), (shifted, v_scales)), ("NHD", nhd_caches, nhd_scales)):
        given = dict(kv_layout=layout, kv_block_scales=tuple(scales)) | data.options(CAUSAL)
        with pytest.raises(ValueError, match=r"kv_block_scales\[0\] must begin at a multiple of 4 bytes"):
            context(data, tuple(caches), table, **given)
