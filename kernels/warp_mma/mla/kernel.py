"""sm_120 MLA decode: Hopper's kernel for few rows with products of single warps, for any number of row tiles."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass.cute as cute

from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.tree import Tree
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.sm90.decode.swap_ab import LeafAttend, LeafTiles
from hopwell.kernels.sm90.mla.swap_ab import LatentLeaves, SwapABMlaSm90
from hopwell.kernels.warp_mma.common.lane_readers import LaneReaders
from hopwell.kernels.warp_mma.common.products import WarpProducts
from hopwell.kernels.warp_mma.decode.config import Sm120MlaConfig


class MlaSm120(LaneReaders, SwapABMlaSm90):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left. K and V are the left and right halves of a
    key; both halves are key and value.

    Warp roles
        warp 0 load_keys   both halves of the keys; if lanes copy rows, half of the rows
        warp 1 load_keys   the other half of the rows; or dequantize: 8-bit keys, see parts/dequant/latent_rows.py
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of output tiles (lines), see parts/partition/stream_k.py
        warps 4..7 attend  from Q K^T to a leaf's node, and from nodes to the output

    Edges
        loaded K, loaded V  load_keys -> dequantize  bytes of both halves of 8-bit keys; released on K and V
        Q       load_q -> attend      released after the segment's last leaf
        K, V    load_keys -> attend   released when the product with their half of the value has been added to O
        work    schedule -> all       released as soon as it has been read

    Steady state: memory is the limit. On sm_120 there is room for one tile of 576 columns, and its left half is
    reloaded first. Narrower keys, and Blackwell, have two or more tiles in flight.

        memory         |          waits            | left of A'       | right of A' | ...
        attend         | S(A)  | P of A | O += P V left | O += P V right |    waits
    """

    nodes_bytes = 0  # nodes wait in registers and in global memory

    def _more_edges(self) -> tuple[Edge, ...]:
        return ()

    def _combine(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Tree:
        return replace(super()._combine(addresses, geometry, tiles), held=self._node())

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        """Return the arrive counts of K or V. Both halves are values, so their rows may become zeros."""
        return super().kv_arrivals(True)

    def consumer(self, **parts: Any) -> "WarpLatentAttend":
        return WarpLatentAttend(**parts)


@dataclass
class WarpLatentOperands(WarpProducts):
    """Operands of single warps, with the interface of LatentLeafOperands."""

    @staticmethod
    def create(kernel, tiles: LeafTiles) -> "WarpLatentOperands":
        return WarpLatentOperands(**WarpProducts.fields(kernel, tiles, 1))

    def multiply_keys(self, rings, step, q_stage) -> None:
        """Compute S^T of tile ``step``, over both halves of its columns."""
        self.s.fill(0.0)
        for kv_half, ring in enumerate(rings):
            ring.wait_full(step)
            depths = self.kernel.config.kv_dims
            self.add_scores(0, kv_half, ring.stage(step), q_stage, depths[kv_half], kv_half * depths[0])

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to both halves of O^T, and release the tile's halves."""
        half = self.kernel.config.head_dim_v // 2
        for kv_half, ring in enumerate(rings):
            self.add_values(0, kv_half, ring.stage(step), half, kv_half * half)
            ring.release(step)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    def rescale_output(self, factors) -> None:
        self.output().scale_rows(factors)


@dataclass
class WarpLatentAttend(LatentLeaves, LeafAttend):
    """The consumer warpgroup, which combines leaves itself."""

    operands_type: ClassVar[type] = WarpLatentOperands


def build(config: Sm120MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return MlaSm120(config), example_arguments((Addresses, DecodeGeometry), floats=3)
