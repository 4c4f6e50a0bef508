"""Check the arguments of ``trtllm_batch_context_with_kv_cache`` and convert them to an AttentionProblem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import is_traced
from hopwell._calls.repeat import OperandMap
from hopwell._checks import arguments as checks
from hopwell._checks import caches, windows
from hopwell._checks.features import named, require_problem
from hopwell.kernels import registry, support
from hopwell.kernels.capability import features
from hopwell.kernels.elements import INTERLEAVED_TOKENS
from hopwell.kernels.problem import (
    AttentionProblem,
    BlockScales,
    Family,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    OutputScales,
)
from hopwell.layouts import NVFP4_BLOCK, swizzled_128x4_shape
from hopwell.utils import FP4Tensor

Inputs = tuple[tuple[str, torch.Tensor | None], ...]  # by the names of arguments

NVFP4_SCALE_ROWS = 128  # the scales of an NVFP4 output come in tiles of this many rows


class ContextCall(NamedTuple):
    """The arguments of a call."""

    query: torch.Tensor
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    window_left: int
    out: torch.Tensor | FP4Tensor | None
    out_dtype: str | torch.dtype | None
    o_sf_scale: float | None
    o_sf_vec_size: int | None
    kv_layout: str
    enable_pdl: bool | None
    sinks: torch.Tensor | list[torch.Tensor] | None
    kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    skip_softmax_threshold_scale_factor: float | None
    uses_shared_paged_kv_idx: bool
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    v_scale_layout: str
    causal: bool | torch.Tensor
    window_right: int
    lse: torch.Tensor | None
    return_lse: bool
    lse_base: str
    multi_ctas_kv_counter_buffer: torch.Tensor | None
    backend: str | None
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
    query_dtype: torch.dtype | None  # of the caller's query, if ``query`` is a dequantized copy


@dataclass(frozen=True)
class _Output:
    """The requested output: the given tensor, if any, and its dtype. NVFP4 is uint8 data and scales."""

    tensor: torch.Tensor | None
    dtype: torch.dtype
    is_nvfp4: bool = False
    scales: OutputScales | None = None


def _check_nvfp4(cache: caches.PagedCache, heads: int, kv_layout: str, interleaves_v: bool) -> None:
    for what, size in (("a K head_dim", cache.qk_dim), ("a V head_dim", cache.v_dim)):
        if size % 64:
            raise ValueError(f"kv_cache as NVFP4 must have {what} that is a multiple of 64, got {size}")
    if interleaves_v and cache.page_size % INTERLEAVED_TOKENS:
        other = caches.other_layout(kv_layout)
        hint = checks.layout_hint(heads, cache.key, other, INTERLEAVED_TOKENS)
        raise ValueError(
            "kv_cache as NVFP4 with v_scale_layout='interleaved' must have a page size that is a multiple of "
            f"{INTERLEAVED_TOKENS}, got {cache.page_size}{hint}"
        )


def _nvfp4_output(query: torch.Tensor, out: Any, sizes: Sequence[int], o_sf_scale: float | None) -> _Output:
    if o_sf_scale is None:
        raise ValueError("o_sf_scale must be a float for an output of out_dtype 'nvfp4', got None")
    if o_sf_scale <= 0:
        raise ValueError(f"o_sf_scale must be positive, got {o_sf_scale}")
    if isinstance(out, torch.Tensor):
        raise ValueError("out must be an FP4Tensor or None for out_dtype 'nvfp4', got a torch.Tensor")
    tokens, heads, dim = sizes
    if dim % NVFP4_BLOCK:
        raise ValueError(f"kv_cache must have a V head_dim that is a multiple of 16 for out_dtype 'nvfp4', got {dim}")
    if out is not None:
        if not isinstance(out, FP4Tensor):
            raise TypeError(f"out must be an FP4Tensor or None for out_dtype 'nvfp4', got {checks.describe(out)}")
        block_bytes = NVFP4_BLOCK // 2
        checks.output("out.data", out.data, (tokens, heads, dim // 2), torch.uint8, query.device, block_bytes)
        _, columns = swizzled_128x4_shape(tokens, heads * dim // NVFP4_BLOCK)
        scale = checks.tensor("out.scale", out.scale)
        checks.dtype("out.scale", scale, (checks.FP8,))
        checks.shape("out.scale", scale, ("rows", None), ("head_dim * num_heads / 16", columns))
        checks.device("out.scale", scale, query.device)
        if not scale.is_contiguous():
            raise ValueError(f"out.scale must be contiguous, got strides {scale.stride()}")
        if scale.shape[0] % NVFP4_SCALE_ROWS:
            raise ValueError(f"out.scale must have a multiple of {NVFP4_SCALE_ROWS} rows, got {scale.shape[0]}")
        start = checks.host_int("out.scale_start_index", out.scale_start_index)
        if start + tokens > scale.shape[0]:
            raise ValueError(
                f"out.scale_start_index + tokens must not exceed the {scale.shape[0]} rows of out.scale, "
                f"got {start} + {tokens}"
            )
    else:
        shape = swizzled_128x4_shape(max(tokens, 1), heads * dim // NVFP4_BLOCK)
        data = torch.empty((tokens, heads, dim // 2), dtype=torch.uint8, device=query.device)
        out = FP4Tensor(data, torch.empty(shape, dtype=checks.FP8, device=query.device))
    scales = OutputScales(out.scale, out.scale_start_index, o_sf_scale)
    return _Output(out.data, torch.uint8, is_nvfp4=True, scales=scales)


def _output(call: ContextCall, v_dim: int) -> _Output:
    """Return the requested output."""
    query, out, out_dtype = call.query, call.out, call.out_dtype
    o_sf_scale, o_sf_vec_size, query_dtype = call.o_sf_scale, call.o_sf_vec_size, call.query_dtype or query.dtype
    sizes = (*query.shape[:-1], v_dim)
    if o_sf_scale is not None:
        o_sf_scale = checks.host_float("o_sf_scale", o_sf_scale)
    if o_sf_vec_size is not None:
        o_sf_vec_size = checks.host_int("o_sf_vec_size", o_sf_vec_size, NVFP4_BLOCK, NVFP4_BLOCK)
    if (isinstance(out_dtype, str) and out_dtype == "nvfp4") or (out_dtype is None and isinstance(out, FP4Tensor)):
        return _nvfp4_output(query, out, sizes, o_sf_scale)
    if isinstance(out, FP4Tensor):
        raise ValueError(f"out must be a torch.Tensor for out_dtype {out_dtype}, got an FP4Tensor")
    inputs, names = f"a query of {query_dtype}", "the string 'nvfp4'"
    dtype = checks.output_dtype(out_dtype, out, query_dtype, checks.PREFILL_OUTPUTS, inputs, names=names)
    for name, value in (("o_sf_scale", o_sf_scale), ("o_sf_vec_size", o_sf_vec_size)):
        if value is not None:
            raise ValueError(f"{name} must be None unless the output is NVFP4, got {checks.describe(value)}")
    if out is not None:
        checks.output("out", out, sizes, dtype, query.device)
    return _Output(out, dtype)


def _check_query(query: Any) -> None:
    checks.main_tensor("query", query)
    checks.dtype("query", query, (*checks.SIXTEEN_BIT, checks.FP8))
    checks.shape("query", query, ("tokens", None), ("num_heads", None), ("head_dim", None))
    checks.tma_readable("query", query)


def dequantized_query(query: torch.Tensor) -> torch.Tensor:
    """Return e4m3 queries over an NVFP4 cache in the dtype in which kernels take them."""
    if is_traced(query):
        return query  # the op does it
    _check_query(query)  # before the copy, which would hide faults of the original
    dtype = registry.query_dtype(Family.PREFILL, support.arch_of(query.device), query.dtype, torch.uint8)
    return query if dtype == query.dtype else query.to(dtype)


def _block_scales(kv_block_scales: Any, kv_cache_sf: Any) -> tuple[str, Any]:
    """Return the block scales of the cache, and the one of their two names that the caller used."""
    if kv_cache_sf is None:
        return "kv_block_scales", kv_block_scales
    if not isinstance(kv_cache_sf, (torch.Tensor, tuple, list)):
        raise TypeError(f"kv_cache_sf must be a torch.Tensor or a pair of them, got {checks.describe(kv_cache_sf)}")
    if kv_block_scales is not None:
        raise ValueError("kv_cache_sf and kv_block_scales are two names of one argument, got both of them")
    return "kv_cache_sf", kv_cache_sf


def _mask(causal: Any, window_left: Any, window_right: Any, tokens: int) -> Mask:
    window_left = checks.host_int("window_left", window_left, minimum=-1)
    if not checks.flag("causal", causal):
        return windows.full_or_window(window_left, window_right, tokens)
    windows.right_of_causal(window_right, "where causal is True")
    return Mask(MaskKind.SLIDING_WINDOW, window_left) if window_left >= 0 else Mask(MaskKind.CAUSAL)


def _kv(call: ContextCall, shared: bool) -> tuple[caches.PagedCache, BlockScales | None, Inputs]:
    """Return K and V, their block scales, and the scales under the caller's name for them."""
    kv_dtypes = (call.query.dtype, checks.FP8, torch.uint8)
    cache = caches.paged_cache(call.kv_cache, call.kv_layout, call.query, kv_dtypes, same_pages=shared)
    interleaves_v = caches.interleaves_v(call.v_scale_layout)
    if cache.is_nvfp4:
        _check_nvfp4(cache, call.query.shape[1], call.kv_layout, interleaves_v)
    elif not interleaves_v:
        raise ValueError(
            "v_scale_layout must be 'interleaved', the default, unless kv_cache is NVFP4 (torch.uint8), got "
            f"{call.v_scale_layout!r} and {cache.key.dtype}"
        )
    name, given = _block_scales(call.kv_block_scales, call.kv_cache_sf)
    scales = caches.block_scales(name, given, cache, call.kv_layout, interleaves_v=interleaves_v)
    return cache, scales, () if scales is None else ((name, scales.key), (name, scales.value))


