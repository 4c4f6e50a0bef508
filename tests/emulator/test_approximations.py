"""The function unit against an H200's results, and the derivation of its tables from results."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.device.ptx import run_ptx

from hopwell.emulator import EmulatorError
from hopwell.emulator.native import HERE
from hopwell.emulator.tools.devices import Emulated
from hopwell.emulator.tools.interpolator import ARCH, FUNCTIONS, Function, Piece, coefficients, measure

# The file has (inputs, results) of each instruction as bits: an even grid, and the inputs with sums closest to the next
# result.
MEASURED = np.load(Path(__file__).with_name("h200_approximations.npz"))


def apply(text: str, inputs: np.ndarray) -> np.ndarray:
    """Return the bits of the results %y of PTX text for bits %x."""
    padded = np.zeros(-(-len(inputs) // 32) * 32, np.uint32)
    padded[: len(inputs)] = inputs
    out = torch.zeros(len(padded), dtype=torch.int32)
    body = (
        "mov.u32 %r1, %ctaid.x; shl.b32 %r1, %r1, 5; add.u32 %r1, %r1, %tid; mul.wide.u32 %d1, %r1, 4;\n"
        "add.u64 %d2, %a0, %d1; add.u64 %d3, %a1, %d1; ld.global.b32 %r2, [%d2];\n"
        f"{text.replace('%x', '%r2').replace('%y', '%r3')}\nst.global.b32 [%d3], %r3;"
    )
    run_ptx(body, torch.from_numpy(padded.view(np.int32)), out, grid=len(padded) // 32)
    return out.numpy().view(np.uint32)[: len(inputs)]


@pytest.mark.parametrize("op", MEASURED.files)
def test_results_are_the_gpus(op):
    inputs, results = MEASURED[op]
    np.testing.assert_array_equal(apply(f"{op} %y, %x;", inputs), results)


@pytest.mark.parametrize(
    ("text", "x", "result"),
    [
        ("lg2.approx.f32 %y, %x;", 0x0000E007, 0xC3053146),  # of a denormal: a sum of two roundings
        ("ex2.approx.f16x2 %y, %x;", 0x00002001, 0x3C003C05),
        ("ex2.approx.ftz.bf16x2 %y, %x;", 0x00004002, 0x3F804082),
        ("{ .reg .b16 h; cvt.u16.u32 h, %x; tanh.approx.f16 h, h; cvt.u32.u16 %y, h; }", 0x1C08, 0x1C07),
        ("{ .reg .b16 h; cvt.u16.u32 h, %x; tanh.approx.bf16 h, h; cvt.u32.u16 %y, h; }", 0x3B81, 0x3B80),
        ("{ .reg .f32 one; mov.f32 one, 0f3F800000; div.full.f32 %y, one, %x; }", 0x00210108, 0x7F78364D),
    ],
    ids=lambda v: re.search(r"[a-z]\w+\.(approx|full)[.\w]*", v)[0] if isinstance(v, str) else "",
)
def test_single_results_are_the_gpus(text, x, result):
    assert apply(text, np.array([x], np.uint32))[0] == result


def test_what_rounds_is_not_an_approximation():
    x = np.linspace(1, 2, 1000).astype(np.float32)
    got = apply("rcp.rn.f32 %y, %x;", x.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(got, np.float32(1) / x)
    got = apply("sqrt.rn.f32 %y, %x;", x.view(np.uint32)).view(np.float32)
    np.testing.assert_array_equal(got, np.sqrt(x))
    assert (apply("sqrt.approx.f32 %y, %x;", x.view(np.uint32)).view(np.float32) != got).any()
    got = apply("{ .reg .f32 three; mov.f32 three, 0f40400000; div.rn.ftz.f32 %y, three, %x; }", x.view(np.uint32))
    np.testing.assert_array_equal(got.view(np.float32), np.float32(3) / x)


def test_full_division_scales_its_operands():
    text = "div.full.f32 %y, %x, %x;"
    x = np.array([1e-40, -1e-45, 3e38, 1.5], np.float32)
    np.testing.assert_allclose(apply(text, x.view(np.uint32)).view(np.float32), 1.0, rtol=2e-7)
    assert apply(text.replace("full", "approx"), x.view(np.uint32))[2] == 0


@pytest.mark.parametrize("op", ["ex2", "lg2", "rcp", "rsqrt", "sqrt"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_special_values(op, ftz):
    """The values are in the PTX ISA's tables of ex2, lg2, rcp, rsqrt and sqrt."""
    x = np.array([np.inf, -np.inf, 0.0, -0.0, -1.0, np.nan, 1e-40, -1e-40, 3e38, 1.0], np.float32)
    wanted = {
        "ex2": [np.inf, 0, 1, 1, 0.5, np.nan, 1, 1, np.inf, 2],
        "lg2": [np.inf, np.nan, -np.inf, -np.inf, np.nan, np.nan, np.log2(x[6]), np.nan, np.log2(x[8]), 0],
        "rcp": [0, -0.0, np.inf, -np.inf, -1, np.nan, np.inf, -np.inf, 1 / x[8].astype(np.float64), 1],
        "rsqrt": [0, np.nan, np.inf, -np.inf, np.nan, np.nan, 1 / np.sqrt(x[6].astype(np.float64)), np.nan,
                  1 / np.sqrt(x[8].astype(np.float64)), 1],
        "sqrt": [np.inf, np.nan, 0, -0.0, np.nan, np.nan, np.sqrt(x[6].astype(np.float64)), np.nan, np.sqrt(x[8]), 1],
    }[op]  # fmt: skip
    if ftz:
        flushed = {
            "lg2": {6: -np.inf, 7: -np.inf},
            "rcp": {8: 0},
            "rsqrt": {6: np.inf, 7: -np.inf},
            "sqrt": {6: 0, 7: -0.0},
        }.get(op, {})
        wanted = [flushed.get(k, value) for k, value in enumerate(wanted)]
    got = apply(f"{op}.approx{ftz}.f32 %y, %x;", x.view(np.uint32)).view(np.float32)
    np.testing.assert_allclose(got, np.array(wanted, np.float32), rtol=3e-7, atol=1e-45)
    zero = np.array(wanted) == 0
    np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(np.array(wanted)[zero]))


@pytest.mark.parametrize(
    ("function", "piece"),
    [(function, piece) for function in FUNCTIONS for piece in function.pieces],
    ids=lambda part: part.name if isinstance(part, Function) else f"{part.start:#x}",
)
def test_tables_derive_from_results(function: Function, piece: Piece):
    """The first two segments; results that do not come from such a table are refused."""
    results = measure(Emulated(ARCH), function, piece, min(2, piece.segments))
    _, _, table = (HERE / "interpolator_tables.h").read_text().partition(f" {function.name}_segments")
    rows = [tuple(map(int, row)) for row in re.findall(r"{(\d+),(\d+),(\d+)}", table)]
    first = sum(p.segments for p in function.pieces[: function.pieces.index(piece)])
    wanted = coefficients(function, piece, results)
    assert rows[first : first + len(wanted)] == wanted
    results[1000] = np.nextafter(results[1000], np.float32(9))
    with pytest.raises(EmulatorError, match="no coefficients"):
        coefficients(function, piece, results)
