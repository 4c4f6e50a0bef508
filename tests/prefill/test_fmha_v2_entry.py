"""``trtllm_fmha_v2_prefill`` in every input layout and with every feature, on the GPU and in the emulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, check_statistics, chunked, window
from helpers.calls.entries import KV_LENS, Q_LENS, fmha_v2
from helpers.cases.prefill_configs import MAIN_DIMS
from helpers.oracles import reference

from hopwell.kernels import execute
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.problem import Mask, Score, ScoreKind

PAIRS = ("pair HND", "pair NHD")
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD", *PAIRS)
ALIBI = Score(ScoreKind.ALIBI)
BF16, FP16 = torch.bfloat16, torch.float16


def soft_cap(cap: float) -> Score:
    return Score.capped(cap)


def batch(layout: str, device: str, **options: Any) -> Batch:
    """Return a batch; packed QKV has equal numbers of keys and queries, and of KV heads and heads."""
    if layout == "PACKED_QKV":
        return Batch(Q_LENS, Q_LENS, 4, 4, device=device, **options)
    return Batch(Q_LENS, KV_LENS, device=device, **options)


def call(data: Batch, layout: str, page_size: int = 16, **options: Any) -> Any:
    """Call the entry with the batch's tensors in a layout."""
    if layout in ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"):
        key, value, _ = data.ragged()
        qkv: Any = (data.q, key, value)
        if layout == "PACKED_QKV":
            qkv = torch.stack(qkv, 1)
        elif layout == "CONTIGUOUS_Q_KV":
            qkv = (data.q, torch.stack((key, value), 1))
        return fmha_v2(data, qkv, layout, **options)
    key, value, table = data.pages(page_size)
    page_layout = layout[-3:]
    if page_layout == "NHD":
        key, value = (pool.transpose(1, 2).contiguous() for pool in (key, value))
    if layout not in PAIRS:
        return fmha_v2(data, (data.q, torch.stack((key, value), 1)), layout, block_tables=table, **options)
    # V's page ids count from K's first page, across the gap. V's pool begins inside the gap, so it has more pages.
    gap = torch.full((5, *key.shape[1:]), math.nan, dtype=data.dtype, device=data.device)
    pool = torch.cat((key, gap, value))
    pages = key.shape[0]
    tables = torch.stack((table, torch.where(table < 0, table, table + pages + 5)), 1)
    pair = (pool[:pages], pool[pages + 2 :])
    return fmha_v2(data, (data.q, pair), f"Q_PAGED_KV_{page_layout}", block_tables=tables, **options)


def log_sum_exp(statistics: torch.Tensor, data: Batch, score: Score, scale: float) -> torch.Tensor:
    """Return the log-sum-exp that FlashInfer's callers rebuild from the statistics.

    [..., 0] is divided by sqrt(head_dim), and does not include the scale for plain logits.
    """
    factor = math.sqrt(data.head_dim) * (scale if score == reference.PLAIN else 1.0)
    return statistics[..., 0] * factor + statistics[..., 1].log()


