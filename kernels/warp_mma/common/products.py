"""Transposed (swap-AB) products of single warps over 16-bit tiles: S^T = K Q^T and O^T = V^T P^T."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address, tied, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, MMA_DEPTH, accumulate
from hopwell.kernels.sm90.decode.leaves import write_weights

WARP_COLUMNS = ColumnFragment.warp_columns


@device_struct
class WarpProducts:
    """Operands in shared memory, S^T and O^T in registers. Warp w has 16 keys of each tile, and the 16 columns from 16
    w on in every 64 columns of V and O. So accumulators hold the same elements as in Hopper's warps."""

    s: Any  # scores of tiles, concatenated
    o: Any
    q_tile: Int32  # addresses of the first stages
    kv_tiles: tuple
    p_tile: Int32
    products: int  # products of 8 rows, side by side
    kernel: Any  # configuration only

    @staticmethod
    def fields(kernel, tiles, scored_tiles: int) -> dict[str, Any]:
        """Return the values of the fields above by name."""
        products, columns = kernel.tile.m // MMA_COLUMNS, -(-kernel.config.head_dim_v // BLOCK_COLUMNS) * BLOCK_COLUMNS
        return dict(
            s=cute.make_rmem_tensor(4 * products * scored_tiles, Float32),
            o=cute.make_rmem_tensor(4 * products * columns // (WARPS * WARP_COLUMNS), Float32),
            q_tile=shared_address(tiles.q.iterator),
            kv_tiles=tuple(shared_address(tile.iterator) for tile in (tiles.k, tiles.v)),
            p_tile=shared_address(tiles.p.iterator),
            products=products,
            kernel=kernel,
        )

    def begin(self, q_ring, work) -> None:
        """Do nothing: Q of a segment stays in shared memory."""

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of a tile of keys to ``p`` in shared memory, as tile number ``tile``."""
        write_weights(p, self.kernel.tile.m, self.kernel.dtype, scores, tile)

    def prepare_values(self, rings, step) -> None:
        """Do nothing: the warps that read the weights synchronize with the warps that wrote them."""

    def scores(self, first: int = 0, tiles: int = 0) -> ColumnFragment:
        """Return the scores of ``tiles`` tiles, starting with tile ``first``; by default of all tiles."""
        size = 4 * self.products
        tiles = tiles or cute.size(self.s) // size
        registers = cute.make_tensor(self.s.iterator + first * size, cute.make_layout(tiles * size))
        return ColumnFragment(registers, tiles * WARP_COLUMNS // ColumnFragment.lanes_per_row, self.products)

    def add_scores(self, tile: int, part: int, stage, q_stage, depth: int, q_first: int = 0) -> None:
        """Add K Q^T to the scores of a tile, over ``depth`` columns of the keys and of Q, in Q from ``q_first`` on.
        ``part`` selects K (0) or V (1), in MLA the left or right half of the keys."""
        config, lane = self.kernel.config, _lane(stage)
        own = warp_in_warpgroup() * WARP_COLUMNS % self.kernel.tile.n  # the first of the warp's keys in the stage
        q_tile = self.q_tile + q_stage * (self.kernel.tile.m * config.layout.q_columns * HALFWORD_BYTES)
        keys = self._stage(part, stage)
        for step in range(depth // MMA_DEPTH):
            if step % 2 == 0:
                rows = self._rows(lane, q_tile, config.layout.q_columns, q_first // MMA_DEPTH + step)
            key, vector = own + lane % 16, 2 * step + lane // 16
            a = copy.load_matrix_x4(self._vector(keys, part, key, vector))
            for product in range(self.products):
                accumulate(self.s, tile * self.products + product, a, rows[step % 2][product], self.kernel.dtype)

    def add_values(self, tile: int, part: int, stage, columns: int, first: int = 0, first_key: int = 0) -> None:
        """Add V^T P^T to O^T, starting with column ``first`` of O. The product covers ``columns`` columns of a stage of
        K (``part`` 0) or V (1), in MLA of the left or right half of the keys. P is tile number ``tile``, which has
        these keys from ``first_key`` on."""
        lane, values = _lane(stage), self._stage(part, stage)
        p_tile = self.p_tile + tile * (self.kernel.tile.m * LEAF_TILE * HALFWORD_BYTES)
        for step in range(self.kernel.tile.n // MMA_DEPTH):
            if step % 2 == 0:
                rows = self._rows(lane, p_tile, LEAF_TILE, first_key // MMA_DEPTH + step)
            for block in range(columns // BLOCK_COLUMNS):
                # Lanes address two core matrices of columns, each for two core matrices of keys.
                key = MMA_DEPTH * step + lane // 16 * 8 + lane % 8
                vector = copy.VECTORS_PER_ROW * block + 2 * warp_in_warpgroup() + lane // 8 % 2
                a = copy.load_matrix_x4(self._vector(values, part, key, vector), transposes=True)
                for product in range(self.products):
                    fragment = (first // BLOCK_COLUMNS + block) * self.products + product
                    accumulate(self.o, fragment, a, rows[step % 2][product], self.kernel.dtype)

    def _stage(self, part: int, stage):
        return self.kv_tiles[part] + stage * (self.kernel.tile.n * self.kernel.layout.columns[part] * HALFWORD_BYTES)

    def _vector(self, stage, part: int, key, vector):
        n, columns = self.kernel.tile.n, self.kernel.layout.columns[part]
        return copy.tile_vector(stage, key, vector, n, columns, self.kernel.source.columns_first)

    def _rows(self, lane, tile, columns: int, step: int) -> list[list]:
        """Return all rows of Q or P as operand B of the products of two steps: for each step two words per product."""
        words = []
        for i in range(self.products):
            matrix = 4 * i + lane // 8
            row = matrix // 2 % self.products * MMA_COLUMNS + lane % 8
            vector = 2 * step + matrix // (2 * self.products) * 2 + matrix % 2
            words += copy.load_matrix_x4(copy.tile_vector(tile, row, vector, self.kernel.tile.m, columns, False))
        pairs = [words[i : i + 2] for i in range(0, len(words), 2)]
        return [pairs[: self.products], pairs[self.products :]]


def _lane(stage):
    """Return the lane index, tied to ``stage``; addresses in a stage are derived from it.

    Without the tie, the compiler would keep these addresses and Q itself in registers while leaves are combined, and
    registers do not suffice. A tied value could be any number. The mask tells the compiler that it is below 32. It then
    adds constants to few addresses instead of computing each one. A tile of MLA has 604 instead of 2021 instructions,
    and 128 heads reach 136 instead of 103 TFLOP/s (32 x 8192, H200, 2026-11-25).
    """
    return tied(cute.arch.lane_idx(), stage) & (LANES - 1)
