"""Matrix products of one warp: mma.sync of 16 x 16 by 16 x 8 16-bit elements, or of 16 x 32 by 32 x 8 8-bit elements.

Lane 4 g + t holds these elements, two per word (PTX ISA, "matrix fragments for mma.m16n8k16"):

    A   elements 2 t and 2 t + 1 of rows g and g + 8, then elements 2 t + 8 and 2 t + 9 of both
    B   elements 2 t and 2 t + 1 of column g, then elements 2 t + 8 and 2 t + 9
    D   columns 2 t and 2 t + 1 of row g, then of row g + 8

With 8 bits, a word has four elements: 4 t to 4 t + 3 in place of 2 t and 2 t + 1. The offset 8 becomes 16.

The numbering of the elements in a row of A is free if B uses the same numbering. Operands whose elements are adjacent
in memory are therefore read 16 bytes at a time, which is several fragments.
"""

import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32

from hopwell.kernels.parts.core.device import ptx

MMA_COLUMNS, MMA_DEPTH = 8, 16  # of an mma.sync product
QUAD = 4  # lanes with the same g


def place_in_warp() -> tuple:
    """Return (g, t) of this lane."""
    lane = cute.arch.lane_idx()
    return lane // QUAD, lane % QUAD


def multiply(d, a, b, dtype=Float16) -> tuple:
    """Return d + a b. They have 4, 4 and 2 registers, and a and b have elements of ``dtype``."""
    kind = "f16" if dtype is Float16 else "bf16"
    return ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        *a,
        *b,
        *d,
        results=[Float32] * 4,
    )


def accumulate(registers, fragment: int, a, b, dtype=Float16) -> None:
    """Add a b to the four registers of a fragment."""
    d = [registers[4 * fragment + i] for i in range(4)]
    for i, value in enumerate(multiply(d, a, b, dtype)):
        registers[4 * fragment + i] = value


UNIT_SCALES = 0x7F7F7F7F  # four ue8m0 values of 1


def multiply_e4m3(d, a, b, block_scaled: bool = False) -> tuple:
    """Return d + a b. They have 4, 4 and 2 registers, and a and b have e4m3 elements.

    With ``block_scaled`` it uses the block-scaled instruction, with scales of 1.
    """
    begin, form, types, end = "{ ", "", "f32.e4m3.e4m3.f32", "; }"
    if block_scaled:
        begin += f".reg .b32 unit; mov.b32 unit, {UNIT_SCALES:#x}; "  # the instruction takes no immediate here
        form, types = "kind::mxf8f6f4.block_scale.scale_vec::1X.", types + ".ue8m0"
        end = ", unit, {0, 0}, unit, {0, 0}; }"
    return ptx(
        f"{begin}mma.sync.aligned.m16n8k32.row.col.{form}{types} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}}" + end,
        *a,
        *b,
        *d,
        results=[Float32] * 4,
    )


def transposed(word):
    """Transpose an 8 x 8 matrix of 16-bit elements. This lane holds elements 2 t and 2 t + 1 of row g."""
    return ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", word, results=[Uint32])
