"""sm_120 MLA decode: Hopper's kernel for few rows with products of single warps, for any number of tiles of rows."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass.cute as cute

from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts.fragment import ColumnFragment
from hopwell.kernels.parts.tree import Tree
from hopwell.kernels.pipeline import Edge
from hopwell.kernels.skeleton import example_arguments
from hopwell.kernels.sm90.decode_few_rows import LeafAttend, LeafTiles
from hopwell.kernels.sm90.mla_few_rows import FewRowsMlaSm90, LatentLeaves
from hopwell.kernels.sm120.kernel import LaneReaders
from hopwell.kernels.sm120.products import WarpProducts
from hopwell.kernels.sm120_decode_config import Sm120MlaConfig


class MlaSm120(LaneReaders, FewRowsMlaSm90):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left. K and V are the left and right sides of a
    key, both of them key and value.

    Warp roles
        warp 0 load_keys   both sides of the keys; where lanes copy rows, half of them
        warp 1 load_keys   the other half; or widen: keys of 8 bits, see parts/widened_rows.py
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of lines, see parts/ranges.py
        warps 4..7 attend  from Q K^T to a leaf's node, from nodes to the output

    Edges
        loaded K, loaded V  load_keys -> widen  bytes of both sides, where keys have 8 bits; given back on K and V
        Q       load_q -> attend      released after the segment's last leaf
        K, V    load_keys -> attend   released when the product with their half of the value has been added to O
        work    schedule -> all       released as soon as it has been read

    Steady state: memory is the limit. On sm_120 there is room for one tile of 576 columns, whose left side is fetched
    again first; narrower keys, and Blackwell, have two tiles or more under way.

        memory         |          waits            | left of A'       | right of A' | ...
        attend         | S(A)  | P of A | O += P V left | O += P V right |    waits
    """

    nodes_bytes = 0  # nodes wait in registers and in memory

    def _more_edges(self) -> tuple[Edge, ...]:
        return ()

    def _merge(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Tree:
        return replace(super()._merge(addresses, geometry, tiles), held=self._node())

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        """Both sides are values, whose rows may become zeros."""
        return super().kv_arrivals(True)

    def consumer(self, **parts: Any) -> "WarpLatentAttend":
        return WarpLatentAttend(**parts)


@dataclass
class WarpLatentOperands(WarpProducts):
    """Operands of single warps, used as LatentLeafOperands are."""

    @staticmethod
    def create(kernel, tiles: LeafTiles) -> "WarpLatentOperands":
        return WarpLatentOperands(**WarpProducts.fields(kernel, tiles, 1))

    def multiply_keys(self, rings, step, q_stage) -> None:
        """Compute S^T of tile ``step``, over both sides of its columns."""
        self.s.fill(0.0)
        for side, ring in enumerate(rings):
            ring.wait_full(step)
            depths = self.kernel.config.kv_dims
            self.add_scores(0, side, ring.stage(step), q_stage, depths[side], side * depths[0])

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to both halves of O^T, and give the tile's sides back."""
        half = self.kernel.config.head_dim_v // 2
        for side, ring in enumerate(rings):
            self.add_values(0, side, ring.stage(step), half, side * half)
            ring.release(step)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    def rescale_output(self, factors) -> None:
        self.output().scale_rows(factors)


@dataclass
class WarpLatentAttend(LatentLeaves, LeafAttend):
    """The consumer warpgroup, which merges leaves itself."""

    operands_type: ClassVar[type] = WarpLatentOperands


def build(config: Sm120MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return MlaSm120(config), example_arguments((Addresses, DecodeGeometry), floats=3)
