"""MLA of e4m3 queries over e4m3 caches with fp8 MMA: changes that must not affect a bit, and the weight of far tiles.

Tiles of any logits keep their weight, however far they are below the others.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import E4M3, Fp8MlaBatch
from helpers.batches.mla import with_topk
from helpers.batches.prefill import LN_2, check_requests_alone, same
from helpers.calls.entries import mla
from helpers.cases.mla import (
    BOTH_ROWS,
    DIMS,
    FEW_HEADS,
    GAPS,
    MANY_HEADS,
    TOP_K,
    Case,
    check_case,
    check_counts,
    check_gaps,
)

from hopwell.kernels import execute, support
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, ROWS
from hopwell.kernels.jit import settings
from hopwell.kernels.problem import AttentionProblem, Family, PageTable
from hopwell.kernels.registry import query_dtype, resolve
from tests.mla.test_clients import call
from tests.mla.test_parts import Buffers

KV_LENS = [70, 0, 3, 330]
KINDS = pytest.mark.parametrize("top_k", [0, TOP_K], ids=["dense", "sparse"])
# Heads of one new token: rows of the smaller tile, and all rows of a larger one.
FULL_TILES = pytest.mark.parametrize("heads", [16, 64], ids=["rows16", "rows64"])
SHARED_KEYS = {16: 64, 64: 128}  # keys with one reference, by heads: of a tile, or of the two tiles of a step


def multiplies_fp8(arch: str) -> bool:
    return query_dtype(Family.MLA, arch, E4M3, E4M3) == E4M3


@pytest.fixture(autouse=True)
def fp8_products(request: pytest.FixtureRequest) -> None:
    """Skip GPUs that run kernels of another architecture, where these queries are dequantized first."""
    if request.node.get_closest_marker("gpu") and not multiplies_fp8(support.arch_of(torch.device("cuda"))):
        pytest.skip("kernels of this architecture do not multiply e4m3 queries")


def batch(device: str, q_len: int = 1, top_k: int = 0, kv_lens: list[int] = KV_LENS, **options: Any) -> Fp8MlaBatch:
    return with_topk(Fp8MlaBatch, [q_len] * len(kv_lens), kv_lens, top_k, device=device, **options)


def bytes_of(data: Fp8MlaBatch, problem: AttentionProblem, **more: Any) -> torch.Tensor:
    """Return the entry's output for 8-bit queries."""
    q_len = data.q_lens[0]
    query = problem.query.view(data.size, q_len, data.heads, data.head_dim)
    return mla(data, problem, **dict(query=query) | more)


def test_kernels_use_fp8_mma() -> None:
    """The other tests of this file rely on this property."""
    assert multiplies_fp8("sm_90a")
    assert not multiplies_fp8("sm_120a")
    for heads, rows in ((FEW_HEADS, LATENT_SWAP_AB_ROWS), (MANY_HEADS, ROWS)):
        config = resolve(batch("cpu", heads=heads).decode(64), "sm_90a")
        assert (config.uses_fp8_mma, config.rows, config.out_dtype) == (True, rows, "bf16")


@KINDS
@BOTH_ROWS
def test_entry(heads: int, top_k: int, device: str) -> None:
    """The output is in bfloat16, and factors on it apply."""
    data = batch(device, 2, top_k, heads=heads)
    out = bytes_of(data, data.decode(64), bmm2_scale=-0.75)
    assert out.dtype == torch.bfloat16
    data.expected_mla().check(out.flatten(0, 1), factor=-0.75)


@BOTH_ROWS
@pytest.mark.parametrize("page_size", [1, 24, 512])
def test_places_of_keys_change_no_bit(page_size: int, heads: int, device: str) -> None:
    """Boxes and rows of pages come in the same order, for every page size and place."""
    data = batch(device, 2, heads=heads)
    out = execute(data.decode(64))
    problem, moved = data.decode(page_size), data.decode(page_size, order=5)
    assert torch.equal(execute(problem), out)
    same(problem, key=moved.key, value=moved.value, page_table=moved.page_table)


@BOTH_ROWS
def test_places_of_topk_keys_change_no_bit(heads: int, device: str) -> None:
    data = batch(device, 2, TOP_K, heads=heads)
    moved = data.decode(3, order=5)
    same(data.decode(64), key=moved.key, value=moved.value, token_table=moved.token_table)


@pytest.mark.usefixtures("batch_invariant")
@pytest.mark.parametrize(("heads", "top_k"), [(MANY_HEADS, 0), (MANY_HEADS, TOP_K), (FEW_HEADS, 0), (FEW_HEADS, TOP_K)])
def test_requests_by_themselves(heads: int, top_k: int, device: str) -> None:
    """Few rows give the same bits without the setting too."""
    data = batch(device, 2, top_k, [1100, 5, 900], heads=heads)
    out = execute(data.decode(64))
    data.expected_mla().check(out)
    check_requests_alone(data, out, 64)


