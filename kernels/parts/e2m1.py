"""Elements of NVFP4, two in a byte, as 16-bit numbers: code by table, times the scale of its block.

Codes times scales of e4m3 have six significant bits at most and exponents that float16 and bfloat16 have, so that
products are exact in both. One source serves every arch.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.parts.device import prmt

# The bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, from the lowest on: the upper ones of float16, whose lower ones are 0,
# and both of bfloat16.
F16_UPPER = (0x3E3C3800, 0x46444240)
BF16_UPPER, BF16_LOWER = (0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)


def _four_words(lines: list[str], *values: Any, **place: Any) -> list:
    """What these lines of PTX make of the values: four words."""
    text = "{ " + " ".join(lines) + " }"
    return cute.arch.inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=list(values), **place)


@dsl_user_op
def scaled(word, factor, dtype, pairs_halves: bool = False, *, loc=None, ip=None) -> list:
    """Eight codes times ``factor``, a pair of numbers of ``dtype``, as four words of two numbers: of neighbours, or,
    where it ``pairs_halves``, of codes that have the same place in the lower and in the upper half of ``word``."""
    upper, lower = (F16_UPPER, None) if dtype is Float16 else (BF16_UPPER, BF16_LOWER)
    kind = "f16x2" if dtype is Float16 else "bf16x2"
    lines = [".reg .b32 codes, index, high, low, sign, p0, p1, p2, p3, pair;"]
    for half in range(2):
        lines += [
            f"shr.b32 codes, {{$r0}}, {16 * half};",
            "and.b32 index, codes, 0x7777;",
            f"prmt.b32 high, {upper[0]:#x}, {upper[1]:#x}, index;",
            "shr.b32 sign, codes, 3; and.b32 sign, sign, 0x1111;",
            "prmt.b32 sign, 0x8000, 0, sign; or.b32 high, high, sign;",
            f"prmt.b32 low, {lower[0]:#x}, {lower[1]:#x}, index;" if lower else "mov.b32 low, 0;",
        ]
        lines += [
            f"prmt.b32 p{2 * half}, low, high, 0x5140;",
            f"prmt.b32 p{2 * half + 1}, low, high, 0x7362;",
        ]
    for i in range(4):
        if pairs_halves:
            lines.append(f"prmt.b32 pair, p{i // 2}, p{2 + i // 2}, {'0x7632' if i % 2 else '0x5410'};")
        lines.append(f"mul.rn.{kind} {{$w{i}}}, {'pair' if pairs_halves else f'p{i}'}, {{$r1}};")
    return _four_words(lines, word, factor, loc=loc, ip=ip)


@dsl_user_op
def of_two_rows(word, factors, *, loc=None, ip=None) -> list:
    """Four codes of one row and four of another, times the factors of both, as four words of two float16: a column of
    both rows each."""
    lines = [
        ".reg .b32 index, sign, part, first, second, pair;",
        "and.b32 index, {$r0}, 0x77777777; shr.b32 sign, {$r0}, 3; and.b32 sign, sign, 0x11111111;",
    ]
    for row in ("first", "second"):
        lines += [
            f"prmt.b32 {row}, {F16_UPPER[0]:#x}, {F16_UPPER[1]:#x}, index;",
            f"prmt.b32 part, 0x8000, 0, sign; or.b32 {row}, {row}, part;",
        ]
        if row == "first":
            lines.append("shr.b32 index, index, 16; shr.b32 sign, sign, 16;")
    for half, together in enumerate(("0x5140", "0x7362")):
        lines.append(f"prmt.b32 part, first, second, {together};")
        for place, spread in enumerate(("0x1404", "0x3424")):  # byte 4 and the ones behind it are zero
            lines.append(f"prmt.b32 pair, part, 0, {spread}; mul.rn.f16x2 {{$w{2 * half + place}}}, pair, {{$r1}};")
    return _four_words(lines, word, factors, loc=loc, ip=ip)


@dsl_user_op
def scales_of_two(first, second, place, *, loc=None, ip=None):
    """The e4m3 in byte ``place`` of two words each as a pair of float16."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 select, both; .reg .b16 low, high; mad.lo.u32 select, {$r2}, 0x11, 0x40; "
        "prmt.b32 both, {$r0}, {$r1}, select; mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 {$w0}, low; }",
        write_only_types=[Uint32],
        read_only_args=[first, second, place],
        loc=loc,
        ip=ip,
    )


def scale_pair(scales, place: int, dtype):
    """The e4m3 in byte ``place`` of a word as a pair of equal numbers of ``dtype``."""
    return widened_half(prmt(scales, scales, place * 0x1111), 0, dtype)


@dsl_user_op
def widened_half(word, half: int, dtype, *, loc=None, ip=None):
    """The two e4m3 in a half of a word as numbers of ``dtype``."""
    to_bfloat16 = (
        "mov.b32 {low, high}, both; cvt.f32.f16 value, low; cvt.f32.f16 other, high; "
        "cvt.rn.bf16x2.f32 {$w0}, other, value; }"
        if dtype is not Float16
        else "mov.b32 {$w0}, both; }"
    )
    return cute.arch.inline_ptx(
        "{ .reg .b32 both; .reg .b16 low, high; .reg .f32 value, other; mov.b32 {low, high}, {$r0}; "
        f"cvt.rn.f16x2.e4m3x2 both, {('low', 'high')[half]}; " + to_bfloat16,
        write_only_types=[Uint32],
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )
