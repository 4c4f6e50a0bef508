"""Block scales of NVFP4 KV caches: one float8_e4m3fn scale for 16 consecutive head-dim elements of a token.

Two layouts have the same shape and dtype and differ only by name:

* *linear*: the scale of token t, block s is at [t, s]. K everywhere, and V in the decode functions.
* *interleaved*: V in ``trtllm_batch_context_with_kv_cache``, unless its ``v_scale_layout`` is "linear". Each
  (page, head) tile has ``page_size`` tokens by S = head_dim / 16 blocks. The four scales of a block for four
  consecutive tokens are neighbours. The scale of token t, block s is at row 4 * (t // 4) + s // (S / 4), column
  (s % (S / 4)) * 4 + t % 4.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

from hopwell.kernels.elements import INTERLEAVED_TOKENS as _GROUP
from hopwell.layouts._checks import (
    SCALE_TYPES,
    require_dtype,
    require_member,
    require_multiple,
    require_tensor,
)
from hopwell.layouts.kv_cache import KVLayout, KVViews, canonical_view, paged_kv_views

NVFP4_BLOCK = 16  # elements that share a block scale


class VScaleLayout(enum.Enum):
    """Order of a V cache's block scales inside a page, see the top of this module."""

    LINEAR = "linear"  # decode, and trtllm_batch_context_with_kv_cache on request
    INTERLEAVED = "interleaved"  # trtllm_batch_context_with_kv_cache by default


