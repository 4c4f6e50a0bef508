"""Binary-tree combine of stream-K decode with few rows: the results of an output tile's leaves become its output.

Sums of floating-point numbers depend on their order. An output tile's leaves are therefore combined as a tree in which
every leaf has a fixed place. The result then does not depend on the CTAs that computed the leaves. The node at level k
and index i is the combine of nodes 2 i and 2 i + 1 at level k - 1. If the output tile has no right node, it is the left
node alone. The last leaf's node rises to the root, and the root is the result.

Leaves are numbered from right to left of the keys; in the tree, left is the lower number. A CTA combines from left to
right: a node waits at its level until its right neighbour has come. A node that has to wait for another CTA's leaf is
stored in global memory, at most two nodes per level of a range.

Nodes in memory are combined in fan-in groups of sixteen, or four for nodes of many columns. Each slot of a fan-in group
holds a subtree of an output tile (see ``stream_k.py``) or a fan-in group of the fan-in level below. A node may fill
several slots at once. The CTA that fills the last slot combines them in tree order, and fills a slot of the fan-in
level above. Combining thus overlaps all other work. After the last leaf of an output tile it takes one to three rounds,
or up to five for nodes of many columns.

A warpgroup holds a node in registers, each thread the same elements of every node, and stores it in register order.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from hopwell.kernels.config.splitting import ALIGNMENT, FAN_IN_LEVELS, TICKETS, fan_in_bits, node_bytes
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import (
    bit_length,
    device_struct,
    fma,
    global_array,
    global_pointer,
    shared_array,
    trailing_zeros,
)
from hopwell.kernels.parts.core.warp_mma import QUAD
from hopwell.kernels.parts.partition.stream_k import StreamKTile

VECTOR_BYTES = 16  # per access of a thread: four elements, or reference and sum of two rows
COUNT_BITS = 8  # of a fan-in group's counter; the bits above mark the slots in which nodes begin
NODES_AT_ONCE = 8  # loads of a warpgroup in flight for nodes of few vectors per thread; half for larger nodes
FEW_VECTORS = 4
PASS_VECTORS = 8  # maximum of output vectors per thread; nodes of many columns are combined in passes over columns


@device_struct(frozen=True)
class Node:
    """A thread's part of a node, in registers.

    The order is the order of :class:`ColumnFragment`: each four elements alternate between two rows, and the next four
    belong to the next two rows.
    """

    output: Any  # float32 in registers
    reference: Any  # per row, an exponent of 2; -inf without any key
    total: Any  # per row: the sum of exponentials of this warp's keys

    @staticmethod
    def of(output, tile_rows: int) -> "Node":
        """Return a node whose output is in these registers. References and sums get new registers."""
        return Node(output, *[cute.make_rmem_tensor(tile_rows // QUAD, Float32) for _ in range(2)])

    @property
    def rows(self) -> int:
        return cute.size(self.reference)

    def clear(self) -> None:
        """Make this a node that has seen no keys."""
        self.output.fill(0.0)
        self.reference.fill(-Float32.inf)
        self.total.fill(0.0)

    def vectors(self) -> list:
        """Return the vectors that this thread stores: the output in fours, then (references, sums) of two rows each."""
        vectors = [[self.output[i + c] for c in range(4)] for i in range(0, cute.size(self.output), 4)]
        return vectors + [
            [part[r + c] for part in (self.reference, self.total) for c in range(2)] for r in self._pairs()
        ]

    def assign(self, vectors: list) -> None:
        for i, vector in enumerate(vectors[: cute.size(self.output) // 4]):
            for c in range(4):
                self.output[4 * i + c] = vector[c]
        for r, (*references, first, second) in zip(self._pairs(), vectors[-self.rows // 2 :], strict=True):
            self.reference[r], self.reference[r + 1] = references
            self.total[r], self.total[r + 1] = first, second

    def _pairs(self) -> range:
        return range(0, self.rows, 2)

    def add_left(self, vectors: list) -> None:
        """Combine this node with the node to its left, given as ``vectors``."""
        self.assign(joined(vectors, self.vectors(), len(self._pairs())))


@cute.jit
def joined(left: list, right: list, pairs: cutlass.Constexpr[int], there=True) -> list:
    """Return the combine of two nodes in the format of :meth:`Node.vectors`, with ``pairs`` pairs of rows.

    If the right node is not ``there``, this is the left one. Roundings are explicit: otherwise the compiler would
    choose them anew for each copy of this code.
    """
    outputs = len(left) - pairs
    statistics, weights = [], []
    for p in cutlass.range_constexpr(pairs):
        its, mine = left[outputs + p], right[outputs + p]
        references, sums = [], []
        for c in cutlass.range_constexpr(2):
            largest = cute.arch.fmax(its[c], mine[c])
            safe = Float32(0.0) if largest == -Float32.inf else largest
            kept = cute.math.exp2(its[c] - safe, fastmath=True)
            weight = cute.math.exp2(mine[c] - safe, fastmath=True)
            total = fma(weight, mine[2 + c], kept * its[2 + c])
            references.append(largest if there else its[c])
            sums.append(total if there else its[2 + c])
            weights.append((kept, weight))
        statistics.append([*references, *sums])
    output = []
    for i in cutlass.range_constexpr(outputs):
        vector = []
        for c in cutlass.range_constexpr(4):
            kept, weight = weights[2 * (i % pairs) + c % 2]
            value = fma(weight, right[i][c], kept * left[i][c])
            vector.append(value if there else left[i][c])
        output.append(vector)
    return output + statistics


@device_struct(frozen=True)
class StoredNodes:
    """The nodes that a CTA has stored in memory for a segment. Lane i of each warp holds the i-th node."""

    count: Int32
    level: Int32
    leaf: Int32  # the node's first leaf, in the output tile

    @staticmethod
    def none() -> "StoredNodes":
        return StoredNodes(Int32(0), Int32(0), Int32(0))

    @cute.jit
    def plus(self, level, leaf) -> "StoredNodes":
        mine = cute.arch.lane_idx() == self.count
        return StoredNodes(self.count + 1, level if mine else self.level, leaf if mine else self.leaf)


@device_struct(frozen=True)
class RowPart:
    """The rows of a tile that one warpgroup has, when ``warpgroups`` warpgroups share the tile's rows."""

    index: Int32
    rows: int
    warpgroups: int

    @property
    def first_row(self):
        return self.index * self.rows

    def of(self, segment: StreamKTile) -> StreamKTile:
        """Return a segment with these rows only."""
        return segment if self.warpgroups == 1 else replace(segment, first_row=segment.first_row + self.first_row)


