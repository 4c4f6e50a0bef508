"""Addresses and strides that TMA supports."""

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hopwell.layouts import paged_kv_views, ragged_view, tma_violation


@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5),
    data=st.data(),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
    start=st.integers(0, 40),
)
def test_against_the_addresses_themselves(sizes, data, dtype, start):
    """TMA needs every run along the last dimension to be dense and to start at a multiple of 16 bytes."""
    strides = [data.draw(st.sampled_from([0, 1, 4, 8, 12, 16, 24])) for _ in sizes]
    strides[-1] = data.draw(st.sampled_from([1, 1, 1, 2]))
    storage = torch.empty(256, dtype=dtype)
    view = storage.as_strided(sizes, strides, start)
    rows = itertools.product(*map(range, sizes[:-1]))
    aligned = all(view[(*row, 0)].data_ptr() % 16 == 0 for row in rows)
    dense = all(view[..., i].data_ptr() == view.data_ptr() + i * view.element_size() for i in range(sizes[-1]))
    assert (tma_violation(view) is None) == (aligned and dense)


class Strided(torch.Tensor):
    """A tensor with a row stride beyond any machine's memory."""

    row = 0

    def stride(self, dim=None):
        return (self.row, 1) if dim is None else (self.row, 1)[dim]


@pytest.mark.parametrize(("stride", "fits"), [((1 << 40) - 16, True), (1 << 40, False), ((1 << 40) + 16, False)])
def test_stride_limit(stride, fits):
    view = torch.empty(2, 16, dtype=torch.uint8).as_subclass(Strided)
    view.row = stride
    violation = tma_violation(view, "v_cache")
    if fits:
        assert violation is None
    else:
        assert re.fullmatch(
            rf"v_cache has stride {stride} \({stride} bytes\) in dimension 0; .*below 2\*\*40", violation
        )


def test_sentences_name_the_offender():
    base = torch.empty(64, 64, dtype=torch.bfloat16)
    assert re.match(
        r"k_cache starts at address 0x\w+2; TMA needs a multiple of 16 bytes", tma_violation(base[0, 1:], "k_cache")
    )
    assert tma_violation(base.mT, "q") == "q has stride 64 in its last dimension; TMA needs 1"
    narrow = torch.empty(4, 8, 20, dtype=torch.bfloat16)
    assert "stride 20 (40 bytes) in dimension 1" in tma_violation(narrow)


def test_size_one_dimensions_are_not_judged():
    odd = torch.empty(96, dtype=torch.bfloat16).as_strided((1, 2, 1, 8, 1), (999, 32, 777, 8, 7))
    assert tma_violation(odd) is None


def test_caches_of_usual_shapes_pass():
    stacked = torch.empty(3, 2, 16, 4, 128, dtype=torch.bfloat16)
    for view in paged_kv_views(stacked, "NHD"):
        assert tma_violation(view) is None
    assert tma_violation(ragged_view(torch.empty(100, 3, 8, 64, dtype=torch.float16)[:, 2])) is None
    assert tma_violation(torch.empty(0, 8)) is None
    assert tma_violation(torch.empty(())) is None