def block_scale_views(
    block_scales: torch.Tensor | Sequence[torch.Tensor],
    kv_layout: KVLayout | str,
    caches: KVViews,
    *,
    same_pages: bool = True,
    name: str = "kv_block_scales",
) -> KVViews:
    """View the block scales of an NVFP4 cache as [pages, kv_heads, page_size, head_dim / 16].

    These are ``kv_block_scales`` of FlashInfer's ``trtllm_batch_context_with_kv_cache`` and ``kv_cache_sf`` of its
    ``xqa_batch_decode_with_kv_cache``. Views keep the order inside a V page: interleaved scales stay interleaved.

    Args:
        block_scales: a pair (key scales, value scales) of 4-D tensors, or one tensor stacked on dimension 1,
            [pages, 2, *page]; float8_e4m3fn, or uint8 holding the same bits. Strides are independent of the data's.
        kv_layout: "HND" or "NHD".
        caches: canonical views of the data, uint8 [pages, kv_heads, page_size, head_dim / 2].
        same_pages: as in :func:`~hopwell.layouts.paged_kv_views`.
        name: name of ``block_scales`` in messages.

    Returns:
        float8_e4m3fn views of the caller's storage.

    Raises:
        TypeError: a Python type or dtype is wrong.
        ValueError: a shape does not belong to ``caches``, dimension 1 of a stacked tensor is not 2, or a last stride is
            not 1.

    >>> caches = paged_kv_views(torch.empty(10, 2, 8, 16, 64, dtype=torch.uint8), "HND")
    >>> scales = block_scale_views(torch.empty(10, 2, 8, 16, 8, dtype=torch.float8_e4m3fn), "HND", caches)
    >>> tuple(scales.key.shape)
    (10, 8, 16, 8)
    """
    views = paged_kv_views(block_scales, kv_layout, same_pages=same_pages, name=name)
    if isinstance(block_scales, torch.Tensor) and block_scales.shape[1] != 2:
        raise ValueError(f"{name} must have 2 as dimension 1 (K, V), got shape {tuple(block_scales.shape)}")
    for kind, scales, data in zip(("key", "value"), views, caches, strict=True):
        require_dtype(scales, SCALE_TYPES, f"{name} ({kind})")
        require_dtype(data, (torch.uint8,), f"the {kind} cache that {name} belongs to")
        expected = (*data.shape[:3], data.shape[3] * 2 // NVFP4_BLOCK)
        if scales.shape != expected:
            hint = ", which is the other kv_layout" if scales.transpose(1, 2).shape == expected else ""
            raise ValueError(
                f"{name} ({kind}) must be {expected} as [pages, kv_heads, page_size, head_dim / 16], "
                f"got {tuple(scales.shape)}{hint}"
            )
    return KVViews(views.key.view(torch.float8_e4m3fn), views.value.view(torch.float8_e4m3fn))


def interleaved_v_scale_position(token: Any, block: Any, blocks: int) -> tuple[Any, Any]:
    """Return the position of an interleaved V scale in a page's [page_size, ``blocks``] tile.

    The function is plain arithmetic: integers, tensors and values of a kernel being traced all work.

    Args:
        token: index in the page.
        block: index of the 16-element block in the head dimension.
        blocks: blocks per token, head_dim / 16, a multiple of 4.

    Returns:
        (row, column).

    Raises:
        ValueError: ``blocks`` is not a multiple of 4.

    >>> interleaved_v_scale_position(5, 3, 8)
    (5, 5)
    """
    require_multiple(blocks, _GROUP, "blocks (head_dim / 16)")
    quarter = blocks // _GROUP
    row = token // _GROUP * _GROUP + block // quarter
    column = block % quarter * _GROUP + token % _GROUP
    return row, column


def interleaved_v_scale_view(interleaved: torch.Tensor, kv_layout: KVLayout | str) -> torch.Tensor:
    """View interleaved V scales in logical order, to read and write tokens in place.

    Args:
        interleaved: [pages, kv_heads, page_size, S] (HND) or [pages, page_size, kv_heads, S] (NHD), S = head_dim / 16;
            last stride 1, page_size and S multiples of 4.
        kv_layout: "HND" or "NHD".

    Returns:
        A view [pages, kv_heads, page_size / 4, 4, 4, S / 4]: the scales of page p, head h, token t, blocks 0..S - 1 are
        ``view[p, h, t // 4, t % 4]``, row by row.

    Raises:
        TypeError: ``interleaved`` is not a tensor, or has another dtype.
        ValueError: the rank is wrong, ``page_size`` or S is not a multiple of 4, or the last stride is not 1.

    >>> scales = torch.zeros(1, 1, 4, 8, dtype=torch.uint8)
    >>> interleaved_v_scale_view(scales, "HND")[0, 0, 0, 1] = torch.arange(8, dtype=torch.uint8).view(4, 2)
    >>> scales[0, 0].tolist()[1]  # token 1: blocks 2 and 3 are in row 1
    [0, 2, 0, 0, 0, 3, 0, 0]
    """
    view = canonical_view(interleaved, kv_layout, "interleaved")
    require_dtype(view, SCALE_TYPES, "interleaved")
    _, _, page_size, blocks = view.shape
    require_multiple(page_size, _GROUP, "interleaved's page_size")
    require_multiple(blocks, _GROUP, "interleaved's last dimension (head_dim / 16)")
    # Rows are (token group, block quarter), columns (block in quarter, token in group).
    tiles = view.unflatten(2, (page_size // _GROUP, _GROUP)).unflatten(4, (blocks // _GROUP, _GROUP))
    return tiles.permute(0, 1, 2, 5, 3, 4)


def interleave_v_scales(linear: torch.Tensor, kv_layout: KVLayout | str) -> torch.Tensor:
    """Permute linear V scales into the interleaved layout of ``trtllm_batch_context_with_kv_cache``.

    Args:
        linear: [pages, kv_heads, page_size, S] (HND) or [pages, page_size, kv_heads, S] (NHD), S = head_dim / 16, any
            strides; float8_e4m3fn or uint8; page_size and S multiples of 4.
        kv_layout: "HND" or "NHD".

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: as :func:`interleaved_v_scale_view`.

    >>> linear = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)  # 4 tokens, 4 blocks
    >>> interleave_v_scales(linear, "HND")[0, 0].tolist()
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    """
    require_tensor(linear, "linear")
    require_dtype(linear, SCALE_TYPES, "linear")
    interleaved = torch.empty(linear.shape, dtype=linear.dtype, device=linear.device)
    target = interleaved_v_scale_view(interleaved.view(torch.uint8), kv_layout)
    source = _hnd(linear, kv_layout)
    target.copy_(source.view(torch.uint8).reshape(target.shape))
    return interleaved


def deinterleave_v_scales(interleaved: torch.Tensor, kv_layout: KVLayout | str) -> torch.Tensor:
    """Permute interleaved V scales back into the linear layout: the inverse of :func:`interleave_v_scales`.

    Args:
        interleaved: as in :func:`interleaved_v_scale_view`.
        kv_layout: "HND" or "NHD".

    Returns:
        A new contiguous tensor of the same shape and dtype.

    Raises:
        TypeError, ValueError: as :func:`interleaved_v_scale_view`.

    >>> linear = torch.arange(64, dtype=torch.uint8).view(1, 8, 1, 8)
    >>> torch.equal(deinterleave_v_scales(interleave_v_scales(linear, "NHD"), "NHD"), linear)
    True
    """
    source = interleaved_v_scale_view(interleaved, kv_layout)
    linear = torch.empty(interleaved.shape, dtype=interleaved.dtype, device=interleaved.device)
    target = _hnd(linear, kv_layout)
    target.view(torch.uint8).copy_(source.view(torch.uint8).reshape(target.shape))
    return linear


def _hnd(scales: torch.Tensor, kv_layout: KVLayout | str) -> torch.Tensor:
    """Return dimensions in HND order, for any strides, which :func:`canonical_view` would restrict."""
    return scales if require_member(KVLayout, kv_layout, "kv_layout") is KVLayout.HND else scales.transpose(1, 2)
