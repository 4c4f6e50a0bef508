"""Consumers of transposed (swap-AB) products: all warps of a warpgroup share the rows, see ``ColumnFragment``."""

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

# Shared memory behind the nodes: RESULT_BYTES for ``Tree.results``, then STATE_BYTES for one float32 per row and warp.
# STATE_BYTES fits one warpgroup, or two warpgroups with up to 16 rows.
RESULT_BYTES, STATE_BYTES = 256, 1024


class ColumnRows:
    """Mixin for consumers in which each warp holds some keys of a tile and some columns of the output."""

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
        """Return the shared address of row r's float32 values, one for each warp of this warpgroup."""
        row = self.consumer * self.kernel.tile.m + ColumnFragment.first_row() + ColumnFragment.row_offset(r)
        return shared_address(self.tiles.staging) + self.kernel.nodes_bytes + RESULT_BYTES + 4 * WARPS * row

    @cute.jit
    def gathered(self, values) -> list:
        """Return the values of this warpgroup's warps for each row. The lanes of a warp that share a row must pass the
        same value."""
        _, t = place_in_warp()
        for r in cutlass.range_constexpr(len(values)):
            slot, value = shared_array(Float32, self._of_warps(r) + 4 * self.warp), values[r]
            if cute.arch.lane_idx() == t:
                slot[0] = value
        self.meet_warpgroup()
        return [copy.load_shared(self._of_warps(r), WARPS, Float32) for r in range(len(values))]

    def over_warps(self, values) -> list:
        """Return the maximum over the warps for each row."""
        found = self.gathered(values)
        return [cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d)) for a, b, c, d in found]

    @cute.jit
    def write_weights(self, scores, tile: cutlass.Constexpr[int]) -> None:
        """Write P of a tile of keys to shared memory as tile number ``tile``, in the layout that
        the tensor cores read."""
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
        """Return the factor that normalizes each row of a lane's output, and write the log-sum-exps."""
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
        """Write the results of all rows; ``statistics`` are their (reference, sum)."""
        g, t = place_in_warp()
        factors = self.row_factors(output, statistics, rows)
        for core_matrix in cutlass.range_constexpr(output.products):
            row = MMA_COLUMNS * core_matrix + g
            target = rows.output(row, 0)
            for c in cutlass.range_constexpr(output.columns):
                # A lane holds one column of two adjacent rows. The transpose gives it two columns of one row to store.
                pair = [output.get(r, c) * factors[r] for r in (2 * core_matrix, 2 * core_matrix + 1)]
                word = transposed(copy.pack_x2(self.kernel.out_dtype, *pair))
                column = (WARPS * (c // 2) + self.warp) * ColumnFragment.warp_columns + c % 2 * MMA_COLUMNS + 2 * t
                if row < rows.count and column < self.kernel.config.head_dim_v:
                    copy.store_element("b32", target + column * rows.out_bytes, word)
