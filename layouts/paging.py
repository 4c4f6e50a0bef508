"""Page tables: the pages of the cache that hold the tokens of a request.

Page i of request b holds its tokens [i * page_size, (i + 1) * page_size). Entries at or past ceil(kv_len / page_size)
are padding that no kernel reads, so -1, 0 or another request's page are all valid there.
"""

from __future__ import annotations

import torch

from hopwell.kernels.problem import PageTable
from hopwell.layouts._checks import INDEX_TYPES, require_dtype, require_rank, require_unit_last_stride


def _check_table(table: torch.Tensor, batch_size: int, name: str) -> None:
    require_dtype(table, INDEX_TYPES, name)
    require_unit_last_stride(table, name)
    if table.shape[0] != batch_size:
        raise ValueError(f"{name} must have batch_size = {batch_size} rows, got shape {tuple(table.shape)}")


def shared_page_table(block_tables: torch.Tensor, batch_size: int, name: str = "block_tables") -> PageTable:
    """Read a 2-D table of ids shared by K and V.

    Every paged entry point takes this form; FlashInfer's ``trtllm_batch_context_with_kv_cache`` takes it if
    ``uses_shared_paged_kv_idx`` is True.

    Args:
        block_tables: int32, uint32 or int64 [batch_size, pages_per_request], last stride 1, any row stride.
        batch_size: number of requests.
        name: name of ``block_tables`` in messages.

    Returns:
        A table whose ``key`` and ``value`` are ``block_tables`` itself.

    Raises:
        TypeError: ``block_tables`` is not a tensor, or has another dtype.
        ValueError: the rank or the number of rows is wrong, or the last stride is not 1.

    >>> table = shared_page_table(torch.tensor([[4, 0, -1], [2, 1, 3]], dtype=torch.int32), 2)
    >>> table.key is table.value
    True
    """
    require_rank(block_tables, 2, name, "[batch_size, pages_per_request] (ids shared by K and V)")
    _check_table(block_tables, batch_size, name)
    return PageTable(block_tables, block_tables)


def split_page_table(block_tables: torch.Tensor, batch_size: int, name: str = "block_tables") -> PageTable:
    """Split a 3-D table with separate rows for K and V, as views.

    Two entry points take this shape with different meanings of its ids. Each meaning needs its own views of the cache:

    * FlashInfer's ``trtllm_batch_context_with_kv_cache`` with ``uses_shared_paged_kv_idx=False``: row 0 indexes the
      key tensor's pages and row 1 the value tensor's. Pair it with
      ``paged_kv_views(kv_cache, kv_layout, same_pages=False)``.
    * ``trtllm_fmha_v2_prefill`` with a (K, V) pair: both rows count blocks from K's base address. Pair it with
      :func:`~hopwell.layouts.block_offset_views`.

    Args:
        block_tables: int32, uint32 or int64 [batch_size, 2, pages_per_request], last stride 1.
        batch_size: number of requests.
        name: name of ``block_tables`` in messages.

    Raises:
        TypeError: ``block_tables`` is not a tensor, or has another dtype.
        ValueError: the rank or the number of rows is wrong, dimension 1 is not 2, or the last stride is not 1.

    >>> tables = torch.tensor([[[0, 2], [1, 3]]], dtype=torch.int32)
    >>> table = split_page_table(tables, 1)
    >>> table.key.tolist(), table.value.tolist()
    ([[0, 2]], [[1, 3]])
    """
    require_rank(block_tables, 3, name, "[batch_size, 2, pages_per_request] (separate ids for K and V)")
    _check_table(block_tables, batch_size, name)
    if block_tables.shape[1] != 2:
        raise ValueError(f"{name} must have 2 as dimension 1 (K, V), got shape {tuple(block_tables.shape)}")
    return PageTable(*block_tables.unbind(1))
