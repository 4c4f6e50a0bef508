"""Positions are divided by page sizes exactly."""

from __future__ import annotations

from hopwell.kernels.launch.arguments import DIVISOR_BITS, page_divisor


def test_division() -> None:
    """The test computes like ``parts/load/page_size.py``, at the ends of pages, which show a rounded
    multiplier first.
    """
    for size in (*(size for size in range(1, 1100) if size & (size - 1)), 65537, 3 << 20, (1 << 30) - 1):
        multiplier, shift = divmod(page_divisor(size), 1 << DIVISOR_BITS)
        assert multiplier < 1 << 32
        last = (1 << 31) // size
        for page in (page for page in (0, 1, 2, last // 3, last - 2, last - 1) if 0 <= page < last):
            for position in (page * size, page * size + size - 1):
                assert position * multiplier >> shift == page


def test_powers_of_two_are_shifted() -> None:
    assert [page_divisor(1 << i) for i in range(31)] == [*range(31)]
