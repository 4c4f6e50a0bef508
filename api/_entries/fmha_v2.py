"""Check the arguments of ``trtllm_fmha_v2_prefill`` and convert them to an AttentionProblem."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import has_no_data
from hopwell._calls.launch import halves
from hopwell._calls.repeat import OperandMap
from hopwell._checks import arguments as checks
from hopwell._checks import windows
from hopwell._checks.features import named, require_problem
from hopwell.kernels import support
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind, Score
from hopwell.layouts import FmhaV2Inputs, FmhaV2Layout, fmha_v2_inputs

INPUT_LAYOUTS = tuple(layout.value for layout in FmhaV2Layout)
MASK_MODES = ("causal", "sliding_window", "chunked", "padding")
POSITION_ENCODINGS = ("none", "alibi")


def _tensors(name: str, value: Any, depth: int = 2) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in ``qkv``, each with its name in messages. The layout's check handles everything else."""
    if isinstance(value, torch.Tensor):
        return [(name, checks.tensor(name, value))]
    if depth == 0 or not isinstance(value, (tuple, list)):
        return []
    return [found for i, part in enumerate(value) for found in _tensors(f"{name}[{i}]", part, depth - 1)]


def _other_layout(input_layout: str) -> str:
    """Return the argument that selects the other page layout, for messages; empty without pages."""
    kv_layout = FmhaV2Layout(input_layout).kv_layout
    return "" if kv_layout is None else f"input_layout='Q_PAGED_KV_{kv_layout.other.value}'"


def _inputs(qkv: Any, input_layout: Any, batch: int, block_tables: Any) -> FmhaV2Inputs:
    if block_tables is not None:
        checks.dtype("block_tables", checks.tensor("block_tables", block_tables), checks.INTEGERS)
    parts = _tensors("qkv", qkv)
    for place, (name, part) in enumerate(parts):
        first_name, first = parts[0]
        if place == 0:
            checks.main_tensor(name, part)
            checks.dtype(name, part, (*checks.SIXTEEN_BIT, checks.FP8))
        elif part.dtype != first.dtype:
            raise ValueError(f"{name} must have the dtype of {first_name}, {first.dtype}, got {part.dtype}")
        checks.device(name, part, first.device)
    checks.choice("input_layout", input_layout, INPUT_LAYOUTS)
    inputs = fmha_v2_inputs(qkv, input_layout, batch, block_tables)
    for name, part in parts:
        checks.tma_readable(name, part)
    if block_tables is not None:
        checks.device("block_tables", block_tables, inputs.query.device)
        checks.page_size("qkv[1]", inputs.key.shape[2])
    checks.grouped_heads(inputs.query.shape[1], inputs.key, "qkv", _other_layout(input_layout))
    if inputs.query.shape[2] < 1 or inputs.value.shape[3] < 1:
        raise ValueError(f"qkv must have a head_dim of at least 1, got {inputs.query.shape[2]}")
    return inputs


def _mask(mask_mode: Any, window_left: Any, chunked_attention_size: Any, window_right: Any, tokens: int) -> Mask:
    """Return the mask. All modes take a window, all except "padding" a chunk, and "padding" alone a right bound."""
    mode = checks.choice("mask_mode", mask_mode.lower() if isinstance(mask_mode, str) else mask_mode, MASK_MODES)
    window = checks.host_int("window_left", window_left, minimum=-1)
    chunk = checks.host_int("chunked_attention_size", chunked_attention_size)
    if chunk:
        checks.power_of_two("chunked_attention_size", chunk)
    if window >= 0 and chunk:
        raise ValueError(f"window_left and chunked_attention_size must not both be set, got {window} and {chunk}")
    if mode == "padding":
        if chunk:
            raise ValueError(f"chunked_attention_size must be 0 for mask_mode 'padding', got {chunk}")
        return windows.full_or_window(window, window_right, tokens)
    windows.right_of_causal(window_right, f"for mask_mode {mode!r}")
    if window >= 0:
        return Mask(MaskKind.SLIDING_WINDOW, window)
    return Mask(MaskKind.CHUNKED, chunk=chunk) if chunk else Mask(MaskKind.CAUSAL)


def _out_dtype(out_dtype: Any, out: Any, query: torch.Tensor) -> torch.dtype:
    if isinstance(out_dtype, str):
        named = vars(torch).get(out_dtype)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"out_dtype must be a torch.dtype or the name of one, got {checks.describe(out_dtype)}")
        out_dtype = named
    inputs = f"qkv of {query.dtype}"
    return checks.output_dtype(out_dtype, out, query.dtype, checks.PREFILL_OUTPUTS, inputs, names="the name of one")


def _has_alibi(pos_encoding_mode: Any) -> bool:
    if pos_encoding_mode is None:
        return False
    mode = pos_encoding_mode.lower() if isinstance(pos_encoding_mode, str) else pos_encoding_mode
    return checks.choice("pos_encoding_mode", mode, POSITION_ENCODINGS) == "alibi"


class FmhaV2Call(NamedTuple):
    """The arguments of a call."""

    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    input_layout: str
    workspace_buffer: torch.Tensor
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: float
    bmm2_scale: float
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    block_tables: torch.Tensor | None
    out: torch.Tensor | None
    out_dtype: str | torch.dtype | None
    sinks: torch.Tensor | list[torch.Tensor] | None
    pos_encoding_mode: str | None
    logits_soft_cap_scale: float | None
    mask_mode: str
    window_left: int
    chunked_attention_size: int
    save_softmax_stats: bool
    skip_softmax_threshold_scale_factor: float
    window_right: int


