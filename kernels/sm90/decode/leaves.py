"""Parts of consumers with transposed (swap-AB) products.

All warps of a warpgroup share the rows, see ``ColumnFragment``. A warp has some keys of each tile, and some columns of
the output. The parts exchange row maxima and sums between the warps, and write P for the second product. They combine
leaves as a tree, and write the output tile.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.combine.tree import Node, StoredNodes, Tree
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.pipeline import NamedBarrier
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, place_in_warp, transposed
from hopwell.kernels.parts.partition.stream_k import StreamKTile
from hopwell.kernels.parts.rows.packed import PackedRows

# Shared memory behind the nodes of a warpgroup: RESULT_BYTES for ``Tree.results``, and at least ROW_STATE_BYTES for one
# float32 per row and warp. The latter fits 48 rows of one warpgroup, or two warpgroups with up to 16 rows.
RESULT_BYTES, ROW_STATE_BYTES = 256, 768


def own_warpgroup():
    """Return the number of this warpgroup among the warpgroups that follow the producer warps."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS - 1


@device_struct
class WarpgroupExchange:
    """Exchange of one float32 per row between the warps of a warpgroup, through shared memory."""

    kernel: Any  # configuration only
    state: Int32  # shared address of the float32 values of warpgroup 0

    @property
    def warpgroup(self):
        return own_warpgroup()

    def meet(self) -> None:
        """Wait for all warps of this warpgroup."""
        cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + self.warpgroup, number_of_threads=WARPGROUP)

    def meet_for_products(self) -> None:
        """Wait for all warps that write operands of the next products. All warpgroups do if a product has the rows of
        all, or if each rearranges block scales for the others."""
        products, config = self.kernel.products, self.kernel.config
        shares_scales = config.copies_scales and config.consumer_warpgroups > 1 and not products.splits_keys
        if products.shares_rows or shares_scales:
            self.meet_all()
        else:
            self.meet()

    def meet_all(self) -> None:
        """Wait for all warps of all warpgroups."""
        threads = self.kernel.config.consumer_warpgroups * WARPGROUP
        cute.arch.barrier(barrier_id=NamedBarrier.ALL_CONSUMERS, number_of_threads=threads)

    def of_warpgroup(self, warpgroup):
        """Return the shared address of the float32 values of a warpgroup."""
        return self.state + warpgroup * self.kernel.state_stride

    def _of_warps(self, r: int):
        """Return the shared address of row r's float32 values, one for each warp of this warpgroup."""
        row = ColumnFragment.first_row() + ColumnFragment.row_offset(r)
        return self.of_warpgroup(self.warpgroup) + 4 * WARPS * row

    @cute.jit
    def gathered(self, values) -> list:
        """Return the values of this warpgroup's warps for each row. The lanes of a warp that share a row must pass the
        same value."""
        _, t = place_in_warp()
        for r in cutlass.range_constexpr(len(values)):
            slot, value = shared_array(Float32, self._of_warps(r) + 4 * warp_in_warpgroup()), values[r]
            if cute.arch.lane_idx() == t:
                slot[0] = value
        self.meet()
        return [copy.load_shared(self._of_warps(r), WARPS, Float32) for r in range(len(values))]

    def over_warps(self, values) -> list:
        """Return the maximum over the warps for each row."""
        found = self.gathered(values)
        return [cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d)) for a, b, c, d in found]


@cute.jit
def write_weights(p, tile_rows: cutlass.Constexpr[int], dtype: cutlass.Constexpr, scores, tile, first_row=0) -> None:
    """Write P of a tile of keys to shared memory ``p`` as tile number ``tile``, in the layout of the tensor cores. The
    rows of ``scores`` are rows of P from ``first_row`` on."""
    g, t = place_in_warp()
    base = shared_address(p.iterator) + (tile * tile_rows + first_row) * (LEAF_TILE * HALFWORD_BYTES)
    for product in cutlass.range_constexpr(scores.products):
        for c in cutlass.range_constexpr(scores.columns):
            pair = scores.get(2 * product, c), scores.get(2 * product + 1, c)
            word = transposed(copy.pack_x2(dtype, *pair))
            vector = copy.swizzled_vector(base, MMA_COLUMNS * product + g, 2 * warp_in_warpgroup() + c)
            shared_array(Uint32, vector + 4 * t)[0] = word


@cute.jit
def row_factors(output, statistics, rows: PackedRows) -> list:
    """Return the factor that normalizes each row of a lane's output, and write the log-sum-exps."""
    _, t = place_in_warp()
    factors = []
    for r in cutlass.range_constexpr(output.rows):
        row, factor = output.first_row() + output.row_offset(r), Float32(0.0)
        if row < rows.count:
            writes = cute.arch.lane_idx() == t and warp_in_warpgroup() == 0
            factor = rows.finish(row, *statistics[r], writes)
        factors.append(factor)
    return factors


