"""Changes that must not affect a bit: rest of the batch, pages, bounds, runs, graphs, streams. Also far addresses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from helpers.batches.decode import DRAFT, FULL, DecodeBatch
from helpers.batches.prefill import check_requests_alone, same
from helpers.cases.decode import KV_DTYPES, draft_bits
from helpers.device.concurrent_launches import check_threads, check_two_branches
from helpers.device.replays import check_replays

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels import Plan, execute
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.problem import Mask, MaskKind, PageTable

pytestmark = pytest.mark.gpu

KV_LENS = [700, 0, 5, 40_000, 512, 513, 1, 9000, 140_000]
NEW_TOKENS = 5  # where there are drafts
WINDOW = Mask(MaskKind.SLIDING_WINDOW, 3000)


@dataclass(frozen=True)
class Kind:
    """The properties that select the kernel besides the mask.

    A request has this number of packed rows, or a few less with drafts.
    """

    head_dim: int
    rows: int
    kv_type: KvType = KvType.WIDE

    def group(self, q_len: int) -> int:
        group = self.rows // q_len
        used, meant = (DecodeConfig.rows_for(rows, self.head_dim, self.kv_type) for rows in (group * q_len, self.rows))
        assert used == meant
        return group

    def __str__(self) -> str:
        return f"d{self.head_dim}-rows{self.rows}-{self.kv_type.value}"


# Trees of 8 rows and of the most, and chunks; both over 8 bits.
SWAP_AB, TREE, CHUNKS = (Kind(128, rows) for rows in (8, 32, 64))
FP8_SWAP_AB, INT8_CHUNKS = Kind(128, 8, KvType.E4M3), Kind(256, 32, KvType.INT8)
DEQUANTIZED = Kind(512, 64, KvType.E4M3)  # in place
# Other widths, with other splits and combines, another size of trees, and two tiles of rows.
OTHER_SIZES = [(64, 8), (64, 100), (128, 16), (256, 8), (256, 16), (256, 64), (512, 64)]
OTHERS = [
    *(Kind(*sizes) for sizes in OTHER_SIZES),
    DEQUANTIZED,
    Kind(256, 8, KvType.INT8),
    Kind(64, 100, KvType.E4M3),
    Kind(256, 64, KvType.INT8),
]
NVFP4_SWAP_AB, NVFP4_CHUNKS = Kind(128, 8, KvType.NVFP4), Kind(256, 64, KvType.NVFP4)


def of_kinds(*kinds: Kind) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=str)


KINDS = of_kinds(SWAP_AB, TREE, CHUNKS, FP8_SWAP_AB, INT8_CHUNKS, DEQUANTIZED)
ALL_CACHES = of_kinds(SWAP_AB, TREE, CHUNKS, FP8_SWAP_AB, INT8_CHUNKS, DEQUANTIZED, NVFP4_SWAP_AB, NVFP4_CHUNKS)
EXPENSIVE_KINDS = of_kinds(SWAP_AB, CHUNKS, FP8_SWAP_AB)
MASKS = pytest.mark.parametrize("mask", [FULL, WINDOW, DRAFT], ids=lambda mask: mask.kind.value)


def batch(
    kind: Kind, mask: Mask = FULL, kv_lens: Sequence[int] = KV_LENS, *, kv_heads: int = 2, seed: int = 0
) -> DecodeBatch:
    q_len = NEW_TOKENS if mask.kind is MaskKind.DRAFT else 1
    return DecodeBatch(
        [q_len] * len(kv_lens),
        kv_lens,
        heads=kind.group(q_len) * kv_heads,
        kv_heads=kv_heads,
        head_dim=kind.head_dim,
        seed=seed,
        kv_dtype=KV_DTYPES.get(kind.kv_type),
        drafts=[draft_bits("tree", q_len, index) for index in range(len(kv_lens))],
    )


@MASKS
@of_kinds(
    SWAP_AB, TREE, CHUNKS, FP8_SWAP_AB, INT8_CHUNKS, *OTHERS, NVFP4_SWAP_AB, NVFP4_CHUNKS, Kind(64, 100, KvType.NVFP4)
)
def test_batch_is_its_requests_one_by_one(kind: Kind, mask: Mask) -> None:
    data = batch(kind, mask)
    out = execute(data.decode(16, mask))
    check_requests_alone(data, out, 16, mask)


@ALL_CACHES
def test_more_of_the_same_requests(kind: Kind) -> None:
    """Results do not depend on the CTAs or slots of partials."""
    data = batch(kind, kv_lens=[9000])
    alone = execute(data.decode(16))
    for count in (2, 33, 200):
        assert torch.equal(execute(data.repeated(count).decode(16)), alone.expand(count, -1, -1))


@MASKS
@ALL_CACHES
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
def test_order_of_pages_does_not_matter(page_size: int, kind: Kind, mask: Mask) -> None:
    data = batch(kind, mask)
    other = data.decode(page_size, mask, order=7)
    moved = dict(key=other.key, value=other.value, kv_scales=other.kv_scales, page_table=other.page_table)
    same(data.decode(page_size, mask), **moved)


@ALL_CACHES
@pytest.mark.parametrize("page_size", [1, 4, 8, 64, 1024])
def test_size_of_pages_does_not_matter(page_size: int, kind: Kind) -> None:
    data = batch(kind)
    assert torch.equal(execute(data.decode(16)), execute(data.decode(page_size)))


@MASKS
@ALL_CACHES
def test_runs_do_not_differ(kind: Kind, mask: Mask) -> None:
    problem = batch(kind, mask).decode(16, mask)
    first = execute(problem).clone()
    for _ in range(100):
        assert torch.equal(execute(problem), first)


@KINDS
def test_capacity_does_not_matter(kind: Kind) -> None:
    data = batch(kind)
    problem = data.decode(16)
    capacity = 2**24
    wider = torch.nn.functional.pad(problem.page_table.key, (0, 5), value=-1)
    table = PageTable(wider, wider)
    same(problem, max_kv_len=capacity, page_table=table, scratch=data.scratch(problem.key, capacity))


@EXPENSIVE_KINDS
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pools_beyond_32_bit_offsets(page_size: int, kind: Kind) -> None:
    """Pages lie past 2^32 elements, for every way to fetch, with K and V in one stacked pool."""
    problem = batch(kind, kv_heads=4).decode(page_size)
    pages, *rest = problem.key.shape
    total = 2**31 // problem.key[0].numel() + pages
    pool = torch.empty(total, 2, *rest, dtype=problem.key.dtype, device="cuda")
    shift = total - pages
    pool[shift:, 0], pool[shift:, 1] = problem.key, problem.value
    table = problem.page_table.key
    far = torch.where(table < 0, table, table + shift)
    same(problem, key=pool[:, 0], value=pool[:, 1], page_table=PageTable(far, far))


class Buffers:
    """Inputs of a graph, large enough for all lengths of the test."""

    BATCH, WIDTH, PAGES = 4, 600, 1300
    LENGTHS = ([1, 17, 300, 600], [9000, 3, 5000, 0], [512, 513, 9500, 511])

    def __init__(self, kind: Kind, mask: Mask):
        data = batch(kind, mask, [0] * self.BATCH)
        q_len, kv_heads, head_dim = data.q_lens[0], data.kv_heads, data.head_dim
        ints: dict[str, Any] = dict(dtype=torch.int32, device="cuda")
        cache_dtype = data.kv_dtype or data.dtype
        size = xqa_workspace_bytes(data.heads, kv_heads, head_dim, 16 * self.WIDTH, q_len)
        self.arguments = dict(
            query=torch.zeros_like(data.q),
            kv_cache=torch.zeros(self.PAGES, 2, kv_heads, 16, head_dim, dtype=cache_dtype, device="cuda"),
            workspace_buffer=torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"),
            block_tables=torch.zeros(self.BATCH, self.WIDTH, **ints),
            seq_lens=torch.zeros(self.BATCH, **ints),
            max_seq_len=16 * self.WIDTH,
            bmm1_scale=data.scale,
            out=torch.zeros_like(data.q),
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


@pytest.mark.parametrize("mask", [FULL, DRAFT], ids=lambda mask: mask.kind.value)
@KINDS
def test_graph_replays_with_other_lengths_and_tables(kind: Kind, mask: Mask) -> None:
    """Lengths that grow and shrink under a graph give the bits of a call of their own."""
    buffers = Buffers(kind, mask)
    batches = (batch(kind, mask, kv_lens, seed=seed) for seed, kv_lens in enumerate(Buffers.LENGTHS))
    check_replays(
        buffers.call,
        buffers.arguments["out"],
        batches,
        lambda data: buffers.fill(data, mask),
        lambda data, out: data.expected_decode(mask).check(out),
    )


@KINDS
def test_graph_of_many_launches_on_two_branches(kind: Kind) -> None:
    """Launches in a graph may run at the same time: each needs counters and scratch of its own."""
    data = batch(kind)
    plain = execute(data.decode(16)).clone()
    problems = [data.decode(16) for _ in range(6)]
    plan = Plan(problems[0])
    plan.execute(problems[0])
    check_two_branches(plan, problems, plain, math.nan)


@EXPENSIVE_KINDS
def test_streams_and_threads_do_not_disturb_each_other(kind: Kind) -> None:
    work = []
    for seed in range(2):
        problem = batch(kind, seed=seed).decode(16)
        work.append((problem, execute(problem).clone()))
    check_threads(work, math.nan)


@KINDS
def test_programmatic_launch_does_not_change_results(kind: Kind) -> None:
    """In a chain of launches each reads what the one before wrote, and all have one scratch."""
    data = batch(kind)
    results = []
    for programmatic in (False, True):
        first = data.decode(16, programmatic_launch=programmatic)
        hidden = first.query
        for _ in range(20):
            hidden = execute(replace(first, query=hidden, out=torch.empty_like(hidden)))
        results.append(hidden)
    assert torch.equal(*results)
