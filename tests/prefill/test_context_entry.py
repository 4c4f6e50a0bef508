"""``trtllm_batch_context_with_kv_cache`` in every input form, on the GPU and in the emulator, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, window
from helpers.calls.entries import KV_LENS, Q_LENS, cache_forms, context
from helpers.cases.prefill_configs import MAIN_DIMS

from hopwell.kernels import execute
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.problem import Mask

MASKS = ((-1, CAUSAL), (40, window(40)))
BF16, FP16 = torch.bfloat16, torch.float16


def batch(device: str, **options: Any) -> Batch:
    return Batch(Q_LENS, KV_LENS, device=device, **options)


@pytest.mark.parametrize("dims", MAIN_DIMS, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_caches(page_size: int, dims: tuple[int, int], device: str) -> None:
    data = batch(device, head_dim=dims[0], v_head_dim=dims[1])
    key, value, table = data.pages(page_size)
    for left, mask in MASKS:
        outs = [
            context(data, cache, table, kv_layout=layout, window_left=left) for cache, layout in cache_forms(key, value)
        ]
        data.expected(mask).check(outs[0])
        assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize(("page_size", "dim"), [(3, 64), (24, 128), (48, 80), (1000, 64)])
def test_pages_of_any_size(page_size: int, dim: int, device: str) -> None:
    """Rows, boxes of all columns or of one block, and pages taller than requests give the bits of pages of 16."""
    data = batch(device, head_dim=dim, v_head_dim=dim)
    pages = {size: data.pages(size) for size in (16, page_size)}
    even, uneven = (context(data, (key, value), table) for key, value, table in pages.values())
    data.expected().check(uneven)
    assert torch.equal(even, uneven)


@pytest.mark.parametrize("dims", [dims for dims in TILES if dims not in MAIN_DIMS], ids=str)
def test_other_head_dims(dims: tuple[int, int], device: str) -> None:
    data = batch(device, head_dim=dims[0], v_head_dim=dims[1])
    key, value, table = data.pages(16)
    data.expected().check(context(data, (key, value), table))


@pytest.mark.parametrize(("dim", "page_size"), [(8, 16), (72, 2), (248, 16)])
def test_multiples_of_8_between_those(dim: int, page_size: int, device: str) -> None:
    """Columns beyond the head dim, which may be foreign data in memory, have no effect and are not written."""
    data = batch(device, head_dim=dim, v_head_dim=dim)
    key, value, table = data.pages(page_size)
    pool = torch.full((*key.shape[:-1], 2 * dim + 8), torch.nan, dtype=data.dtype, device=device)
    cache = pool[..., :dim], pool[..., dim : 2 * dim]
    for part, values in zip(cache, (key, value), strict=True):
        part.copy_(values)
    room = torch.full((data.tokens, data.heads, dim + 8), 7.0, dtype=data.dtype, device=device)
    data.expected().check(context(data, cache, table, out=room[..., :dim]))
    assert (room[..., dim:] == 7).all()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [2, 16])
def test_separate_page_ids(page_size: int, layout: str, device: str) -> None:
    """K and V pages alternate in one pool, and V's pages are in another order."""
    data = batch(device)
    key, value, table = data.pages(page_size)
    order = torch.randperm(value.shape[0], generator=torch.Generator().manual_seed(1)).to(device)
    elsewhere = torch.empty_like(value)
    elsewhere[order] = value
    v_table = torch.where(table < 0, table, order[table.clamp(min=0).long()].int())
    pool = torch.stack((key, elsewhere), 1).flatten(0, 1)
    if layout == "NHD":
        pool = pool.transpose(1, 2).contiguous()
    tables = torch.stack((2 * table, 2 * v_table + 1), 1)
    out = context(data, (pool, pool), tables, kv_layout=layout, uses_shared_paged_kv_idx=False)
    data.expected().check(out)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_one_tensor_for_both(layout: str, device: str) -> None:
    data = batch(device)
    data.v = data.k
    key, _, table = data.pages(16)
    if layout == "NHD":
        key = key.transpose(1, 2).contiguous()
    data.expected().check(context(data, key[:, None], table, kv_layout=layout))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32], ids=str)
