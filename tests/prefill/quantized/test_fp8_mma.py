"""Prefill with queries, keys and values in e4m3, against float64 on the same values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import LOGIT_ERROR, WHOLE_ERROR, Fp8Batch
from helpers.batches.prefill import CAUSAL, FULL, LN_2, chunked, starts, window
from helpers.calls.entries import context, cudnn, elements, fmha_v2
from helpers.cases.prefill import E4M3_CASES, E4M3_EMULATED
from helpers.oracles import reference
from helpers.oracles.skipped_tiles import attention_with_skips

from hopwell.kernels import execute, support
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import AttentionProblem, Mask, PageTable, Score, ScoreKind
from hopwell.kernels.registry import resolve
from hopwell.kernels.sm90.prefill.fp8_promotion import PROMOTION_STEPS

FP8, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
# Two have steps of 128 keys, with K as wide as V or wider. The third promotes its sums, in steps of 192 keys.
STEPS = pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=str)


def batch(dims: tuple[int, int], device: str, **changes: Any) -> Fp8Batch:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries."""
    lengths = dict(q_lens=[130, 0, 5, 7], kv_lens=[265, 3, 0, 4]) | changes
    return Fp8Batch(heads=4, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], device=device, **lengths)


def check(dims: tuple[int, int], page_size: int | None, mask: Mask, out_dtype: torch.dtype, device: str) -> None:
    data = batch(dims, device)
    problem = data.in_fp8(page_size, mask, out_dtype, lse=data.ragged_lse())
    data.check_fp8(execute(problem), mask)
    assert problem.lse is not None
    want = data.expected(mask).lse
    finite = want.isfinite()
    assert torch.equal(problem.lse.tensor.isfinite(), finite)
    assert ((problem.lse.tensor.double() - want)[finite].abs() <= LOGIT_ERROR).all()


@pytest.mark.gpu
@pytest.mark.parametrize("case", E4M3_CASES, ids=str)
def test_within_the_error_of_weights(case: tuple) -> None:
    check(*case, device="cuda")


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "case"), E4M3_EMULATED, ids=str)
def test_within_the_error_of_weights_emulated(arch: str, case: tuple) -> None:
    from hopwell import emulator

    with emulator.use(arch, race=True, proxy=True, strict=True, schedule="random", seed=3):
        check(*case, device="cpu")


def step_of(problem: AttentionProblem) -> int:
    """Return the keys of a step of the problem's kernel."""
    return resolve(problem, support.arch_of(problem.query.device)).tile.n


@STEPS
@pytest.mark.parametrize("place", [(0, 60), (2, 44), (4, 1)], ids=str)
def test_tails_keep_their_weight(dims: tuple[int, int], place: tuple[int, int], device: str) -> None:
    """One key has 2^20 times the weight of all others, and the value 0, so the output is the sum of keys in other
    tiles.

    The sum is correct to four bits for tiles visited before or after. Relative to the largest weight of all, e4m3 would
    round each of their weights to 0.
    """
    n = step_of(batch(dims, device, q_lens=[3], kv_lens=[515]).in_fp8(None, FULL, BF16))
    keys, (tile, key) = 4 * n + 3, (place[0], place[1] % n)
    data = batch(dims, device, q_lens=[3], kv_lens=[keys])
    data.q[:] = 0.0
    data.q[..., 0] = 1.0
    data.k[0][:] = 0.0
    data.k[0][tile * n + key, :, 0] = 1.0
    others = torch.arange(keys, device=device) // n != tile
    data.v[0][:] = others[:, None, None].to(data.dtype)
    out = execute(data.in_fp8(None, FULL, BF16, softmax_scale=20 * LN_2)).double()
    exact = int(others.sum()) * 2.0**-20 / (1 + (keys - 1) * 2.0**-20)
    assert ((out - exact).abs() <= exact * 2.0**-7).all()


