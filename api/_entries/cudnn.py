"""Check the arguments of ``cudnn_batch_prefill_with_kv_cache`` and convert them to an AttentionProblem."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import is_traced
from hopwell._calls.repeat import OperandMap
from hopwell._checks import arguments as checks
from hopwell._checks import caches, device_data
from hopwell._checks.features import require_problem
from hopwell.kernels import support
from hopwell.kernels.launch.device_data import scale_rule
from hopwell.kernels.problem import (
    AttentionProblem,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    TokenOffsets,
)
from hopwell.layouts import KVLayout, KVViews, ragged_kv_views, separate_kv_views

KV_NAMES = ("k_cache", "v_cache")
OR_TOKENS = "a torch.Tensor, or None where batch_offsets_{} counts tokens"  # allowed forms of the lengths
SCALE_PRODUCT = "scale * q_scale * k_scale"  # name in messages of the factor that kernels read


class CudnnCall(NamedTuple):
    """The arguments of a call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    q_scale: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    scale: float | torch.Tensor
    workspace_buffer: torch.Tensor
    max_token_per_sequence: int
    max_sequence_kv: int
    actual_seq_lens_q: torch.Tensor | None
    actual_seq_lens_kv: torch.Tensor | None
    block_tables: torch.Tensor | None
    causal: bool
    return_lse: bool
    batch_offsets_q: torch.Tensor | None
    batch_offsets_o: torch.Tensor | None
    batch_offsets_k: torch.Tensor | None
    batch_offsets_v: torch.Tensor | None
    batch_offsets_stats: torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    is_cuda_graph_compatible: bool
    backend: str | None
    batch_offsets_units: str
    o_data_type: torch.dtype | None
    lse_base: str
    lse_layout: str
    output_scale: float | torch.Tensor  # v_scale; ``scale`` includes q_scale and k_scale


def _kv(q: torch.Tensor, k_cache: Any, v_cache: Any, paged: bool) -> KVViews:
    for name, cache in zip(KV_NAMES, (k_cache, v_cache), strict=True):
        checks.tensor(name, cache)
        if cache.dtype != q.dtype:
            raise ValueError(f"{name} must have the dtype of q, {q.dtype}, got {cache.dtype}")
        checks.device(name, cache, q.device)
    form = "[pages, kv_heads, page_size, head_dim] with" if paged else "[kv_tokens, kv_heads, head_dim] without"
    for name, cache in zip(KV_NAMES, (k_cache, v_cache), strict=True):
        if cache.dim() != (4 if paged else 3):
            raise ValueError(
                f"{name} must be {4 if paged else 3}-D {form} block_tables, got shape {tuple(cache.shape)}"
            )
    if paged:
        views = separate_kv_views(k_cache, v_cache, KVLayout.HND, names=KV_NAMES)
        checks.page_size("k_cache", k_cache.shape[2])
    else:
        views = ragged_kv_views(k_cache, v_cache, KV_NAMES)
    for name, cache in zip(KV_NAMES, (k_cache, v_cache), strict=True):
        checks.tma_readable(name, cache)
    other = "NHD, which k_cache.transpose(1, 2) and v_cache.transpose(1, 2) make HND" if paged else ""
    checks.grouped_heads(q.shape[1], views.key, "k_cache", other)
    if views.key.shape[3] != q.shape[2]:
        raise ValueError(f"k_cache must have the head_dim of q, {q.shape[2]}, got {views.key.shape[3]}")
    for name, cache in zip(KV_NAMES, (k_cache, v_cache), strict=True):
        if cache.shape[-1] < 1:
            raise ValueError(f"{name} must have a head_dim of at least 1, got shape {tuple(cache.shape)}")
    return views


def _token_elements(ragged: torch.Tensor) -> int:
    """Return the elements of storage between consecutive tokens of a ragged tensor, the unit of element offsets.

    They are 3 * heads * head_dim if query, key and value are slices of one fused tensor.
    """
    tokens, *token = ragged.shape
    stride = ragged.stride(0) if tokens > 1 else 0
    return stride or math.prod(token)  # any stride is valid for a single token, or for one token's data for all


def _batch(actual_seq_lens_q: Any, batch_offsets_q: Any, in_tokens: bool) -> int:
    """Return the batch size, for which this entry has no argument."""
    if actual_seq_lens_q is None and in_tokens and batch_offsets_q is not None:
        return max(checks.tensor("batch_offsets_q", batch_offsets_q).numel() - 1, 0)
    return checks.tensor("actual_seq_lens_q", actual_seq_lens_q, OR_TOKENS.format("q")).numel()


