"""``hopwell.flash_attn`` against float64 on the emulator. Memory that no request owns holds NaN."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.oracles.reference import attention, visible

from hopwell.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from hopwell.kernels.problem import Mask, MaskKind, Score

pytestmark = pytest.mark.emulator
HEADS, KV_HEADS, DIM = 4, 2, 64
SINKS = torch.tensor([-1.0, 0.0, 2.0, 9.0])


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bhsd(x: torch.Tensor) -> torch.Tensor:
    """Return the values of [batch, seqlen, heads, dim] in the memory order of [batch, heads, seqlen, dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def check(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> None:
    """Check the output [q_len, heads, dim] and the log-sum-exp [heads, q_len] of one request."""
    left, right = options.get("window_size", (-1, -1))
    causal = Mask(MaskKind.SLIDING_WINDOW, left) if left >= 0 else Mask(MaskKind.CAUSAL)
    others = Mask(MaskKind.FULL) if left < 0 and right < 0 else Mask(MaskKind.LOCAL, left, window_right=right)
    want, want_lse = attention(
        q,
        k,
        v,
        options.get("softmax_scale", DIM**-0.5),
        visible(q.shape[0], k.shape[0], causal if options.get("causal") else others, q.device),
        options.get("s_aux"),
        score=Score.capped(options.get("softcap", 0.0), has_slopes=False),
    )
    assert (out.double() - want).norm() <= 5e-3 * want.norm()
    torch.testing.assert_close(lse.t().double(), want_lse, rtol=0, atol=1e-5)


DENSE = {
    "causal": {"causal": True},
    "full": {"softmax_scale": 0.3},
    "window": {"causal": True, "window_size": (3, 7)},
    "local": {"window_size": (3, 2)},
    "softcap": {"causal": True, "softcap": 2.0},
    "sinks": {"causal": True, "s_aux": SINKS},
    "softcap-sinks": {"causal": True, "softcap": 2.0, "s_aux": SINKS.bfloat16()},
}


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("q_len", [5, 9, 13])
def test_batches_of_equal_lengths(name: str, q_len: int) -> None:
    """The mask is aligned to the bottom right, also with fewer keys than queries. Strides may be [B, H, S, D]'s."""
    q, k, v = data(2, q_len, HEADS, DIM), data(2, 9, KV_HEADS, DIM, seed=1), data(2, 9, KV_HEADS, DIM, seed=2)
    out, lse, nothing = flash_attn_func(q, k, v, return_attn_probs=True, **DENSE[name])
    assert nothing is None
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, q_len)
    for i in range(2):
        check(out[i], lse[i], q[i], k[i], v[i], **DENSE[name])
    given = bhsd(torch.full_like(q, math.nan))
    results = flash_attn_func(bhsd(q), bhsd(k), bhsd(v), return_softmax_lse=True, out=given, **DENSE[name])
    assert results[0] is given
    assert torch.equal(given, out)
    assert torch.equal(results[1], lse)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_empty_batches(shape: tuple[int, int, int]) -> None:
    batch, q_len, k_len = shape
    keys = data(batch, k_len, KV_HEADS, DIM)
    out, lse = flash_attn_func(data(batch, q_len, HEADS, DIM), keys, keys, return_softmax_lse=True)
    assert torch.equal(out, torch.zeros(batch, q_len, HEADS, DIM, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((batch, HEADS, q_len), -math.inf))


Q_LENS, KV_LENS = (3, 0, 20, 2, 4), (9, 5, 20, 0, 1)


def starts(lens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


@pytest.mark.parametrize("name", DENSE)
def test_ragged_requests(name: str) -> None:
    """Requests may be empty, and have fewer keys than queries."""
    q = data(sum(Q_LENS), HEADS, DIM)
    k, v = data(sum(KV_LENS), KV_HEADS, DIM, seed=1), data(sum(KV_LENS), KV_HEADS, DIM, seed=2)
    bounds = starts(Q_LENS), starts(KV_LENS), max(Q_LENS), torch.tensor(max(KV_LENS))
    out, lse = flash_attn_varlen_func(q, k, v, *bounds, return_softmax_lse=True, **DENSE[name])
    assert lse.shape == (HEADS, q.shape[0])
    for i, j in zip(itertools.pairwise(bounds[0].tolist()), itertools.pairwise(bounds[1].tolist()), strict=True):
        rows, keys = slice(*i), slice(*j)
        check(out[rows], lse[:, rows], q[rows], k[keys], v[keys], **DENSE[name])


def test_ragged_keys_behind_seqused_k_do_not_count() -> None:
    q, k, v = data(6, HEADS, DIM), data(20, KV_HEADS, DIM, seed=1), data(20, KV_HEADS, DIM, seed=2)
    k[7:10] = v[7:10] = math.nan
    bounds, used = (starts((2, 4)), starts((10, 10)), 4, 10), torch.tensor([7, 10], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, v, *bounds, causal=True, seqused_k=used, return_softmax_lse=True)
    check(out[:2], lse[:, :2], q[:2], k[:7], v[:7], causal=True)
    check(out[2:], lse[:, 2:], q[2:], k[10:], v[10:], causal=True)


PAGE_SIZE = 16
LENS = (7, 0, 40)


def pages(lens: tuple[int, ...], capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
    """Return K and V pages of a pool in random order, their page table, and the rows of each request's tokens in the
    pool. The table has -1 behind the last page."""
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((len(lens), 3), -1, dtype=torch.int32)
    for request in range(len(lens)):
        needed = -(-min(lens[request] + capacity, 3 * PAGE_SIZE) // PAGE_SIZE)
        table[request, :needed] = torch.tensor(order[3 * request : 3 * request + needed], dtype=torch.int32)
    rows = [[int(page) * PAGE_SIZE + i for page in row if page >= 0 for i in range(PAGE_SIZE)] for row in table]
    k, v = torch.full((2, 12, PAGE_SIZE, KV_HEADS, DIM), math.nan, dtype=torch.bfloat16)
    for request, count in enumerate(lens):
        k.flatten(0, 1)[rows[request][:count]] = data(count, KV_HEADS, DIM, seed=request)
        v.flatten(0, 1)[rows[request][:count]] = data(count, KV_HEADS, DIM, seed=100 + request)
    return k, v, table, rows


PAGED = {
    "decode": (1, {"causal": True}),
    "decode-without-causal": (1, {}),
    "draft": (3, {"causal": True, "s_aux": SINKS}),
    "prefill": (35, {"causal": True}),
    "full": (3, {}),
    "window": (3, {"causal": True, "window_size": (4, 0)}),
}


@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("new", [0, 1, 3])
def test_pages(name: str, new: int) -> None:
    """New tokens are written behind the keys of their request before the queries see them."""
    q_len, options = PAGED[name]
    k, v, table, rows = pages(LENS, new)
    q, lens = data(len(LENS), q_len, HEADS, DIM, seed=5), torch.tensor(LENS, dtype=torch.int32)
    tokens = (data(3, new, KV_HEADS, DIM, seed=6), data(3, new, KV_HEADS, DIM, seed=7)) if new else (None, None)
    want = k.clone(), v.clone()
    for pool, added in zip(want, tokens, strict=True):
        for request, count in enumerate(LENS if new else ()):
            pool.flatten(0, 1)[rows[request][count : count + new]] = added[request]
    out, lse = flash_attn_with_kvcache(
        q, k, v, *tokens, cache_seqlens=lens, block_table=table, return_softmax_lse=True, **options
    )
    assert torch.equal(k.nan_to_num(1e4), want[0].nan_to_num(1e4))
    assert torch.equal(v.nan_to_num(1e4), want[1].nan_to_num(1e4))
    assert out.shape == q.shape
    assert lse.shape == (3, HEADS, q_len)
    for request, count in enumerate(LENS):
        found = rows[request][: count + new]
        keys = k.flatten(0, 1)[found], v.flatten(0, 1)[found]
        check(out[request], lse[request], q[request], *keys, **{"causal": q_len == 1, **options})
    if not new:
        flat, bounds = q.flatten(0, 1), starts((q_len,) * 3)
        ragged = flash_attn_varlen_func(
            flat,
            k,
            v,
            bounds,
            starts(LENS),
            q_len,
            max(LENS),
            block_table=table,
            return_softmax_lse=True,
            **options,
        )
        assert torch.equal(ragged[0], out.flatten(0, 1))
        assert torch.equal(ragged[1], lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("q_lens", [(1, 0, 1), (4, 0, 2), (30, 3, 20)])
def test_pages_with_ragged_queries_and_ragged_new_tokens(q_lens: tuple[int, ...]) -> None:
    k, v, table, rows = pages(LENS, 5)
    new_lens = (2, 0, 5)
    q, new = data(sum(q_lens), HEADS, DIM, seed=5), data(2, sum(new_lens), KV_HEADS, DIM, seed=6)
    out, lse = flash_attn_with_kvcache(
        q,
        k,
        v,
        *new,
        cache_seqlens=torch.tensor(LENS),
        page_table=table,
        causal=True,
        cu_seqlens_q=starts(q_lens),
        cu_seqlens_k_new=starts(new_lens),
        max_seqlen_q=max(q_lens),
        return_softmax_lse=True,
    )
    begins = starts(q_lens).tolist(), starts(new_lens).tolist()
    for request, count in enumerate(LENS):
        found = rows[request][: count + new_lens[request]]
        keys = k.flatten(0, 1)[found], v.flatten(0, 1)[found]
        added = new[:, begins[1][request] : begins[1][request + 1]]
        assert all(torch.equal(side[count:], tokens) for side, tokens in zip(keys, added, strict=True))
        mine = slice(*begins[0][request : request + 2])
        check(out[mine], lse[:, mine], q[mine], *keys, causal=True)


@pytest.mark.parametrize("order", ["BSHD", "BHSD", "slice"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_contiguous_caches(order: str, q_len: int) -> None:
    """A contiguous cache is viewed as pages, whatever its memory order, with requests chosen by cache_batch_idx."""
    shape, chosen = (4, 3 * PAGE_SIZE, KV_HEADS, DIM), [2, 0, 3]
    nothing = torch.full(shape, math.nan, dtype=torch.bfloat16)
    if order == "slice":  # the first half of a longer cache
        k, v = (nothing.repeat(1, 2, 1, 1)[:, : shape[1]] for _ in range(2))
    else:
        k, v = (nothing.clone() if order == "BSHD" else bhsd(nothing) for _ in range(2))
    for row, count in zip(chosen, LENS, strict=True):
        k[row, :count], v[row, :count] = data(2, count, KV_HEADS, DIM, seed=row)
    q, new = data(3, q_len, HEADS, DIM, seed=5), data(2, 3, 1, KV_HEADS, DIM, seed=6)
    out, lse = flash_attn_with_kvcache(
        q,
        k,
        v,
        *new,
        cache_seqlens=torch.tensor(LENS),
        cache_batch_idx=torch.tensor(chosen),
        causal=True,
        return_softmax_lse=True,
    )
    for request, (row, count) in enumerate(zip(chosen, LENS, strict=True)):
        assert torch.equal(k[row, count], new[0, request, 0])
        assert torch.equal(v[row, count], new[1, request, 0])
        assert k[row, count + 1 :].isnan().all()
        check(out[request], lse[request], q[request], k[row, : count + 1], v[row, : count + 1], causal=True)


def test_padded_rows_of_a_graph_write_nothing() -> None:
    """A padded row has -1 keys and pages of -1; its output is 0."""
    k, v, table, rows = pages((7, 20), 1)
    table = torch.cat([table, torch.full((1, 3), -1, dtype=torch.int32)])
    want, lens = k.clone(), torch.tensor([7, 20, -1], dtype=torch.int32)
    q, new = data(3, 1, HEADS, DIM), data(2, 3, 1, KV_HEADS, DIM)
    want.flatten(0, 1)[[rows[0][7], rows[1][20]]] = new[0, :2, 0]
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lens, block_table=table, causal=True)
    assert not out[2].any()
    assert torch.equal(k.nan_to_num(1e4), want.nan_to_num(1e4))


def test_an_e4m3_cache_takes_16_bit_queries_and_new_tokens() -> None:
    """FlashAttention's descales dequantize the cache, and quantize new tokens. They may be expanded to heads."""
    k_scale, v_scale = torch.tensor([[0.5]]).expand(2, KV_HEADS), torch.tensor([2.0])
    k, v = (data(2, 3 * PAGE_SIZE, KV_HEADS, DIM, seed=i).to(torch.float8_e4m3fn) for i in (1, 2))
    q, new = data(2, 1, HEADS, DIM), data(2, 2, 1, KV_HEADS, DIM, seed=3)
    scales = {"k_descale": k_scale, "v_descale": v_scale}
    out, lse = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=9, causal=True, return_softmax_lse=True, **scales)
    for i in range(2):
        assert torch.equal(k[i, 9].float(), (new[0, i, 0].float() / 0.5).to(torch.float8_e4m3fn).float())
        keys = k[i, :10].double() * 0.5, v[i, :10].double() * 2.0
        check(out[i], lse[i], q[i], *keys, causal=True)


def test_descales_of_each_kv_head() -> None:
    """Each KV head has the bits of a call with its scales for all heads. The scales are expanded over requests."""
    q, k, v = (data(12, heads, DIM, seed=heads).to(torch.float8_e4m3fn) for heads in (HEADS, KV_HEADS, KV_HEADS))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    scales = {"q_descale": (2.0, 0.5), "k_descale": (0.01, 3.0), "v_descale": (-5.0, 0.001)}

    def call(**descales: torch.Tensor) -> torch.Tensor:
        results = flash_attn_varlen_func(
            q, k, v, starts, starts, 7, 7, causal=True, return_softmax_lse=True, **descales
        )
        return torch.cat([results[0].transpose(0, 1).flatten(1), results[1]], 1).unflatten(0, (KV_HEADS, -1))

    found = call(**{name: torch.tensor(pair).expand(2, KV_HEADS) for name, pair in scales.items()})
    for head in range(KV_HEADS):
        assert torch.equal(
            found[head], call(**{name: torch.tensor([pair[head]]) for name, pair in scales.items()})[head]
        )
