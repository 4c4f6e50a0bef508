"""Rules of Hopper's and Blackwell's tensor memory accelerator (TMA) for tensors in global memory."""

from __future__ import annotations

import torch

TMA_ALIGNMENT = 16  # bytes, of the base address and of every stride except the last
TMA_STRIDE_LIMIT = 1 << 40  # bytes, exclusive


def tma_violation(view: torch.Tensor, name: str = "tensor") -> str | None:
    """Return the reason why TMA cannot address ``view``, or None if it can.

    The rules come from ``cuTensorMapEncodeTiled``. The base address is 16-byte aligned, the last stride is one element,
    and the other strides are multiples of 16 bytes below 2**40 bytes. The stride of a dimension of size 1 is never
    used, so every value is allowed there.

    Args:
        view: any tensor.
        name: name of ``view`` in the message.

    >>> print(tma_violation(torch.empty(4, 8, 16, 128, dtype=torch.bfloat16)))
    None
    >>> print(tma_violation(torch.empty(8, 16, 100, dtype=torch.bfloat16), "k_cache"))
    k_cache has stride 100 (200 bytes) in dimension 1; TMA needs multiples of 16 bytes below 2**40
    """
    if view.data_ptr() % TMA_ALIGNMENT:
        return f"{name} starts at address {view.data_ptr():#x}; TMA needs a multiple of {TMA_ALIGNMENT} bytes"
    if view.dim() == 0:
        return None
    *outer, last = zip(view.shape, view.stride(), strict=True)
    if last[0] != 1 and last[1] != 1:
        return f"{name} has stride {last[1]} in its last dimension; TMA needs 1"
    for dim, (size, stride) in enumerate(outer):
        length = stride * view.element_size()
        if size != 1 and (length % TMA_ALIGNMENT or length >= TMA_STRIDE_LIMIT):
            return (
                f"{name} has stride {stride} ({length} bytes) in dimension {dim}; "
                f"TMA needs multiples of {TMA_ALIGNMENT} bytes below 2**40"
            )
    return None
