"""FP4Tensor's constructor rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hopwell import FP4Tensor

DATA = torch.zeros(5, 4, 32, dtype=torch.uint8)
SCALE = torch.zeros(256, 16, dtype=torch.float8_e4m3fn)


def test_attributes() -> None:
    tensor = FP4Tensor(DATA, SCALE)
    assert tensor.data is DATA
    assert tensor.scale is SCALE
    assert tensor.scale_start_index == 0
    assert tensor.original_shape is None
    assert tensor.dtype == "nvfp4"
    assert "256, 16" in repr(tensor)


@pytest.mark.parametrize("width", [63, 64])
def test_original_shape_halves_rounding_up(width: int) -> None:
    assert FP4Tensor(DATA, SCALE, 0, (5, 4, width)).original_shape == (5, 4, width)
    assert FP4Tensor(DATA, SCALE, original_shape=torch.Size((5, 4, width))).original_shape == (5, 4, width)


def test_start_index_may_be_any_integer_type_up_to_the_last_fit() -> None:
    assert FP4Tensor(DATA, SCALE, 251).scale_start_index == 251
    assert FP4Tensor(DATA, SCALE, np.int64(3)).scale_start_index == 3
    assert FP4Tensor(DATA[:0], SCALE, 255).scale_start_index == 255


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        ({"data": None}, TypeError, "data"),
        ({"data": DATA.float()}, ValueError, "data"),
        ({"data": DATA[0, 0, 0]}, ValueError, "data"),
        ({"scale": [1]}, TypeError, "scale"),
        ({"scale": SCALE.float()}, ValueError, "scale"),
        ({"scale": SCALE[0, 0]}, ValueError, "scale"),
        ({"scale": SCALE[:100]}, ValueError, "scale"),
        ({"scale": SCALE[:0]}, ValueError, "scale_start_index"),
        ({"scale_start_index": -1}, ValueError, "scale_start_index"),
        ({"scale_start_index": 256}, ValueError, "scale_start_index"),
        ({"scale_start_index": 252}, ValueError, "scale_start_index"),
        ({"scale_start_index": 1.0}, TypeError, "scale_start_index"),
        ({"scale_start_index": True}, TypeError, "scale_start_index"),
        ({"scale_start_index": torch.tensor(1)}, TypeError, "scale_start_index"),
        ({"original_shape": (5, 4, 65)}, ValueError, "original_shape"),
        ({"original_shape": (5, 4, 62)}, ValueError, "original_shape"),
        ({"original_shape": (6, 4, 64)}, ValueError, "original_shape"),
        ({"original_shape": (5, 256)}, ValueError, "original_shape"),
        ({"original_shape": ()}, ValueError, "original_shape"),
        ({"original_shape": 64}, TypeError, "original_shape"),
        ({"original_shape": "abc"}, TypeError, "original_shape"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        FP4Tensor(**{"data": DATA, "scale": SCALE, **arguments})