@BOTH_ROWS
def test_swap_ab_needs_no_setting(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for given in (False, True):
        monkeypatch.setattr(settings.BATCH_INVARIANT, "given", given)
        names.append(resolve(batch("cpu", heads=heads).decode(64), "sm_90a").name)
    assert (names[0] == names[1]) == (heads == FEW_HEADS)


@KINDS
@BOTH_ROWS
def test_strides(heads: int, top_k: int, device: str) -> None:
    """Queries at equal distances, which TMA can fetch, and at other distances; a cache between NaN."""
    data = batch(device, 2, top_k, heads=heads)
    problem = data.decode(16)
    out, query = bytes_of(data, problem), problem.query.view(data.size, 2, heads, 576)

    def room(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device=device).to(E4M3)

    wide_rows = room(*query.shape[:3], 640)[..., 16:592]
    more_heads = room(*query.shape[:2], heads + 3, 576)[:, :, 2:-1]
    heads_first = room(heads, *query.shape[:2], 576).movedim(0, 2)
    for other in (wide_rows, more_heads, heads_first):
        other.copy_(query)
        assert torch.equal(out, bytes_of(data, problem, query=other))
    pages, _, page_size, width = problem.key.shape
    wide = room(pages, 2, page_size, width + 32)[:, 1:, :, 16:-16]
    wide.copy_(problem.key)
    assert torch.equal(out, bytes_of(data, problem, kv_cache=wide))


@KINDS
@BOTH_ROWS
def test_what_is_behind_the_keys_changes_no_bit(heads: int, top_k: int, device: str) -> None:
    """Tables and top-k indices end in arbitrary values; the rest of a last page, NaN at first, may be the largest
    numbers.
    """
    data = batch(device, 2, top_k, heads=heads)
    problem = data.decode(64)
    assert problem.key.float().isnan().any()
    numbers = torch.where(problem.key.float().isnan(), 448.0, problem.key.float()).to(E4M3)
    same(problem, key=numbers, value=numbers[..., :512])
    if problem.page_table is None:
        counted = torch.cat([data.counted(i) for i in range(data.size)])
        same(problem, token_table=torch.where(counted, problem.token_table, 2**31 - 1))
    else:
        table = torch.where(problem.page_table.key < 0, 2**31 - 1, problem.page_table.key)
        same(problem, page_table=PageTable(table, table))


@BOTH_ROWS
@pytest.mark.parametrize("place", ["first", "tile", "every other", "all"])
def test_gaps_in_topk_indices(place: str, heads: int, device: str) -> None:
    assert place in GAPS
    check_gaps(place, 196, heads, device=device, kind=Fp8MlaBatch)


@BOTH_ROWS
def test_masks_are_exact(heads: int, device: str) -> None:
    """Each visible key counts equally, at every edge of tiles, also with few keys."""
    data = batch(device, 3, kv_lens=[0, 1, 2, 63, 65, 130, 257], heads=heads)
    check_counts(data, 16)


@BOTH_ROWS
def test_all_at_once(heads: int, device: str) -> None:
    """Ragged new tokens, more of them than keys, meet sinks and the log-sum-exp; with scales on the device on a GPU."""
    sizes = [3, 0, 1, 2, 3], [1, 40, 0, 130, 700]
    if device == "cuda":
        check_case(Case(*sizes, heads=heads, ragged=True, tensor_scales=True, dtype="e4m3"), 16)
    from hopwell import emulator

    if device == "cpu":
        with emulator.use("sm_90a"):
            check_case(Case(*sizes, heads=heads, ragged=True, dtype="e4m3"), 16, device)


@pytest.mark.parametrize("heads", [FEW_HEADS, 20])
def test_context_parallel_ranks(heads: int, device: str) -> None:
    """Each DCP rank has every third key; combined, the ranks give the result of all keys."""
    data, world = batch(device, 3, heads=heads), 3
    query = data.decode(64).query.view(data.size, 3, heads, 576)
    options: dict[str, Any] = dict(enable_dcp=True, cp_world=world, causal_seqlens_kv_global=data.ints(KV_LENS))
    parts = []
    for rank in range(world):
        problem = data.dcp_rank(world, rank).decode(64)
        out, lse = call(data, problem, query=query, return_lse=True, backend="cute-dsl", cp_rank=rank, **options)
        parts.append((out.view(-1, heads, 512), lse.view(-1, heads)))
    outs, logs = (torch.stack(each).double() for each in zip(*parts, strict=True))
    expected, lse = data.expected_mla(), logs.logsumexp(0)
    weights = (logs - lse).exp().nan_to_num(0.0)
    assert (outs[logs == -math.inf] == 0).all(), "a row without visible keys is not zero"
    assert ((weights[..., None] * outs).sum(0) - expected.out).norm() <= 1.6e-2 * expected.out.norm()
    expected.check_lse(lse)


def along_last_column(data: Fp8MlaBatch, logits: torch.Tensor) -> Fp8MlaBatch:
    """Give every key of each request the raw score of ``logits``, carried by its last column alone."""
    data.q.zero_()
    data.q[..., -1] = 1.0
    for k in data.k:
        k[:, 0, -1] = logits.to(k)
    return data.keep()


@FULL_TILES
@pytest.mark.parametrize("place", [3, 600, 1099])
def test_tails_keep_their_weight(place: int, heads: int, device: str) -> None:
    """One key has 2^20 times the weight of all others, and the value 0, so the output is the sum of keys in other
    tiles.

    These tiles are visited before or after. Relative to the largest weight of all, e4m3 would round each of their
    weights to 0.
    """
    keys = 1100
    token = torch.arange(keys, device=device)
    data = along_last_column(batch(device, kv_lens=[keys], heads=heads), token == place)
    others = token // SHARED_KEYS[heads] != place // SHARED_KEYS[heads]
    data.k[0][..., :512] = others[:, None, None].to(data.dtype)
    out = execute(data.decode(64, softmax_scale=20 * LN_2)).double()
    exact = int(others.sum()) * 2.0**-20 / (1 + (keys - 1) * 2.0**-20)
    assert ((out - exact).abs() <= exact * 2.0**-7).all()


@FULL_TILES
def test_logits_that_jump_between_tiles(heads: int, device: str) -> None:
    """Raw scores of tiles are a thousand powers of two and more apart, up and down.

    The same tiles are the largest on both sides of others. Within a tile, scores differ by amounts that the tensor
    cores add exactly.
    """
    levels = torch.tensor([0, 448, -448, 448, 64, -64, 448, -448, 0, 416, -448], device=device)
    keys = SHARED_KEYS[heads]
    token = torch.arange(keys * len(levels) - 7, device=device)
    data = along_last_column(batch(device, kv_lens=[len(token)], heads=heads), levels[token // keys])
    data.q[..., -2] = 1.0
    data.k[0][:, 0, -2] = (token % 5).to(data.dtype)
    expected = data.expected_mla(scale=2.25)
    expected.check(execute(data.decode(64, softmax_scale=2.25)))


@FULL_TILES
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_rising_logits(sign: int, heads: int, device: str) -> None:
    """The largest logit rises with every tile, and values change with it, so a missing rescale is visible."""
    keys = 900
    token = torch.arange(keys, device=device)
    tile = token // SHARED_KEYS[heads]
    data = along_last_column(batch(device, kv_lens=[keys], heads=heads), sign * (tile - 7))
    data.k[0][..., :512] = 1.0 + (tile % 4)[:, None, None].to(data.dtype)
    for scale in (LN_2 / 2, 3 * LN_2, 20 * LN_2):
        out = execute(data.decode(64, softmax_scale=scale)).double()
        # Weights of a tile are equal, and so exact.
        assert ((out - data.expected_mla(scale=scale).out).abs() <= 2.0**-8 * out.abs()).all(), scale


@BOTH_ROWS
def test_far_sinks_and_a_scale_of_zero(heads: int, device: str) -> None:
    data = batch(device, 2, kv_lens=[300, 0, 100], heads=heads)
    for sink in (-3000.0, 0.5, 3000.0):
        sinks = torch.full((heads,), sink, device=device)
        data.expected_mla(sinks=sinks).check(execute(data.decode(64, sinks=sinks)))
    data.expected_mla(scale=0.0).check(execute(data.decode(64, softmax_scale=0.0)))


@pytest.mark.gpu
@pytest.mark.usefixtures("batch_invariant")
@KINDS
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_long_requests(dims: tuple[int, int], heads: int, top_k: int) -> None:
    """Requests have many chunks and leaves; each gives the same bits alone and in the batch."""
    sizes = dict(head_dim=dims[0], v_head_dim=dims[1])
    data = batch("cuda", 2, 16 * top_k, [9000, 5, 40_000], heads=heads, **sizes)
    out = execute(data.decode(64))
    data.expected_mla().check(out)
    for page_size in () if top_k else (1, 24, 512):
        assert torch.equal(execute(data.decode(page_size)), out)
    check_requests_alone(data, out, 64)


@pytest.mark.gpu
@KINDS
@BOTH_ROWS
def test_runs_do_not_differ(heads: int, top_k: int) -> None:
    problem = batch("cuda", 2, top_k, [700, 0, 5, 40_000, 9000], heads=heads).decode(64)
    first = execute(problem).clone()
    for _ in range(100):
        assert torch.equal(execute(problem), first)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_error_does_not_grow_with_keys(heads: int) -> None:
    """Rounding is the same for any number of keys, and sums are float32."""
    errors = {}
    for keys in (4096, 131_072):
        data = batch("cuda", kv_lens=[keys], heads=heads)
        exact = data.expected_mla().out
        errors[keys] = float((execute(data.decode(64)).double() - exact).norm() / exact.norm())
    print(errors)
    assert errors[131_072] <= 1.2 * errors[4096]


@pytest.mark.gpu
@KINDS
@BOTH_ROWS
def test_graph_replays_with_other_lengths_and_tables(heads: int, top_k: int) -> None:
    """Lengths that grow and shrink under a graph give the bits of a call of their own."""
    batches = (batch("cuda", 1, top_k, kv_lens, heads=heads, seed=i) for i, kv_lens in enumerate(Buffers.LENGTHS))
    Buffers(1, heads, top_k, E4M3).check_replays(batches)