def _log_sum_exp(call: ContextCall, output: _Output, inputs: Inputs) -> LogSumExp | None:
    natural = checks.is_natural("lse_base", call.lse_base)
    return_lse = checks.flag("return_lse", call.return_lse)
    (tokens, heads, _), on, lse = call.query.shape, call.query.device, call.lse
    if lse is not None:
        checks.log_sum_exp("lse", lse, on, ("tokens", tokens), ("num_heads", heads))
        checks.disjoint("lse", lse, (*inputs, ("out", output.tensor)))
    if not return_lse:
        return None
    if lse is None:
        lse = torch.empty((tokens, heads), dtype=torch.float32, device=on)
    return LogSumExp(lse, LseLayout.RAGGED, natural=natural)


def _require(call: ContextCall, arch: str) -> None:
    """Refuse arguments that no problem can express and no kernel supports."""
    for name in ("use_fp16_softmax", "uses_spcompress"):
        if checks.optional_flag(name, getattr(call, name)):
            features.require(support.CONTEXT, name.removeprefix("use_").removeprefix("uses_"), f"{name}=True", arch)


def context_problem(call: ContextCall) -> AttentionProblem:
    """Check every argument, refuse calls without a kernel, and return the problem. No device memory is read."""
    query = call.query
    _check_query(query)
    on = query.device
    tokens, heads, _ = query.shape
    shared = checks.flag("uses_shared_paged_kv_idx", call.uses_shared_paged_kv_idx)
    cache, kv_scales, named_scales = _kv(call, shared)
    checks.unread_tensor("workspace_buffer", call.workspace_buffer)

    batch = checks.host_int("batch_size", call.batch_size)
    table = checks.page_table(call.block_tables, batch, on, shared=shared)
    kv_lens = checks.lengths("seq_lens", call.seq_lens, batch, on)
    q_offsets = checks.cumulative("cum_seq_lens_q", call.cum_seq_lens_q, batch, on)
    # Callers pass page counts or other lengths here. The KV lengths are in seq_lens, so only the type can be checked.
    checks.index_tensor("cum_seq_lens_kv", call.cum_seq_lens_kv, on)
    max_q_len = checks.host_int("max_q_len", call.max_q_len)
    max_kv_len = checks.host_int("max_kv_len", call.max_kv_len)

    softmax_scale, output_scale = caches.scales(cache, call.bmm1_scale, call.bmm2_scale, on)
    mask = _mask(call.causal, call.window_left, call.window_right, tokens)
    sinks = checks.sinks(call.sinks, heads, on)
    skip_softmax = checks.optional_float(
        "skip_softmax_threshold_scale_factor", call.skip_softmax_threshold_scale_factor
    )
    output = _output(call, cache.v_dim)
    inputs = (
        ("query", query),
        ("kv_cache", cache.key),
        ("kv_cache", cache.value),
        ("block_tables", call.block_tables),
        ("seq_lens", call.seq_lens),
        ("cum_seq_lens_q", call.cum_seq_lens_q),
        ("sinks", sinks),
        *named_scales,
    )
    if output.tensor is not None:
        checks.disjoint("out", output.tensor, inputs)
    if output.scales is not None:
        checks.disjoint("out.scale", output.scales.tensor, (*inputs, ("out.data", output.tensor)))
    lse = _log_sum_exp(call, output, inputs)
    if call.multi_ctas_kv_counter_buffer is not None:
        checks.unread_tensor("multi_ctas_kv_counter_buffer", call.multi_ctas_kv_counter_buffer)
    checks.backend_name(call.backend)
    enable_pdl = checks.optional_flag("enable_pdl", call.enable_pdl)

    arch = support.arch_of(on)
    _require(call, arch)
    problem = AttentionProblem(
        query=query,
        key=cache.key,
        value=cache.value,
        out=checks.allocated(output.tensor, query, cache.v_dim, output.dtype),
        batch=batch,
        max_q_len=min(max(max_q_len, 1), tokens),  # a wrong bound of 0 must not leave results unwritten
        max_kv_len=min(max_kv_len, checks.capacity(table, cache.page_size)),
        q_offsets=q_offsets,
        kv_lens=kv_lens,
        mask=mask,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        page_table=table,
        sinks=sinks,
        kv_scales=kv_scales,
        out_scales=output.scales,
        lse=lse,
        skip_softmax=skip_softmax,
        programmatic_launch=True if enable_pdl is None else enable_pdl,
    )
    skip = "skip_softmax_threshold_scale_factor"
    asked = named(call, skip_softmax=skip, lse="return_lse", window="window_left", local_window="window_right")
    require_problem(support.CONTEXT, problem, arch, asked, call.query_dtype)
    return problem


