"""Merging large partials of decode: warps combine shares of the rows of a request while others compute the next
partials.

A partial of MLA is large: up to 64 rows of 512 columns. When the last CTA of a request combined all of its partials, as
``partial.py`` has it, it spent 85000 cycles on four of them while all others waited; with a share for every CTA,
combined between its work tiles, a quarter of the time passed between work tiles (H200, 2026-11-22). So a warp or two of
each CTA do nothing else, and those that attend combine what is left when there are no more work tiles. Partials are
float16, each half row times a power of two of its own: the largest element has 11 bits then, and one 2^-29 as large
still has them.

This is how shares are combined where CTAs take tickets for work tiles, and what ``own_shares.py`` has in common with
it, where they do not.

Partial p comes with some shares of the rows that it belongs to: all shares of all partials are one list, and a warp
that has combined one takes a ticket for the next. It waits until all partials of those rows have been announced, and
adds them up in the order of the keys: which warp it is never changes a bit.

Slots of partials go round as in ``partial.py``, and are free again when all shares have been combined, if a later
partial wants them. Nobody waits in a circle: work tiles and shares are handed out in the order of their lists, a share
waits for partials that come before those of the next rows, and a partial for a slot of rows that come before its own,
because the ring holds more than the partials of one request and of one round of all CTAs: those of the last round wait
for shares that are combined beside work tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config.splitting import SHARES, SLOT_COUNTERS, STATISTICS, TICKETS, WARP_ROWS
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import EPOCH, GROUPS_THERE, PARTIAL, PARTIALS_THERE, SHARE, Slots, count_one
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import CORE_MATRIX_ROWS
from hopwell.kernels.parts.core.device import (
    DeviceStruct,
    fma,
    global_array,
    global_pointer,
    load_relaxed,
    quotient,
    store_release,
)
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import combined, largest_of_lane

SUBTILE_BYTES, SUBTILE_COLUMNS = LANES * copy.VECTOR_BYTES, CORE_MATRIX_ROWS * RowFragment.lanes_per_row
READY = SHARE[0]
NO_SHARE = (1 << 31) - 1
SCALES = 2  # where the inverse scales of the halves of a row lie in its statistics
WARPS_TICKET, SHARES_TICKET = 4, 8  # bytes from the first ticket


@dataclass(frozen=True)
class RowPartials(DeviceStruct):
    """The partials of some rows: one for each chunk."""

    first: Int32
    step: Int32  # from a partial to that of the next chunk
    chunks: Int32


@dataclass(frozen=True)
class Partials(DeviceStruct):
    """The partials of all CTAs: how one is stored, and how a share of rows is combined. Called by whole warps."""

    slots: Slots
    loads: tuple[tuple[int, int], ...]  # partials, and subtiles of each, under way in a lane: few partials, more, many

    @cute.jit
    def store(self, partial_id, output, r: cutlass.Constexpr[int], reference, total, warp_row, half) -> None:
        """Store row r of a warp's accumulators, which are half of a partial's columns, in 16 bits, as they lie in
        registers. :meth:`_combine_band` says where an element is."""
        largest = cute.arch.warp_reduction_max(largest_size(output, r), threads_in_group=output.lanes_per_row)
        scale, inverse = partial_scale(largest)
        subtiles = self._subtiles_of_band
        first = self.slots.output(self.slots.place(partial_id), 0) + Int64(
            self._band(warp_row, r, half) * subtiles * SUBTILE_BYTES
        )
        for subtile in cutlass.range_constexpr(subtiles):
            values = [output.get(r, subtile * CORE_MATRIX_ROWS + c) * scale for c in range(CORE_MATRIX_ROWS)]
            words = [copy.pack_x2(Float16, *values[c : c + 2]) for c in range(0, CORE_MATRIX_ROWS, 2)]
            copy.store_global(first + subtile * SUBTILE_BYTES + cute.arch.lane_idx() * copy.VECTOR_BYTES, words)
        if output.first_column() == 0:
            row = self.slots.place(partial_id) + warp_row + output.first_row() + output.row_offset(r)
            if half == 0:
                copy.store_global(self.slots.statistics(row, PARTIAL), (reference, total))
            global_array(Float32, self.slots.statistics(row, SCALES))[half] = inverse

    @property
    def _subtiles_of_band(self) -> int:
        return self.slots.columns // (2 * SUBTILE_COLUMNS)

    def _band(self, warp_row, r, half):
        """Return the number of a band among those of a partial."""
        return (warp_row // WARP_ROWS * RowFragment.rows + r) * 2 + half

    @cute.jit
    def _combine_subtiles(
        self, subtiles: tuple, partials: RowPartials, rows: PackedRows, dtype: cutlass.Constexpr
    ) -> None:
        """Combine (first subtile, end) of rows that have these partials."""
        of_band, (begin, end) = self._subtiles_of_band, subtiles
        for band in cutlass.range(begin // of_band, (end + (of_band - 1)) // of_band, unroll=1):
            low, high = cutlass.max(begin, band * of_band), cutlass.min(end, (band + 1) * of_band)
            own = (low - band * of_band, high - band * of_band)
            self._combine_band_of(self.loads, band, own, partials, rows, dtype)

    def _share_subtiles(self, share, shares, rows: PackedRows) -> tuple:
        """Return the (first subtile, end) of one of the equal ``shares`` of rows."""
        bands = (rows.count + (WARP_ROWS - 1)) // WARP_ROWS * (RowFragment.rows * 2)
        return tuple(quotient(bands * self._subtiles_of_band * (share + i), shares) for i in range(2))

    @cute.jit
    def _combine_band_of(
        self,
        loads: cutlass.Constexpr,
        band,
        subtiles,
        partials: RowPartials,
        rows: PackedRows,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Combine subtiles of a band with the first of these ``loads`` that take all partials at once, or with the
        last."""
        (partials_at_once, subtiles_at_once), *rest = loads
        if const_expr(len(rest) > 0):
            if partials.chunks > partials_at_once:
                self._combine_band_of(tuple(rest), band, subtiles, partials, rows, dtype)
            else:
                self._combine_band(partials_at_once, subtiles_at_once, band, *subtiles, partials, rows, dtype)
        else:
            self._combine_band(partials_at_once, subtiles_at_once, band, *subtiles, partials, rows, dtype)

    @cute.jit
    def _combine_band(
        self,
        partials_at_once: cutlass.Constexpr[int],
        subtiles_at_once: cutlass.Constexpr[int],
        band,
        begin,
        end,
        partials: RowPartials,
        rows: PackedRows,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Combine subtiles [begin, end) of a band. A band is 8 rows of half of the columns, a subtile 32 columns of it:
        a row for four lanes, two columns each of four accumulator blocks for a lane."""
        slots, lane, lanes = self.slots, cute.arch.lane_idx(), RowFragment.lanes_per_row
        chunks = partials.chunks
        half, r, warp = band % 2, band // 2 % RowFragment.rows, band // (2 * RowFragment.rows)
        row = warp * WARP_ROWS + RowFragment.row_offset(r) + RowFragment.first_row()
        mine_in_band = band * (self._subtiles_of_band * SUBTILE_BYTES) + lane * copy.VECTOR_BYTES
        for subtile in cutlass.range(begin, end, subtiles_at_once, unroll=1):
            subtiles = [cutlass.min(subtile + k, end - 1) for k in range(subtiles_at_once)]
            values = [[Float32(0.0)] * CORE_MATRIX_ROWS for _ in subtiles]
            reference, total = -Float32.inf, Float32(0.0)  # the sum over this lane's partials
            for chunk in cutlass.range(0, chunks, partials_at_once, unroll=1):
                # Each of the lanes of a row knows some of the partials. Past the last that again, which counts nothing.
                mine = [chunk + lane % lanes + i for i in range(0, partials_at_once, lanes)]
                places = [slots.place(partials.first + cutlass.min(each, chunks - 1) * partials.step) for each in mine]
                loaded = []
                for i in cutlass.range_constexpr(partials_at_once):
                    partial_id = slots.output(cute.arch.shuffle_sync(places[i // lanes], i % lanes), 0) + mine_in_band
                    loaded.append([copy.load_global(partial_id + each * SUBTILE_BYTES, 4, Int32) for each in subtiles])
                found = [copy.load_global(slots.statistics(place + row, PARTIAL), STATISTICS) for place in places]
                # Partials are added as many at a time as a row has lanes, however many are under way, and roundings are
                # spelled out: another warp would find other bits.
                for nth in cutlass.range_constexpr(len(mine)):
                    if chunk + nth * lanes < chunks:
                        its_chunk, (seen, its_total, *scales) = mine[nth], found[nth]
                        seen = seen if its_chunk < chunks else -Float32.inf
                        largest = cute.arch.warp_reduction_max(seen, threads_in_group=lanes)
                        weights, reference, _ = combined([reference, largest, seen], [Float32(0.0)] * 3)
                        kept, _, weight = weights
                        total = fma(weight, its_total, total * kept)
                        weight = weight * (scales[0] if half == 0 else scales[1])
                        for k in cutlass.range_constexpr(subtiles_at_once):
                            values[k] = [value * kept for value in values[k]]
                        for i in cutlass.range_constexpr(lanes):
                            its_weight = cute.arch.shuffle_sync(weight, lane // lanes * lanes + i)
                            for k in cutlass.range_constexpr(subtiles_at_once):
                                for c in cutlass.range_constexpr(CORE_MATRIX_ROWS // 2):
                                    low, high = copy.unpack_f16_x2(loaded[nth * lanes + i][k][c])
                                    values[k][2 * c] = fma(its_weight, low, values[k][2 * c])
                                    values[k][2 * c + 1] = fma(its_weight, high, values[k][2 * c + 1])
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if row < rows.count:
                factor = rows.finish(row, reference, total, band % 2 == 0 and subtile == 0 and lane % lanes == 0)
                for k in cutlass.range_constexpr(subtiles_at_once):
                    if subtile + k < end:
                        column = (
                            half * (slots.columns // 2) + subtiles[k] * SUBTILE_COLUMNS + RowFragment.first_column()
                        )
                        for c in cutlass.range_constexpr(0, CORE_MATRIX_ROWS, 2):
                            scaled = [values[k][c] * factor, values[k][c + 1] * factor]
                            copy.store_rounded(rows.output(row, column + RowFragment.column_offset(c)), scaled, dtype)


@dataclass(frozen=True)
class RowShares(Partials):
    """Partials whose shares are handed out to whichever warp has time for them."""

    @cute.jit
    def wait_free(self, tile) -> None:
        """Return when the work tile's partial, if it is one, may be written."""
        # In their first epoch all slots are free.
        if tile.partial_id >= self.slots.slots and tile.chunks > 1 and cute.arch.lane_idx() == 0:
            self.slots.wait_free((tile.partial_id, tile.first_partial))
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, tile, group) -> None:
        """The work tile's partial, if it is one, has been written, visibly to this warp: when it was the last of its
        rows, all of their shares are ready."""
        if tile.chunks > 1:
            slots, first, of_chunk = self.slots, tile.first_partial, tile.tiles_of_chunk
            if cute.arch.lane_idx() == 0:
                share = (tile.request.o_start, tile.first_row, tile.rows(group), tile.chunk, tile.chunks, of_chunk)
                for kind, value in zip(SHARE[1:], share, strict=True):
                    global_array(Int32, slots.counter(kind, tile.partial_id))[0] = value
            if self._is_last(PARTIALS_THERE, first, tile.chunks):
                for i in cutlass.range(cute.arch.lane_idx(), tile.chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(READY, each), slots.epoch(each) + 1)

    @cute.jit
    def run(self, partials, others, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr) -> None:
        """Combine shares until those of all ``partials`` have been handed out, but leave the last ``others`` partials
        to warps that combine faster."""
        own_end = (partials - others) * SHARES
        share = self._ticket(own_end)
        while share < partials * SHARES:
            partial_id = share // SHARES
            self._wait_ready(partial_id)
            self._combine(partial_id, share - partial_id * SHARES, partials, a, g, scale, dtype)
            share = self._ticket(own_end)

    @cute.jit
    def _ticket(self, end):
        """Draw the next place in the list of shares; past all of them where it is ``end`` already."""
        ticket = Int32(NO_SHARE)
        if cute.arch.lane_idx() == 0 and end > 0:
            tickets = self.slots.tickets + SHARES_TICKET
            if load_relaxed(tickets) < end:
                ticket = cute.arch.atomic_add(global_pointer(Int32, tickets), Int32(1))
        return cute.arch.shuffle_sync(ticket, 0)

    @cute.jit
    def _wait_ready(self, partial_id) -> None:
        if cute.arch.lane_idx() == 0:
            wanted = self.slots.epoch(partial_id) + 1
            found = load_relaxed(self.slots.counter(READY, partial_id))
            while found != wanted:
                found = load_relaxed(self.slots.counter(READY, partial_id))
            cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()

    @cute.jit
    def _combine(
        self, partial_id, part, partials, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr
    ) -> None:
        """Share ``part`` of those that come with a partial."""
        slots = self.slots
        token, first_row, count, chunk, chunks, of_chunk = (
            load_relaxed(slots.counter(k, partial_id)) for k in SHARE[1:]
        )
        rows = PackedRows(a, g, token, Int32(0), first_row, count, scale, dtype.width // 8).up_to(slots.rows)
        first = partial_id - chunk * of_chunk
        shares = chunks * SHARES
        subtiles = self._share_subtiles(chunk * SHARES + part, shares, rows)
        self._combine_subtiles(subtiles, RowPartials(first, of_chunk, chunks), rows, dtype)
        # Nobody wants the slots of the last partials again, and to say that they are free takes 1500 cycles.
        if first + slots.slots < partials:
            cute.arch.sync_warp()  # all lanes have read
            if self._is_last(GROUPS_THERE, first, shares):
                for i in cutlass.range(cute.arch.lane_idx(), chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(EPOCH, each), slots.epoch(each) + 1)

    @cute.jit
    def _is_last(self, kind: cutlass.Constexpr[int], first, count):
        """Count one more of ``count`` in the slot of their ``first``, and say whether it was the last; then the counter
        is zero again, and what the others did before is visible."""
        last = Int32(0)
        if cute.arch.lane_idx() == 0:
            last = count_one(self.slots.counter(kind, first), count)
            if last != 0:
                global_array(Int32, self.slots.counter(kind, first))[0] = 0
        cute.arch.sync_warp()
        return cute.arch.shuffle_sync(last, 0) != 0

    @cute.jit
    def hand_back(self, warps, partials) -> None:
        """The last of all ``warps`` that combine leaves every counter at zero, as the next launch wants to find it.
        There were so many ``partials``."""
        last = Int32(0)
        if cute.arch.lane_idx() == 0:
            last = count_one(self.slots.tickets + WARPS_TICKET, warps)
        cute.arch.sync_warp()
        if cute.arch.shuffle_sync(last, 0) != 0:
            counters, slots = global_array(Int32, self.slots.tickets), self.slots.slots
            if cute.arch.lane_idx() < TICKETS:
                counters[cute.arch.lane_idx()] = 0
            for i in cutlass.range(cute.arch.lane_idx(), cutlass.min(slots, partials), LANES, unroll=1):
                for kind in cutlass.range_constexpr(SLOT_COUNTERS):
                    counters[TICKETS + kind * slots + i] = 0


def largest_size(output, r: int):
    """Return the size of the largest element of row r of accumulators, in this lane."""
    return _magnitude(largest_of_lane(output, r, True))


@dsl_user_op
def _magnitude(value, *, loc=None, ip=None):
    return cute.arch.inline_ptx(
        "abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value], loc=loc, ip=ip
    )


@dsl_user_op
def partial_scale(largest, *, loc=None, ip=None):
    """Return the power of two that brings ``largest`` of a half row between 2^14 and 2^15, and its inverse; 1 for
    infinity."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 e; .reg .pred p; mov.b32 e, {$r0}; and.b32 e, e, 0x7f800000; setp.eq.b32 p, e, 0x7f800000; "
        f"selp.b32 e, {141 << 23}, e, p; max.u32 e, e, {15 << 23}; "
        f"sub.u32 e, {(14 + 254) << 23}, e; mov.b32 {{$w0}}, e; sub.u32 e, {254 << 23}, e; mov.b32 {{$w1}}, e; }}",
        write_only_types=[Float32, Float32],
        read_only_args=[largest],
        loc=loc,
        ip=ip,
    )
