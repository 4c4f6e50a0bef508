"""Hopper decode of few rows (swap-AB, stream-K): leaves of keys against up to 32 packed rows, combined as a tree.

With so few rows HBM bandwidth is the limit. A stage must be refilled soon after its tile has arrived. So the kernel
computes the transposed products S^T = K Q^T and O^T = V^T P^T, as ``sm90/mla/swap_ab.py`` does. O of a leaf then takes
few registers of a thread.

Leaves can be combined in an order that is independent of the assignment of leaves to CTAs. Every CTA gets an equal
share of all keys (stream-K). Partials are written to global memory only at the ends of shares. One launch does all of
it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE, RESIDENT_BYTES, node_bytes, share_subtrees
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.tree import Node, Tree
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Rings, Roles
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, QUAD
from hopwell.kernels.parts.partition.stream_k import StreamKSchedule, StreamKTile
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.parts.rows.softmax import ColumnSoftmax
from hopwell.kernels.sm90.common.mma import issue_mma, make_transposed_mmas
from hopwell.kernels.sm90.decode.base import DecodeKernel, argument_types
from hopwell.kernels.sm90.decode.leaves import STATE_BYTES, CoreMatrixOutput, LeafTree, WarpgroupExchange, write_weights
from hopwell.kernels.sm90.decode.loads import KvLoads


@dataclass(frozen=True)
class LeafProducts:
    """Products of leaves: one row for each matrix instruction and element type of the cache."""

    operands: type
    reader: Reader  # of K and V
    softmax: type = ColumnSoftmax
    output: type = CoreMatrixOutput  # writes the columns that a lane holds


class SwapABTree:
    """Base, beside :class:`DecodeKernel`, of kernels that combine leaves as a tree."""

    config: Any
    tile: Any
    loads: Any
    products: LeafProducts

    work_tile = StreamKTile

    @property
    def nodes_bytes(self) -> int:
        """Bytes of shared memory for the tree levels kept there."""
        return self.config.smem_levels * node_bytes(self.tile.m, self.config.head_dim_v)

    @property
    def staging_bytes(self) -> int:
        """A warp's share of the bytes for tree nodes, the results of fan-in counts, and one float32
        per row and warp."""
        return (self.nodes_bytes + STATE_BYTES) // WARPS

    @property
    def step_tiles(self) -> int:
        return self.config.leaf_tokens // self.tile.n

    @property
    def more_bytes(self) -> int:
        """Bytes of P."""
        return self.tile.m * LEAF_TILE * HALFWORD_BYTES * self.p_tiles

    @property
    def p_tiles(self) -> int:
        """Tiles of P in shared memory: the tiles of one leaf."""
        return self.config.leaf_tiles

    schedule_type: type[StreamKSchedule] = StreamKSchedule

    def schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, q_atom, tiles, rings) -> StreamKSchedule:
        c = self.config
        subtrees = share_subtrees(self.tile.m, c.head_dim_v, c.splitting_bytes)
        resident = RESIDENT_BYTES // (c.leaf_tokens * HALFWORD_BYTES * sum(c.layout.kv_dims))
        return self.schedule_type(geometry, addresses, mask, self.tile.m, c.leaf_tokens, subtrees, resident)

    def softmax(self, scale) -> ColumnSoftmax:
        return self.products.softmax.create(scale, self.tile.m // QUAD)

    def tree(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Tree:
        """Return the tree that combines leaves."""
        nodes, levels = shared_address(tiles.staging), self.config.smem_levels
        sizes = (self.tile.m, self.config.head_dim_v)
        return Tree.create(addresses, geometry, nodes, nodes + self.nodes_bytes, levels, *sizes)

    def run_leaves(self, parts: dict[str, Any], exchange, leaves, main_loop, addresses, geometry) -> None:
        """Run the attend role over leaves."""
        logits = self.loads.logits(parts["mask"], addresses, geometry)
        more = dict(logits=logits, exchange=exchange, leaves=leaves, main_loop=main_loop)
        LeafAttend(**parts, **more, operands=self.products.operands).run(addresses, geometry)


class SwapABDecodeSm90(SwapABTree, DecodeKernel):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of output tiles (lines), see parts/partition/stream_k.py
        warps 4..7 attend  from Q K^T to a leaf's node, and from nodes to the output, see parts/combine/tree.py;
                           a warp has 16 keys of each tile, and 16 of every 64 columns of the output

    Edges
        q       load_q -> attend      released after the segment's last leaf
        k       load_k -> attend      released when the tile's S has been computed
        v       load_v -> attend      released when the tile's product has been added to O
        work    schedule -> all       released as soon as it has been read

    Steady state: memory is the limit. A leaf is two tiles, A and B, or four.

        memory         | A'                                    | B'                                    | ...
        tensor cores   | S(A) | S(B) |            | O = P V (A) | O += P V (B) |             waits
        attend         |    waits    | P of both  |          waits             | nodes | waits
    """

    def __init__(self, config: DecodeConfig, products: LeafProducts):
        self.products, self.reader, self.loads = products, products.reader, KvLoads(self)
        super().__init__(config)

    @property
    def roles(self) -> dict[str, int]:
        return {**self.loads.roles, "attend": WARPS, "all others": WARPS * len(self.config.registers) - 1}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        return self.q_edge(roles), *self.loads.edges(roles, self.reader), self._work_edge(roles)

    def load(
        self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry, schedule, output_scale
    ) -> None:
        self.loads.run(warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry)

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        exchange, output = WarpgroupExchange(self, parts["tiles"]), self.products.output(self)
        leaves = LeafTree(self, exchange, self.tree(addresses, geometry, parts["tiles"]), output, output_scale)
        self.run_leaves(parts, exchange, leaves, WholeLeaf(), addresses, geometry)


