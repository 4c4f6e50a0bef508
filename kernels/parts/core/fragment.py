"""Fragments: a tile's elements in registers as rows, with the rows and columns of each lane and the layout for stores.

wgmma and mma.sync accumulators have the same layout. In every 8-column block, a thread holds two adjacent columns in
each of two rows that are 8 apart. The four lanes of a quad share a row (PTX ISA, "wgmma register fragment D"). Row r
and column c of the view are in register 4 * (c // 2) + 2 * r + c % 2. This layout is :class:`RowFragment`. For a
transposed product (swap-AB), whose columns are the rows, it is :class:`ColumnFragment`. Tensor memory is read and
written by rows, one row per lane: :class:`LaneRow`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float8E4M3FN

from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct


@device_struct
class Fragment:
    registers: Any  # rmem tensor of float32 values
    columns: int  # columns of each row in this lane

    def index(self, r: int, c: int) -> int:
        """Return the register of row r of the view, column c."""
        raise NotImplementedError

    def get(self, r: int, c: int):
        return self.registers[self.index(r, c)]

    def set(self, r: int, c: int, value) -> None:
        self.registers[self.index(r, c)] = value

    def scale_rows(self, factors) -> None:
        """Multiply each row by a factor."""
        for r in range(self.rows):
            for c in range(self.columns):
                self.set(r, c, self.get(r, c) * factors[r])


@dataclass
class QuadFragment(Fragment):
    """Rows that the four lanes of a quad share, for any distribution of columns."""

    rows = 2
    lanes_per_row = 4
    warp_rows = 16  # per warp
    pass_columns = 64  # 16-bit columns staged through shared memory in one pass

    @staticmethod
    def index(r: int, c: int) -> int:
        return 4 * (c // 2) + 2 * r + c % 2

    @staticmethod
    def row_offset(r: int) -> int:
        """Return the tile row of ``r``, relative to the lane's first row."""
        return 8 * r

    @staticmethod
    def first_row():
        """Return the lane's first row within the 16 rows of its warp."""
        return cute.arch.lane_idx() // 4

    @staticmethod
    def staged_vector(staging, row, vector):
        """Return the staging address of a vector of one of the warp's rows. Each staged row has 128 bytes."""
        return copy.swizzled_vector(staging, row, vector)


