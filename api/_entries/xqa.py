"""Check the arguments of ``xqa_batch_decode_with_kv_cache`` and convert them to an AttentionProblem."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import is_traced
from hopwell._calls.launch import call_arguments
from hopwell._checks import arguments as checks
from hopwell._checks import caches
from hopwell._checks.features import named, require_problem
from hopwell._entries.decoding import (
    check_counter_buffer,
    dcp_rank,
    dense_tokens,
    flat_tokens,
    log_sum_exp,
    ragged_starts,
    refuse_skip_softmax,
    refused,
    workspace,
    workspace_bytes,
)
from hopwell.kernels import registry, support
from hopwell.kernels.config.splitting import most_new_tokens
from hopwell.kernels.problem import (
    AttentionProblem,
    BlockScales,
    DcpRank,
    Family,
    LogSumExp,
    Mask,
    MaskKind,
    TokenOffsets,
)
from hopwell.utils import FP4Tensor

HEAD_DIM_STEP = 16
EQUAL_HEAD_DIMS = tuple(qk for qk, v in support.DECODE_HEAD_DIMS if qk == v)
*_, MAX_MULTIPLE, MAX_HEAD_DIM = EQUAL_HEAD_DIMS  # multiples of the step up to MAX_MULTIPLE, and MAX_HEAD_DIM
NARROWER_V = {dims for dims in support.DECODE_HEAD_DIMS if dims[0] != dims[1]}
BACKENDS = ("auto", "xqa", "trtllm-gen")
MASK_BITS = 32  # a row of the speculative mask is a whole number of 32-bit words, seen as uint16


class XqaCall(NamedTuple):
    """The arguments of a call."""

    query: torch.Tensor
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    window_left: int
    out: torch.Tensor | None
    sinks: torch.Tensor | None
    kv_layout: str
    enable_pdl: bool | None
    q_len_per_req: int | None
    o_scale: float | None
    mask: torch.Tensor | None
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    q_cu_seq_lens: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    return_lse_base: str | None
    # Only calls of other entries have the following fields.
    entry: str = support.XQA  # the name in refusals; several tokens without a mask are causal, except in xqa
    shared_pages: bool = True  # whether K and V share the ids of ``block_tables``, else [batch, 2, pages_per_request]
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    query_dtype: torch.dtype | None = None  # of the caller's query, if ``query`` is a dequantized copy


class TrtllmDecodeCall(NamedTuple):
    """The arguments of a call of ``trtllm_batch_decode_with_kv_cache``."""

    query: torch.Tensor
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    window_left: int
    out: torch.Tensor | None
    out_dtype: torch.dtype | str | None
    o_sf_scale: float | None
    o_sf_vec_size: int | None
    sinks: torch.Tensor | list[torch.Tensor] | None
    kv_layout: str
    enable_pdl: bool | None
    backend: str
    q_len_per_req: int | None
    o_scale: float | None
    mask: torch.Tensor | None
    max_q_len: int | None
    cum_seq_lens_q: torch.Tensor | None
    skip_softmax_threshold_scale_factor: float | None
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    uses_shared_paged_kv_idx: bool
    lse: torch.Tensor | None
    return_lse: bool
    bmm1_scale_log2: torch.Tensor | None
    multi_ctas_kv_counter_buffer: torch.Tensor | None
    enable_block_sparse_attention: bool
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: torch.Tensor | None
    bf16q_fp8kv_transform_mode: str | None
    request_order: torch.Tensor | None
    request_order_plan: object | None
    return_lse_base: str | None
    query_dtype: torch.dtype | None  # of the caller's query, if ``query`` is a dequantized copy


def _check_mask(mask: Any, batch: int, q_len: int, ragged_tokens: int | None, on: torch.device) -> None:
    """Check the mask of several tokens per request.

    A single token does not use the mask, and callers of FlashInfer may pass any. Masks of ragged requests have at least
    one row for each of ``ragged_tokens``.
    """
    if mask is not None:
        checks.tensor("mask", mask, "a torch.Tensor or None")
    if q_len == 1 or mask is None:
        return
    words = 2 * -(-q_len // MASK_BITS)
    checks.dtype("mask", mask, (torch.uint16,))
    width = ("2 * ceil(q_len_per_req / 32)", words)
    if ragged_tokens is None:
        checks.shape("mask", mask, ("batch", batch), ("q_len_per_req", q_len), width)
    else:
        checks.shape("mask", mask, ("rows of query", None), width)
        if mask.shape[0] < ragged_tokens:
            raise ValueError(f"mask must have the {ragged_tokens} rows of query, got shape {tuple(mask.shape)}")
    checks.device("mask", mask, on)
    if not mask.is_contiguous():
        raise ValueError(f"mask must be contiguous, got strides {mask.stride()}")


def _output(call: XqaCall, cache: caches.PagedCache, batch: int, q_len: int) -> torch.Tensor | None:
    """Return ``out`` if given, or a new tensor if the launch would allocate one of the wrong dtype."""
    query, out = call.query, call.out
    query_dtype, kv_dtype = call.query_dtype or query.dtype, cache.key.dtype
    allowed = checks.SIXTEEN_BIT if query_dtype == checks.FP8 else (query_dtype,)
    if cache.is_nvfp4 or kv_dtype == checks.FP8:
        allowed = (*allowed, checks.FP8)
    inputs = f"a query of {query_dtype} and a kv_cache of {kv_dtype}"
    dtype = checks.output_dtype(call.out_dtype, out, query_dtype, allowed, inputs, names="the string 'nvfp4'")
    if out is None:
        return checks.allocated(out, query, cache.v_dim, dtype)
    tokens, heads, _ = query.shape
    if out.dim() == 4:
        checks.shape("out", out, ("batch", batch), ("q_len", q_len), ("num_heads", heads), ("head_dim", cache.v_dim))
        dense_tokens("out", out)
    checks.output("out", flat_tokens(out), (tokens, heads, cache.v_dim), dtype, query.device)
    return out


def xqa_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_seq_len: int, q_len_per_req: int = 1, device: Any = None
) -> int:
    """Return a size of ``workspace_buffer`` that is enough for ``xqa_batch_decode_with_kv_cache`` with any batch.

    The workspace holds partial results of requests whose keys several SMs share. Rows are query heads that share a KV
    head times new tokens of a request. On 132 SMs, with 8 KV heads of 128 columns and 131072 keys, it is 24 MiB for 8
    rows, 56 MiB for 32 and 101 MiB for 64. With 1024 keys it is 20, 40 and 54 MiB.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: of V and the output. Query and K have the same one, or 192 with 128 for V.
        max_seq_len: the most keys of a request: page size times columns of ``block_tables``.
        q_len_per_req: new tokens of each request.
        device: the device of the call; None means the current CUDA device, or the CPU if there is none.

    Returns:
        Bytes.
    """
    heads = checks.host_int("num_heads", num_heads, minimum=1)
    kv_heads = checks.host_int("num_kv_heads", num_kv_heads, minimum=1)
    if heads % kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, {kv_heads}, got {heads}")
    _check_head_dim("head_dim must be", checks.host_int("head_dim", head_dim))
    checks.host_int("max_seq_len", max_seq_len)
    rows = heads // kv_heads * checks.host_int("q_len_per_req", q_len_per_req, minimum=1)
    return workspace_bytes(rows, num_kv_heads, head_dim, max_seq_len, device)


def _check_head_dim(subject: str, head_dim: int) -> None:
    """Refuse head dims that no architecture serves. The table of features refuses a multiple between the two bounds."""
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{subject} a multiple of {HEAD_DIM_STEP} up to {MAX_MULTIPLE}, or {MAX_HEAD_DIM}, got {head_dim}"
        )


def _check_query(query: Any) -> None:
    checks.main_tensor("query", query)
    checks.dtype("query", query, checks.SIXTEEN_BIT)
    checks.shape("query", query, ("batch * q_len_per_req", None), ("num_heads", None), ("head_dim", None))
    _check_head_dim("query must have a head_dim that is", query.shape[2])
    checks.tma_readable("query", query)


def _kv(call: XqaCall) -> tuple[caches.PagedCache, BlockScales | None]:
    """Return K and V, and their block scales."""
    head_dim = call.query.shape[2]
    kv_dtypes = (call.query.dtype, checks.FP8, torch.int8, torch.uint8)
    cache = caches.paged_cache(call.kv_cache, call.kv_layout, call.query, kv_dtypes, same_pages=call.shared_pages)
    if cache.v_dim != head_dim and (head_dim, cache.v_dim) not in NARROWER_V:
        others = ", ".join(f"{qk}/{v}" for qk, v in sorted(NARROWER_V))
        raise ValueError(
            f"kv_cache must have the head_dim of query, {head_dim}, for V as well, got {cache.v_dim} (allowed pairs "
            f"of different head dims of K and V: {others})"
        )
    return cache, caches.block_scales("kv_cache_sf", call.kv_cache_sf, cache, call.kv_layout)


def _requests(call: XqaCall) -> tuple[int, int, TokenOffsets | None]:
    """Return (requests, most new tokens of a request, starts); starts are None without cumulative lengths."""
    if call.q_cu_seq_lens is not None:
        starts, bound = (
            ("q_cu_seq_lens", "q_len_per_req") if call.entry == support.XQA else ("cum_seq_lens_q", "max_q_len")
        )
        return ragged_starts(starts, call.q_cu_seq_lens, bound, call.q_len_per_req, call.query)
    q_len = 1 if call.q_len_per_req is None else checks.host_int("q_len_per_req", call.q_len_per_req, minimum=1)
    tokens = call.query.shape[0]
    if tokens % q_len:
        raise ValueError(f"q_len_per_req must divide the {tokens} rows of query, got {q_len}")
    return tokens // q_len, q_len, None


def _scratch(
    call: XqaCall, cache: caches.PagedCache, scales: BlockScales | None, log: LogSumExp | None, needed: int
) -> torch.Tensor:
    """Return the workspace, and check that it, the results and the inputs do not overlap."""
    inputs = (
        ("query", call.query),
        ("kv_cache", cache.key),
        ("kv_cache", cache.value),
        ("block_tables", call.block_tables),
        ("seq_lens", call.seq_lens),
        ("sinks", checks.sinks(call.sinks, call.query.shape[1], call.query.device)),
        ("mask", call.mask),
        ("q_cu_seq_lens", call.q_cu_seq_lens),
        ("causal_seqlens_kv_global", call.causal_seqlens_kv_global),
        *(("kv_cache_sf", part) for part in ((scales.key, scales.value) if scales is not None else ())),
    )
    results = (("out", call.out), ("lse", None if log is None else log.tensor))
    return workspace(call.workspace_buffer, needed, "hopwell.decode.xqa_workspace_bytes", results, inputs)


def _mask(call: XqaCall, q_len: int, part: DcpRank | None) -> Mask:
    if part is not None:
        return Mask(MaskKind.CYCLIC, call.window_left)
    if q_len > 1:
        return Mask(MaskKind.DRAFT, call.window_left)
    return Mask(MaskKind.SLIDING_WINDOW if call.window_left >= 0 else MaskKind.FULL, call.window_left)


def xqa_problem(call: XqaCall) -> AttentionProblem:
    """Check every argument, refuse calls without a kernel, and return the problem. No device memory is read."""
    query = call.query
    _check_query(query)
    on = query.device
    tokens, heads, _ = query.shape
    cache, kv_scales = _kv(call)
    batch, q_len, starts = _requests(call)
    if call.entry == support.XQA and q_len > 1 and call.mask is None:
        raise ValueError(f"mask must be given for q_len_per_req > 1, got None with q_len_per_req={q_len}")
    rows = f"{tokens} rows of query / q_len_per_req={q_len}" if starts is None else "elements of cumulative lengths - 1"
    table = checks.page_table(call.block_tables, batch, on, shared=call.shared_pages, batch_source=rows)
    kv_lens = checks.lengths("seq_lens", call.seq_lens, batch, on)
    checks.host_int("max_seq_len", call.max_seq_len)
    softmax_scale, output_scale = caches.scales(cache, call.bmm1_scale, call.bmm2_scale, on)
    output_factor = 1.0 if call.o_scale is None else checks.scale("o_scale", call.o_scale, on)
    call = call._replace(window_left=checks.host_int("window_left", call.window_left, minimum=-1))
    sinks = checks.sinks(call.sinks, heads, on)
    enable_pdl = checks.optional_flag("enable_pdl", call.enable_pdl)
    ragged_tokens = None if starts is None else tokens
    _check_mask(call.mask, batch, q_len, ragged_tokens, on)
    part = dcp_rank(call.causal_seqlens_kv_global, call.cp_world, call.cp_rank, batch, on)
    _check_dcp(call, part)
    out = _output(call, cache, batch, q_len)
    sizes = (batch, q_len, heads) if starts is None else (tokens, heads)
    log = log_sum_exp(call.lse, call.return_lse, call.return_lse_base, query, sizes)
    capacity = checks.capacity(table, cache.page_size)
    kv_heads = cache.key.shape[1]
    most = most_new_tokens(q_len, tokens, heads // kv_heads)
    needed = xqa_workspace_bytes(heads, kv_heads, cache.v_dim, capacity, most, on)
    scratch = _scratch(call, cache, kv_scales, log, needed)

    arch = support.arch_of(on)
    problem = AttentionProblem(
        query=query,
        key=cache.key,
        value=cache.value,
        out=flat_tokens(out),
        batch=batch,
        max_q_len=q_len,
        max_kv_len=capacity,
        q_offsets=starts,
        kv_lens=kv_lens,
        mask=_mask(call, q_len, part),
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        # An fp8 output is bmm2_scale * o, every other output bmm2_scale * o_scale * o.
        output_factor=1.0 if out is not None and out.dtype == checks.FP8 else output_factor,
        page_table=table,
        sinks=sinks,
        lse=log,
        draft_mask=None if q_len == 1 else call.mask,
        dcp_rank=part,
        kv_scales=kv_scales,
        scratch=scratch,
        family=Family.DECODE,
        programmatic_launch=True if enable_pdl is None else enable_pdl,
    )
    asked = named(call, speculative="q_len_per_req", window="window_left")
    asked["dcp"] = "causal_seqlens_kv_global given"
    require_problem(call.entry, problem, arch, asked, call.query_dtype)
    return problem


def _check_dcp(call: XqaCall, part: DcpRank | None) -> None:
    """Check calls with DCP ranks: they return the log-sum-exp for the combine, with a causal mask and without sinks."""
    if part is None:
        world = checks.host_int("cp_world", call.cp_world)
        if world > 1:
            raise ValueError(f"cp_world must be 1 without causal_seqlens_kv_global, got {world}")
        return
    if not checks.flag("return_lse", call.return_lse):
        raise ValueError("return_lse must be True with causal_seqlens_kv_global: ranks are merged by it")
    if call.window_left >= 0:
        raise ValueError(f"window_left must be -1 with causal_seqlens_kv_global, got {call.window_left}")
    if call.mask is not None:
        raise ValueError(f"mask must be None with causal_seqlens_kv_global, got {checks.describe(call.mask)}")
    if call.sinks is not None:
        raise ValueError("sinks must be None with causal_seqlens_kv_global: every rank would count them")


def dequantized_query(query: torch.Tensor, kv_cache: Any, out: Any, out_dtype: Any) -> torch.Tensor:
    """Return e4m3 queries over an e4m3 or NVFP4 cache in the dtype of a 16-bit output, which holds all of their values.

    With another output it is the dtype in which kernels take them. Queries over other caches are returned unchanged.
    """
    is_nvfp4 = caches.has_dtype(kv_cache, torch.uint8)
    if is_traced(query) or (not is_nvfp4 and not caches.has_dtype(kv_cache, checks.FP8)):
        return query
    checks.main_tensor("query", query)  # before the copy, which would hide faults of the original
    dtype = getattr(out, "dtype", None) if out_dtype is None else out_dtype
    if dtype not in checks.SIXTEEN_BIT:
        kv = torch.uint8 if is_nvfp4 else checks.FP8
        dtype = registry.query_dtype(Family.DECODE, support.arch_of(query.device), query.dtype, kv)
    return query.to(dtype)


def trtllm_decode_problem(call: TrtllmDecodeCall) -> AttentionProblem:
    """Return the problem of ``trtllm_batch_decode_with_kv_cache``, built by :func:`xqa_problem` from its arguments."""
    check_counter_buffer(call.multi_ctas_kv_counter_buffer)
    query, q_len_per_req, max_q_len = call.query, call.q_len_per_req, call.max_q_len
    checks.main_tensor("query", query)
    checks.dtype("query", query, (*checks.SIXTEEN_BIT, checks.FP8))
    if query.dtype == checks.FP8:  # dequantized_query leaves queries over other caches unchanged
        caches.check_dtype(caches.pair_or_tensor("kv_cache", call.kv_cache), checks.FP8, (checks.FP8, torch.uint8))
    _refuse_unserved(call)
    checks.choice("backend", call.backend, BACKENDS)
    if call.backend == "trtllm-gen" and call.kv_cache_sf is not None:
        # FlashInfer's trtllm-gen kernels take V scales interleaved by four tokens, its xqa kernels linear ones.
        raise refused(
            support.TRTLLM_DECODE, "backend='trtllm-gen' with kv_cache_sf (allowed: 'auto', 'xqa')", query.device
        )
    checks.flag("uses_shared_paged_kv_idx", call.uses_shared_paged_kv_idx)
    if max_q_len is not None:
        max_q_len = checks.host_int("max_q_len", max_q_len, minimum=1)
    if call.cum_seq_lens_q is None:
        if max_q_len is not None:
            raise ValueError(f"max_q_len must be None without cum_seq_lens_q, got {max_q_len}")
    else:
        checks.index_tensor("cum_seq_lens_q", call.cum_seq_lens_q, query.device)
        if max_q_len is None:
            raise ValueError("max_q_len must be given with cum_seq_lens_q, whose values are not read on the host")
        if q_len_per_req is not None and checks.host_int("q_len_per_req", q_len_per_req) not in (1, max_q_len):
            raise ValueError(f"q_len_per_req must be None or max_q_len with cum_seq_lens_q, got {q_len_per_req}")
        q_len_per_req = max_q_len
    others = dict(
        q_len_per_req=q_len_per_req,
        q_cu_seq_lens=call.cum_seq_lens_q,
        entry=support.TRTLLM_DECODE,
        shared_pages=call.uses_shared_paged_kv_idx,
    )
    return xqa_problem(call_arguments(XqaCall, call._asdict() | others))


_ONLY_NONE = {  # names and types of refused arguments; the class of a plan is FlashInfer's
    "bf16q_fp8kv_transform_mode": str,
    "request_order": torch.Tensor,
    "request_order_plan": object,
}


def _refuse_unserved(call: TrtllmDecodeCall) -> None:
    """Refuse, by name, arguments that would change a result."""
    on, out_dtype = call.query.device, call.out_dtype
    if isinstance(call.out, FP4Tensor) or (isinstance(out_dtype, str) and out_dtype == "nvfp4"):
        raise refused(support.TRTLLM_DECODE, f"an nvfp4 output (out_dtype={out_dtype!r})", on)
    for name in ("o_sf_scale", "o_sf_vec_size"):
        value = getattr(call, name)
        if value is not None:
            checks.host_float(name, value)
            raise ValueError(f"{name} must be None without an nvfp4 output, got {value}")
    refuse_skip_softmax(support.TRTLLM_DECODE, call.skip_softmax_threshold_scale_factor, on)
    if call.bmm1_scale_log2 is not None:
        checks.tensor("bmm1_scale_log2", call.bmm1_scale_log2)
        raise refused(support.TRTLLM_DECODE, "bmm1_scale_log2 (bmm1_scale takes tensors)", on)
    if checks.flag("enable_block_sparse_attention", call.enable_block_sparse_attention):
        raise refused(support.TRTLLM_DECODE, "enable_block_sparse_attention=True", on)
    for name, kind in _ONLY_NONE.items():
        value = getattr(call, name)
        if value is not None:
            if not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, got {checks.describe(value)}")
            raise refused(support.TRTLLM_DECODE, f"{name} (allowed: None)", on)
