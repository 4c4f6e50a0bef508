"""Hopper decode of few rows (swap-AB, stream-K): leaves of keys against up to 64 packed rows, combined as a tree.

With so few rows HBM bandwidth is the limit. A stage must be refilled soon after its tile has arrived. So the kernel
computes the transposed products S^T = K Q^T and O^T = V^T P^T, as ``sm90/mla/swap_ab.py`` does. O of a leaf then takes
few registers of a thread.

Leaves can be combined in an order that is independent of the assignment of leaves to CTAs. Every CTA gets an equal
share of all keys (stream-K). Partials are written to global memory only at the ends of shares. One launch does all of
it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE, RESIDENT_BYTES, node_bytes, share_subtrees
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.tree import Node, RowPart, Tree
from hopwell.kernels.parts.core.device import device_struct, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Rings, Roles
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, QUAD
from hopwell.kernels.parts.dequant.eight_bit import exponent
from hopwell.kernels.parts.partition.stream_k import StreamKSchedule, StreamKTile
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.parts.rows.softmax import ColumnSoftmax
from hopwell.kernels.sm90.common.mma import issue_mma, make_transposed_mmas
from hopwell.kernels.sm90.decode.base import DecodeKernel, KvLoads, argument_types
from hopwell.kernels.sm90.decode.leaves import (
    RESULT_BYTES,
    ROW_STATE_BYTES,
    CoreMatrixOutput,
    LeafTree,
    WarpgroupExchange,
    own_warpgroup,
    write_weights,
)


@dataclass(frozen=True)
class LeafProducts:
    """Products of leaves: one row for each matrix instruction and element type of the cache."""

    operands: type
    reader: Reader  # of K and V
    softmax: type = ColumnSoftmax
    output: type = CoreMatrixOutput  # writes the columns that a lane holds
    kv_consumer: str = "attend"  # role that releases K and V
    keeps_exponent: bool = False  # whether O has the power of two of dequantized values until it is stored
    shares_rows: ClassVar[bool] = False  # whether a product has the rows of all warpgroups
    splits_keys: ClassVar[bool] = False  # whether each warpgroup multiplies all rows with its own tiles of a leaf

    def roles(self, kernel: Any) -> dict[str, int]:
        """Return the warps of roles besides the kernel's own."""
        return {}

    def edges(self, kernel: Any, roles: Roles) -> list[Edge]:
        """Return the edges besides the kernel's own."""
        return []

    def node(self, operands: Any, rows: int) -> Node:
        """Return the node of a warpgroup's ``rows`` rows."""
        return Node.of(operands.o, rows)

    def main_loop(self, kernel: Any) -> "WholeLeaf":
        return AccumulatedLeaves() if kernel.config.accumulated_levels else WholeLeaf()

    def attend(self, kernel: Any, fields: dict[str, Any], addresses, geometry) -> None:
        """Run the attend role; ``fields`` are fields of :class:`LeafAttend`."""
        LeafAttend(**fields, operands=self.operands).run(addresses, geometry)


