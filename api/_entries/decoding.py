"""Shared parts of the decode entries: rows request by request, and a workspace for partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hopwell._calls.repeat import OperandMap
from hopwell._checks import arguments as checks
from hopwell.kernels import registry, support
from hopwell.kernels.config.splitting import LaunchSizes
from hopwell.kernels.launch.geometry import multiprocessors
from hopwell.kernels.launch.scratch import own_scratch
from hopwell.kernels.problem import DcpRank, Family, LogSumExp, LseLayout, TokenOffsets

NATURAL_BASE = "basee"
LSE_BASES = (NATURAL_BASE, "base2")
# Most calls leave these defaults of arguments as they are, which shows by these very objects.
AUTO = "auto"
ONE_RANK, FIRST_RANK = 1, 0


def flat_tokens(value: Any) -> Any:
    """Return [batch, q_len, num_heads, head_dim] as [batch * q_len, num_heads, head_dim]; anything else as it is. It
    need not be checked."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.dim() != 4:
        return value
    return value[:, 0] if value.shape[1] == 1 else value.flatten(0, 1)


def dense_tokens(name: str, value: torch.Tensor) -> None:
    """:func:`flat_tokens` of a 4-D tensor is a view of it."""
    batch, q_len = value.shape[:2]
    if batch > 1 and q_len > 1 and value.stride(0) != q_len * value.stride(1):
        raise ValueError(f"{name} must be dense in its first two dimensions, got strides {value.stride()}")


def workspace_bytes(
    rows: int, kv_heads: int, columns: int, max_seq_len: int, device: Any, *, latent: bool = False
) -> int:
    """Return the size of a workspace for any batch on ``device``; None means the current CUDA device, or the CPU
    without one."""
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = LaunchSizes(max(rows, 1), kv_heads, columns, max_seq_len, multiprocessors(on))
    return registry.scratch_bytes(Family.MLA if latent else Family.DECODE, support.arch_of(on), sizes)


def workspace(
    value: Any,
    needed: int,
    sized_by: str,
    results: Sequence[tuple[str, torch.Tensor | None]],
    inputs: Sequence[tuple[str, Any]],
) -> torch.Tensor:
    """Return ``needed`` bytes of scratch.

    They are the last bytes of ``workspace_buffer``: FlashInfer, which may share the buffer, keeps statistics in the
    first ones. A buffer without room is replaced by memory of hopwell's own. ``sized_by`` is the function that tells
    callers the size. The scratch, the results and the inputs must not overlap, except that inputs may overlap each
    other. The query is the first input.
    """
    checked = checks.tensor("workspace_buffer", value)
    checks.device("workspace_buffer", checked, inputs[0][1].device)
    if not checked.is_contiguous():
        raise ValueError(f"workspace_buffer must be contiguous, got strides {checked.stride()}")
    checks.disjoint("workspace_buffer", checked, inputs)
    others = [*inputs, ("workspace_buffer", checked)]
    for name, result in results:
        if result is not None:
            checks.disjoint(name, result, others)
            others.append((name, result))
    if checked.nbytes < needed:
        return own_scratch(checked.device).tensor(needed, sized_by)[:needed]
    return checked.view(-1).view(torch.uint8)[checked.nbytes - needed :]


def log_sum_exp(lse: Any, return_lse: Any, base: Any, query: torch.Tensor, sizes: tuple[int, ...]) -> LogSumExp | None:
    """Return where the log-sum-exp of ``query`` [tokens, heads, head_dim] goes, if it is asked for: into ``lse`` of
    shape [tokens, heads] or ``sizes``."""
    checks.flag("return_lse", return_lse)
    if base is not None:
        checks.choice("return_lse_base", base, LSE_BASES)
    if lse is None and not return_lse:
        return None
    tokens, heads, _ = query.shape
    if lse is None:
        rows = torch.empty(tokens, heads, dtype=torch.float32, device=query.device)
    else:
        checks.tensor("lse", lse, "a torch.Tensor or None")
        checks.dtype("lse", lse, (torch.float32,))
        checks.device("lse", lse, query.device)
        if tuple(lse.shape) not in ((tokens, heads), sizes):
            raise ValueError(f"lse must have shape {(tokens, heads)} or {sizes}, got {tuple(lse.shape)}")
        if not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous, got strides {lse.stride()}")
        rows = lse.view(tokens, heads)
    return LogSumExp(rows, LseLayout.RAGGED, natural=base == NATURAL_BASE)


