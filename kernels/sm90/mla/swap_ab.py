"""Hopper MLA decode of few rows (swap-AB, stream-K): leaves of keys against up to 16 packed rows, combined as a tree.

With 16 heads, a tensor-parallel share of 128, HBM bandwidth is the limit. So products are transposed, leaves are
combined, and CTAs have equal shares, as in ``sm90/decode/swap_ab.py``. A wgmma always has 64 rows, but may have only 8
columns. A product of keys with 16 rows of Q takes only as long as reading the keys from shared memory. This is about
half of the time for 64 rows of Q.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import node_bytes
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.combine.tree import Node, Tree
from hopwell.kernels.parts.core.device import device_struct, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import LOADERS, SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Ring, Roles
from hopwell.kernels.parts.partition.stream_k import StreamKSchedule, StreamKTile, TopkStreamKSchedule
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.sm90.common.kernel import Q_WARP
from hopwell.kernels.sm90.common.mma import issue_mma, make_transposed_mmas
from hopwell.kernels.sm90.decode.base import DecodeKernel
from hopwell.kernels.sm90.decode.leaves import LeafTree
from hopwell.kernels.sm90.decode.swap_ab import (
    ColumnOperands,
    LeafProducts,
    SwapABTree,
    transposed_values,
)
from hopwell.kernels.sm90.mla.key_halves import LatentKeys, LatentLoads


class SwapABMlaSm90(LatentKeys, SwapABTree, DecodeKernel):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left, with the warp roles and edges of
    :class:`SwapABDecodeSm90`. K and V are the left and right halves of a key; both halves are key and value.

    Warp roles
        warp 0 load_keys   both halves of the keys; if lanes copy rows, half of the rows
        warp 1 load_keys   the other half of the rows; or dequantize: 8-bit keys, see parts/dequant/latent_rows.py
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of output tiles
        warps 4..7 attend  from Q K^T to a leaf's node
        warps 8..11 combine  from nodes to the output, see parts/combine/tree.py

    Edges
        q       load_q -> attend      released after the segment's last leaf
        loaded_k, loaded_v  load_keys -> dequantize  bytes of both halves of 8-bit keys; released on k and v
        k, v    load_keys -> attend   released when the product with their half of the value has been added to O
        leaf    attend -> combine     a leaf's node; released when it is in registers
        work    schedule -> all       released as soon as it has been read

    Steady state: memory is the limit. A tile is processed in half of the time of its load. Combining a leaf takes as
    long as half a tile, and longer if its node waits in global memory. So a separate warpgroup combines.

        memory         | A'                                                   | ...
        tensor cores   | S(A)  |        | O += P V left | O += P V right |      waits
        attend         | waits | P of A |           waits                |      waits
    """

    p_tiles = 1

    def __init__(self, config: MlaConfig, products: LeafProducts):
        self.products, self.reader, self.loads = products, products.reader, LatentLoads(self, dequant_warps=1)
        super().__init__(config)

    @property
    def half_orders(self) -> tuple[tuple[int, int], ...]:
        """Order in which the halves, left (0) and right (1), of a step's tiles are multiplied and loaded by TMA."""
        return ((0, 1),) * self.step_tiles

    @property
    def roles(self) -> dict[str, int]:
        c = self.config
        combine = {"combine": WARPS} if c.has_combine_role else {}
        others = WARPS * len(c.registers) - 1 - (LOADERS - self.loads.warps)  # a load warp may have no work
        roles = {**self.loads.roles, "load_q": 1, "attend": WARPS, **combine, **self.products.roles(self)}
        return {**roles, "all others": others}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        lanes = dict(producer_lanes=LANES, consumer_lanes=LANES)
        leaf = [roles.edge("leaf", "attend", "combine", 1, **lanes)] if self.config.has_combine_role else []
        kv = self.loads.edges(roles, self.reader, self.products.kv_consumer)
        return self.q_edge(roles), *kv, self._work_edge(roles), *leaf, *self.products.edges(self, roles)

    @property
    def nodes_bytes(self) -> int:
        """Bytes of shared memory through which a leaf's node passes to the combine warpgroup. Without a combine role,
        nodes wait in registers and in global memory."""
        return node_bytes(self.tile.m, self.config.head_dim_v) if self.config.has_combine_role else 0

    @property
    def schedule_type(self) -> type[StreamKSchedule]:
        return TopkStreamKSchedule if self.config.sparse else StreamKSchedule

    @cute.jit
    def load(
        self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry, schedule, output_scale
    ):
        """Run the warps of the first warpgroup that load keys and Q."""
        if warp < self.loads.warps:
            self.loads.run(warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry)
        elif warp == Q_WARP:
            self.load_all_q(addresses, geometry, tiles, rings, work_queue)

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        exchange, tree = self.exchange(parts["tiles"]), self.tree(addresses, geometry, parts["tiles"])
        if self.config.has_combine_role:
            leaves = LeafHandOver(parts["rings"].leaf, tree)
        else:
            tree = replace(tree, held=self._node())
            leaves = LeafTree(self, exchange, tree, self.products.output(self), output_scale)
        self.run_leaves(parts, exchange, leaves, TileByTile(), addresses, geometry)

    def run_combine(self, tiles, rings, work_queue, addresses, geometry, output_scale) -> None:
        tree = replace(self.tree(addresses, geometry, tiles), held=self._node())
        exchange, output = self.exchange(tiles), self.products.output(self)
        leaves = LeafTree(self, exchange, tree, output, output_scale)
        LeafCombine(rings.leaf, leaves).run(self._node(), work_queue, addresses, geometry)

    def _node(self) -> Node:
        """Return a node in new registers: for the node that rises, or for the node that waits at the first level."""
        elements = self.tile.m * self.config.head_dim_v // WARPGROUP
        return Node.of(cute.make_rmem_tensor(elements, Float32), self.tile.m)


