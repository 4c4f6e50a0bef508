"""Rows of decode: packed GQA rows, their view of the keys, and their results."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import Combine
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.pipeline import Rings
from hopwell.kernels.parts.partition.split_kv import SplitTile
from hopwell.kernels.parts.rows.head_scales import softmax_scale_of
from hopwell.kernels.parts.rows.mask import DraftRow, IntervalMask, LogitRow, TileRange, TokenPositions
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.problem import MaskKind


@device_struct
class PackedLogits:
    """The view of packed GQA rows on the keys."""

    mask: IntervalMask
    addresses: Addresses
    geometry: DecodeGeometry

    def head_scale(self, tile: SplitTile):
        """Return the softmax scale of the tile's KV head, if each head has one."""
        return softmax_scale_of(self.addresses, tile.kv_head)

    def logit_row(self, tile: SplitTile, warp_row, fragment: Any = RowFragment) -> LogitRow:
        """Return the rows that a lane holds in a ``fragment`` of scores whose first row is ``warp_row``."""
        request = tile.request
        first = tile.first_row + warp_row + fragment.first_row()
        if const_expr(self.mask.kind not in (MaskKind.DRAFT, MaskKind.CYCLIC)):
            return LogitRow((request.first_position,) * fragment.rows, request.kv_len, Float32(0.0))
        tokens = []
        for r in range(fragment.rows):
            token = (first + fragment.row_offset(r)) // Int32(self.geometry.group)
            tokens.append(cutlass.max(cutlass.min(token, request.q_len - 1), 0))
        if const_expr(self.mask.kind is MaskKind.CYCLIC):
            positions = TokenPositions.of_request(self.mask.kind, request, self.addresses, self.geometry)
            return LogitRow(tuple(positions.of(token) for token in tokens), request.kv_len, Float32(0.0))
        return DraftRow.create(request, tokens, self.addresses, self.geometry)


@device_struct
class HeadScores:
    """Scores with a softmax scale of each KV head, which rows hold as their slope. It replaces a ``ScoreMap``."""

    def apply(self, scores, slope, tile_start, positions) -> None:
        """Multiply the scores by the scale."""
        scores.scale_rows([slope] * scores.rows)


@device_struct
class SplitKvRows:
    """Packed rows over requests whose keys are split into chunks (split-KV)."""

    kernel: Any  # configuration only
    rings: Rings
    softmax: OnlineSoftmax
    output_scale: Float32
    combine: Combine
    logits: PackedLogits

    def logit_row(self, tile: SplitTile, warp_row) -> LogitRow:
        """Return the rows that a lane holds, of the rows from ``warp_row`` of the tile on."""
        row = self.logits.logit_row(tile, warp_row)
        if self.kernel.config.k_head_scales:
            row = replace(row, slope=self.logits.head_scale(tile))
        return row

    def own_keys(self, tile: SplitTile, row) -> TileRange:
        """Return the key range of the tile. All rows share one range, because their last visible
        keys are nearly equal."""
        return tile.keys

    @cute.jit
    def store(self, operands, tile: SplitTile, work, warp_row, column_half):
        """Write this warp's rows to the output, or to a partial if the request has several chunks."""
        rows = PackedRows.create(
            self.logits.addresses, self.logits.geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8
        )
        self.open_partial(tile, work)
        if tile.chunks == 1:
            store_rows(operands, rows, self.softmax, self.kernel.out_dtype, self.columns, warp_row, column_half)
        else:
            self.store_partial(operands, rows, tile.partial_id, warp_row, column_half)
        self.close_partial(tile, rows, work)

    @cute.jit
    def open_partial(self, tile: SplitTile, work) -> None:
        """Wait until the work tile's partial, if there is one, may be written."""
        if const_expr(self.kernel.config.has_combine_role):
            self.rings.partial.wait_released(work)
        else:
            self.combine.prepare(tile)
            self.combine.meet()

    @cute.jit
    def close_partial(self, tile: SplitTile, rows: PackedRows, work) -> None:
        """Signal that the work tile's results have been written."""
        if const_expr(self.kernel.config.has_combine_role):
            self.rings.partial.fill(work)
        else:
            self.combine.meet()
            if tile.chunks > 1:
                self.combine.complete(tile, rows, self.kernel.out_dtype)

    @cute.jit
    def store_partial(self, operands, rows: PackedRows, partial_id, warp_row, column_half) -> None:
        output = operands.output()
        for r in cutlass.range_constexpr(output.rows):
            row = warp_row + output.first_row() + output.row_offset(r)
            pairs = [
                (output.get(r, c), output.get(r, c + 1)) for c in range(0, self.columns // output.lanes_per_row, 2)
            ]
            reference, total = self.softmax.partial(r, output.lanes_per_row)
            if row < rows.count:
                self.combine.slots.store(partial_id, row, pairs, reference, total, output.first_column(), column_half)

    @property
    def columns(self) -> int:
        """Columns of the output that this warpgroup holds."""
        return self.kernel.config.head_dim_v // self.kernel.config.v_splits


@cute.jit
def store_rows(
    operands,
    rows: PackedRows,
    softmax,
    dtype: cutlass.Constexpr,
    columns: cutlass.Constexpr[int],
    warp_row,
    column_half,
) -> None:
    """Write a warp's rows to the output; the warpgroup holds ``columns`` columns."""
    output = operands.output()
    lanes, own_columns = output.lanes_per_row, columns // output.lanes_per_row
    # The lanes of a row exchange columns, so that each lane stores 16 bytes and all lanes whole sectors. With
    # stores of 4 bytes a lane, the output of 64 MLA requests took 5.9 us (H200, 2026-11-24).
    in_vectors = 0 if dtype.width < 16 else own_columns // copy.CORE_MATRIX_ROWS * copy.CORE_MATRIX_ROWS
    for r in cutlass.range_constexpr(output.rows):
        row = warp_row + output.first_row() + output.row_offset(r)
        is_there, first_column = row < rows.count, output.first_column()
        reference, total = softmax.partial(r, lanes)
        writes_lse = (first_column == 0) & (column_half == 0) & is_there
        safe = cutlass.max(cutlass.min(row, rows.count - 1), 0)
        factor = rows.finish(safe, reference, total, writes_lse)
        first = rows.output(safe, column_half * columns)
        for c in cutlass.range_constexpr(0, in_vectors, copy.CORE_MATRIX_ROWS):
            words = [
                copy.pack_x2(dtype, output.get(r, c + k) * factor, output.get(r, c + k + 1) * factor)
                for k in range(0, copy.CORE_MATRIX_ROWS, 2)
            ]
            vector = copy.transpose_quad(words)
            if is_there:
                column = output.column_offset(c) + cute.arch.lane_idx() % lanes * copy.CORE_MATRIX_ROWS
                copy.store_global(first + column * HALFWORD_BYTES, vector)
        if is_there:
            for c in cutlass.range_constexpr(in_vectors, own_columns, 2):
                scaled = [output.get(r, c) * factor, output.get(r, c + 1) * factor]
                column = first_column + output.column_offset(c)
                copy.store_rounded(first + column * dtype.width // 8, scaled, dtype)