def fmha_v2_problem(call: FmhaV2Call) -> AttentionProblem:
    """Check every argument, refuse calls without a kernel, and return the problem. No device memory is read."""
    batch = checks.host_int("batch_size", call.batch_size)
    inputs = _inputs(call.qkv, call.input_layout, batch, call.block_tables)
    query, key, value, table = inputs.query, inputs.key, inputs.value, inputs.page_table
    on = query.device
    tokens, heads, qk_dim = query.shape
    v_dim = value.shape[3]
    checks.unread_tensor("workspace_buffer", call.workspace_buffer)

    checks.lengths("seq_lens", call.seq_lens, batch, on)
    q_offsets = checks.cumulative("cum_seq_lens_q", call.cum_seq_lens_q, batch, on)
    kv_offsets = checks.cumulative("cum_seq_lens_kv", call.cum_seq_lens_kv, batch, on)
    max_q_len = checks.host_int("max_q_len", call.max_q_len)
    max_kv_len = checks.host_int("max_kv_len", call.max_kv_len)

    softmax_scale = checks.host_float("bmm1_scale", call.bmm1_scale, minimum=0.0) or 1 / math.sqrt(qk_dim)
    output_scale = checks.host_float("bmm2_scale", call.bmm2_scale)
    sink_logits = checks.sinks(call.sinks, heads, on)
    mask = _mask(call.mask_mode, call.window_left, call.chunked_attention_size, call.window_right, tokens)
    alibi = _has_alibi(call.pos_encoding_mode)
    soft_cap = checks.optional_float("logits_soft_cap_scale", call.logits_soft_cap_scale)
    skip_softmax = checks.optional_float(
        "skip_softmax_threshold_scale_factor", call.skip_softmax_threshold_scale_factor
    )
    stats = checks.flag("save_softmax_stats", call.save_softmax_stats)
    dtype = _out_dtype(call.out_dtype, call.out, query)
    if call.out is not None:
        checks.output("out", call.out, (tokens, heads, v_dim), dtype, on)
        indices = (("cum_seq_lens_q", call.cum_seq_lens_q), ("cum_seq_lens_kv", call.cum_seq_lens_kv))
        given = (
            ("qkv", query),
            ("qkv", key),
            ("qkv", value),
            ("block_tables", call.block_tables),
            ("sinks", sink_logits),
        )
        checks.disjoint("out", call.out, (*given, *indices))

    arch = support.arch_of(on)
    capacity = key.shape[2] if table is None else checks.capacity(table, key.shape[2])
    problem = AttentionProblem(
        query=query,
        key=key,
        value=value,
        out=checks.allocated(call.out, query, v_dim, dtype),
        batch=batch,
        max_q_len=min(max(max_q_len, 1), tokens),  # a wrong bound of 0 must not leave results unwritten
        max_kv_len=min(max_kv_len, capacity),
        q_offsets=q_offsets,
        kv_lens=None,
        mask=mask,
        score=Score.capped(soft_cap, has_slopes=alibi),
        statistics=torch.empty((tokens, heads, 2), dtype=torch.float32, device=on) if stats else None,
        skip_softmax=skip_softmax,
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        # With pages the offsets only give the lengths of requests, not their starts.
        k_offsets=kv_offsets,
        v_offsets=kv_offsets if table is None else None,
        page_table=table,
        sinks=sink_logits,
    )
    asked = named(
        call,
        chunked="chunked_attention_size",
        window="window_left",
        local_window="window_right",
        alibi="pos_encoding_mode",
        soft_cap="logits_soft_cap_scale",
        alibi_soft_cap="logits_soft_cap_scale",
        softmax_stats="save_softmax_stats",
        skip_softmax="skip_softmax_threshold_scale_factor",
    )
    require_problem(support.FMHA_V2, problem, arch, asked)
    return problem


def leaves(qkv: Any) -> tuple[Any, Any, Any, int | None]:
    """Return the tensors of Q, K and V, None for a tensor inside another one, and the distance of a (K, V) pool.

    The distance is the bytes from K to V: page ids of both count from K, so it is part of the layout. Malformed
    arguments stay whole.
    """
    if isinstance(qkv, (tuple, list)):
        if len(qkv) == 3 and qkv[1] is not None and qkv[2] is not None:
            return *qkv, None
        if len(qkv) == 2 and qkv[1] is not None:
            query, cache = qkv
            if type(cache) is torch.Tensor:
                return query, cache, None, None
            k, v = halves(cache)
            return query, k, v, _distance(k, v)
    return qkv, None, None, None


def _distance(k: Any, v: Any) -> int | None:
    """Return the bytes from K to V; None if they are not tensors or have no memory."""
    if not (isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return None
    if type(k) is not torch.Tensor and has_no_data(k):
        return None
    try:
        return v.data_ptr() - k.data_ptr()
    except RuntimeError:
        return None


FMHA_V2_OPERANDS = OperandMap(
    # The fourth argument is not a tensor but the distance of V from K in a pool.
    tensors=("qkv", "qkv[1]", "qkv[2]", "pool", "cum_seq_lens_q", "cum_seq_lens_kv", "block_tables", "sinks"),
    operands={
        "query": "qkv",
        "key": ("qkv[1]", "qkv"),
        "value": ("qkv[2]", "qkv[1]", "qkv"),
        "q_offsets": "cum_seq_lens_q",
        "k_offsets": "cum_seq_lens_kv",
        "v_offsets": "cum_seq_lens_kv",
        "key_table": "block_tables",
        "value_table": "block_tables",
        "sinks": "sinks",
    },
)
