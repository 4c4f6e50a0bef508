"""What the entry points for decode have in common: rows request by request, and a workspace for partial results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hopwell import _checks as checks
from hopwell._launch import on_device
from hopwell._repeat import Arguments, Sources
from hopwell.kernels.plan import multiprocessors
from hopwell.kernels.splitting import scratch_bytes


def flat_tokens(value: Any) -> Any:
    """[batch, q_len, num_heads, head_dim] as [batch * q_len, num_heads, head_dim]; anything else as it is. It need not
    be checked."""
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
    """Size of a workspace for any batch on ``device``; None means the current CUDA device, or the CPU without one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sms = multiprocessors(torch.device(device))
    return scratch_bytes(max(rows, 1), kv_heads, columns, max_seq_len, sms, latent)


def workspace(
    value: Any, needed: int, size_function: str, out: torch.Tensor | None, inputs: Sequence[tuple[str, Any]]
) -> torch.Tensor:
    """``workspace_buffer`` of ``needed`` bytes or more, which ``size_function`` tells callers. No two of it, the output
    and the inputs share memory, but for the inputs, of which the first is the query."""
    checked = checks.tensor("workspace_buffer", value)
    checks.device("workspace_buffer", checked, inputs[0][1].device)
    if not checked.is_contiguous():
        raise ValueError(f"workspace_buffer must be contiguous, got strides {checked.stride()}")
    size = checked.numel() * checked.element_size()
    if size < needed:
        raise ValueError(
            f"workspace_buffer must have at least {needed} bytes for this call ({size_function}), got {size}"
        )
    checks.disjoint("workspace_buffer", checked, inputs)
    if out is not None:
        checks.disjoint("out", out, (*inputs, ("workspace_buffer", checked)))
    return checked


def decode_sources(arguments: Arguments) -> Sources:
    """The arguments that the kernel's operands lie in. Those of each entry for decode begin with the same eleven."""
    query, k, v, block_tables, seq_lens, bmm1_scale, bmm2_scale, sinks, o_scale, mask, workspace_buffer, *_ = arguments
    value = k if v is None else v
    starts = (None, None, None, None)
    scales = (on_device(bmm1_scale), on_device(bmm2_scale))
    nothing = (None, None, None, None)  # lse, its offsets, statistics, skipped tiles
    table = (block_tables, block_tables)
    rest = (on_device(o_scale), mask, workspace_buffer)
    return query, k, value, None, *starts, None, seq_lens, *table, *scales, sinks, *nothing, *rest
