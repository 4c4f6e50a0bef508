"""Partial results of split-KV decode: each work tile writes one partial, and the CTA of the last partial combines.

The result of a request's rows is a weighted sum over its chunks. Every chunk leaves one partial: for each row the
output relative to a reference, the reference, and the sum of exponentials. Partials are combined in fan-in groups of
FAN_IN by the CTA of the group's last partial. The results of fan-in groups are combined by the CTA that combined the
last group. The order is always key order, so the CTA that combines never changes a bit.

Partials lie in a ring of slots that is much smaller than the list of work tiles, so that they stay in the L2 cache.
Partial p uses slot p % slots in epoch p // slots. It may be written once the partial before it in that slot has been
combined. The slot of the first partial of a fan-in group, and of a request, counts the stored partials.

There is no circular wait. A partial waits only for partials earlier in the list. Tickets are taken in list order. The
ring holds more than the partials of one request.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from hopwell.kernels.config.splitting import ALIGNMENT, FAN_IN, SLOT_COUNTERS, STATISTICS, TICKETS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import (
    barrier_all,
    device_struct,
    global_array,
    global_pointer,
    load_relaxed,
    store_release,
)
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import combined

PARTIAL, FAN_IN_GROUP = 0, 2  # index of a partial's, and of a combined fan-in group's, statistics in a row's statistics
EPOCH, PARTIALS_DONE, GROUPS_DONE, *_ = range(SLOT_COUNTERS)
COLUMNS_AT_ONCE = 4  # float32 values in 16 bytes
PARTS_AT_ONCE = 8  # partials with loads in flight


@device_struct(frozen=True)
class Slots:
    """The memory of the partials."""

    scratch: Int64  # bytes
    tickets: Int64  # address of all counters
    slots: Int32
    rows: Int32  # rows of a slot
    columns: int
    element_bytes: int  # bytes of an output element

    @classmethod
    def create(cls, a: Addresses, g: DecodeGeometry, columns: int, element_bytes: int = 4) -> "Slots":
        aligned = (a.scratch + (ALIGNMENT - 1)) & -ALIGNMENT
        return cls(aligned, a.tickets, Int32(g.slots), Int32(g.slot_rows), columns, element_bytes)

    def place(self, partial_id):
        """Return the first row of a partial among the rows of all slots."""
        return partial_id % self.slots * self.rows

    @cute.jit
    def places(self, first, step, count) -> list:
        """Return the places of ``count`` partials, ``step`` apart, padded to PARTS_AT_ONCE with the last place."""
        slots = [first % self.slots]
        for i in cutlass.range_constexpr(1, PARTS_AT_ONCE):
            following = slots[-1] + (step if i < count else Int32(0))
            slots.append(following - (self.slots if following >= self.slots else Int32(0)))
        return [slot * self.rows for slot in slots]

    def output(self, row, column):
        """Return the address of an element of a row, counted over all slots.

        The scratch has fewer than 2^31 elements.
        """
        return self.scratch + Int64(row * self.columns + column) * self.element_bytes

    def statistics(self, row, level: int):
        """Return the address of (reference, sum) of a row."""
        return self.output(self.slots * self.rows, 0) + Int64(row * STATISTICS + level) * 4

    def counter(self, kind: int, partial_id):
        """Return the address of the counter ``kind`` of the partial's slot."""
        return self._counter(kind, partial_id % self.slots)

    def _counter(self, kind: int, slot):
        return self.tickets + 4 * (TICKETS + Int64(kind) * self.slots + slot)

    def epoch(self, partial_id):
        return partial_id // self.slots

    @cute.jit
    def wait_free(self, partials) -> None:
        """Return when each of the partials owns its slot. Called by one thread."""
        missing = self._missing(partials)
        while missing != 0:
            missing = self._missing(partials)
        cute.arch.fence_acq_rel_gpu()

    def _missing(self, partials):
        found = [load_relaxed(self.counter(EPOCH, partial_id)) for partial_id in partials]
        return sum((f != self.epoch(partial_id)).to(Int32) for f, partial_id in zip(found, partials, strict=True))

    @cute.jit
    def store(self, partial_id, row, pairs, reference, total, first_column, column_half) -> None:
        """Store one row of a partial: ``pairs`` of output columns, and (reference, sum).

        The pairs are 8 columns apart, from ``first_column`` on in one half of the columns.
        """
        columns = 8 * len(pairs)
        row += self.place(partial_id)
        address = self.output(row, column_half * columns + first_column)
        for i in cutlass.range_constexpr(len(pairs)):
            copy.store_global(address + 32 * i, pairs[i])
        if first_column + column_half == 0:
            copy.store_global(self.statistics(row, PARTIAL), (reference, total))

    @cute.jit
    def store_vector(self, partial_id, row, column, total: "WeightedSum", level: cutlass.Constexpr[int]) -> None:
        """Store four columns of a row of a partial."""
        row += self.place(partial_id)
        copy.store_global(self.output(row, column), total.values)
        if column == 0:
            copy.store_global(self.statistics(row, level), (total.reference, total.sum))


