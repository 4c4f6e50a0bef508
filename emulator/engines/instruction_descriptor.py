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
    """Fields of an instruction descriptor and its kind."""

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

    @property
    def rows(self) -> int:
        """Rows of A and D that one CTA holds."""
        return self.m // self.ctas

    def lanes(self) -> np.ndarray:
        """Return the tensor-memory lane of each row of a CTA.

        With M = 64 of one CTA, rows use the lower half of each 32-lane quarter.
        """
        r = np.arange(self.rows)
        return r // 16 * 32 + r % 16 if self.ctas == 1 and self.rows == 64 else r

    @property
    def split(self) -> int:
        """Column ranges of D when a CTA has fewer rows than lanes.

        The first N / split columns are in lanes 0.., the next N / split columns in the following lanes.
        """
        return LANE_SPLIT.get((self.ctas, self.rows), 1)


LANE_SPLIT = {(2, 64): 2, (2, 32): 4}


def parse_shape(kind: str, idesc: int, ctas: int, vector: int | None, where: str) -> Shape:
    block_scaled = kind.startswith("mx")
    n, m = (idesc >> 17 & 63) << 3, (idesc >> 24 & 31) << 4
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
    if tight and idesc >> 31:
        raise Unsupported(f"tcgen05.mma with K = 96: {where}")
    half = 1 if tight else HALF_BYTES.get(a_type, 2)
    d_type = "f32" if block_scaled else D_FORMATS.get(idesc >> 4 & 3, "")
    if not d_type:
        raise EmulatorError(f"tcgen05.mma with accumulator format 3: {where}")
    # Block-scaled kinds do not support M = 64 (CUTLASS, mma_sm100_umma.hpp).
    shapes = ((128, 1), (128, 2), (256, 2)) if block_scaled else ((64, 1), (128, 1), (128, 2), (256, 2))
    if (m, ctas) not in shapes or n < 8 or n > 256:
        raise EmulatorError(f"tcgen05.mma of M = {m}, N = {n} with {ctas} CTAs: {where}")
    k = K_BYTES * 2 // half
    scales = 0
    if block_scaled:
        scales = 1 if kind == "mxf8f6f4" else k // (vector or 32)
    return Shape(
        m,
        n,
        a_type,
        b_type,
        d_type,
        bool(idesc >> 15 & 1),
        bool(idesc >> 16 & 1),
        (idesc >> 13 & 1) != (idesc >> 14 & 1),
        half,
        k,
        ctas,
        PACK_TIGHT if tight or half > 2 else PACK_CHUNK,
        scales,
        "ue8m0" if idesc >> 23 & 1 else "ue4m3",
        idesc >> 29 & 3 if block_scaled else 0,
        idesc >> 4 & 3 if block_scaled else 0,
    )
