"""Argument checks shared by this package: each names the argument, the given value and the allowed values.

Wrong Python types and dtypes raise TypeError, everything else ValueError. No check reads a tensor's elements.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

INDEX_TYPES = (torch.int32, torch.uint32, torch.int64)
SCALE_TYPES = (torch.float8_e4m3fn, torch.uint8)  # uint8 holds the bits of e4m3
FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # source and target types of quantization

_E = TypeVar("_E", bound=enum.Enum)


def require_tensor(value: Any, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_rank(tensor: Any, rank: int, name: str, shape: str) -> None:
    """Check that ``tensor`` is a tensor of ``rank`` dimensions; ``shape`` describes them in the message."""
    require_tensor(tensor, name)
    if tensor.dim() != rank:
        raise ValueError(f"{name} must be {rank}-D {shape}, got shape {tuple(tensor.shape)}")


def require_dtype(tensor: torch.Tensor, dtypes: Sequence[torch.dtype], name: str) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(str(d) for d in dtypes)}, got {tensor.dtype}")


def require_unit_last_stride(tensor: torch.Tensor, name: str) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {tensor.stride()}")


def require_multiple(value: int, divisor: int, name: str) -> None:
    if value % divisor:
        raise ValueError(f"{name} must be a multiple of {divisor}, got {value}")


def require_same(first: Any, second: Any, what: str, names: tuple[str, str]) -> None:
    """Check one property (``what``) of two arguments. A dtype mismatch is a TypeError, like every wrong dtype."""
    if first != second:
        error = TypeError if isinstance(first, torch.dtype) else ValueError
        raise error(f"{names[0]} and {names[1]} must have the same {what}, got {first} and {second}")


def require_pair(value: Any, name: str) -> tuple[Any, Any]:
    """Unpack a tuple or list of two, such as (key, value)."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a torch.Tensor or a tuple of two, got {type(value).__name__}")
    if len(value) != 2:
        raise ValueError(f"{name} must have 2 elements (key, value), got {len(value)}")
    return value[0], value[1]


def require_member(kind: type[_E], value: Any, name: str) -> _E:
    """Convert a string (exact spelling) or a member to a member of the enum ``kind``."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str or {kind.__name__}, got {type(value).__name__}")
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}") from None


def require_scale(scale: Any, name: str) -> None:
    """Check a float or one-element float32 tensor. A tensor's value is not read: that would wait for the device."""
    if isinstance(scale, torch.Tensor):
        require_dtype(scale, (torch.float32,), name)
        if scale.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {tuple(scale.shape)}")
    elif isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{name} must be a float or a one-element float32 tensor, got {type(scale).__name__}")
    elif not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name} must be positive and finite, got {scale}")
