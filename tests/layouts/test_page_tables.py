"""Page tables, followed from table entry to token by brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import paged_kv_views, shared_page_table, split_page_table

TABLE_TYPES = pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])


@TABLE_TYPES
@given(batch=st.integers(0, 4), width=st.integers(0, 5), pad=st.integers(0, 3))
def test_shared_is_the_callers_table(dtype, batch, width, pad):
    table = torch.zeros(batch, width + pad, dtype=dtype)[:, :width]
    result = shared_page_table(table, batch)
    assert result.key is table
    assert result.value is table


@TABLE_TYPES
@given(batch=st.integers(1, 4), width=st.integers(1, 5), pad=st.integers(0, 3))
def test_split_addresses(dtype, batch, width, pad):
    table = torch.zeros(batch, 2, width + pad, dtype=dtype)[:, :, :width]
    result = split_page_table(table, batch)
    for part, view in enumerate((result.key, result.value)):
        assert tuple(view.shape) == (batch, width)
        assert view.dtype == dtype
        for b in range(batch):
            for i in range(width):
                expected = table.data_ptr() + ((b * 2 + part) * (width + pad) + i) * 4
                assert view[b, i].data_ptr() == expected


def test_context_meaning_of_split_ids():
    """The context entry has its own meaning: one pool is K and V, with K of page p at block 2p and V at 2p + 1."""
    pages, page_size, heads, dim = 5, 4, 2, 3
    pool = torch.arange(pages * 2 * page_size * heads * dim).view(pages * 2, page_size, heads, dim)
    ids = torch.tensor([[3, 0, -1], [4, 1, 2]], dtype=torch.int32)
    table = split_page_table(torch.stack((2 * ids, 2 * ids + 1), dim=1), 2)
    views = paged_kv_views((pool, pool), "NHD", same_pages=False)
    flat = pool.reshape(-1)
    for b, length in ((0, 7), (1, 12)):
        for token in range(length):
            page = int(ids[b, token // page_size])
            for h in range(heads):
                for part, (view, rows) in enumerate(((views.key, table.key), (views.value, table.value))):
                    start = (((page * 2 + part) * page_size + token % page_size) * heads + h) * dim
                    found = view[int(rows[b, token // page_size]), h, token % page_size]
                    assert found.tolist() == flat[start : start + dim].tolist()


TWO = torch.zeros(3, 4, dtype=torch.int32)
THREE = torch.zeros(3, 2, 4, dtype=torch.int32)
BAD = {
    "no tensor": (lambda: shared_page_table([[1]], 1), TypeError, "block_tables must be a torch.Tensor, got list"),
    "int16": (lambda: shared_page_table(TWO.short(), 3), TypeError, "torch.uint32 or torch.int64, got torch.int16"),
    "3-D as shared": (lambda: shared_page_table(THREE, 3), ValueError, r"must be 2-D .*shared.*\(3, 2, 4\)"),
    "2-D as split": (lambda: split_page_table(TWO, 3), ValueError, r"must be 3-D .*separate.*\(3, 4\)"),
    "batch": (lambda: shared_page_table(TWO, 4), ValueError, r"batch_size = 4 rows.*\(3, 4\)"),
    "split batch": (lambda: split_page_table(THREE, 2), ValueError, "batch_size = 2 rows"),
    "stride": (lambda: shared_page_table(TWO[:, ::2], 3), ValueError, "last stride of 1"),
    "split stride": (lambda: split_page_table(THREE[:, :, ::2], 3), ValueError, "last stride of 1"),
    "dimension 1": (lambda: split_page_table(THREE[:, :1], 3), ValueError, "2 as dimension 1"),
    "name": (lambda: split_page_table(THREE[:, :1], 3, name="tables"), ValueError, "^tables must"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_one_page_wide_table_has_no_stride_to_judge():
    table = TWO[:, ::4]
    assert shared_page_table(table, 3).key is table
