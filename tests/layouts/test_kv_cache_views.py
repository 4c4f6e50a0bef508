"""Canonical KV views against addresses computed by hand from the documented shapes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import (
    KVLayout,
    canonical_view,
    mla_kv_views,
    paged_kv_views,
    ragged_kv_views,
    ragged_view,
    separate_kv_views,
)

SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
LAYOUTS = st.sampled_from(["HND", "NHD"])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])


def page_shape(layout, heads, page_size, dim):
    return (heads, page_size, dim) if layout == "HND" else (page_size, heads, dim)


def dense_offset(layout, heads, page_size, dim, head, token, d):
    """Return the offset in elements from the start of a dense page."""
    if layout == "HND":
        return (head * page_size + token) * dim + d
    return (token * heads + head) * dim + d


def assert_addresses(view, base, expected_shape, offset):
    """Check that every element of ``view`` is ``offset(p, h, t, d)`` elements after address ``base``."""
    assert tuple(view.shape) == expected_shape
    for index in itertools.product(*map(range, expected_shape)):
        assert view[index].data_ptr() == base + offset(*index) * view.element_size(), index


@given(SIZES, LAYOUTS, DTYPES, st.integers(1, 2))
def test_stacked(sizes, layout, dtype, parts):
    pages, heads, page_size, dim = sizes
    cache = torch.empty(pages, parts, *page_shape(layout, heads, page_size, dim), dtype=dtype)
    views = paged_kv_views(cache, layout)
    block = heads * page_size * dim
    for part, view in ((0, views.key), (parts - 1, views.value)):
        assert_addresses(
            view,
            cache.data_ptr(),
            (pages, heads, page_size, dim),
            lambda p, h, t, d, part=part: (
                (p * parts + part) * block + dense_offset(layout, heads, page_size, dim, h, t, d)
            ),
        )
    assert (views.key is views.value) == (parts == 1)


@given(SIZES, LAYOUTS, DTYPES, st.sampled_from([tuple, list]), st.integers(1, 4))
def test_pair_with_independent_dims(sizes, layout, dtype, container, value_dim):
    pages, heads, page_size, dim = sizes
    caches = [torch.empty(pages, *page_shape(layout, heads, page_size, d), dtype=dtype) for d in (dim, value_dim)]
    for view, cache, width in zip(paged_kv_views(container(caches), layout), caches, (dim, value_dim), strict=True):
        assert_addresses(
            view,
            cache.data_ptr(),
            (pages, heads, page_size, width),
            lambda p, h, t, d, width=width: (
                p * heads * page_size * width + dense_offset(layout, heads, page_size, width, h, t, d)
            ),
        )


@given(SIZES, LAYOUTS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_strides_are_kept_separately(sizes, layout, pad_page, pad_row, pad_dim):
    """K is padded in every dimension and starts inside its buffer, V is dense: neither's strides reach the other."""
    pages, heads, page_size, dim = sizes
    outer, inner, _ = page_shape(layout, heads, page_size, dim)
    row = dim + pad_dim
    column = (inner + pad_row) * row
    page = outer * column + pad_page
    k_cache = torch.empty(pages * page + 7).as_strided((pages, outer, inner, dim), (page, column, row, 1), 7)
    v_cache = torch.empty(pages, outer, inner, dim)
    key, value = separate_kv_views(k_cache, v_cache, layout)

    def padded(p, h, t, d):
        first, second = (h, t) if layout == "HND" else (t, h)
        return p * page + first * column + second * row + d

    shape = (pages, heads, page_size, dim)
    assert_addresses(key, k_cache.data_ptr(), shape, padded)
    assert_addresses(
        value,
        v_cache.data_ptr(),
        shape,
        lambda p, h, t, d: p * heads * page_size * dim + dense_offset(layout, heads, page_size, dim, h, t, d),
    )


def test_cudnn_nhd_storage_seen_as_hnd():
    """K and V interleaved per page in NHD storage, passed as HND views, as cuDNN's callers do."""
    pages, heads, page_size, dim = 3, 2, 4, 5
    storage = torch.empty(pages, 2, page_size, heads, dim)
    k_cache, v_cache = (storage[:, part].transpose(1, 2) for part in (0, 1))
    views = separate_kv_views(k_cache, v_cache, KVLayout.HND)
    for part, view in enumerate(views):
        assert_addresses(
            view,
            storage.data_ptr(),
            (pages, heads, page_size, dim),
            lambda p, h, t, d, part=part: (((p * 2 + part) * page_size + t) * heads + h) * dim + d,
        )


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), DTYPES, st.integers(1, 3))
def test_ragged(tokens, heads, dim, dtype, parts):
    packed = torch.empty(tokens, parts, heads, dim, dtype=dtype)
    part = parts - 1
    assert_addresses(
        ragged_view(packed[:, part]),
        packed.data_ptr(),
        (1, heads, tokens, dim),
        lambda p, h, t, d: ((t * parts + part) * heads + h) * dim + d,
    )


