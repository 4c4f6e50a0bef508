"""Layout of a warp's register file: registers, constants and special registers are all rows of 32 lanes.

Each row starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from ..errors import Unsupported
from ..native.layout import ROW_16, ROW_32, ROW_64, ROW_128, ROW_PRED, SMEM_BASE, SPECIALS
from ..ptx import Imm, Kernel, Reg, Special, Sym

WIDTHS = ("r", "d", "q", "h")
ROW_BYTES = {"h": 64, "r": 128, "d": 256, "q": 512}
ELEMENT = {"h": 2, "r": 4, "d": 8, "q": 16}
ROW_KIND = {"h": ROW_16, "r": ROW_32, "d": ROW_64, "q": ROW_128, "p": ROW_PRED}
POISON = {"h": 0xDEAD, "r": 0x7FC0DEAD, "d": 0x7FF8DEADDEADDEAD, "q": 0x7FC0DEAD7FC0DEAD7FC0DEAD7FC0DEAD}


def width_of(type_name: str) -> str:
    """Return the register group for values of a PTX type."""
    if type_name in ("f16x2", "bf16x2", "tf32"):
        return "r"
    if type_name == "f32x2":
        return "d"
    if type_name.endswith("x2"):
        return "h"
    bits = int("".join(c for c in type_name if c.isdigit()))
    return {8: "h", 16: "h", 32: "r", 64: "d", 128: "q"}[bits]


def constant_bits(imm: Imm, type_name: str) -> int:
    """Return the bits of an immediate in the width of its operand."""
    bits = imm.bits
    width = width_of(type_name)
    if imm.floating == "f64" and type_name in ("f32", "b32"):
        bits = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", bits))[0]))[0]
    elif imm.floating == "f32" and type_name == "f64":
        bits = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0]))[0]
    return bits & ((1 << 8 * ELEMENT[width]) - 1)


@dataclass
class RegisterFile:
    """Assigns rows while a kernel is decoded: registers by width, then all other rows in order of appearance."""

    kernel: Kernel
    base: dict[str, int] = field(default_factory=dict)
    rows: dict[object, int] = field(default_factory=dict)
    constants: list[tuple[str, int, int]] = field(default_factory=list)  # width, offset, bits
    specials: list[tuple[int, int]] = field(default_factory=list)
    addresses: list[tuple[str, int, int]] = field(default_factory=list)  # width, offset, shared address of rank 0
    parameters: list[tuple[str, int, int, str]] = field(default_factory=list)  # width, offset, byte offset, type
    extra_predicates: dict[object, int] = field(default_factory=dict)
    total: int = 0

    def __post_init__(self) -> None:
        for w in WIDTHS:
            self.base[w] = self.total
            self.total += self.kernel.counts[w] * ROW_BYTES[w]

    @property
    def predicates(self) -> int:
        return self.kernel.counts["p"] + len(self.extra_predicates)

    def register(self, reg: Reg) -> int:
        if reg.kind == "p":
            return reg.idx
        return self.base[reg.kind] + reg.idx * ROW_BYTES[reg.kind]

    def _new(self, width: str, key: object) -> int:
        row = self.rows[key] = self.total
        self.total += ROW_BYTES[width]
        return row

    def constant(self, width: str, bits: int) -> int:
        key = ("const", width, bits)
        if key not in self.rows:
            self.constants.append((width, self._new(width, key), bits))
        return self.rows[key]

    def scratch(self, width: str) -> int:
        """Return a row without readers, for the destination ``_``."""
        key = ("scratch", width)
        return self.rows[key] if key in self.rows else self._new(width, key)

    def special(self, s: Special) -> int:
        if s.name not in SPECIALS:
            raise Unsupported(f"special register %{s.name}")
        key = ("special", s.name)
        if key not in self.rows:
            self.specials.append((SPECIALS[s.name], self._new("r", key)))
        return self.rows[key]

    def predicate(self, key: object) -> int:
        """Return a predicate without a PTX register: carry flag, constants, %is_explicit_cluster."""
        if key not in self.extra_predicates:
            self.extra_predicates[key] = self.predicates
        return self.extra_predicates[key]

    def symbol(self, s: Sym, width: str) -> int:
        """Return the row with the address of a shared, local or parameter symbol."""
        key = ("symbol", s, width)
        if key in self.rows:
            return self.rows[key]
        k = self.kernel
        if s.name in k.shared or s.name in k.dynamic:
            if s.name in k.shared:
                address = SMEM_BASE + k.shared[s.name][0]
            else:  # dynamic shared memory follows the static part at its own alignment
                align = max(16, k.dynamic[s.name])
                address = -(-(SMEM_BASE + k.static_smem) // align) * align
            row = self._new(width, key)
            self.addresses.append((width, row, address + s.off))
            return row
        if s.name in k.local:
            return self.rows.setdefault(key, self.constant(width, k.local[s.name] + s.off))
        for p in k.params:
            if p.name == s.name:
                return self.rows.setdefault(key, self.constant(width, p.offset + s.off))
        raise Unsupported(f"symbol {s.name}")

    def parameter(self, width: str, byte_offset: int, type_name: str) -> int:
        """Return the row that a launch fills with a kernel parameter's value."""
        key = ("param", width, byte_offset, type_name)
        if key not in self.rows:
            self.parameters.append((width, self._new(width, key), byte_offset, type_name))
        return self.rows[key]

    # -- the bytes of a fresh register file
    def template(self, param_bytes: bytes) -> np.ndarray:
        out = np.zeros(self.total, np.uint8)
        for w in WIDTHS:
            count = self.kernel.counts[w]
            size = count * ROW_BYTES[w]
            poison = np.frombuffer(POISON[w].to_bytes(ELEMENT[w], "little"), np.uint8)
            out[self.base[w] : self.base[w] + size] = np.tile(poison, size // ELEMENT[w])
        for w, row, bits in self.constants:
            self.fill(out, w, row, bits)
        for w, row, address in self.addresses:
            self.fill(out, w, row, address)
        for w, row, offset, type_name in self.parameters:
            size = int("".join(c for c in type_name if c.isdigit())) // 8
            signed = type_name[0] == "s"
            value = int.from_bytes(param_bytes[offset : offset + size], "little", signed=signed)
            self.fill(out, w, row, value & ((1 << 8 * ELEMENT[w]) - 1))
        return out

    @staticmethod
    def fill(file: np.ndarray, width: str, row: int, bits: int) -> None:
        element = np.frombuffer(bits.to_bytes(ELEMENT[width], "little"), np.uint8)
        file[row : row + ROW_BYTES[width]] = np.tile(element, 32)