def test_uniform_weights_and_far_sinks(device: str) -> None:
    """The scale is zero, and sinks leave nothing or change nothing.

    Head dims fill neither a row of shared memory nor an operand, in pages smaller than a box.
    """
    data = batch((80, 80), device)
    hides_late = window(20)  # hides the last key tile that their warpgroup visits from most rows
    data.check_fp8(execute(data.in_fp8(4, hides_late, BF16, softmax_scale=0.0)), hides_late, scale=0.0)
    sinks = torch.tensor([-3000.0, 3000.0, 5.0, 50.0], device=device)
    problem = data.in_fp8(4, CAUSAL, BF16, sinks=sinks, lse=data.ragged_lse())
    data.check_fp8(execute(problem), CAUSAL, sinks=sinks)
    assert problem.lse is not None
    want = data.expected(CAUSAL, sinks=sinks).lse
    assert ((problem.lse.tensor.double() - want).abs() <= LOGIT_ERROR * (1 + want.abs() * 2.0**-10)).all()


def test_tiles_far_below_and_out_of_sight(device: str) -> None:
    """Logits of every other tile are hundreds below the others; keys hidden by a window are NaN and change no bit."""
    data = batch((64, 64), device, q_lens=[3, 70], kv_lens=[650, 420])
    data.q = data.q.abs()
    for k in data.k:
        below = torch.arange(k.shape[0], device=device) // 128 % 2 == 1
        k[below] = -8 * k[below].abs()
    data.check_fp8(execute(data.in_fp8(None, FULL, BF16, softmax_scale=1.0)), FULL, scale=1.0)
    data.check_fp8(execute(data.in_fp8(4, window(300), FP8)), window(300))
    hidden = data.in_fp8(4, window(70), FP8)
    out = execute(hidden)
    for k, v, q_len in zip(data.k, data.v, data.q_lens, strict=True):
        k[: k.shape[0] - q_len - 70] = v[: v.shape[0] - q_len - 70] = math.nan
    assert torch.equal(execute(data.in_fp8(4, window(70), FP8)), out)


def test_skip_softmax_leaves_tiles_out(device: str) -> None:
    """Kernels skip the same tiles as with 16-bit operands, and the output is the result without them."""
    data = batch((128, 128), device, q_lens=[192, 64], kv_lens=[900, 700], magnitude=2.0)
    for k in data.k:
        k[torch.arange(k.shape[0], device=device) % 300 < 200] *= 2.0**-6  # all keys of the last tile visited
        k[:] = k.to(FP8).to(data.dtype)
    for factor in (1e-6, 100.0):
        count = torch.zeros(1, dtype=torch.int32, device=device)
        problem = data.in_fp8(16, CAUSAL, BF16, skip_softmax=factor, skipped_tiles=count)
        out = execute(problem).double()
        want, skipped = attention_with_skips(data, factor, CAUSAL, reference.PLAIN, n_keys=step_of(problem))
        assert int(count) == skipped
        assert (skipped > 0) == (factor > 1)
        assert (out - want).norm() <= 0.03 * want.norm()


def test_large_logits_and_equal_keys(device: str) -> None:
    """Large logits choose a few keys. Equal keys give the mean of visible values, which shows each key's place."""
    data = batch((128, 128), device, q_lens=[70], kv_lens=[130], magnitude=4.0)
    data.check_fp8(execute(data.in_fp8(16, CAUSAL, BF16)), CAUSAL)
    data.k[0][:] = 1.0
    data.v[0][:] = 0.0
    data.v[0][torch.arange(128), :, torch.arange(128)] = 1.0  # key i has its value in column i
    out = execute(data.in_fp8(16, CAUSAL, BF16)).double()
    position = torch.arange(70, device=device) + 60
    seen = (torch.arange(128, device=device)[None] <= position[:, None]).double()
    assert ((out - (seen / (position[:, None] + 1))[:, None]).abs() <= 2.0**-8 / 60).all()


def test_long_sums(device: str) -> None:
    """Sums of products are promoted to float32 several times, from keys far below their neighbours.

    A window hides the last of these keys from some rows. Requests in a batch and heads in a tile change no bit.
    """
    n = PrefillConfig.tile_of((128, 128), uses_fp8_mma=True).n
    length = (2 * PROMOTION_STEPS + 3) * n - 5
    data = batch((128, 128), device, q_lens=[4, 1], kv_lens=[length, n])
    data.q = data.q.abs()
    data.k[0][:] = data.k[0].abs() * (torch.arange(length, device=device) // (5 * n) % 2 * 2 - 1)[:, None, None]
    for mask in (CAUSAL, window(length - n)):
        problem = data.in_fp8(None, mask, BF16, lse=data.ragged_lse())
        out = execute(problem)
        data.check_fp8(out, mask)
        assert problem.lse is not None
        assert ((problem.lse.tensor.double() - data.expected(mask).lse).abs() <= LOGIT_ERROR * 4).all()
    one = Fp8Batch.request(data, 0)
    assert torch.equal(execute(Fp8Batch.in_fp8(one, 64, mask, BF16)), out[:4])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (192, 128), (256, 256)], ids=str)
