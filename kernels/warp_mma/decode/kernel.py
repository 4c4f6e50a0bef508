"""sm_120 decode: Hopper's kernels for few rows with products of single warps, for any number of row tiles.

The kernels have the warp roles and edges of ``SwapABDecodeSm90``. Requests with more rows have several row tiles.

Steady state: memory is the limit. A leaf is two tiles, A and B, or four. Up to 128 columns, the stages hold at least
one leaf.

    memory         |    K of A'    |    K of B'    |         |    V of A'    |    V of B'     | ...
    attend         | S(A)  | S(B)  | P of both     | O = P V (A) | O += P V (B) | nodes |   waits

On sm_120 a stage of 512 columns has half of the keys of a tile. These are the keys of two warps, which multiply them by
Q. Over 8-bit and 4-bit caches, products are of single warps on Hopper too. An SM has one CTA here instead of two, with
more registers for its warps.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.parts.core.device import warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.sm90.decode import dequant_swap_ab
from hopwell.kernels.sm90.decode.base import argument_types
from hopwell.kernels.sm90.decode.swap_ab import LeafProducts, SwapABDecodeSm90
from hopwell.kernels.warp_mma.common.products import WARP_COLUMNS, WarpProducts
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig


@dataclass
class WarpLeafOperands(WarpProducts):
    """Operands of single warps, with the interface of LeafOperands."""

    leaf_tiles: int

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "WarpLeafOperands":
        fields = WarpProducts.fields(kernel, tiles, kernel.config.leaf_tiles)
        return WarpLeafOperands(**fields, leaf_tiles=kernel.config.leaf_tiles)

    def loaded(self, i: int) -> tuple[int, int]:
        """Return the tile of the leaf to which the i-th load of its keys belongs, and the first loaded key in that
        tile. Loads come from right to left."""
        keys = self.kernel.tile.n
        tile, part = divmod(i, LEAF_TILE // keys)
        return tile, LEAF_TILE - (part + 1) * keys

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Compute S^T of a leaf, and release its tiles of K; ``step`` is the number of the leaf's first load."""
        self.s.fill(0.0)
        for i in range(self.kernel.step_tiles):
            ring.wait_full(step + i)
            self._add_own_scores(*self.loaded(i), ring.stage(step + i), q_stage)
            ring.release(step + i)

    @cute.jit
    def _add_own_scores(self, tile: cutlass.Constexpr[int], first: cutlass.Constexpr[int], stage, q_stage) -> None:
        """Multiply the warp's keys, if they are among the loaded keys, which start at key ``first`` of the tile."""
        keys, depth = self.kernel.tile.n, self.kernel.layout.depth[0]
        if const_expr(keys == LEAF_TILE):
            self.add_scores(tile, 0, stage, q_stage, depth)
        else:
            if warp_in_warpgroup() * WARP_COLUMNS // keys == first // keys:
                self.add_scores(tile, 0, stage, q_stage, depth)
            cute.arch.sync_warp()

    def multiply_values(self, ring, step) -> None:
        """Compute O^T of a leaf, and release its tiles of V."""
        self.o.fill(0.0)
        for i in range(self.kernel.step_tiles):
            ring.wait_full(step + i)
            tile, first_key = self.loaded(i)
            self.add_values(tile, 1, ring.stage(step + i), self.kernel.layout.columns[1], first_key=first_key)
            ring.release(step + i)

    def finish_values(self, ring, step) -> None:
        """Do nothing: O^T is complete when :meth:`multiply_values` returns."""

    def tile_scores(self, i: int) -> ColumnFragment:
        return self.scores(i, 1)


WARP_MMA = LeafProducts(WarpLeafOperands, Reader.LANES)
DEQUANT = replace(dequant_swap_ab.DEQUANT, reader=Reader.LANES)


def build(config: Sm120DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    products = DEQUANT if config.dequantizes_in_registers else WARP_MMA
    return SwapABDecodeSm90(config, products), example_arguments(argument_types(config), floats=3)
