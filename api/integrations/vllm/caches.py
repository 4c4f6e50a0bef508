"""Views of vLLM's KV caches in the forms that hopwell takes, and the write of new tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

import hopwell
from hopwell.integrations.vllm.capability import FP8, NVFP4
from hopwell.layouts.scales import NVFP4_BLOCK

Pair = tuple[torch.Tensor, torch.Tensor]
Scale = float | torch.Tensor  # of all KV heads, or of each


class Cache(NamedTuple):
    """K and V of a layer, [blocks, kv_heads, block_size, head_size] each (HND), in any memory order.

    NVFP4 has head_size / 2 bytes in the last dimension, and block scales in linear order.
    """

    data: Pair
    scales: Pair | None = None


def nvfp4_bytes(head_size: int) -> tuple[int, int]:
    """Return the bytes of data, and of block scales, of a head of one token in K or V."""
    return head_size // 2, head_size // NVFP4_BLOCK


def customized(spec: Any) -> Any:
    """Return vLLM's cache spec with the page size of an NVFP4 cache: K and V, each with its block scales."""
    if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_nvfp4:
        return spec
    if spec.head_size != spec.head_size_v:
        raise NotImplementedError(
            f"HOPWELL supports NVFP4 caches with equal head sizes of K and V, got {spec.head_size} and "
            f"{spec.head_size_v}"
        )
    return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=sum(nvfp4_bytes(spec.head_size)))


def cache_of(kv_cache: torch.Tensor, dtype: torch.dtype, head_size: int, kv_heads: int) -> Cache:
    """View a layer's cache.

    Args:
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size] with any strides, where the last dimension has K, then
            V. An NVFP4 cache is uint8 [blocks, 2 * kv_heads, block_size, bytes] with dense blocks. A block has four
            parts, each for all heads: K data, K scales, V data and V scales.
        dtype: of K and V; uint8 for NVFP4.
        head_size: elements of a head.
        kv_heads: KV heads.

    Raises:
        ValueError: the blocks of an NVFP4 cache are not dense.
    """
    if dtype is not NVFP4:
        kv = kv_cache.view(dtype)
        return Cache((kv[..., :head_size], kv[..., head_size:]))
    blocks, slots, size, width = kv_cache.shape
    head_major = kv_cache.stride()[1:] == (size * width, width, 1)
    if not head_major and kv_cache.stride()[1:] != (width, slots * width, 1):
        raise ValueError(f"the blocks of an NVFP4 cache must be dense, got strides {kv_cache.stride()}")
    data, scales = nvfp4_bytes(head_size)
    start, views = kv_cache.storage_offset(), []
    for columns in (data, scales, data, scales):
        strides = (size * columns, columns) if head_major else (columns, kv_heads * columns)
        shape = (blocks, kv_heads, size, columns)
        views.append(kv_cache.as_strided(shape, (kv_cache.stride(0), *strides, 1), start))
        start += kv_heads * size * columns
    key, key_scales, value, value_scales = views
    return Cache((key, value), (key_scales.view(FP8), value_scales.view(FP8)))


def stacked(kv_cache: torch.Tensor, dtype: torch.dtype, head_size: int) -> torch.Tensor:
    """View a cache of 8 or 16 bits as [blocks, 2, kv_heads, block_size, head_size], as the fmha_v2 entry takes it."""
    return kv_cache.view(dtype).unflatten(-1, (2, head_size)).permute(0, 3, 1, 2, 4)


def write(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, k_scale: Scale, v_scale: Scale
) -> None:
    """Write new tokens into their slots, block * block_size + offset. Tokens with negative slots are skipped.

    Args:
        cache: of a layer.
        key: [tokens or more, kv_heads, head_size] in 16 bits.
        value: the same.
        slots: int64 [tokens].
        k_scale: divisor of keys.
        v_scale: divisor of values.
    """
    hopwell.append_paged_kv_cache_with_slot_mapping(
        key, value, slots, cache.data, "HND", k_scale=k_scale, v_scale=v_scale, kv_cache_sf=cache.scales
    )
