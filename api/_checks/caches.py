"""Checks of paged KV caches and their NVFP4 block scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hopwell._checks import arguments as checks
from hopwell.kernels.problem import BlockScales
from hopwell.layouts import KVLayout, KVViews, VScaleLayout, block_scale_views, paged_kv_views

SCALE_TYPES = (checks.FP8, torch.uint8)  # uint8 holds the bits of e4m3 scales
SCALES_READ = 4  # scales that kernels read at a time
_V_SCALE_LAYOUTS = tuple(layout.value for layout in VScaleLayout)
KV_LAYOUTS = tuple(layout.value for layout in KVLayout)


@dataclass(frozen=True)
class PagedCache:
    """Canonical views [pages, kv_heads, page_size, stored head_dim] of a checked cache.

    ``qk_dim`` and ``v_dim`` count elements; NVFP4 stores two of them in a byte.
    """

    key: torch.Tensor
    value: torch.Tensor
    qk_dim: int
    v_dim: int

    @property
    def page_size(self) -> int:
        return self.key.shape[2]

    @property
    def is_nvfp4(self) -> bool:
        return self.key.dtype == torch.uint8


def pair_or_tensor(name: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of an argument that is one tensor or a pair, each with its name in messages."""
    if isinstance(value, torch.Tensor):
        return [(name, checks.tensor(name, value))]
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a torch.Tensor or a pair (K, V) of them, got {checks.describe(value)}")
    if len(value) != 2:
        raise ValueError(f"{name} as a {type(value).__name__} must be a pair (K, V), got {len(value)} elements")
    return [(f"{name}[{i}]", checks.tensor(f"{name}[{i}]", part)) for i, part in enumerate(value)]


def other_layout(kv_layout: str) -> str:
    """Return the argument that selects the other layout, for messages."""
    return f"kv_layout={KVLayout(kv_layout).other.value!r}"


def check_dtype(
    parts: Sequence[tuple[str, torch.Tensor]],
    query_dtype: torch.dtype,
    allowed: Sequence[torch.dtype],
    of_bytes: str = "NVFP4",
) -> None:
    """Check that all ``parts`` of a cache have one dtype, and that it goes with a query of ``query_dtype``.

    ``of_bytes`` describes the contents of a uint8 cache in messages.
    """
    first_name, first = parts[0]
    if first.dtype not in allowed:
        known = " or ".join(f"{one} ({of_bytes})" if one == torch.uint8 else str(one) for one in dict.fromkeys(allowed))
        raise ValueError(f"{first_name} must be {known} for a query of {query_dtype}, got {first.dtype}")
    for name, part in parts:
        if part.dtype != first.dtype:
            raise ValueError(f"{name} must have the dtype of {first_name}, {first.dtype}, got {part.dtype}")


def paged_cache(
    kv_cache: Any, kv_layout: Any, query: torch.Tensor, dtypes: Sequence[torch.dtype], *, same_pages: bool = True
) -> PagedCache:
    """Check the ``kv_cache`` argument against ``query`` [tokens, heads, head_dim], and return canonical views."""
    parts = pair_or_tensor("kv_cache", kv_cache)
    check_dtype(parts, query.dtype, dtypes)
    for name, part in parts:
        checks.device(name, part, query.device)
    checks.choice("kv_layout", kv_layout, KV_LAYOUTS)
    key, value = paged_kv_views(kv_cache, kv_layout, same_pages=same_pages)
    packing = 2 if key.dtype == torch.uint8 else 1
    cache = PagedCache(key, value, key.shape[-1] * packing, value.shape[-1] * packing)

    checks.grouped_heads(query.shape[1], key, "kv_cache", other_layout(kv_layout))
    checks.page_size("kv_cache", cache.page_size)
    if cache.qk_dim != query.shape[2]:
        stored = " (two elements a byte)" if cache.is_nvfp4 else ""
        raise ValueError(f"kv_cache must have the head_dim of query, {query.shape[2]}{stored}, got {cache.qk_dim}")
    if min(cache.qk_dim, cache.v_dim) < 1:
        raise ValueError(f"kv_cache must have head_dims of at least 1, got {cache.qk_dim} for K, {cache.v_dim} for V")
    for name, part in parts:
        checks.tma_readable(name, part)
    return cache


def block_scales(
    name: str, scales: Any, cache: PagedCache, kv_layout: str, *, interleaves_v: bool = False
) -> BlockScales | None:
    """Check the block scales of ``cache`` and return views. They are required for NVFP4 and refused otherwise."""
    parts = [] if scales is None else pair_or_tensor(name, scales)
    if not cache.is_nvfp4:
        if parts:
            raise ValueError(
                f"{name} must be None unless kv_cache is NVFP4 (torch.uint8), kv_cache is {cache.key.dtype}"
            )
        return None
    if not parts:
        raise ValueError(f"{name} must be provided for an NVFP4 (torch.uint8) kv_cache, got None")
    for part_name, part in parts:
        checks.dtype(part_name, part, SCALE_TYPES)
        checks.device(part_name, part, cache.key.device)
    views = block_scale_views(scales, kv_layout, KVViews(cache.key, cache.value), same_pages=False, name=name)
    for part_name, part in parts:
        if part.data_ptr() % SCALES_READ or any(stride % SCALES_READ for stride in part.stride()[:-1]):
            raise ValueError(
                f"{part_name} must begin at a multiple of {SCALES_READ} bytes, and so must all of its rows, got "
                f"address {part.data_ptr():#x} and strides {part.stride()}"
            )
    return BlockScales(views.key, views.value, interleaves_v)


def interleaves_v(v_scale_layout: Any) -> bool:
    """Check the order of V's block scales and return whether they are interleaved by four tokens."""
    return checks.choice("v_scale_layout", v_scale_layout, _V_SCALE_LAYOUTS) == VScaleLayout.INTERLEAVED.value


def has_dtype(kv_cache: Any, dtype: torch.dtype) -> bool:
    """Return whether a cache, which may be unchecked, has this dtype."""
    first = kv_cache[0] if isinstance(kv_cache, (tuple, list)) and kv_cache else kv_cache
    return isinstance(first, torch.Tensor) and first.dtype == dtype


def scales(
    cache: PagedCache, bmm1_scale: Any, bmm2_scale: Any, on: torch.device
) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Check and return the softmax scale and the output scale of a call over ``cache``.

    KV heads may have their own, except in 16-bit caches.
    """
    heads = 1 if cache.key.dtype in checks.SIXTEEN_BIT else cache.key.shape[1]
    softmax_scale = scale_of_heads("bmm1_scale", bmm1_scale, on, heads, minimum=0.0)
    return softmax_scale, scale_of_heads("bmm2_scale", bmm2_scale, on, heads)


def scale_of_heads(
    name: str, value: Any, on: torch.device, heads: int, minimum: float | None = None
) -> float | torch.Tensor:
    """Check and return a scale of all KV heads, or a contiguous float32 tensor [heads] on the device."""
    if heads == 1 or not isinstance(value, torch.Tensor) or value.numel() == 1:
        return checks.scale(name, value, on, minimum)
    checks.tensor(name, value)
    if value.dtype != torch.float32:
        raise TypeError(f"{name} as a tensor must be torch.float32, got {value.dtype}")
    if tuple(value.shape) != (heads,):
        raise ValueError(
            f"{name} as a tensor must have one element, or the shape (num_kv_heads,) = ({heads},), got shape "
            f"{tuple(value.shape)}"
        )
    checks.device(name, value, on)
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    return value
