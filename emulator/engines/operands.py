"""Operands shared by asynchronous copies and tensor-core instructions."""

from __future__ import annotations

from dataclasses import dataclass

from ..decode.op import Context
from ..machine.state import Warp

REDUCTIONS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "inc": 8, "dec": 9}


@dataclass
class Address:
    """A memory operand: row, byte offset, width of the address register."""

    row: int
    offset: int
    wide: bool

    def of(self, w: Warp, lane: int) -> int:
        value = w.get64(self.row, lane) if self.wide else w.get32(self.row, lane)
        return value + self.offset


def address_operand(c: Context, mem) -> Address:
    return Address(*c.address(mem))
