"""Derives the coefficients of the GPU's function unit from its results (native/interpolator_tables.h).

The unit is described by Oberman and Siu, "A High-Performance Area-Efficient Multifunction Interpolator" (ARITH-17,
2005): c0 + c1 * x + c2 * x^2 in each segment, in fixed point. Its squarer omits the low columns of its partial
products. Widths, columns and constants were found by fitting; with them, every measured result is exact.
"""

from __future__ import annotations

import datetime
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..errors import EmulatorError
from .devices import Device, Gpu, entry, module_text

ARCH = "sm_90a"
UNIT = 40  # unit of sums: 2^-40
FINEST = 36  # finest unit of results: 2^-36
ONE, TWO = 0x3F800000, 0x40000000


@dataclass(frozen=True)
class Piece:
    """``segments`` segments from the bit pattern ``start``, with coefficients in the same units.

    ``shifts`` convert c0, c1 and c2 to units of 2^-40. Only every ``step``-th pattern is an argument of its own.
    """

    start: int
    segments: int
    shifts: tuple[int, int, int]
    step: int = 1


@dataclass(frozen=True)
class Function:
    """One function; its table holds the segments of all pieces, with ``2**bits`` arguments each.

    ``signs`` belong to c1 and c2, since the tables omit signs. Columns of the square below ``cut`` do not exist.
    ``constant`` is the sum of all terms that are equal in every segment.
    """

    name: str
    pieces: tuple[Piece, ...]
    bits: int
    cut: int
    signs: tuple[int, int]
    constant: int
    scale: float = 1.0  # from the result to the interpolated value
    modifiers: str = ".approx.ftz.f32"


def binade(exponent: int, segments: int, shift: int) -> Piece:
    """Return the floats from 2^exponent to twice that; the unit ignores the lowest bits of their mantissas."""
    return Piece((127 + exponent) << 23, segments, (15 + shift, shift, 1 + shift), step=64 // segments)


# Below 2^-8, tanh equals its argument; from 8 on, it equals one.
TANH = (
    binade(-8, 1, 1),
    binade(-7, 1, 2),
    binade(-6, 1, 3),
    binade(-5, 2, 2),
    binade(-4, 2, 3),
    binade(-3, 4, 2),
    binade(-2, 4, 3),
    binade(-1, 4, 4),
    binade(0, 8, 3),
    binade(1, 16, 1),
    binade(2, 8, 3),
)
FUNCTIONS = (
    Function("ex2", (Piece(ONE, 64, (15, 2, 2)),), 17, 19, (1, 1), 24458, scale=0.5),
    Function("lg2", (Piece(ONE, 64, (14, 2, 3)),), 17, 19, (1, -1), 3350),
    Function("rcp", (Piece(ONE, 128, (14, 1, 1)),), 16, 17, (-1, 1), 4046),
    Function("rsqrt", (Piece(ONE, 128, (14, 0, 2)),), 17, 19, (-1, 1), 16383),
    Function("sqrt", (Piece(ONE, 64, (15, 0, 1)), Piece(TWO, 64, (15, 1, 1))), 17, 19, (1, -1), 32767),
    Function("tanh", TANH, 17, 19, (1, -1), 0, modifiers=".approx.f32"),
)


def truncated_square(bits: int, cut: int) -> np.ndarray:
    """Return squares of all ``bits``-bit numbers without partial products below column ``cut``, in units of 2^cut."""
    x = np.arange(1 << bits, dtype=np.int64)
    total = np.zeros_like(x)
    for i in range((cut + 1) // 2, bits):
        below = x & (1 << i) - 1
        total += (x >> i & 1) * ((below >> (cut - 1 - i)) + (1 << (2 * i - cut)))
    return total


def segment(
    function: Function, piece: Piece, square: np.ndarray, low: np.ndarray, width: np.ndarray
) -> tuple[int, int, int]:
    """Return (c0, |c1|, |c2|) with sums in [low, low + width), both in units of 2^-40.

    The fit omits the first argument, because some functions return the exact result for a power of two.

    Raises:
        EmulatorError: no coefficients fit.
    """
    x = np.arange(1, len(low), dtype=np.int64)
    square, low, width = square[1:], low[1:], width[1:]
    columns = np.stack([np.ones(len(x)), x, square], axis=1)
    _, linear, quadratic = np.linalg.lstsq(columns, low - low[0] + width / 2, rcond=None)[0]
    s0, s1, s2 = piece.shifts
    c1, c2 = round(float(linear) / 2**s1), round(float(quadratic) / 2**s2)
    least = low - (c1 * x << s1) - (c2 * square << s2) - function.constant
    c0 = (int(least.max()) + (1 << s0) - 1) >> s0
    if c0 << s0 >= int((least + width).min()):
        raise EmulatorError(f"{function.name}: no coefficients give the results of a segment")
    return c0, c1 * function.signs[0], c2 * function.signs[1]


def coefficients(function: Function, piece: Piece, results: np.ndarray) -> list[tuple[int, int, int]]:
    """Return one (c0, |c1|, |c2|) for each segment.

    Args:
        function: the function.
        piece: one of its pieces.
        results: results of ``measure`` for whole segments of the piece.

    Raises:
        EmulatorError: the results do not come from this unit.
    """
    value = results.astype(np.float64) * function.scale
    low = (value * 2.0**UNIT).astype(np.int64)
    exponent = np.frexp(value)[1].astype(np.int64) - 1
    width = np.int64(1) << np.maximum(exponent - 23 + UNIT, UNIT - FINEST)
    square, n = truncated_square(function.bits, function.cut), 1 << function.bits
    starts = range(0, len(results), n)
    return [segment(function, piece, square, low[k : k + n], width[k : k + n]) for k in starts]


def measure(device: Device, function: Function, piece: Piece, segments: int) -> np.ndarray:
    """Measure the float32 results of the first ``segments`` segments of ``piece``."""
    count = segments << function.bits
    body = (
        f"mad.lo.u32 %r2, %index, {piece.step}, {piece.start}; {function.name}{function.modifiers} %r3, %r2;\n"
        "mul.wide.u32 %d0, %index, 4; add.u64 %d0, %a0, %d0; st.global.b32 [%d0], %r3;"
    )
    out = torch.zeros(count, dtype=torch.float32, device=device.torch_device)
    device.launch(module_text(ARCH, entry("k", "u64", body)), count // 256, 256, 0, [out])
    return out.cpu().numpy()


def header(device: Device, date: str) -> str:
    """Return the text of interpolator_tables.h, measured on ``device``."""
    parts = [
        f"/* Coefficients of the function unit, derived from its results at every mantissa ({device.name}, {date}) by\n"
        " * python -m hopwell.emulator derive-approximations. See interpolator.h. */\n"
    ]
    for function in FUNCTIONS:
        rows = [
            row
            for piece in function.pieces
            for row in coefficients(function, piece, measure(device, function, piece, piece.segments))
        ]
        cells = ", ".join("{{{},{},{}}}".format(*row) for row in rows)
        body = textwrap.fill(cells, 118, initial_indent="  ", subsequent_indent="  ")
        parts.append(f"static const segment {function.name}_segments[{len(rows)}] = {{\n{body}}};\n")
    return "".join(parts)


def run_derivation(path: Path) -> None:
    """Write the tables, measured on this machine's GPU, to ``path``.

    native/interpolator_tables.h is such a file.

    Raises:
        EmulatorError: the GPU computes otherwise.
    """
    path.write_text(header(Gpu(), datetime.date.today().isoformat()))
