"""The instruction descriptor of tcgen05.mma: shape, formats, majors, and the placement of rows of A and D.

PTX ISA, "tcgen05 instruction descriptor" and "tcgen05 data path layout organization"; CUTLASS, mma_sm100_desc.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import EmulatorError, Unsupported

F16_KIND = {0: "f16", 1: "bf16", 2: "tf32"}
F8_KIND = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
I8_KIND = {0: "u8", 1: "s8"}
D_FORMATS = {0: "f16", 1: "f32", 2: "s32"}
# Bytes of two elements in shared memory: kind::f8f6f4 keeps every element in one byte.
HALF_BYTES = {"f16": 4, "bf16": 4, "tf32": 8}
K_BYTES = 32
PACK_TIGHT, PACK_BYTE, PACK_CHUNK = 0, 1, 2


@dataclass(frozen=True)
class Shape:
    """Fields of an instruction descriptor, its kind, and whether the instruction is weight-stationary (.ws)."""

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_mn: bool
    b_mn: bool
    negate: bool
    half_bytes: int  # bytes of two elements
    k: int
    ctas: int
    pack: int
    scales: int = 0  # scales of a row, 0 for none
    scale_format: str = ""
    a_byte: int = 0  # first byte of A in a scale column
    b_byte: int = 0
    ws: bool = False
    saturate: bool = False

    @property
    def k_bytes(self) -> int:
        """Bytes of k in a row of A and B."""
        return self.k * self.half_bytes // 2

    @property
    def rows(self) -> int:
        """Rows of A and D that one CTA holds."""
        return self.m // self.ctas

    def lanes(self) -> np.ndarray:
        """Return the tensor-memory lane of each row of a CTA.

        With M = 64 of one CTA, rows use the lower half of each 32-lane quarter, except in .ws instructions.
        """
        r = np.arange(self.rows)
        return r // 16 * 32 + r % 16 if self.uses_half_of_the_lanes else r

    @property
    def uses_half_of_the_lanes(self) -> bool:
        return self.ctas == 1 and self.rows == 64 and not self.ws

    @property
    def split(self) -> int:
        """Column ranges of D when a CTA has fewer rows than lanes.

        The first N / split columns are in lanes 0.., the next N / split columns in the following lanes.
        """
        return 128 // self.rows if self.ws or self.ctas == 2 else 1


# Formats of D by kind (PTX ISA, "tcgen05 matrix shape"), and bits of the descriptor that have to be zero.
D_TYPES = {"f16": ("f16", "f32"), "tf32": ("f32",), "i8": ("s32",), "f8f6f4": ("f16", "f32")}
SATURATE = 1 << 3  # of kind::i8 alone
RESERVED, RESERVED_SCALED = 1 << 6 | 1 << 23 | 1 << 29, 1 << 6
ROWS = {1: (64, 128), 2: (128, 256)}  # M by number of CTAs
WS_SHAPES = (32, 64, 128), (64, 128, 256)  # M and N of .ws
WITH_MAJOR = ("e4m3", "e5m2", "u8", "s8", "f16", "bf16", "tf32")  # CUTLASS, mma_sm100_desc.hpp, a_major_


def supports(kind: str, m: int, n: int, ctas: int, ws: bool, wide_step: bool, long: bool) -> bool:
    """Whether the shape is supported: PTX ISA, "tcgen05 matrix shape"; CUTLASS DSL, nvgpu/tcgen05/mma.py.

    ``wide_step``: B has 8 bits and is MN-major, so that 16 of its columns of one CTA share 16 bytes. ``long``: K = 96.
    """
    if ws:
        return ctas == 1 and m in WS_SHAPES[0] and n in WS_SHAPES[1]
    # Block-scaled kinds do not support M = 64 (CUTLASS, mma_sm100_umma.hpp).
    if m not in ROWS[ctas] or (kind.startswith("mx") and m == 64) or (long and m != 128 * ctas):
        return False
    step = 16 if wide_step or (kind == "i8" and (ctas == 2 or n > 32)) else 8
    return 0 < n <= 256 and n % (step * ctas) == 0


def parse_shape(
    kind: str,
    idesc: int,
    ctas: int,
    vector: int | None,
    where: str,
    ws: bool = False,
    a_in_tmem: bool = False,
    target: str = "",
) -> Shape:
    block_scaled = kind.startswith("mx")
    n, m = (idesc >> 17 & 63) << 3, (idesc >> 24 & 31) << 4
    saturate = kind == "i8" and bool(idesc & SATURATE)
    # Bits 30 and 31 are the maximum shift of .ws, which is not emulated; with block scales they have other meanings.
    if idesc & ((RESERVED_SCALED if block_scaled else RESERVED | 3 << 30) | (0 if kind == "i8" else SATURATE)):
        raise EmulatorError(f"tcgen05.mma kind::{kind} with reserved bits in its descriptor {idesc:#x}: {where}")
    a_code, b_code = idesc >> 7 & 7, idesc >> 10 & 7
    if idesc & 4:
        raise Unsupported(f"sparse tcgen05.mma: {where}")
    table = {"f16": F16_KIND, "tf32": F16_KIND, "i8": I8_KIND, "f8f6f4": F8_KIND, "mxf8f6f4": F8_KIND}.get(
        kind, {1: "e2m1"}
    )
    if a_code not in table or b_code not in table:
        raise EmulatorError(
            f"tcgen05.mma kind::{kind} with formats {a_code}, {b_code} in its instruction descriptor: {where}"
        )
    a_type, b_type = table[a_code], table[b_code]
    if kind in ("f16", "tf32") and (kind == "tf32") != (a_type == "tf32"):
        raise EmulatorError(f"tcgen05.mma kind::{kind} with {a_type} in its instruction descriptor: {where}")
    tight = kind in ("mxf4", "mxf4nvf4")
    long = tight and bool(idesc >> 31)
    if long and (a_in_tmem or not target.startswith("sm_103")):  # PTX ISA, "tcgen05 matrix shape", target notes
        what = "A in tensor memory" if a_in_tmem else f"the target {target}"
        raise Unsupported(f"tcgen05.mma with K = 96 and {what}: {where}")
    half = 1 if tight else HALF_BYTES.get(a_type, 2)
    d_type = "f32" if block_scaled else D_FORMATS.get(idesc >> 4 & 3, "")
    if (not block_scaled and d_type not in D_TYPES[kind]) or (d_type == "f16" and "bf16" in (a_type, b_type)):
        raise EmulatorError(f"tcgen05.mma kind::{kind} of {a_type} into {d_type or 'accumulator format 3'}: {where}")
    if kind == "i8" and idesc >> 13 & 3:
        raise EmulatorError(f"tcgen05.mma kind::i8 with a negated operand: {where}")
    a_mn, b_mn = bool(idesc >> 15 & 1), bool(idesc >> 16 & 1)
    if not supports(kind, m, n, ctas, ws, b_mn and half == 2, long):
        form = f"kind::{kind}{' with .ws' if ws else ''}{', MN-major B' if b_mn else ''}{', K = 96' if long else ''}"
        raise EmulatorError(f"tcgen05.mma of M = {m}, N = {n} with {ctas} CTAs, {form}: {where}")
    if (a_mn and (a_in_tmem or tight or a_type not in WITH_MAJOR)) or (b_mn and (tight or b_type not in WITH_MAJOR)):
        of_a = f"A of {a_type}{' in tensor memory' if a_in_tmem else ''}"
        raise EmulatorError(f"tcgen05.mma kind::{kind} with MN-major operands: {of_a}, B of {b_type}: {where}")
    k = 96 if long else K_BYTES * 2 // half
    scales = 0
    if block_scaled:
        scales = 1 if kind == "mxf8f6f4" else k // (vector or 32)
    return Shape(
        m,
        n,
        a_type,
        b_type,
        d_type,
        a_mn,
        b_mn,
        (idesc >> 13 & 1) != (idesc >> 14 & 1),
        half,
        k,
        ctas,
        PACK_TIGHT if tight or half > 2 else PACK_CHUNK,
        scales,
        "ue8m0" if idesc >> 23 & 1 else "ue4m3",
        idesc >> 29 & 3 if block_scaled else 0,
        idesc >> 4 & 3 if block_scaled else 0,
        ws,
        saturate,
    )