def test_ragged_pair():
    k, v = torch.empty(7, 2, 6), torch.empty(9, 2, 4)
    views = ragged_kv_views(k, v)
    assert_addresses(views.key, k.data_ptr(), (1, 2, 7, 6), lambda p, h, t, d: (t * 2 + h) * 6 + d)
    assert_addresses(views.value, v.data_ptr(), (1, 2, 9, 4), lambda p, h, t, d: (t * 2 + h) * 4 + d)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.booleans())
def test_mla(pages, page_size, rank, rope, with_head):
    width = rank + rope
    cache = torch.empty(pages, page_size, width)
    key, value = mla_kv_views(cache.unsqueeze(1) if with_head else cache, rank)
    for view, columns in ((key, width), (value, rank)):
        assert_addresses(
            view,
            cache.data_ptr(),
            (pages, 1, page_size, columns),
            lambda p, h, t, d: (p * page_size + t) * width + d,
        )


def test_size_one_last_dimension_has_no_stride_to_judge():
    view = canonical_view(torch.empty(2, 3, 4, 5)[..., :1], "HND")
    assert tuple(view.shape) == (2, 3, 4, 1)


FOUR = torch.empty(2, 3, 4, 8)
BAD = {
    "unknown layout": (lambda: paged_kv_views(FOUR, "hnd"), ValueError, "kv_layout must be one of 'HND', 'NHD'.*'hnd'"),
    "layout type": (lambda: paged_kv_views(FOUR, 3), TypeError, "kv_layout must be a str or KVLayout, got int"),
    "no tensor": (lambda: paged_kv_views(3, "HND"), TypeError, "kv_cache must be .*got int"),
    "pair of none": (lambda: paged_kv_views((None, FOUR), "HND"), TypeError, r"kv_cache\[0\] must be a torch.Tensor"),
    "three caches": (lambda: paged_kv_views((FOUR,) * 3, "HND"), ValueError, "kv_cache must have 2 elements.*got 3"),
    "stacked rank": (
        lambda: paged_kv_views(FOUR, "NHD"),
        ValueError,
        r"kv_cache must be 5-D \[pages, 1 or 2, page_size",
    ),
    "stacked dim 1": (lambda: paged_kv_views(FOUR[:, None].expand(2, 3, 3, 4, 8), "HND"), ValueError, "1 or 2 as dim"),
    "stacked stride": (lambda: paged_kv_views(torch.empty(2, 2, 3, 4, 8)[..., ::2], "HND"), ValueError, "last stride"),
    "pair rank": (lambda: paged_kv_views((FOUR, FOUR[0]), "HND"), ValueError, r"kv_cache\[1\] must be 4-D"),
    "pair stride": (lambda: paged_kv_views((FOUR, FOUR.mT), "HND"), ValueError, r"kv_cache\[1\] .*last stride of 1"),
    "dtype": (lambda: separate_kv_views(FOUR, FOUR.half(), "HND"), TypeError, "k_cache and v_cache .*dtype.*float16"),
    "heads": (lambda: separate_kv_views(FOUR, FOUR[:, :2], "HND"), ValueError, "number of KV heads, got 3 and 2"),
    "heads NHD": (
        lambda: separate_kv_views(FOUR, FOUR[:, :, :2], "NHD"),
        ValueError,
        "number of KV heads, got 4 and 2",
    ),
    "page size": (lambda: separate_kv_views(FOUR, FOUR[:, :, :2], "HND"), ValueError, "page size, got 4 and 2"),
    "pages": (lambda: separate_kv_views(FOUR, FOUR[:1], "HND"), ValueError, "number of pages, got 2 and 1"),
    "device": (lambda: separate_kv_views(FOUR, FOUR.to("meta"), "HND"), ValueError, "same device, got cpu and meta"),
    "ragged rank": (lambda: ragged_kv_views(FOUR, FOUR), ValueError, "k_cache must be 3-D"),
    "ragged stride": (lambda: ragged_view(FOUR[0].mT), ValueError, "tokens must have a last stride of 1"),
    "ragged dtype": (lambda: ragged_kv_views(FOUR[0], FOUR[0].half()), TypeError, "same dtype"),
    "ragged heads": (lambda: ragged_kv_views(FOUR[0], FOUR[0, :, :1]), ValueError, "number of KV heads, got 4 and 1"),
    "mla rank": (lambda: mla_kv_views(FOUR[0, 0], 4), ValueError, r"kv_cache must be \[pages, page_size, width\]"),
    "mla heads": (lambda: mla_kv_views(FOUR, 4), ValueError, r"got shape \(2, 3, 4, 8\)"),
    "mla wide": (lambda: mla_kv_views(FOUR[0], 9), ValueError, r"kv_lora_rank must be in 1\.\.8.*got 9"),
    "mla zero": (lambda: mla_kv_views(FOUR[0], 0), ValueError, "kv_lora_rank"),
    "mla stride": (lambda: mla_kv_views(FOUR[0].mT, 2), ValueError, "last stride"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_separate_page_counts_on_request():
    views = paged_kv_views((FOUR, FOUR[:1]), "HND", same_pages=False)
    assert views.key.shape[0] == 2
    assert views.value.shape[0] == 1
