"""NVFP4 quantization: e2m1 codes, a float8_e4m3fn block scale for 16 elements, one float32 global scale per tensor.

x = code * block scale * global scale. The caller multiplies global scales into the attention call: K's into
``bmm1_scale``, V's into ``bmm2_scale``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hopwell.layouts._checks import (
    FLOAT_TYPES,
    require_dtype,
    require_member,
    require_multiple,
    require_rank,
    require_same,
    require_tensor,
)
from hopwell.layouts.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from hopwell.layouts.fp8 import E4M3_MAX, divided, require_wide, saturate_e4m3, scalar, scale_to_range
from hopwell.layouts.kv_cache import KVLayout
from hopwell.layouts.scales import NVFP4_BLOCK, VScaleLayout, deinterleave_v_scales, interleave_v_scales
from hopwell.layouts.swizzle import swizzle_128x4, unswizzle_128x4


class NVFP4Blocks(NamedTuple):
    """Quantized data, uint8 [..., n / 2], and its block scales, float8_e4m3fn."""

    data: torch.Tensor
    scales: torch.Tensor


def nvfp4_global_scale(x: torch.Tensor) -> torch.Tensor:
    """Compute the global scale that uses the whole range of codes and block scales: max|x| / (448 * 6).

    Args:
        x: float32, bfloat16 or float16, any shape.

    Returns:
        0-d float32 on ``x``'s device, or 1 if the above is 0.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.

    >>> nvfp4_global_scale(torch.tensor([1.0, -5376.0]))
    tensor(2.)
    """
    return scale_to_range(x, E4M3_MAX * E2M1_MAX)


def quantize_nvfp4(x: torch.Tensor, global_scale: float | torch.Tensor) -> NVFP4Blocks:
    """Quantize blocks of 16 consecutive elements to NVFP4, with block scales in linear order.

    For a block of y = x / global_scale in float32: SF = e4m3(max|y| / 6), clamped at 448; code = e2m1(y / SF), clamped
    at +-6. Both are rounded to nearest even. A block whose SF is 0 gets codes 0; a block with a NaN gets SF NaN.

    Args:
        x: float32, bfloat16 or float16 [..., n], n a multiple of 16.
        global_scale: positive float or one-element float32 tensor (whose value is not checked), such as the result of
            :func:`nvfp4_global_scale`.

    Returns:
        Data uint8 [..., n / 2], element 2i in the low nibble of byte i; block scales [..., n / 16].

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: n is not a multiple of 16, or ``global_scale`` is not positive and finite, or has several elements.

    >>> data, scales = quantize_nvfp4(torch.arange(16.0), 1.0)
    >>> scales.float().tolist(), data[:4].tolist()
    ([2.5], [16, 34, 67, 84])
    """
    _check_blocks(x, "x")
    return _quantize(divided(x, global_scale, "global_scale"))


def dequantize_nvfp4(
    data: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float | torch.Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute code * block scale * global scale in float32 (only the last product rounds), then round to ``dtype``.

    Args:
        data: uint8 [..., n / 2].
        scales: float8_e4m3fn [..., n / 16] in linear order; V scales of a context cache must first go through
            :func:`~hopwell.layouts.deinterleave_v_scales`.
        global_scale: positive float or one-element float32 tensor.
        dtype: float32, bfloat16 or float16.

    Returns:
        [..., n].

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: ``scales`` does not belong to ``data``, or ``global_scale`` is invalid.

    >>> dequantize_nvfp4(*quantize_nvfp4(torch.arange(16.0), 1.0))[:6].tolist()
    [0.0, 1.25, 2.5, 2.5, 3.75, 5.0]
    """
    require_tensor(data, "data")
    require_dtype(data, (torch.uint8,), "data")
    require_tensor(scales, "scales")
    require_dtype(scales, (torch.float8_e4m3fn,), "scales")
    require_wide(dtype)
    if data.dim() == 0 or scales.shape != (*data.shape[:-1], data.shape[-1] * 2 // NVFP4_BLOCK):
        raise ValueError(
            f"scales must have data's shape with 1/8 of its last dimension, got {tuple(scales.shape)} for data "
            f"{tuple(data.shape)}"
        )
    require_multiple(data.shape[-1], NVFP4_BLOCK // 2, "data's last dimension")
    codes = decode_e2m1(unpack_e2m1(data)).unflatten(-1, (scales.shape[-1], NVFP4_BLOCK))
    exact = codes * scales.float().unsqueeze(-1)
    return (exact.flatten(-2) * scalar(global_scale, "global_scale")).to(dtype)


def quantize_nvfp4_output(x: torch.Tensor, o_sf_scale: float | torch.Tensor) -> NVFP4Blocks:
    """Quantize an attention output like ``trtllm_batch_context_with_kv_cache`` with ``out_dtype="nvfp4"``.

    In float32, for each 16 consecutive elements: SF = e4m3(o_sf_scale * max|x| / 6), clamped at 448;
    code = e2m1(x * o_sf_scale / SF), clamped at +-6. True value = code * SF / o_sf_scale.

    Args:
        x: float32, bfloat16 or float16 [tokens, heads, head_dim], head_dim a multiple of 16.
        o_sf_scale: positive float or one-element float32 tensor: the reciprocal of a global scale.

    Returns:
        Data uint8 [tokens, heads, head_dim / 2]; block scales [round_up(tokens, 128),
        round_up(heads * head_dim / 16, 4)] in the 128x4 swizzle, zero in the padding.

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: the rank is wrong, head_dim is not a multiple of 16, or ``o_sf_scale`` is invalid.

    >>> data, scales = quantize_nvfp4_output(torch.ones(10, 2, 64), 1.0)
    >>> tuple(data.shape), tuple(scales.shape)
    ((10, 2, 32), (128, 8))
    """
    require_rank(x, 3, "x", "[tokens, heads, head_dim]")
    _check_blocks(x, "x")
    data, scales = _quantize(x.float() * scalar(o_sf_scale, "o_sf_scale"))
    return NVFP4Blocks(data, swizzle_128x4(scales.flatten(1)))


def dequantize_nvfp4_output(
    data: torch.Tensor,
    scales: torch.Tensor,
    o_sf_scale: float | torch.Tensor,
    scale_start_index: int = 0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute code * SF / o_sf_scale of an NVFP4 attention output: the inverse of :func:`quantize_nvfp4_output`.

    Args:
        data: uint8 [tokens, heads, head_dim / 2].
        scales: float8_e4m3fn [rows, columns] in the 128x4 swizzle, rows a multiple of 128.
        o_sf_scale: as in :func:`quantize_nvfp4_output`.
        scale_start_index: row of ``scales`` that belongs to token 0.
        dtype: float32, bfloat16 or float16.

    Returns:
        [tokens, heads, head_dim].

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: the rank is wrong, ``scales`` lacks rows of the tokens, or ``o_sf_scale`` is invalid.

    >>> quantized = quantize_nvfp4_output(torch.full((1, 1, 16), 3.0), 2.0)
    >>> dequantize_nvfp4_output(*quantized, 2.0)[0, 0, :2].tolist()
    [3.0, 3.0]
    """
    require_rank(data, 3, "data", "[tokens, heads, head_dim / 2]")
    require_multiple(data.shape[-1], NVFP4_BLOCK // 2, "data's last dimension")
    require_wide(dtype)
    tokens, heads, width = data.shape
    blocks = width * 2 // NVFP4_BLOCK
    matrix = unswizzle_128x4(scales, tokens, heads * blocks, scale_start_index)
    values = dequantize_nvfp4(data, matrix.view(tokens, heads, blocks))
    return (values / scalar(o_sf_scale, "o_sf_scale")).to(dtype)


@dataclass(frozen=True)
class NVFP4KVCache:
    """A paged NVFP4 cache in the form of the entry points' arguments.

    Attributes:
        key, value: uint8, 4-D in ``kv_layout`` with head_dim / 2 as the last dimension.
        key_scales, value_scales: float8_e4m3fn, the same with head_dim / 16. The key's are linear, the value's in
            ``v_scale_layout``.
        key_global_scale, value_global_scale: float or one-element float32 tensor; factors for ``bmm1_scale`` and
            ``bmm2_scale``.
        kv_layout: order of the dimensions.
        v_scale_layout: order of V's scales.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor
    value_scales: torch.Tensor
    key_global_scale: float | torch.Tensor
    value_global_scale: float | torch.Tensor
    kv_layout: KVLayout
    v_scale_layout: VScaleLayout

    @property
    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The entry points' ``kv_cache`` argument."""
        return self.key, self.value

    @property
    def block_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The entry points' ``kv_block_scales`` or ``kv_cache_sf`` argument."""
        return self.key_scales, self.value_scales


def quantize_nvfp4_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_layout: KVLayout | str,
    v_scale_layout: VScaleLayout | str,
    key_global_scale: float | torch.Tensor | None = None,
    value_global_scale: float | torch.Tensor | None = None,
) -> NVFP4KVCache:
    """Quantize a paged K and V cache to NVFP4.

    Args:
        key: float32, bfloat16 or float16 [pages, kv_heads, page_size, head_dim] (HND) or
            [pages, page_size, kv_heads, head_dim] (NHD), any strides, head_dim a multiple of 16.
        value: the same; its head dimension may differ.
        kv_layout: "HND" or "NHD"; the result keeps it.
        v_scale_layout: "linear", which decode reads, or "interleaved" (page_size a multiple of 4 and V's head_dim of
            64). ``trtllm_batch_context_with_kv_cache`` reads both, see its ``v_scale_layout``. The tensors do not show
            which of them they have.
        key_global_scale: as in :func:`quantize_nvfp4`. None computes :func:`nvfp4_global_scale` from all of ``key``, so
            every page must hold finite numbers.
        value_global_scale: the same for ``value``.

    Returns:
        The cache in new contiguous tensors.

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: a layout is unknown, a shape is wrong, or a global scale is invalid.

    >>> key, value = torch.randn(2, 10, 8, 16, 64).unbind(0)
    >>> cache = quantize_nvfp4_kv_cache(key, value, "HND", "interleaved")
    >>> tuple(cache.key.shape), tuple(cache.value_scales.shape)
    ((10, 8, 16, 32), (10, 8, 16, 4))
    """
    layout = require_member(KVLayout, kv_layout, "kv_layout")
    v_layout = require_member(VScaleLayout, v_scale_layout, "v_scale_layout")
    require_rank(key, 4, "key", layout.shape)
    require_rank(value, 4, "value", layout.shape)
    require_same(tuple(key.shape[:3]), tuple(value.shape[:3]), "pages, KV heads and page size", ("key", "value"))
    _check_blocks(key, "key")
    _check_blocks(value, "value")
    key_global = nvfp4_global_scale(key) if key_global_scale is None else key_global_scale
    value_global = nvfp4_global_scale(value) if value_global_scale is None else value_global_scale
    key_data, key_scales = _quantize(divided(key, key_global, "key_global_scale"))
    value_data, value_scales = _quantize(divided(value, value_global, "value_global_scale"))
    if v_layout is VScaleLayout.INTERLEAVED:
        value_scales = interleave_v_scales(value_scales, layout)
    return NVFP4KVCache(
        key=key_data,
        value=value_data,
        key_scales=key_scales,
        value_scales=value_scales,
        key_global_scale=key_global,
        value_global_scale=value_global,
        kv_layout=layout,
        v_scale_layout=v_layout,
    )


def dequantize_nvfp4_kv_cache(
    cache: NVFP4KVCache, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantize a paged NVFP4 cache to (key, value) in the cache's own ``kv_layout``.

    Args:
        cache: a result of :func:`quantize_nvfp4_kv_cache`, or a cache of tensors from elsewhere.
        dtype: float32, bfloat16 or float16.

    Raises:
        TypeError, ValueError: as :func:`dequantize_nvfp4` and :func:`~hopwell.layouts.deinterleave_v_scales`.

    >>> key = torch.full((1, 4, 1, 64), 3.0)
    >>> cache = quantize_nvfp4_kv_cache(key, -key, "NHD", "linear", 0.5, 0.5)
    >>> [x.unique().tolist() for x in dequantize_nvfp4_kv_cache(cache)]
    [[3.0], [-3.0]]
    """
    value_scales = cache.value_scales
    if cache.v_scale_layout is VScaleLayout.INTERLEAVED:
        value_scales = deinterleave_v_scales(value_scales, cache.kv_layout)
    key = dequantize_nvfp4(cache.key, cache.key_scales, cache.key_global_scale, dtype)
    return key, dequantize_nvfp4(cache.value, value_scales, cache.value_global_scale, dtype)


def _quantize(y: torch.Tensor) -> NVFP4Blocks:
    """Quantize float32 blocks that already include the global scale."""
    blocks = y.unflatten(-1, (y.shape[-1] // NVFP4_BLOCK, NVFP4_BLOCK))
    scales = saturate_e4m3(divided(blocks.abs().amax(-1), E2M1_MAX, "the largest code"))
    wide = scales.float().unsqueeze(-1)
    codes = encode_e2m1(torch.where(wide == 0, 0.0, blocks / wide))
    return NVFP4Blocks(pack_e2m1(codes.flatten(-2)), scales)


def _check_blocks(x: torch.Tensor, name: str) -> None:
    require_tensor(x, name)
    require_dtype(x, FLOAT_TYPES, name)
    if x.dim() == 0 or x.shape[-1] % NVFP4_BLOCK:
        raise ValueError(f"{name}'s last dimension must be a multiple of {NVFP4_BLOCK}, got shape {tuple(x.shape)}")
