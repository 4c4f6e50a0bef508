"""From accumulator registers to the output tensor and the log-sum-exp.

A warp owns its rows of the tile from start to end: it rounds them, lays them out in shared memory, and copies them row
by row to global memory in 16-byte pieces. No other warp's rows are touched, so a warp synchronises only with itself.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch import Addresses, Geometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, global_array, load_sink
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.query_rows import QueryRows
from hopwell.kernels.parts.score import ScoreMap
from hopwell.kernels.parts.softmax import LN_2, LOG2_E

WARP_ROWS = RowFragment.warp_rows
LANE_COLUMNS = 8  # that a lane stores at a time: 16 bytes of 16-bit elements
STAGED_FLOATS = copy.SWIZZLE_ROW_BYTES // 4  # columns of a staged row
STAGING_BYTES = 2 * WARP_ROWS * RowFragment.pass_columns  # of each warp


@dataclass(frozen=True)
class OutputRows(DeviceStruct):
    """The rows of ``out`` that a query tile writes: those of its first ``count`` tokens."""

    address: Int64  # of the tile's first token and head
    row_bytes: Int64  # from token to token
    head_bytes: Int64
    count: Int32
    columns: int  # of the output; what is stored may have up to 15 more

    element_bytes = 2

    @classmethod
    def of(cls, tile, columns: int, a: Addresses, g: Geometry, first_column=0) -> "OutputRows":
        """Of ``tile``, ``columns`` from ``first_column`` on."""
        size = cls.element_bytes
        first = Int64(tile.request.o_start + tile.first_row) * g.o_token + tile.head * g.o_head + first_column
        count = tile.request.q_len - tile.first_row
        return cls(a.out + size * first, size * g.o_token, size * g.o_head, count, columns)

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
        """Round ``output`` (a fragment, from column ``first_column`` of the output on) times ``factors`` to ``dtype``
        and write this warp's valid ``rows``.

        ``staging`` is the warp's own shared memory.
        """
        lane = cute.arch.lane_idx()
        pass_columns = self.pass_columns(output)
        chunks = pass_columns // LANE_COLUMNS
        rows_at_once = LANES // chunks
        width = output.columns * output.lanes_per_row
        for begin in cutlass.range_constexpr(0, width, pass_columns):
            rest = min(width - begin, pass_columns)
            self.stage(output, staging, factors, begin, rest, dtype)
            cute.arch.sync_warp()
            for step in cutlass.range_constexpr(output.warp_rows // rows_at_once):
                row, chunk = step * rows_at_once + lane // chunks, lane % chunks
                # Lanes past the last column, which store nothing, read what is there.
                words = self.staged_words(output, staging, row, cutlass.min(chunk, rest // LANE_COLUMNS - 1), dtype)
                column = first_column + begin + chunk * LANE_COLUMNS
                group = step * rows_at_once // copy.GROUP_ROWS
                token = rows.token(row, group)
                if token < self.count and column < self.columns:
                    place = self.address + token * self.row_bytes + column * self.element_bytes
                    if const_expr(not rows.of_one_head):
                        place += rows.head(group) * self.head_bytes
                    copy.store_global(place, words)
            cute.arch.sync_warp()

    def pass_columns(self, output) -> int:
        """Columns that go through shared memory at a time."""
        return output.pass_columns

    def stage(self, output, staging, factors, begin: int, columns: int, dtype) -> None:
        output.stage(staging, factors, begin, columns, dtype)

    def staged_words(self, output, staging, row, chunk, dtype) -> list:
        """What a lane stores: ``LANE_COLUMNS`` columns of a staged row."""
        return copy.load_shared(output.staged_chunk(staging, row, chunk), 4)


@dataclass(frozen=True)
class ConvertedRows(OutputRows):
    """Output of 16 bits that is staged as float32: for fragments that do not hold the pairs that stmatrix takes."""

    def pass_columns(self, output) -> int:
        return STAGED_FLOATS

    def stage(self, output, staging, factors, begin: int, columns: int, dtype) -> None:
        output.stage_floats(staging, factors, begin, columns)

    def staged_words(self, output, staging, row, chunk, dtype) -> list:
        values = []
        for half in range(2):
            values += copy.load_shared(output.staged_chunk(staging, row, 2 * chunk + half), 4, Float32)
        return self.converted(values, dtype)

    def converted(self, values: list, dtype) -> list:
        """The words of some neighbouring values."""
        return [copy.pack_x2(dtype, values[i], values[i + 1]) for i in range(0, len(values), 2)]


@dataclass(frozen=True)
class ByteRows(ConvertedRows):
    """Output of e4m3, whose largest values saturate."""

    element_bytes = 1

    def converted(self, values: list, dtype) -> list:
        return [copy.pack_e4m3_x4(values[i : i + 4]) for i in range(0, len(values), 4)]


@dataclass(frozen=True)
class RowResults(DeviceStruct):
    """What a query tile's rows end with besides the output: their normalisation, log-sum-exp and statistics."""

    score: ScoreMap
    sink: Float32  # natural logit
    slope: Float32
    first_position: Int32  # of the tile's row 0
    head_dim: int
    lse_rows: "LseRows"
    statistics: "StatisticsRows"

    @staticmethod
    def create(tile, count, score: ScoreMap, head_dim: int, a: Addresses, g: Geometry) -> "RowResults":
        """Of ``tile``, whose first ``count`` rows are valid."""
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
        """Write what there is to say of row ``row`` of the tile, r of this lane; returns what normalises its output."""
        shift = self.score.shift(self.slope, self.first_position + row)
        factor, lse = softmax.finish(r, self.sink - shift, lanes_per_row)
        total = softmax.sum_of_largest(r, lanes_per_row)
        largest = self.score.largest_logit(softmax.largest[r], shift)
        if cute.arch.lane_idx() % lanes_per_row == 0:
            self.lse_rows.store(row, lse + shift * LOG2_E)
            self.statistics.store(row, largest * self.head_dim**-0.5, total)
        return factor


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
