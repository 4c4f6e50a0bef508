"""Calls of ``hopwell.flash_attn`` as calls of hopwell's entry points."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import constant_in_graphs
from hopwell._checks import arguments as checks
from hopwell.cudnn import cudnn_batch_prefill_with_kv_cache
from hopwell.decode import trtllm_batch_decode_with_kv_cache, xqa_workspace_bytes
from hopwell.kernels import support
from hopwell.kernels.capability import features, samples
from hopwell.page import append_paged_kv_cache, get_batch_indices_positions
from hopwell.prefill import trtllm_batch_context_with_kv_cache, trtllm_fmha_v2_prefill

LARGEST_PAGE = 1024
DENSE = (("batch", None), ("seqlen", None), ("heads", None), ("head_dim", None))
RAGGED = (("tokens", None), ("heads", None), ("head_dim", None))
CACHE = (("requests", None), ("capacity", None), ("kv_heads", None), ("head_dim", None))
PAGES = (("pages", None), ("page_size", None), ("kv_heads", None), ("head_dim", None))
# Rows (query heads of a KV head times new tokens) up to which decode kernels, which split the keys, serve a call.
DECODE_ROWS = 64


class Attention(NamedTuple):
    """The arguments that all functions share, checked."""

    scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    return_lse: bool
    out: torch.Tensor | None


def refuse(function: str, **arguments: tuple[Any, Any]) -> None:
    """Raise NotImplementedError for the first argument whose value (the first of a pair) is not its default."""
    for name, (value, default) in arguments.items():
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            raise NotImplementedError(f"{function} supports only {name}={default!r}, got {checks.describe(value)}")


def attention(
    q: torch.Tensor,
    max_q: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float | None,
    **others: Any,
) -> Attention:
    """Check the arguments that all functions share. ``others`` are the other fields of :class:`Attention`."""
    checks.main_tensor("q", q)
    sinks = others["sinks"]
    if isinstance(sinks, torch.Tensor) and sinks.dtype == torch.float16:
        others["sinks"] = sinks.float()
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else checks.host_float("softmax_scale", softmax_scale)
    if not scale > 0:
        raise ValueError(f"softmax_scale must be positive, got {scale}")
    is_causal, left, right = _mask(checks.flag("causal", causal), window_size, max_q)
    for name in ("q_descale", "k_descale", "v_descale"):
        others[name] = _scales(name, others[name])
    cap = 0.0 if softcap is None else checks.host_float("softcap", softcap, minimum=0.0)
    return Attention(scale, is_causal, left, right, cap, **others)


def _mask(causal: bool, window_size: Any, max_q: int) -> tuple[bool, int, int]:
    """Return whether the mask is causal, and the keys on both sides of a row's own key that it sees (-1: all)."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {checks.describe(window_size)}")
    left, right = (-1 if side is None else checks.host_int("window_size", side, minimum=-1) for side in window_size)
    # A row has its own key and max_q - 1 or fewer keys behind it.
    if causal or right == 0 or max_q <= 1:
        return True, left, -1
    return False, left, right if right < max_q - 1 else -1


def _scales(name: str, value: Any) -> torch.Tensor | None:
    """Return the only element of a descale tensor, or its element for each KV head. Both may be expanded to [batch,
    kv_heads]."""
    if value is None:
        return None
    checks.tensor(name, value)
    own = [i for i, stride in enumerate(value.stride()) if stride and value.shape[i] != 1]  # not expanded
    by_head = bool(own) and own == [value.dim() - 1] and value.stride(-1) == 1
    if (own and not by_head) or not value.numel():
        raise NotImplementedError(
            f"{name} must be the same for all requests: a tensor of one element, [kv_heads], or one of these expanded "
            f"to [batch, kv_heads], got shape {tuple(value.shape)} and strides {value.stride()}"
        )
    return value.as_strided((value.shape[-1] if by_head else 1,), (1,))


def bound(name: str, value: Any, tokens: int) -> int:
    """Return an upper bound of the tokens of a request. Tensors are not read: ``tokens`` takes their place."""
    if isinstance(value, torch.Tensor):
        return tokens
    if value is None:
        raise ValueError(f"{name} must be given, got None")
    return checks.host_int(name, value)


def results(out: torch.Tensor, lse: torch.Tensor | None, probabilities: bool) -> Any:
    """Return what FlashAttention returns: with ``probabilities`` a third result, which only dropout would fill."""
    if lse is None:
        return out
    return (out, lse, None) if probabilities else (out, lse)