@device_struct(frozen=True)
class FanInGroup:
    """Neighbouring nodes in memory that are combined together: 2^bits slots, or fewer at the end of an output tile."""

    segment: StreamKTile  # of the output tile
    fan_in_level: Int32
    first: Int32  # first subtree
    bits: int

    @staticmethod
    def around(segment: StreamKTile, fan_in_level, subtree, bits: int) -> "FanInGroup":
        shift = bits * (fan_in_level + 1)
        return FanInGroup(segment, fan_in_level, (subtree >> shift) << shift, bits)

    @property
    def slots(self):
        """Number of slots of the fan-in group."""
        return cutlass.min(((self.subtrees - 1 - self.first) >> (self.bits * self.fan_in_level)) + 1, 1 << self.bits)

    @property
    def subtrees(self):
        """Number of subtrees of the output tile."""
        return ((self.segment.leaves - 1) >> self.segment.shift) + 1

    @property
    def is_output_tile(self):
        """Whether the fan-in group covers the whole output tile."""
        return (self.first == 0) & (self.subtrees <= (Int32(1) << (self.bits * (self.fan_in_level + 1))))

    def slot_of(self, subtree):
        return (subtree - self.first) >> (self.bits * self.fan_in_level)

    def subtree_at(self, slot):
        return self.first + (slot << (self.bits * self.fan_in_level))

    def above(self) -> "FanInGroup":
        return FanInGroup.around(self.segment, self.fan_in_level + 1, self.first, self.bits)