def test_error_does_not_grow_with_keys(dims: tuple[int, int]) -> None:
    """fp8 MMA sums products with 13 to 14 bits of mantissa until promotion."""
    errors = {}
    for keys in (4096, 131_072):
        data = batch(dims, "cuda", q_lens=[64], kv_lens=[keys])
        exact = data.expected(CAUSAL).out
        errors[keys] = float((execute(data.in_fp8(64, CAUSAL, BF16)).double() - exact).norm() / exact.norm())
    print(errors)
    assert errors[131_072] <= 1.2 * errors[4096]
    if dims == (128, 128):
        assert max(errors.values()) <= WHOLE_ERROR


@STEPS
def test_equal_keys_at_the_edges_of_tiles(dims: tuple[int, int], device: str) -> None:
    """Logits of these keys are hundreds below all others, and are the only ones of rows that see no other key."""
    n = step_of(batch(dims, device).in_fp8(16, CAUSAL, BF16))
    data = batch(dims, device, q_lens=[2 * n + 14], kv_lens=[2 * n + 14])
    data.q[:] = 16.0
    for k in data.k:
        place = torch.arange(len(k), device=device) % n
        k[(place == 0) | (place == n - 1)] = -7.0
    data.check_fp8(execute(data.in_fp8(16, CAUSAL, BF16)), CAUSAL)
    data.check_fp8(execute(data.in_fp8(16, window(0), BF16)), window(0))


def test_places_of_pages_and_requests_change_no_bit(device: str) -> None:
    data = batch((128, 128), device)
    problem = data.in_fp8(16, CAUSAL, FP8)
    out = execute(problem)
    key, value, table = data.pages(16, order=5)
    moved = replace(problem, key=key.to(FP8), value=value.to(FP8), page_table=PageTable(table, table))
    assert torch.equal(execute(replace(moved, out=torch.zeros_like(out))), out)
    for index, begin in enumerate(starts(data.q_lens)[:-1]):
        one = Fp8Batch.request(data, index)
        alone = execute(Fp8Batch.in_fp8(one, 16, CAUSAL, FP8)) if data.q_lens[index] else out[:0]
        assert torch.equal(alone, out[begin : begin + data.q_lens[index]])


@pytest.mark.parametrize("few", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("out_dtype", [BF16, FP8], ids=["bf16", "fp8"])
def test_context_entry(device: str, few: bool, out_dtype: torch.dtype) -> None:
    """Scales, sinks, skip-softmax without skipped tiles, forms of the cache and of its tables; packed heads for few
    queries.

    Kernels with skip-softmax have steps of 160 keys instead of 192, and so other roundings of P.
    """
    changes = dict(q_lens=[3, 1, 2], kv_lens=[300, 1, 70]) if few else {}
    data = batch((128, 128), device, **changes)
    key, value, table = data.pages(16)
    pair = (key.to(FP8), value.to(FP8))
    stacked = torch.stack([cache.view(torch.uint8) for cache in pair], 1).view(FP8)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device)
    wide, data.q = data.q, data.q.to(FP8)
    options = dict(sinks=sinks, out_dtype=out_dtype, bmm1_scale=0.07, bmm2_scale=0.5)
    out = context(data, pair, table, **options)
    assert out.dtype == out_dtype
    assert torch.equal(out, context(data, stacked, table, **options))
    nhd = tuple(cache.transpose(1, 2).contiguous() for cache in pair)
    assert torch.equal(out, context(data, nhd, table, kv_layout="NHD", **options))
    _, moved, moved_table = data.pages(16, order=5)
    apart = torch.stack((table, moved_table), 1), dict(uses_shared_paged_kv_idx=False)
    assert torch.equal(out, context(data, (pair[0], moved.to(FP8)), apart[0], **apart[1], **options))
    all_tiles = context(data, pair, table, skip_softmax_threshold_scale_factor=1e-30, **options)
    assert (all_tiles.double() - out.double()).norm() <= 0.06 * out.double().norm()  # twice the allowed error of each
    scales = {name: torch.tensor(options[name], device=device) for name in ("bmm1_scale", "bmm2_scale")}
    assert torch.equal(out, context(data, pair, table, **options | scales))
    data.q = wide
    data.check_fp8(out, CAUSAL, factor=0.5, scale=0.07, sinks=sinks)


