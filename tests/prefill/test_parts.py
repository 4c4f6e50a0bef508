"""One property of a problem at a time: offsets, strides, tables, scales, sinks, log-sum-exp, and invariants."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, same, starts, window

from hopwell.kernels import execute
from hopwell.kernels.problem import LogSumExp, LseLayout, Mask, PageTable, TokenOffsets

pytestmark = pytest.mark.gpu

Q_LENS, KV_LENS = [5, 0, 130, 257, 9, 1, 64], [77, 3, 130, 700, 4, 300, 0]


def batch(**options: object) -> Batch:
    return Batch(Q_LENS, KV_LENS, **options)


@pytest.mark.parametrize("page_size", [1, 4, 8, 16, 64, 256])
def test_order_of_pages_does_not_matter(page_size: int) -> None:
    data = batch()
    problem = data.problem(page_size, lse=data.ragged_lse())
    key, value, table = data.pages(page_size, order=1)
    same(problem, key=key, value=value, page_table=PageTable(table, table))


@pytest.mark.parametrize("page_size", [2, 16, 128])
def test_keys_and_values_with_pages_of_their_own(page_size: int) -> None:
    data = batch()
    _, value, value_table = data.pages(page_size, order=5, spare=9)
    problem = data.problem(page_size)
    same(problem, value=value, page_table=PageTable(problem.page_table.key, value_table))


@pytest.mark.parametrize("page_size", [2, 8, 16, 64])
@pytest.mark.parametrize("form", ["nhd", "stacked", "padded rows", "padded pages", "padded dim", "values as stacked"])
def test_strides_of_a_cache_do_not_matter(form: str, page_size: int) -> None:
    problem = batch().problem(page_size)

    def placed(pool: torch.Tensor) -> torch.Tensor:
        pages, heads, rows, dim = pool.shape
        room = pool.new_full((2 * pages, rows + 8, heads + 1, dim + 8), math.nan)
        view = {
            "nhd": room.flatten()[: pool.numel()].view(pages, rows, heads, dim).transpose(1, 2),
            "stacked": room.flatten()[: 2 * pool.numel()].view(pages, 2, heads, rows, dim)[:, 1],
            "padded rows": room[:pages, :rows, :heads, :dim].transpose(1, 2),
            "padded pages": room.flatten()[: pages * (heads * rows * dim + 8)].view(pages, -1)[:, 8:].view(pool.shape),
            "padded dim": room.flatten()[: pages * heads * rows * (dim + 8)].view(pages, heads, rows, dim + 8)[
                ..., :dim
            ],
        }[form]
        view.copy_(pool)
        return view

    if form == "values as stacked":
        form = "stacked"
        same(problem, value=placed(problem.value))
    else:
        same(problem, key=placed(problem.key), value=placed(problem.value))


@pytest.mark.parametrize("page_size", [None, 4, 16])
def test_one_head_of_keys_for_all(page_size: int | None) -> None:
    """One KV head is seen as two, by a head stride of 0."""
    data = batch(kv_heads=1)
    problem = data.problem(page_size)
    wide = [t.expand(-1, 2, -1, -1) for t in (problem.key, problem.value)]
    same(problem, key=wide[0], value=wide[1])


def test_strides_of_query_and_output_do_not_matter() -> None:
    data = batch()
    problem = data.problem(16)
    before = execute(problem)
    heads_first = torch.empty(4, data.tokens, 128, dtype=data.dtype, device="cuda").transpose(0, 1)
    heads_first.copy_(data.q)
    packed = torch.empty(data.tokens, 3, 4, 128, dtype=data.dtype, device="cuda")[:, 1]
    packed.copy_(data.q)
    wide = torch.full((data.tokens, 5, 136), 7.0, dtype=data.dtype, device="cuda")
    for query, out in ((heads_first, wide[:, 1:, :128]), (packed, torch.empty_like(heads_first))):
        assert torch.equal(before, execute(replace(problem, query=query, out=out)))
    assert (wide[:, 0] == 7).all()
    assert (wide[:, :, 128:] == 7).all()


@pytest.mark.parametrize("page_size", [None, 4, 16])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(40)], ids=lambda mask: mask.kind.value)
def test_batch_is_its_requests_one_by_one(mask: Mask, page_size: int | None) -> None:
    data = batch()
    lse = data.ragged_lse()
    out = execute(data.problem(page_size, mask, lse=lse))
    begins = starts(data.q_lens)
    for index in range(data.size):
        one = data.request(index)
        one_lse = one.ragged_lse()
        rows = slice(begins[index], begins[index + 1])
        assert torch.equal(out[rows], execute(one.problem(page_size, mask, lse=one_lse)))
        assert torch.equal(lse.tensor[rows], one_lse.tensor)


@pytest.mark.parametrize("page_size", [None, 16])
def test_bounds_of_lengths_do_not_matter(page_size: int | None) -> None:
    problem = batch().problem(page_size)
    same(problem, max_q_len=5000, max_kv_len=100_000)


@pytest.mark.parametrize("page_size", [None, 16])
def test_pages_are_contiguous_keys(page_size: int | None) -> None:
    """The place of keys never changes a result."""
    data = batch()
    out = execute(data.problem(64))
    assert torch.equal(out, execute(data.problem(page_size)))
    assert torch.equal(out, execute(data.problem(1)))


def test_requests_at_offsets_of_their_own() -> None:
    """Every tensor has element offsets, with gaps that must be neither read nor written."""
    data = batch()
    gap = 3
    before = execute(data.problem(None))
    key, value, kv_begins = data.ragged(gap)
    q_begins = [begin + gap * (i + 1) for i, begin in enumerate(starts(data.q_lens))]
    o_begins = [begin + 2 * gap * (i + 1) for i, begin in enumerate(starts(data.q_lens))]
    # The output has the rows of the queries, and neither may be past the last of them.
    query = torch.full((o_begins[-1], 4, 128), math.nan, dtype=data.dtype, device="cuda")
    out = torch.full((o_begins[-1], 4, 128), 7.0, dtype=data.dtype, device="cuda")
    lse = torch.full((data.size * 257, 4), 7.0, device="cuda")
    lse_begins = [257 * i for i in reversed(range(data.size))]
    spans = list(zip(starts(data.q_lens), q_begins, o_begins, data.q_lens, strict=False))
    for begin, q_begin, _, length in spans:
        query[q_begin : q_begin + length] = data.q[begin : begin + length]
    problem = data.problem(
        None,
        query=query,
        key=key.transpose(0, 1)[None],
        value=value.transpose(0, 1)[None],
        out=out,
        q_offsets=TokenOffsets(data.ints([512 * b for b in q_begins]), 512),
        o_offsets=TokenOffsets(data.ints([512 * b for b in o_begins], torch.uint32), 512),
        k_offsets=TokenOffsets(data.ints([256 * b for b in kv_begins]), 256),
        v_offsets=TokenOffsets(data.ints([256 * b for b in kv_begins], torch.uint32), 256),
        q_lens=data.ints(data.q_lens),
        kv_lens=data.ints(data.kv_lens, torch.uint32),
        lse=LogSumExp(lse, LseLayout.OFFSETS, True, TokenOffsets(data.ints([4 * b for b in lse_begins]), 4)),
    )
    execute(problem)
    expected = data.expected()
    untouched = torch.ones(out.shape[0], dtype=torch.bool, device="cuda")
    for (begin, _, o_begin, length), lse_begin in zip(spans, lse_begins, strict=True):
        assert torch.equal(out[o_begin : o_begin + length], before[begin : begin + length])
        untouched[o_begin : o_begin + length] = False
        part = replace(expected, lse=expected.lse[begin : begin + length])
        part.check_lse(lse[lse_begin : lse_begin + length])
        assert (lse[lse_begin + length : lse_begin + 257] == 7).all()
    assert (out[untouched] == 7).all()


@pytest.mark.parametrize("natural", [True, False])
def test_log_sum_exp(natural: bool) -> None:
    data = batch()
    expected = data.expected()
    ragged = data.ragged_lse(natural)
    execute(data.problem(16, lse=ragged))
    expected.check_lse(ragged.tensor, natural=natural)
    padded = torch.full((data.size, 260, 4), 7.0, device="cuda")
    execute(data.problem(16, lse=LogSumExp(padded, LseLayout.PADDED, natural)))
    for index, (begin, length) in enumerate(zip(starts(data.q_lens), data.q_lens, strict=False)):
        assert torch.equal(padded[index, :length], ragged.tensor[begin : begin + length])
        assert (padded[index, length:] == -math.inf).all()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, window(40)], ids=lambda mask: mask.kind.value)
def test_sinks(mask: Mask) -> None:
    """A sink is one more key per head with a value of zero, from no weight to all of the weight."""
    data = batch(heads=8)
    sinks = torch.tensor([-math.inf, -1e4, -5.0, 0.0, 3.0, 50.0, 1e4, 1e30], device="cuda")
    problem = data.problem(16, mask, sinks=sinks, lse=data.ragged_lse())
    out = execute(problem)
    expected = data.expected(mask, sinks=sinks)
    for head in range(8):
        one = replace(expected, out=expected.out[:, head : head + 1], rounded=expected.rounded[:, head : head + 1])
        one.check(out[:, head : head + 1])
    expected.check_lse(problem.lse.tensor)
    assert torch.equal(out[:, 0], execute(replace(problem, sinks=None, out=data.output()))[:, 0])


@pytest.mark.parametrize("page_size", [None, 4, 64])
def test_scales_on_the_device_are_scales_on_the_host(page_size: int | None) -> None:
    problem = batch().problem(page_size, softmax_scale=0.07, output_scale=1.75)
    same(
        problem,
        softmax_scale=torch.tensor([0.07], device="cuda"),
        output_scale=torch.tensor(1.75, device="cuda"),
    )
    batch().expected(scale=0.07).check(execute(problem), factor=1.75)


def test_unsigned_lengths_offsets_and_tables() -> None:
    problem = batch().problem(16)
    table = PageTable(problem.page_table.key.view(torch.uint32), problem.page_table.value.view(torch.uint32))
    same(
        problem,
        q_offsets=TokenOffsets(problem.q_offsets.tensor.view(torch.uint32)),
        kv_lens=problem.kv_lens.view(torch.uint32),
        page_table=table,
    )


def test_programmatic_launch_does_not_change_results() -> None:
    problem = batch().problem(16)
    same(problem, programmatic_launch=True)
    # In a chain of launches, each reads the output of the one before.
    data = Batch([512], [512], kv_heads=4)
    results = []
    for programmatic in (False, True):
        first = data.problem(None, programmatic_launch=programmatic)
        hidden = first.query
        for _ in range(20):
            hidden = execute(replace(first, query=hidden, out=torch.empty_like(hidden)))
        results.append(hidden)
    assert torch.equal(*results)


def test_pools_beyond_32_bit_offsets() -> None:
    """Pages are past 2^32 elements, for every fetch, with K and V in one stacked pool."""
    data = Batch([70, 3], [300, 129], kv_heads=8, heads=8)
    for page_size in (4, 16, 64):
        key, value, table = data.pages(page_size)
        pages = 2**31 // (8 * page_size * 128) + key.shape[0]
        pool = torch.empty(pages, 2, 8, page_size, 128, dtype=data.dtype, device="cuda")
        shift = pages - key.shape[0]
        pool[shift:, 0], pool[shift:, 1] = key, value
        far = torch.where(table < 0, table, table + shift)
        problem = data.problem(page_size)
        same(problem, key=pool[:, 0], value=pool[:, 1], page_table=PageTable(far, far))
        del pool
        torch.cuda.empty_cache()


def test_tokens_beyond_32_bit_offsets() -> None:
    """The last tokens of contiguous query, K, V and output are past 2^31 elements, at element offsets past it too."""
    data = Batch([70], [300], kv_heads=8, heads=8)
    before = execute(data.problem(None))
    rows = 2**31 // 1024 + 512
    query, key, value, out = (torch.empty(rows, 8, 128, dtype=data.dtype, device="cuda") for _ in range(4))
    query[-70:], key[-300:], value[-300:] = data.q, data.k[0], data.v[0]

    def at(row: int) -> TokenOffsets:
        return TokenOffsets(data.ints([row * 1024, rows * 1024], torch.uint32), 1024)

    problem = data.problem(
        None,
        query=query,
        key=key.transpose(0, 1)[None],
        value=value.transpose(0, 1)[None],
        out=out,
        q_offsets=at(rows - 70),
        o_offsets=at(rows - 70),
        k_offsets=at(rows - 300),
        v_offsets=at(rows - 300),
    )
    assert torch.equal(execute(problem)[-70:], before)


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 9]), ([3, 2], [0, 0])])
def test_nothing_to_do(lengths: tuple[list[int], list[int]]) -> None:
    data = Batch(*lengths) if lengths[0] else None
    if data is None:
        empty = Batch([0], [1]).problem(16)
        table = empty.page_table.key[:0]
        problem = replace(empty, batch=0, page_table=PageTable(table, table), kv_lens=empty.kv_lens[:0])
        assert execute(problem).shape == (0, 4, 128)
        return
    out = execute(data.problem(16))
    assert (out == 0).all()
