"""Selection of the K and V fetch, by page sizes and strides."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.cases.kernel_problems import CACHES, cache, contiguous, empty, paged

from hopwell.kernels.config.base import (
    KvFetch,
    kv_fetch,
    page_and_head_stride,
)
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.registry import resolve

ARCH = "sm_90a"
PAGE_SIZES = [1 << i for i in range(12)]


class TestKvFetch:
    @pytest.mark.parametrize(
        ("page_size", "box_rows"), [(3, 0), (12, 0), (24, 8), (48, 16), (96, 32), (960, 64), (1056, 32)]
    )
    def test_pages_of_other_sizes_are_divided(self, page_size: int, box_rows: int) -> None:
        """Boxes have a number of rows that divides a page and a tile; kernels for powers of two keep their shifts."""
        config = resolve(paged(*cache("tuple-HND", page_size, (128, 128))), ARCH)
        assert config.uneven_pages
        assert config.name.endswith("_uneven")
        assert config.box_rows == box_rows

    @pytest.mark.parametrize("form", CACHES)
    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_pages_of_8_tokens_and_more_are_boxes(self, page_size: int, form: str) -> None:
        for dims, tile in TILES.items():
            fetch, rows = kv_fetch(paged(*cache(form, page_size, dims)), tile.n)
            if page_size < 8:
                assert (fetch, rows) == (KvFetch.PAGE_ROWS, 0)
            else:
                assert fetch is KvFetch.PAGE_BOXES
                fitting = [n for n in (8, 16, 32, 64) if page_size % n == 0 and tile.n % n == 0]
                assert rows == max(fitting)

    def test_contiguous(self) -> None:
        key, value = (empty(640, 2, 128).transpose(0, 1)[None] for _ in range(2))
        assert kv_fetch(contiguous(key, value), 128) == (KvFetch.CONTIGUOUS, 0)

    @pytest.mark.parametrize("odd", ["key", "value"])
    @pytest.mark.parametrize(
        ("form", "boxes"),
        [
            ("heads outside pages", False),  # pages start a fraction of a head stride apart
            ("padded pages", False),
            ("pages padded to heads", True),
            ("padded heads", True),
            ("rows with room between them", True),
            ("one head seen as two", False),  # head stride 0
            ("one page seen as five", False),  # page stride 0: no number of slots describes it
        ],
    )
    def test_strides_of_one_operand(self, form: str, boxes: bool, odd: str) -> None:
        """Boxes need pages whole head strides apart, in K and in V."""
        pages, heads, rows, dim = 5, 2, 16, 128
        head = rows * dim
        strides = {
            "heads outside pages": (head, pages * head, dim, 1),
            "padded pages": (heads * head + dim, head, dim, 1),
            "pages padded to heads": ((heads + 1) * head, head, dim, 1),
            "padded heads": (heads * (head + 8), head + 8, dim, 1),
            "rows with room between them": (heads * rows * (dim + 8), rows * (dim + 8), dim + 8, 1),
            "one head seen as two": (head, 0, dim, 1),
            "one page seen as five": (0, head, dim, 1),
        }[form]
        view = torch.empty_strided((pages, heads, rows, dim), strides, dtype=torch.bfloat16, device="meta")
        problem = replace(paged(*cache("tuple-HND", rows, (dim, dim))), **{odd: view})
        want = (KvFetch.PAGE_BOXES, 16) if boxes else (KvFetch.PAGE_ROWS, 0)
        assert kv_fetch(problem, 128) == want

    def test_strides_of_single_heads_and_pages_do_not_count(self) -> None:
        """A dimension of size 1 may have any stride: torch does not keep it meaningful."""
        for shape, strides in (
            ((5, 1, 16, 128), (2048, 3, 128, 1)),
            ((5, 1, 16, 128), (2048, 0, 128, 1)),
            ((1, 2, 16, 128), (1, 2048, 128, 1)),
            ((1, 2, 16, 128), (0, 2048, 128, 1)),
            ((1, 1, 16, 128), (7, 5, 128, 1)),
            ((1, 1, 16, 128), (0, 0, 128, 1)),
        ):
            view = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")
            assert kv_fetch(paged(view, view), 128) == (KvFetch.PAGE_BOXES, 16), (shape, strides)

    @pytest.mark.parametrize("form", CACHES)
    @pytest.mark.parametrize("pages", [1, 5])
    @pytest.mark.parametrize("heads", [1, 3])
    def test_strides_reach_every_element(self, heads: int, pages: int, form: str) -> None:
        """The strides that kernels get address the same elements as the view, including replaced strides."""
        for view in cache(form, 16, (128, 128), pages=pages, heads=heads):
            page, head = page_and_head_stride(view)
            for p, h in itertools.product(range(pages), range(heads)):
                assert p * page + h * head == p * view.stride(0) + h * view.stride(1)
            # A TMA box addresses slots one head stride apart.
            assert head > 0
            assert page % head == 0
