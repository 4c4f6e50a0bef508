"""The rows of the element types."""

from __future__ import annotations

import pytest

from hopwell.kernels.config.base import DTYPES, KvType
from hopwell.kernels.elements import ELEMENTS


def test_sizes() -> None:
    assert {name: element.bytes_of(128) for name, element in ELEMENTS.items()} == dict(
        bf16=256, fp16=256, e4m3=128, int8=128, fp8_ds_mla=128, nvfp4=64
    )
    assert {name: element.scales_of(128) for name, element in ELEMENTS.items() if element.block} == dict(nvfp4=8)


def test_parts_of_a_byte_or_of_a_block_are_refused() -> None:
    with pytest.raises(ValueError, match="3 elements of nvfp4 are not a whole number of bytes"):
        ELEMENTS["nvfp4"].bytes_of(3)
    with pytest.raises(ValueError, match="24 elements of nvfp4 is not made of blocks of 16"):
        ELEMENTS["nvfp4"].scales_of(24)


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_type_of_k_and_v_has_a_row(dtype: str) -> None:
    widths = {kind: kind.element(dtype).bits for kind in KvType}
    assert widths == {KvType.WIDE: 16, KvType.E4M3: 8, KvType.INT8: 8, KvType.NVFP4: 4, KvType.FP8_DS_MLA: 8}
