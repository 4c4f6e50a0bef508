"""Combine of the leaves (KV blocks) that one warpgroup processes in sequence, and the store of the output tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from hopwell.kernels.parts.combine.tree import LeftNodes, Node, Tree
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.partition.stream_k import StreamKTile
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.sm90.decode.swap_ab_rows import ColumnRows


class LeafTree(ColumnRows):
    """Base class of the roles that combine leaves."""

    combine: Tree
    output_scale: Float32

    @cute.jit
    def combine_segment(self, next_leaf: cutlass.Constexpr, node: Node, tile: StreamKTile, step):
        """Combine all leaves of a segment.

        ``next_leaf`` computes each leaf into ``node``. Its arguments are the number of the leaf among the keys, whether
        the leaf needs the mask, and a step. It returns the advanced step.

        ``node`` holds the root if the segment covers its whole output tile. Nodes of other segments are written to
        global memory. Return the step after the segment and the nodes written.
        """
        node.clear()
        keys, tree, left = tile.keys, self.combine, LeftNodes.none()
        leaf, waiting = tile.first_leaf, tile.first_leaf
        for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
            step = next_leaf(n, n < keys.full_begin or n >= keys.full_end, step)
            level, index = tree.rise(node, leaf, tile.first_leaf, tile.leaves)
            leaf += 1
            if (index & 1) != 0:
                tree.leave(node, tile, index << level)
                left = left.plus(level, index << level)
                waiting = (index + 1) << level
            elif leaf < tile.leaves:
                tree.wait(node, level)
        if tile.end_leaf < tile.leaves:
            left = tree.leave_waiting(tile, waiting, tile.end_leaf, left)
        return step, left

    @cute.jit
    def finish_segment(self, node: Node, tile: StreamKTile, left: LeftNodes, addresses, geometry) -> None:
        """Combine every node whose inputs are complete, and store the output tile if its root is among them."""
        is_root = tile.end_leaf - tile.first_leaf == tile.leaves
        if not is_root:
            is_root = self.combine.combine(node, tile, left, self.meet_warpgroup)
        if is_root:
            self.store_line(node, tile, addresses, geometry)

    @cute.jit
    def store_line(self, node: Node, tile: StreamKTile, addresses, geometry) -> None:
        """Write the rows of an output tile from its root node."""
        rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
        sums = self.gathered([node.total[r] for r in range(node.rows)])
        statistics = [(node.reference[r], (a + b) + (c + d)) for r, (a, b, c, d) in enumerate(sums)]
        output = ColumnFragment(node.output, cute.size(node.output) // node.rows, node.rows // 2)
        self.store_columns(output, statistics, rows)
