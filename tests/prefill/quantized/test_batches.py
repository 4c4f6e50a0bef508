"""Checks the e4m3 and NVFP4 batches that other tests are built from."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.batches.fp8 import Fp8Batch
from helpers.batches.low_precision import (
    BF16,
    E4M3,
    LN_2,
    NVFP4,
    LowPrecisionBatch,
    at_tile_edges,
    check_nvfp4_near,
    light_weights,
    octets,
    rising,
    with_scores,
)
from helpers.batches.prefill import CAUSAL, FULL, starts

from hopwell import FP4Tensor, layouts

PAGE = 16


def batch(**changes: object) -> LowPrecisionBatch:
    options = dict(q_lens=[5, 0, 7, 3], kv_lens=[37, 3, 0, 2], heads=4, kv_heads=2, head_dim=64, device="cpu")
    return LowPrecisionBatch(**(options | changes))  # type: ignore[arg-type]


def unpaged(pool: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Return a request's tokens [kv_len, kv_heads, width], after a check that the rest of its last page is poison."""
    pages = octets(pool)[table[: -(-length // PAGE)].long()]
    rows = pages.transpose(1, 2).flatten(0, 1)
    return rows[:length].contiguous().view(pool.dtype)


@pytest.mark.parametrize("q_dtype", [E4M3, BF16])
def test_e4m3_pages_hold_what_the_oracle_sees(q_dtype: torch.dtype) -> None:
    data = batch(q_dtype=q_dtype, v_head_dim=128)
    key, value, table = data.pages(PAGE)
    assert (data.q.dtype, key.dtype, value.shape[3]) == (q_dtype, E4M3, 128)
    for pool, tokens in ((key, data.k), (value, data.v)):
        for ids, request in zip(table, tokens, strict=True):
            assert torch.equal(unpaged(pool, ids, len(request)).double(), request)
        assert int((~pool.double().isnan()).sum()) == sum(request.numel() for request in tokens)
    assert (table == -1).any(1).all()
    again = data.pages(PAGE, order=5)
    assert not torch.equal(again[2], table)


@pytest.mark.parametrize("order", ["linear", "interleaved"])
def test_nvfp4_pages_hold_what_the_oracle_sees(order: str) -> None:
    data = batch(kv_dtype=NVFP4, v_head_dim=128)
    key, value, table = data.pages(PAGE)
    key_scales, value_scales = data.block_scales(PAGE, order)
    if order == "interleaved":
        value_scales = layouts.deinterleave_v_scales(value_scales, "HND")
    for pool, scales, tokens in ((key, key_scales, data.k), (value, value_scales, data.v)):
        for ids, request in zip(table, tokens, strict=True):
            codes, factors = (unpaged(part, ids, len(request)) for part in (pool, scales))
            assert torch.equal(layouts.dequantize_nvfp4(codes, factors).double(), request)
        # All other block scales are NaN, and other codes -6.
        assert int((~scales.float().isnan()).sum()) == sum(request.numel() for request in tokens) // 16
        assert int((pool == 0xFF).sum()) >= pool.numel() - sum(request.numel() for request in tokens) // 2


def test_ragged_e4m3() -> None:
    data = batch()
    key, _, begins = data.ragged(gap=3)
    for begin, request in zip(begins, data.k, strict=False):
        assert torch.equal(key[begin : begin + len(request)].double(), request)
        assert key[begin - 3 : begin].double().isnan().all()


def test_the_oracle_counts_every_scale() -> None:
    """Scales of whole tensors have the effect of queries, keys and values multiplied by them."""
    data = batch(q_scale=0.5, k_scale=2.5, v_scale=3.0)
    want = data.expected_low(CAUSAL)
    for i, (q, k, v, seen) in enumerate(data.requests(CAUSAL)):
        q, k, v = q.double() * 0.5, k * 2.5, v * 3.0
        if not q.shape[0]:
            continue
        scores = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (2, 2)), k) / 8.0
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        out = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
        begin, end = starts(data.q_lens)[i : i + 2]
        assert torch.allclose(want.out[begin:end], out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1.0, 1.0, 4)], ids=["plain", "sinks"])
