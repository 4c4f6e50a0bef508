"""Packed heads for few queries: with finite numbers, the results do not show the packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, chunked, starts, window

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.launch.operands import prefill_operands
from hopwell.kernels.problem import AttentionProblem, Mask, Score, ScoreKind
from hopwell.kernels.registry import resolve

# Only the last request is long. The others have rows for a part of a tile, a whole tile and one more row, and some
# rows without keys.
Q_LENS, KV_LENS = [40, 0, 3, 1, 17, 33, 600], [700, 9, 2, 77, 130, 33, 600]
GROUPS = [(4, 2), (3, 1), (14, 2), (12, 1), (32, 1), (9, 1)]
FEW_GROUPS = GROUPS[1:3]
# Each has a different fetch, which neither masks nor heads depend on.
MASKS = [(FULL, None), (CAUSAL, 16), (window(20), 64), (window(600), 2), (chunked(32), 16)]
PLAIN = Score()


def packs_heads(problem: AttentionProblem) -> bool:
    return resolve(problem, "sm_90a").packs_heads


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "mask", "page_size", "score"),
    [
        *((*heads, 64, *mask, PLAIN) for mask in MASKS for heads in (GROUPS if mask[0] is CAUSAL else FEW_GROUPS)),
        # Two warpgroups that do not share rows, two that do, and steps of another size.
        *((3, 1, dim, CAUSAL, 16, PLAIN) for dim in (128, 512)),
        (3, 1, 64, CAUSAL, 16, Score(ScoreKind.SOFT_CAP, 2.0)),
    ],
)
def test_no_bit_changes(
    heads: int, kv_heads: int, head_dim: int, mask: Mask, page_size: int | None, score: Score, device: str
) -> None:
    """Requests give the same bits alone, with packed heads, as in a batch without packed heads."""
    q_lens = [min(length, 30) for length in Q_LENS[:-1]] + Q_LENS[-1:] if head_dim == 512 else Q_LENS
    data = Batch(q_lens, KV_LENS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=device)
    sinks = torch.linspace(-1.0, 1.0, heads, device=device)

    def results(part: Batch, packed: bool) -> list[torch.Tensor]:
        lse, statistics = part.ragged_lse(), part.statistics()
        problem = part.problem(page_size, mask, sinks=sinks, lse=lse, statistics=statistics, score=score)
        assert packs_heads(problem) == packed
        return [execute(problem), lse.tensor, statistics]

    with emulator.use("sm_90a"):
        together = results(data, packed=False)
        begins = starts(data.q_lens)
        for index in range(data.size - 1):
            alone = results(data.request(index), packed=True)
            rows = slice(begins[index], begins[index + 1])
            assert all(torch.equal(one, both[rows]) for one, both in zip(alone, together, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_output_between_others(head_dim: int, device: str) -> None:
    """Rows and heads next to the output do not change, with and without leftover rows of tiles."""
    for heads in (3, 8):
        data = Batch([5, 50], [90, 70], heads=heads, kv_heads=1, head_dim=head_dim, device=device)
        wide = torch.full((data.tokens + 9, heads + 2, head_dim), 7.0, dtype=data.dtype, device=device)
        out = wide[4:-5, 1:-1]
        with emulator.use("sm_90a"):
            problem = replace(data.problem(16), out=out)
            assert packs_heads(problem)
            execute(problem)
        data.expected(CAUSAL).check(out)
        out.fill_(7.0)
        assert (wide == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [None, 16])
def test_graph_with_other_lengths(page_size: int | None) -> None:
    """A captured launch keeps the shape of its tiles; lengths, tables and values come from the replay."""
    lengths = ([40, 3, 0, 9], [200, 3, 9, 130]), ([1, 17, 32, 2], [9, 130, 200, 3])
    batches = [Batch(*pair, heads=12, kv_heads=4, seed=seed) for seed, pair in enumerate(lengths)]
    first, second = (replace(data.problem(page_size), max_q_len=60, max_kv_len=400) for data in batches)
    assert packs_heads(first)
    expected = [execute(problem) for problem in (first, second)]
    captured = replace(first, out=torch.empty_like(expected[0]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execute(captured)
    for problem, want in zip((first, second), expected, strict=True):
        views = (prefill_operands(one, None).values() for one in (captured, problem))
        for mine, other in zip(*views, strict=True):
            if mine is not None:
                mine.copy_(other)
        graph.replay()
        assert torch.equal(captured.out, want)
