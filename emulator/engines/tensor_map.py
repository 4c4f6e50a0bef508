"""The 128-byte TMA descriptor.

CuTe DSL's host code encodes descriptors without the driver, in the hardware's undocumented format. The fields below
were inferred by encoding tensors with known properties. host/selftest.py repeats such encodings with the installed DSL
and compares the fields. Only the first 64 bytes carry information:

    u64 @0   global address
    u32 @8   [3:0] 2: tiled   [6:4] rank - 1   [10:7] element type   [14:13] swizzle   [15] NaN, not zero, outside of
             the tensor   [16] round f32 to tf32   [18:17] L2 promotion   [21] tensor of 128 KiB or more (CUTLASS:
             copy_traits_sm90_tma.hpp mentions the limit)
    u32 @12  strides of dimensions 1..4 in units of 16 bytes; @28 their bits 32..35, four each
    u32 @32  extents - 1, five of them
    u24 @52  traversal strides - 1, three bits each
    u8  @55  box extents - 1, five of them
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from ..errors import Unsupported
from ..native.layout import TensorMapState

NAN_FILL = 1 << 15
KNOWN_FLAGS = 0xF | 7 << 4 | 15 << 7 | 3 << 13 | NAN_FILL | 1 << 16 | 3 << 17 | 1 << 21
# Hardware element type -> bytes. Type 11 packs two 4-bit elements to a byte on both sides. Types 12 and 13 spread
# sixteen 4- or 6-bit elements over 16 bytes of shared memory (CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B, _16U6_ALIGN16B).
ELEMENT_BYTES = {
    0: 1.0, 1: 2.0, 2: 4.0, 3: 4.0, 4: 8.0, 5: 8.0, 6: 2.0, 7: 4.0, 8: 8.0, 9: 2.0, 10: 2.0, 11: 0.5, 12: 0.5, 13: 0.75,
}  # fmt: skip
EXPANDED = {12: 8, 13: 12}  # bytes of global memory for one 16-byte chunk of shared memory
UNITS = {11: (2, 1), 12: (16, 8), 13: (16, 12)}  # sub-byte types: elements and bytes of the smallest whole unit
# For reductions: hardware type -> AF_* of memory.c.
ATOMIC_FORMAT = {2: 0, 3: 1, 4: 2, 5: 3, 6: 8, 7: 4, 8: 5, 9: 9, 10: 9}
# CUtensorMapDataType -> hardware type, for descriptors encoded through the driver's interface.
DRIVER_TYPE = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 8, 9: 10, 10: 7, 11: 7, 12: 7, 13: 11, 14: 12, 15: 13}
DRIVER_FLOATS = (6, 7, 8, 9, 10, 11, 12)
NAN_HALF = 0x7FF7  # an H200 fills each half word outside the tensor with this, for 16- and 32-bit floats alike
# CUtensorMapSwizzle (none, 32, 64, 128 bytes) -> XOR mask on 16-byte chunk numbers within a 128-byte line.
SWIZZLE_MASK = {0: 0, 1: 1, 2: 3, 3: 7}


@dataclass(frozen=True)
class TensorMap:
    address: int
    rank: int
    dtype: int
    swizzle: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, dimensions 1..
    box: tuple[int, ...]
    steps: tuple[int, ...]
    nan_fill: bool
    native: TensorMapState = field(compare=False, hash=False, repr=False, default_factory=TensorMapState)

    @property
    def element_bytes(self) -> float:
        return ELEMENT_BYTES[self.dtype]


def decode(raw: bytes) -> TensorMap:
    """Decode descriptor bytes to fields; raise Unsupported for values that this module does not understand."""
    address, flags = struct.unpack_from("<QI", raw, 0)
    low = struct.unpack_from("<4I", raw, 12)
    (high,) = struct.unpack_from("<I", raw, 28)
    dims = struct.unpack_from("<5I", raw, 32)
    (steps,) = struct.unpack_from("<I", raw, 52)
    if flags & 15 != 2 or flags & ~KNOWN_FLAGS:
        raise Unsupported(f"not a tiled tensor map: flags {flags:#x} (unknown bits {flags & ~KNOWN_FLAGS:#x})")
    rank = (flags >> 4 & 7) + 1
    dtype = flags >> 7 & 15
    if dtype not in ELEMENT_BYTES:
        raise Unsupported(f"tensor map with element type {dtype}")
    strides = tuple((s | (high >> 4 * k & 15) << 32) * 16 for k, s in enumerate(low))[: rank - 1]
    out = TensorMap(
        address,
        rank,
        dtype,
        flags >> 13 & 3,
        tuple(d + 1 for d in dims[:rank]),
        strides,
        tuple(b + 1 for b in raw[55 : 55 + rank]),
        tuple((steps >> 3 * k & 7) + 1 for k in range(rank)),
        bool(flags & NAN_FILL),
    )
    fill_native(out)
    return out


def fill_native(t: TensorMap) -> None:
    if t.steps[0] != 1:
        raise Unsupported("tensor map with a traversal stride in dimension 0")
    n = t.native
    n.address, n.rank, n.swizzle = t.address, t.rank, SWIZZLE_MASK[t.swizzle]
    n.fill = NAN_HALF if t.nan_fill else 0
    n.expand = EXPANDED.get(t.dtype, 0)
    n.units, n.unit_bytes = UNITS.get(t.dtype, (1, int(t.element_bytes)))
    n.stride[0] = n.unit_bytes
    for k, s in enumerate(t.strides):
        n.stride[k + 1] = s
    for k in range(t.rank):
        n.dim[k], n.box[k], n.step[k] = t.dims[k], t.box[k], t.steps[k]
    n.type = ATOMIC_FORMAT.get(t.dtype, 0)


def encode(
    driver_type: int, address: int, dims, strides, box, steps, swizzle: int, l2: int = 2, nan_fill: bool = False
) -> bytes:
    """Return the result of cuTensorMapEncodeTiled, for host functions that ask the driver for a descriptor."""
    if nan_fill and driver_type not in DRIVER_FLOATS:
        raise Unsupported("tensor map of integers with NaN fill")
    rank = len(dims)
    flags = 2 | (rank - 1) << 4 | DRIVER_TYPE[driver_type] << 7 | swizzle << 13 | l2 << 17 | nan_fill * NAN_FILL
    units = [s // 16 for s in strides] + [0] * (5 - rank)
    high = sum((s >> 32) << 4 * k for k, s in enumerate(units))
    packed_steps = sum((e - 1) << 3 * k for k, e in enumerate(steps))
    extents = [d - 1 for d in dims] + [0] * (5 - rank)
    raw = struct.pack("<QI4II5II", address, flags, *[s & 0xFFFFFFFF for s in units[:4]], high, *extents, packed_steps)
    return (raw[:55] + bytes([b - 1 for b in box] + [0] * (5 - rank))).ljust(128, b"\0")
