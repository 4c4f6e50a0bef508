"""Tensor wrappers that the entry points share."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

__all__ = ["FP4Tensor"]


class FP4Tensor:
    """NVFP4 tensor: packed e2m1 values with one e4m3 scale for 16 values.

    torch has no 4-bit float, so the two parts travel together. Attributes and rules equal
    ``flashinfer.utils.FP4Tensor``'s.

    Args:
        data: uint8 [rows, ..., ceil(n / 2)], two values a byte, the even-indexed value in the low nibble.
        scale: float8_e4m3fn, rows in the 128x4 swizzled order that block-scaled matrix multiplications read; the number
            of rows is a multiple of 128.
        scale_start_index: row of ``scale`` that belongs to row 0 of ``data``. Several tensors can share one ``scale``.
        original_shape: shape before packing, with n instead of ceil(n / 2) as the last size.

    Attributes:
        dtype: always the string ``"nvfp4"``.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: a dtype, a shape or the start index breaks the rules above.
    """

    def __init__(
        self,
        data: torch.Tensor,
        scale: torch.Tensor,
        scale_start_index: int = 0,
        original_shape: Sequence[int] | None = None,
    ) -> None:
        for name, part, dtype in (("data", data, torch.uint8), ("scale", scale, torch.float8_e4m3fn)):
            if not isinstance(part, torch.Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(part).__name__}")
            if part.dtype != dtype:
                raise ValueError(f"{name} must be {dtype}, got {part.dtype}")
            if part.dim() == 0:
                raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
        if isinstance(scale_start_index, (bool, torch.Tensor)):
            raise TypeError(f"scale_start_index must be an int, got {type(scale_start_index).__name__}")
        try:
            start = operator.index(scale_start_index)
        except TypeError:
            raise TypeError(f"scale_start_index must be an int, got {type(scale_start_index).__name__}") from None

        rows = scale.shape[0]
        if rows % 128 != 0:
            raise ValueError(f"scale must have a multiple of 128 rows, got scale.shape={tuple(scale.shape)}")
        if not 0 <= start < rows:
            raise ValueError(f"scale_start_index must be in [0, {rows}), the rows of scale, got {start}")
        if start + data.shape[0] > rows:
            raise ValueError(
                f"scale_start_index + data.shape[0] must not exceed the {rows} rows of scale, "
                f"got {start} + {data.shape[0]}"
            )
        if original_shape is not None:
            original_shape = _shape_before_packing(data, original_shape)

        self.data = data
        self.scale = scale
        self.scale_start_index = start
        self.original_shape = original_shape
        self.dtype = "nvfp4"

    def __repr__(self) -> str:
        return (
            f"FP4Tensor(data={tuple(self.data.shape)}, scale={tuple(self.scale.shape)}, "
            f"scale_start_index={self.scale_start_index}, original_shape={self.original_shape})"
        )


def _shape_before_packing(data: torch.Tensor, original_shape: Sequence[int]) -> tuple[int, ...]:
    try:
        original = tuple(operator.index(size) for size in original_shape)
    except TypeError:
        raise TypeError(f"original_shape must be a sequence of ints, got {original_shape!r}") from None
    packed = (*original[:-1], (original[-1] + 1) // 2) if original else ()
    if packed != tuple(data.shape):
        raise ValueError(
            f"original_shape must pack to data.shape={tuple(data.shape)} when its last size is halved (rounded up), "
            f"got {original}"
        )
    return original