def named(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the cases under the values of their options."""
    return [pytest.param(*case, id="-".join(map(str, case[0].values()))) for case in cases]


MASKS: list[tuple[dict[str, Any], Mask]] = [
    (dict(mask_mode="causal"), CAUSAL),
    (dict(mask_mode="SLIDING_WINDOW", window_left=40), window(40)),
    (dict(mask_mode="sliding_window", window_left=0), window(0)),
    (dict(mask_mode="sliding_window"), CAUSAL),
    (dict(mask_mode="chunked", chunked_attention_size=32), chunked(32)),
    (dict(mask_mode="chunked"), CAUSAL),
    (dict(mask_mode="padding"), FULL),
]


@pytest.mark.parametrize(("options", "mask"), named(MASKS))
def test_layouts(options: dict[str, Any], mask: Mask, device: str) -> None:
    outs = []
    for layout in LAYOUTS:
        data = batch(layout, device)
        out, statistics = call(data, layout, save_softmax_stats=True, **options)
        expected = data.expected(mask)
        expected.check(out)
        expected.check_lse(log_sum_exp(statistics, data, reference.PLAIN, data.scale))
        unseen = expected.lse == -math.inf
        assert (statistics[..., 1][unseen] == 0).all()
        outs.append(out)
    assert all(torch.equal(outs[1], out) for out in outs[2:]), "where the keys are changes the result"


@pytest.mark.parametrize("layout", LAYOUTS[3:])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_page_sizes(page_size: int, layout: str, device: str) -> None:
    data = batch(layout, device)
    data.expected().check(call(data, layout, page_size))


@pytest.mark.parametrize(
    ("dims", "dtype"), [*((dims, BF16) for dims in TILES), *((dims, FP16) for dims in MAIN_DIMS)], ids=str
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    data = batch("SEPARATE_Q_K_V", device, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    out, statistics = call(data, "SEPARATE_Q_K_V", bmm1_scale=0.11, save_softmax_stats=True)
    data.expected(scale=0.11).check(out)
    check_statistics(statistics, data.expected_statistics(scale=0.11))


FEATURES: list[tuple[dict[str, Any], Mask, Score]] = [
    (dict(logits_soft_cap_scale=2.0), CAUSAL, soft_cap(2.0)),
    (dict(logits_soft_cap_scale=3e5), CAUSAL, soft_cap(3e5)),
    (dict(logits_soft_cap_scale=3e38), CAUSAL, Score()),
    (dict(logits_soft_cap_scale=30.0), CAUSAL, soft_cap(30.0)),
    (dict(logits_soft_cap_scale=2.0, window_left=40), window(40), soft_cap(2.0)),
    (dict(logits_soft_cap_scale=2.0, chunked_attention_size=64), chunked(64), soft_cap(2.0)),
    (dict(logits_soft_cap_scale=2.0, mask_mode="padding"), FULL, soft_cap(2.0)),
    (dict(pos_encoding_mode="ALIBI"), CAUSAL, ALIBI),
    (dict(pos_encoding_mode="alibi", window_left=40), window(40), ALIBI),
    (dict(pos_encoding_mode="alibi", chunked_attention_size=64), chunked(64), ALIBI),
    (dict(pos_encoding_mode="alibi", mask_mode="padding"), FULL, ALIBI),
    (dict(pos_encoding_mode="alibi", logits_soft_cap_scale=2.0), CAUSAL, Score(ScoreKind.CAPPED_ALIBI, 2.0)),
]


@pytest.mark.parametrize("layout", ["CONTIGUOUS_Q_KV", "Q_PAGED_KV_HND"])
@pytest.mark.parametrize(("options", "mask", "score"), named(FEATURES))
def test_scores(options: dict[str, Any], mask: Mask, score: Score, layout: str, device: str) -> None:
    """Sinks and statistics change nothing else; statistics do not include sinks."""
    data, scale = batch(layout, device, magnitude=2.0), 0.11
    sinks = torch.linspace(-3, 3, 4, device=device)
    plain = call(data, layout, bmm1_scale=scale, **options)
    expected = data.expected(mask, scale=scale, score=score)
    expected.check(plain)
    out, statistics = call(data, layout, bmm1_scale=scale, save_softmax_stats=True, sinks=[sinks], **options)
    data.expected(mask, scale=scale, score=score, sinks=sinks).check(out)
    expected.check_lse(log_sum_exp(statistics, data, score, scale))


@pytest.mark.parametrize("heads", [1, 3, 5, 6, 12])
def test_alibi_of_any_number_of_heads(heads: int, device: str) -> None:
    data = Batch([70], [300], heads=heads, kv_heads=1, device=device)
    data.expected(score=ALIBI).check(call(data, "SEPARATE_Q_K_V", pos_encoding_mode="ALIBI"))


@pytest.mark.parametrize("size", [1, 2, 16, 128, 256, 4096])
def test_chunks(size: int, device: str) -> None:
    """Chunks end inside tiles, with tiles, and beyond; queries begin inside a chunk.

    One-hot values count keys, which shows a wrong edge that random values hide.
    """
    data = Batch([130, 3, 9], [300, 250, 4], device=device)
    for k, v in zip(data.k, data.v, strict=True):
        k.fill_(0.5)
        v.zero_()
        index = torch.arange(v.shape[0], device=device)
        v[index, :, index % 128] = 1.0
    exact = data.expected(chunked(size)).out
    for layout in ("SEPARATE_Q_K_V", "Q_PAGED_KV_NHD"):
        out = call(data, layout, chunked_attention_size=size).double()
        assert ((out - exact).abs() <= 2**-8 * exact).all()


SKIPS: list[tuple[dict[str, Any], Mask, Score]] = [
    (dict(mask_mode="causal"), CAUSAL, reference.PLAIN),
    (dict(window_left=400, logits_soft_cap_scale=20.0), window(400), soft_cap(20.0)),
]


@pytest.mark.parametrize("layout", ["SEPARATE_Q_K_V", "Q_PAGED_KV_NHD"])
@pytest.mark.parametrize(("options", "mask", "score"), named(SKIPS))
def test_skip_softmax(options: dict[str, Any], mask: Mask, score: Score, layout: str, device: str) -> None:
    """The entry skips the same number of tiles as its problem, whose tests count them; with a tiny factor it skips
    none.
    """
    data = Batch([130], [700], heads=2, kv_heads=1, magnitude=3.0, device=device)
    data.k[0][:-100] *= 0.02
    factor, count = 20.0, torch.zeros(1, dtype=torch.int32, device=device)
    want = execute(data.problem(None, mask, score=score, skip_softmax=factor, skipped_tiles=count))
    assert int(count) > 0
    out = call(data, layout, skip_softmax_threshold_scale_factor=factor, **options)
    assert torch.equal(out, want)
    assert not torch.equal(out, call(data, layout, **options))
    tiny = call(data, layout, skip_softmax_threshold_scale_factor=1e-30, **options)
    data.expected(mask, score=score).check(tiny)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_scales(dtype: torch.dtype, device: str) -> None:
    """A bmm1_scale of 0 means 1 / sqrt(head_dim), with K's head dim if V has another one."""
    data = batch("SEPARATE_Q_K_V", device, head_dim=192, v_head_dim=128, dtype=dtype)
    sinks = torch.randn(4, device=device)
    default = call(data, "SEPARATE_Q_K_V", bmm1_scale=0, bmm2_scale=0.5, sinks=sinks)
    data.expected(sinks=sinks).check(default, factor=0.5)
    named = call(data, "SEPARATE_Q_K_V", bmm1_scale=192**-0.5, bmm2_scale=0.5, sinks=sinks)
    assert torch.equal(default, named)
    data.expected(scale=0.2).check(call(data, "SEPARATE_Q_K_V", bmm1_scale=0.2))


@pytest.mark.parametrize(("dtype", "other"), [(BF16, "float16"), (FP16, "bfloat16")], ids=str)
def test_outputs(dtype: torch.dtype, other: str, device: str) -> None:
    """An output may have its own strides, and another dtype under its name."""
    data = batch("SEPARATE_Q_K_V", device, dtype=dtype)
    room = torch.full((data.tokens, 5, 136), 7.0, dtype=data.dtype, device=device)
    out = room[:, 1:, :128]
    assert call(data, "SEPARATE_Q_K_V", out=out) is out
    data.expected().check(out)
    assert (room[:, 0] == 7).all()
    assert (room[..., 128:] == 7).all()
    converted = call(data, "SEPARATE_Q_K_V", out_dtype=other)
    out_dtype = getattr(torch, other)
    assert converted.dtype == out_dtype
    data.expected(out_dtype=out_dtype).check(converted)


@pytest.mark.parametrize("layout", ["SEPARATE_Q_K_V", "Q_PAGED_KV_HND"])
def test_bounds_that_are_too_small(layout: str, device: str) -> None:
    """Work is divided by the lengths themselves: every row is correct, and foreign rows do not change."""
    data = batch(layout, device)
    room = torch.full((data.tokens + 64, 4, 128), 7.0, dtype=data.dtype, device=device)
    out = room[: data.tokens]
    for bounds in (dict(max_q_len=4, max_kv_len=5), dict(max_q_len=0, max_kv_len=0)):
        room.fill_(7.0)
        call(data, layout, out=out, **bounds)
        data.expected().check(out)
        assert (room[data.tokens :] == 7).all()
