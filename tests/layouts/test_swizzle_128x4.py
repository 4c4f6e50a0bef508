"""The 128x4 swizzle, byte by byte."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hopwell.layouts import (
    store_swizzled_128x4,
    swizzle_128x4,
    swizzled_128x4_offset,
    swizzled_128x4_shape,
    swizzled_128x4_view,
    unswizzle_128x4,
)


def byte(m, n, columns):
    """Apply the documented formula, in integers."""
    return ((m // 128) * (columns // 4) + n // 4) * 512 + (m % 32) * 16 + ((m % 128) // 32) * 4 + n % 4


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@settings(max_examples=25)
@given(rows=st.integers(1, 300), columns=st.integers(1, 13))
def test_swizzle_element_by_element(dtype, rows, columns):
    scales = random_bytes(rows, columns)
    swizzled = swizzle_128x4(scales.view(dtype))
    height, width = -(-rows // 128) * 128, -(-columns // 4) * 4
    assert tuple(swizzled.shape) == (height, width) == swizzled_128x4_shape(rows, columns)
    assert swizzled.dtype == dtype
    expected = [0] * (height * width)
    for m, line in enumerate(scales.tolist()):
        for n, value in enumerate(line):
            expected[byte(m, n, width)] = value
    assert swizzled.view(torch.uint8).flatten().tolist() == expected
    back = unswizzle_128x4(swizzled, rows, columns)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales)


@pytest.mark.parametrize("columns", [4, 8, 20])
def test_offset_is_the_formula_and_a_permutation(columns):
    seen = {swizzled_128x4_offset(m, n, columns) for m in range(256) for n in range(columns)}
    assert seen == set(range(256 * columns))
    for m in range(256):
        for n in range(columns):
            assert swizzled_128x4_offset(m, n, columns) == byte(m, n, columns)
    rows = torch.arange(256)[:, None]
    offsets = swizzled_128x4_offset(rows, torch.arange(columns), columns)
    assert offsets.tolist() == [[byte(m, n, columns) for n in range(columns)] for m in range(256)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_view_addresses(dtype):
    buffer = torch.empty(256, 12, dtype=dtype)
    view = swizzled_128x4_view(buffer)
    assert tuple(view.shape) == (2, 4, 32, 3, 4)
    for m in range(256):
        for n in range(12):
            found = view[m // 128, m % 128 // 32, m % 32, n // 4, n % 4].data_ptr()
            assert found == buffer.data_ptr() + byte(m, n, 12)


@settings(max_examples=25)
@given(rows=st.integers(0, 140), first=st.integers(0, 256 - 140), columns=st.integers(0, 8))
def test_store_leaves_neighbours_alone(rows, first, columns):
    buffer, scales = random_bytes(256, 8), random_bytes(rows, columns)
    expected = buffer.flatten().tolist()
    for m, line in enumerate(scales.tolist()):
        for n, value in enumerate(line):
            expected[byte(first + m, n, 8)] = value
    store_swizzled_128x4(buffer, scales, first)
    assert buffer.flatten().tolist() == expected
    assert torch.equal(unswizzle_128x4(buffer, rows, columns, first), scales)


def test_strided_scales():
    scales = random_bytes(7, 40)
    assert torch.equal(swizzle_128x4(scales.mT), swizzle_128x4(scales.mT.contiguous()))


BUFFER = random_bytes(256, 8)
BAD = {
    "type": (lambda: swizzle_128x4([[1]]), TypeError, "scales must be a torch.Tensor"),
    "rank": (lambda: swizzle_128x4(BUFFER[0]), ValueError, "scales must be 2-D"),
    "dtype": (lambda: swizzle_128x4(BUFFER.float()), TypeError, "scales must have dtype"),
    "rows": (
        lambda: swizzled_128x4_view(BUFFER[:100]),
        ValueError,
        "number of rows must be a multiple of 128, got 100",
    ),
    "columns": (lambda: swizzled_128x4_view(BUFFER[:, :6]), ValueError, "columns must be a multiple of 4, got 6"),
    "strided": (lambda: swizzled_128x4_view(BUFFER[:, :4]), ValueError, "swizzled must be contiguous"),
    "view dtype": (lambda: swizzled_128x4_view(BUFFER.float()), TypeError, "swizzled must have dtype"),
    "offset": (lambda: swizzled_128x4_offset(0, 0, 6), ValueError, "columns must be a multiple of 4, got 6"),
    "unswizzle rows": (lambda: unswizzle_128x4(BUFFER, 200, 8, 57), ValueError, r"rows 57\.\.257 must lie in 0\.\.256"),
    "unswizzle start": (lambda: unswizzle_128x4(BUFFER, 2, 8, -1), ValueError, r"rows -1\.\.1 must lie"),
    "unswizzle negative": (lambda: unswizzle_128x4(BUFFER, -1, 8, 3), ValueError, r"rows 3\.\.2 must lie"),
    "unswizzle columns": (lambda: unswizzle_128x4(BUFFER, 2, 9), ValueError, r"columns must be in 0\.\.8.*got 9"),
    "unswizzle width": (lambda: unswizzle_128x4(BUFFER, 2, -1), ValueError, r"columns must be in .*got -1"),
    "store rows": (lambda: store_swizzled_128x4(BUFFER, BUFFER, 1), ValueError, r"rows 1\.\.257 must lie in 0\.\.256"),
    "store columns": (lambda: store_swizzled_128x4(BUFFER, random_bytes(1, 9)), ValueError, "columns must be in"),
    "store dtype": (
        lambda: store_swizzled_128x4(BUFFER, BUFFER.view(torch.float8_e4m3fn)),
        TypeError,
        "scales must have dtype torch.uint8, got torch.float8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