def transposed_values(kernel, pv_mma, kv_half, width: int, columns: int):
    """Return operand A of V^T P^T: ``columns`` columns of one half of V, whose rows have ``width`` columns in shared
    memory."""
    t, pv = kernel.tile, pv_mma.get_slice(0)
    layout = cute.make_layout((columns, t.n, t.kv_stages), stride=(t.n, 1, t.n * width))
    return pv.make_fragment_A(pv.partition_A(cute.composition(kv_half, layout)))


@device_struct
class ColumnOperands:
    """Matrix operands of a warpgroup's transposed products. K and V are operand A, Q and P are operand B. S^T and O^T
    are in registers. The other operands are in shared memory, except V in some subclasses."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: tuple  # one operand per half of a key; each half has its own stages
    p: Any
    s: Any  # scores of tiles, concatenated
    o: Any
    s_layout: Any  # of one tile
    kernel: Any  # configuration only
    products: int  # products of 8 rows, side by side

    @staticmethod
    def fields(kernel, tiles: SharedTiles, mmas: tuple, keys: tuple, columns: int, scored_tiles: int) -> dict[str, Any]:
        """Return the values of the fields above by name. ``keys`` are the halves of K, ``columns`` the columns of the
        output."""
        t, (qk_mma, pv_mma) = kernel.tile, mmas
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        s_layout = cute.make_layout(qk.partition_shape_C((t.n, t.m)))
        return dict(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_B(qk.partition_B(tiles.q)),
            k=tuple(qk.make_fragment_A(qk.partition_A(kv_half)) for kv_half in keys),
            p=pv.make_fragment_B(pv.partition_B(tiles.p)),
            s=cute.make_rmem_tensor(cute.size(s_layout) * scored_tiles, Float32),
            o=cute.make_rmem_tensor(pv.partition_shape_C((columns, t.m)), Float32),
            s_layout=s_layout,
            kernel=kernel,
            products=t.m // MMA_COLUMNS,
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
        """Make P in shared memory visible to the tensor cores, before the warps meet."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def _tile_scores(self, i: int):
        return cute.make_tensor(self.s.iterator + i * cute.size(self.s_layout), self.s_layout)

    def scores(self) -> ColumnFragment:
        """Return the scores of all tiles; a warp has 16 keys of each tile."""
        tiles = cute.size(self.s) // cute.size(self.s_layout)
        columns = tiles * ColumnFragment.warp_columns // ColumnFragment.lanes_per_row
        return ColumnFragment(self.s, columns, self.products)


