"""``cudnn_batch_prefill_with_kv_cache`` in every input form, on the GPU and in the emulator, against float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, starts
from helpers.calls.entries import KV_LENS, Q_LENS, cudnn, elements, ragged_offsets, ragged_rows

BF16, FP16 = torch.bfloat16, torch.float16


def batch(device: str, dims: tuple[int, int] = (128, 128), **options: Any) -> Batch:
    return Batch(Q_LENS, KV_LENS, 4, 2, *dims, device=device, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_caches(dims: tuple[int, int], causal: bool, device: str) -> None:
    data = batch(device, dims)
    expected = data.expected(CAUSAL if causal else FULL)
    key, value, _ = data.ragged()
    out, lse = cudnn(data, key, value, causal=causal, **ragged_offsets(data))
    expected.check(out)
    assert lse.shape == (data.size, max(data.q_lens), data.heads)
    rows = ragged_rows(data, lse)
    expected.check_lse(rows)
    for page_size in (2, 16, 64):
        key, value, table = data.pages(page_size)
        nhd = [pool.transpose(1, 2).contiguous().transpose(1, 2) for pool in (key, value)]
        for pools in ((key, value), nhd):
            paged, paged_lse = cudnn(data, *pools, causal=causal, block_tables=table)
            assert torch.equal(out, paged)
            assert torch.equal(rows, ragged_rows(data, paged_lse))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32], ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["ragged", "paged"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=str)
def test_offsets(dims: tuple[int, int], paged: bool, dtype: torch.dtype, device: str) -> None:
    """Each tensor has gaps of its own between requests, which are neither read nor written."""
    data = batch(device, dims)
    begins = starts(data.q_lens)
    rows = data.tokens + 3 * (data.size + 1)
    q_begins = [begin + 3 * (i + 1) for i, begin in enumerate(begins)]
    o_begins = [rows - begin for begin in q_begins][1:]  # the last request first
    lse_begins = [max(data.q_lens) * i for i in reversed(range(data.size))]
    query = torch.full((rows, 4, dims[0]), math.nan, dtype=data.dtype, device=device)
    for begin, q_begin, length in zip(begins, q_begins, data.q_lens, strict=False):
        query[q_begin : q_begin + length] = data.q[begin : begin + length]
    out = torch.full((rows, 4, dims[1]), 7.0, dtype=data.dtype, device=device)
    lse = torch.full((data.size, max(data.q_lens), 4), 7.0, device=device)
    if paged:
        key, value, table = data.pages(16)
        options: dict[str, Any] = dict(block_tables=table.view(dtype))
    else:
        key, _, k_begins = data.ragged(gap=2)
        _, value, v_begins = data.ragged(gap=5)
        options = dict(
            batch_offsets_k=elements(data, k_begins, 2 * dims[0], dtype),
            batch_offsets_v=elements(data, v_begins, 2 * dims[1], dtype),
        )
    cudnn(
        data,
        key,
        value,
        q=query,
        out=out,
        lse=lse,
        actual_seq_lens_q=data.ints(data.q_lens, dtype),
        actual_seq_lens_kv=data.ints(data.kv_lens, dtype).view(-1, 1),
        batch_offsets_q=elements(data, q_begins, 4 * dims[0], dtype),
        batch_offsets_o=elements(data, [*o_begins, rows], 4 * dims[1], dtype),
        batch_offsets_stats=elements(data, [*lse_begins, 0], 4, dtype),
        **options,
    )
    expected, flat = data.expected(), lse.flatten(0, 1)
    results = torch.cat([out[at : at + n] for at, n in zip(o_begins, data.q_lens, strict=True)])
    expected.check(results)
    expected.check_lse(torch.cat([flat[at : at + n] for at, n in zip(lse_begins, data.q_lens, strict=True)]))
    untouched = (
        torch.ones(rows, dtype=torch.bool, device=device),
        torch.ones(len(flat), dtype=torch.bool, device=device),
    )
    for o_begin, lse_begin, length in zip(o_begins, lse_begins, data.q_lens, strict=True):
        untouched[0][o_begin : o_begin + length] = untouched[1][lse_begin : lse_begin + length] = False
    assert (out[untouched[0]] == 7).all()
    assert (flat[untouched[1]] == 7).all()


@pytest.mark.parametrize(("on", "dtype"), [("device", BF16), ("host", BF16), ("device", FP16)], ids=str)
def test_lengths(on: str, dtype: torch.dtype, device: str) -> None:
    data = batch(device, dtype=dtype)
    key, value, table = data.pages(16)
    lengths = {
        f"actual_seq_lens_{name}": torch.tensor(numbers, dtype=torch.int32).to("cpu" if on == "host" else device)
        for name, numbers in (("q", data.q_lens), ("kv", data.kv_lens))
    }
    out, lse = cudnn(data, key, value, block_tables=table, **lengths)
    expected = data.expected()
    expected.check(out)
    expected.check_lse(ragged_rows(data, lse))


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])
def test_log_sum_exp(ragged: bool, given: bool, device: str) -> None:
    """The log-sum-exp is padded, or ragged by offsets; allocated, or given.

    Rows outside every request are -inf if padded, and unchanged otherwise. The output does not depend on the
    log-sum-exp.
    """
    data = batch(device)
    key, value, table = data.pages(16)
    options: dict[str, Any] = dict(block_tables=table)
    if ragged:
        options["batch_offsets_stats"] = elements(data, starts(data.q_lens), 4)
    if given:
        options["lse"] = torch.full((data.size, max(data.q_lens), 4), 7.0, device=device)
    out, lse = cudnn(data, key, value, **options)
    assert lse.shape == (data.size, max(data.q_lens), 4)
    data.expected().check_lse(lse.flatten(0, 1)[: data.tokens] if ragged else ragged_rows(data, lse))
    if given:
        assert lse is options["lse"]
    if not ragged:
        assert all((lse[i, n:] == -math.inf).all() for i, n in enumerate(data.q_lens))
    elif given:
        assert (lse.flatten(0, 1)[data.tokens :] == 7).all()
    without, none = cudnn(data, key, value, block_tables=table, return_lse=False)
    assert none is None
    assert torch.equal(out, without)


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("units", ["padded", "elements", "tokens"])
def test_log_sum_exp_with_heads_first(units: str, given: bool, device: str) -> None:
    """Its bits are the bits of the log-sum-exp with tokens first. A row of no request is -inf if padded."""
    data = Batch([3, 0, 18], [9, 4, 20], 4, 2, 64, 64, device=device)
    key, value, table = data.pages(16)
    out, rows = cudnn(data, key, value, block_tables=table, lse_base="log2")
    options: dict[str, Any] = dict(block_tables=table, lse_base="log2", lse_layout="HN")
    if units == "padded":
        want = rows.transpose(1, 2)
    else:
        want = ragged_rows(data, rows).T
        options |= dict(batch_offsets_stats=data.ints(starts(data.q_lens)), batch_offsets_units=units)
    if units == "tokens":
        options |= dict(batch_offsets_q=data.ints(starts(data.q_lens)), batch_offsets_o=None)
    if given:
        options["lse"] = torch.full(want.shape, 7.0, device=device)
    again, lse = cudnn(data, key, value, **options)
    assert torch.equal(again, out)
    assert lse.is_contiguous()
    assert torch.equal(lse, want)
    assert not given or lse is options["lse"]


@pytest.mark.parametrize("lens_dtype", [torch.int32, torch.int64], ids=str)
def test_padding_of_the_log_sum_exp(lens_dtype: torch.dtype, device: str) -> None:
    """The padding may have more rows than tokens, and requests may be fewer or more than SMs.

    All rows without a query become -inf. Rows of tokens past the bound do not affect them.
    """
    for q_lens, rows in (([3, 0, 17], 33), ([2, 0, 1, 1, 0, 2, 0, 0, 1], 3), ([0, 40], 7)):
        data = Batch(q_lens, [9] * len(q_lens), 4, 2, device=device)
        key, value, table = data.pages(16)
        lse = torch.full((data.size, rows, 4), math.nan, device=device)
        lengths = torch.tensor(q_lens, dtype=lens_dtype, device=device)
        more = dict(max_token_per_sequence=rows, actual_seq_lens_q=lengths, lse=lse)
        out, _ = cudnn(data, key, value, block_tables=table, **more)
        expected = data.expected()
        expected.check(out)
        for i, (begin, length) in enumerate(zip(starts(q_lens), q_lens, strict=False)):
            there = min(length, rows)
            assert (lse[i, there:] == -math.inf).all()
            replace(expected, lse=expected.lse[begin : begin + there]).check_lse(lse[i, :there])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_single_request_without_offsets(dtype: torch.dtype, device: str) -> None:
    data = Batch([130], [300], dtype=dtype, device=device)
    key, value, _ = data.ragged()
    out, lse = cudnn(data, key, value, batch_offsets_q=None, batch_offsets_o=None)
    expected = data.expected()
    expected.check(out)
    expected.check_lse(lse[0])


def in_storage(data: Batch, lengths: Sequence[int], ragged: torch.Tensor) -> torch.Tensor:
    """Return the offsets of requests, in elements of the storage behind ``ragged``."""
    return elements(data, starts(lengths), ragged.stride(0))


@pytest.mark.parametrize("padding", [0, 24], ids=["fused", "padded"])
def test_offsets_count_elements_of_storage(padding: int, device: str) -> None:
    """In vLLM's vision encoders, Q, K and V are slices of one tensor, and scales are None.

    Requests after the first start at the offsets of that tensor. With padding, each tensor has its own token stride.
    """
    lengths = [70, 0, 130, 1]
    data = Batch(lengths, lengths, 4, 4, 80, device=device)
    expected = data.expected(FULL)
    width = 4 * 80
    fused = torch.full((data.tokens, 3 * width + padding), math.nan, dtype=data.dtype, device=device)
    q, k, v = (fused[:, i * width : (i + 1) * width].unflatten(1, (4, 80)) for i in range(3))
    q.copy_(data.q)
    k.copy_(torch.cat(data.k))
    v.copy_(torch.cat(data.v))
    if padding:
        v = torch.cat(data.v)
    room = torch.full((data.tokens, width + padding), 7.0, dtype=data.dtype, device=device)
    out = room[:, :width].unflatten(1, (4, 80))
    starts_of = {
        f"batch_offsets_{name}": in_storage(data, lengths, x) for name, x in zip("qkvo", (q, k, v, out), strict=True)
    }
    found, none = cudnn(
        data,
        k,
        v,
        q=q,
        out=out,
        causal=False,
        return_lse=False,
        **{name: offsets.view(-1, 1, 1, 1) for name, offsets in starts_of.items()},
    )
    assert none is None
    expected.check(found)
    assert (room[:, width:] == 7).all()


@pytest.mark.parametrize("ragged", [False, True], ids=["padded", "ragged"])
def test_requests_longer_than_their_bound(ragged: bool, device: str) -> None:
    """Rows without a place in the log-sum-exp write nothing: neither into the next request nor after the tensor."""
    data = Batch([70, 3, 130], [70, 3, 130], device=device)
    key, value, table = data.pages(16)
    bound = 4
    memory = torch.full((3 * bound + 200, 4), 7.0, device=device)
    offsets = dict(batch_offsets_stats=elements(data, [5, 1, 9], 4)) if ragged else {}
    lse = memory[: 3 * bound].view(3, bound, 4)
    out, _ = cudnn(data, key, value, block_tables=table, lse=lse, max_token_per_sequence=bound, **offsets)
    expected = data.expected()
    expected.check(out)
    assert (memory[3 * bound :] == 7).all()
    if not ragged:
        exact = torch.cat(
            [expected.lse[begin : begin + min(n, bound)] for begin, n in zip((0, 70, 73), data.q_lens, strict=True)]
        )
        found = torch.cat([lse[i, :n] for i, n in enumerate(data.q_lens)])
        assert torch.allclose(found.double(), exact, atol=1e-4)
        assert (lse[1, 3] == -math.inf).all()


def test_offsets_in_tokens(device: str) -> None:
    """FlashInfer's wrappers pass cumulative lengths instead of offsets, and a packed log-sum-exp to base 2."""
    data = batch(device)
    key, value, _ = data.ragged()
    q_starts, k_starts = data.ints(starts(data.q_lens)), data.ints(starts(data.kv_lens))
    wrapper: dict[str, Any] = dict(
        batch_offsets_q=q_starts,
        batch_offsets_o=q_starts,
        batch_offsets_k=k_starts,
        batch_offsets_v=k_starts,
        batch_offsets_stats=q_starts,
        batch_offsets_units="tokens",
        lse_base="log2",
        lse=torch.full((data.tokens, 4), math.nan, device=device),
    )
    expected = data.expected()
    out, lse = cudnn(data, key, value, **wrapper)
    expected.check(out)
    expected.check_lse(lse, natural=False)
    del wrapper["batch_offsets_o"], wrapper["batch_offsets_v"]
    without = cudnn(data, key, value, **wrapper, actual_seq_lens_q=None, actual_seq_lens_kv=None, batch_offsets_o=None)
    assert torch.equal(out, without[0])
    converted, _ = cudnn(data, key, value, **wrapper, batch_offsets_o=None, o_data_type=FP16)
    data.expected(out_dtype=FP16).check(converted)