@dataclass
class LatentOperands(ColumnOperands):
    """Operands of one tile at a time. Its keys are also the values, in a left and a right half."""

    depths: tuple[int, int]  # columns of the two halves that are multiplied
    columns: int  # of the output

    @staticmethod
    def latent_fields(kernel, tiles: SharedTiles, mmas: tuple) -> dict[str, Any]:
        depth_qk, columns = kernel.layout.depth
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

    def rescale(self, softmax) -> None:
        """Rescale O to the references that the latest step has chosen."""
        softmax.rescale_output(self.output())


@dataclass
class LatentLeafOperands(LatentOperands):
    """Operands that are all in shared memory."""

    v: tuple  # of both halves
    o_halves: tuple

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "LatentLeafOperands":
        mmas, half = make_transposed_mmas(kernel.dtype, kernel.tile.m), kernel.layout.depth[1] // 2
        fields = LatentOperands.latent_fields(kernel, tiles, mmas)
        o, layout = fields["o"], cute.make_layout(mmas[1].partition_shape_C((half, kernel.tile.m)))
        kv_halves = zip((tiles.k, tiles.v), kernel.layout.columns, strict=True)
        return LatentLeafOperands(
            **fields,
            v=tuple(transposed_values(kernel, mmas[1], kv_half, width, half) for kv_half, width in kv_halves),
            o_halves=tuple(cute.make_tensor(o.iterator + i * cute.size(layout), layout) for i in range(2)),
        )

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to the left (0) and right (1) half of O^T, and release the tile's halves."""
        for kv_half, ring in enumerate(rings):
            v = self.v[kv_half][None, None, None, ring.stage(step)]
            issue_mma(self.pv_mma, self.o_halves[kv_half], v, self.p[None, None, None, 0], self.kernel.tile.n, True)
        for kv_half, ring in enumerate(rings):
            warpgroup.wait_group(1 - kv_half)
            ring.release(step)