def test_output_saturates(device: str) -> None:
    data = batch((64, 64), device, q_lens=[3], kv_lens=[20])
    key, value, table = data.pages(4)
    data.q = data.q.to(FP8)
    out = context(data, (key.to(FP8), value.to(FP8)), table, bmm2_scale=1e4).float()
    assert not out.isnan().any()
    assert out.abs().max() == torch.finfo(FP8).max


def fmha_v2_inputs(data: Fp8Batch, layout: str) -> tuple[Any, dict[str, Any]]:
    """Return the tensors of a layout in e4m3, and the page table for paged layouts."""
    q = data.q.to(FP8)
    if layout == "Q_PAGED_KV_HND":
        *pages, table = data.pages(16)
        pool = torch.stack([part.to(FP8).view(torch.uint8) for part in pages], 1).view(FP8)
        return (q, pool), dict(block_tables=table)
    key, value = (part.to(FP8) for part in data.ragged()[:2])
    if layout == "SEPARATE_Q_K_V":
        return (q, key, value), {}
    return torch.stack([part.view(torch.uint8) for part in (q, key, value)], 1).view(FP8), {}


@pytest.mark.parametrize(
    ("dim", "layout", "options"),
    [
        (64, "SEPARATE_Q_K_V", dict(logits_soft_cap_scale=5.0, sinks=True)),
        (64, "SEPARATE_Q_K_V", dict(pos_encoding_mode="ALIBI")),
        (64, "SEPARATE_Q_K_V", dict(window_left=33, save_softmax_stats=True)),
        (64, "SEPARATE_Q_K_V", dict(chunked_attention_size=64)),
        (128, "Q_PAGED_KV_HND", dict(logits_soft_cap_scale=5.0, sinks=True)),
        (128, "PACKED_QKV", dict(pos_encoding_mode="ALIBI", window_left=33)),
    ],
    ids=["soft_cap", "alibi", "window", "chunked", "paged-soft_cap", "packed-alibi-window"],
)
def test_fmha_v2_entry(device: str, dim: int, layout: str, options: dict[str, Any]) -> None:
    """Packed QKV has equal numbers of keys and queries, and of their heads."""
    lengths = dict(q_lens=[70, 5], kv_lens=[130, 5])
    if layout == "PACKED_QKV":
        lengths |= dict(q_lens=[130, 5])
    kv_heads = 4 if layout == "PACKED_QKV" else 2
    data = Fp8Batch(heads=4, kv_heads=kv_heads, head_dim=dim, v_head_dim=dim, device=device, **lengths)
    inputs, tables = fmha_v2_inputs(data, layout)
    wide, data.q = data.q, data.q.to(FP8)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device) if "sinks" in options else None
    mask = CAUSAL
    if "window_left" in options:
        mask = window(options["window_left"])
    if "chunked_attention_size" in options:
        mask = chunked(options["chunked_attention_size"])
    score = reference.PLAIN
    if "pos_encoding_mode" in options:
        score = Score(ScoreKind.ALIBI)
    if "logits_soft_cap_scale" in options:
        score = Score(ScoreKind.SOFT_CAP, options["logits_soft_cap_scale"])
    result = fmha_v2(data, inputs, layout, out_dtype=BF16, **options | tables | dict(sinks=sinks))
    out, statistics = result if "save_softmax_stats" in options else (result, None)
    data.q = wide
    data.check_fp8(out, mask, sinks=sinks, score=score)
    if statistics is not None:
        want = data.expected_statistics(mask)
        assert torch.allclose(statistics.double(), want, rtol=LOGIT_ERROR, atol=LOGIT_ERROR)


