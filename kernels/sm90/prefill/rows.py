"""Rows of Hopper prefill: their positions, the keys they see, and their results."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.partition.tiles import QueryTile
from hopwell.kernels.parts.rows.epilogue import RowResults, output_rows
from hopwell.kernels.parts.rows.head_scales import output_scale_of, with_scale_of
from hopwell.kernels.parts.rows.mask import IntervalMask, LogitRow, TileRange
from hopwell.kernels.parts.rows.query_rows import QueryRows, request_shape
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.sm90.common.attend import Attend
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS


@device_struct
class PrefillRows:
    """Rows of one head, or with packed GQA rows of several heads of a KV head."""

    kernel: Any  # configuration only
    tiles: SharedTiles
    mask: IntervalMask
    score: ScoreMap
    softmax: OnlineSoftmax
    output_scale: Any  # a Float32 or HeadScales
    tile_shape: TileShape
    addresses: Addresses
    geometry: Geometry

    def logit_row(self, tile: QueryTile, warp_row) -> LogitRow:
        """Return the rows that a lane holds, of the rows from ``warp_row`` of the tile on."""
        first = tile.request.first_position + tile.first_row + RowFragment.first_row()
        rows = self._rows(tile, warp_row)
        positions = tuple(first + rows.token(RowFragment.row_offset(r), r) for r in range(RowFragment.rows))
        return LogitRow(positions, tile.request.kv_len, self.score.slope(tile.head))

    def _rows(self, tile: QueryTile, warp_row) -> QueryRows:
        if self.kernel.config.packs_heads:
            # This hides from the compiler that a warp's row never changes. It would keep values derived from the row in
            # registers that the steps need.
            warp_row = cute.arch.make_warp_uniform(warp_row)
        return QueryRows(warp_row, request_shape(self.tile_shape, tile.request.q_len))

    def own_keys(self, tile: QueryTile, row) -> TileRange:
        """Return the keys of the tile that a warpgroup's rows see; ``row`` is the first of these rows in the tile."""
        packed = self.kernel.config.packs_heads
        return self._keys_of_heads(tile, row) if packed else self._keys_of_rows(tile, row)

    @cute.jit
    def _keys_of_heads(self, tile: QueryTile, row) -> TileRange:
        """Return the keys that a warpgroup's rows from ``row`` on see under packed GQA. The warpgroup has rows of all
        of the tile's tokens, or none."""
        keys, shape = replace(tile.keys), request_shape(self.tile_shape, tile.request.q_len)
        keys.end = keys.end if row < shape.heads * shape.tokens else keys.begin
        return keys

    @cute.jit
    def _keys_of_rows(self, tile: QueryTile, row) -> TileRange:
        """Return the keys that a warpgroup's rows from ``row`` on see in a tile of one head."""
        request, first = tile.request, tile.first_row + row
        last = cutlass.min(first + WARPGROUP_ROWS, request.q_len) - 1
        position = request.first_position
        keys = self.mask.tiles(position + first, position + last, request, self.kernel.tile.n)
        keys.begin = keys.begin if first <= last else tile.keys.begin
        keys.end = keys.end if first <= last else tile.keys.begin
        return keys

    @cute.jit
    def store(self, operands, tile: QueryTile, work, warp_row, column_half):
        """Normalise this warp's rows; write them and their log-sum-exp."""
        config, output, rows = self.kernel.config, operands.output(), self._rows(tile, warp_row)
        addresses, geometry = self.addresses, self.geometry
        columns = config.head_dim_v // config.v_splits
        writer = output_rows(self.kernel.out_dtype, stages_pairs=self.kernel.stages_pairs)
        out = writer.of(tile, columns, addresses, geometry, column_half * operands.depth_v)
        if const_expr(config.packs_heads):
            out = replace(out, count=cutlass.min(out.count, rows.shape.tokens))
        # Warpgroups that share rows have the same statistics. Only the first one writes them.
        count_once = out.count if column_half == 0 else Int32(0)
        scale, factors = output_scale_of(self.output_scale, addresses, tile), []
        for r in cutlass.range_constexpr(output.rows):
            if const_expr(r == 0 or config.packs_heads):
                part = replace(tile, head=tile.head + rows.head(r))
                results = RowResults.create(part, count_once, self.score, config.head_dim_qk, addresses, geometry)
            token = rows.token(output.row_offset(r), r) + output.first_row()
            factors.append(results.finish(self.softmax, r, token, output.lanes_per_row) * scale)
        consumer_warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        staging = self.kernel.output_staging(self.tiles, consumer_warp)
        out.store(output, factors, staging, rows, self.kernel.out_dtype)


class HeadScaledAttend(Attend):
    """The consumer role of prefill whose KV heads have softmax scales of their own, read once for each work tile."""

    def of_tile(self, tile: QueryTile) -> Attend:
        """Return this role with the softmax scale of the tile's KV head."""
        score, softmax = with_scale_of(self.score, self.softmax, self.rows.addresses, tile.kv_head)
        rows = replace(self.rows, score=score, softmax=softmax)
        return replace(self, score=score, softmax=softmax, rows=rows)
