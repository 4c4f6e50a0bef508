"""Consumers of transposed products: rows spread over all warps of a warpgroup, see ``ColumnFragment``."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, place_in_warp, transposed
from hopwell.kernels.parts.rows.packed import PackedRows

# What lies behind the nodes in shared memory: what Tree.results says, and a float32 of each row for all warps, of one
# warpgroup, or of two with up to 16 rows.
RESULT_BYTES, STATE_BYTES = 256, 1024


class ColumnRows:
    """A base class beside a kind of attend in which each warp has some keys of a tile and columns of the output."""

    kernel: Any
    tiles: Any

    @property
    def warp(self):
        return warp_in_warpgroup()

    @property
    def consumer(self):
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS - 1

    def meet_warpgroup(self) -> None:
        """Wait for all warps of this warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.consumer, number_of_threads=WARPGROUP)

    def _of_warps(self, r: int):
        """Return the shared address of a float32 of each of this warpgroup's warps for row r of a lane."""
        row = self.consumer * self.kernel.tile.m + ColumnFragment.first_row() + ColumnFragment.row_offset(r)
        return shared_address(self.tiles.staging) + self.kernel.nodes_bytes + RESULT_BYTES + 4 * WARPS * row

    @cute.jit
    def gathered(self, values) -> list:
        """Return the values that this warpgroup's warps have for each row. The lanes of a warp that share it have the
        same."""
        _, t = place_in_warp()
        for r in cutlass.range_constexpr(len(values)):
            slot, value = shared_array(Float32, self._of_warps(r) + 4 * self.warp), values[r]
            if cute.arch.lane_idx() == t:
                slot[0] = value
        self.meet_warpgroup()
        return [copy.load_shared(self._of_warps(r), WARPS, Float32) for r in range(len(values))]

    def over_warps(self, values) -> list:
        """Return the largest of the warps' values for each row."""
        found = self.gathered(values)
        return [cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d)) for a, b, c, d in found]

    @cute.jit
    def write_weights(self, scores, tile: cutlass.Constexpr[int]) -> None:
        """Write P of a tile of keys as the tensor cores read it: it becomes the ``tile``-th in shared memory."""
        g, t = place_in_warp()
        base = shared_address(self.tiles.p.iterator) + tile * (self.kernel.tile.m * LEAF_TILE * HALFWORD_BYTES)
        for product in cutlass.range_constexpr(scores.products):
            for c in cutlass.range_constexpr(scores.columns):
                pair = scores.get(2 * product, c), scores.get(2 * product + 1, c)
                word = transposed(copy.pack_x2(self.kernel.weights_dtype, *pair))
                vector = copy.swizzled_vector(base, MMA_COLUMNS * product + g, 2 * self.warp + c)
                shared_array(Uint32, vector + 4 * t)[0] = word

    @cute.jit
    def row_factors(self, output, statistics, rows: PackedRows) -> list:
        """Return what turns the output of each row of a lane into the result; log-sum-exps are written."""
        _, t = place_in_warp()
        factors = []
        for r in cutlass.range_constexpr(output.rows):
            row, factor = output.first_row() + output.row_offset(r), Float32(0.0)
            if row < rows.count:
                writes = cute.arch.lane_idx() == t and self.warp == 0
                factor = rows.finish(row, *statistics[r], writes)
            factors.append(factor)
        return factors

    @cute.jit
    def store_columns(self, output, statistics, rows: PackedRows) -> None:
        """Write the results of rows, whose ``statistics`` are (reference, sum)."""
        g, t = place_in_warp()
        factors = self.row_factors(output, statistics, rows)
        for core_matrix in cutlass.range_constexpr(output.products):
            row = MMA_COLUMNS * core_matrix + g
            target = rows.output(row, 0)
            for c in cutlass.range_constexpr(output.columns):
                # A lane holds one column of two adjacent rows, and stores two columns of one.
                pair = [output.get(r, c) * factors[r] for r in (2 * core_matrix, 2 * core_matrix + 1)]
                word = transposed(copy.pack_x2(self.kernel.out_dtype, *pair))
                column = (WARPS * (c // 2) + self.warp) * ColumnFragment.warp_columns + c % 2 * MMA_COLUMNS + 2 * t
                if row < rows.count and column < self.kernel.config.head_dim_v:
                    copy.store_element("b32", target + column * rows.out_bytes, word)
