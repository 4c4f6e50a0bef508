"""Dequantization of NVFP4 codes: the PTX of each conversion in the emulator, for all bytes and all block scales."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutlass import BFloat16, Float16
from helpers.device.ptx import run_ptx

from hopwell.kernels.parts.dequant import e2m1
from hopwell.layouts import decode_e2m1

pytestmark = pytest.mark.emulator

BYTES = 4  # of a word; each place has all bytes
TORCH = {Float16: torch.float16, BFloat16: torch.bfloat16}
NEIGHBOURS = [(2 * i, 2 * i + 1) for i in range(4)]  # codes of a word, from the lowest bits on
HALVES = [(i, i + 4) for i in range(4)]  # with the same position in both halves
Convert = Callable[..., Any]

# A thread has one word and one pair of scales.
BODY = """
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x; mad.lo.u32 %r2, %r0, %r1, %tid;
    mul.wide.u32 %d0, %r2, 4; add.u64 %d1, %a0, %d0; ld.global.b32 %r10, [%d1];
    add.u64 %d1, %a1, %d0; ld.global.b32 %r11, [%d1];
    {conversion}
    mul.wide.u32 %d0, %r2, 16; add.u64 %d1, %a2, %d0; st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};
"""


def text_of(convert: Convert, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Return the PTX of a conversion of %r10 with the factors %r11 to %r20 and the next registers."""

    def text_alone(text: str, *values: Any, results: list) -> str:
        assert (values, len(results)) == (("word", "factor"), 4)
        for i in range(4):
            text = text.replace(f"{{$w{i}}}", f"%r{20 + i}").replace(f"{{$r{i}}}", f"%r{10 + i}")
        return text

    monkeypatch.setattr(e2m1, "ptx", text_alone)
    return convert("word", "factor", **options)


def words_and_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Return words [n, 4] of bytes that differ, and two e4m3 scales of each [n, 2]. All bytes meet all scales."""
    byte, scale = (torch.tensor(each) for each in zip(*itertools.product(range(256), range(256)), strict=True))
    words = torch.stack([(byte + 64 * i) % 256 for i in range(BYTES)], 1).to(torch.uint8)
    scales = torch.stack([scale, (scale + 37) % 256], 1).to(torch.uint8).view(torch.float8_e4m3fn)
    return words, scales


def converted(text: str, words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the numbers [n, 4, 2] that the PTX makes of words and of pairs of factors."""
    out = torch.full((len(words), 4, 2), torch.nan, dtype=factors.dtype)
    block = 256
    run_ptx(BODY.format(conversion=text), words, factors, out, grid=len(words) // block, block=block, target="sm_100a")
    return out


CASES: dict[str, tuple[Convert, list[tuple[int, int]], int, dict[str, Any]]] = {
    "converted": (e2m1.converted, NEIGHBOURS, 0, {}),
    "converted, lower factor": (e2m1.converted, NEIGHBOURS, 0, dict(half=0)),
    "converted, upper factor": (e2m1.converted, NEIGHBOURS, 0, dict(half=1)),
    "converted by halves": (e2m1.converted_by_halves, HALVES, 0, {}),
    "by halves": (e2m1.by_halves, HALVES, e2m1.BY_HALVES_EXPONENT, {}),
    "by halves, lower factor": (e2m1.by_halves, HALVES, e2m1.BY_HALVES_EXPONENT, dict(half=0)),
    "by halves, upper factor": (e2m1.by_halves, HALVES, e2m1.BY_HALVES_EXPONENT, dict(half=1)),
    "scaled": (e2m1.scaled, NEIGHBOURS, 0, dict(dtype=Float16)),
    "scaled, upper factor": (e2m1.scaled, NEIGHBOURS, 0, dict(dtype=Float16, half=1)),
    "scaled, pairs of halves": (e2m1.scaled, HALVES, 0, dict(dtype=Float16, pairs_halves=True)),
    "scaled in bf16": (e2m1.scaled, NEIGHBOURS, 0, dict(dtype=BFloat16)),
    "scaled in bf16, pairs of halves": (e2m1.scaled, HALVES, 0, dict(dtype=BFloat16, pairs_halves=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_all_bytes_with_all_scales(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is the exact product of its code, its block scale and a power of two."""
    convert, codes, exponent, options = CASES[case]
    words, scales = words_and_scales()
    dtype, half = TORCH[options.get("dtype", Float16)], options.get("half")
    found = converted(text_of(convert, monkeypatch, **options), words, scales.to(dtype))
    nibbles = torch.stack([words & 15, words >> 4], -1).flatten(1)
    values = decode_e2m1(nibbles).double()[:, torch.tensor(codes)]
    factors = scales.double() if half is None else scales.double()[:, half : half + 1].expand(-1, 2)
    exact = values * factors[:, None] * 2.0**exponent
    want = exact.to(dtype)
    is_nan = exact.isnan()
    assert torch.equal(want.double()[~is_nan], exact[~is_nan])
    assert torch.equal(found.isnan(), is_nan)
    assert torch.equal(found[~is_nan].view(torch.int16), want[~is_nan].view(torch.int16))
