"""Dequantization of NVFP4 (two elements per byte) to 16 bits: the value of each code times its block scale.

The value of a code comes from a table, from its bits, or from Blackwell's conversion instruction. Products of codes and
e4m3 scales have at most six significant bits, and exponents that float16 and bfloat16 both have. They are therefore
exact in both types.
"""

import itertools
from typing import Any

from cutlass import Float16, Uint32

from hopwell.kernels.parts.core.device import ptx

# Bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, from the lowest on. float16 needs only the upper bytes, because its lower
# bytes are 0; bfloat16 needs both.
F16_UPPER = (0x3E3C3800, 0x46444240)
BF16_UPPER, BF16_LOWER = (0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)
# SIGNS: the sign bits in words with one code per byte. UPPER_BYTES: the bits of codes in the upper bytes of two
# float16.
SIGNS, UPPER_BYTES = 0x80808080, 0x8E008E00
ADDRESS_BITS = 30  # more than a shared-memory address has
_BYTES = "mov.b32 {b0, b1, b2, b3}, {$r0};"
BY_HALVES_EXPONENT = -14  # of the factor in the results of :func:`by_halves`


def _four_words(lines: list[str], *values: Any) -> list:
    """Return the four words that these lines of PTX compute from the values."""
    return ptx("{ " + " ".join(lines) + " }", *values, results=[Uint32] * 4)


def scaled(word, factor, dtype, pairs_halves: bool = False, half: int | None = None, table=None):
    """Return eight codes times ``factor`` as four words of two numbers.

    ``factor`` is a pair of numbers of ``dtype``, or a pair of which only ``half`` is used. A word has neighbouring
    codes. With ``pairs_halves`` it has two codes with the same position in the lower and in the upper half of ``word``.
    ``table`` is the result of :func:`table_words` if the table is kept in registers.
    """
    upper, lower = (F16_UPPER, None) if dtype is Float16 else (BF16_UPPER, BF16_LOWER)
    first = [f"{words[0]:#x}" for words in (upper, lower) if words]
    if table is not None:
        first = [f"{{$r{2 + i}}}" for i in range(len(table))]
    kind = "f16x2" if dtype is Float16 else "bf16x2"
    lines = [
        ".reg .b32 index, even, signs, high, low, p0, p1, p2, p3, pair, factor;",
        _factor("factor", half),
        # Signs are the highest bits of bytes: for odd codes in the word as it is, for even codes in the shifted word.
        "and.b32 index, {$r0}, 0x77777777; shl.b32 even, {$r0}, 4;",
    ]
    for half, by_turns in enumerate(("0x5140", "0x7362")):
        if half == 1:  # prmt reads the lower half of its selector
            lines.append("shr.b32 index, index, 16;")
        lines += [
            f"prmt.b32 high, {first[0]}, {upper[1]:#x}, index;",
            f"prmt.b32 signs, even, {{$r0}}, {by_turns}; lop3.b32 high, high, signs, {SIGNS:#x}, 0xF8;",
            f"prmt.b32 low, {first[1]}, {lower[1]:#x}, index;" if lower else "mov.b32 low, 0;",
            f"prmt.b32 p{2 * half}, low, high, 0x5140;",
            f"prmt.b32 p{2 * half + 1}, low, high, 0x7362;",
        ]
    for i in range(4):
        if pairs_halves:
            lines.append(f"prmt.b32 pair, p{i // 2}, p{2 + i // 2}, {'0x7632' if i % 2 else '0x5410'};")
        lines.append(f"mul.rn.{kind} {{$w{i}}}, {'pair' if pairs_halves else f'p{i}'}, factor;")
    return _four_words(lines, word, factor, *(table or ()))


def _factor(name: str, half: int | None) -> str:
    """Return PTX that makes a pair of the second operand: unchanged, or twice the number in one half of it."""
    if half is None:
        return f"mov.b32 {name}, {{$r1}};"
    number = ("low_half", "high_half")[half]
    return (
        f".reg .b16 low_half, high_half; mov.b32 {{low_half, high_half}}, {{$r1}}; "
        f"mov.b32 {name}, {{{number}, {number}}};"
    )


def table_words(dtype, address) -> tuple:
    """Return the first words of the table of ``dtype`` in registers.

    PRMT takes one constant, and the compiler would move the other one into a register each time. ``address`` is a
    shared-memory address that differs by lane. Its upper bits are always zero, but the compiler does not know that, and
    does not see them as equal in all lanes.
    """
    first = (F16_UPPER[0],) if dtype is Float16 else (BF16_UPPER[0], BF16_LOWER[0])
    return tuple((address.to(Uint32) >> ADDRESS_BITS) | Uint32(word) for word in first)


