"""Arguments of ``xqa_batch_decode_with_kv_cache``: checked, and reduced to an AttentionProblem."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hopwell import _cache
from hopwell import _checks as checks
from hopwell import _features as features
from hopwell._decoding import (
    dense_tokens,
    flat_tokens,
    log_sum_exp,
    ragged_starts,
    refuse_skip_softmax,
    refused,
    workspace,
    workspace_bytes,
)
from hopwell.kernels import support
from hopwell.kernels.problem import AttentionProblem, Family, Mask, MaskKind
from hopwell.utils import FP4Tensor

MAX_HEAD_DIM = 512
HEAD_DIM_STEP = 16
BACKENDS = ("auto", "xqa", "trtllm-gen")
MASK_BITS = 32  # a row of the speculative mask is a whole number of 32-bit words, seen as uint16


def _check_mask(mask: Any, batch: int, q_len: int, ragged_tokens: int | None, on: torch.device) -> None:
    """The mask of several tokens per request. A single one has no use for it, and upstream callers may pass any. Masks
    of ragged requests have a row for each of ``ragged_tokens``, and may have more of them."""
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


def _check_out(out: Any, query: torch.Tensor, cache: _cache.PagedCache, batch: int, q_len: int) -> None:
    if out is None:
        return
    checks.tensor("out", out, "a torch.Tensor or None")
    tokens, heads, _ = query.shape
    allowed = (query.dtype, checks.FP8) if cache.key.dtype == checks.FP8 else (query.dtype,)
    checks.dtype("out", out, allowed)
    if out.dim() == 4:
        checks.shape("out", out, ("batch", batch), ("q_len", q_len), ("num_heads", heads), ("head_dim", cache.v_dim))
        dense_tokens("out", out)
    checks.output("out", flat_tokens(out), (tokens, heads, cache.v_dim), out.dtype, query.device)


def xqa_workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_seq_len: int, q_len_per_req: int = 1, device: Any = None
) -> int:
    """Size of ``workspace_buffer`` that is enough for ``xqa_batch_decode_with_kv_cache`` with any batch.

    It holds partial results of requests whose keys several multiprocessors share: on 132 multiprocessors, with 8 KV
    heads of 128 columns and 131072 keys, 24 MiB for 8 rows (query heads that share a KV head times new tokens of a
    request), 53 for 32 and 101 for 64; with 1024 keys 20, 40 and 40.

    Args:
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: of query, K and V.
        max_seq_len: the most keys that a request can have: page size times columns of ``block_tables``.
        q_len_per_req: new tokens of each request.
        device: the device of the call; None means the current CUDA device, or the CPU where there is none.

    Returns:
        Bytes.
    """
    heads = checks.host_int("num_heads", num_heads, minimum=1)
    kv_heads = checks.host_int("num_kv_heads", num_kv_heads, minimum=1)
    if heads % kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, {kv_heads}, got {heads}")
    checks.host_int("head_dim", head_dim, HEAD_DIM_STEP, MAX_HEAD_DIM)
    checks.host_int("max_seq_len", max_seq_len)
    rows = heads // kv_heads * checks.host_int("q_len_per_req", q_len_per_req, minimum=1)
    return workspace_bytes(rows, num_kv_heads, head_dim, max_seq_len, device)


def _require(
    entry: str,
    arch: str,
    query: torch.Tensor,
    cache: _cache.PagedCache,
    is_fp8_out: bool,
    q_len: int,
    window_left: int,
    has_sinks: bool,
    scales: tuple[float | torch.Tensor, ...],
) -> None:
    """Refuse what no kernel serves on ``arch``."""
    head_dim, kv = query.shape[2], f"kv_cache.dtype={cache.key.dtype}"
    known_dim = support.decode_head_dim(head_dim)
    has_8bits = cache.key.dtype in (checks.FP8, torch.int8)
    known_8bit_dim = "8bit_head_dim" if head_dim in support.DECODE_8BIT_HEAD_DIMS else "other_8bit_head_dim"
    known_page = "page_size" if cache.page_size <= support.MAX_PAGE_SIZE else "other_page_size"
    has_tensor_scale = any(isinstance(scale, torch.Tensor) for scale in scales)
    needs = (
        (cache.is_nvfp4, "nvfp4_kv", kv),
        (cache.key.dtype == torch.int8, "int8_kv", kv),
        (cache.key.dtype == checks.FP8, "fp8_kv", kv),
        (is_fp8_out, "fp8_out", f"out.dtype={checks.FP8}"),
        (True, "16bit", f"query.dtype={query.dtype}, {kv}"),
        (True, known_dim, f"head_dim={head_dim}"),
        (has_8bits, known_8bit_dim, f"head_dim={head_dim}, {kv}"),
        (True, known_page, f"page_size={cache.page_size}"),
        (True, "cache", f"KV of shape {tuple(cache.key.shape)}"),
        (q_len > 1, "speculative", f"q_len_per_req={q_len}"),
        (window_left >= 0, "window", f"window_left={window_left}"),
        (has_sinks, "sinks", "sinks given"),
        (has_tensor_scale, "tensor_scales", "scale given as a tensor"),
    )
    features.require_all(entry, arch, needs)


def xqa_problem(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    q_cu_seq_lens: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str | None = None,
    *,
    entry: str = support.XQA,
    shared_pages: bool = True,
) -> AttentionProblem:
    """Check every argument, refuse what has no kernel, and return the problem. No device memory is read.

    ``entry`` is whom refusals name; several tokens per request without a mask are refused by xqa, else they are causal.
    ``shared_pages``: K and V share the ids of ``block_tables``, else it is [batch, 2, pages_per_request].
    """
    checks.main_tensor("query", query)
    checks.dtype("query", query, checks.SIXTEEN_BIT)
    checks.shape("query", query, ("batch * q_len_per_req", None), ("num_heads", None), ("head_dim", None))
    checks.tma_readable("query", query)
    on = query.device
    tokens, heads, head_dim = query.shape
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"query must have a head_dim that is a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {head_dim}"
        )
    kv_dtypes = (query.dtype, checks.FP8, torch.int8, torch.uint8)
    cache = _cache.paged_cache(kv_cache, kv_layout, query, kv_dtypes)
    if cache.v_dim != head_dim:
        raise ValueError(f"kv_cache must have the head_dim of query, {head_dim}, for V as well, got {cache.v_dim}")
    _cache.block_scales("kv_cache_sf", kv_cache_sf, cache, kv_layout, (checks.FP8, torch.uint8), dense_pages=False)

    if q_cu_seq_lens is None:
        q_len = 1 if q_len_per_req is None else checks.host_int("q_len_per_req", q_len_per_req, minimum=1)
        if tokens % q_len:
            raise ValueError(f"q_len_per_req must divide the {tokens} rows of query, got {q_len}")
        batch, starts, ragged_tokens = tokens // q_len, None, None
    else:
        batch, q_len, starts = ragged_starts("q_cu_seq_lens", q_cu_seq_lens, "q_len_per_req", q_len_per_req, query)
        ragged_tokens = tokens
    if entry == support.XQA and q_len > 1 and mask is None:
        raise ValueError(f"mask must be given for q_len_per_req > 1, got None with q_len_per_req={q_len}")
    table = checks.page_table(block_tables, batch, on, shared=shared_pages)
    kv_lens = checks.lengths("seq_lens", seq_lens, batch, on)
    checks.host_int("max_seq_len", max_seq_len)
    softmax_scale = checks.scale("bmm1_scale", bmm1_scale, on, minimum=0.0)
    output_scale = checks.scale("bmm2_scale", bmm2_scale, on)
    output_factor = 1.0 if o_scale is None else checks.scale("o_scale", o_scale, on)
    window_left = checks.host_int("window_left", window_left, minimum=-1)
    sink_logits = checks.sinks(sinks, heads, on)
    enable_pdl = checks.optional_flag("enable_pdl", enable_pdl)
    _check_mask(mask, batch, q_len, ragged_tokens, on)
    _check_out(out, query, cache, batch, q_len)
    if ragged_tokens is not None and q_len > 1:  # scratch grows with it, and no request has more tokens than there are
        q_len = min(q_len, max(ragged_tokens, 2))
    sizes = (batch, q_len, heads) if starts is None else (tokens, heads)
    log = log_sum_exp(lse, return_lse, return_lse_base, query, sizes)
    capacity = checks.capacity(table, cache.page_size)
    needed = xqa_workspace_bytes(heads, cache.key.shape[1], head_dim, capacity, q_len, on)
    inputs = (
        ("query", query),
        ("kv_cache", cache.key),
        ("kv_cache", cache.value),
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("sinks", sink_logits),
        ("mask", mask),
        ("q_cu_seq_lens", q_cu_seq_lens),
    )
    results = (("out", out), ("lse", None if log is None else log.tensor))
    scratch = workspace(workspace_buffer, needed, results, inputs)

    is_fp8_out = out is not None and out.dtype == checks.FP8
    scales = (softmax_scale, output_scale, output_factor)
    arch = support.arch_of(on)
    _require(entry, arch, query, cache, is_fp8_out, q_len, window_left, sinks is not None, scales)
    kind = MaskKind.SLIDING_WINDOW if window_left >= 0 else MaskKind.FULL
    return AttentionProblem(
        query=query,
        key=cache.key,
        value=cache.value,
        out=flat_tokens(out),
        batch=batch,
        max_q_len=q_len,
        max_kv_len=capacity,
        q_offsets=starts,
        kv_lens=kv_lens,
        mask=Mask(MaskKind.DRAFT if q_len > 1 else kind, window_left),
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        # An fp8 output is bmm2_scale * o, any other one bmm2_scale * o_scale * o.
        output_factor=1.0 if is_fp8_out else output_factor,
        page_table=table,
        sinks=sink_logits,
        lse=log,
        draft_mask=None if q_len == 1 else mask,
        scratch=scratch,
        family=Family.DECODE,
        programmatic_launch=support.has_pdl(arch) if enable_pdl is None else enable_pdl,
    )


def widened_query(query: Any, kv_cache: Any, out: Any, out_dtype: Any) -> Any:
    """e4m3 queries over an e4m3 cache in 16 bits, which hold all of their values and are what kernels multiply: float16
    where the output has this dtype, else bfloat16. All other queries as they are."""
    first = kv_cache[0] if isinstance(kv_cache, (tuple, list)) and kv_cache else kv_cache
    tensors = isinstance(query, torch.Tensor) and isinstance(first, torch.Tensor)
    if not tensors or query.dtype != checks.FP8 or first.dtype != checks.FP8:
        return query
    checks.main_tensor("query", query)  # a copy has none of the faults that are looked for
    dtype = getattr(out, "dtype", None) if out_dtype is None else out_dtype
    return query.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)


def trtllm_decode_problem(
    query: torch.Tensor,
    query_dtype: torch.dtype | None,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | str | None,
    backend: str,
    q_len_per_req: int | None,
    max_q_len: int | None,
    cum_seq_lens_q: torch.Tensor | None,
    uses_shared_paged_kv_idx: bool,
    others: TrtllmOptions,
    **same: Any,
) -> AttentionProblem:
    """The problem of ``trtllm_batch_decode_with_kv_cache``, as :func:`xqa_problem` makes it of ``same`` arguments.

    ``query_dtype`` is that of the caller's query, where ``query`` has been widened.
    """
    checks.main_tensor("query", query)
    checks.dtype("query", query, checks.SIXTEEN_BIT)
    others.check(query.device)
    checks.choice("backend", backend, BACKENDS)
    checks.flag("uses_shared_paged_kv_idx", uses_shared_paged_kv_idx)
    if max_q_len is not None:
        checks.host_int("max_q_len", max_q_len, minimum=1)
    if cum_seq_lens_q is None:
        if max_q_len is not None:
            raise ValueError(f"max_q_len must be None without cum_seq_lens_q, got {max_q_len}")
    else:
        checks.tensor("cum_seq_lens_q", cum_seq_lens_q)
        if max_q_len is None:
            raise ValueError("max_q_len must be given with cum_seq_lens_q, whose values are not read on the host")
        if q_len_per_req is not None and checks.host_int("q_len_per_req", q_len_per_req) not in (1, max_q_len):
            raise ValueError(f"q_len_per_req must be None or max_q_len with cum_seq_lens_q, got {q_len_per_req}")
        q_len_per_req = max_q_len
    return xqa_problem(
        query,
        kv_cache,
        out=_out_of_type(out, out_dtype, query, query_dtype),
        q_len_per_req=q_len_per_req,
        q_cu_seq_lens=cum_seq_lens_q,
        entry=support.TRTLLM_DECODE,
        shared_pages=uses_shared_paged_kv_idx,
        **same,
    )


def _out_of_type(out: Any, out_dtype: Any, query: torch.Tensor, query_dtype: torch.dtype | None) -> torch.Tensor | None:
    """``out``, or a new tensor where ``out_dtype`` is not what the launch allocates."""
    if (isinstance(out_dtype, str) and out_dtype == "nvfp4") or isinstance(out, FP4Tensor):
        raise refused(support.TRTLLM_DECODE, f"an nvfp4 output (out_dtype={out_dtype!r})", query.device)
    if out_dtype is None:
        if out is not None or query_dtype is None:
            return out
        return checks.allocated(out, query, query.shape[-1], query_dtype)
    if not isinstance(out_dtype, torch.dtype):
        raise TypeError(f"out_dtype must be a torch.dtype, 'nvfp4' or None, got {checks.describe(out_dtype)}")
    if out is not None:
        checks.dtype("out", checks.tensor("out", out, "a torch.Tensor or None"), (out_dtype,))
    return checks.allocated(out, query, query.shape[-1], out_dtype)


_ONLY_NONE = {  # names and types of what is refused; the class of a plan is FlashInfer's
    "causal_seqlens_kv_global": torch.Tensor,
    "bf16q_fp8kv_transform_mode": str,
    "request_order": torch.Tensor,
    "request_order_plan": object,
}


class TrtllmOptions(NamedTuple):
    """What ``trtllm_batch_decode_with_kv_cache`` takes but does not act on: its defaults, and values like them."""

    o_sf_scale: Any = None
    o_sf_vec_size: Any = None
    skip_softmax_threshold_scale_factor: Any = None
    bmm1_scale_log2: Any = None
    enable_block_sparse_attention: Any = False
    cp_world: Any = 1
    cp_rank: Any = 0
    causal_seqlens_kv_global: Any = None
    bf16q_fp8kv_transform_mode: Any = None
    request_order: Any = None
    request_order_plan: Any = None

    def check(self, on: torch.device) -> None:
        """Refuse by name what would change a result."""
        for name in ("o_sf_scale", "o_sf_vec_size"):
            value = getattr(self, name)
            if value is not None:
                checks.host_float(name, value)
                raise ValueError(f"{name} must be None without an nvfp4 output, got {value}")
        refuse_skip_softmax(support.TRTLLM_DECODE, self.skip_softmax_threshold_scale_factor, on)
        if self.bmm1_scale_log2 is not None:
            checks.tensor("bmm1_scale_log2", self.bmm1_scale_log2)
            raise refused(support.TRTLLM_DECODE, "bmm1_scale_log2 (bmm1_scale takes tensors)", on)
        if checks.flag("enable_block_sparse_attention", self.enable_block_sparse_attention):
            raise refused(support.TRTLLM_DECODE, "enable_block_sparse_attention=True", on)
        for name, inert in (("cp_world", 1), ("cp_rank", 0)):
            if checks.host_int(name, getattr(self, name), minimum=0) != inert:
                raise refused(support.TRTLLM_DECODE, f"{name}={getattr(self, name)} (allowed: {inert})", on)
        for name, kind in _ONLY_NONE.items():
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, kind):
                    raise TypeError(f"{name} must be a {kind.__name__} or None, got {checks.describe(value)}")
                raise refused(support.TRTLLM_DECODE, f"{name} (allowed: None)", on)