@device_struct(frozen=True)
class WeightedSum:
    """Four columns of a row, relative to its reference, and its sum of exponentials."""

    values: tuple
    reference: Float32
    sum: Float32

    @staticmethod
    def nothing() -> "WeightedSum":
        return WeightedSum((Float32(0.0),) * COLUMNS_AT_ONCE, Float32(-Float32.inf), Float32(0.0))

    @cute.jit
    def plus(self, statistics, columns, count) -> "WeightedSum":
        """Add the first ``count`` of up to PARTS_AT_ONCE more parts of the row."""
        references = [each[0] if i < count else -Float32.inf for i, each in enumerate(statistics)]
        sums = [each[1] for each in statistics]
        weights, reference, total = combined([self.reference, *references], [self.sum, *sums])
        values = [weights[0] * value for value in self.values]
        for i in cutlass.range_constexpr(len(columns)):
            for c in cutlass.range_constexpr(COLUMNS_AT_ONCE):
                values[c] += weights[i + 1] * (columns[i][c] if i < count else Float32(0.0))
        return WeightedSum(tuple(values), reference, total)


@device_struct(frozen=True)
class Combine:
    """The threads that manage and combine a CTA's partials."""

    slots: Slots
    first_thread: int
    threads: int
    barrier: int  # their named barrier

    @property
    def thread(self):
        return cute.arch.thread_idx()[0] - self.first_thread

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)

    @cute.jit
    def run(self, work_queue, ring, addresses, geometry, scale, out_dtype: cutlass.Constexpr) -> None:
        """Run the combine as a separate role.

        It waits for the slot of every work tile in the work queue. When a tile is stored, it combines everything that
        is complete.
        """
        work = Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            self.prepare(tile)
            ring.release(work)
            ring.wait_full(work)
            if tile.chunks > 1:
                rows = PackedRows.create(addresses, geometry, tile, scale, out_dtype.width // 8)
                self.complete(tile, rows, out_dtype)
            work += 1
            tile = work_queue.read(work)
        self.hand_back(Int32(geometry.grid))

    @cute.jit
    def prepare(self, tile) -> None:
        """Return, in the first thread, when the work tile's partial, if it has one, may be written."""
        # All slots are free in their first epoch.
        if tile.partial_id >= self.slots.slots and tile.chunks > 1 and self.thread == 0:
            # The partial's own slot and the slots that count for it may still be in an earlier epoch.
            self.slots.wait_free((tile.partial_id, tile.first_partial, tile.fan_in_partial))
        cute.arch.sync_warp()

    @cute.jit
    def complete(self, tile, rows: PackedRows, out_dtype: cutlass.Constexpr) -> None:
        """Combine everything that a newly written partial completes. All threads here already see the partial."""
        step, first, first_of_group = tile.tiles_of_chunk, tile.first_partial, tile.fan_in_partial
        size = cutlass.min(tile.chunks - tile.chunk // FAN_IN * FAN_IN, FAN_IN)
        if self._is_last(PARTIALS_DONE, first_of_group, size):
            if tile.chunks <= FAN_IN:
                self._add_up(first, step, size, PARTIAL, rows, out_dtype)
                self._release(first, step, size)
            else:
                self._add_up(first_of_group, step, size, PARTIAL, rows, None)
                self._release(first_of_group + step, step, size - 1)
                fan_in_groups = (tile.chunks + (FAN_IN - 1)) // FAN_IN
                if self._is_last(GROUPS_DONE, first, fan_in_groups):
                    self._add_up(first, step * FAN_IN, fan_in_groups, FAN_IN_GROUP, rows, out_dtype)
                    self._release(first, step * FAN_IN, fan_in_groups)

    @cute.jit
    def _is_last(self, kind: cutlass.Constexpr[int], first, count):
        """Count one of ``count`` in the slot of the partial ``first``, and return whether it was the last.

        The last one resets the counter to zero.
        """
        last = Int32(1)
        if self.thread == 0:
            last = count_one(self.slots.counter(kind, first), count)
            if last != 0:
                global_array(Int32, self.slots.counter(kind, first))[0] = 0
        return barrier_all(last != 0, self.barrier, self.threads)

    @cute.jit
    def _release(self, first, step, count) -> None:
        """Free the slots of ``count`` partials, which have been read."""
        self.meet()
        if self.thread < count:
            partial_id = first + self.thread * step
            store_release(self.slots.counter(EPOCH, partial_id), self.slots.epoch(partial_id) + 1)

    @cute.jit
    def _add_up(self, first, step, count, level: cutlass.Constexpr[int], rows: PackedRows, out_dtype) -> None:
        """Combine ``count`` partials into the output.

        Without ``out_dtype``, combine them into the first one as a fan-in group.
        """
        slots = self.slots
        vectors = slots.columns // COLUMNS_AT_ONCE
        rounds = (count + (PARTS_AT_ONCE - 1)) // PARTS_AT_ONCE
        for index in cutlass.range(self.thread, cutlass.min(rows.count, slots.rows) * vectors, self.threads, unroll=1):
            row = index // vectors
            column = (index - row * vectors) * COLUMNS_AT_ONCE
            total = WeightedSum.nothing()
            for k in cutlass.range(rounds, unroll=1):
                there = count - k * PARTS_AT_ONCE
                places = slots.places(first + k * PARTS_AT_ONCE * step, step, there)
                statistics = [copy.load_global(slots.statistics(place + row, level), 2) for place in places]
                outputs = [copy.load_global(slots.output(place + row, column), COLUMNS_AT_ONCE) for place in places]
                total = total.plus(statistics, outputs, there)
            if const_expr(out_dtype is None):
                slots.store_vector(first, row, column, total, FAN_IN_GROUP)
            else:
                factor = rows.finish(row, total.reference, total.sum, column == 0)
                copy.store_rounded(rows.output(row, column), [value * factor for value in total.values], out_dtype)

    @cute.jit
    def _is_last_cta(self, grid):
        self.meet()
        last = Int32(1)
        if self.thread == 0:
            last = count_one(self.slots.tickets + 4, grid)
        return barrier_all(last != 0, self.barrier, self.threads)

    @cute.jit
    def hand_back(self, grid) -> None:
        """Reset every counter to zero in the last CTA, as the next launch expects."""
        if self._is_last_cta(grid):
            counters = global_array(Int32, self.slots.tickets)
            for i in cutlass.range(self.thread, TICKETS + self.slots.slots, self.threads, unroll=1):
                counters[i] = 0


def count_one(address, count):
    """Count one more, and return 1 if the count has reached ``count``.

    With the result 1, everything that the others did before is visible.
    """
    before = cute.arch.atomic_add(global_pointer(Int32, address), Int32(1), sem="acq_rel", scope="gpu")
    return (before == count - 1).to(Int32)
