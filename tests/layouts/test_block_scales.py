"""Block scales of NVFP4 caches: views, and the interleaved permutation byte by byte."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import (
    block_scale_views,
    deinterleave_v_scales,
    interleave_v_scales,
    interleaved_v_scale_position,
    interleaved_v_scale_view,
    paged_kv_views,
)

LAYOUTS = pytest.mark.parametrize("layout", ["HND", "NHD"])
DTYPES = st.sampled_from([torch.uint8, torch.float8_e4m3fn])
TILES = {
    "pages": st.integers(1, 2),
    "heads": st.integers(1, 3),
    "page_size": st.sampled_from([4, 8, 16]),
    "blocks": st.sampled_from([4, 8, 12]),
}


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def shape_of(layout, pages, heads, page_size, blocks):
    return (pages, heads, page_size, blocks) if layout == "HND" else (pages, page_size, heads, blocks)


def element(tensor, layout, page, head, row, column):
    return int(tensor[page, head, row, column] if layout == "HND" else tensor[page, row, head, column])


@LAYOUTS
@given(**TILES, dtype=DTYPES)
def test_interleave_element_by_element(layout, pages, heads, page_size, blocks, dtype):
    linear = random_bytes(*shape_of(layout, pages, heads, page_size, blocks))
    stored = interleave_v_scales(linear.view(dtype), layout)
    assert stored.dtype == dtype
    assert stored.shape == linear.shape
    assert stored.is_contiguous()
    stored = stored.view(torch.uint8)
    for p, h, t, s in itertools.product(range(pages), range(heads), range(page_size), range(blocks)):
        offset = t // 4 * 4 * blocks + s * 4 + t % 4
        found = element(stored, layout, p, h, offset // blocks, offset % blocks)
        assert found == element(linear, layout, p, h, t, s)
    back = deinterleave_v_scales(stored.view(dtype), layout)
    assert back.dtype == dtype
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), linear)


def test_interleave_hnd_tile_is_the_documented_byte_order():
    """In HND a tile is contiguous, so offsets can be checked in memory rather than through indices."""
    linear = random_bytes(2, 3, 8, 8)
    memory = interleave_v_scales(linear, "HND").flatten()
    for p, h, t, s in itertools.product(range(2), range(3), range(8), range(8)):
        assert memory[(p * 3 + h) * 64 + t // 4 * 4 * 8 + s * 4 + t % 4] == linear[p, h, t, s]


@LAYOUTS
def test_interleave_takes_strides(layout):
    dense = random_bytes(2, 8, 8, 8)
    strided = torch.stack((dense, dense * 0), dim=-1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(interleave_v_scales(strided, layout), interleave_v_scales(dense, layout))


@given(page_size=st.sampled_from([4, 8, 64]), blocks=st.sampled_from([4, 8, 16]))
def test_position_is_a_permutation_and_agrees_with_the_offset(page_size, blocks):
    seen = set()
    for t, s in itertools.product(range(page_size), range(blocks)):
        row, column = interleaved_v_scale_position(t, s, blocks)
        assert 0 <= column < blocks
        assert row * blocks + column == t // 4 * 4 * blocks + s * 4 + t % 4
        seen.add((row, column))
    assert len(seen) == page_size * blocks


def test_position_takes_tensors():
    t, s = torch.arange(8)[:, None], torch.arange(8)[None]
    row, column = interleaved_v_scale_position(t, s, 8)
    assert (row[5, 3], column[5, 3]) == interleaved_v_scale_position(5, 3, 8)
    linear = random_bytes(1, 1, 8, 8)
    assert torch.equal(interleave_v_scales(linear, "HND")[0, 0][row, column], linear[0, 0])


@LAYOUTS
@given(**TILES, pad=st.integers(0, 5))
def test_logical_view_is_no_copy(layout, pages, heads, page_size, blocks, pad):
    """Caches with padded rows are included, so that nothing merges into larger dimensions."""
    buffer = random_bytes(*shape_of(layout, pages, heads, page_size, blocks + pad))
    stored = buffer[..., :blocks]
    view = interleaved_v_scale_view(stored, layout)
    assert tuple(view.shape) == (pages, heads, page_size // 4, 4, 4, blocks // 4)
    for p, h, t in itertools.product(range(pages), range(heads), range(page_size)):
        token = view[p, h, t // 4, t % 4]
        for s in range(blocks):
            row, column = 4 * (t // 4) + s // (blocks // 4), s % (blocks // 4) * 4 + t % 4
            where = (p, h, row, column) if layout == "HND" else (p, row, h, column)
            assert token[s // (blocks // 4), s % (blocks // 4)].data_ptr() == stored[where].data_ptr()


@LAYOUTS
@pytest.mark.parametrize("stacked", [True, False])
@given(**TILES, data_type=DTYPES)
def test_block_scale_views(layout, stacked, pages, heads, page_size, blocks, data_type):
    shape = shape_of(layout, pages, heads, page_size, blocks)
    data_shape = (*shape[:3], blocks * 8)
    caches = paged_kv_views([torch.empty(data_shape, dtype=torch.uint8)] * 2, layout)
    if stacked:
        whole = random_bytes(pages, 2, *shape[1:]).view(data_type)
        views, sources = block_scale_views(whole, layout, caches), whole.unbind(1)
    else:
        sources = random_bytes(*shape).view(data_type), random_bytes(*shape).view(data_type)
        views = block_scale_views(sources, layout, caches)
    for view, source in zip(views, sources, strict=True):
        assert tuple(view.shape) == (pages, heads, page_size, blocks)
        assert view.dtype == torch.float8_e4m3fn
        assert view.data_ptr() == source.data_ptr()
        for p, h, t, s in itertools.product(range(pages), range(heads), (0, page_size - 1), range(blocks)):
            where = (p, h, t, s) if layout == "HND" else (p, t, h, s)
            assert view[p, h, t, s].data_ptr() == source[where].data_ptr()


def test_block_scales_of_different_head_dims():
    data = [torch.empty(2, 3, 4, width, dtype=torch.uint8) for width in (96, 64)]
    scales = [torch.empty(2, 3, 4, width, dtype=torch.uint8) for width in (12, 8)]
    views = block_scale_views(scales, "HND", paged_kv_views(data, "HND"))
    assert views.key.shape[-1] == 12
    assert views.value.shape[-1] == 8


def test_block_scales_of_different_page_counts():
    data = [torch.empty(pages, 3, 4, 32, dtype=torch.uint8) for pages in (2, 5)]
    scales = [torch.empty(pages, 3, 4, 4, dtype=torch.uint8) for pages in (2, 5)]
    caches = paged_kv_views(data, "HND", same_pages=False)
    assert block_scale_views(scales, "HND", caches, same_pages=False).value.shape[0] == 5
    with pytest.raises(ValueError, match="number of pages, got 2 and 5"):
        block_scale_views(scales, "HND", caches)


def empty(*shape):
    return torch.empty(shape, dtype=torch.uint8)


SCALES = empty(2, 3, 8, 8)
CACHES = paged_kv_views((empty(2, 3, 8, 64), empty(2, 3, 8, 64)), "HND")
BAD = {
    "dtype": (
        lambda: block_scale_views((SCALES.half(),) * 2, "HND", CACHES),
        TypeError,
        r"kv_block_scales \(key\) .*float16",
    ),
    "cache dtype": (
        lambda: block_scale_views((SCALES,) * 2, "HND", paged_kv_views((torch.empty(2, 3, 8, 64),) * 2, "HND")),
        TypeError,
        "the key cache that kv_block_scales belongs to must have dtype torch.uint8",
    ),
    "stacked one": (lambda: block_scale_views(SCALES[:, None], "HND", CACHES), ValueError, "2 as dimension 1"),
    "blocks": (
        lambda: block_scale_views((SCALES, SCALES[..., :4]), "HND", CACHES),
        ValueError,
        r"kv_block_scales \(value\) must be \(2, 3, 8, 8\) as .* got \(2, 3, 8, 4\)",
    ),
    "layout": (
        lambda: block_scale_views((SCALES,) * 2, "NHD", CACHES),
        ValueError,
        r"\(key\) must be .*\(2, 8, 3, 8\)",
    ),
    "stride": (lambda: block_scale_views((SCALES.mT,) * 2, "HND", CACHES), ValueError, "last stride of 1"),
    "type": (lambda: block_scale_views(None, "HND", CACHES, name="kv_cache_sf"), TypeError, "kv_cache_sf must be"),
    "position": (lambda: interleaved_v_scale_position(0, 0, 6), ValueError, "blocks .* multiple of 4, got 6"),
    "page size": (
        lambda: interleave_v_scales(SCALES[:, :, :6], "HND"),
        ValueError,
        "page_size must be a multiple of 4, got 6",
    ),
    "head dim": (
        lambda: interleave_v_scales(SCALES[..., :6], "HND"),
        ValueError,
        r"head_dim / 16\) must be a multiple of 4, got 6",
    ),
    "interleave dtype": (lambda: interleave_v_scales(SCALES.float(), "HND"), TypeError, "linear must have dtype"),
    "interleave type": (lambda: interleave_v_scales(None, "HND"), TypeError, "linear must be a torch.Tensor"),
    "interleave layout": (lambda: interleave_v_scales(SCALES, "NDH"), ValueError, "kv_layout must be one of"),
    "interleave rank": (lambda: interleave_v_scales(SCALES[0], "HND"), ValueError, "must be 4-D"),
    "deinterleave dtype": (lambda: deinterleave_v_scales(SCALES.float(), "HND"), TypeError, "interleaved must have"),
    "deinterleave stride": (
        lambda: deinterleave_v_scales(SCALES.mT, "HND"),
        ValueError,
        "interleaved must have a last",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
