"""Canonical views [pages, kv_heads, page_size, head_dim] of KV caches in every accepted form, without a copy.

A page is the unit of a paged cache. Contiguous (ragged) K and V are one page with all tokens, so kernels see the same
four dimensions in both cases. K and V keep their own strides; only the last must be 1.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hopwell.layouts._checks import (
    require_member,
    require_pair,
    require_rank,
    require_same,
    require_tensor,
    require_unit_last_stride,
)


class KVLayout(enum.Enum):
    """Order of the dimensions inside a page, spelled like FlashInfer's ``kv_layout`` argument.

    >>> KVLayout("NHD").shape
    '[pages, page_size, kv_heads, head_dim]'
    """

    HND = "HND"
    NHD = "NHD"

    @property
    def other(self) -> KVLayout:
        """The layout that swaps kv_heads and page_size."""
        return KVLayout.NHD if self is KVLayout.HND else KVLayout.HND

    @property
    def shape(self) -> str:
        """Dimensions of a 4-D cache, for messages."""
        return f"[pages, {self.page_shape}]"

    @property
    def page_shape(self) -> str:
        """Dimensions of one page, for messages."""
        return "kv_heads, page_size, head_dim" if self is KVLayout.HND else "page_size, kv_heads, head_dim"


class KVViews(NamedTuple):
    """Canonical key and value views, both [pages, kv_heads, page_size, head_dim] with a unit last stride.

    Head dims and strides may differ; KV heads and page size do not. They share storage if the caller's tensors do.
    """

    key: torch.Tensor
    value: torch.Tensor


def canonical_view(cache: torch.Tensor, kv_layout: KVLayout | str, name: str = "cache") -> torch.Tensor:
    """View one 4-D cache tensor as [pages, kv_heads, page_size, head_dim].

    Args:
        cache: [pages, kv_heads, page_size, head_dim] (HND) or [pages, page_size, kv_heads, head_dim] (NHD), any dtype.
            The last stride is 1; the others are free.
        kv_layout: "HND" or "NHD".
        name: name of ``cache`` in messages.

    Returns:
        A view of the same storage.

    Raises:
        TypeError: ``cache`` is not a tensor, or ``kv_layout`` is not a string.
        ValueError: the layout is unknown, the rank is wrong, or the last stride is not 1.

    >>> cache = torch.empty(10, 16, 8, 128)
    >>> view = canonical_view(cache, "NHD")
    >>> tuple(view.shape), view.data_ptr() == cache.data_ptr()
    ((10, 8, 16, 128), True)
    """
    layout = require_member(KVLayout, kv_layout, "kv_layout")
    require_rank(cache, 4, name, layout.shape)
    require_unit_last_stride(cache, name)
    return cache if layout is KVLayout.HND else cache.transpose(1, 2)


def separate_kv_views(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KVLayout | str,
    *,
    same_pages: bool = True,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> KVViews:
    """View two 4-D cache tensors canonically: the tuple form, and cuDNN's paged caches (which are HND).

    Args:
        k_cache: as in :func:`canonical_view`.
        v_cache: as in :func:`canonical_view`. Its strides and its head dimension are independent of ``k_cache``'s.
        kv_layout: "HND" or "NHD", for both.
        same_pages: whether both must have the same number of pages. False is for K and V with separate page ids
            (:func:`~hopwell.layouts.split_page_table`).
        names: names of the two in messages.

    Raises:
        TypeError: an argument is not a tensor, or the dtypes differ.
        ValueError: as :func:`canonical_view`, or KV heads, page sizes, numbers of pages or devices differ.

    >>> pool = torch.empty(10, 16, 8, 192 + 128)
    >>> views = separate_kv_views(pool[..., :192], pool[..., 192:], "NHD")
    >>> tuple(views.key.shape), tuple(views.value.shape)
    ((10, 8, 16, 192), (10, 8, 16, 128))
    """
    key = canonical_view(k_cache, kv_layout, names[0])
    value = canonical_view(v_cache, kv_layout, names[1])
    require_same(key.dtype, value.dtype, "dtype", names)
    require_same(key.device, value.device, "device", names)
    require_same(key.shape[1], value.shape[1], "number of KV heads", names)
    require_same(key.shape[2], value.shape[2], "page size", names)
    if same_pages:
        require_same(key.shape[0], value.shape[0], "number of pages", names)
    return KVViews(key, value)


def paged_kv_views(
    kv_cache: torch.Tensor | Sequence[torch.Tensor],
    kv_layout: KVLayout | str,
    *,
    same_pages: bool = True,
    name: str = "kv_cache",
) -> KVViews:
    """View a paged cache, stacked or a pair, canonically.

    This is the ``kv_cache`` argument of FlashInfer's ``trtllm_batch_context_with_kv_cache`` and
    ``xqa_batch_decode_with_kv_cache``. NVFP4 data (uint8, two elements a byte) is returned unchanged, with head_dim / 2
    as its last dimension.

    Args:
        kv_cache: a tensor [pages, 2, *page] with K at index 0 and V at index 1 of dimension 1. In [pages, 1, *page] K
            and V are the same data. A tuple or list of two tensors [pages, *page] has separate K and V. ``page`` is
            [kv_heads, page_size, head_dim] (HND) or [page_size, kv_heads, head_dim] (NHD).
        kv_layout: "HND" or "NHD".
        same_pages: as in :func:`separate_kv_views`; it only affects the pair.
        name: name of ``kv_cache`` in messages.

    Returns:
        Views of the caller's storage. For [pages, 1, *page] key and value are the same tensor object.

    Raises:
        TypeError: the argument is neither a tensor nor a pair, dtypes differ, or ``kv_layout`` is not a string.
        ValueError: the layout is unknown, the rank is wrong, dimension 1 is not 1 or 2, or a last stride is not 1. Also
            if the pair differs in pages, KV heads, page size or device.

    >>> stacked = torch.arange(2 * 2 * 3 * 1 * 4).view(2, 2, 3, 1, 4)  # NHD: 2 pages of 3 tokens, 1 head
    >>> key, value = paged_kv_views(stacked, "NHD")
    >>> key[1, 0, 2].tolist(), value[1, 0, 2].tolist()
    ([32, 33, 34, 35], [44, 45, 46, 47])
    """
    if not isinstance(kv_cache, torch.Tensor):
        k_cache, v_cache = require_pair(kv_cache, name)
        names = (f"{name}[0]", f"{name}[1]")
        return separate_kv_views(k_cache, v_cache, kv_layout, same_pages=same_pages, names=names)
    layout = require_member(KVLayout, kv_layout, "kv_layout")
    require_rank(kv_cache, 5, name, f"[pages, 1 or 2, {layout.page_shape}], or a pair (K, V) of 4-D tensors")
    require_unit_last_stride(kv_cache, name)
    if kv_cache.shape[1] not in (1, 2):
        raise ValueError(f"{name} must have 1 or 2 as dimension 1 (K, V), got shape {tuple(kv_cache.shape)}")
    if layout is KVLayout.NHD:
        kv_cache = kv_cache.transpose(2, 3)
    parts = kv_cache.unbind(1)
    return KVViews(parts[0], parts[-1])


def ragged_view(tokens: torch.Tensor, name: str = "tokens") -> torch.Tensor:
    """View contiguous K or V [tokens, kv_heads, head_dim] as one page [1, kv_heads, tokens, head_dim].

    Args:
        tokens: any dtype, any token and head strides (a slice of packed QKV is fine), last stride 1.
        name: name of ``tokens`` in messages.

    Raises:
        TypeError: ``tokens`` is not a tensor.
        ValueError: it is not 3-D, or its last stride is not 1.

    >>> packed = torch.empty(100, 3, 8, 64)
    >>> view = ragged_view(packed[:, 1])
    >>> tuple(view.shape), view.stride()[1:]
    ((1, 8, 100, 64), (64, 1536, 1))
    """
    require_rank(tokens, 3, name, "[tokens, kv_heads, head_dim]")
    require_unit_last_stride(tokens, name)
    return tokens.transpose(0, 1).unsqueeze(0)


def ragged_kv_views(key: torch.Tensor, value: torch.Tensor, names: tuple[str, str] = ("k_cache", "v_cache")) -> KVViews:
    """View contiguous K and V, [tokens, kv_heads, head_dim] each, as one page.

    These are the ragged ``k_cache`` and ``v_cache`` of FlashInfer's ``cudnn_batch_prefill_with_kv_cache``. The token
    counts may differ: with element offsets each tensor may have its own gaps.

    Raises:
        TypeError: an argument is not a tensor, or the dtypes differ.
        ValueError: as :func:`ragged_view`, or KV heads or devices differ.

    >>> views = ragged_kv_views(torch.empty(100, 8, 192), torch.empty(100, 8, 128))
    >>> tuple(views.key.shape), tuple(views.value.shape)
    ((1, 8, 100, 192), (1, 8, 100, 128))
    """
    views = KVViews(ragged_view(key, names[0]), ragged_view(value, names[1]))
    require_same(key.dtype, value.dtype, "dtype", names)
    require_same(key.device, value.device, "device", names)
    require_same(key.shape[1], value.shape[1], "number of KV heads", names)
    return views


def mla_kv_views(kv_cache: torch.Tensor, kv_lora_rank: int, name: str = "kv_cache") -> KVViews:
    """View an MLA cache canonically: one KV head, a row as key, and its first ``kv_lora_rank`` entries as value.

    This is the ``kv_cache`` argument of FlashInfer's ``trtllm_batch_decode_with_kv_cache_mla``.

    Args:
        kv_cache: [pages, page_size, kv_lora_rank + rope_dim] or [pages, 1, page_size, kv_lora_rank + rope_dim].
        kv_lora_rank: width of the compressed latent, 512 for DeepSeek.
        name: name of ``kv_cache`` in messages.

    Raises:
        TypeError: ``kv_cache`` is not a tensor.
        ValueError: the rank is wrong, dimension 1 of a 4-D cache is not 1, the last stride is not 1, or
            ``kv_lora_rank`` is outside 1..row width.

    >>> cache = torch.empty(10, 64, 576)
    >>> key, value = mla_kv_views(cache, 512)
    >>> tuple(key.shape), tuple(value.shape), key.data_ptr() == value.data_ptr()
    ((10, 1, 64, 576), (10, 1, 64, 512), True)
    """
    require_tensor(kv_cache, name)
    if kv_cache.dim() not in (3, 4) or (kv_cache.dim() == 4 and kv_cache.shape[1] != 1):
        shape = tuple(kv_cache.shape)
        raise ValueError(f"{name} must be [pages, page_size, width] or [pages, 1, page_size, width], got shape {shape}")
    require_unit_last_stride(kv_cache, name)
    key = kv_cache if kv_cache.dim() == 4 else kv_cache.unsqueeze(1)
    if not 1 <= kv_lora_rank <= key.shape[-1]:
        raise ValueError(f"kv_lora_rank must be in 1..{key.shape[-1]}, the width of {name}, got {kv_lora_rank}")
    return KVViews(key, key[..., :kv_lora_rank])
