"""float8_e4m3fn caches: one scale per tensor, x = data * scale."""

from __future__ import annotations

import math

import torch

from hopwell.layouts._checks import FLOAT_TYPES, require_dtype, require_scale, require_tensor

E4M3_MAX = 448.0


def fp8_scale(x: torch.Tensor) -> torch.Tensor:
    """Compute the scale that maps the largest magnitude in ``x`` to 448, e4m3's largest number.

    Args:
        x: float32, bfloat16 or float16, any shape.

    Returns:
        0-d float32 on ``x``'s device, max|x| / 448, or 1 if that is 0.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.

    >>> fp8_scale(torch.tensor([1.0, -896.0]))
    tensor(2.)
    """
    return scale_to_range(x, E4M3_MAX)


def quantize_fp8(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Quantize to float8_e4m3fn: x / scale, computed in float32, rounded to nearest even and clamped at +-448.

    The caller multiplies the scale into the attention call: K's into ``bmm1_scale``, V's into ``bmm2_scale``.

    Args:
        x: float32, bfloat16 or float16, any shape. NaN stays NaN.
        scale: positive float or one-element float32 tensor (whose value is not checked).

    Returns:
        float8_e4m3fn of the same shape.

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: ``scale`` is not positive and finite, or has several elements.

    >>> quantize_fp8(torch.tensor([3.0, -1000.0]), 2.0).float()
    tensor([   1.5000, -448.0000])
    """
    require_tensor(x, "x")
    require_dtype(x, FLOAT_TYPES, "x")
    return saturate_e4m3(divided(x, scale, "scale"))


def dequantize_fp8(data: torch.Tensor, scale: float | torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute data * scale in float32, and round it to ``dtype``.

    Args:
        data: float8_e4m3fn, any shape.
        scale: as in :func:`quantize_fp8`.
        dtype: float32, bfloat16 or float16.

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: as :func:`quantize_fp8`.

    >>> dequantize_fp8(torch.tensor([1.5]).to(torch.float8_e4m3fn), 2.0)
    tensor([3.])
    """
    require_tensor(data, "data")
    require_dtype(data, (torch.float8_e4m3fn,), "data")
    require_wide(dtype)
    return (data.float() * scalar(scale, "scale")).to(dtype)


def saturate_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Convert float32 to e4m3, clamped at +-448. Every NaN becomes 0x7f, as in ``cvt.rn.satfinite.e4m3x2``.

    The clamp is explicit because older torch versions turn larger numbers into NaN. torch keeps the sign of NaN.
    """
    return torch.where(x.isnan(), math.nan, x).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def scale_to_range(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Compute max|x| / ``largest`` as a 0-d float32 tensor, or 1 if that is 0."""
    require_tensor(x, "x")
    require_dtype(x, FLOAT_TYPES, "x")
    if x.numel() == 0:
        return torch.ones((), device=x.device)
    scale = x.abs().amax().float() / largest
    return torch.where(scale == 0, 1.0, scale)


def scalar(scale: float | torch.Tensor, name: str) -> float | torch.Tensor:
    """Check a scale argument. A tensor is returned as 0-d, which broadcasts with any shape."""
    require_scale(scale, name)
    return scale.reshape(()) if isinstance(scale, torch.Tensor) else scale


def divided(x: torch.Tensor, scale: float | torch.Tensor, name: str) -> torch.Tensor:
    """Compute x / scale in float32 with one rounding on every device.

    The divisor is a tensor, because CUDA would replace the division by a host number with a product with its rounded
    reciprocal.
    """
    divisor = scalar(scale, name)
    if not isinstance(divisor, torch.Tensor):
        divisor = torch.full((), divisor, dtype=torch.float64, device=x.device).float()
    return x.float() / divisor.to(x.device)


def require_wide(dtype: torch.dtype) -> None:
    """Check a ``dtype`` argument, the target of a dequantization."""
    if dtype not in FLOAT_TYPES:
        raise TypeError(f"dtype must be {' or '.join(str(d) for d in FLOAT_TYPES)}, got {dtype}")
