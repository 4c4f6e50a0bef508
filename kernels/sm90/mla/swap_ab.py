"""Hopper MLA decode of few rows (swap-AB, stream-K): leaves of keys against up to 16 packed rows, combined as a tree.

With 16 heads, a tensor-parallel share of 128, HBM bandwidth is the limit. So products are transposed, leaves are
combined, and CTAs have equal shares, as in ``sm90/decode/swap_ab.py``. A wgmma always has 64 rows, but may have only 8
columns. A product of keys with 16 rows of Q takes only as long as reading the keys from shared memory. This is about
half of the time for 64 rows of Q.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import node_bytes
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.tree import Node, Tree
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import LOADERS, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.parts.partition.stream_k import StreamKSchedule, StreamKTile, TopkStreamKSchedule
from hopwell.kernels.sm90.common.kernel import Q_WARP
from hopwell.kernels.sm90.common.mma import issue_mma, make_transposed_mmas
from hopwell.kernels.sm90.decode.leaf_tree import LeafTree
from hopwell.kernels.sm90.decode.swap_ab import (
    ColumnOperands,
    LeafConsumer,
    LeafTiles,
    SwapABDecodeSm90,
    transposed_values,
)
from hopwell.kernels.sm90.mla.key_halves import LatentKeys, LatentRows


class SwapABMlaSm90(LatentKeys, SwapABDecodeSm90):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left, with the warp roles and edges of
    :class:`SwapABDecodeSm90`. K and V are the left and right halves of a key; both halves are key and value.

    Warp roles
        warp 0 load_keys   both halves of the keys; if lanes copy rows, half of the rows
        warp 1 load_keys   the other half of the rows; or dequantize: 8-bit keys, see parts/dequant/latent_rows.py
        warps 4..7 attend  from Q K^T to a leaf's node
        warps 8..11 combine  from nodes to the output, see parts/combine/tree.py

    Edges
        loaded K, loaded V  load_keys -> dequantize  bytes of both halves of 8-bit keys; released on K and V
        K, V    load_keys -> attend   released when the product with their half of the value has been added to O
        leaf    attend -> combine     a leaf's node; released when it is in registers

    Steady state: memory is the limit. A tile is processed in half of the time of its load. Combining a leaf takes as
    long as half a tile, and longer if its node waits in global memory. So a separate warpgroup combines.

        memory         | A'                                                   | ...
        tensor cores   | S(A)  |        | O += P V left | O += P V right |      waits
        attend         | waits | P of A |           waits                |      waits
    """

    p_tiles = 1
    dequant_warps_of_8_bits = 1

    @property
    def warps_without_work(self) -> int:
        """Load warps without work: the second one, which copies rows, if TMA loads the keys."""
        return LOADERS - self.loading_warps - self.dequant_warps

    @property
    def schedule_type(self) -> type[StreamKSchedule]:
        return TopkStreamKSchedule if self.config.sparse else StreamKSchedule

    @property
    def nodes_bytes(self) -> int:
        """Bytes of shared memory through which a leaf's node passes to the combine warpgroup."""
        return node_bytes(self.tile.m, self.config.head_dim_v)

    def _more_edges(self) -> tuple[Edge, ...]:
        return (Edge("leaf", "attend", "combine", 1, 4, 4, 0, LANES, LANES),)

    def run_combine(self, tiles, rings, work_queue, addresses, geometry, scale) -> None:
        combine = replace(self._combine(addresses, geometry, tiles), held=self._node())
        self.combine_type(self, tiles, rings.leaf, scale, combine).run(self._node(), work_queue, addresses, geometry)

    @property
    def combine_type(self) -> "type[LatentCombine]":
        return LatentCombine

    def _node(self) -> Node:
        """Return a node in new registers: for the node that rises, or for the node that waits at the first level."""
        elements = self.tile.m * self.config.head_dim_v // WARPGROUP
        return Node.of(cute.make_rmem_tensor(elements, Float32), self.tile.m)

    def consumer(self, **parts: Any) -> "LatentLeafAttend":
        return LatentLeafAttend(**parts)

    @cute.jit
    def load(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue, schedule, scale):
        """Run the warps of the first warpgroup that load keys and Q."""
        if warp < LOADERS - self.warps_without_work:
            self.load_keys(warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue)
        elif warp == Q_WARP:
            self.load_all_q(addresses, geometry, tiles, rings, work_queue)