def _lengths(of: str, value: Any, batch: int, on: torch.device, graphs: bool) -> torch.Tensor:
    name = f"actual_seq_lens_{of}"
    checked = checks.tensor(name, value, OR_TOKENS.format(of[0]))
    if checked.device == on or checked.device.type != "cpu":
        return checks.lengths(name, checked, batch, on)
    if graphs:
        raise ValueError(
            f"{name} must be on {on}, the device of q, where is_cuda_graph_compatible is True: "
            f"a copy from {checked.device} would not be replayed"
        )
    checks.lengths(name, checked, batch, checked.device)
    return checks.lengths(name, checked.to(on, non_blocking=True), batch, on)


def _check_pairing(batch: int, paged: bool, given: dict[str, TokenOffsets | None]) -> None:
    """Check that offsets come in pairs. Without them only a single request can be located, at token 0."""
    if batch > 1 and (given["batch_offsets_q"] is None or given["batch_offsets_o"] is None):
        raise ValueError(
            f"batch_offsets_q and batch_offsets_o are required for more than one request (batch size {batch}): they "
            "say where each starts in q and out, in elements, e.g. cumsum([0, *lengths]) * num_heads * head_dim"
        )
    if batch > 1 and not paged and (given["batch_offsets_k"] is None or given["batch_offsets_v"] is None):
        raise ValueError(
            f"batch_offsets_k and batch_offsets_v are required for ragged k_cache and v_cache with more than one "
            f"request (batch size {batch}): they say where each starts, in elements"
        )
    for first, second in (("batch_offsets_q", "batch_offsets_o"), ("batch_offsets_k", "batch_offsets_v")):
        if (given[first] is None) != (given[second] is None):
            raise ValueError(f"{first} and {second} must be given together, got only one of them")
    for name in ("batch_offsets_k", "batch_offsets_v"):
        if paged and given[name] is not None:
            raise ValueError(
                f"{name} must be None with block_tables, which say where k_cache and v_cache hold a request"
            )


