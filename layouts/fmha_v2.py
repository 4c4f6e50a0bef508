"""The five input layouts of FlashInfer's ``trtllm_fmha_v2_prefill`` as canonical views.

| layout           | qkv                                                              |
|------------------|------------------------------------------------------------------|
| PACKED_QKV       | [tokens, 3, heads, head_dim]                                     |
| CONTIGUOUS_Q_KV  | (Q, [kv_tokens, 2, kv_heads, head_dim])                          |
| SEPARATE_Q_K_V   | (Q, [kv_tokens, kv_heads, head_dim], the same for V)             |
| Q_PAGED_KV_NHD   | (Q, [pages, 2, page_size, kv_heads, head_dim]) or (Q, (K, V))    |
| Q_PAGED_KV_HND   | (Q, [pages, 2, kv_heads, page_size, head_dim]) or (Q, (K, V))    |

Q is [tokens, heads, head_dim]. Strides except the last are free, except in the (K, V) form.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hopwell.kernels.problem import PageTable
from hopwell.layouts._checks import require_member, require_pair, require_rank, require_same, require_unit_last_stride
from hopwell.layouts.kv_cache import (
    KVLayout,
    KVViews,
    canonical_view,
    paged_kv_views,
    ragged_kv_views,
    separate_kv_views,
)
from hopwell.layouts.paging import shared_page_table, split_page_table


class FmhaV2Layout(enum.Enum):
    """Values of ``trtllm_fmha_v2_prefill``'s ``input_layout``, in exact spelling."""

    PACKED_QKV = "PACKED_QKV"
    CONTIGUOUS_Q_KV = "CONTIGUOUS_Q_KV"
    SEPARATE_Q_K_V = "SEPARATE_Q_K_V"
    Q_PAGED_KV_NHD = "Q_PAGED_KV_NHD"
    Q_PAGED_KV_HND = "Q_PAGED_KV_HND"

    @property
    def kv_layout(self) -> KVLayout | None:
        """Layout of pages, or None if K and V are not paged."""
        return _PAGED.get(self)


_PAGED = {FmhaV2Layout.Q_PAGED_KV_NHD: KVLayout.NHD, FmhaV2Layout.Q_PAGED_KV_HND: KVLayout.HND}