def test_fmha_v2_layouts_give_the_same_bits(device: str) -> None:
    """Inputs are packed QKV, contiguous Q and KV, and separate tensors; the output is e4m3 by default."""
    data = Fp8Batch([70, 5], [70, 5], heads=2, kv_heads=2, head_dim=64, device=device)
    key, value, _ = data.ragged()
    data.q, key, value = (tensor.to(FP8).view(torch.uint8) for tensor in (data.q, key, value))
    packed, contiguous = torch.stack((data.q, key, value), 1).view(FP8), torch.stack((key, value), 1).view(FP8)
    data.q, key, value = (tensor.view(FP8) for tensor in (data.q, key, value))
    out = fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V")
    assert out.dtype == FP8
    assert torch.equal(out, fmha_v2(data, packed, "PACKED_QKV"))
    assert torch.equal(out, fmha_v2(data, (data.q, contiguous), "CONTIGUOUS_Q_KV"))
    pages, values, table = data.pages(16)
    pool = torch.stack((pages.to(FP8).view(torch.uint8), values.to(FP8).view(torch.uint8)), 1)
    for layout, stored in (("HND", pool), ("NHD", pool.transpose(2, 3).contiguous())):
        paged = fmha_v2(data, (data.q, stored.view(FP8)), f"Q_PAGED_KV_{layout}", block_tables=table)
        assert torch.equal(out, paged)


def test_fmha_v2_outputs_and_skip_softmax(device: str) -> None:
    """All output types come from the same sums; a threshold without skipped tiles keeps the error of
    rounded weights.
    """
    data = batch((64, 64), device, q_lens=[70, 5], kv_lens=[130, 5])
    key, value, _ = data.ragged()
    wide, data.q = data.q, data.q.to(FP8)
    tensors = data.q, key.to(FP8), value.to(FP8)
    half, brain = (fmha_v2(data, tensors, "SEPARATE_Q_K_V", out_dtype=dtype) for dtype in (FP16, BF16))
    narrow = fmha_v2(data, tensors, "SEPARATE_Q_K_V")
    all_tiles = fmha_v2(data, tensors, "SEPARATE_Q_K_V", out_dtype=FP16, skip_softmax_threshold_scale_factor=1e-30)
    data.q = wide
    for out in (half, brain, narrow, all_tiles):
        data.check_fp8(out, CAUSAL)
    assert (half.double() - brain.double()).abs().max() <= 2.0**-8 * half.abs().max()


def test_cudnn_entry(device: str) -> None:
    """The entry takes separate scales of q, k and v, and has a 16-bit output."""
    data = batch((128, 128), device)
    key, value, table = data.pages(16)
    wide, data.q = data.q, data.q.to(FP8)
    scales = dict(q_scale=1.5, k_scale=0.25, v_scale=3.0)
    tensors = {name: torch.tensor([scale], device=device) for name, scale in scales.items()}
    out, lse = cudnn(data, key.to(FP8), value.to(FP8), block_tables=table, o_data_type=BF16, lse_base="ln", **tensors)
    data.q = wide
    data.check_fp8(out, CAUSAL, factor=3.0, scale=data.scale * 0.375)
    want = data.expected(CAUSAL, scale=data.scale * 0.375).lse
    begins = starts(data.q_lens)
    for index, begin in enumerate(begins[:-1]):
        rows = want[begin : begins[index + 1]]
        assert torch.allclose(lse[index, : rows.shape[0]].double(), rows, atol=LOGIT_ERROR)


@pytest.mark.parametrize("out_dtype", [FP16, FP8], ids=str)
def test_cudnn_entry_over_ragged_keys(device: str, out_dtype: torch.dtype) -> None:
    """Offsets count elements of any type; the gaps between requests are NaN."""
    data = batch((128, 128), device)
    (key, _, k_begins), (_, value, v_begins) = data.ragged(gap=2), data.ragged(gap=5)
    offsets = {
        f"batch_offsets_{name}": elements(data, begins, data.kv_heads * 128)
        for name, begins in (("k", k_begins), ("v", v_begins))
    }
    wide, data.q = data.q, data.q.to(FP8)
    out, _ = cudnn(data, key.to(FP8), value.to(FP8), o_data_type=out_dtype, **offsets)
    assert out.dtype == out_dtype
    data.q = wide
    data.check_fp8(out, CAUSAL)