@device_struct
class CoreMatrixOutput:
    """Output whose accumulators have one column of two adjacent rows, core matrix by core matrix."""

    kernel: Any  # configuration only

    @cute.jit
    def store(self, output, statistics, rows: PackedRows) -> None:
        """Write the results of all rows; ``statistics`` are their (reference, sum)."""
        g, t = place_in_warp()
        factors = row_factors(output, statistics, rows)
        for core_matrix in cutlass.range_constexpr(output.products):
            row = MMA_COLUMNS * core_matrix + g
            target = rows.output(row, 0)
            for c in cutlass.range_constexpr(output.columns):
                # A lane holds one column of two adjacent rows. The transpose gives it two columns of one row to store.
                pair = [output.get(r, c) * factors[r] for r in (2 * core_matrix, 2 * core_matrix + 1)]
                word = transposed(copy.pack_x2(self.kernel.out_dtype, *pair))
                column = (
                    (WARPS * (c // 2) + warp_in_warpgroup()) * ColumnFragment.warp_columns + c % 2 * MMA_COLUMNS + 2 * t
                )
                if row < rows.count and column < self.kernel.config.head_dim_v:
                    copy.store_element("b32", target + column * rows.out_bytes, word)


@device_struct
class LeafTree:
    """Combine of the leaves that one warpgroup processes in sequence, and the store of the output tile."""

    kernel: Any  # configuration only
    exchange: WarpgroupExchange
    combine: Tree
    output: Any  # writer of the output: CoreMatrixOutput, ColumnPairOutput or VectorOutput
    output_scale: Float32

    def first_step(self):
        """Return the step of the CTA's first leaf, as counted by :meth:`combine_segment`."""
        return Int32(0)

    @cute.jit
    def combine_segment(self, next_leaf: cutlass.Constexpr, node: Node, tile: StreamKTile, step):
        """Combine all leaves of a segment.

        ``next_leaf`` computes each leaf into ``node``, or adds it to ``node`` below the tree's first level. Its
        arguments are the number of the leaf among the keys, whether the leaf needs the mask, and a step. If leaves are
        added, it also takes whether the leaf begins and whether it ends a node. It returns the advanced step.

        ``node`` holds the root if the segment covers its whole output tile. Nodes of other segments are written to
        global memory. Return the step after the segment and the nodes written.
        """
        node.clear()
        keys, tree, stored = tile.keys, self.combine, StoredNodes.none()
        leaf, waiting = tile.first_leaf, tile.first_leaf
        for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
            masked = n < keys.full_begin or n >= keys.full_end
            if const_expr(self.kernel.config.accumulated_levels == 0):
                step = next_leaf(n, masked, step)
                leaf += 1
                waiting, stored = self.place_node(node, tile, leaf, waiting, stored)
            else:
                of_node = (Int32(1) << tile.first_level) - 1
                begins = (leaf & of_node) == 0
                leaf += 1
                ends = ((leaf & of_node) == 0) | (leaf == tile.leaves)
                step = next_leaf(n, masked, step, begins, ends)
                if ends:
                    waiting, stored = self.place_node(node, tile, leaf, waiting, stored)
        if tile.end_leaf < tile.leaves:
            stored = tree.store_waiting(tile, waiting, tile.end_leaf, stored)
        return step, stored

    @cute.jit
    def place_node(self, node: Node, tile: StreamKTile, end, waiting, stored: StoredNodes):
        """Combine a node of the first level, which ends before leaf ``end``, as far as possible, and put the result in
        its place.

        Return the first leaf of the nodes that wait, and the nodes written.
        """
        tree = self.combine
        level, index = tree.rise(node, tile, end)
        if (index & 1) != 0:
            tree.store(node, tile, index << level)
            stored = stored.plus(level, index << level)
            waiting = (index + 1) << level
        elif end < tile.leaves:
            tree.wait(node, tile, level)
        return waiting, stored

    @cute.jit
    def finish_segment(self, node: Node, tile: StreamKTile, stored: StoredNodes, addresses, geometry) -> None:
        """Combine every node whose inputs are complete, and store the output tile if its root is among them."""
        is_root = tile.end_leaf - tile.first_leaf == tile.leaves
        if not is_root:
            is_root = self.combine.combine(node, tile, stored, self.exchange.meet)
        if is_root:
            self.store_output_tile(node, tile, addresses, geometry)

    @cute.jit
    def store_output_tile(self, node: Node, tile: StreamKTile, addresses, geometry) -> None:
        """Write the rows of an output tile from its root node."""
        rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
        sums = self.exchange.gathered([node.total[r] for r in range(node.rows)])
        statistics = [(node.reference[r], (a + b) + (c + d)) for r, (a, b, c, d) in enumerate(sums)]
        output = ColumnFragment(node.output, cute.size(node.output) // node.rows, node.rows // 2)
        self.output.store(output, statistics, rows)
