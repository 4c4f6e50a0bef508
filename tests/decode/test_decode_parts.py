"""What must not change a bit: the rest of the batch, where pages are, bounds, runs, graphs, streams; and far places."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import same, starts
from concurrent_launches import check_threads, check_two_branches
from decode_batches import DRAFT, FULL, DecodeBatch
from decode_cases import draft_bits

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels import Plan, execute
from hopwell.kernels.problem import Mask, MaskKind, PageTable

pytestmark = pytest.mark.gpu

KV_LENS = [700, 0, 5, 40_000, 512, 513, 1, 9000, 140_000]
WINDOW = Mask(MaskKind.SLIDING_WINDOW, 3000)
MASKS = pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.kind.value)


def batch(mask: Mask = FULL, **options: Any) -> DecodeBatch:
    q_len = 5 if mask.kind is MaskKind.DRAFT else 1
    bits = [draft_bits("tree", q_len, seed) for seed in range(len(KV_LENS))]
    return DecodeBatch([q_len] * len(KV_LENS), KV_LENS, drafts=bits, **options)


@MASKS
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_batch_is_its_requests_one_by_one(head_dim: int, mask: Mask) -> None:
    data = batch(mask, head_dim=head_dim)
    out = execute(data.decode(16, mask))
    begins = starts(data.q_lens)
    for index in range(data.size):
        alone = execute(data.request(index).decode(16, mask))
        assert torch.equal(out[begins[index] : begins[index + 1]], alone)


def test_more_of_the_same_requests() -> None:
    """Whoever shares them out, and whichever slots their pieces get."""
    data = DecodeBatch([1], [9000])
    alone = execute(data.decode(16))
    for count in (2, 33, 200):
        many = replace(data, q_lens=[1] * count, kv_lens=[9000] * count)
        many.q, many.k, many.v = data.q.expand(count, -1, -1).contiguous(), data.k * count, data.v * count
        assert torch.equal(execute(many.decode(16)), alone.expand(count, -1, -1))


@MASKS
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
def test_order_of_pages_does_not_matter(page_size: int, mask: Mask) -> None:
    data = batch(mask)
    other = data.decode(page_size, mask, order=7)
    same(data.decode(page_size, mask), key=other.key, value=other.value, page_table=other.page_table)


@pytest.mark.parametrize("page_size", [1, 4, 8, 64, 1024])
def test_size_of_pages_does_not_matter(page_size: int) -> None:
    data = batch()
    assert torch.equal(execute(data.decode(16)), execute(data.decode(page_size)))


@MASKS
def test_runs_do_not_differ(mask: Mask) -> None:
    problem = batch(mask).decode(16, mask)
    first = execute(problem).clone()
    for _ in range(100):
        assert torch.equal(execute(problem), first)


def test_capacity_does_not_matter() -> None:
    data = batch()
    problem = data.decode(16)
    capacity = 2**24
    wider = torch.nn.functional.pad(problem.page_table.key, (0, 5), value=-1)
    table = PageTable(wider, wider)
    same(problem, max_kv_len=capacity, page_table=table, scratch=data.scratch(problem.key, capacity))


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pools_beyond_32_bit_offsets(page_size: int) -> None:
    """Pages past 2^32 elements, with every way to fetch; K and V in one stacked pool."""
    data = batch(kv_heads=4)
    problem = data.decode(page_size)
    pages, *rest = problem.key.shape
    total = 2**31 // problem.key[0].numel() + pages
    pool = torch.empty(total, 2, *rest, dtype=data.dtype, device="cuda")
    shift = total - pages
    pool[shift:, 0], pool[shift:, 1] = problem.key, problem.value
    table = problem.page_table.key
    far = torch.where(table < 0, table, table + shift)
    same(problem, key=pool[:, 0], value=pool[:, 1], page_table=PageTable(far, far))


class Buffers:
    """What a graph reads: large enough for any of the lengths that are put there."""

    BATCH, WIDTH, PAGES = 4, 600, 1300
    LENGTHS = ([1, 17, 300, 600], [9000, 3, 5000, 0], [512, 513, 9500, 511])

    def __init__(self, q_len: int):
        ints: dict[str, Any] = dict(dtype=torch.int32, device="cuda")
        values: dict[str, Any] = dict(dtype=torch.bfloat16, device="cuda")
        size = xqa_workspace_bytes(4, 2, 128, 16 * self.WIDTH, q_len)
        self.arguments = dict(
            query=torch.zeros(self.BATCH * q_len, 4, 128, **values),
            kv_cache=torch.zeros(self.PAGES, 2, 2, 16, 128, **values),
            workspace_buffer=torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"),
            block_tables=torch.zeros(self.BATCH, self.WIDTH, **ints),
            seq_lens=torch.zeros(self.BATCH, **ints),
            max_seq_len=16 * self.WIDTH,
            bmm1_scale=128**-0.5,
            out=torch.zeros(self.BATCH * q_len, 4, 128, **values),
            kv_layout="HND",
            q_len_per_req=q_len,
            mask=torch.zeros(self.BATCH, q_len, 2, dtype=torch.uint16, device="cuda"),
        )

    def fill(self, data: DecodeBatch, mask: Mask) -> None:
        problem, a = data.decode(16, mask), self.arguments
        a["query"].copy_(data.q)
        pages = problem.key.shape[0]
        a["kv_cache"][:pages, 0], a["kv_cache"][:pages, 1] = problem.key, problem.value
        a["block_tables"].fill_(-1)
        a["block_tables"][:, : problem.page_table.key.shape[1]] = problem.page_table.key
        a["seq_lens"].copy_(problem.kv_lens)
        if problem.draft_mask is not None:
            a["mask"].copy_(problem.draft_mask.view(a["mask"].shape))

    def call(self) -> torch.Tensor:
        return hopwell.xqa_batch_decode_with_kv_cache(**self.arguments)


@pytest.mark.parametrize("q_len", [1, 3])
def test_graph_replays_with_other_lengths_and_tables(q_len: int) -> None:
    """Lengths that grow and shrink under a graph give the bits of a call of their own."""
    buffers, mask = Buffers(q_len), DRAFT if q_len > 1 else FULL
    buffers.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffers.call()
    for seed, kv_lens in enumerate(Buffers.LENGTHS):
        data = DecodeBatch([q_len] * len(kv_lens), kv_lens, seed=seed)
        buffers.fill(data, mask)
        for _ in range(3):
            buffers.arguments["out"].fill_(7)
            graph.replay()
        replayed = buffers.arguments["out"].clone()
        data.expected_decode(mask).check(replayed)
        assert torch.equal(buffers.call(), replayed)


def test_graph_of_many_launches_on_two_branches() -> None:
    """Launches in a graph may run at the same time: each needs counters and scratch of its own."""
    data = batch()
    plain = execute(data.decode(16)).clone()
    problems = [data.decode(16) for _ in range(6)]
    plan = Plan(problems[0])
    plan.execute(problems[0])
    check_two_branches(plan, problems, plain, math.nan)


def test_streams_and_threads_do_not_disturb_each_other() -> None:
    work = []
    for seed in range(2):
        problem = batch(seed=seed).decode(16)
        work.append((problem, execute(problem).clone()))
    check_threads(work, math.nan)


def test_programmatic_launch_does_not_change_results() -> None:
    """A chain of launches, each reading what the one before wrote, all with one scratch."""
    data = batch()
    results = []
    for programmatic in (False, True):
        first = data.decode(16, programmatic_launch=programmatic)
        hidden = first.query
        for _ in range(20):
            hidden = execute(replace(first, query=hidden, out=torch.empty_like(hidden)))
        results.append(hidden)
    assert torch.equal(*results)