def _request_lengths(
    call: CudnnCall, batch: int, in_tokens: bool, on: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the lengths of queries and of keys; None if offsets give them."""
    graphs = call.is_cuda_graph_compatible
    q_lens = kv_lens = None
    if call.actual_seq_lens_q is not None or not in_tokens or call.batch_offsets_q is None:
        q_lens = _lengths("q", call.actual_seq_lens_q, batch, on, graphs)
    if call.actual_seq_lens_kv is not None or not in_tokens or call.batch_offsets_k is None:
        kv_lens = _lengths("kv", call.actual_seq_lens_kv, batch, on, graphs)
    else:  # the end of the last request is the start of a further one
        checks.cumulative("batch_offsets_k", call.batch_offsets_k, batch, on)
    return q_lens, kv_lens


def _starts(
    call: CudnnCall, batch: int, in_tokens: bool, v_dim: int, heads_first: bool
) -> dict[str, TokenOffsets | None]:
    """Return the starts of requests in each tensor."""
    tokens, heads, _ = call.q.shape
    out_elements = heads * v_dim if call.out is None else _token_elements(call.out)
    starts = {
        name: checks.offsets(name, given, batch, 1 if in_tokens else elements, size, call.q.device)
        for name, given, elements, size in (
            ("batch_offsets_q", call.batch_offsets_q, _token_elements(call.q), tokens),
            ("batch_offsets_o", call.batch_offsets_o, out_elements, tokens),
            ("batch_offsets_k", call.batch_offsets_k, _token_elements(call.k_cache), call.k_cache.shape[0]),
            ("batch_offsets_v", call.batch_offsets_v, _token_elements(call.v_cache), call.v_cache.shape[0]),
            ("batch_offsets_stats", call.batch_offsets_stats, 1 if heads_first else heads, tokens),
        )
    }
    _check_pairing(batch, call.block_tables is not None, starts)
    return starts


def _lse_dims(call: CudnnCall, batch: int, max_q_len: int, heads_first: bool) -> tuple[tuple[str, int], ...]:
    """Return the names and sizes of the dimensions of the log-sum-exp."""
    tokens, heads, _ = call.q.shape
    rows, head = ("max_token_per_sequence", max_q_len), ("num_heads", heads)
    is_packed = call.batch_offsets_stats is not None and (heads_first or _is_matrix(call.lse))
    if is_packed:
        rows = ("tokens", tokens)
    inner = (head, rows) if heads_first else (rows, head)
    return inner if is_packed else (("batch", batch), *inner)


def _is_matrix(lse: Any) -> bool:
    return isinstance(lse, torch.Tensor) and lse.ndim == 2


def _check_lse(call: CudnnCall, dims: tuple[tuple[str, int], ...], heads_first: bool) -> None:
    if heads_first and math.prod(size for _, size in dims) > checks.INT32_MAX:
        raise ValueError(f"lse_layout must be 'NH' for a log-sum-exp of 2^31 elements or more, got {dict(dims)}")
    if call.lse is not None:
        packed = "[num_heads, tokens]" if heads_first else "[tokens, num_heads]"
        hint = f"; batch_offsets_stats must be given with a packed lse {packed}" if _is_matrix(call.lse) else ""
        hint = hint if call.batch_offsets_stats is None else ""
        checks.log_sum_exp("lse", call.lse, call.q.device, *dims, hint=hint)


def cudnn_problem(call: CudnnCall) -> AttentionProblem:
    """Check every argument, refuse calls without a kernel, and return the problem. No device memory is read.

    With ``return_lse``, ``problem.lse.tensor`` is a view [batch, max_token_per_sequence, heads] of the log-sum-exp, or
    [*, heads] if ``batch_offsets_stats`` gives the rows.
    """
    q = call.q
    checks.main_tensor("q", q)
    checks.dtype("q", q, (*checks.SIXTEEN_BIT, checks.FP8))
    checks.shape("q", q, ("tokens", None), ("num_heads", None), ("head_dim", None))
    checks.tma_readable("q", q)
    on = q.device
    tokens, heads, _ = q.shape
    paged = call.block_tables is not None
    if paged:
        checks.tensor("block_tables", call.block_tables)
    key, value = _kv(q, call.k_cache, call.v_cache, paged)
    v_dim = value.shape[3]
    softmax_scale = caches.scale_of_heads("scale", call.scale, on, key.shape[1], minimum=0.0)
    checks.unread_tensor("workspace_buffer", call.workspace_buffer)

    max_q_len = checks.host_int("max_token_per_sequence", call.max_token_per_sequence)
    max_kv_len = checks.host_int("max_sequence_kv", call.max_sequence_kv)
    checks.flag("is_cuda_graph_compatible", call.is_cuda_graph_compatible)
    in_tokens = checks.choice("batch_offsets_units", call.batch_offsets_units, ("elements", "tokens")) == "tokens"
    batch = _batch(call.actual_seq_lens_q, call.batch_offsets_q, in_tokens)
    q_lens, kv_lens = _request_lengths(call, batch, in_tokens, on)
    source = "elements of actual_seq_lens_q"
    table = checks.page_table(call.block_tables, batch, on, batch_source=source) if paged else None
    causal = checks.flag("causal", call.causal)
    return_lse = checks.flag("return_lse", call.return_lse)
    checks.backend_name(call.backend)
    natural = checks.is_natural("lse_base", call.lse_base)
    heads_first = checks.choice("lse_layout", call.lse_layout, ("NH", "HN")) == "HN"
    types, name = f"q of {q.dtype}", "o_data_type"
    out_dtype = checks.output_dtype(call.o_data_type, call.out, q.dtype, checks.PREFILL_OUTPUTS, types, name)

    if call.out is not None:
        checks.output("out", call.out, (tokens, heads, v_dim), out_dtype, on)
    starts = _starts(call, batch, in_tokens, v_dim, heads_first)
    lse_dims = _lse_dims(call, batch, max_q_len, heads_first)
    _check_lse(call, lse_dims, heads_first)
    inputs = (
        ("q", q),
        ("k_cache", key),
        ("v_cache", value),
        ("block_tables", call.block_tables),
        ("actual_seq_lens_q", q_lens),
        ("actual_seq_lens_kv", kv_lens),
    )
    if call.out is not None:
        checks.disjoint("out", call.out, (*inputs, ("lse", call.lse)))
    if call.lse is not None:
        checks.disjoint("lse", call.lse, inputs)

    arch = support.arch_of(on)
    stats = None
    if return_lse:
        sizes = tuple(size for _, size in lse_dims)
        allocated = _allocated_lse(sizes, max_q_len, tokens, on) if call.lse is None else call.lse
        stats = _log_sum_exp(allocated, starts["batch_offsets_stats"], natural, heads_first)
    problem = AttentionProblem(
        query=q,
        key=key,
        value=value,
        out=checks.allocated(call.out, q, v_dim, out_dtype),
        batch=batch,
        max_q_len=min(max(max_q_len, 1), tokens),  # a wrong bound of 0 must not leave results unwritten
        max_kv_len=min(max_kv_len, key.shape[2] if table is None else checks.capacity(table, key.shape[2])),
        q_offsets=starts["batch_offsets_q"],
        q_lens=q_lens,
        kv_lens=kv_lens,
        mask=Mask(MaskKind.CAUSAL if causal else MaskKind.FULL),
        softmax_scale=softmax_scale,
        output_scale=call.output_scale,
        o_offsets=starts["batch_offsets_o"],
        k_offsets=starts["batch_offsets_k"],
        v_offsets=starts["batch_offsets_v"],
        page_table=table,
        lse=stats,
    )
    require_problem(support.CUDNN, problem, arch, {"fp8_scales": "scales given", "lse": "return_lse=True"})
    return problem


def scaled(q: Any, k_cache: Any, scale: Any, q_scale: Any, k_scale: Any, v_scale: Any) -> tuple[Any, Any]:
    """Return the factors on q k^T and on the output, with the scales of quantized inputs included.

    Scales are multiplied on the device, so that they may change under a CUDA graph.
    """
    if is_traced(q):
        return scale, 1.0  # the op does it
    given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    on = checks.main_tensor("q", q).device
    heads = _kv_heads(k_cache)
    for name, factor in given.items():
        if factor is None:
            continue
        checks.tensor(name, factor)
        if q.dtype != checks.FP8:
            raise ValueError(f"{name} must be None for q of {q.dtype}: it scales {checks.FP8} inputs")
        given[name] = caches.scale_of_heads(name, factor, on, heads)
    if device_data.is_enabled():  # the product would not show which factor is wrong
        tensors = ((name, factor) for name, factor in given.items() if isinstance(factor, torch.Tensor))
        device_data.check((scale_rule(name, factor) for name, factor in tensors), on)
    product = checks.host_float("scale", scale, minimum=0.0)
    for name in ("q_scale", "k_scale"):
        product = product if given[name] is None else given[name] * product
    if isinstance(product, torch.Tensor):
        product = product.flatten()  # scales of one element may have more dimensions than scales of KV heads
    return product, 1.0 if given["v_scale"] is None else given["v_scale"]


def _kv_heads(k_cache: Any) -> int:
    """Return the KV heads of K, paged or ragged, or 1 if it is not a valid tensor, which later checks refuse."""
    return k_cache.shape[1] if isinstance(k_cache, torch.Tensor) and k_cache.dim() in (3, 4) else 1


def _allocated_lse(sizes: tuple[int, ...], max_q_len: int, tokens: int, on: torch.device) -> torch.Tensor:
    """Allocate the log-sum-exp; the caller's bound sets its size."""
    try:
        return torch.empty(sizes, dtype=torch.float32, device=on)
    except RuntimeError as error:  # includes torch.OutOfMemoryError, re-raised unless the bound is to blame
        if max_q_len <= tokens:
            raise
        raise ValueError(
            f"max_token_per_sequence must be small enough for a log-sum-exp of {sizes} float32, {4 * math.prod(sizes)} "
            f"bytes, to be allocated, got {max_q_len} for {tokens} tokens of q"
        ) from error


def _log_sum_exp(lse: torch.Tensor, starts: TokenOffsets | None, natural: bool, heads_first: bool) -> LogSumExp:
    """Return the destination as [..., rows, heads]."""
    if heads_first:
        lse = lse.flatten().view(lse.shape).transpose(-2, -1)  # flatten sets the strides of dimensions of size 1
    if starts is None:
        return LogSumExp(lse, LseLayout.PADDED, natural=natural)
    rows = lse if lse.dim() == 2 else lse.view(-1, lse.shape[-1])
    return LogSumExp(rows, LseLayout.OFFSETS, natural=natural, offsets=starts)


def returned_lse(problem: AttentionProblem, call: CudnnCall) -> torch.Tensor | None:
    """Return the log-sum-exp in the form that the caller gets, or None if it is not requested."""
    if problem.lse is None or call.lse is not None:
        return None if problem.lse is None else call.lse
    rows = problem.lse.tensor
    if call.lse_layout == "HN":
        return rows.transpose(-2, -1)
    return rows.view(problem.batch, call.max_token_per_sequence, rows.shape[-1])


CUDNN_OPERANDS = OperandMap(
    tensors=(
        "q",
        "k_cache",
        "v_cache",
        "actual_seq_lens_q",
        "actual_seq_lens_kv",
        "block_tables",
        "batch_offsets_q",
        "batch_offsets_o",
        "batch_offsets_k",
        "batch_offsets_v",
        "batch_offsets_stats",
        SCALE_PRODUCT,
        "v_scale",
    ),
    operands={
        "query": "q",
        "key": "k_cache",
        "value": "v_cache",
        **{f"{of}_offsets": f"batch_offsets_{of}" for of in "qokv"},
        "q_lens": "actual_seq_lens_q",
        "kv_lens": "actual_seq_lens_kv",
        "key_table": "block_tables",
        "value_table": "block_tables",
        "softmax_scale": SCALE_PRODUCT,
        "output_scale": "v_scale",
        "lse_offsets": "batch_offsets_stats",
    },
)
