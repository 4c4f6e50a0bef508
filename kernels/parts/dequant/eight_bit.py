"""Dequantization of 8-bit and 4-bit keys and values to 16 bits, which represent every value exactly.

4-bit values come with a ``factor``: the float16 scales of their blocks. The results are multiplied by a power of two,
see :func:`exponent`.
"""

from cutlass import BFloat16, Uint32, const_expr

from hopwell.kernels.config.base import KvType
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import prmt, ptx
from hopwell.kernels.parts.dequant import e2m1
from hopwell.kernels.parts.load.block_scales import HALVES


def exponent(kind: KvType) -> int:
    """Return the exponent of the power of two by which dequantized numbers are multiplied."""
    return e2m1.BY_HALVES_EXPONENT if kind is KvType.NVFP4 else 0


def in_order(kind: KvType, words: list) -> list:
    """Reorder words of two 16-bit elements into the element order of :func:`dequantized`.

    For 4 bits, the first word has the first and fifth of eight elements, and so on.
    """
    if kind is not KvType.NVFP4:
        return words
    core_matrices = [words[i : i + 4] for i in range(0, len(words), 4)]
    return [prmt(e[i], e[i + 2], select) for e in core_matrices for i in range(2) for select in HALVES]


def dequantized(kind: KvType, word, factor=None):
    """Return the elements of a word as pairs of float16.

    For 4 bits, ``factor`` is (a pair of scales, the half of the pair to use).
    """
    if kind is KvType.NVFP4:
        return e2m1.by_halves(word, *factor)
    return _from_int8(word) if kind is KvType.INT8 else _from_e4m3(word)


def dequantized_words(kind: KvType, dtype, word, scale=None) -> list:
    """Return four 8-bit elements as two words of two elements of ``dtype``.

    With a float32 ``scale`` they are multiplied in float32 and rounded once.
    """
    words = dequantized(kind, word)
    if const_expr(dtype is not BFloat16 and scale is None):
        return list(words)
    pairs = [copy.unpack_f16_x2(each) for each in words]
    if const_expr(scale is not None):
        pairs = [(low * scale, high * scale) for low, high in pairs]
    return [copy.pack_x2(dtype, *pair) for pair in pairs]


def of_two_keys(kind: KvType, word, factor=None):
    """Dequantize 16 bits of each of two keys to one word per column, with the elements of both keys.

    For 4 bits, ``factor`` has the scales of both keys.
    """
    return e2m1.by_halves(word, factor) if kind is KvType.NVFP4 else dequantized(kind, adjacent(word))


def together(kind: KvType, first, second) -> tuple:
    """Return a word of each of two keys as two words for :func:`by_columns`.

    Each result has half of the columns of both keys.
    """
    if kind is KvType.NVFP4:
        return tuple(prmt(first, second, select) for select in HALVES)
    return interleaved(first, second)


def by_columns(kind: KvType, word, factor=None):
    """Dequantize a word of two keys to one word per column, with the elements of both keys."""
    return of_two_keys(kind, word, factor) if kind is KvType.NVFP4 else dequantized(kind, word)


def interleaved(first, second) -> tuple:
    """Return the interleaved bytes of two words: bytes 0 and 1 of each, and bytes 2 and 3 of each."""
    return ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x5140; prmt.b32 {$w1}, {$r0}, {$r1}, 0x7362;",
        first,
        second,
        results=[Uint32] * 2,
    )


def adjacent(word):
    """Return bytes 0 and 2 of a word, then 1 and 3."""
    return ptx("prmt.b32 {$w0}, {$r0}, {$r0}, 0x3120;", word, results=[Uint32])


def _from_e4m3(word) -> tuple:
    return ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        word,
        results=[Uint32] * 2,
    )


def _from_int8(word) -> tuple:
    """Convert four int8 to float16.

    A byte with flipped sign, in the lowest bits of 1024 as a float16, is 1024 + 128 + the number.
    """
    return ptx(
        "{ .reg .b32 flipped, low, high, zero; xor.b32 flipped, {$r0}, 0x80808080; mov.b32 zero, 0x64806480; "
        "prmt.b32 low, flipped, 0x64646464, 0x4140; prmt.b32 high, flipped, 0x64646464, 0x4342; "
        "sub.rn.f16x2 {$w0}, low, zero; sub.rn.f16x2 {$w1}, high, zero; }",
        word,
        results=[Uint32] * 2,
    )