def rows(name: str, value: torch.Tensor, requests: tuple[int, ...]) -> torch.Tensor:
    """View [batch, seqlen, heads, dim] as rows [batch * seqlen, heads, dim]."""
    checks.shape(name, checks.tensor(name, value), *zip(("batch", "seqlen"), requests, strict=True), *DENSE[2:])
    if value.shape[0] > 1 and value.stride(0) != value.shape[1] * value.stride(1):
        raise ValueError(f"{name} must have requests that follow one another, got strides {value.stride()}")
    return value.flatten(0, 1)


def one_of(function: str, **arguments: Any) -> Any:
    """Return the argument that is given under one of two names, or None."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{function} takes only one of {' and '.join(given)}, which mean the same")
    return next(iter(given.values()), None)


def _nothing(device: torch.device) -> torch.Tensor:
    """Return an empty workspace for entry points that do not use it."""
    return _empty(device) if not torch.compiler.is_dynamo_compiling() else torch.empty(0, device=device)


@functools.cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _out_dtype(q: torch.Tensor, a: Attention) -> torch.dtype | None:
    """Return the dtype of the output: FlashAttention returns bfloat16 for float8_e4m3fn queries."""
    return torch.bfloat16 if a.out is None and q.dtype == checks.FP8 else None


def multiples(size: int, count: int, device: torch.device) -> torch.Tensor:
    """Return int32 [count + 1]: 0, size, 2 * size, ..."""
    return torch.arange(count + 1, dtype=torch.int32, device=device) * size


def _tokens(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """View [batch, seqlen, heads, dim] as tokens [n, heads, dim]; the second result is a request's distance in tokens.

    A tensor without such a view is copied.
    """
    batch, length, heads, dim = x.shape
    distance = _distance(x)
    if distance is None:
        return x.reshape(-1, heads, dim), length
    return x.as_strided(((batch - 1) * distance + length, heads, dim), x.stride()[1:]), distance


def _distance(x: torch.Tensor) -> int | None:
    """Return how many tokens a request of [batch, seqlen, heads, dim] starts behind the previous one, or None."""
    if x.shape[0] == 1 or not x.numel():
        return x.shape[1]
    whole = x.stride(1) > 0 and x.stride(0) % x.stride(1) == 0
    return x.stride(0) // x.stride(1) if whole else None


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: Attention) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend q [batch, seqlen_q, heads, dim] to k and v [batch, seqlen_k, kv_heads, dim].

    Returns the output and the log-sum-exp [batch, heads, seqlen_q].
    """
    batch, q_len, k_len, on = q.shape[0], q.shape[1], k.shape[1], q.device
    tokens, starts_q, given = q.flatten(0, 1), multiples(q_len, batch, on), a.out
    if given is not None:
        names, sizes = ("batch", "seqlen", "heads", "head_dim"), (*q.shape[:3], v.shape[3])
        checks.shape("out", checks.tensor("out", given), *zip(names, sizes, strict=True))
        a = a._replace(out=given.flatten(0, 1) if _distance(given) == q_len else None)
    if not _is_plain(a):
        starts_k = multiples(k_len, batch, on)
        out, lse = ragged(tokens, k.flatten(0, 1), v.flatten(0, 1), starts_q, starts_k, None, q_len, k_len, a)
        lse = None if lse is None else lse.view(-1, batch, q_len).transpose(0, 1).contiguous()
    else:
        (k_tokens, k_distance), (v_tokens, v_distance) = _tokens(k), _tokens(v)
        starts_k = multiples(k_distance, batch, on)
        lens_k = torch.full((batch,), k_len, dtype=torch.int32, device=on)
        starts_v = starts_k if v_distance == k_distance else multiples(v_distance, batch, on)
        starts = dict(batch_offsets_q=starts_q, batch_offsets_k=starts_k, batch_offsets_v=starts_v)
        out, lse = _plain((tokens, k_tokens, v_tokens), lens_k, q_len, k_len, a, **starts)
    out = out.view(*q.shape[:2], *out.shape[1:])
    return (out if given is None else given if a.out is not None else given.copy_(out)), lse


def _is_plain(a: Attention) -> bool:
    """Return whether the cuDNN entry serves the mask and the scores."""
    return a.window_left < 0 and a.window_right < 0 and not a.softcap and a.sinks is None


