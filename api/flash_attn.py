"""FlashAttention's three functions over hopwell's kernels, with the arguments of FlashAttention 2 and 3.

Code that imports them from ``flash_attn`` or ``flash_attn_interface`` can import them from here. Positional arguments
have FlashAttention 2's order. Arguments that only FlashAttention 3 or vLLM's copy of it has follow as keywords.
"""

from __future__ import annotations

import torch

from hopwell._checks import arguments as checks
from hopwell._entries import flash_attn as calls

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Window = tuple[int | None, int | None]
Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Results:
    """Compute attention of a batch of requests with equal lengths.

    With ``causal`` the mask is aligned to the bottom right: query i sees keys 0..i + seqlen_k - seqlen_q. A row without
    visible keys gives 0, and -inf in the log-sum-exp.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        q: [batch, seqlen_q, heads, head_dim], bfloat16, float16 or float8_e4m3fn. The last stride is 1.
        k: [batch, seqlen_k, kv_heads, head_dim] of the same dtype. heads is a multiple of kv_heads.
        v: the same; its head_dim may differ.
        dropout_p: must be 0.
        softmax_scale: positive factor on q k^T; None means 1 / sqrt(head_dim).
        causal: whether a query sees no key behind its own.
        window_size: (left, right), the keys to the left and to the right of its own key that a query sees; -1 or None
            means all. ``causal`` sets right to 0.
        softcap: c > 0 turns logits x into c * tanh(x / c); 0 and None mean no cap.
        alibi_slopes: must be None.
        deterministic: any bool. hopwell is always deterministic.
        return_attn_probs: return (output, log-sum-exp, None) as FlashAttention 2 does without dropout.
        qv: must be None.
        q_descale: float32 factor that dequantizes float8_e4m3fn queries: one element, or [kv_heads], a factor for the
            queries of each KV head. Both may be expanded to [batch, kv_heads]. None means 1.
        k_descale: the same for k.
        v_descale: the same for v.
        attention_chunk: must be 0.
        num_splits: not used: hopwell splits the keys of a request in a way that depends on the request alone.
        pack_gqa: not used: hopwell chooses.
        sm_margin: not used.
        s_aux: float32, bfloat16 or float16 [heads]: the natural, unscaled logit of one more key per head, without a
            value.
        return_softmax_lse: return (output, log-sum-exp).
        out: [batch, seqlen_q, heads, V head_dim] to write into; None allocates.

    Returns:
        The output [batch, seqlen_q, heads, V head_dim]: ``out`` itself if given, else in the dtype of q, or bfloat16
        for float8_e4m3fn. The log-sum-exp of the scaled scores and sinks is natural, float32 [batch, heads, seqlen_q].

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape, stride, device or value is wrong. Messages of the entry point that serves the call
            name its arguments.
        NotImplementedError: hopwell has no kernel for the call.
    """
    calls.refuse(
        "flash_attn_func",
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        qv=(qv, None),
        attention_chunk=(attention_chunk, 0),
    )
    for name, value in (("q", q), ("k", k), ("v", v)):
        checks.shape(name, checks.tensor(name, value), *calls.DENSE)
    returns = checks.flag("return_attn_probs", return_attn_probs)
    attention = calls.attention(
        q,
        q.shape[1],
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=checks.flag("return_softmax_lse", return_softmax_lse) or returns,
        out=out,
    )
    return calls.results(*calls.dense(q, k, v, attention), returns)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    max_seqlen_k: int | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Results:
    """Compute attention of requests with different lengths, over ragged K and V or over a paged KV cache.

    "As there" refers to :func:`flash_attn_func`.

    Args:
        q: [tokens, heads, head_dim], request after request.
        k: [kv_tokens, kv_heads, head_dim]; with ``block_table`` pages [pages, page_size, kv_heads, head_dim], in the
            dtype of q or float8_e4m3fn.
        v: the same; its head_dim may differ.
        cu_seqlens_q: int32 or int64 [batch + 1], the first query of each request.
        cu_seqlens_k: the same for k. With ``block_table`` the differences are the keys of each request. May be None if
            ``seqused_k`` gives them.
        max_seqlen_q: upper bound of the queries of a request. 1 selects the decode kernels, which compute one query of
            each request. A tensor is not read: the number of tokens takes its place.
        max_seqlen_k: upper bound of the keys of a request. It never changes a result. Required without ``block_table``.
        dropout_p: must be 0.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there; must be 0 with ``block_table``.
        alibi_slopes: must be None.
        deterministic: as there.
        return_attn_probs: as there.
        block_table: int32 or int64 page ids [batch, pages_per_request]. Entries past the last page of a request are not
            read.
        seqused_q: must be None.
        seqused_k: int32 or int64 [batch], the keys of each request that count. Without ``block_table`` it excludes a
            window, ``softcap`` and ``s_aux``.
        qv: must be None.
        q_descale: as there.
        k_descale: as there; also for a float8_e4m3fn cache with 16-bit q.
        v_descale: the same for v.
        attention_chunk: must be 0.
        num_splits: not used.
        pack_gqa: not used.
        sm_margin: not used.
        s_aux: as there.
        return_softmax_lse: as there.
        out: [tokens, heads, V head_dim] to write into; None allocates.

    Returns:
        The output [tokens, heads, V head_dim]. The log-sum-exp is [heads, tokens].

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    calls.refuse(
        "flash_attn_varlen_func",
        dropout_p=(dropout_p, 0.0),
        alibi_slopes=(alibi_slopes, None),
        qv=(qv, None),
        attention_chunk=(attention_chunk, 0),
        seqused_q=(seqused_q, None),
    )
    checks.shape("q", checks.tensor("q", q), *calls.RAGGED)
    for name, value in (("k", k), ("v", v)):
        checks.shape(name, checks.tensor(name, value), *(calls.RAGGED if block_table is None else calls.PAGES))
    checks.shape("cu_seqlens_q", checks.tensor("cu_seqlens_q", cu_seqlens_q), ("batch + 1", None))
    max_q = calls.bound("max_seqlen_q", max_seqlen_q, q.shape[0])
    returns = checks.flag("return_attn_probs", return_attn_probs)
    attention = calls.attention(
        q,
        max_q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=checks.flag("return_softmax_lse", return_softmax_lse) or returns,
        out=out,
    )
    if cu_seqlens_k is None:
        if block_table is None or seqused_k is None:
            raise ValueError("cu_seqlens_k must be given, except with block_table and seqused_k, got None")
        lens = seqused_k
    else:
        if block_table is None:
            max_k = calls.bound("max_seqlen_k", max_seqlen_k, k.shape[0])
            found = calls.ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_q, max_k, attention)
            return calls.results(*found, returns)
        lens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    calls.refuse_softcap(attention)
    output, lse = calls.paged(q, calls.Cache(k, v, block_table, lens), cu_seqlens_q, max_q, attention)
    return calls.results(output, None if lse is None else lse.t().contiguous(), returns)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | torch.Tensor | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Results:
    """Write new keys and values into a KV cache, if given, and compute attention of q over the cache.

    Causal calls with up to 64 rows (query heads of a KV head times queries) run decode kernels, which split the keys of
    long requests. All others run prefill kernels. "As there" refers to :func:`flash_attn_func`.

    Args:
        q: [batch, seqlen_q, heads, head_dim]; with ``cu_seqlens_q`` [tokens, heads, head_dim].
        k_cache: [requests, capacity, kv_heads, head_dim]; with ``block_table`` pages [pages, page_size, kv_heads,
            head_dim]. The dtype of q, or float8_e4m3fn. hopwell views a contiguous cache as pages whose size is the
            largest power of two that divides the capacity, up to 1024. Capacities that are multiples of 64 are fast.
        v_cache: the same; its head_dim may differ.
        k: new keys, bfloat16 or float16, [batch, seqlen_new, kv_heads, head_dim]; with ``cu_seqlens_k_new`` [tokens,
            kv_heads, head_dim]. They are written behind ``cache_seqlens`` keys of their request. A float8_e4m3fn cache
            takes k / ``k_descale``. Tokens without a place in the cache, and tokens at negative positions, are not
            written.
        v: the same.
        rotary_cos: must be None: rotate q and k before the call.
        rotary_sin: must be None.
        cache_seqlens: int32 or int64 [batch], or one int: the keys of each request in the cache, without ``k``. None
            means the whole capacity of a contiguous cache without ``k``.
        cache_batch_idx: int32 or int64 [batch], the request of the contiguous cache that belongs to each request of q;
            None means 0, 1, 2, ...
        cache_leftpad: must be None.
        block_table: int32 or int64 page ids [batch, pages_per_request]. Entries past the last page of a request are not
            read.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: must be 0: hopwell has no kernel for it over a cache.
        rotary_interleaved: not used without ``rotary_cos``.
        alibi_slopes: must be None.
        num_splits: not used.
        return_softmax_lse: as there.
        qv: must be None.
        page_table: another name of ``block_table``.
        cu_seqlens_q: int32 or int64 [batch + 1], the first query of each request.
        cu_seqlens_k_new: the same for ``k``.
        max_seqlen_q: with ``cu_seqlens_q``, an upper bound of the queries of a request. A tensor is not read: the
            number of tokens takes its place. Not used without ``cu_seqlens_q``.
        rotary_seqlens: must be None.
        q_descale: as there.
        k_descale: as there; also for a float8_e4m3fn cache with 16-bit q.
        v_descale: the same for v.
        attention_chunk: must be 0.
        scheduler_metadata: not used.
        pack_gqa: not used.
        sm_margin: not used.
        s_aux: as there.
        out: in the shape of q, with V's head_dim, to write into; None allocates.

    Returns:
        The output, in the shape of q with V's head_dim. With ``return_softmax_lse`` also the log-sum-exp, [batch,
        heads, seqlen_q]; with ``cu_seqlens_q`` [heads, tokens].

    Raises:
        TypeError, ValueError, NotImplementedError: as there.
    """
    calls.refuse(
        "flash_attn_with_kvcache",
        rotary_cos=(rotary_cos, None),
        rotary_sin=(rotary_sin, None),
        rotary_seqlens=(rotary_seqlens, None),
        cache_leftpad=(cache_leftpad, None),
        alibi_slopes=(alibi_slopes, None),
        qv=(qv, None),
        attention_chunk=(attention_chunk, 0),
    )
    checks.shape("q", checks.tensor("q", q), *(calls.DENSE if cu_seqlens_q is None else calls.RAGGED))
    table = calls.one_of("flash_attn_with_kvcache", block_table=block_table, page_table=page_table)
    max_q = q.shape[1] if cu_seqlens_q is None else calls.bound("max_seqlen_q", max_seqlen_q, q.shape[0])
    attention = calls.attention(
        q,
        max_q,
        softmax_scale,
        causal,
        window_size,
        softcap,
        sinks=s_aux,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        return_lse=checks.flag("return_softmax_lse", return_softmax_lse),
        out=out if out is None or cu_seqlens_q is not None else calls.rows("out", out, q.shape[:2]),
    )
    calls.refuse_softcap(attention)
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together")
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    cache = calls.cache(q, (k_cache, v_cache), table, batch, cache_batch_idx, cache_seqlens, k is not None)
    if k is not None and v is not None:
        for name, value in (("k", k), ("v", v)):
            checks.shape(name, checks.tensor(name, value), *(calls.DENSE if cu_seqlens_k_new is None else calls.RAGGED))
        cache = calls.append(cache, k, v, cu_seqlens_k_new, attention)
    tokens = q.flatten(0, 1) if cu_seqlens_q is None else q
    found, lse = calls.paged(tokens, cache, cu_seqlens_q, max_q, attention)
    if cu_seqlens_q is not None:
        return calls.results(found, None if lse is None else lse.t().contiguous(), False)
    lse = None if lse is None else lse.view(*q.shape[:2], -1).transpose(1, 2).contiguous()
    return calls.results(found.view(*q.shape[:2], *found.shape[1:]) if out is None else out, lse, False)
