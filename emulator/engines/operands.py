"""Operands shared by asynchronous copies and tensor-core instructions."""

from __future__ import annotations

from dataclasses import dataclass

from ..decode.op import Context
from ..machine.state import Warp, first_lane, lanes_of
from ..native.layout import FULL

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

    def is_uniform(self, w: Warp, mask: int) -> bool:
        """Whether the lanes of ``mask`` have the same address."""
        if self.wide:
            return len({w.get64(self.row, lane) for lane in lanes_of(mask)}) == 1
        row = w.row32(self.row)
        return bool((row == row[first_lane(mask)])[slice(None) if mask == FULL else lanes_of(mask)].all())


def address_operand(c: Context, mem) -> Address:
    return Address(*c.address(mem))