def _plain(
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lens_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    a: Attention,
    **starts: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend tokens q to tokens k and v in the cuDNN entry. ``starts`` are its offsets, in tokens."""
    return cudnn_batch_prefill_with_kv_cache(
        *tokens,
        a.scale,
        _nothing(tokens[0].device),
        max_token_per_sequence=max_q,
        max_sequence_kv=max_k,
        actual_seq_lens_q=None,
        actual_seq_lens_kv=lens_k,
        causal=a.causal,
        return_lse=a.return_lse,
        out=a.out,
        q_scale=a.q_descale,
        k_scale=a.k_descale,
        v_scale=a.v_descale,
        batch_offsets_units="tokens",
        o_data_type=_out_dtype(tokens[0], a),
        lse_layout="HN",
        **starts,
    )


def ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    lens_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    a: Attention,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend tokens q to tokens k and v, and return the output and the log-sum-exp [heads, tokens].

    ``lens_k`` are the keys of each request if they are fewer than the differences of ``starts_k``.
    """
    batch = starts_q.shape[0] - 1
    if _is_plain(a):
        starts = dict(batch_offsets_q=starts_q, batch_offsets_k=starts_k)
        return _plain(
            (q, k, v), lens_k, max_q, max_k, a, **starts, batch_offsets_stats=starts_q if a.return_lse else None
        )
    refuse(
        "attention of ragged K and V with a window, a softcap or sinks",
        seqused_k=(lens_k, None),
        q_descale=(a.q_descale, None),
        k_descale=(a.k_descale, None),
        v_descale=(a.v_descale, None),
    )
    results: Any = trtllm_fmha_v2_prefill(
        (q, k, v),
        "SEPARATE_Q_K_V",
        _nothing(q.device),
        starts_k[1:],
        max_q,
        max_k,
        a.scale,
        1.0,
        batch,
        starts_q,
        starts_k,
        out=a.out,
        out_dtype=_out_dtype(q, a),
        sinks=a.sinks,
        logits_soft_cap_scale=a.softcap,
        mask_mode="causal" if a.causal else "padding",
        window_left=a.window_left,
        window_right=a.window_right,
        save_softmax_stats=a.return_lse,
    )
    return (results[0], _lse(results[1], q.shape[2], a)) if a.return_lse else (results, None)


def _lse(statistics: torch.Tensor, dim: int, a: Attention) -> torch.Tensor:
    """Return the log-sum-exp [heads, tokens] of the fmha_v2 entry's statistics."""
    largest, total = statistics.unbind(2)
    lse = largest * (math.sqrt(dim) * (1.0 if a.softcap else a.scale)) + total.log()
    if a.sinks is not None:
        lse = torch.logaddexp(lse, a.sinks.float())
    return lse.t().contiguous()


@functools.lru_cache(1024)
def _workspace_bytes(heads: int, kv_heads: int, dim: int, most: int, max_q: int, device: torch.device) -> int:
    return xqa_workspace_bytes(heads, kv_heads, dim, most, max_q, device)


@constant_in_graphs
def _decodes(dims: tuple[int, int], query: torch.dtype, kv: torch.dtype, device: torch.device) -> bool:
    """Return whether decode kernels serve the head dims (QK, V) and the dtypes."""
    return _has_decode(dims, query, kv, support.arch_of(device))


@functools.cache
def _has_decode(dims: tuple[int, int], query: torch.dtype, kv: torch.dtype, arch: str) -> bool:
    return features.refuse(samples.decode(dims=dims, query=query, kv=kv), arch) is None


def refuse_softcap(a: Attention) -> None:
    """Refuse a soft cap over a cache, before new tokens are written."""
    refuse("attention over a paged or contiguous KV cache", softcap=(a.softcap, 0.0))


def paged(
    q: torch.Tensor, cache: Cache, starts_q: torch.Tensor | None, max_q: int, a: Attention
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend tokens q [tokens, heads, dim] to a cache.

    Without ``starts_q`` every request has ``max_q`` queries. Returns the output and the log-sum-exp [tokens, heads].
    """
    k, v, table, lens_k = cache
    batch, most = table.shape[0], table.shape[1] * k.shape[1]
    scales = [scale for scale in (a.q_descale, a.k_descale) if scale is not None]
    bmm1_scale = functools.reduce(torch.mul, scales) * a.scale if scales else a.scale
    bmm2_scale = 1.0 if a.v_descale is None else a.v_descale
    results: Any
    (_, heads, dim), kv_heads, on = q.shape, k.shape[2], q.device
    few = a.causal and max_q * heads <= DECODE_ROWS * kv_heads
    if few and _decodes((dim, v.shape[3]), q.dtype, k.dtype, on):
        in_graph = torch.compiler.is_dynamo_compiling()  # where the op allocates
        size = 0 if in_graph else _workspace_bytes(heads, kv_heads, v.shape[3], most, max_q, on)
        results = trtllm_batch_decode_with_kv_cache(
            q,
            (k, v),
            torch.empty(size, dtype=torch.uint8, device=on),
            table,
            lens_k,
            most,
            bmm1_scale,
            bmm2_scale,
            a.window_left,
            a.out,
            _out_dtype(q, a),
            sinks=a.sinks,
            kv_layout="NHD",
            q_len_per_req=max_q if starts_q is None else None,
            max_q_len=None if starts_q is None else max_q,
            cum_seq_lens_q=starts_q,
            return_lse=a.return_lse,
            return_lse_base="basee" if a.return_lse else None,
        )
        return results if a.return_lse else (results, None)
    starts_q = multiples(max_q, batch, on) if starts_q is None else starts_q
    results = trtllm_batch_context_with_kv_cache(
        q,
        (k, v),
        _nothing(on),
        table,
        lens_k,
        max_q,
        most,
        bmm1_scale,
        bmm2_scale,
        batch,
        starts_q,
        starts_q,
        a.window_left,
        a.out,
        _out_dtype(q, a),
        kv_layout="NHD",
        sinks=a.sinks,
        causal=a.causal,
        window_right=a.window_right,
        return_lse=a.return_lse,
        lse_base="ln",
    )
    return results if a.return_lse else (results, None)


class Cache(NamedTuple):
    """A cache as pages [pages, page_size, kv_heads, dim], the page ids and the number of keys of each request."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor


def cache(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    table: torch.Tensor | None,
    batch: int,
    batch_idx: torch.Tensor | None,
    seqlens: int | torch.Tensor | None,
    has_new: bool,
) -> Cache:
    """Return the cache of ``flash_attn_with_kvcache``, before new keys are written."""
    for name, value in zip(("k_cache", "v_cache"), caches, strict=True):
        checks.shape(name, checks.tensor(name, value), *(CACHE if table is None else PAGES))
    if seqlens is None:
        if has_new or table is not None:
            raise ValueError("cache_seqlens must be given with new keys and with a page table, got None")
        seqlens = caches[0].shape[1]
    if not isinstance(seqlens, torch.Tensor):
        length = checks.host_int("cache_seqlens", seqlens)
        seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    if batch_idx is not None:
        if table is not None:
            raise ValueError("cache_batch_idx must be None with a page table")
        checks.shape("cache_batch_idx", checks.tensor("cache_batch_idx", batch_idx), ("batch", batch))
    if table is None:
        return Cache(*_cache_pages(*caches, batch, batch_idx), seqlens)
    checks.shape("block_table", checks.tensor("block_table", table), ("batch", batch), ("pages_per_request", None))
    return Cache(*caches, table, seqlens)


def _cache_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, batch: int, batch_idx: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View caches [requests, capacity, kv_heads, dim] as pages, and return the pages of K and V and the page table."""
    requests, length = k_cache.shape[:2]
    distance = _distance(k_cache)
    if v_cache.shape[:2] != k_cache.shape[:2] or distance is None or distance != _distance(v_cache):
        raise ValueError(
            "k_cache and v_cache must have the same first two sizes, and first strides that are the same multiple of "
            f"their second strides, got shapes {tuple(k_cache.shape)} and {tuple(v_cache.shape)}, strides "
            f"{k_cache.stride()} and {v_cache.stride()}"
        )
    if batch_idx is None and batch > requests:
        raise ValueError(f"k_cache must have a request for each of the {batch} requests of q, got {requests}")
    size = math.gcd(length, distance, LARGEST_PAGE)
    pages, step = ((requests - 1) * distance + length) // size, distance // size
    k, v = (
        x.as_strided((pages, size, *x.shape[2:]), (size * x.stride(1), *x.stride()[1:])) for x in (k_cache, v_cache)
    )
    table = torch.arange(pages, dtype=torch.int32, device=k.device).as_strided((requests, length // size), (step, 1))
    return k, v, table[:batch] if batch_idx is None else table.index_select(0, batch_idx)


def append(cache: Cache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, a: Attention) -> Cache:
    """Write new tokens behind the keys of each request, and return the cache with the new lengths.

    k and v are [batch, new, kv_heads, dim], or with ``starts`` [tokens, kv_heads, dim].
    """
    lens, on = cache.lens, k.device
    if starts is not None:
        total = lens + starts.diff()
        requests, positions = get_batch_indices_positions(starts, total, k.shape[0])
    else:
        batch, new = k.shape[:2]
        total = lens + new
        requests, positions = torch.arange(batch, dtype=torch.int32, device=on), lens
        if new != 1:
            requests = requests.repeat_interleave(new)
            positions = (lens[:, None] + torch.arange(new, dtype=torch.int32, device=on)).flatten()
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    append_paged_kv_cache(
        k,
        v,
        requests,
        positions,
        (cache.k, cache.v),
        k_scale=1.0 if a.k_descale is None else a.k_descale,
        v_scale=1.0 if a.v_descale is None else a.v_descale,
        block_tables=cache.table,
    )
    return cache._replace(lens=total)