@device_struct(frozen=True)
class Tree:
    """Storage of nodes, and their combination into larger nodes. Called by whole warpgroups."""

    shared: Int32  # shared address of the first level, or of the node handed over
    results: Int32  # shared address of the results of a count, for every lane of a warp
    scratch: Int64
    counters: Int64  # address of the counters of fan-in groups
    geometry: DecodeGeometry
    smem_levels: int  # tree levels in shared memory, or the first level in registers
    rows: int  # of this warpgroup
    columns: int
    held: Node | None = None  # the first level, if it is in registers
    warpgroups: int = 1  # that share the rows of a tile; each has its part of a slot, and counters of its own

    @staticmethod
    def create(a: Addresses, g: DecodeGeometry, shared, results, part: RowPart, *sizes: int) -> "Tree":
        """Return the tree of a part of a tile's rows. ``sizes`` are the number of shared-memory levels, and the rows
        and columns of the part."""
        scratch, counters = (a.scratch + (ALIGNMENT - 1)) & -ALIGNMENT, a.tickets + 4 * TICKETS
        *_, rows, columns = sizes
        if part.warpgroups > 1:
            scratch += Int64(part.index * node_bytes(rows, columns))
            counters += Int64(part.index) * (4 * FAN_IN_LEVELS) * Int64(g.slots)
        return Tree(shared, results, scratch, counters, g, *sizes, warpgroups=part.warpgroups)

    @property
    def _node_bytes(self) -> int:
        return node_bytes(self.rows, self.columns)

    @property
    def _fan_in_bits(self) -> int:
        return fan_in_bits(self.columns)

    @property
    def thread(self):
        return cute.arch.thread_idx()[0] % WARPGROUP

    # A thread's vectors of a node: output vectors are adjacent to the vectors of other threads. References and sums,
    # which all lanes with the same rows hold, are stored once per warp.

    def _vectors(self) -> int:
        """Return the number of output vectors of a thread."""
        return (self._node_bytes - self._pairs * VECTOR_BYTES * QUAD * WARPS) // (WARPGROUP * VECTOR_BYTES)

    @property
    def _pairs(self) -> int:
        """Number of row pairs of a lane."""
        return self.rows // (2 * QUAD)

    def _places(self) -> list:
        """Return the byte offset of each vector of a thread from the beginning of a node."""
        output = [(j * WARPGROUP + self.thread) * VECTOR_BYTES for j in range(self._vectors())]
        first = self._vectors() * WARPGROUP * VECTOR_BYTES
        in_warp = self.thread // LANES * QUAD + self.thread % QUAD
        return output + [first + (p * WARPS * QUAD + in_warp) * VECTOR_BYTES for p in range(self._pairs)]

    @cute.jit
    def _load_shared(self, address) -> list:
        return [copy.load_shared(address + place, 4, Float32) for place in self._places()]

    @cute.jit
    def _load(self, address, outputs: cutlass.Constexpr[range | None] = None) -> list:
        """Load this thread's part of a node in memory. With ``outputs``, load only these vectors of its output."""
        places = self._places()
        if cutlass.const_expr(outputs is not None):
            places = [places[j] for j in outputs] + places[self._vectors() :]
        return [copy.load_global(address + place, 4, Float32) for place in places]

    @cute.jit
    def _store(self, address, vectors: list, store: cutlass.Constexpr) -> None:
        """Write a node with ``store``, which is copy.store_shared or copy.store_global."""
        places = self._places()
        for j in cutlass.range_constexpr(self._vectors()):
            store(address + places[j], vectors[j])
        # Other lanes have loaded the old contents, and will load the new contents, which only the first lanes store.
        cute.arch.sync_warp()
        if cute.arch.lane_idx() < QUAD:
            for j in cutlass.range_constexpr(self._vectors(), len(places)):
                store(address + places[j], vectors[j])
        cute.arch.sync_warp()

    def _node(self, slot):
        """Return the address of a node in memory."""
        return self.scratch + Int64(slot) * (self.warpgroups * self._node_bytes)

    def _slot(self, segment: StreamKTile, subtree):
        """Return the slot of the node that begins with a subtree of the output tile.

        If an output tile ends within a subtree, the next output tile begins in the same place of the head list.
        """
        place = (segment.output_tile_start + (subtree << segment.shift)) >> segment.shift
        return segment.first_slot + 2 * place + (subtree == 0).to(Int32)

    def _gmem_level(self, level):
        """Return the address of this CTA's copy of a global-memory level, which has no place in shared memory."""
        place = cute.arch.block_idx()[0] * Int32(self.geometry.gmem_levels) + level - self.smem_levels
        return self._node(Int32(self.geometry.slots) + place)

    def _smem_level(self, level) -> list:
        """Return the node that waits at a shared-memory level, in shared memory or registers."""
        return self._load_shared(self.shared + level * self._node_bytes) if self.held is None else self.held.vectors()

    def _keep_in_smem(self, node: Node, level) -> None:
        if self.held is None:
            self._store(self.shared + level * self._node_bytes, node.vectors(), copy.store_shared)
        else:
            self.held.assign(node.vectors())

    @cute.jit
    def _add_waiting(self, node: Node, level) -> None:
        """Combine a node with the one that waits; levels are counted from the output tile's first level."""
        if level < self.smem_levels:
            node.add_left(self._smem_level(level))
        else:
            node.add_left(self._load(self._gmem_level(level)))

    def hand_over(self, node: Node) -> None:
        """Put a node into shared memory for :meth:`take` of another warpgroup."""
        self._store(self.shared, node.vectors(), copy.store_shared)

    def take(self, node: Node) -> None:
        node.assign(self._load_shared(self.shared))

    @cute.jit
    def wait(self, node: Node, segment: StreamKTile, level) -> None:
        """Let a node wait at its level for the node to its right."""
        level -= segment.first_level
        if level < self.smem_levels:
            self._keep_in_smem(node, level)
        else:
            self._store(self._gmem_level(level), node.vectors(), copy.store_global)

    @cute.jit
    def store(self, node: Node, segment: StreamKTile, leaf) -> None:
        """Store a node, which begins with ``leaf`` of the output tile, in memory."""
        self._store(self._node(self._slot(segment, leaf >> segment.shift)), node.vectors(), copy.store_global)

    @cute.jit
    def store_waiting(self, segment: StreamKTile, leaf, end, stored: StoredNodes) -> StoredNodes:
        """Store all waiting nodes, which cover leaves [leaf, end), and return all nodes stored so far."""
        while leaf < end:
            level = bit_length(end - leaf) - 1
            target, place = self._node(self._slot(segment, leaf >> segment.shift)), level - segment.first_level
            if place < self.smem_levels:
                self._store(target, self._smem_level(place), copy.store_global)
            else:
                self._store(target, self._load(self._gmem_level(place)), copy.store_global)
            stored = stored.plus(level, leaf)
            leaf += Int32(1) << level
        return stored

    @cute.jit
    def rise(self, node: Node, segment: StreamKTile, end):
        """Combine a node of the first level with waiting nodes to its left, as far as possible.

        The node ends before leaf ``end`` of the output tile. Return its (level, index).

        The node stops rising in three cases. It has to wait itself. It needs leaves before the segment, which another
        CTA has. It is the root.
        """
        level, index, ends_tile = segment.first_level, (end - 1) >> segment.first_level, end >= segment.leaves
        rises = index >= 0
        while rises:
            is_right = (index & 1) != 0
            joins = is_right & (((index - 1) << level) >= segment.first_leaf)
            if joins:
                self._add_waiting(node, level - segment.first_level)
            rises = joins | (ends_tile & (index != 0) & ((index & 1) == 0))
            if rises:
                level += 1
                index >>= 1
        return level, index

    @cute.jit
    def combine(self, node: Node, segment: StreamKTile, stored: StoredNodes, meet: cutlass.Constexpr):
        """Count the nodes that this CTA has stored of a segment, and combine every fan-in group that is complete.

        The nodes are visible to this warpgroup. Returns whether ``node`` is then the root. ``meet`` synchronises the
        warpgroup.
        """
        meet()  # all threads have read the results of the last combine
        if self.thread < LANES:
            found = Int32(0)
            if self.thread < stored.count:
                level = stored.level - segment.shift
                fan_in_level = level // self._fan_in_bits
                fan_in_group = FanInGroup.around(segment, fan_in_level, stored.leaf >> segment.shift, self._fan_in_bits)
                found = self._fill(
                    fan_in_group, stored.leaf >> segment.shift, Int32(1) << (level - self._fan_in_bits * fan_in_level)
                )
            shared_array(Int32, self.results)[self.thread] = found
        meet()
        mine = shared_array(Int32, self.results)[cute.arch.lane_idx()]
        full = cute.arch.vote_ballot_sync(mine != 0).to(Int32)
        is_root = full != full
        while full != 0:
            lane = trailing_zeros(full)
            full &= full - 1
            level, leaf = cute.arch.shuffle_sync(stored.level, lane), cute.arch.shuffle_sync(stored.leaf, lane)
            fan_in_level = (level - segment.shift) // self._fan_in_bits
            fan_in_group = FanInGroup.around(segment, fan_in_level, leaf >> segment.shift, self._fan_in_bits)
            there = cute.arch.shuffle_sync(mine, lane)
            while there != 0:
                node.assign(self._combined(fan_in_group, there))
                there = Int32(0)
                if fan_in_group.is_output_tile:
                    is_root = fan_in_group.fan_in_level >= 0
                else:
                    self.store(node, segment, fan_in_group.first << segment.shift)
                    subtree, fan_in_group = fan_in_group.first, fan_in_group.above()
                    meet()
                    if self.thread == 0:
                        shared_array(Int32, self.results)[LANES] = self._fill(fan_in_group, subtree, Int32(1))
                    meet()
                    there = shared_array(Int32, self.results)[LANES]
        return is_root

    @cute.jit
    def _fill(self, fan_in_group: FanInGroup, subtree, slots):
        """Count a node that fills ``slots`` slots of a fan-in group from ``subtree`` on.

        If the group is now complete, return one bit for each slot in which a node begins; all nodes of the group
        are then visible. Otherwise return 0.
        """
        slot, of_fan_in_group = fan_in_group.slot_of(subtree), fan_in_group.slots
        filled = cutlass.min(slots, of_fan_in_group - slot) + (Int32(1) << (slot + COUNT_BITS))
        place = fan_in_group.fan_in_level * Int32(self.geometry.slots) + self._slot(
            fan_in_group.segment, fan_in_group.first
        )
        counter = self.counters + 4 * Int64(place)
        filled += cute.arch.atomic_add(global_pointer(Int32, counter), filled, sem="acq_rel", scope="gpu")
        found = Int32(0)
        if (filled & ((1 << COUNT_BITS) - 1)) == of_fan_in_group:
            global_array(Int32, counter)[0] = 0
            found = filled >> COUNT_BITS
        return found

    def _combined(self, fan_in_group: FanInGroup, there) -> list:
        """Return the combine of a fan-in group's nodes; ``there`` has a bit for each slot in which a node begins.

        The first slot's bit is always set. Of two equal parts of a fan-in group, the left part's first bit is set if
        the right part's first bit is.
        """
        passes = []
        for first in range(0, self._vectors(), PASS_VECTORS):
            vectors = range(first, min(first + PASS_VECTORS, self._vectors()))
            at_once = NODES_AT_ONCE if len(vectors) + self._pairs <= FEW_VECTORS else NODES_AT_ONCE // 2
            passes.append(self._of_slots(fan_in_group, there, 0, 1 << fan_in_group.bits, at_once, vectors))
        return side_by_side(passes, self._pairs)

    def _of_slots(self, fan_in_group: FanInGroup, there, first: int, count: int, at_once: int, vectors: range) -> list:
        """Combine these ``vectors`` of ``count`` slots from ``first`` on, with ``at_once`` slots loaded at a time."""
        if count > at_once:
            half = count // 2
            left = self._of_slots(fan_in_group, there, first, half, at_once, vectors)
            return self._with_right(left, fan_in_group, there, first + half, half, at_once, vectors)
        subtrees = [_subtree_of(fan_in_group, there, first + i) for i in range(count)]
        nodes = [self._load(self._node(self._slot(fan_in_group.segment, subtree)), vectors) for subtree in subtrees]
        step = 1
        while step < count:
            for i in range(0, count, 2 * step):
                nodes[i] = joined(nodes[i], nodes[i + step], self._pairs, _has(there, first + i + step))
            step *= 2
        return nodes[0]

    @cute.jit
    def _with_right(self, left: list, fan_in_group: FanInGroup, there, first, count, at_once, vectors) -> list:
        result = left
        if _has(there, first):
            result = joined(left, self._of_slots(fan_in_group, there, first, count, at_once, vectors), self._pairs)
        return result


def side_by_side(passes: list[list], pairs: int) -> list:
    """Return the node whose parts are ``passes``. Each pass ends with the statistics of ``pairs`` row pairs."""
    return [vector for vectors in passes for vector in vectors[:-pairs]] + passes[-1][-pairs:]


def _has(there, slot: int):
    return ((there >> slot) & 1) != 0


@cute.jit
def _subtree_of(fan_in_group: FanInGroup, there, slot: cutlass.Constexpr[int]):
    """Return the subtree of a slot if a node begins there, else the subtree of the first slot, which always has one."""
    return fan_in_group.subtree_at(Int32(slot) if _has(there, slot) else Int32(0))
