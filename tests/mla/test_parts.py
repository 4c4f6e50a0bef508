"""Changes that must not affect a bit: rest of the batch, pages, bounds, strides, runs, graphs. Also far addresses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.mla import MlaBatch, with_topk
from helpers.batches.prefill import check_requests_alone, same
from helpers.cases.mla import BOTH_ROWS
from helpers.device.concurrent_launches import check_threads, check_two_branches
from helpers.device.replays import check_replays

import hopwell
from hopwell.kernels import Plan, execute
from hopwell.kernels.problem import PageTable
from hopwell.mla import mla_workspace_bytes

pytestmark = pytest.mark.gpu

KV_LENS = [700, 0, 5, 40_000, 512, 513, 1, 9000, 140_000]
TOP_K = 4100  # two chunks and a bit for many rows, eight leaves for swap-AB
KINDS = pytest.mark.parametrize("top_k", [0, TOP_K], ids=["dense", "sparse"])


def batch(top_k: int = 0, q_len: int = 2, kv_lens: list[int] = KV_LENS, **options: Any) -> MlaBatch:
    return with_topk(MlaBatch, [q_len] * len(kv_lens), kv_lens, top_k, **options)


@pytest.mark.usefixtures("batch_invariant")
@KINDS
@pytest.mark.parametrize("heads", [8, 128])
@pytest.mark.parametrize("dims", [(576, 512), (320, 256)])
def test_batch_is_its_requests_one_by_one(dims: tuple[int, int], heads: int, top_k: int) -> None:
    data = batch(top_k, heads=heads, head_dim=dims[0], v_head_dim=dims[1])
    out = execute(data.decode(64))
    check_requests_alone(data, out, 64)


@pytest.mark.usefixtures("batch_invariant")
@KINDS
@BOTH_ROWS
def test_more_of_the_same_requests(heads: int, top_k: int) -> None:
    """Results do not depend on the CTAs or scratch of partials."""
    data = batch(top_k, 1, [9000], heads=heads)
    alone = execute(data.decode(64))
    for count in (2, 33, 200):
        assert torch.equal(execute(data.repeated(count).decode(64)), alone.expand(count, -1, -1))


@KINDS
@BOTH_ROWS
@pytest.mark.parametrize("page_size", [1, 8, 16, 64, 256])
def test_order_of_pages_does_not_matter(page_size: int, heads: int, top_k: int) -> None:
    data = batch(top_k, heads=heads)
    other = data.decode(page_size, order=7)
    places = dict(token_table=other.token_table) if top_k else dict(page_table=other.page_table)
    same(data.decode(page_size), key=other.key, value=other.value, **places)


@KINDS
@BOTH_ROWS
@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 1024])
def test_size_of_pages_does_not_matter(page_size: int, heads: int, top_k: int) -> None:
    data = batch(top_k, heads=heads)
    assert torch.equal(execute(data.decode(64)), execute(data.decode(page_size)))


@KINDS
@BOTH_ROWS
def test_runs_do_not_differ(heads: int, top_k: int) -> None:
    problem = batch(top_k, heads=heads).decode(64)
    first = execute(problem).clone()
    for _ in range(100):
        assert torch.equal(execute(problem), first)


@KINDS
@BOTH_ROWS
def test_content_of_scratch_does_not_matter(heads: int, top_k: int) -> None:
    problem = batch(top_k, heads=heads).decode(64)
    for content in (0.0, math.inf, -1e30):
        same(problem, scratch=torch.full_like(problem.scratch, content))
    execute(replace(batch(top_k, heads=heads, seed=1).decode(64), scratch=problem.scratch))
    same(problem, scratch=problem.scratch.clone())


@BOTH_ROWS
def test_capacity_does_not_matter(heads: int) -> None:
    data = batch(heads=heads)
    problem = data.decode(64)
    capacity = 2**24
    wider = torch.nn.functional.pad(problem.page_table.key, (0, 5), value=-1)
    table = PageTable(wider, wider)
    same(problem, max_kv_len=capacity, page_table=table, scratch=data.scratch(problem.key, capacity))


@KINDS
@BOTH_ROWS
def test_entries_that_do_not_count_are_not_followed(heads: int, top_k: int) -> None:
    """Page ids after the last page and indices after the visible keys may be arbitrary."""
    data = batch(top_k, heads=heads)
    problem = data.decode(64)
    if top_k:
        counted = torch.cat([data.counted(i) for i in range(data.size)])
        same(problem, token_table=torch.where(counted, problem.token_table, 2**31 - 1))
    else:
        table = problem.page_table.key
        table = torch.where(table < 0, 2**31 - 1, table)
        same(problem, page_table=PageTable(table, table))


@KINDS
@BOTH_ROWS
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_strides(page_size: int, heads: int, top_k: int) -> None:
    """Queries, cache and output are between foreign rows."""
    data = batch(top_k, heads=heads)
    problem = data.decode(page_size)
    want = execute(problem)

    def apart(values: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return the values in a larger tensor that is NaN elsewhere."""
        room = torch.full(shape, math.nan, dtype=values.dtype, device=values.device)
        view = room[:, -values.shape[1] :, ..., 8 : 8 + values.shape[-1]]
        view.copy_(values)
        return view

    tokens = data.tokens
    query = apart(data.q, tokens, heads + 3, 640)
    equal_distances = apart(data.q, tokens, heads, 640)
    heads_first = torch.empty(heads, tokens, 576, dtype=data.dtype, device=data.device).transpose(0, 1)
    heads_first.copy_(data.q)
    key = apart(problem.key, problem.key.shape[0], 3, page_size, 600)
    for view in (query, equal_distances, heads_first):
        same(problem, query=view)
    same(problem, key=key, value=key[..., :512])
    room = torch.full((tokens, heads + 2, 528), 7.0, dtype=data.dtype, device=data.device)
    out = room[:, 1:-1, :512]
    execute(replace(problem, query=query, key=key, value=key[..., :512], out=out))
    assert torch.equal(out, want)
    out.fill_(7.0)
    assert (room == 7).all(), "something was written beside the output"