@dataclass
class LeafOperands(ColumnOperands):
    """Operands of all tiles of a leaf at once."""

    v: Any
    depth_qk: int
    leaf_tiles: int

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "LeafOperands":
        columns, mmas = kernel.layout.columns[1], make_transposed_mmas(kernel.dtype, kernel.tile.m)
        return LeafOperands(
            **ColumnOperands.fields(kernel, tiles, mmas, (tiles.k,), columns, kernel.step_tiles),
            v=transposed_values(kernel, mmas[1], tiles.v, columns, columns),
            depth_qk=kernel.layout.depth[0],
            leaf_tiles=kernel.step_tiles,
        )

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Compute S^T of a leaf; ``step`` is the number of its first tile."""
        for i in range(self.leaf_tiles):
            ring.wait_full(step + i)
            k, q = self.k[0][None, None, None, ring.stage(step + i)], self.q[None, None, None, q_stage]
            issue_mma(self.qk_mma, self._tile_scores(i), k, q, self.depth_qk, False)
            if i > 0:
                warpgroup.wait_group(1)
                ring.release(step + i - 1)
        warpgroup.wait_group(0)
        ring.release(step + self.leaf_tiles - 1)

    def multiply_values(self, ring, step) -> None:
        """Compute O^T of a leaf. The product of its last tile is still in flight on return."""
        for i in range(self.leaf_tiles):
            ring.wait_full(step + i)
            v, p = self.v[None, None, None, ring.stage(step + i)], self.p[None, None, None, i]
            issue_mma(self.pv_mma, self.o, v, p, self.kernel.tile.n, i > 0)
            if i > 0:
                warpgroup.wait_group(1)
                ring.release(step + i - 1)

    def finish_values(self, ring, step) -> None:
        """Wait until O^T is complete, and release the last stage."""
        warpgroup.wait_group(0)
        ring.release(step + self.leaf_tiles - 1)

    def tile_scores(self, i: int) -> ColumnFragment:
        """Return the scores of tile i of the leaf; a warp has 16 of its keys."""
        return ColumnFragment(
            self._tile_scores(i), ColumnFragment.warp_columns // ColumnFragment.lanes_per_row, self.products
        )


@device_struct
class LeafAttend:
    """Consumer warpgroup of leaves, independent of the matrix instruction and of the role that combines leaves."""

    kernel: Any  # configuration only
    tiles: SharedTiles
    rings: Rings
    work_queue: WorkQueue
    mask: IntervalMask
    softmax: ColumnSoftmax
    logits: Any  # the rows' view of the keys: PackedLogits or LatentLogits
    exchange: WarpgroupExchange
    leaves: Any  # takes the node of each leaf: LeafTree, or LeafHandOver to another warpgroup
    main_loop: Any  # from the keys of a leaf to its node: WholeLeaf or TileByTile
    operands: type

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        q_ring = self.rings.q
        operands = self.operands.create(self.kernel, self.tiles)
        node = Node.of(operands.o, self.kernel.tile.m)
        step, work = self.leaves.first_step(), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            # This barrier, like the barrier in Attend.run, tells the compiler that the warps have converged.
            self.exchange.meet()
            q_ring.wait_full(work)
            operands.begin(q_ring, work)
            if const_expr(self.kernel.config.k_head_scales):
                operands.scale_scores(self.logits.head_scale(tile))
            row = self.logits.logit_row(tile, 0, operands.scores())
            next_leaf = partial(self.main_loop.attend_leaf, self, operands, node, q_ring.stage(work), row)
            step, stored = self.leaves.combine_segment(next_leaf, node, tile, step)
            operands.end(q_ring, work)
            self.leaves.finish_segment(node, tile, stored, addresses, geometry)
            work += 1
            tile = self.work_queue.read(work)


@device_struct
class WholeLeaf:
    """Main loop over leaves whose tiles are all in shared memory at once."""

    @cute.jit
    def attend_leaf(self, attend, operands, node: Node, q_stage, row, n, masked, step):
        """Compute the node of leaf n of the keys; ``step`` is the number of its first tile in this CTA. Return the next
        leaf's step."""
        k_ring, v_ring = attend.rings.k, attend.rings.v
        tiles, scores = attend.kernel.config.leaf_tiles, operands.scores()
        operands.multiply_keys(k_ring, step, q_stage)
        if masked:
            for i in cutlass.range_constexpr(tiles):
                # Tiles come from right to left.
                first = ((n + 1) * tiles - 1 - i) * LEAF_TILE + warp_in_warpgroup() * ColumnFragment.warp_columns
                attend.mask.apply(operands.tile_scores(i), first, row)
        largest = attend.exchange.over_warps([attend.softmax.maximum(scores, r) for r in range(scores.rows)])
        for r in cutlass.range_constexpr(scores.rows):
            attend.softmax.begin_at(r, largest[r])
            attend.softmax.exponentials(scores, r)
        for i in cutlass.range_constexpr(tiles):
            operands.write_weights(attend.tiles.p, operands.tile_scores(i), i)
        operands.prepare_values(v_ring, step)
        attend.exchange.meet()
        operands.multiply_values(v_ring, step)
        for r in cutlass.range_constexpr(scores.rows):
            node.reference[r], node.total[r] = attend.softmax.partial(r, scores.lanes_per_row)
        operands.finish_values(v_ring, step)
        return step + attend.kernel.step_tiles


WGMMA = LeafProducts(LeafOperands, Reader.TENSOR_CORES)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABDecodeSm90(config, WGMMA), example_arguments(argument_types(config), floats=3)