@device_struct
class TileByTile:
    """Main loop over leaves of latent keys tile by tile, because shared memory cannot hold a whole leaf."""

    @cute.jit
    def attend_leaf(self, attend, operands, node: Node, q_stage, row: cutlass.Constexpr, n, masked, step):
        """Compute the node of leaf n of the keys; ``step`` is the number of its first tile in this CTA. Return the next
        leaf's step."""
        attend.softmax.reset()
        operands.o.fill(0.0)
        tiles = attend.kernel.step_tiles
        for i in cutlass.range(tiles, unroll=1):
            # Tiles come from right to left.
            self.attend_tile(attend, operands, q_stage, row(), (n + 1) * tiles - 1 - i, masked, step + i)
        for r in cutlass.range_constexpr(node.rows):
            node.reference[r], node.total[r] = attend.softmax.partial(r, ColumnFragment.lanes_per_row)
        return step + tiles

    @cute.jit
    def attend_tile(self, attend, operands, q_stage, row, n, masked, step) -> None:
        """Attend to tile n of the keys, the ``step``-th of this CTA."""
        kv_halves = (attend.rings.k, attend.rings.v)
        scores = operands.scores()
        row = row.of_tile(n * attend.kernel.tile.n)
        operands.multiply_keys(kv_halves, step, q_stage)
        if row.needs_mask(masked):
            attend.mask.apply(scores, n * attend.kernel.tile.n + warp_in_warpgroup() * ColumnFragment.warp_columns, row)
        largest = attend.exchange.over_warps([attend.softmax.maximum(scores, r) for r in range(scores.rows)])
        for r in cutlass.range_constexpr(scores.rows):
            attend.softmax.accumulate(scores, r, largest[r])
        operands.write_weights(attend.tiles.p, scores, 0)
        operands.rescale(attend.softmax)
        operands.prepare_values(kv_halves, step)
        attend.exchange.meet()
        operands.multiply_values(kv_halves, step)


@device_struct
class HandOverStep:
    """Numbers of the next tile and of the next leaf of this CTA."""

    tile: Int32
    leaf: Int32


@device_struct
class LeafHandOver:
    """Hands the node of each leaf to the combine warpgroup."""

    ring: Ring
    combine: Tree

    def first_step(self) -> "HandOverStep":
        return HandOverStep(Int32(0), Int32(0))

    @cute.jit
    def combine_segment(self, next_leaf: cutlass.Constexpr, node: Node, tile: StreamKTile, step):
        """Pass the node of each leaf of a segment to combine. Return the step after the segment; no node is left in
        global memory."""
        ring, keys = self.ring, tile.keys
        tiles, leaf = step.tile, step.leaf
        for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
            tiles = next_leaf(n, n < keys.full_begin or n >= keys.full_end, tiles)
            ring.wait_empty(leaf)
            self.combine.hand_over(node)
            cute.arch.mbarrier_arrive(ring.full_barrier(leaf))
            leaf += 1
        return HandOverStep(tiles, leaf), None

    def finish_segment(self, node: Node, tile: StreamKTile, stored, addresses, geometry) -> None:
        """Do nothing: the combine warpgroup writes the output tile."""


@device_struct
class LeafCombine:
    """The combine warpgroup: takes the node of each leaf and combines it."""

    ring: Ring
    leaves: LeafTree

    @cute.jit
    def run(self, node: Node, work_queue: WorkQueue, addresses: Addresses, geometry: DecodeGeometry):
        leaf, work = Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            self.leaves.exchange.meet()
            # Without clear(), the compiler would keep the held node in registers while partials are combined.
            self.leaves.combine.held.clear()
            leaf, stored = self.leaves.combine_segment(partial(self.take, node), node, tile, leaf)
            self.leaves.finish_segment(node, tile, stored, addresses, geometry)
            work += 1
            tile = work_queue.read(work)

    @cute.jit
    def take(self, node: Node, n, masked, leaf):
        """Take the ``leaf``-th node of this CTA."""
        self.ring.wait_full(leaf)
        self.leaves.combine.take(node)
        self.ring.release(leaf)
        return leaf + 1


WGMMA = LeafProducts(LatentLeafOperands, Reader.TENSOR_CORES)


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABMlaSm90(config, WGMMA), example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