def results(
    call: ContextCall, problem: AttentionProblem
) -> tuple[torch.Tensor | FP4Tensor | None, torch.Tensor | None]:
    """Return the output, if it exists before the launch, and the log-sum-exp, in the form that the caller gets."""
    out, stats = call.out, None if problem.lse is None else problem.lse.tensor
    if out is None and problem.out is not None and problem.out_scales is not None:
        shape = (*call.query.shape[:-1], problem.v_dim)
        out = FP4Tensor(problem.out, problem.out_scales.tensor, original_shape=shape)
    return out, stats


CONTEXT_OPERANDS = OperandMap(
    tensors=(
        "query",
        "kv_cache",
        "kv_cache[1]",
        "block_tables",
        "seq_lens",
        "cum_seq_lens_q",
        "bmm1_scale",
        "bmm2_scale",
        "sinks",
        "kv_block_scales",
        "kv_block_scales[1]",
    ),
    operands={
        "query": "query",
        "key": "kv_cache",
        "value": ("kv_cache[1]", "kv_cache"),
        "q_offsets": "cum_seq_lens_q",
        "kv_lens": "seq_lens",
        "key_table": "block_tables",
        "value_table": "block_tables",
        "softmax_scale": "bmm1_scale",
        "output_scale": "bmm2_scale",
        "sinks": "sinks",
        "key_scales": "kv_block_scales",
        "value_scales": ("kv_block_scales[1]", "kv_block_scales"),
    },
)