def by_halves(word, factor, half: int | None = None) -> list:
    """Return the codes of ``word`` times 2^-14 times ``factor``, as four words of two float16.

    A word has the two codes with the same position in the lower and in the upper half of ``word``. ``factor`` is a
    pair, or a pair of which only ``half`` is used.

    No table is needed. The bits of a code become a float16's sign, the lower half of its exponent and its first
    mantissa bit. This number is 2^-14 times the value of the code. The code of 0.5 has exponent 0, and is then a
    subnormal float16 too. Whole words are shifted by constants, which more than one execution unit can do. The sign is
    three places away from the other bits of its code. So two words have signs in place: E with even codes and O with
    odd codes.
    """
    lines = [
        ".reg .b32 sign, rest, e, o, code, pair;",
        _factor("pair", half),
        "shl.b32 sign, {$r0}, 4; shl.b32 rest, {$r0}, 1; " + _select("e", "sign", "rest", SIGNS),
        "shr.b32 rest, {$r0}, 3; " + _select("o", "{$r0}", "rest", SIGNS),
    ]
    for i, (shifted, source) in enumerate(itertools.product((True, False), ("e", "o"))):
        lines.append(f"shl.b32 code, {source}, 8; and.b32 code, code, {UPPER_BYTES:#x};" if shifted else "")
        lines.append("" if shifted else f"and.b32 code, {source}, {UPPER_BYTES:#x};")
        lines.append(f"mul.rn.f16x2 {{$w{i}}}, code, pair;")
    return _four_words([*filter(None, lines)], word, factor)


def converted(word, factor, half: int | None = None) -> list:
    """Return the codes of ``word`` times ``factor``, as four words of two neighbouring float16.

    Blackwell has an instruction that converts a byte. ``factor`` and ``half`` are as in :func:`by_halves`.
    """
    lines = [".reg .b32 pair, codes; .reg .b8 b0, b1, b2, b3;", _factor("pair", half), _BYTES]
    for i in range(4):
        lines.append(f"cvt.rn.f16x2.e2m1x2 codes, b{i}; mul.rn.f16x2 {{$w{i}}}, codes, pair;")
    return _four_words(lines, word, factor)


def converted_by_halves(word, factor) -> list:
    """Return the codes of ``word`` times ``factor`` in the order of :func:`by_halves`, by Blackwell's instruction."""
    lines = [".reg .b32 low, high, codes; .reg .b8 b0, b1, b2, b3;", _BYTES]
    for i in range(2):
        lines.append(f"cvt.rn.f16x2.e2m1x2 low, b{i}; cvt.rn.f16x2.e2m1x2 high, b{i + 2};")
        for j, select in enumerate(("0x5410", "0x7632")):
            lines.append(f"prmt.b32 codes, low, high, {select}; mul.rn.f16x2 {{$w{2 * i + j}}}, codes, {{$r1}};")
    return _four_words(lines, word, factor)


def _select(target: str, first: str, second: str, mask: int) -> str:
    """Return an instruction that takes the bits of ``mask`` from ``first``, and all other bits from ``second``."""
    return f"lop3.b32 {target}, {first}, {second}, {mask:#x}, 0xE4;"


def scales_of_two(first, second, place):
    """Return the e4m3 in byte ``place`` of each of two words as a pair of float16."""
    return ptx(
        "{ .reg .b32 select, both; .reg .b16 low, high; mad.lo.u32 select, {$r2}, 0x11, 0x40; "
        "prmt.b32 both, {$r0}, {$r1}, select; mov.b32 {low, high}, both; cvt.rn.f16x2.e4m3x2 {$w0}, low; }",
        first,
        second,
        place,
        results=[Uint32],
    )


def dequantized_half(word, half: int, dtype):
    """Return the two e4m3 in one half of a word as numbers of ``dtype``."""
    to_bfloat16 = (
        "mov.b32 {low, high}, both; cvt.f32.f16 value, low; cvt.f32.f16 other, high; "
        "cvt.rn.bf16x2.f32 {$w0}, other, value; }"
        if dtype is not Float16
        else "mov.b32 {$w0}, both; }"
    )
    return ptx(
        "{ .reg .b32 both; .reg .b16 low, high; .reg .f32 value, other; mov.b32 {low, high}, {$r0}; "
        f"cvt.rn.f16x2.e4m3x2 both, {('low', 'high')[half]}; " + to_bfloat16,
        word,
        results=[Uint32],
    )
