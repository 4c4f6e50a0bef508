"""Results of ops: their shapes and dtypes, the workspace of a call, and the op that writes given results.

Tensors may be symbolic, and Dynamo traces these functions. No function reads data.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hopwell._checks.arguments import FP8
from hopwell._entries.decoding import workspace_bytes
from hopwell.layouts import NVFP4_BLOCK, swizzled_128x4_shape
from hopwell.utils import FP4Tensor

Pair = tuple[torch.Tensor, torch.Tensor]


def context_results(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor | None, out_dtype: torch.dtype | None
) -> Pair:
    """Return a new output and a new log-sum-exp of the context entry, as the functions below do of other entries."""
    out = query.new_empty((*query.shape[:-1], _v_dim(k_cache, v_cache)), dtype=out_dtype or query.dtype)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


def _v_dim(k_cache: torch.Tensor, v_cache: torch.Tensor | None) -> int:
    """Return the head dim of V in elements."""
    value = k_cache if v_cache is None else v_cache
    return value.shape[-1] * (2 if value.dtype is torch.uint8 else 1)


def nvfp4_like(out: torch.Tensor) -> FP4Tensor:
    """Return a new NVFP4 output of the shape of ``out``."""
    tokens, heads, v_dim = out.shape
    data = out.new_empty((tokens, heads, v_dim // 2), dtype=torch.uint8)
    scale = out.new_empty(swizzled_128x4_shape(tokens, heads * v_dim // NVFP4_BLOCK), dtype=FP8)
    return FP4Tensor(data, scale, original_shape=(tokens, heads, v_dim))


def fmha_v2_results(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    input_layout: str,
    out_dtype: torch.dtype | None,
) -> Pair:
    value = next(part for part in (v, k, q) if part is not None)
    rows = (q.shape[0], q.shape[2]) if input_layout == "PACKED_QKV" else q.shape[:-1]
    out = q.new_empty((*rows, value.shape[-1]), dtype=out_dtype or q.dtype)
    return out, q.new_empty((*rows, 2), dtype=torch.float32)


def cudnn_results(
    q: torch.Tensor,
    v_cache: torch.Tensor,
    max_token_per_sequence: int,
    actual_seq_lens_q: torch.Tensor | None,
    batch_offsets_q: torch.Tensor | None,
    batch_offsets_stats: torch.Tensor | None,
    o_data_type: torch.dtype | None,
    lse_layout: str,
) -> Pair:
    batch = 0
    if actual_seq_lens_q is not None:
        batch = actual_seq_lens_q.numel()
    elif batch_offsets_q is not None:
        batch = batch_offsets_q.numel() - 1
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=o_data_type or q.dtype)
    tokens, heads, _ = q.shape
    rows: tuple[Any, ...] = (batch, max_token_per_sequence, heads)
    if lse_layout == "HN":
        rows = (batch, heads, max_token_per_sequence) if batch_offsets_stats is None else (heads, tokens)
    return out, q.new_empty(rows, dtype=torch.float32)


def xqa_results(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    q_len_per_req: int | None,
    q_cu_seq_lens: torch.Tensor | None,
) -> Pair:
    out, lse = context_results(query, k_cache, v_cache, None)
    if q_cu_seq_lens is None and q_len_per_req is not None and q_len_per_req > 1:
        out = query.new_empty((query.shape[0] // q_len_per_req, q_len_per_req, *out.shape[1:]))
    return out, lse


def mla_results(query: torch.Tensor, kv_lora_rank: int) -> Pair:
    dtype = torch.bfloat16 if query.dtype is FP8 else query.dtype
    out = query.new_empty((*query.shape[:-1], kv_lora_rank), dtype=dtype)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32).flatten(0, -2)


def batch_indices_positions(append_indptr: torch.Tensor, nnz: int) -> Pair:
    batch_indices = append_indptr.new_empty(nnz, dtype=torch.int32)
    return batch_indices, torch.empty_like(batch_indices)


def seq_lens(kv_last_page_len: torch.Tensor) -> torch.Tensor:
    return kv_last_page_len.new_empty(kv_last_page_len.shape, dtype=torch.int32)


def no_workspace(query: torch.Tensor) -> torch.Tensor:
    """Return the workspace of an entry that does not use it."""
    return _empty(query.device)


def q_workspace(q: torch.Tensor) -> torch.Tensor:
    return _empty(q.device)


def xqa_workspace(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    kv_layout: str,
    q_len_per_req: int | None,
) -> torch.Tensor:
    """Return a workspace for one call, a temporary: a CUDA graph keeps it in its own memory."""
    with contextlib.suppress(IndexError, ValueError, ZeroDivisionError):  # the entry refuses malformed arguments
        page_size, kv_heads = k_cache.shape[-3:-1] if kv_layout == "NHD" else k_cache.shape[-3:-1][::-1]
        rows = query.shape[1] // kv_heads * (q_len_per_req or 1)
        keys = page_size * block_tables.shape[-1]
        return _temporary(query.device, rows, kv_heads, _v_dim(k_cache, v_cache), keys, False)
    return _empty(query.device)


def trtllm_decode_workspace(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    kv_layout: str,
    q_len_per_req: int | None,
    max_q_len: int | None,
) -> torch.Tensor:
    q_len = q_len_per_req if max_q_len is None else max_q_len
    return xqa_workspace(query, k_cache, v_cache, block_tables, kv_layout, q_len)


def mla_workspace(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lora_rank: int,
    sparse_mla_top_k: int,
    max_q_len: int | None,
) -> torch.Tensor:
    with contextlib.suppress(IndexError, ValueError):
        keys = sparse_mla_top_k or kv_cache.shape[-2] * block_tables.shape[-1]
        rows = query.shape[-2] * (query.shape[1] if max_q_len is None else max_q_len)
        return _temporary(query.device, rows, 1, kv_lora_rank, keys, True)
    return _empty(query.device)


def _temporary(device: torch.device, *sizes: Any) -> torch.Tensor:
    return torch.empty(_bytes(device, *sizes), dtype=torch.uint8, device=device)


@functools.lru_cache(maxsize=4096)
def _bytes(device: torch.device, rows: int, kv_heads: int, columns: int, keys: int, latent: bool) -> int:
    return workspace_bytes(rows, kv_heads, columns, keys, device, latent=latent)


@functools.cache
def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device)


def _no_op(*_: Any, **__: Any) -> Any:
    raise AssertionError("the entry does not have this op")


class Ops(NamedTuple):
    """The ops of an entry, one for each set of results. An entry of one op has only the first."""

    out: Callable[..., Any]
    both: Callable[..., Pair] = _no_op  # the output and the log-sum-exp or the statistics
    into: Callable[..., None] = _no_op  # writes results that are given
    into_other: Callable[..., Any] = _no_op  # writes an NVFP4 output, or an output beside new statistics


def call(ops: Ops, inputs: Sequence[Any], new: Callable[[], Pair], out: Any, lse: Any, return_lse: bool) -> Any:
    """Call the op for the results that a call of an entry gives and asks for.

    An op does not return an argument, so a missing result is allocated here if the other one is given.
    """
    if out is None and lse is None:
        return ops.both(*inputs) if return_lse else ops.out(*inputs)
    if out is None or (return_lse and lse is None):
        new_out, new_lse = new()
        out = new_out if out is None else out
        lse = new_lse if lse is None and return_lse else lse
    with no_gradients():
        ops.into(*inputs, out=out, lse=lse)
    return (out, lse) if return_lse else out


def call_context(
    ops: Ops,
    inputs: Sequence[Any],
    new: Callable[[], Pair],
    out: Any,
    lse: Any,
    return_lse: bool,
    nvfp4: bool,
) -> Any:
    """Call an op of the context entry, which writes a given log-sum-exp only if it is to be returned."""
    lse = lse if return_lse else None
    if not nvfp4:
        return call(ops, inputs, new, out, lse, return_lse)
    new_out, new_lse = new()
    out = nvfp4_like(new_out) if out is None else out
    lse = new_lse if lse is None and return_lse else lse
    written = dict(out=out.data, out_scale=out.scale, scale_start_index=out.scale_start_index)
    with no_gradients():
        ops.into_other(*inputs, **written, lse=lse)
    return (out, lse) if return_lse else out


def call_cudnn(ops: Ops, inputs: Sequence[Any], new: Callable[[], Pair], out: Any, lse: Any, return_lse: bool) -> Any:
    """Call an op of the cuDNN entry, which always returns a pair."""
    results = call(ops, inputs, new, out, lse if return_lse else None, return_lse)
    return results if return_lse else (results, None)


def call_fmha_v2(ops: Ops, inputs: Sequence[Any], out: Any, save_softmax_stats: bool) -> Any:
    """Call an op of the FMHAv2 entry, which always allocates the statistics."""
    if out is None:
        return ops.both(*inputs) if save_softmax_stats else ops.out(*inputs)
    with no_gradients():
        if save_softmax_stats:
            return out, ops.into_other(*inputs, out=out)
        ops.into(*inputs, out=out)
    return out


def call_in_place(ops: Ops, inputs: Sequence[Any]) -> None:
    with no_gradients():
        ops.out(*inputs)


def is_nvfp4(out: Any, out_dtype: Any) -> bool:
    """Return whether the arguments of the context entry ask for an NVFP4 output."""
    return isinstance(out, FP4Tensor) or (isinstance(out_dtype, str) and out_dtype == "nvfp4")


def no_gradients() -> Any:
    """Return a context for ops that write: they refuse inputs that require gradients."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()