@dataclass(frozen=True)
class FmhaV2Inputs:
    """``query`` [tokens, heads, head_dim], canonical ``key`` and ``value``, and ``page_table`` if they are paged."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    page_table: PageTable | None = None


def fmha_v2_inputs(
    qkv: torch.Tensor | Sequence[Any],
    input_layout: FmhaV2Layout | str,
    batch_size: int,
    block_tables: torch.Tensor | None = None,
) -> FmhaV2Inputs:
    """Return canonical views of ``trtllm_fmha_v2_prefill``'s inputs in any of its five layouts.

    Args:
        qkv: see the table at the top of this module; all with a unit last stride.
        input_layout: one of the five names.
        batch_size: number of requests.
        block_tables: for the paged layouts, int32, uint32 or int64. [batch_size, pages_per_request] with a stacked
            pool. [batch_size, 2, pages_per_request] with a (K, V) pair; both rows count blocks from K's base address
            (see :func:`block_offset_views`). None for other layouts.

    Returns:
        Views of the caller's storage.

    Raises:
        TypeError: a Python type is wrong, or K and V have different dtypes.
        ValueError: the layout is unknown, a shape is wrong, or a last stride is not 1. Also if ``block_tables`` is
            missing, given without pages, or in the wrong form.

    >>> packed = torch.empty(100, 3, 8, 64, dtype=torch.bfloat16)
    >>> inputs = fmha_v2_inputs(packed, "PACKED_QKV", batch_size=2)
    >>> tuple(inputs.query.shape), tuple(inputs.key.shape), inputs.page_table
    ((100, 8, 64), (1, 8, 100, 64), None)
    """
    layout = require_member(FmhaV2Layout, input_layout, "input_layout")
    kv_layout = layout.kv_layout
    if (block_tables is None) != (kv_layout is None):
        rule = "takes no block_tables" if kv_layout is None else "requires block_tables"
        got = "None" if block_tables is None else type(block_tables).__name__
        raise ValueError(f"input_layout {layout.value} {rule}, got block_tables = {got}")

    table = None
    query_name = "qkv[0]"
    if kv_layout is not None and block_tables is not None:
        query, pool = _unpack(qkv, layout, ("Q", "KV pool"))
        views, table = _paged(pool, kv_layout, batch_size, block_tables)
    elif layout is FmhaV2Layout.PACKED_QKV:
        query, key, value = _unbind(qkv, 3, "qkv", "[tokens, 3, heads, head_dim]")
        query_name = "qkv[:, 0]"
        views = ragged_kv_views(key, value, ("qkv[:, 1]", "qkv[:, 2]"))
    elif layout is FmhaV2Layout.CONTIGUOUS_Q_KV:
        query, kv = _unpack(qkv, layout, ("Q", "KV"))
        key, value = _unbind(kv, 2, "qkv[1]", "[kv_tokens, 2, kv_heads, head_dim]")
        views = ragged_kv_views(key, value, ("qkv[1][:, 0]", "qkv[1][:, 1]"))
    else:
        query, key, value = _unpack(qkv, layout, ("Q", "K", "V"))
        views = ragged_kv_views(key, value, ("qkv[1]", "qkv[2]"))
        require_same(key.shape[0], value.shape[0], "number of tokens", ("qkv[1]", "qkv[2]"))

    require_rank(query, 3, query_name, "[tokens, heads, head_dim]")
    require_unit_last_stride(query, query_name)
    require_same(query.shape[-1], views.key.shape[-1], "head dimension", (query_name, "the key in qkv"))
    return FmhaV2Inputs(query, views.key, views.value, table)


def _unpack(qkv: Any, layout: FmhaV2Layout, parts: tuple[str, ...]) -> Sequence[Any]:
    form = f"({', '.join(parts)})"
    if not isinstance(qkv, (tuple, list)):
        raise TypeError(f"qkv must be a tuple {form} for input_layout {layout.value}, got {type(qkv).__name__}")
    if len(qkv) != len(parts):
        raise ValueError(f"qkv must be a tuple {form} for input_layout {layout.value}, got {len(qkv)} elements")
    return qkv


def _unbind(tensor: Any, count: int, name: str, shape: str) -> tuple[torch.Tensor, ...]:
    require_rank(tensor, 4, name, shape)
    if tensor.shape[1] != count:
        raise ValueError(f"{name} must be {shape}, got shape {tuple(tensor.shape)}")
    return tensor.unbind(1)


def _paged(pool: Any, kv_layout: KVLayout, batch_size: int, block_tables: torch.Tensor) -> tuple[KVViews, PageTable]:
    if isinstance(pool, (tuple, list)):
        k_cache, v_cache = require_pair(pool, "qkv[1]")
        table = split_page_table(block_tables, batch_size)
        return block_offset_views(k_cache, v_cache, kv_layout, names=("qkv[1][0]", "qkv[1][1]")), table
    views = paged_kv_views(pool, kv_layout, name="qkv[1]")
    if pool.shape[1] != 2:
        raise ValueError(f"qkv[1] must have 2 as dimension 1 (K, V), got shape {tuple(pool.shape)}")
    return views, shared_page_table(block_tables, batch_size)


def block_offset(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KVLayout | str,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> int:
    """Return the blocks from K's base address to V's: page i of ``v_cache`` is block ``i + block_offset`` of the table.

    ``trtllm_fmha_v2_prefill`` with a (K, V) pair addresses both from K. A block is one page of one of them, kv_heads *
    page_size * head_dim elements. Both must therefore be contiguous, and V must lie a whole number of blocks behind K
    in one allocation.

    Args:
        k_cache: contiguous 4-D tensor.
        v_cache: the same dtype and page shape, in the same storage. The number of pages may differ.
        kv_layout: "HND" or "NHD".
        names: names of the two in messages.

    Raises:
        TypeError: an argument is not a tensor, or the dtypes differ.
        ValueError: a tensor is not contiguous or has no elements, or page shapes or storages differ. Also if V does not
            lie a positive whole number of blocks behind K.

    >>> fused = torch.empty(2, 10, 16, 8, 128)
    >>> block_offset(fused[0], fused[1], "NHD")
    10
    """
    separate_kv_views(k_cache, v_cache, kv_layout, same_pages=False, names=names)
    require_same(k_cache.shape[3], v_cache.shape[3], "head dimension", names)
    for cache, name in zip((k_cache, v_cache), names, strict=True):
        if not cache.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous (block_tables counts whole blocks), got strides {cache.stride()}"
            )
    block = k_cache[:1].numel()
    if block == 0:
        raise ValueError(f"{names[0]} must have pages with elements in them, got shape {tuple(k_cache.shape)}")
    if k_cache.untyped_storage().data_ptr() != v_cache.untyped_storage().data_ptr():
        raise ValueError(
            f"{names[1]} must be in the same storage as {names[0]}: block_tables [batch_size, 2, pages_per_request] "
            "counts blocks from K's base address. Slice both out of one tensor, or pass a stacked pool [pages, 2, ...]"
        )
    distance = int(v_cache.storage_offset()) - int(k_cache.storage_offset())
    if distance <= 0 or distance % block:
        raise ValueError(
            f"{names[1]} must start a positive multiple of {block} elements (one block) behind {names[0]}, "
            f"got {distance}"
        )
    return distance // block


def block_offset_views(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: KVLayout | str,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> KVViews:
    """View a (K, V) pair for the 3-D tables of ``trtllm_fmha_v2_prefill``: all blocks from K's base to V's end.

    A table split by :func:`~hopwell.layouts.split_page_table` needs no further arithmetic with these views: its value
    ids already include the blocks between K and V. Key and value are the same view, because both rows of the table
    count from the same base.

    Args:
        k_cache: as in :func:`block_offset`.
        v_cache: as in :func:`block_offset`.
        kv_layout: "HND" or "NHD".
        names: names of the two in messages.

    Returns:
        Canonical views of (``block_offset`` + pages of V) blocks.

    Raises:
        TypeError, ValueError: as :func:`block_offset`.

    >>> fused = torch.arange(2 * 3 * 4 * 1 * 8).view(2, 3, 4, 1, 8)  # NHD: 3 pages of 4 tokens
    >>> views = block_offset_views(fused[0], fused[1], "NHD")
    >>> tuple(views.value.shape), torch.equal(views.value[3 + 1], fused[1, 1].transpose(0, 1))
    ((6, 1, 4, 8), True)
    """
    blocks = block_offset(k_cache, v_cache, kv_layout, names) + v_cache.shape[0]
    # The dense strides are written out, because strides of size-1 dimensions are arbitrary even in contiguous tensors.
    _, rows, columns, width = k_cache.shape
    size, stride = (blocks, rows, columns, width), (rows * columns * width, columns * width, width, 1)
    view = canonical_view(k_cache.as_strided(size, stride), kv_layout)
    return KVViews(view, view)
