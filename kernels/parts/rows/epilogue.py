"""Epilogue: write accumulator registers to the output tensor, and write the log-sum-exp.

A warp owns its rows of the tile from start to end. It rounds them, stages them in shared memory, and copies them row by
row to global memory in 16-byte vectors. A warp touches no other warp's rows, so it synchronises only with itself.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from hopwell.kernels.elements import ELEMENTS, HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, global_array, load_sink
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.dequant import quantize
from hopwell.kernels.parts.rows.query_rows import QueryRows
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import LOG2_E, log_sum_exp

WARP_ROWS = RowFragment.warp_rows
NVFP4_BLOCK = ELEMENTS["nvfp4"].block
STAGING_BYTES = HALFWORD_BYTES * WARP_ROWS * RowFragment.pass_columns  # per warp


@device_struct(frozen=True)
class OutputRows:
    """Rows of ``out`` that a query tile writes: the rows of its first ``count`` tokens."""

    address: Int64  # address of the tile's first token and head
    row_bytes: Int64  # bytes between tokens
    head_bytes: Int64
    count: Int32
    columns: int  # output columns; stores may cover up to 15 more

    element_bits = 16
    lane_columns = 8  # columns per store of a lane

    @classmethod
    def of(cls, tile, columns: int, a: Addresses, g, first_column=0) -> "OutputRows":
        """Return the output rows of ``tile``: ``columns`` columns of it, starting at ``first_column``."""
        return cls(*cls._place(tile, a, g, first_column), tile.request.q_len - tile.first_row, columns)

    @classmethod
    def _place(cls, tile, a: Addresses, g, first_column) -> tuple:
        """Return ``address``, ``row_bytes`` and ``head_bytes``. Strides of elements below one byte are in bytes."""
        size = max(cls.element_bits // 8, 1)
        first = Int64(tile.request.o_start + tile.first_row) * g.o_token + tile.head * g.o_head
        return a.out + size * first + cls.bytes_of(first_column), size * g.o_token, size * g.o_head

    @classmethod
    def bytes_of(cls, columns):
        """Return the bytes of ``columns`` elements."""
        return columns * cls.element_bits // 8

    @cute.jit
    def store(
        self,
        output,
        factors,
        staging,
        rows: QueryRows,
        dtype: cutlass.Constexpr,
        first_column: cutlass.Constexpr = 0,
    ):
        """Multiply ``output`` by ``factors``, round it to ``dtype`` and write this warp's valid ``rows``.

        ``output`` is a fragment that starts at column ``first_column`` of the output. ``staging`` is the warp's own
        shared memory.
        """
        lane = cute.arch.lane_idx()
        pass_columns = self.pass_columns(output)
        vectors = pass_columns // self.lane_columns
        rows_at_once = LANES // vectors
        width = output.columns * output.lanes_per_row
        for begin in cutlass.range_constexpr(0, width, pass_columns):
            rest = min(width - begin, pass_columns)
            self.stage(output, staging, factors, begin, rest, dtype)
            cute.arch.sync_warp()
            for step in cutlass.range_constexpr(output.warp_rows // rows_at_once):
                row, vector = step * rows_at_once + lane // vectors, lane % vectors
                # Lanes past the last column store nothing, so they read the last valid vector.
                words = self.staged_words(
                    output, staging, row, cutlass.min(vector, rest // self.lane_columns - 1), dtype
                )
                column = first_column + begin + vector * self.lane_columns
                in_one_core_matrix = const_expr(rows_at_once <= copy.ATOM_ROWS)
                core_matrix = (
                    step * rows_at_once // copy.ATOM_ROWS if const_expr(in_one_core_matrix) else row // copy.ATOM_ROWS
                )
                token = rows.token(row, core_matrix)
                if token < self.count and column < self.columns:
                    place = self.address + token * self.row_bytes + self.bytes_of(column)
                    if const_expr(not rows.of_one_head):
                        place += rows.head(core_matrix) * self.head_bytes
                    self.write(place, words, token, rows.head(core_matrix), column)
            cute.arch.sync_warp()

    def pass_columns(self, output) -> int:
        """Columns staged through shared memory in one pass."""
        return output.pass_columns

    def stage(self, output, staging, factors, begin: int, columns: int, dtype) -> None:
        output.stage(staging, factors, begin, columns, dtype)

    def staged_words(self, output, staging, row, vector, dtype) -> list:
        """Return the words that a lane stores: ``lane_columns`` columns of a staged row."""
        return copy.load_shared(output.staged_vector(staging, row, vector), 4)

    def write(self, place, words, token, head, column) -> None:
        """Store a lane's words of one token and head, both relative to the tile's first."""
        copy.store_global(place, words)


@dataclass(frozen=True)
class ConvertedRows(OutputRows):
    """16-bit output staged as float32, for fragments without the 16-bit pairs that stmatrix takes."""

    def pass_columns(self, output) -> int:
        return output.pass_columns // 2

    def stage(self, output, staging, factors, begin: int, columns: int, dtype) -> None:
        output.stage_floats(staging, factors, begin, columns)

    def staged_words(self, output, staging, row, vector, dtype) -> list:
        values, vectors = [], self.lane_columns // 4
        for i in range(vectors):
            values += copy.load_shared(output.staged_vector(staging, row, vectors * vector + i), 4, Float32)
        return self.converted(values, dtype)

    def converted(self, values: list, dtype) -> list:
        """Return the words of some neighbouring values."""
        return [copy.pack_x2(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]

    def write_row(self, token, values: list, dtype, first_column: int) -> None:
        """Round ``values``, neighbouring columns of a row that one lane has, and store them.

        Rows of e4m3 that are no multiple of 16 bytes begin at multiples of 8 bytes.
        """
        place = self.address + token * self.row_bytes + self.bytes_of(first_column)
        vector_bytes = math.gcd(self.bytes_of(self.columns), copy.VECTOR_BYTES)
        columns = min(len(values), 8 * vector_bytes // self.element_bits)
        for c in range(0, len(values), columns):
            words = self.converted(values[c : c + columns], dtype)
            self.write(place + self.bytes_of(c), words, token, 0, first_column + c)


@dataclass(frozen=True)
class E4m3Rows(ConvertedRows):
    """e4m3 output; values beyond the e4m3 range saturate."""

    element_bits = 8

    def converted(self, values: list, dtype) -> list:
        return quantize.e4m3_words(values)


@dataclass(frozen=True)
class Nvfp4Rows(ConvertedRows):
    """NVFP4 output: each lane has one block, and also stores the scale of the block.

    Scales are in the 128x4 order: 512 bytes hold the scales of 128 rows by 4 columns. The innermost bytes are the 4
    columns. Rows 32 apart come next, then neighbouring rows.
    """

    scales: Int64  # address of the whole tensor
    first_scale_row: Int32  # scale row of the tile's first token
    first_scale_column: Int32  # scale column of the tile's first head and column
    scale_columns: Int32
    head_blocks: int

    element_bits = 4
    lane_columns = NVFP4_BLOCK

    @classmethod
    def of(cls, tile, columns: int, a: Addresses, g, first_column=0) -> "Nvfp4Rows":
        blocks = columns // NVFP4_BLOCK
        return cls(
            *cls._place(tile, a, g, first_column),
            tile.request.q_len - tile.first_row,
            columns,
            scales=a.out_scales,
            first_scale_row=Int32(g.out_scale_row) + tile.request.o_start + tile.first_row,
            first_scale_column=tile.head * blocks + first_column // NVFP4_BLOCK,
            scale_columns=Int32(g.out_scale_columns),
            head_blocks=blocks,
        )

    def converted(self, values: list, dtype) -> tuple:
        return quantize.nvfp4_block(values)

    def write(self, place, words, token, head, column) -> None:
        codes, scale = words
        copy.store_global(place, codes)
        row = self.first_scale_row + token
        column = self.first_scale_column + head * self.head_blocks + column // NVFP4_BLOCK
        atom = Int64(row // 128) * (self.scale_columns // 4) + column // 4
        copy.store_element("b8", self.scales + atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4, scale)


def output_rows(dtype, stages_pairs: bool) -> type[OutputRows]:
    """Return the class that writes rows of ``dtype``; ``stages_pairs``: whether fragments stage pairs of 16 bits."""
    if dtype.width == 16:
        return OutputRows if stages_pairs else ConvertedRows
    return E4m3Rows if dtype.width == 8 else Nvfp4Rows


@device_struct(frozen=True)
class RowResults:
    """Results of a query tile's rows besides the output: normalisation, log-sum-exp and statistics."""

    score: ScoreMap
    sink: Float32  # natural logit
    slope: Float32
    first_position: Int32  # position of the tile's row 0
    head_dim: int
    lse_rows: "LseRows"
    statistics: "StatisticsRows"

    @staticmethod
    def create(tile, count, score: ScoreMap, head_dim: int, a: Addresses, g: Geometry) -> "RowResults":
        """Return the destinations of the row results of ``tile``. Its first ``count`` rows are valid."""
        request = tile.request
        room = (
            Int32(g.lse_rows)
            + request.index * cutlass.max(Int32(g.lse_request), 0)
            - request.lse_start
            - tile.first_row
        )
        lse_rows = LseRows(
            address=a.lse,
            offset=Int64(request.lse_start + tile.first_row) * g.lse_row + tile.head * g.lse_head,
            row=g.lse_row,
            natural=Int32(g.lse_natural),
            count=cutlass.min(count, room),  # a request may be longer than the caller's bound
        )
        statistics = StatisticsRows(
            address=a.statistics,
            first=Int64(request.o_start + tile.first_row) * g.heads + tile.head,
            row=g.heads,
            count=count,
        )
        sink, slope = load_sink(a.sinks, tile.head), score.slope(tile.head)
        position = request.first_position + tile.first_row
        return RowResults(score, sink, slope, position, head_dim, lse_rows, statistics)

    @cute.jit
    def finish(self, softmax, r: cutlass.Constexpr[int], row, lanes_per_row: cutlass.Constexpr[int]):
        """Write the log-sum-exp and statistics of row ``row`` of the tile, and return its normalisation factor.

        The lane holds this row as its row ``r``.
        """
        shift = self.score.shift(self.slope, self.first_position + row)
        factor, lse = softmax.finish(r, self.sink - shift, lanes_per_row)
        total = softmax.sum_of_largest(r, lanes_per_row)
        largest = self.score.largest_logit(softmax.largest[r], shift)
        if cute.arch.lane_idx() % lanes_per_row == 0:
            self.lse_rows.store(row, lse + shift * LOG2_E, self.sink)
            self.statistics.store(row, largest * self.head_dim**-0.5, total)
        return factor


@device_struct(frozen=True)
class StatisticsRows:
    """Destinations of a query tile's largest logits and sums. An ``address`` of 0 disables the writes."""

    address: Int64  # address of the whole tensor, bytes
    first: Int64  # pair of the tile's row 0 and head
    row: Int64  # pairs between rows
    count: Int32

    @cute.jit
    def store(self, row, largest, total) -> None:
        if self.address != 0 and row < self.count:
            pair = 2 * (self.first + row * self.row)
            global_array(Float32, self.address)[pair] = largest
            global_array(Float32, self.address)[pair + 1] = total


@device_struct(frozen=True)
class LseRows:
    """Destination of a query tile's log-sum-exp. An ``address`` of 0 disables the writes."""

    address: Int64  # address of the whole tensor, bytes
    offset: Int64  # offset of the tile's row 0 and head, elements
    row: Int64
    natural: Int32
    count: Int32

    @cute.jit
    def store(self, row, lse, sink) -> None:
        """Store the base-2 log-sum-exp of a row in the caller's base; ``sink`` is part of it."""
        if self.address != 0 and row < self.count:
            value = log_sum_exp(lse, sink, self.natural)
            global_array(Float32, self.address)[self.offset + row * self.row] = value
