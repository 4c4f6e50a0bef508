"""What the entry points offer beyond masks and caches: chunks, scores, statistics, skipped tiles, odd head dims."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import reference
import torch
from batches import CAUSAL, FULL, Batch, chunked, starts, window
from config_cases import MAIN_DIMS

from hopwell.kernels import execute
from hopwell.kernels.config import TILES
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
    """One-hot values show a wrong chunk edge that random ones hide."""
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
    """What lies between the heads is neither read into a result nor written."""
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
def test_statistics(score: Score, mask: Mask) -> None:
    """The largest logit is that of the row, not the reference that the softmax happens to use."""
    data = batch(magnitude=2.0, heads=6, kv_heads=3)
    statistics = torch.full((data.tokens, 6, 2), math.nan, device="cuda")
    scale = 0.11
    execute(data.problem(16, mask, score=score, softmax_scale=scale, statistics=statistics))
    unscaled = 1.0 if score.kind is ScoreKind.SCALED else scale
    for index, begin in enumerate(starts(Q_LENS)[:-1]):
        rows = slice(begin, begin + Q_LENS[index])
        seen = reference.visible(Q_LENS[index], KV_LENS[index], mask, data.q.device)
        logits = reference.logits(data.q[rows], data.k[index], scale, score).masked_fill(~seen, -math.inf)
        stored = reference.logits(data.q[rows], data.k[index], unscaled, score).masked_fill(~seen, -math.inf)
        largest = stored.amax(2).T / math.sqrt(128)
        total = torch.exp(logits - logits.amax(2, keepdim=True)).nan_to_num(0.0).sum(2).T
        got = statistics[rows].double()
        assert torch.equal(got[..., 0] == -math.inf, largest == -math.inf)
        finite = largest > -math.inf
        assert ((got[..., 0] - largest).abs() <= 1e-5 * (1 + largest.abs()))[finite].all()
        assert ((got[..., 1] - total).abs() <= 1e-4 * total)[finite].all()
        assert (got[..., 1][~finite] == 0).all()


def skippable(data: Batch) -> None:
    """Make most keys of each request matter little: a row's largest logits are those of the last keys."""
    for k in data.k:
        k[: k.shape[0] - 100] *= 0.02


def reference_with_skips(data: Batch, factor: float, tile_n: int) -> tuple[torch.Tensor, int]:
    """Causal attention that leaves out the tiles that the rule leaves out: from the last keys to the first, for 64 rows
    at a time."""
    outs, skipped = [], 0
    for index, begin in enumerate(starts(data.q_lens)[:-1]):
        q_len, kv_len = data.q_lens[index], data.kv_lens[index]
        q, k, v = data.q[begin : begin + q_len], data.k[index], data.v[index]
        values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(0, 1)
        seen = reference.visible(q_len, kv_len, CAUSAL, q.device)
        logits = reference.logits(q, k, data.scale, Score()).masked_fill(~seen, -math.inf)
        for first in range(0, q_len, 64):
            rows = slice(first, min(first + 64, q_len))
            tile_rows = slice(first // 128 * 128, min(first // 128 * 128 + 128, q_len))
            last = -(-int(seen[tile_rows].sum(1).max()) // tile_n) - 1
            for head in range(q.shape[1]):
                part = logits[head, rows]
                largest = torch.full((part.shape[0], 1), -math.inf, dtype=torch.float64, device=q.device)
                for n in range(last, -1, -1):
                    keys = slice(n * tile_n, (n + 1) * tile_n)
                    tile_max = part[:, keys].amax(1, keepdim=True)
                    if n < last and not ((tile_max - largest).exp() >= factor / kv_len).any():
                        part[:, keys] = -math.inf
                        skipped += 1
                    else:
                        largest = torch.maximum(largest, tile_max)
        outs.append((logits.softmax(2) @ values).transpose(0, 1))
    return torch.cat(outs), skipped


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("factor", [1e-30, 20.0, 200.0])
def test_skip_softmax(factor: float, page_size: int | None) -> None:
    data = Batch([256, 128], [2048, 1000], heads=2, kv_heads=1, magnitude=3.0)
    skippable(data)
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = execute(data.problem(page_size, skip_softmax=factor, skipped_tiles=count))
    want, skipped = reference_with_skips(data, factor, TILES[128, 128].n)
    assert (skipped > 20) == (factor > 1)
    assert abs(int(count) - skipped) <= 2, "tiles at the threshold may fall on either side"
    assert (out.double() - want).norm() < 6e-3 * want.norm()
    exact = execute(data.problem(page_size))
    if factor < 1:
        assert torch.allclose(out, exact, rtol=1e-2, atol=1e-2)


def test_skip_softmax_keeps_what_counts() -> None:
    """Tiles that matter to a single row are computed for all 64."""
    data = Batch([128], [1024], heads=1, kv_heads=1)
    data.k[0].zero_()
    data.q.zero_()
    data.q[77, 0, 0] = 30.0  # this row looks at key 5 alone, the others at all keys evenly
    data.k[0][5, 0, 0] = 30.0
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = execute(data.problem(None, FULL, skip_softmax=100.0, skipped_tiles=count))
    data.expected(FULL).check(out)