@pytest.fixture
def frees_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@KINDS
@BOTH_ROWS
@pytest.mark.usefixtures("frees_memory")
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_pools_beyond_32_bit_offsets(page_size: int, heads: int, top_k: int) -> None:
    """Pages lie past 2^31 elements, with every way to fetch them."""
    problem = batch(top_k, heads=heads).decode(page_size)
    pages, *rest = problem.key.shape
    shift = 2**31 // problem.key[0].numel() + 1
    pool = torch.empty(shift + pages, *rest, dtype=problem.key.dtype, device=problem.key.device)
    pool[shift:] = problem.key

    def far(places: torch.Tensor, step: int) -> torch.Tensor:
        return torch.where(places < 0, places, places + shift * step)

    if top_k:
        places: dict[str, Any] = dict(token_table=far(problem.token_table, page_size))
    else:
        table = far(problem.page_table.key, 1)
        places = dict(page_table=PageTable(table, table))
    same(problem, key=pool, value=pool[..., :512], **places)


class Buffers:
    """Inputs of a graph, large enough for all lengths of the test."""

    BATCH, WIDTH, PAGES = 4, 600, 1300
    LENGTHS = ([1, 17, 300, 600], [9000, 3, 5000, 0], [512, 513, 9500, 511])

    def __init__(self, q_len: int, heads: int, top_k: int, dtype: torch.dtype = torch.bfloat16):
        ints: dict[str, Any] = dict(dtype=torch.int32, device="cuda")
        values: dict[str, Any] = dict(dtype=dtype, device="cuda")
        size = mla_workspace_bytes(heads, 16 * self.WIDTH, q_len)
        table = (self.BATCH, q_len, top_k) if top_k else (self.BATCH, self.WIDTH)
        self.arguments = dict(
            query=torch.zeros(self.BATCH, q_len, heads, 576, **values),
            kv_cache=torch.zeros(self.PAGES, 16, 576, **values),
            workspace_buffer=torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"),
            qk_nope_head_dim=128,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            block_tables=torch.zeros(table, **ints),
            seq_lens=torch.zeros(self.BATCH, **ints),
            max_seq_len=16 * self.WIDTH,
            sparse_mla_top_k=top_k,
            out=torch.zeros(self.BATCH, q_len, heads, 512, dtype=torch.bfloat16, device="cuda"),
            bmm1_scale=192**-0.5,
        )

    def fill(self, data: MlaBatch) -> None:
        problem, a = data.decode(16), self.arguments
        a["query"].copy_(data.q.view(a["query"].shape))
        a["kv_cache"][: problem.key.shape[0]] = problem.key[:, 0]
        a["block_tables"].fill_(-1)
        if problem.page_table is None:
            a["block_tables"].copy_(problem.token_table.view(a["block_tables"].shape))
        else:
            a["block_tables"][:, : problem.page_table.key.shape[1]] = problem.page_table.key
        a["seq_lens"].copy_(problem.kv_lens)

    def call(self) -> torch.Tensor:
        return hopwell.trtllm_batch_decode_with_kv_cache_mla(**self.arguments)

    def check_replays(self, batches: Iterable[MlaBatch]) -> None:
        out = self.arguments["out"]
        check_replays(self.call, out, batches, self.fill, lambda data, o: data.expected_mla().check(o.flatten(0, 1)))


