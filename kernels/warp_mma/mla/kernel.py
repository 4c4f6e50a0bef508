"""sm_120 MLA decode: Hopper's kernel for few rows with products of single warps, for any number of row tiles.

The kernel has the warp roles and edges of ``SwapABMlaSm90`` without a combine role: warps 4..7, attend, also combine
nodes and write the output.

Steady state: memory is the limit. On sm_120 there is room for one tile of 576 columns, and its left half is
reloaded first. Narrower keys, and Blackwell, have two or more tiles in flight.

    memory         |          waits            | left of A'       | right of A' | ...
    attend         | S(A)  | P of A | O += P V left | O += P V right |    waits
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.sm90.decode.swap_ab import LeafProducts
from hopwell.kernels.sm90.mla.swap_ab import SwapABMlaSm90
from hopwell.kernels.warp_mma.common.products import WarpProducts
from hopwell.kernels.warp_mma.decode.config import Sm120MlaConfig


@dataclass
class WarpLatentOperands(WarpProducts):
    """Operands of single warps, with the interface of LatentLeafOperands."""

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "WarpLatentOperands":
        return WarpLatentOperands(**WarpProducts.fields(kernel, tiles, 1))

    def multiply_keys(self, rings, step, q_stage) -> None:
        """Compute S^T of tile ``step``, over both halves of its columns."""
        self.s.fill(0.0)
        for kv_half, ring in enumerate(rings):
            ring.wait_full(step)
            depths = self.kernel.layout.kv_dims
            self.add_scores(0, kv_half, ring.stage(step), q_stage, depths[kv_half], kv_half * depths[0])

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to both halves of O^T, and release the tile's halves."""
        half = self.kernel.config.head_dim_v // 2
        for kv_half, ring in enumerate(rings):
            self.add_values(0, kv_half, ring.stage(step), half, kv_half * half)
            ring.release(step)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    def rescale(self, softmax) -> None:
        """Rescale O to the references that the latest step has chosen."""
        softmax.rescale_output(self.output())


WARP_MMA = LeafProducts(WarpLatentOperands, Reader.LANES)


def build(config: Sm120MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABMlaSm90(config, WARP_MMA), example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
