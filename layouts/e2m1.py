"""e2m1, the 4-bit float of NVFP4: sign, two exponent bits, one mantissa bit; two codes in a byte, low nibble first."""

from __future__ import annotations

import torch

from hopwell.layouts._checks import FLOAT_TYPES, require_dtype, require_multiple, require_tensor

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0..7; bit 3 is the sign
E2M1_MAX = E2M1_MAGNITUDES[-1]
_SIGN = 8


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest e2m1 code, ties to the even code, clamping at +-6.

    Zeros keep their sign, and NaN becomes +6, as in the PTX instruction ``cvt.rn.satfinite.e2m1x2.f32``.

    Args:
        x: float32, bfloat16 or float16, any shape.

    Returns:
        uint8 codes 0..15 of the same shape, one to a byte.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.

    >>> encode_e2m1(torch.tensor([0.25, 0.75, 2.4, -5.0, 1e9, -0.1])).tolist()
    [0, 2, 4, 14, 7, 8]
    """
    require_tensor(x, "x")
    require_dtype(x, FLOAT_TYPES, "x")
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for i in range(7):
        # The midpoint between codes i and i + 1 is exact in all types above. A tie goes to the even code.
        midpoint = (E2M1_MAGNITUDES[i] + E2M1_MAGNITUDES[i + 1]) / 2
        code += magnitude > midpoint if i % 2 == 0 else magnitude >= midpoint
    code += _SIGN * torch.signbit(x).to(torch.uint8)
    return torch.where(torch.isnan(x), 7, code)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of e2m1 codes.

    Args:
        codes: uint8 of any shape, one code to a byte; the upper nibble is ignored.

    Returns:
        float32 of the same shape.

    Raises:
        TypeError: ``codes`` is not a tensor, or has another dtype.

    >>> decode_e2m1(torch.tensor([1, 7, 11], dtype=torch.uint8)).tolist()
    [0.5, 6.0, -1.5]
    """
    require_tensor(codes, "codes")
    require_dtype(codes, (torch.uint8,), "codes")
    mantissa = codes & 1
    exponent = codes >> 1 & 3
    # The values are computed, because a lookup table would have to be copied to the device on every call.
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << exponent >> 1)
    magnitude = halves.to(torch.float32) / 2
    return torch.where((codes & _SIGN) != 0, -magnitude, magnitude)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack pairs of codes into bytes: element 2i in the low nibble, element 2i + 1 in the high nibble.

    Args:
        codes: uint8 [..., n] with values 0..15, n even.

    Returns:
        uint8 [..., n / 2], contiguous.

    Raises:
        TypeError: ``codes`` is not a tensor, or has another dtype.
        ValueError: n is odd, or there are no dimensions.

    >>> [hex(byte) for byte in pack_e2m1(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist()]
    ['0x21', '0xf3']
    """
    _check_bytes(codes, "codes")
    require_multiple(codes.shape[-1], 2, "codes' last dimension")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes into codes: the inverse of :func:`pack_e2m1`.

    Args:
        packed: uint8 [..., n / 2].

    Returns:
        uint8 [..., n] with values 0..15, contiguous.

    Raises:
        TypeError: ``packed`` is not a tensor, or has another dtype.
        ValueError: there are no dimensions.

    >>> unpack_e2m1(torch.tensor([0x21, 0xF3], dtype=torch.uint8)).tolist()
    [1, 2, 3, 15]
    """
    _check_bytes(packed, "packed")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _check_bytes(tensor: torch.Tensor, name: str) -> None:
    require_tensor(tensor, name)
    require_dtype(tensor, (torch.uint8,), name)
    if tensor.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got shape ()")