def ragged_starts(
    name: str, cumulative: Any, max_name: str, max_q_len: Any, query: torch.Tensor
) -> tuple[int, int, TokenOffsets]:
    """Return (requests, most new tokens of one, where each starts) of cumulative lengths in tokens, which stay on the
    device. ``max_q_len`` is the caller's bound of them, called ``max_name``."""
    starts = checks.index_tensor(name, cumulative, query.device)
    if max_q_len is None:
        raise ValueError(f"{max_name} must be given with {name}, whose values are not read on the host, got None")
    most = checks.host_int(max_name, max_q_len, minimum=1)
    if starts.numel() < 1:
        raise ValueError(f"{name} must have batch_size + 1 elements, got shape {tuple(starts.shape)}")
    batch = starts.numel() - 1
    return batch, most, checks.cumulative(name, starts, batch, query.device)


def dcp_rank(kv_global: Any, world: Any, rank: Any, batch: int, on: torch.device) -> DcpRank | None:
    """Return the keys that this rank has, if ``causal_seqlens_kv_global`` is given."""
    count = checks.host_int("cp_world", world, minimum=1)
    index = checks.host_int("cp_rank", rank, maximum=count - 1)
    if kv_global is None:
        return None
    return DcpRank(checks.lengths("causal_seqlens_kv_global", kv_global, batch, on), count, index)


def refused(entry: str, what: str, on: torch.device) -> NotImplementedError:
    """Return the error for an argument that no architecture's kernels serve."""
    return NotImplementedError(f"{entry} does not support {what}, neither on {support.arch_of(on)} nor elsewhere")


def refuse_skip_softmax(entry: str, value: Any, on: torch.device) -> None:
    """No decode kernel leaves keys out."""
    factor = checks.optional_float("skip_softmax_threshold_scale_factor", value)
    if factor:
        raise refused(entry, f"skip_softmax_threshold_scale_factor={factor} (allowed: None or 0)", on)


def check_counter_buffer(value: Any) -> None:
    """FlashInfer's kernels count in it, ours have counters of their own."""
    if value is not None:
        checks.unread_tensor("multi_ctas_kv_counter_buffer", value, "a torch.Tensor or None")


def decode_operands(q_offsets: str, *, latent: bool = False) -> OperandMap:
    """Return where the operands of a decode entry lie whose cumulative lengths are called ``q_offsets``.

    ``latent``: one tensor has keys and values. The log-sum-exp is a result and lies in no argument.
    """
    pair = ("kv_cache", "kv_cache[1]"), ("o_scale", "mask", "kv_cache_sf", "kv_cache_sf[1]")
    cache, own = (("kv_cache",), ()) if latent else pair
    shared = ("block_tables", "seq_lens", "bmm1_scale", "bmm2_scale", "sinks")
    of_pairs: dict[str, str | tuple[str, ...]] = {
        "output_factor": "o_scale",
        "draft_mask": "mask",
        "key_scales": "kv_cache_sf",
        "value_scales": ("kv_cache_sf[1]", "kv_cache_sf"),
    }
    return OperandMap(
        tensors=("query", *cache, *shared, "workspace_buffer", q_offsets, "causal_seqlens_kv_global", *own),
        operands={
            "query": "query",
            "key": cache[0],
            "value": cache[::-1],
            "q_offsets": q_offsets,
            "dcp_kv_lens": "causal_seqlens_kv_global",
            "kv_lens": "seq_lens",
            "key_table": "block_tables",
            "value_table": "block_tables",
            "softmax_scale": "bmm1_scale",
            "output_scale": "bmm2_scale",
            "sinks": "sinks",
            "scratch": "workspace_buffer",
            **({} if latent else of_pairs),
        },
    )
