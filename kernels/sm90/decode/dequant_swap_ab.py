"""Hopper decode of few rows over 8-bit or 4-bit caches: ``swap_ab.py`` with operands dequantized in registers.

The kernel has the roles and edges of ``SwapABDecodeSm90``. Each warp of attend computes Q K^T for 16 keys of each tile.
After all warps have exchanged P, each computes P V over all keys for 16 of every 64 columns. Q is released when it is
in registers, and K and V when half of the stages have been multiplied.

Tiles have at most half of the bytes of 16-bit tiles. Every warp issues its own mma.sync, where wgmma needs a few
instructions for the whole warpgroup. So two CTAs share an SM, each with half of its registers and shared memory. While
one waits for memory, the other dequantizes.

Steady state: memory is the limit. A leaf is four tiles, A to D.

    memory         |  K of A', B'  |  K of C', D'  |     the other CTA's     |  V of A', B'  |  V of C', D'  | ...
    this CTA       | S(A), S(B) | S(C), S(D) | softmax, P | O = P V (A, B) | O += P V (C, D) | nodes |   waits
    the other CTA  |    waits     | S(A), S(B) | S(C), S(D) | softmax, P | O = P V (A, B) | O += P V (C, D) | ...
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, accumulate, place_in_warp
from hopwell.kernels.parts.dequant.eight_bit import of_two_keys
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import HalfLeafSoftmax
from hopwell.kernels.sm90.decode.base import argument_types
from hopwell.kernels.sm90.decode.dequant_products import BLOCK_BYTES, DequantProducts, padded
from hopwell.kernels.sm90.decode.leaves import row_factors, write_weights
from hopwell.kernels.sm90.decode.swap_ab import LeafProducts, SwapABDecodeSm90

MOST_COLUMNS = 256  # of K, in the tiles whose products a warp computes at a time; more do not fit in registers


@dataclass
class DequantLeafOperands(DequantProducts):
    """Operands of 8-bit and 4-bit caches, with the interface of LeafOperands. S^T and O^T are in registers, P is in
    shared memory. Warp w has 16 keys of each tile, and the columns of V and O given by ``columns``."""

    p_tile: Int32  # address of the first tile
    s: Any  # scores of a leaf's tiles, concatenated
    o: Any
    leaf_tiles: int
    at_once: int  # tiles of K or V multiplied without a wait between them, at most half of the stages
    columns: "WarpColumns"

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "DequantLeafOperands":
        products = kernel.tile.m // MMA_COLUMNS
        return DequantLeafOperands(
            **DequantProducts.fields(kernel, tiles, products),
            p_tile=shared_address(tiles.p.iterator),
            s=cute.make_rmem_tensor(4 * products * kernel.step_tiles, Float32),
            o=cute.make_rmem_tensor(4 * products * kernel.config.value_blocks, Float32),
            leaf_tiles=kernel.step_tiles,
            at_once=max(min(kernel.tile.kv_stages // 2, MOST_COLUMNS // padded(kernel.layout.tile_dims[0])), 1),
            columns=WarpColumns.of(kernel.config),
        )

    def _scores(self, i: int, tiles: int) -> ColumnFragment:
        """Return the scores of ``tiles`` tiles of a leaf, starting with tile i."""
        size = 4 * self.products
        registers = cute.make_tensor(self.s.iterator + i * size, cute.make_layout(tiles * size))
        return ColumnFragment(
            registers, tiles * ColumnFragment.warp_columns // ColumnFragment.lanes_per_row, self.products
        )

    def tile_scores(self, i: int) -> ColumnFragment:
        return self._scores(i, 1)

    def scores(self) -> ColumnFragment:
        return self._scores(0, self.kernel.scored_tiles)

    def begin(self, q_ring, work) -> None:
        """Load Q of a segment into registers."""
        self.load_q(q_ring.stage(work), 0)
        cute.arch.sync_warp()
        q_ring.release(work)

    def end(self, q_ring, work) -> None:
        """Do nothing: :meth:`begin` has released Q."""

    def multiply_keys(self, ring, step, q_stage) -> None:
        core_matrices = ColumnFragment.warp_columns // copy.ATOM_ROWS
        for i in range(0, self.leaf_tiles, self.at_once):
            steps = [step + i + j for j in range(self.at_once)]
            for each in steps:
                ring.wait_full(each)
            stages = [self._stage(ring, step, i + j) for j in range(self.at_once)]
            own = [
                (stage, warp_in_warpgroup() * core_matrices + core_matrix)
                for stage in stages
                for core_matrix in range(core_matrices)
            ]
            self.score(self._scores(i, self.at_once), own)
            self._give_back(ring, steps)

    def _stage(self, ring, step, tile: int):
        """Return the stage of a leaf's tile; ``step`` is the number of the leaf's first tile. If a leaf's stages are
        contiguous, tiles differ by constants."""
        return ring.stage(step) + tile if ring.stages % self.leaf_tiles == 0 else ring.stage(step + tile)

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of a tile of keys in float16."""
        write_weights(p, self.kernel.tile.m, Float16, scores, tile)

    @property
    def own_tiles(self) -> int:
        """Tiles of a leaf whose block scales this warpgroup rearranges."""
        return self.leaf_tiles

    def own_tile(self, number):
        """Return the number in the leaf of the ``number``-th tile whose block scales this warpgroup rearranges."""
        return number

    @cute.jit
    def prepare_values(self, ring, step) -> None:
        """Rearrange the block scales of V of a leaf, if it has any; each warp rearranges the scales of one tile."""
        if const_expr(self.v_scales is not None):
            stages = self.kernel.tile.kv_stages
            assert stages >= self.leaf_tiles, f"{self.leaf_tiles} tiles of V do not come to {stages} stages at once"
            for first in cutlass.range_constexpr(0, self.own_tiles, WARPS):
                number = first + warp_in_warpgroup()
                if number < self.own_tiles:
                    tile = self.own_tile(number)
                    ring.wait_full(step + tile)
                    self.v_scales.arrange(ring.stage(step + tile))

    def multiply_values(self, ring, step) -> None:
        self.o.fill(0.0)
        for i in range(0, self.leaf_tiles, self.at_once):
            steps = [step + i + j for j in range(self.at_once)]
            for each in steps:
                ring.wait_full(each)
            for j in range(self.at_once):
                self._add_values(i + j, self._stage(ring, step, i + j))
            self._give_back(ring, steps)
        if self.exponent != 0:
            for i in range(cute.size(self.o)):
                self.o[i] = self.o[i] * 2.0**-self.exponent

    def finish_values(self, ring, step) -> None:
        """Do nothing: O^T is complete when :meth:`multiply_values` returns."""

    def _give_back(self, ring, steps: list) -> None:
        cute.arch.sync_warp()
        for each in steps:
            ring.release(each)

    def _add_values(self, i: int, stage) -> None:
        """Add V^T P^T of a tile to O^T."""
        for first in range(0, LEAF_TILE, LANES):
            p = [self._weights(i, product, first) for product in range(self.products)]
            for part in range(cute.size(self.o) // (4 * self.products)):
                vector, pair = divmod(part, self.columns.pairs)
                if pair == 0:
                    columns = self._columns(stage, first, vector)
                for k in range(0, LANES // copy.ATOM_ROWS, 2):
                    a = [columns[k + half][2 * pair + row] for half in range(2) for row in range(2)]
                    for product in range(self.products):
                        accumulate(self.o, part * self.products + product, a, p[product][k : k + 2])

    def _columns(self, stage, first: int, vector: int) -> list:
        """Return columns of V of four core matrices of keys. Each word has two adjacent keys of this lane."""
        columns, (g, t) = self.columns, place_in_warp()
        found, scales = [], [None] * (LANES // copy.ATOM_ROWS)
        if self.v_scales is not None:
            block = (columns.vector(vector) * columns.per_vector + columns.of_lane(g)) // self.element.block
            scales = self.v_scales.of_core_matrices(stage, first // copy.ATOM_ROWS, t, block)
        for i, word in enumerate(self._values(stage, first, vector)):
            if columns.sharing > 1:
                word = word >> (columns.share() * (2 * self.element.bits))
            found.append(self.of_two_keys(word, scales[i]))
        return found

    def of_two_keys(self, word, factor):
        """Dequantize 16 bits of each of two keys to one word per column. ``factor`` has the block scales of both."""
        return of_two_keys(self.kernel.config.kv_type, word, factor)

    def _weights(self, i: int, product: int, first: int) -> list:
        """Return P of 8 rows and 32 keys of a tile, as operand B of two products."""
        lane = cute.arch.lane_idx()
        tile = self.p_tile + i * (self.kernel.tile.m * LEAF_TILE * HALFWORD_BYTES)
        row, vector = product * MMA_COLUMNS + lane % MMA_COLUMNS, first // copy.ATOM_ROWS + lane // MMA_COLUMNS
        return copy.load_matrix_x4(copy.swizzled_vector(tile, row, vector))

    def _values(self, stage, first: int, number: int) -> list:
        """Load V of 32 keys of a tile and one vector of this warp. A word has 16 bits of each of two keys."""
        # bytes before the vectors with this number
        lane, before = cute.arch.lane_idx(), number * self.columns.apart * copy.VECTOR_BYTES
        core_matrix = first // copy.ATOM_ROWS + lane // copy.ATOM_ROWS
        rows = self.rows(self.v_tile, 1, stage, core_matrix, self.value_blocks[before // BLOCK_BYTES])
        vector = before % BLOCK_BYTES // copy.VECTOR_BYTES + self.columns.vector(0)
        return copy.load_matrix_x4(self.vector(1, rows, lane % copy.ATOM_ROWS, vector), transposes=True)


@dataclass(frozen=True)
class WarpColumns:
    """Columns of V and O that a warp holds: every fourth 16-byte vector. It is half of every second one if the vectors
    of 4-bit codes cannot be distributed equally. Lane g holds 16 bits of a vector, as pairs of adjacent columns. Rows g
    and g + 8 of a product with V are the two columns of a pair."""

    per_lane: int  # columns in 16 bits
    sharing: int  # warps that share a vector

    @staticmethod
    def of(config: DecodeConfig) -> "WarpColumns":
        per_lane = 16 // config.kv_element.bits
        vectors = config.head_dim_v / (per_lane * MMA_COLUMNS)
        return WarpColumns(per_lane, 1 if vectors % WARPS == 0 else per_lane // 2)

    @property
    def apart(self) -> int:
        """Distance in vectors between consecutive vectors of a warp."""
        return WARPS // self.sharing

    @property
    def pairs(self) -> int:
        """Pairs of columns that a lane holds of a vector."""
        return self.per_lane // (2 * self.sharing)

    @property
    def per_vector(self) -> int:
        return self.per_lane * MMA_COLUMNS

    def vector(self, number: int):
        """Return the number in a row of this warp's ``number``-th vector."""
        return self.apart * number + warp_in_warpgroup() // self.sharing

    def share(self):
        """Return the index of this warp's share of a vector."""
        return warp_in_warpgroup() % self.sharing if self.sharing > 1 else 0

    def of_lane(self, g):
        """Return this lane's first column in a vector."""
        return self.per_lane * g + 2 * self.share()

    def pair(self, number: int, g):
        """Return the first column of this lane's ``number``-th pair."""
        vector, pair = divmod(number, self.pairs)
        return self.vector(vector) * self.per_vector + self.of_lane(g) + 2 * pair


@device_struct
class VectorOutput:
    """Output whose accumulators have pairs of adjacent columns, see :class:`WarpColumns`."""

    kernel: Any  # configuration only

    @cute.jit
    def store(self, output, statistics, rows: PackedRows) -> None:
        g, _ = place_in_warp()
        factors, columns = row_factors(output, statistics, rows), WarpColumns.of(self.kernel.config)
        for r in cutlass.range_constexpr(output.rows):
            row = output.first_row() + output.row_offset(r)
            target = rows.output(row, 0)
            for c in cutlass.range_constexpr(0, output.columns, 2):
                pair = [output.get(r, c) * factors[r], output.get(r, c + 1) * factors[r]]
                column = columns.pair(c // 2, g)
                if row < rows.count and column < self.kernel.config.head_dim_v:
                    copy.store_rounded(target + column * rows.out_bytes, pair, self.kernel.out_dtype)


DEQUANT = LeafProducts(DequantLeafOperands, Reader.SYNCED_LANES, HalfLeafSoftmax, VectorOutput)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABDecodeSm90(config, DEQUANT), example_arguments(argument_types(config), floats=3)
