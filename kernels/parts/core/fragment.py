"""A tile's elements in registers, seen as rows: which rows and columns a lane holds, and how it lays them out to store.

wgmma and mma.sync leave the same picture in a thread's registers: of every 8-column block it holds two adjacent
columns in each of two rows that are 8 apart, and the four lanes of a quad share a row (PTX ISA, "wgmma register
fragment D"). Row r of the view, column c: register 4 * (c // 2) + 2 * r + c % 2. That is a
:class:`RowFragment`; of a transposed product, whose columns are the rows, a :class:`ColumnFragment`. Tensor memory is
read and written by rows, one lane a row: a :class:`LaneRow`.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import DeviceStruct


@dataclass
class Fragment(DeviceStruct):
    registers: Any  # rmem tensor of float32 values
    columns: int  # of each row that this lane holds

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
    """Rows that the four lanes of a quad share, whatever columns they hold of them."""

    rows = 2
    lanes_per_row = 4
    warp_rows = 16  # of a warp
    pass_columns = 64  # that go through shared memory at a time

    @staticmethod
    def index(r: int, c: int) -> int:
        return 4 * (c // 2) + 2 * r + c % 2

    @staticmethod
    def row_offset(r: int) -> int:
        """Return the tile row of ``r``, counted from the lane's first one."""
        return 8 * r

    @staticmethod
    def first_row():
        """Return the lane's first row within the 16 rows of its warp."""
        return cute.arch.lane_idx() // 4

    @staticmethod
    def staged_vector(staging, row, vector):
        """Return where a vector of a row of the warp's is staged: a row of 128 bytes for each."""
        return copy.swizzled_vector(staging, row, vector)


@dataclass
class RowFragment(QuadFragment):
    @staticmethod
    def column_offset(c: int) -> int:
        """Return the tile column of ``c``, counted from the lane's first one."""
        return 8 * (c // 2) + c % 2

    @staticmethod
    def first_column():
        return 2 * (cute.arch.lane_idx() % 4)

    def stage(self, staging, factors, begin: int, columns: int, dtype) -> None:
        """Write tile columns [begin, begin + columns) times ``factors`` (one a row) to rows of shared memory in
        ``dtype``."""
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
        """Write tile columns [begin, begin + columns) times ``factors`` (one a row) to rows of shared memory as
        float32."""
        for pair in range(columns // 8):
            first = begin // self.lanes_per_row + 2 * pair
            column = 8 * pair + self.first_column()
            for r in range(self.rows):
                place = self.staged_vector(staging, self.first_row() + self.row_offset(r), column // 4)
                values = [self.get(r, first + c) * factors[r] for c in range(2)]
                copy.store_shared(place + column % 4 * 4, values)


@dataclass
class SplitRowFragment(QuadFragment):
    """Rows of which, within sixteens, the even columns come before the odd ones, as ``TransposingConverter`` leaves V:
    of every sixteen a lane holds four neighbours. Or, in four ``parts``, within 32 columns those that are multiples of
    4 before those that follow one, and so on: then a lane holds eight."""

    parts: int = 2

    @property
    def _order(self) -> list[int]:
        """Say which of a lane's elements each of its neighbouring columns is."""
        return [2 * (i % self.parts) + i // self.parts for i in range(2 * self.parts)]

    def column_offset(self, c: int) -> int:
        """Return the tile column of ``c``, counted from the lane's first one."""
        held = 2 * self.parts
        return 4 * held * (c // held) + self._order.index(c % held)

    def first_column(self):
        return 2 * self.parts * (cute.arch.lane_idx() % 4)

    def stage_floats(self, staging, factors, begin: int, columns: int) -> None:
        held = 2 * self.parts  # neighbours
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
    """Rows as the columns of 16 x 8 products, of mma.sync or of a warp's part of wgmma, the tile's columns as their
    rows: registers of product (i, p) begin at 4 * (i * products + p), for rows 8 p to 8 p + 7 and 16 columns. These are
    16 i to 16 i + 15, as ``column_offset`` says, of mma.sync and of a single wgmma; of several wgmma those of a
    warpgroup's warps lie between each other."""

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
    warp_rows = 32
    pass_columns = 32

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
        """Columns [begin, begin + columns) by themselves."""
        return LaneRow(self.registers, columns, self.first + begin)

    def words(self, begin: int, columns: int, dtype, factor=None) -> list:
        """Columns [begin, begin + columns), times ``factor`` if given, in 16 bits, two in a word."""
        values = [self.get(0, begin + c) for c in range(columns)]
        if factor is not None:
            values = [value * factor for value in values]
        return [copy.pack_x2(dtype, values[c], values[c + 1]) for c in range(0, columns, 2)]

    def stage(self, staging, factors, begin: int, columns: int, dtype) -> None:
        """Write columns [begin, begin + columns) times ``factors[0]`` to rows of shared memory in ``dtype``."""
        words = self.words(begin, columns, dtype, factors[0])
        for vector in range(columns // 8):
            address = self.staged_vector(staging, cute.arch.lane_idx(), vector)
            copy.store_shared(address, words[4 * vector : 4 * vector + 4])

    @staticmethod
    def staged_vector(staging, row, vector):
        """Return where a vector of a row is staged: two rows share a swizzled row of 128 bytes."""
        return copy.swizzled_vector(staging, row // 2, row % 2 * 4 + vector)
