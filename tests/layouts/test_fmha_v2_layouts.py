"""FMHAv2's five input layouts: every logical element is at the place of the documented shape."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import FmhaV2Layout, KVLayout, block_offset, block_offset_views, fmha_v2_inputs

SMALL = st.integers(1, 3)
PAGED = {"Q_PAGED_KV_NHD": "NHD", "Q_PAGED_KV_HND": "HND"}


def counting(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)


def assert_elements(view, base, shape, value):
    """Check shape, zero copy and every element."""
    assert tuple(view.shape) == shape
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    for index in itertools.product(*map(range, shape)):
        assert int(view[index]) == value(*index), index


@given(tokens=SMALL, heads=SMALL, dim=SMALL)
def test_packed_qkv(tokens, heads, dim):
    qkv = counting(tokens, 3, heads, dim)
    inputs = fmha_v2_inputs(qkv, "PACKED_QKV", 1)

    def at(part, token, head, d):
        return ((token * 3 + part) * heads + head) * dim + d

    assert_elements(inputs.query, qkv, (tokens, heads, dim), lambda t, h, d: at(0, t, h, d))
    assert_elements(inputs.key, qkv, (1, heads, tokens, dim), lambda _, h, t, d: at(1, t, h, d))
    assert_elements(inputs.value, qkv, (1, heads, tokens, dim), lambda _, h, t, d: at(2, t, h, d))
    assert inputs.page_table is None


@given(tokens=SMALL, kv_tokens=SMALL, heads=SMALL, kv_heads=SMALL, dim=SMALL)
def test_contiguous_q_kv(tokens, kv_tokens, heads, kv_heads, dim):
    q, kv = counting(tokens, heads, dim), counting(kv_tokens, 2, kv_heads, dim)
    inputs = fmha_v2_inputs((q, kv), FmhaV2Layout.CONTIGUOUS_Q_KV, 1)
    assert inputs.query is q
    for part, view in enumerate((inputs.key, inputs.value)):
        assert_elements(
            view,
            kv,
            (1, kv_heads, kv_tokens, dim),
            lambda _, h, t, d, part=part: ((t * 2 + part) * kv_heads + h) * dim + d,
        )
    assert inputs.page_table is None


@given(tokens=SMALL, kv_tokens=SMALL, heads=SMALL, kv_heads=SMALL, dim=SMALL, value_dim=SMALL)
def test_separate_q_k_v(tokens, kv_tokens, heads, kv_heads, dim, value_dim):
    q, k, v = counting(tokens, heads, dim), counting(kv_tokens, kv_heads, dim), counting(kv_tokens, kv_heads, value_dim)
    inputs = fmha_v2_inputs([q, k, v], "SEPARATE_Q_K_V", 1)
    assert inputs.query is q
    for view, source, width in ((inputs.key, k, dim), (inputs.value, v, value_dim)):
        assert_elements(
            view,
            source,
            (1, kv_heads, kv_tokens, width),
            lambda _, h, t, d, width=width: (t * kv_heads + h) * width + d,
        )
    assert inputs.page_table is None


def page_shape(kv_layout, heads, page_size, dim):
    return (heads, page_size, dim) if kv_layout == "HND" else (page_size, heads, dim)


def in_page(kv_layout, heads, page_size, dim, h, t, d):
    return ((h * page_size + t) if kv_layout == "HND" else (t * heads + h)) * dim + d


@pytest.mark.parametrize("layout", PAGED)
@given(pages=SMALL, heads=SMALL, page_size=SMALL, dim=SMALL)
def test_stacked_pool(layout, pages, heads, page_size, dim):
    kv_layout = PAGED[layout]
    q, pool = counting(2, heads, dim), counting(pages, 2, *page_shape(kv_layout, heads, page_size, dim))
    tables = torch.zeros(1, pages, dtype=torch.int32)
    inputs = fmha_v2_inputs((q, pool), layout, 1, tables)
    assert inputs.query is q
    block = heads * page_size * dim
    for part, view in enumerate((inputs.key, inputs.value)):
        assert_elements(
            view,
            pool,
            (pages, heads, page_size, dim),
            lambda p, h, t, d, part=part: (p * 2 + part) * block + in_page(kv_layout, heads, page_size, dim, h, t, d),
        )
    assert inputs.page_table.key is tables
    assert inputs.page_table.value is tables


@pytest.mark.parametrize("layout", PAGED)
@given(
    pages=SMALL, v_pages=SMALL, heads=SMALL, page_size=SMALL, dim=SMALL, lead=st.integers(0, 9), gap=st.integers(0, 2)
)
def test_pair_counts_blocks_from_k(layout, pages, v_pages, heads, page_size, dim, lead, gap):
    """K starts ``lead`` elements into its storage. V, with other pages, starts ``pages + gap`` blocks after K."""
    kv_layout = PAGED[layout]
    block = heads * page_size * dim
    page = page_shape(kv_layout, heads, page_size, dim)
    delta = pages + gap
    storage = counting(lead + (delta + v_pages) * block)
    k_cache = storage[lead : lead + pages * block].view(pages, *page)
    v_cache = storage[lead + delta * block :].view(v_pages, *page)
    ids = torch.arange(max(pages, v_pages), dtype=torch.int32)[None]
    tables = torch.stack((ids % pages, ids % v_pages + delta), dim=1)
    inputs = fmha_v2_inputs((counting(2, heads, dim), (k_cache, v_cache)), layout, 1, tables)

    assert block_offset(k_cache, v_cache, kv_layout) == delta
    for part, (view, rows) in enumerate(((inputs.key, inputs.page_table.key), (inputs.value, inputs.page_table.value))):
        base = lead + part * delta * block
        assert_elements(
            view,
            storage,
            (delta + v_pages, heads, page_size, dim),
            lambda p, h, t, d: lead + p * block + in_page(kv_layout, heads, page_size, dim, h, t, d),
        )
        for i in range(ids.numel()):
            for h, t, d in itertools.product(range(heads), range(page_size), range(dim)):
                expected = (
                    base + i % (pages, v_pages)[part] * block + in_page(kv_layout, heads, page_size, dim, h, t, d)
                )
                assert int(view[int(rows[0, i]), h, t, d]) == expected


def test_pair_with_odd_strides_in_size_one_dimensions():
    """Contiguous tensors may carry any stride where the size is 1; the views must not."""
    storage = counting(4 * 6)
    k_cache = storage.as_strided((1, 1, 2, 3), (999, 777, 3, 1), 0)
    v_cache = storage.as_strided((1, 1, 2, 3), (5, 5, 3, 1), 18)
    value = block_offset_views(k_cache, v_cache, KVLayout.HND).value
    assert value[3, 0].tolist() == [[18, 19, 20], [21, 22, 23]]


Q = torch.empty(6, 4, 8)
KV = torch.empty(6, 2, 2, 8)
POOL = torch.empty(2, 5, 4, 2, 8)  # K and V pools of 5 NHD pages; the other way round also 2 stacked pages
STACKED = torch.empty(5, 2, 4, 2, 8)
TABLE2 = torch.zeros(3, 5, dtype=torch.int32)
TABLE3 = torch.zeros(3, 2, 5, dtype=torch.int32)
NHD = "Q_PAGED_KV_NHD"


def call(qkv, layout, tables=None, batch=3):
    return lambda: fmha_v2_inputs(qkv, layout, batch, tables)


BAD = {
    "layout": (call(Q, "packed_qkv"), ValueError, "input_layout must be one of 'PACKED_QKV'.*got 'packed_qkv'"),
    "layout type": (call(Q, None), TypeError, "input_layout must be a str"),
    "packed tuple": (call((Q, KV), "PACKED_QKV"), TypeError, "qkv must be a torch.Tensor, got tuple"),
    "packed rank": (call(Q, "PACKED_QKV"), ValueError, "qkv must be 4-D"),
    "packed parts": (call(KV, "PACKED_QKV"), ValueError, r"qkv must be \[tokens, 3, heads, head_dim\], got shape"),
    "packed table": (call(torch.empty(6, 3, 4, 8), "PACKED_QKV", TABLE2), ValueError, "takes no block_tables"),
    "contiguous tensor": (call(Q, "CONTIGUOUS_Q_KV"), TypeError, r"qkv must be a tuple \(Q, KV\).*got Tensor"),
    "contiguous three": (call((Q, Q, Q), "CONTIGUOUS_Q_KV"), ValueError, "got 3 elements"),
    "contiguous parts": (call((Q, torch.empty(6, 3, 2, 8)), "CONTIGUOUS_Q_KV"), ValueError, r"qkv\[1\] must be \["),
    "contiguous dim": (call((Q, KV[..., :4]), "CONTIGUOUS_Q_KV"), ValueError, "head dimension, got 8 and 4"),
    "contiguous q": (call((Q[0], KV), "CONTIGUOUS_Q_KV"), ValueError, r"qkv\[0\] must be 3-D"),
    "contiguous q type": (call((None, KV), "CONTIGUOUS_Q_KV"), TypeError, r"qkv\[0\] must be a torch.Tensor"),
    "q stride": (call((Q.mT, KV[..., :4]), "CONTIGUOUS_Q_KV"), ValueError, r"qkv\[0\] must have a last stride"),
    "separate two": (call((Q, Q), "SEPARATE_Q_K_V"), ValueError, r"\(Q, K, V\).*got 2 elements"),
    "separate tokens": (call((Q, Q, Q[:5]), "SEPARATE_Q_K_V"), ValueError, "number of tokens, got 6 and 5"),
    "separate heads": (call((Q, Q, Q[:, :1]), "SEPARATE_Q_K_V"), ValueError, "KV heads, got 4 and 1"),
    "separate dtype": (call((Q, Q, Q.half()), "SEPARATE_Q_K_V"), TypeError, r"qkv\[1\] and qkv\[2\].*dtype"),
    "no table": (call((Q, STACKED), NHD), ValueError, "requires block_tables, got block_tables = None"),
    "stacked with 3-D": (call((Q, STACKED), NHD, TABLE3), ValueError, "block_tables must be 2-D"),
    "pair with 2-D": (call((Q, (POOL[0], POOL[1])), NHD, TABLE2), ValueError, "block_tables must be 3-D"),
    "batch": (call((Q, STACKED), NHD, TABLE2, batch=2), ValueError, "batch_size = 2 rows"),
    "pool parts": (call((Q, STACKED[:, :1]), NHD, TABLE2), ValueError, r"qkv\[1\] must have 2 as dimension 1"),
    "pool type": (call((Q, 1), NHD, TABLE2), TypeError, r"qkv\[1\] must be"),
    "pool three": (call((Q, (STACKED,) * 3), NHD, TABLE3), ValueError, r"qkv\[1\] must have 2 elements"),
    "other storage": (
        call((Q, (POOL[0], POOL[1].clone())), NHD, TABLE3),
        ValueError,
        r"qkv\[1\]\[1\] must be in the same storage as qkv\[1\]\[0\]",
    ),
    "v first": (call((Q, (POOL[1], POOL[0])), NHD, TABLE3), ValueError, "positive multiple of 64 elements.*got -320"),
    "same": (call((Q, (POOL[0], POOL[0])), NHD, TABLE3), ValueError, "positive multiple of 64 elements.*got 0"),
    "half a block": (
        lambda: block_offset(POOL.view(-1)[:64].view(1, 4, 2, 8), POOL.view(-1)[96:160].view(1, 4, 2, 8), "NHD"),
        ValueError,
        "positive multiple of 64 elements .*got 96",
    ),
    "interleaved": (
        call((Q, (STACKED[:, 0], STACKED[:, 1])), NHD, TABLE3),
        ValueError,
        r"qkv\[1\]\[0\] must be contiguous",
    ),
    "v strided": (lambda: block_offset(POOL[0, :2], POOL[:, 3], "NHD"), ValueError, "v_cache must be contiguous"),
    "pair shapes": (lambda: block_offset(POOL[0], POOL[1, ..., :4], "NHD"), ValueError, "same head dimension"),
    "empty": (lambda: block_offset(POOL[0, :0], POOL[1, :0], "NHD"), ValueError, "pages with elements"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    function, error, message = BAD[case]
    with pytest.raises(error, match=message):
        function()