@KINDS
@BOTH_ROWS
@pytest.mark.parametrize("q_len", [1, 3])
def test_graph_replays_with_other_lengths_and_tables(q_len: int, heads: int, top_k: int) -> None:
    """Lengths that grow and shrink under a graph give the bits of a call of their own."""
    batches = (batch(top_k, q_len, kv_lens, heads=heads, seed=i) for i, kv_lens in enumerate(Buffers.LENGTHS))
    Buffers(q_len, heads, top_k).check_replays(batches)


@BOTH_ROWS
def test_graphs_keep_scratch_of_our_own(heads: int) -> None:
    """Without room in the workspace, the capture itself allocates scratch.

    It stays with its graph while others that need more of it are captured, replayed and freed, during any other
    allocation.
    """
    kept, other = Buffers(1, heads, 0), Buffers(3, heads, 0)
    data = {id(buffers): batch(0, q_len, Buffers.LENGTHS[1], heads=heads) for buffers, q_len in ((kept, 1), (other, 3))}
    graphs = []
    for buffers in (kept, other):
        buffers.fill(data[id(buffers)])
        buffers.arguments["workspace_buffer"] = torch.empty(16, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            buffers.call()
    graphs.pop().replay()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    rubbish = [torch.full((1 << 24,), math.nan, device="cuda") for _ in range(8)]
    for _ in range(3):
        kept.arguments["out"].fill_(7)
        graphs[0].replay()
    replayed = kept.arguments["out"].clone()
    assert all(tensor.isnan().all() for tensor in rubbish)
    data[id(kept)].expected_mla().check(replayed.flatten(0, 1))
    assert torch.equal(kept.call(), replayed)


@KINDS
@BOTH_ROWS
def test_graph_of_many_launches_on_two_branches(heads: int, top_k: int) -> None:
    """Launches in a graph may run at the same time: each needs counters and scratch of its own."""
    data = batch(top_k, heads=heads)
    plain = execute(data.decode(64)).clone()
    problems = [data.decode(64) for _ in range(6)]
    plan = Plan(problems[0])
    plan.execute(problems[0])
    check_two_branches(plan, problems, plain, math.nan)


@KINDS
@BOTH_ROWS
def test_streams_and_threads_do_not_disturb_each_other(heads: int, top_k: int) -> None:
    work = []
    for seed in range(2):
        problem = batch(top_k, heads=heads, seed=seed).decode(64)
        work.append((problem, execute(problem).clone()))
    check_threads(work, math.nan)


@KINDS
@BOTH_ROWS
def test_programmatic_launch_does_not_change_results(heads: int, top_k: int) -> None:
    """In a chain of launches each has what the one before wrote in its queries, and all have one scratch."""
    data = batch(top_k, heads=heads)
    results = []
    for programmatic in (False, True):
        first = data.decode(64, programmatic_launch=programmatic)
        queries = [data.q.clone() for _ in range(21)]
        plan = Plan(replace(first, out=queries[1][..., :512]))
        for query, following in itertools.pairwise(queries):
            plan.execute(replace(first, query=query, out=following[..., :512]))
        results.append(queries[-1])
    assert torch.equal(*results)
    assert not results[0].isnan().any()
