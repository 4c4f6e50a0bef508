"""Accumulator registers of a warp-level or warpgroup-level MMA, seen as rows.

wgmma and mma.sync leave the same picture in a thread's registers: of every 8-column block it holds two adjacent
columns in each of two rows that are 8 apart, and the four lanes of a quad share a row (PTX ISA, "wgmma register
fragment D"). Row r of the view, column c: register 4 * (c // 2) + 2 * r + c % 2.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.parts.device import DeviceStruct


@dataclass
class RowFragment(DeviceStruct):
    registers: Any  # rmem tensor of columns_of_tile / 2 float32 values
    columns: int  # columns of each row that this lane holds: a quarter of the tile's

    rows = 2
    lanes_per_row = 4

    @staticmethod
    def index(r: int, c: int) -> int:
        return 4 * (c // 2) + 2 * r + c % 2

    def get(self, r: int, c: int):
        return self.registers[self.index(r, c)]

    def set(self, r: int, c: int, value) -> None:
        self.registers[self.index(r, c)] = value

    @staticmethod
    def column_offset(c: int) -> int:
        """Tile column of ``c``, counted from the lane's first one."""
        return 8 * (c // 2) + c % 2

    @staticmethod
    def first_column():
        return 2 * (cute.arch.lane_idx() % 4)

    @staticmethod
    def row_offset(r: int) -> int:
        """Tile row of ``r``, counted from the lane's first one."""
        return 8 * r

    @staticmethod
    def first_row():
        """The lane's first row within the 16 rows of its warp."""
        return cute.arch.lane_idx() // 4