@pytest.mark.parametrize("shape", [(-1,), (-1, 1), (-1, 1, 1, 1), (1, -1)], ids=str)
def test_lengths(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    data = batch(device)
    key, value, table = data.pages(16)
    lengths = data.ints(data.kv_lens, dtype).view(shape)
    data.expected().check(context(data, (key, value), table.view(dtype), seq_lens=lengths))


def test_bounds_that_are_too_small(device: str) -> None:
    """Work is divided by the lengths themselves."""
    data = batch(device)
    key, value, table = data.pages(16)
    for bounds in (dict(max_q_len=4, max_kv_len=5), dict(max_q_len=0, max_kv_len=0)):
        data.expected().check(context(data, (key, value), table, **bounds))


def test_strides_of_query_and_output(device: str) -> None:
    """The query is a part of packed QKV, or has its heads first; memory between rows of the output does not change."""
    data = batch(device)
    key, value, table = data.pages(16)
    expected = data.expected()
    packed = torch.full((data.tokens, 3, 4, 128), torch.nan, dtype=data.dtype, device=device)[:, 1]
    heads_first = torch.empty(4, data.tokens, 128, dtype=data.dtype, device=device).transpose(0, 1)
    for query in (packed, heads_first):
        query.copy_(data.q)
        expected.check(context(data, (key, value), table, query=query))
        room = torch.full((data.tokens, 5, 136), 7.0, dtype=data.dtype, device=device)
        out = room[:, 1:, :128]
        assert context(data, (key, value), table, query=query, out=out) is out
        expected.check(out)
        assert (room[:, 0] == 7).all()
        assert (room[..., 128:] == 7).all()


@pytest.mark.parametrize(("dtype", "other"), [(BF16, FP16), (FP16, BF16)], ids=str)
def test_options(dtype: torch.dtype, other: torch.dtype, device: str) -> None:
    data = batch(device, dtype=dtype)
    key, value, table = data.pages(16)
    plain = context(data, (key, value), table)
    assert plain.dtype == data.dtype
    assert plain.is_contiguous()
    for pdl in (True, False, None):
        assert torch.equal(plain, context(data, (key, value), table, enable_pdl=pdl))
    converted = context(data, (key, value), table, out_dtype=other)
    assert converted.dtype == other
    data.expected(out_dtype=other).check(converted)
    sinks = torch.randn(4, device=device)
    with_sinks = context(data, (key, value), table, sinks=[sinks])
    data.expected(sinks=sinks).check(with_sinks)
    assert torch.equal(with_sinks, context(data, (key, value), table, sinks=sinks))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_scales(dtype: torch.dtype, device: str) -> None:
    """A scale is a float, a tensor that the kernel reads, or a tensor on the host."""
    data = batch(device, dtype=dtype)
    key, value, table = data.pages(16)
    plain = context(data, (key, value), table, bmm1_scale=0.07, bmm2_scale=1.5)
    data.expected(scale=0.07).check(plain, factor=1.5)
    for where in (device, "cpu"):
        scales = {"bmm1_scale": torch.full((1,), 0.07, device=where), "bmm2_scale": torch.tensor(1.5, device=where)}
        assert torch.equal(plain, context(data, (key, value), table, **scales))


@pytest.mark.parametrize(("page_size", "left", "mask"), [(2, -1, CAUSAL), (16, -1, CAUSAL), (16, 400, window(400))])
def test_skip_softmax(page_size: int, left: int, mask: Mask, device: str) -> None:
    """The entry skips the same number of tiles as its problem, whose tests count them; with a tiny factor it skips
    none.
    """
    data = Batch([130], [700], heads=2, kv_heads=1, magnitude=3.0, device=device)
    data.k[0][:-100] *= 0.02
    key, value, table = data.pages(page_size)
    factor, count = 20.0, torch.zeros(1, dtype=torch.int32, device=device)
    want = execute(data.problem(page_size, mask, skip_softmax=factor, skipped_tiles=count))
    assert int(count) > 0

    def call(skip_softmax: float | None) -> torch.Tensor:
        options = dict(window_left=left, skip_softmax_threshold_scale_factor=skip_softmax)
        return context(data, (key, value), table, **options)

    out = call(factor)
    assert torch.equal(out, want)
    assert not torch.equal(out, call(None))
    data.expected(mask).check(call(1e-30))


def test_repeated_with_other_tensors(device: str) -> None:
    """Repeated calls take a short path; they must see every new address, length and value."""
    calls = []
    for seed in range(4):
        data = Batch(Q_LENS, KV_LENS[::-1] if seed % 2 else KV_LENS, seed=seed, device=device)
        key, value, table = data.pages(16)
        table = torch.nn.functional.pad(table, (0, 60 - table.shape[1]), value=-1)
        pools = tuple(torch.cat([p, p.new_zeros(120 - p.shape[0], *p.shape[1:])]) for p in (key, value))
        data.expected().check(context(data, pools, table))
        calls.append((data, pools, table))
    for data, pools, table in calls:
        data.expected().check(context(data, pools, table))


def test_pools_of_other_strides(device: str) -> None:
    """K and V have different strides: V's pages are every other page of a pool, K's are dense."""
    data = batch(device)
    key, value, table = data.pages(16)
    wide = torch.full((value.shape[0], 2, *value.shape[1:]), torch.nan, dtype=data.dtype, device=device)
    wide[:, 1] = value
    data.expected().check(context(data, (key, wide[:, 1]), table))


@pytest.mark.parametrize("natural", [False, True], ids=["log2", "ln"])
def test_context_parallel_calls(natural: bool, device: str) -> None:
    """vLLM's decode context parallelism requests the log-sum-exp, and no mask for keys of earlier chunks."""
    data = batch(device)
    key, value, table = data.pages(16)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    client: dict[str, Any] = dict(kv_cache_sf=None, multi_ctas_kv_counter_buffer=counters, return_lse=True)
    base = dict(lse_base="ln") if natural else {}
    for causal, mask in ((True, CAUSAL), (False, FULL)):
        given = torch.full((data.tokens, 4), 7.0, device=device)
        out, lse = context(data, (key, value), table, causal=causal, lse=given, **client, **base)
        assert lse is given
        expected = data.expected(mask)
        expected.check(out)
        expected.check_lse(lse, natural=natural)
        assert torch.equal(out, context(data, (key, value), table, causal=causal))
    sinks = torch.randn(4, device=device)
    out, lse = context(data, (key, value), table, sinks=sinks, window_left=40, **client, **base)
    expected = data.expected(window(40), sinks=sinks)
    expected.check(out)
    expected.check_lse(lse, natural=natural)
