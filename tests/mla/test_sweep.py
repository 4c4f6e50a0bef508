"""MLA against float64: every page size, number of heads and of new tokens, top-k indices, exact masks."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.mla import MlaBatch, draw_topk
from helpers.cases import mla as cases
from helpers.cases.mla import Case

from hopwell.kernels import execute

pytestmark = pytest.mark.gpu

PAGE_SIZES = [1 << i for i in range(11)]
HEADS = [1, 2, 6, 8, 12, 16, 24, 48, 63, 64, 65, 127, 128, 192, 256]
TOP_KS = [4, 60, 64, 68, 128, 132, 512, 2048, 4160]


def name(dims: tuple[int, int]) -> str:
    return "{}_{}".format(*dims)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_page_sizes(dims: tuple[int, int], q_len: int, page_size: int) -> None:
    kv_lens = cases.lengths(cases.chunk_tokens(dims), page_size)
    cases.check_case(Case([q_len] * len(kv_lens), kv_lens, dims=dims), page_size)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_heads(dims: tuple[int, int], q_len: int, heads: int) -> None:
    kv_lens = cases.lengths(cases.chunk_tokens(dims), 64)
    cases.check_case(Case([q_len] * len(kv_lens), kv_lens, heads, dims), 64)


@pytest.mark.parametrize("heads", [1, 6, 16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5, 8, 15, 16, 17, 32])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_new_tokens(dims: tuple[int, int], q_len: int, heads: int) -> None:
    """Requests have fewer keys than tokens, or new tokens on both sides of an edge."""
    chunk = cases.chunk_tokens(dims)
    edges = [edge + q_len // 2 for edge in (64, 128, chunk, 2 * chunk)]
    kv_lens = [0, q_len // 2, q_len - 1, q_len, q_len + 1, *edges, 5 * chunk + 3]
    cases.check_case(Case([q_len] * len(kv_lens), kv_lens, heads, dims), 64)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("top_k", [0, 128])
def test_uneven_numbers_of_new_tokens(top_k: int, page_size: int, heads: int) -> None:
    """Some requests have no new tokens, others have more than keys."""
    chunk = cases.chunk_tokens(cases.DIMS[0])
    q_lens = [3, 0, 1, 33, 5, 2, 0, 17]
    kv_lens = [1, 70, 0, chunk + 20, 5, 40 * chunk, 0, 3 * chunk + 7]
    cases.check_case(Case(q_lens, kv_lens, heads, top_k=top_k, ragged=True), page_size)


@pytest.mark.parametrize("largest", [2.0**100, 1.0, 2.0**-70])
@pytest.mark.parametrize(("q_len", "heads"), [(1, 2), (3, 2), (1, 33)])
def test_columns_of_all_sizes(q_len: int, heads: int, largest: float) -> None:
    cases.check_column_sizes(largest, q_len=q_len, heads=heads)


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize("magnitude", [0.0, 1e-3, 8.0])
@pytest.mark.parametrize("heads", [7, 40])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_magnitudes(dims: tuple[int, int], heads: int, magnitude: float, top_k: int) -> None:
    """Attention ranges from uniform to rows dominated by few keys."""
    kv_lens = cases.lengths(cases.chunk_tokens(dims, top_k > 0), 64)[-4:]
    cases.check_case(Case([2] * 4, kv_lens, heads, dims, top_k=top_k, magnitude=magnitude, sinks=False), 64)


@pytest.mark.parametrize("heads", [5, 16])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_rising_logits(dims: tuple[int, int], heads: int) -> None:
    cases.check_rising_logits(heads, 5000, dims)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("top_k", [0, 132])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_scales_on_the_device(dims: tuple[int, int], top_k: int, sinks: bool) -> None:
    kv_lens = cases.lengths(cases.chunk_tokens(dims), 64)
    cases.check_case(Case([2] * len(kv_lens), kv_lens, 64, dims, top_k, tensor_scales=True, sinks=sinks), 64)


@cases.BOTH_ROWS
@pytest.mark.parametrize("top_k", [0, 2500])
@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_sinks_far_from_the_logits(sink: float, top_k: int, heads: int) -> None:
    """A sink without weight changes nothing; a sink with all weight leaves nothing."""
    data = cases.batch_of(Case([1, 2, 2], [3000, 0, 100], heads, top_k=top_k), "cuda")
    sinks = torch.full((data.heads,), sink, device=data.device)
    out = execute(data.decode(64, ragged=True, sinks=sinks))
    if sink < 0:
        data.expected_mla().check(out)
    else:
        assert (out == 0).all()


@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize("page_size", [1, 32, 64])
@pytest.mark.parametrize("dims", cases.SPARSE_DIMS, ids=name)
def test_topk_tokens(dims: tuple[int, int], page_size: int, top_k: int) -> None:
    """Requests have more keys than top-k, exactly top-k, and fewer."""
    kv_lens = [0, 1, top_k // 2, top_k - 1, top_k, top_k + 1, 3 * top_k + 5, 9000]
    for kind in cases.TOPK_KINDS:
        cases.check_case(Case([2] * len(kv_lens), kv_lens, 64, dims, top_k, kind), page_size)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("dims", cases.SPARSE_DIMS, ids=name)
def test_heads_with_topk_indices(dims: tuple[int, int], q_len: int, heads: int) -> None:
    for top_k in (64, 2048):
        kv_lens = [0, q_len // 2, 40, top_k + q_len // 2, 3 * top_k]
        cases.check_case(Case([q_len] * len(kv_lens), kv_lens, heads, dims, top_k), 64)


@pytest.mark.parametrize("heads", [9, 64])
@pytest.mark.parametrize("place", cases.GAPS)
@pytest.mark.parametrize("dims", cases.SPARSE_DIMS, ids=name)
def test_gaps_in_topk_indices(dims: tuple[int, int], place: str, heads: int) -> None:
    """Top-k indices fill one chunk and two, with partial last tiles."""
    for top_k in (452, 2180):
        cases.check_gaps(place, top_k, heads, dims)


@cases.BOTH_ROWS
def test_one_gap_anywhere(heads: int) -> None:
    cases.check_one_gap_anywhere(132, heads)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("top_k", [128, 2048])
@pytest.mark.parametrize("size", [1, 16, 128])
def test_topk_tokens_as_exact_as_elsewhere(size: int, top_k: int, q_len: int, heads: int) -> None:
    """Sizes, values and tolerances come from the tests of other implementations of the same function."""
    kv_lens = [4096] * size
    topk_indices = [draw_topk("distinct", q_len, 4096, top_k, seed) for seed in range(size)]
    data = MlaBatch([q_len] * size, kv_lens, heads, topk_indices=topk_indices)
    for values in (data.q, *data.k):
        values.clamp_(-1, 1)
    out = execute(data.decode(32)).double()
    torch.testing.assert_close(out, data.expected_mla().out, rtol=2e-2, atol=8e-4)


@pytest.mark.parametrize("seed", range(60))
def test_few_topk_indices_leave_room(seed: int) -> None:
    """Weights in bfloat16 cause the largest errors with few indices.

    By a model, the error is 0.88 of the tolerance of the test above, over 60 cases of 8.4 million outputs. It was 1.07
    with one reference for both tiles of a first step.
    """
    topk_indices = [draw_topk("distinct", 1, 4096, 128, 1000 * seed + request) for request in range(128)]
    data = MlaBatch([1] * 128, [4096] * 128, 128, topk_indices=topk_indices, seed=seed)
    for values in (data.q, *data.k):
        values.clamp_(-1, 1)
    expected = data.expected_mla().out
    error = (execute(data.decode(32)).double() - expected).abs()
    assert (error / (8e-4 + 2e-2 * expected.abs())).max() < 0.95


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("q_len", [1, 2, 5, 16, 32])
@pytest.mark.parametrize("dims", cases.DIMS, ids=name)
def test_masks_are_exact(dims: tuple[int, int], q_len: int, page_size: int) -> None:
    kv_lens = [*cases.lengths(cases.chunk_tokens(dims), page_size)[:-2], q_len - 1, q_len, 64 + q_len // 2]
    for heads in (1, 16, 128):
        cases.check_counts(cases.batch_of(Case([q_len] * len(kv_lens), kv_lens, heads, dims), "cuda"), page_size)


@pytest.mark.parametrize("kind", cases.TOPK_KINDS)
@pytest.mark.parametrize(("q_len", "heads"), [(1, 16), (2, 16), (5, 16), (32, 16), (1, 128), (5, 40)])
@pytest.mark.parametrize("dims", cases.SPARSE_DIMS, ids=name)
def test_topk_is_exact(dims: tuple[int, int], q_len: int, heads: int, kind: str) -> None:
    """Duplicates count twice, and entries that do not count have no effect."""
    for top_k in (64, 132, 1024):
        kv_lens = [0, 1, q_len - 1, q_len, 63, 64 + q_len // 2, top_k + q_len // 2, 5000]
        cases.check_counts(cases.batch_of(Case([q_len] * len(kv_lens), kv_lens, heads, dims, top_k, kind), "cuda"))


@cases.BOTH_ROWS
def test_scale_of_zero_is_uniform_attention(heads: int) -> None:
    data = MlaBatch([2, 2], [700, 60], heads)
    data.expected(scale=0.0).check(execute(data.decode(64, softmax_scale=0.0)))
