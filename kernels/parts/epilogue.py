"""From accumulator registers to the output tensor and the log-sum-exp.

A warp owns 16 rows of the tile from start to end: it rounds them, lays them out in shared memory, and copies whole rows
to global memory in 16-byte pieces. No other warp's rows are touched, so a warp synchronises only with itself.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, global_array
from hopwell.kernels.parts.softmax import LN_2

WARP_ROWS = 16  # rows of an MMA tile that one warp holds
PASS_COLUMNS = 64  # 16-bit columns that go through shared memory at a time: one swizzled row of 128 bytes
STAGING_BYTES = WARP_ROWS * copy.SWIZZLE_ROW_BYTES  # of each warp


@dataclass
class OutputRows(DeviceStruct):
    """The rows of ``out`` that a query tile writes: row t of the tile is valid for t < ``count``."""

    address: Int64  # of the tile's row 0 and the tile's head
    row_bytes: Int64
    count: Int32
    columns: int  # of the output; ``output`` may hold up to 15 more

    @cute.jit
    def store(self, output, factors, staging, first_row, dtype: cutlass.Constexpr) -> None:
        """Round ``output`` (a RowFragment) times ``factors`` to ``dtype`` and write this warp's valid rows.

        ``staging`` is the warp's own STAGING_BYTES of shared memory; ``first_row`` is its first row in the tile.
        """
        lane = cute.arch.lane_idx()
        rows_at_once = 32 // copy.CHUNKS_PER_ROW
        for first_column in cutlass.range_constexpr(0, output.columns * output.lanes_per_row, PASS_COLUMNS):
            rest = min(output.columns * output.lanes_per_row - first_column, PASS_COLUMNS)
            for block16 in cutlass.range_constexpr(rest // 16):
                words = []
                for half in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        c = first_column // output.lanes_per_row + 4 * block16 + 2 * half
                        low, high = output.get(r, c) * factors[r], output.get(r, c + 1) * factors[r]
                        words.append(copy.pack_x2(dtype, low, high))
                copy.store_matrix_x4(copy.swizzled_chunk(staging, lane % 16, 2 * block16 + lane // 16), words)
            cute.arch.sync_warp()
            for step in cutlass.range_constexpr(WARP_ROWS // rows_at_once):
                row, chunk = step * rows_at_once + lane // copy.CHUNKS_PER_ROW, lane % copy.CHUNKS_PER_ROW
                # Lanes past the last column, which store nothing, read what is there.
                words = copy.load_shared_x4(copy.swizzled_chunk(staging, row, cutlass.min(chunk, rest // 8 - 1)))
                if first_row + row < self.count and first_column + chunk * 8 < self.columns:
                    offset = (first_row + row) * self.row_bytes + first_column * 2 + chunk * copy.CHUNK_BYTES
                    copy.store_global_x4(self.address + offset, words)
            cute.arch.sync_warp()


@dataclass
class StatisticsRows(DeviceStruct):
    """Where a query tile's largest logits and sums go. Nothing is written where ``address`` is 0."""

    address: Int64  # of the whole tensor, bytes
    first: Int64  # the pair of the tile's row 0 and head
    row: Int64  # pairs from row to row
    count: Int32

    @cute.jit
    def store(self, row, largest, total) -> None:
        if self.address != 0 and row < self.count:
            pair = 2 * (self.first + row * self.row)
            global_array(Float32, self.address)[pair] = largest
            global_array(Float32, self.address)[pair + 1] = total


@dataclass
class LseRows(DeviceStruct):
    """Where a query tile's log-sum-exp goes. Nothing is written where ``address`` is 0."""

    address: Int64  # of the whole tensor, bytes
    offset: Int64  # of the tile's row 0 and head, elements
    row: Int64
    natural: Int32
    count: Int32

    @cute.jit
    def store(self, row, value) -> None:
        if self.address != 0 and row < self.count:
            scaled = value * LN_2 if self.natural != 0 else value
            global_array(Float32, self.address)[self.offset + row * self.row] = scaled
