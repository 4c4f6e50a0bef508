"""Rounding to e4m3 and NVFP4, bitwise equal to the quantizers of ``hopwell.layouts``.

One source serves every architecture.

Blackwell has an instruction that rounds to e2m1. Hopper does not have it, so codes are computed here.
"""

from cutlass import Float32, Uint32

from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import pack_e4m3_x2
from hopwell.kernels.parts.core.device import ptx

E2M1_MAX = 6.0
CODES_IN_WORD = 8


def divided(numerator, denominator):
    """Return a quotient rounded once. A product with the reciprocal would round twice and give other codes."""
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", numerator, denominator, results=[Float32])


def larger_magnitude(magnitude, value):
    """Return the larger of ``magnitude`` and the magnitude of ``value``, or NaN if either is NaN."""
    return ptx(
        "{ .reg .f32 other; abs.f32 other, {$r1}; max.NaN.f32 {$w0}, {$r0}, other; }",
        magnitude,
        value,
        results=[Float32],
    )


def first_e4m3(pair):
    """Return the lower of two packed e4m3 as float32."""
    return ptx(
        "{ .reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 both, {$r0}; mov.b32 {low, high}, both; "
        "cvt.f32.f16 {$w0}, low; }",
        pair,
        results=[Float32],
    )


def e2m1_code(value):
    """Return the e2m1 code nearest to ``value`` in a word, with ties to the even code; larger values become +-6.

    Steps between codes are 1/2 below 2, 1 below 4, and 2 from there on. Adding 1.5 * 2^23 steps leaves the number of
    steps in the lowest bits, rounded to nearest even. The code is even exactly if the number of steps is even.
    """
    return ptx(
        "{ .reg .f32 size, large; .reg .b32 code, none, sign; .reg .pred below2, below4; "
        "abs.f32 size, {$r0}; min.f32 size, size, 0f40C00000; "
        "setp.lt.f32 below2, size, 0f40000000; setp.lt.f32 below4, size, 0f40800000; "
        "selp.f32 large, 0f4B400000, 0f4BC00000, below4; selp.f32 large, 0f4AC00000, large, below2; "
        "selp.b32 none, 0x4B3FFFFE, 0x4BBFFFFC, below4; selp.b32 none, 0x4AC00000, none, below2; "
        "add.rn.f32 size, size, large; mov.b32 code, size; sub.s32 code, code, none; "
        "mov.b32 sign, {$r0}; shr.u32 sign, sign, 28; and.b32 sign, sign, 8; or.b32 {$w0}, code, sign; }",
        value,
        results=[Uint32],
    )


def e4m3_words(values) -> list:
    """Return float32 values as words of four e4m3; larger values become +-448."""
    return [copy.pack_e4m3_x4(values[i : i + 4]) for i in range(0, len(values), 4)]


def nvfp4_block(values) -> tuple:
    """Return the codes of 16 float32 values as two words, and their e4m3 scale factor in the low byte of 16 bits."""
    largest = Float32(0)
    for value in values:
        largest = larger_magnitude(largest, value)
    factor = pack_e4m3_x2(divided(largest, Float32(E2M1_MAX)), Float32(0))
    wide = first_e4m3(factor)
    words = []
    for begin in range(0, len(values), CODES_IN_WORD):
        word = Uint32(0)
        for i in range(CODES_IN_WORD):
            word = word | (e2m1_code(divided(values[begin + i], wide)) << (4 * i))
        words.append(_checked_codes(word, wide))
    return words, factor


def _checked_codes(word, factor):
    """Return eight codes, replaced by 0 if the scale factor is 0 and by +6 if it is NaN."""
    return ptx(
        "{ .reg .pred p; .reg .b32 codes; setp.nan.f32 p, {$r1}, {$r1}; selp.b32 codes, 0x77777777, {$r0}, p; "
        "setp.eq.f32 p, {$r1}, 0f00000000; selp.b32 {$w0}, 0, codes, p; }",
        word,
        factor,
        results=[Uint32],
    )