class SwapABTree:
    """Base, beside :class:`DecodeKernel`, of kernels that combine leaves as a tree."""

    config: Any
    tile: Any
    loads: Any
    products: LeafProducts

    work_tile = StreamKTile

    @property
    def nodes_bytes(self) -> int:
        """Bytes of shared memory for a warpgroup's tree levels kept there."""
        return self.config.smem_levels * node_bytes(self.warpgroup_rows, self.config.head_dim_v)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of a tile that one consumer warpgroup has."""
        return self.tile.m // self.config.consumer_warpgroups

    @property
    def state_stride(self) -> int:
        """Bytes between the float32 values of the rows of two warpgroups. Each consumer warpgroup has its own part of
        the staging; a combine warpgroup shares it."""
        consumers = self.config.consumer_warpgroups
        return WARPS * self.staging_bytes if consumers > 1 else 4 * WARPS * self.warpgroup_rows

    @property
    def staging_bytes(self) -> int:
        """A warp's share of the bytes for tree nodes, the results of fan-in counts, and one float32
        per row and warp."""
        return (self.nodes_bytes + self.state_bytes) // WARPS

    @property
    def state_bytes(self) -> int:
        return RESULT_BYTES + max(ROW_STATE_BYTES, 4 * WARPS * self.product_rows)

    @property
    def product_rows(self) -> int:
        """Rows of a tile whose scores a warpgroup has."""
        return self.tile.m if self.products.splits_keys else self.warpgroup_rows

    @property
    def scored_tiles(self) -> int:
        """Tiles of a leaf whose scores a warpgroup has."""
        return self.config.leaf_tiles // (self.config.consumer_warpgroups if self.products.splits_keys else 1)

    def scored_tile(self, number):
        """Return the number in the leaf of the ``number``-th tile whose scores this warpgroup has."""
        return self.tile_in_turn(number) if self.products.splits_keys else number

    def tile_in_turn(self, number):
        """Return the number in the leaf of this warpgroup's ``number``-th tile, if warpgroups take tiles in turn."""
        warpgroups = self.config.consumer_warpgroups
        return number * warpgroups + own_warpgroup() if warpgroups > 1 else number

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
        subtrees = share_subtrees(self.tile.m, c.head_dim_v, c.ctas_per_sm)
        resident = RESIDENT_BYTES // (c.leaf_tokens * HALFWORD_BYTES * sum(c.layout.kv_dims))
        sizes = (self.tile.m, c.leaf_tokens, subtrees, resident, c.accumulated_levels)
        return self.schedule_type(geometry, addresses, mask, *sizes)

    def softmax(self, scale) -> ColumnSoftmax:
        return self.products.softmax.create(scale, self.product_rows // QUAD)

    def tree(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Tree:
        """Return the tree that combines this warpgroup's leaves."""
        part, nodes = self.row_part(), shared_address(tiles.staging)
        if const_expr(part.warpgroups > 1):
            nodes += part.index * (WARPS * self.staging_bytes)
        sizes = (self.config.smem_levels, part.rows, self.config.head_dim_v)
        return Tree.create(addresses, geometry, nodes, nodes + self.nodes_bytes, part, *sizes)

    def row_part(self) -> RowPart:
        """Return the rows of which this consumer warpgroup has the nodes."""
        warpgroups = self.config.consumer_warpgroups
        return RowPart(own_warpgroup() if warpgroups > 1 else Int32(0), self.warpgroup_rows, warpgroups)

    def product_part(self) -> RowPart:
        """Return the rows of which this consumer warpgroup has scores."""
        return RowPart(Int32(0), self.tile.m, 1) if self.products.splits_keys else self.row_part()

    def exchange(self, tiles) -> WarpgroupExchange:
        return WarpgroupExchange(self, shared_address(tiles.staging) + self.nodes_bytes + RESULT_BYTES)

    def run_leaves(self, parts: dict[str, Any], exchange, leaves, main_loop, addresses, geometry) -> None:
        """Run the attend role over leaves."""
        logits = self.loads.logits(parts["mask"], addresses, geometry)
        more = dict(logits=logits, exchange=exchange, leaves=leaves, main_loop=main_loop)
        self.products.attend(self, dict(**parts, **more), addresses, geometry)


class SwapABDecodeSm90(SwapABTree, DecodeKernel):
    """Attention of ``tile.m`` packed rows, leaf by leaf from right to left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    segments of output tiles, see parts/partition/stream_k.py
        warps 4..7 attend  from Q K^T to a leaf's node, and from nodes to the output, see parts/combine/tree.py;
                           a warp has 16 keys of each tile, and 16 of every 64 columns of the output
        warps 8..11 attend  the other half of the rows, if two warpgroups share the rows of a tile

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
    def value_factor(self) -> float:
        return 2.0 ** -exponent(self.config.kv_type) if self.products.keeps_exponent else 1.0

    @property
    def roles(self) -> dict[str, int]:
        roles = {**self.loads.roles, "attend": self.storing_warps, **self.products.roles(self)}
        return {**roles, "all others": WARPS * len(self.config.registers) - 1}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        kv = self.loads.edges(roles, self.reader, self.products.kv_consumer)
        return self.q_edge(roles), *kv, self._work_edge(roles), *self.products.edges(self, roles)

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        exchange, output = self.exchange(parts["tiles"]), self.products.output(self)
        leaves = LeafTree(self, exchange, self.tree(addresses, geometry, parts["tiles"]), output, output_scale)
        self.run_leaves(parts, exchange, leaves, self.products.main_loop(self), addresses, geometry)


def transposed_values(kernel, pv_mma, kv_half, width: int, columns: int):
    """Return operand A of V^T P^T: ``columns`` columns of one half of V, whose rows have ``width`` columns in shared
    memory."""
    t, pv = kernel.tile, pv_mma.get_slice(0)
    layout = cute.make_layout((columns, t.n, t.kv_stages), stride=(t.n, 1, t.n * width))
    return pv.make_fragment_A(pv.partition_A(cute.composition(kv_half, layout)))


def rows_of(tile, part: RowPart):
    """Return the rows of a part of a tile in shared memory, which has dimensions (rows, columns, stages)."""
    if part.warpgroups == 1:
        return tile
    columns, stages = (cute.size(tile, mode=[i]) for i in (1, 2))
    first = cute.crd2idx((part.rows, 0, 0), tile.layout)
    rows = part.rows * part.warpgroups
    layout = cute.make_layout((part.rows, columns, stages), stride=(1, rows, rows * columns))
    return cute.composition(cute.make_tensor(tile.iterator + part.index * first, tile.layout), layout)


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
    first_row: Any  # of this warpgroup in the tile

    @staticmethod
    def fields(kernel, tiles: SharedTiles, mmas: tuple, keys: tuple, columns: int, scored_tiles: int) -> dict[str, Any]:
        """Return the values of the fields above by name. ``keys`` are the halves of K, ``columns`` the columns of the
        output."""
        t, (qk_mma, pv_mma), part = kernel.tile, mmas, kernel.row_part()
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        s_layout = cute.make_layout(qk.partition_shape_C((t.n, part.rows)))
        return dict(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_B(qk.partition_B(rows_of(tiles.q, part))),
            k=tuple(qk.make_fragment_A(qk.partition_A(kv_half)) for kv_half in keys),
            p=pv.make_fragment_B(pv.partition_B(rows_of(tiles.p, part))),
            s=cute.make_rmem_tensor(cute.size(s_layout) * scored_tiles, Float32),
            o=cute.make_rmem_tensor(pv.partition_shape_C((columns, part.rows)), Float32),
            s_layout=s_layout,
            kernel=kernel,
            products=part.rows // MMA_COLUMNS,
            first_row=part.first_row,
        )

    def begin(self, q_ring, work) -> None:
        """Do nothing: Q of a segment stays in shared memory."""

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of a tile of keys to ``p`` in shared memory, as tile number ``tile``."""
        write_weights(p, self.kernel.tile.m, self.kernel.dtype, scores, tile, self.first_row)

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
    accumulates: bool  # whether O^T of a leaf is added to O^T

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "LeafOperands":
        columns, mmas = kernel.layout.columns[1], make_transposed_mmas(kernel.dtype, kernel.warpgroup_rows)
        return LeafOperands(
            **ColumnOperands.fields(kernel, tiles, mmas, (tiles.k,), columns, kernel.step_tiles),
            v=transposed_values(kernel, mmas[1], tiles.v, columns, columns),
            depth_qk=kernel.layout.depth[0],
            leaf_tiles=kernel.step_tiles,
            accumulates=kernel.config.accumulated_levels > 0,
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
        """Compute O^T of a leaf, or add it to O^T. The product of its last tile is still in flight on return."""
        for i in range(self.leaf_tiles):
            ring.wait_full(step + i)
            v, p = self.v[None, None, None, ring.stage(step + i)], self.p[None, None, None, i]
            issue_mma(self.pv_mma, self.o, v, p, self.kernel.tile.n, self.accumulates or i > 0)
            if i > 0:
                warpgroup.wait_group(1)
                ring.release(step + i - 1)

    def finish_values(self, ring, step) -> None:
        """Wait until O^T is complete, and release the last stage."""
        warpgroup.wait_group(0)
        ring.release(step + self.leaf_tiles - 1)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

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

    def create_operands(self) -> Any:
        return self.operands.create(self.kernel, self.tiles)

    def begin_segment(self, operands, tile: StreamKTile, work, step) -> None:
        """Prepare the operands for a segment whose first tile of keys is the ``step``-th of this CTA."""
        operands.begin(self.rings.q, work)

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        q_ring, part = self.rings.q, self.kernel.row_part()
        operands = self.create_operands()
        node = self.kernel.products.node(operands, part.rows)
        step, work = self.leaves.first_step(), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            # This barrier, like the barrier in Attend.run, tells the compiler that the warps have converged.
            self.exchange.meet()
            of_products = self.kernel.product_part().of(tile)
            tile = part.of(tile)
            q_ring.wait_full(work)
            self.begin_segment(operands, tile, work, step)
            if const_expr(self.kernel.config.k_head_scales):
                operands.scale_scores(self.logits.head_scale(tile))
            row = partial(self.logits.logit_row, of_products, 0, operands.scores())
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
    def attend_leaf(self, attend, operands, node: Node, q_stage, row: cutlass.Constexpr, n, masked, step):
        """Compute the node of leaf n of the keys; ``step`` is the number of its first tile in this CTA. Return the next
        leaf's step."""
        scores, largest = self.compute_scores(attend, operands, q_stage, row, n, masked, step)
        for r in cutlass.range_constexpr(scores.rows):
            attend.softmax.begin_at(r, largest[r])
            attend.softmax.exponentials(scores, r)
        return self.add_values(attend, operands, node, step)

    @cute.jit
    def compute_scores(self, attend, operands, q_stage, row: cutlass.Constexpr, n, masked, step):
        """Return the scores of a leaf, and the largest score of each row. ``row`` returns the rows' logit data."""
        tiles, scores = attend.kernel.config.leaf_tiles, operands.scores()
        operands.multiply_keys(attend.rings.k, step, q_stage)
        if masked:
            rows = row()  # only here: few leaves need a mask, and rows would take registers in all others
            for i in cutlass.range_constexpr(attend.kernel.scored_tiles):
                # Tiles come from right to left.
                first = ((n + 1) * tiles - 1 - attend.kernel.scored_tile(i)) * LEAF_TILE
                first += warp_in_warpgroup() * ColumnFragment.warp_columns
                attend.mask.apply(operands.tile_scores(i), first, rows)
        largest = attend.exchange.over_warps([attend.softmax.maximum(scores, r) for r in range(scores.rows)])
        return scores, largest

    @cute.jit
    def add_values(self, attend, operands, node: Node, step):
        """Compute O^T of a leaf, or add it to O^T, and set the statistics of the node. Return the next leaf's step."""
        v_ring, softmax = attend.rings.v, attend.softmax
        for i in cutlass.range_constexpr(attend.kernel.scored_tiles):
            operands.write_weights(attend.tiles.p, operands.tile_scores(i), i)
        operands.prepare_values(v_ring, step)
        attend.exchange.meet_for_products()
        operands.multiply_values(v_ring, step)
        if const_expr(not attend.kernel.products.splits_keys):
            for r in cutlass.range_constexpr(node.rows):
                node.reference[r], node.total[r] = softmax.partial(r, ColumnFragment.lanes_per_row)
        operands.finish_values(v_ring, step)
        return step + attend.kernel.step_tiles


@dataclass
class AccumulatedLeaves(WholeLeaf):
    """Main loop that adds up the leaves below the tree's first level in registers, from right to left."""

    @cute.jit
    def attend_leaf(self, attend, operands, node: Node, q_stage, row: cutlass.Constexpr, n, masked, step, begins, ends):
        """Add leaf n to the node, which is empty if the leaf ``begins`` a node. ``ends``: whether it is the last one of
        a node."""
        softmax = attend.softmax
        if begins:
            softmax.reset()
            operands.o.fill(0.0)
        scores, largest = self.compute_scores(attend, operands, q_stage, row, n, masked, step)
        for r in cutlass.range_constexpr(scores.rows):
            softmax.accumulate(scores, r, largest[r])
        softmax.rescale_output(operands.output())
        return self.add_values(attend, operands, node, step)


WGMMA = LeafProducts(LeafOperands, Reader.TENSOR_CORES)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABDecodeSm90(config, WGMMA), example_arguments(argument_types(config), floats=3)