@pytest.mark.parametrize("q_dtype", [E4M3, BF16])
def test_a_check_takes_rounding_and_nothing_more(q_dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    data = batch(q_dtype=q_dtype)
    want = data.expected_low(CAUSAL, sinks=sinks)
    want.check(want.out.bfloat16())
    want.check(want.rounded.bfloat16(), most=4e-2)
    wrong = data.expected_low(FULL, sinks=sinks).out.bfloat16()
    with pytest.raises(AssertionError):
        want.check(wrong)
    with pytest.raises(AssertionError, match="rows hold NaN"):
        want.check(torch.full_like(wrong, math.nan))
    with pytest.raises(AssertionError, match="error"):
        want.check(want.rounded.bfloat16() * 1.5)


def test_nvfp4_outputs_are_near_the_expected_ones() -> None:
    """One element, one block or the whole may be off."""
    exact = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, scales = layouts.quantize_nvfp4_output(exact.float(), 4.0)

    def check(codes: torch.Tensor, expected: torch.Tensor = exact) -> None:
        check_nvfp4_near(FP4Tensor(codes, scales), expected, 4.0, error=2.0**-7)

    check(codes)
    element, block = codes.clone(), codes.clone()
    element[1, 1, 3] = 0x77  # the largest
    block[1, 1, :8] = codes[1, 1, 8:16]
    for wrong in ((element,), (block,), (codes, exact * 1.2)):
        with pytest.raises(AssertionError, match="off"):
            check(*wrong)


def test_the_log_sum_exp_of_e4m3_is_checked() -> None:
    data = Fp8Batch([5, 0, 7, 3], [37, 3, 0, 2], heads=4, kv_heads=2, head_dim=64, device="cpu")
    lse = data.expected(CAUSAL).lse.float()
    data.check_fp8_lse(lse, CAUSAL)
    for row in (0, 6):  # a row with keys, and one without
        wrong = lse.clone()
        wrong[row, 3] = wrong[row, 3].clamp(min=0) + 0.01
        with pytest.raises(AssertionError):
            data.check_fp8_lse(wrong, CAUSAL)


def test_light_weights_matter() -> None:
    """The heavy key's value is 0, so the result consists of the light keys alone.

    Rounding that scales weights first keeps them.
    """
    data = batch(q_lens=[2], kv_lens=[4097], heads=2, kv_heads=1)
    values = data.v[0].abs() + 1
    values[4000] = 0.0
    data.store(data.k, [values])
    data = with_scores(data, [light_weights(4097, gap=12, at=4000)])
    want = data.expected_low(FULL)
    assert torch.allclose(want.lse, torch.full_like(want.lse, math.log(2.0**12 + 4096)))
    assert torch.allclose(want.out, data.v[0].sum(0).expand_as(want.out) / (2.0**12 + 4096))
    want.check(want.rounded.bfloat16())
    lost = torch.tensor(2.0**-12).to(E4M3).double() * want.out
    with pytest.raises(AssertionError, match="error 1"):
        want.check(lost.bfloat16())


@pytest.mark.parametrize("kv_dtype", [E4M3, NVFP4, BF16])
@pytest.mark.parametrize("to_the_left", [False, True])
def test_scores_rise_from_tile_to_tile(kv_dtype: torch.dtype, to_the_left: bool) -> None:
    scores = rising(40, 16, 6.0, to_the_left=to_the_left)
    assert scores.unique().tolist() == [0.0, 6.0, 12.0]
    assert scores[0] == (12.0 if to_the_left else 0.0)
    data = with_scores(
        batch(q_lens=[1], kv_lens=[40], kv_dtype=kv_dtype, q_scale=2.0, k_scale=0.25), [scores]
    )  # all formats represent these numbers exactly
    assert data.bmm1_scale == pytest.approx(LN_2)
    logits = data.q.double()[0, 0] @ data.k[0][:, 0].T * data.bmm1_scale / LN_2
    assert torch.allclose(logits, scores.double())


def test_edges_of_tiles() -> None:
    data = at_tile_edges(batch(q_lens=[20], kv_lens=[20]), 16)
    assert (data.q.float() == 16).all()
    assert [i for i in range(20) if (data.k[0][i] == -7).all()] == [0, 15, 16]
    want = data.expected_low(CAUSAL)
    assert torch.allclose(want.out[0], data.v[0][0].repeat_interleave(2, 0)), "row 0 sees the first key alone"
