"""Features of the entry points beyond masks and caches: chunks, scores, statistics, odd head dims."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, check_statistics, chunked, window
from helpers.cases.prefill_configs import MAIN_DIMS

from hopwell.kernels import execute
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.problem import Mask, Score, ScoreKind

pytestmark = pytest.mark.gpu

ODD_DIMS = tuple(dims for dims in TILES if dims not in MAIN_DIMS)
SCORES = (Score(ScoreKind.SOFT_CAP, 1.5), Score(ScoreKind.SOFT_CAP, 50.0), Score(ScoreKind.ALIBI))
Q_LENS, KV_LENS = [37, 130, 0, 9, 257], [90, 300, 7, 4, 700]


def batch(**changes: object) -> Batch:
    return Batch(Q_LENS, KV_LENS, **changes)  # type: ignore[arg-type]


def name(value: object) -> str | None:
    if isinstance(value, Score):
        return value.kind.value + (f"{value.soft_cap:g}" if value.soft_cap else "")
    if isinstance(value, Mask):
        return value.kind.value + (str(value.chunk) if value.chunk else "")
    return f"{value[0]}-{value[1]}" if isinstance(value, tuple) else None


@pytest.mark.parametrize("page_size", [None, 2, 16, 64])
@pytest.mark.parametrize("size", [1 << i for i in range(0, 12)])
def test_chunks(size: int, page_size: int | None) -> None:
    """One-hot values show a wrong chunk edge that random values hide."""
    data = batch()
    for k, v in zip(data.k, data.v, strict=True):
        k.fill_(0.5)
        v.zero_()
        index = torch.arange(v.shape[0], device=v.device)
        v[index, :, index % 128] = 1.0
    out = execute(data.problem(page_size, chunked(size))).double()
    exact = data.expected(chunked(size)).out
    assert ((out - exact).abs() <= 2**-8 * exact).all()
    random = batch(seed=1)
    random.expected(chunked(size)).check(execute(random.problem(page_size, chunked(size))))


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(40), chunked(64)], ids=name)
@pytest.mark.parametrize("score", SCORES, ids=name)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=name)
def test_scores(dims: tuple[int, int], score: Score, mask: Mask) -> None:
    data = batch(head_dim=dims[0], v_head_dim=dims[1], heads=6, kv_heads=3, magnitude=2.0)
    for page_size in (None, 16):
        sinks = torch.linspace(-3, 3, 6, device="cuda")
        problem = data.problem(page_size, mask, score=score, sinks=sinks)
        data.expected(mask, score=score, sinks=sinks).check(execute(problem))


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 20])
def test_alibi_slopes_of_any_number_of_heads(heads: int) -> None:
    data = Batch([70], [1500], heads=heads, kv_heads=1)
    score = Score(ScoreKind.ALIBI)
    data.expected(score=score).check(execute(data.problem(None, score=score)))


@pytest.mark.parametrize("page_size", [None, 1, 8, 128])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(127), chunked(128)], ids=name)
@pytest.mark.parametrize("dims", ODD_DIMS, ids=name)
def test_odd_head_dims(dims: tuple[int, int], mask: Mask, page_size: int | None) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        data = batch(head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
        lse = data.ragged_lse()
        out = execute(data.problem(page_size, mask, lse=lse))
        expected = data.expected(mask)
        expected.check(out)
        expected.check_lse(lse.tensor)


@pytest.mark.parametrize("dims", ODD_DIMS, ids=name)
def test_odd_head_dims_with_strides(dims: tuple[int, int]) -> None:
    """Memory between the heads is neither read into a result nor written."""
    data = batch(head_dim=dims[0], v_head_dim=dims[1])
    before = execute(data.problem(None))
    wide = torch.full((data.tokens, 4, dims[0] + 8), math.nan, dtype=data.dtype, device="cuda")
    wide[..., : dims[0]] = data.q
    out = torch.full((data.tokens, 4, dims[1] + 8), 7.0, dtype=data.dtype, device="cuda")
    problem = data.problem(None, query=wide[..., : dims[0]], out=out[..., : dims[1]])
    for name_ in ("key", "value"):
        cache = getattr(problem, name_)
        padded = torch.full((*cache.shape[:3], cache.shape[3] + 8), math.nan, dtype=data.dtype, device="cuda")
        padded[..., : cache.shape[3]] = cache
        problem = replace(problem, **{name_: padded[..., : cache.shape[3]]})
    assert torch.equal(before, execute(problem))
    assert (out[..., dims[1] :] == 7).all()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(40), chunked(64)], ids=name)
@pytest.mark.parametrize("score", [Score(), *SCORES], ids=name)
@pytest.mark.parametrize(
    ("dims", "page_size"), [((128, 128), 16), ((64, 64), None), ((192, 128), None)], ids=["pages", "narrow", "uneven"]
)
def test_statistics(dims: tuple[int, int], page_size: int | None, score: Score, mask: Mask) -> None:
    """The largest logit is the row's own maximum, not the reference of the softmax."""
    data = batch(head_dim=dims[0], v_head_dim=dims[1], magnitude=2.0, heads=6, kv_heads=3)
    statistics = data.statistics()
    execute(data.problem(page_size, mask, score=score, softmax_scale=0.11, statistics=statistics))
    check_statistics(statistics, data.expected_statistics(mask, scale=0.11, score=score))
