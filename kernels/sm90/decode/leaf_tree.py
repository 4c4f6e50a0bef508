"""What becomes of the leaves of keys that a warpgroup has, one behind the other: the tree, and the output."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from hopwell.kernels.parts.combine.tree import LeftNodes, Node, Tree
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.partition.stream_k import StreamKTile
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.sm90.decode.swap_ab_rows import ColumnRows


class LeafTree(ColumnRows):
    """The base of the roles that combine leaves."""

    combine: Tree
    output_scale: Float32

    @cute.jit
    def combine_tile_range(self, next_leaf: cutlass.Constexpr, node: Node, tile: StreamKTile, step):
        """Combine all leaves of a part, each of which ``next_leaf`` brings to ``node``: from its number among the keys,
        whether not all rows see all of it, and a step, which it counts on. The node of a whole line is ``node`` then;
        those of others have been left in memory. Returns the step after them, and what has been left."""
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
    def finish_tile_range(self, node: Node, tile: StreamKTile, left: LeftNodes, addresses, geometry) -> None:
        """Combine what nothing is missing of any more, and write the line if that is all of it."""
        is_root = tile.end_leaf - tile.first_leaf == tile.leaves
        if not is_root:
            is_root = self.combine.combine(node, tile, left, self.meet_warpgroup)
        if is_root:
            self.store_output_tile(node, tile, addresses, geometry)

    @cute.jit
    def store_output_tile(self, node: Node, tile: StreamKTile, addresses, geometry) -> None:
        """Write the rows of a line's root."""
        rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
        sums = self.gathered([node.total[r] for r in range(node.rows)])
        statistics = [(node.reference[r], (a + b) + (c + d)) for r, (a, b, c, d) in enumerate(sums)]
        output = ColumnFragment(node.output, cute.size(node.output) // node.rows, node.rows // 2)
        self.store_columns(output, statistics, rows)
