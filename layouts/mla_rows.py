"""Latent keys in rows of 656 bytes: the ``fp8_ds_mla`` caches of vLLM, which FlashMLA's sparse kernels read.

A row holds 512 float8_e4m3fn of the latent, a float32 scale for each 128 of them, and 64 bfloat16 of the rotary part::

    bytes    0 .. 511   e4m3, latent / scale
    bytes  512 .. 527   four float32 scales
    bytes  528 .. 655   bfloat16, unchanged
"""

from __future__ import annotations

import torch

from hopwell.kernels.elements import SCALE_COLUMNS
from hopwell.layouts._checks import FLOAT_TYPES, require_dtype, require_tensor
from hopwell.layouts.fp8 import E4M3_MAX, saturate_e4m3

LATENT, ROTARY = 512, 64
SCALES = LATENT // SCALE_COLUMNS
FP8_DS_MLA_BYTES = LATENT + 4 * SCALES + 2 * ROTARY


def quantize_fp8_ds_mla(latent: torch.Tensor, rotary: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """Pack latent keys into rows of 656 bytes.

    Args:
        latent: [..., 512], float32, bfloat16 or float16: the compressed latent, which is also the value.
        rotary: [..., 64] of the same dtype: the rotary part of the keys.
        power_of_two: whether scales are rounded up to powers of two (``kv_scale_format="pow2_fp32"``); otherwise each
            is max|x| / 448 of its 128 columns.

    Returns:
        uint8 [..., 656].

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: a shape is wrong, or the tensors are on two devices.

    >>> quantize_fp8_ds_mla(torch.zeros(3, 512), torch.zeros(3, 64)).shape
    torch.Size([3, 656])
    """
    for name, part, width in (("latent", latent, LATENT), ("rotary", rotary, ROTARY)):
        require_tensor(part, name)
        require_dtype(part, FLOAT_TYPES, name)
        if part.dim() < 1 or part.shape[-1] != width:
            raise ValueError(f"{name} must have {width} as its last size, got shape {tuple(part.shape)}")
    if latent.shape[:-1] != rotary.shape[:-1] or latent.device != rotary.device:
        raise ValueError(
            f"latent and rotary must have the same rows on one device, got {tuple(latent.shape)} on {latent.device} "
            f"and {tuple(rotary.shape)} on {rotary.device}"
        )
    blocks = latent.float().unflatten(-1, (SCALES, SCALE_COLUMNS))
    scales = blocks.abs().amax(-1) / E4M3_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))
    data = saturate_e4m3(blocks / scales[..., None]).flatten(-2)
    parts = (data, scales, rotary.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def dequantize_fp8_ds_mla(rows: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Unpack rows of 656 bytes to [..., 576]: the latent, and then the rotary part.

    The latent is multiplied by its scales in float32 and rounded to ``dtype``.

    Args:
        rows: uint8 [..., 656].
        dtype: float32, bfloat16 or float16.

    Raises:
        TypeError: ``rows`` is not a tensor, or has another dtype.
        ValueError: the last size is not 656.

    >>> dequantize_fp8_ds_mla(quantize_fp8_ds_mla(torch.ones(2, 512), torch.ones(2, 64))).unique()
    tensor([1.], dtype=torch.bfloat16)
    """
    require_tensor(rows, "rows")
    require_dtype(rows, (torch.uint8,), "rows")
    if rows.dim() < 1 or rows.shape[-1] != FP8_DS_MLA_BYTES:
        raise ValueError(f"rows must have {FP8_DS_MLA_BYTES} as its last size, got shape {tuple(rows.shape)}")
    data, scales, rotary = (
        part.contiguous().view(kind)
        for part, kind in zip(
            rows.split((LATENT, 4 * SCALES, 2 * ROTARY), -1),
            (torch.float8_e4m3fn, torch.float32, torch.bfloat16),
            strict=True,
        )
    )
    latent = data.float().unflatten(-1, (SCALES, SCALE_COLUMNS)) * scales[..., None]
    return torch.cat((latent.flatten(-2).to(dtype), rotary.to(dtype)), -1)


def fill_fp8_ds_mla_cache(
    kv_cache: torch.Tensor,
    latent: torch.Tensor,
    rotary: torch.Tensor,
    slots: torch.Tensor,
    *,
    power_of_two: bool = False,
) -> None:
    """Write new tokens into a paged cache of 656-byte rows. The host reads no values, so CUDA graphs can capture it.

    Args:
        kv_cache: uint8 [pages, page_size, 656] or [pages, 1, page_size, 656]; the last stride is 1, the others are
        free.
        latent: [tokens, 512], as in :func:`quantize_fp8_ds_mla`.
        rotary: [tokens, 64].
        slots: int32 or int64 [tokens], page * page_size + offset of each token, all different. Their range is not
            checked.
        power_of_two: as in :func:`quantize_fp8_ds_mla`.

    Raises:
        TypeError: an argument is not a tensor, or has another dtype.
        ValueError: a shape is wrong.

    >>> cache = torch.zeros(4, 8, 656, dtype=torch.uint8)
    >>> fill_fp8_ds_mla_cache(cache, torch.ones(1, 512), torch.ones(1, 64), torch.tensor([9]))
    >>> bool(cache[1, 1].any()), bool(cache[0].any())
    (True, False)
    """
    require_tensor(kv_cache, "kv_cache")
    require_dtype(kv_cache, (torch.uint8,), "kv_cache")
    require_tensor(slots, "slots")
    require_dtype(slots, (torch.int32, torch.int64), "slots")
    pages = kv_cache.squeeze(1) if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
    if pages.dim() != 3 or pages.shape[-1] != FP8_DS_MLA_BYTES:
        raise ValueError(
            f"kv_cache must be [pages, page_size, {FP8_DS_MLA_BYTES}] or [pages, 1, page_size, {FP8_DS_MLA_BYTES}], "
            f"got shape {tuple(kv_cache.shape)}"
        )
    rows = quantize_fp8_ds_mla(latent, rotary, power_of_two=power_of_two)
    if rows.dim() != 2 or slots.shape != rows.shape[:1]:
        raise ValueError(
            f"latent must be [tokens, {LATENT}] and slots [tokens], got {tuple(latent.shape)} and {tuple(slots.shape)}"
        )
    places = slots.long()
    pages[places // pages.shape[1], places % pages.shape[1]] = rows
