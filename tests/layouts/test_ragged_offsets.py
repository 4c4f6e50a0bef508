"""Lengths and offsets of ragged inputs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import cumulative_lengths, element_offsets, sequence_lengths, token_offsets

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=6)
SHAPES = st.sampled_from([(-1,), (-1, 1, 1, 1), (1, -1)])
INT32 = st.sampled_from([torch.int32, torch.uint32])


def starts(lengths):
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


def same_bytes(view, tensor, count):
    assert tuple(view.shape) == (count,)
    assert view.dtype == tensor.dtype
    assert view.data_ptr() == tensor.data_ptr()
    assert view.stride() == (1,)


@given(LENGTHS, SHAPES, INT32)
def test_sequence_lengths(lengths, shape, dtype):
    tensor = torch.tensor(lengths, dtype=dtype).view(shape)
    view = sequence_lengths(tensor, len(lengths))
    same_bytes(view, tensor, len(lengths))
    assert view.tolist() == lengths


@given(LENGTHS, SHAPES, INT32)
def test_token_offsets(lengths, shape, dtype):
    tensor = torch.tensor(starts(lengths), dtype=dtype).view(shape)
    offsets = token_offsets(tensor, len(lengths))
    same_bytes(offsets.tensor, tensor, len(lengths) + 1)
    assert [value // offsets.token_elements for value in offsets.tensor.tolist()] == starts(lengths)


@given(LENGTHS, SHAPES, INT32, st.integers(1, 128 * 192), st.booleans())
def test_element_offsets(lengths, shape, dtype, unit, with_end):
    count = len(lengths) + with_end
    tensor = torch.tensor([start * unit for start in starts(lengths)[:count]], dtype=dtype).view(shape)
    offsets = element_offsets(tensor, len(lengths), unit)
    same_bytes(offsets.tensor, tensor, count)
    assert [value // offsets.token_elements for value in offsets.tensor.tolist()] == starts(lengths)[:count]


@given(st.lists(st.integers(0, 300), max_size=6), INT32)
def test_cumulative_lengths(lengths, dtype):
    total = cumulative_lengths(torch.tensor(lengths, dtype=dtype))
    assert total.dtype == torch.int32
    assert total.tolist() == starts(lengths)


FOUR = torch.zeros(4, dtype=torch.int32)
BAD = {
    "no tensor": (lambda: sequence_lengths([1, 2], 2), TypeError, "seq_lens must be a torch.Tensor, got list"),
    "int16": (lambda: sequence_lengths(FOUR.short(), 4), TypeError, "seq_lens must have dtype .*got torch.int16"),
    "lengths count": (
        lambda: sequence_lengths(FOUR, 3),
        ValueError,
        r"seq_lens must have 3 elements, got shape \(4,\)",
    ),
    "lengths stride": (lambda: sequence_lengths(FOUR[::2], 2), ValueError, "seq_lens must be contiguous"),
    "cumulative count": (lambda: token_offsets(FOUR, 4), ValueError, "cum_seq_lens_q must have 5 elements"),
    "cumulative name": (lambda: token_offsets(FOUR, 4, "cum_seq_lens_kv"), ValueError, "^cum_seq_lens_kv"),
    "elements short": (lambda: element_offsets(FOUR, 5, 8), ValueError, "batch_offsets_q must have 5 or 6 elements"),
    "elements long": (lambda: element_offsets(FOUR, 2, 8), ValueError, "batch_offsets_q must have 2 or 3 elements"),
    "elements dtype": (lambda: element_offsets(FOUR.float(), 4, 8), TypeError, "torch.float32"),
    "unit": (lambda: element_offsets(FOUR, 4, 0), ValueError, "elements_per_token must be at least 1, got 0"),
    "sum dtype": (lambda: cumulative_lengths(FOUR.short()), TypeError, "lengths must have dtype"),
    "sum rank": (lambda: cumulative_lengths(FOUR.view(2, 2)), ValueError, "lengths must be 1-D"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()