@dataclass
class LatentOperands(ColumnOperands):
    """Operands of one tile at a time. Its keys are also the values, in a left and a right half."""

    depths: tuple[int, int]  # columns of the two halves that are multiplied
    columns: int  # of the output

    @staticmethod
    def latent_fields(kernel, tiles: LeafTiles, mmas: tuple) -> dict[str, Any]:
        depth_qk, columns = kernel.config.depth
        fields = ColumnOperands.fields(kernel, tiles, mmas, (tiles.k, tiles.v), columns, 1)
        return dict(**fields, depths=(columns // 2, depth_qk - columns // 2), columns=columns)

    def multiply_keys(self, rings, step, q_stage) -> None:
        """Compute S^T of tile ``step``, over the columns of its left half (0) and then of its right half (1)."""
        for kv_half, ring in enumerate(rings):
            ring.wait_full(step)
            k, q = self.k[kv_half][None, None, None, ring.stage(step)], self.q[None, None, None, q_stage]
            issue_mma(
                self.qk_mma,
                self._tile_scores(0),
                k,
                q,
                self.depths[kv_half],
                kv_half > 0,
                (0, kv_half * self.depths[0]),
            )
        warpgroup.wait_group(0)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, self.columns // (WARPS * ColumnFragment.lanes_per_row), self.products)

    def rescale_output(self, factors) -> None:
        self.output().scale_rows(factors)


@dataclass
class LatentLeafOperands(LatentOperands):
    """Operands that are all in shared memory."""

    v: tuple  # of both halves
    o_halves: tuple

    @staticmethod
    def create(kernel, tiles: LeafTiles) -> "LatentLeafOperands":
        mmas, half = make_transposed_mmas(kernel.dtype, kernel.tile.m), kernel.config.depth[1] // 2
        fields = LatentOperands.latent_fields(kernel, tiles, mmas)
        o, layout = fields["o"], cute.make_layout(mmas[1].partition_shape_C((half, kernel.tile.m)))
        kv_halves = zip((tiles.k, tiles.v), kernel.config.columns, strict=True)
        return LatentLeafOperands(
            **fields,
            v=tuple(transposed_values(kernel, mmas[1], kv_half, width, half) for kv_half, width in kv_halves),
            o_halves=tuple(cute.make_tensor(o.iterator + i * cute.size(layout), layout) for i in range(2)),
        )

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to the left (0) and right (1) half of O^T, and release the tile's halves."""
        for kv_half, ring in enumerate(rings):
            v = self.v[kv_half][None, None, None, ring.stage(step)]
            issue_mma(self.pv_mma, self.o_halves[kv_half], v, self.p[None, None, None, 0], self.tile_n, True)
        for kv_half, ring in enumerate(rings):
            warpgroup.wait_group(1 - kv_half)
            ring.release(step)


class LatentLeaves(LatentRows):
    """Mixin for consumers that attend to leaves of latent keys tile by tile, because shared memory cannot hold a whole
    leaf."""

    @cute.jit
    def attend_leaf(self, operands, node: Node, q_stage, row, n, masked, step):
        """Compute the node of leaf n of the keys; ``step`` is the number of its first tile in this CTA. Return the next
        leaf's step."""
        self.softmax.reset()
        operands.o.fill(0.0)
        tiles = self.kernel.step_tiles
        for i in cutlass.range(tiles, unroll=1):
            # Tiles come from right to left.
            self.attend_tile(operands, q_stage, row, (n + 1) * tiles - 1 - i, masked, step + i)
        for r in cutlass.range_constexpr(node.rows):
            node.reference[r], node.total[r] = self.softmax.partial(r, ColumnFragment.lanes_per_row)
        return step + tiles

    @cute.jit
    def attend_tile(self, operands, q_stage, row, n, masked, step) -> None:
        """Attend to tile n of the keys, the ``step``-th of this CTA."""
        kv_halves = (self.rings.k, self.rings.v)
        scores = operands.scores()
        row = row.of_tile(n * self.kernel.tile.n)
        operands.multiply_keys(kv_halves, step, q_stage)
        if row.needs_mask(masked):
            self.mask.apply(scores, n * self.kernel.tile.n + self.warp * ColumnFragment.warp_columns, row)
        largest = self.over_warps([self.softmax.maximum(scores, r) for r in range(scores.rows)])
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.accumulate(scores, r, largest[r])
        self.write_weights(scores, 0)
        self.rescale(operands)
        operands.show_weights()
        self.meet_warpgroup()
        operands.multiply_values(kv_halves, step)


@dataclass
class LatentLeafAttend(LatentLeaves, LeafConsumer):
    """Consumer that passes leaves to the combine warpgroup."""

    operands_type: ClassVar[type] = LatentLeafOperands

    def first_step(self):
        """Return the numbers of the first tile and of the first leaf of this CTA."""
        return Int32(0), Int32(0)

    @cute.jit
    def combine_segment(self, next_leaf: cutlass.Constexpr, node: Node, tile: StreamKTile, step):
        """Pass the node of each leaf of a segment to combine. Return the step after the segment; no node is left in
        global memory."""
        ring, keys = self.rings.leaf, tile.keys
        tiles, leaf = step
        for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
            tiles = next_leaf(n, n < keys.full_begin or n >= keys.full_end, tiles)
            ring.wait_empty(leaf)
            self.combine.hand_over(node)
            cute.arch.mbarrier_arrive(ring.full_barrier(leaf))
            leaf += 1
        return (tiles, leaf), None

    def finish_segment(self, node: Node, tile: StreamKTile, left, addresses, geometry) -> None:
        """Do nothing: the combine warpgroup writes the output tile."""


@dataclass
class LatentCombine(LeafTree):
    """The combine warpgroup."""

    kernel: Any
    tiles: Any
    leaf_ring: Any
    output_scale: Float32
    combine: Tree

    @cute.jit
    def run(self, node: Node, work_queue, addresses: Addresses, geometry: DecodeGeometry):
        leaf, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            self.meet_warpgroup()
            # Without clear(), the compiler would keep the held node in registers while partials are combined.
            self.combine.held.clear()
            leaf, left = self.combine_segment(partial(self.take, node), node, tile, leaf)
            self.finish_segment(node, tile, left, addresses, geometry)
            work += 1
            tile = work_queue.read(work)

    @cute.jit
    def take(self, node: Node, n, masked, leaf):
        """Take the ``leaf``-th node of this CTA."""
        self.leaf_ring.wait_full(leaf)
        self.combine.take(node)
        self.leaf_ring.release(leaf)
        return leaf + 1


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABMlaSm90(config), example_arguments((Addresses, DecodeGeometry), floats=3)