@dataclass
class RowFragment(QuadFragment):
    @staticmethod
    def column_offset(c: int) -> int:
        """Return the tile column of ``c``, relative to the lane's first column."""
        return 8 * (c // 2) + c % 2

    @staticmethod
    def first_column():
        return 2 * (cute.arch.lane_idx() % 4)

    def stage(self, staging, factors, begin: int, columns: int, dtype) -> None:
        """Write tile columns [begin, begin + columns) to rows of shared memory in ``dtype``.

        Each row is multiplied by its factor in ``factors``.
        """
        lane = cute.arch.lane_idx()
        for block in range(columns // 16):
            words = []
            for half in range(2):
                c = begin // self.lanes_per_row + 4 * block + 2 * half
                for r in range(self.rows):
                    pair = (self.get(r, c) * factors[r], self.get(r, c + 1) * factors[r])
                    words.append(copy.pack_x2(dtype, *pair))
            copy.store_matrix_x4(self.staged_vector(staging, lane % 16, 2 * block + lane // 16), words)

    def stage_floats(self, staging, factors, begin: int, columns: int) -> None:
        """Write tile columns [begin, begin + columns) to rows of shared memory as float32.

        Each row is multiplied by its factor in ``factors``.
        """
        for pair in range(columns // 8):
            first = begin // self.lanes_per_row + 2 * pair
            column = 8 * pair + self.first_column()
            for r in range(self.rows):
                place = self.staged_vector(staging, self.first_row() + self.row_offset(r), column // 4)
                values = [self.get(r, first + c) * factors[r] for c in range(2)]
                copy.store_shared(place + column % 4 * 4, values)


@dataclass
class SplitRowFragment(QuadFragment):
    """Rows with reordered columns: within each 16 columns, the even columns come before the odd ones.

    This is V's order after ``TransposingConverter``. A lane holds four neighbouring columns of each 16. With four
    ``parts``, each 32 columns are ordered by their index mod 4, and a lane holds eight neighbours.
    """

    parts: int = 2

    @property
    def _order(self) -> list[int]:
        """Element index of each of a lane's neighbouring columns, in column order."""
        return [2 * (i % self.parts) + i // self.parts for i in range(2 * self.parts)]

    def column_offset(self, c: int) -> int:
        """Return the tile column of ``c``, relative to the lane's first column."""
        held = 2 * self.parts
        return 4 * held * (c // held) + self._order.index(c % held)

    def first_column(self):
        return 2 * self.parts * (cute.arch.lane_idx() % 4)

    def stage_floats(self, staging, factors, begin: int, columns: int) -> None:
        held = 2 * self.parts  # neighbouring columns
        for block in range(columns // (4 * held)):
            first = begin // self.lanes_per_row + held * block
            for r in range(self.rows):
                values = [self.get(r, first + c) * factors[r] for c in self._order]
                for i in range(0, held, 4):
                    vector = held * block + cute.arch.lane_idx() % 4 * (held // 4) + i // 4
                    place = self.staged_vector(staging, self.first_row() + self.row_offset(r), vector)
                    copy.store_shared(place, values[i : i + 4])


@dataclass
class ColumnFragment(Fragment):
    """Rows as the columns of 16 x 8 products (swap-AB): the tile's columns are the M side of the products.

    The products are mma.sync, or a warp's part of wgmma. Registers of product (i, p) begin at 4 * (i * products + p),
    for rows 8 p to 8 p + 7 and 16 columns. For mma.sync and a single wgmma, these are columns 16 i to 16 i + 15, as
    ``column_offset`` returns. With several wgmma, the columns of a warpgroup's warps are interleaved.
    """

    products: int  # side by side

    lanes_per_row = 8  # 4 apart
    warp_columns = 16  # of a product

    @property
    def rows(self) -> int:
        return 2 * self.products

    def index(self, r: int, c: int) -> int:
        return 4 * (c // 2 * self.products + r // 2) + 2 * (c % 2) + r % 2

    @staticmethod
    def column_offset(c: int) -> int:
        return 8 * c

    @staticmethod
    def first_column():
        return cute.arch.lane_idx() // 4

    @staticmethod
    def row_offset(r: int) -> int:
        return 8 * (r // 2) + r % 2

    @staticmethod
    def first_row():
        return 2 * (cute.arch.lane_idx() % 4)


@dataclass
class LaneRow(Fragment):
    first: int = 0  # register of column 0

    rows = 1
    lanes_per_row = 1

    def index(self, r: int, c: int) -> int:
        return self.first + c

    @staticmethod
    def column_offset(c: int) -> int:
        return c

    @staticmethod
    def first_column() -> int:
        return 0

    @staticmethod
    def row_offset(r: int) -> int:
        return 0

    @staticmethod
    def first_row():
        """Return the lane's row within the 32 rows of its warp."""
        return cute.arch.lane_idx()

    def part(self, begin: int, columns: int) -> "LaneRow":
        """Return columns [begin, begin + columns) as a separate fragment."""
        return LaneRow(self.registers, columns, self.first + begin)

    def words(self, dtype) -> list:
        """Return the row in ``dtype``, packed into words."""
        values = [self.get(0, c) for c in range(self.columns)]
        if dtype is Float8E4M3FN:
            return [copy.pack_e4m3_x4(values[c : c + 4]) for c in range(0, self.columns, 4)]
        return [copy.pack_x2(dtype, values[c], values[c + 1]) for c in range(0, self.columns, 2)]
