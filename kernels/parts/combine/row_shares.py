"""Combine of large decode partials by row shares: warps combine shares of a request's rows beside the work tiles.

A partial of MLA is large: up to 64 rows of 512 columns. When the last CTA of a request combined all partials, as in
``partials.py``, it spent 85000 cycles on four while all others waited. With a share for every CTA, combined between its
work tiles, combining took a quarter of the time between work tiles (H200, 2026-11-22). One or two warps of each CTA
therefore only combine. The attending warps combine the remaining shares when there are no more work tiles.

Partials are float16. Each half row is multiplied by its own power of two, so that the largest element has 11 bits. An
element 2^-29 as large still has 11 bits.

``OwnRowShares`` serves CTAs with CTA parts, which have no tickets. The rest of this page is about CTAs that take work
tiles by tickets.

Each partial comes with a few shares of the rows that it belongs to. All shares of all partials form one list. A warp
that has combined a share takes a ticket for the next one. It waits until all partials of the rows have been announced,
and adds them in key order. The warp that combines a share therefore never changes a bit.

Slots of partials are reused in epochs as in ``partials.py``. If a later partial needs the slots, they become free when
all shares have been combined. There is no circular wait, for three reasons:
* Work tiles and shares are handed out in the order of their lists.
* A share waits only for partials that come before the partials of the next rows.
* A partial waits for a slot of rows that come before its own rows. This holds because the ring holds more than the
  partials of one request and of one round of all CTAs. The partials of the last round wait for shares that are combined
  beside work tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr

from hopwell.kernels.config.splitting import SHARES, SLOT_COUNTERS, STATISTICS, TICKETS, WARP_ROWS
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import EPOCH, PARTIAL, PARTIALS_DONE, Slots, count_one
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import CORE_MATRIX_ROWS
from hopwell.kernels.parts.core.device import (
    device_struct,
    fma,
    global_array,
    global_pointer,
    load_acquire,
    load_relaxed,
    ptx,
    quotient,
    store_release,
)
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import combined, largest_of_lane

SUBTILE_BYTES, SUBTILE_COLUMNS = LANES * copy.VECTOR_BYTES, CORE_MATRIX_ROWS * RowFragment.lanes_per_row
_, _, SHARES_DONE, *SHARE = range(SLOT_COUNTERS)
READY = SHARE[0]
NO_SHARE = (1 << 31) - 1
SCALES = 2  # index of the inverse scales of a row's two halves in its statistics
WARPS_TICKET, SHARES_TICKET = 4, 8  # bytes from the first ticket


@device_struct(frozen=True)
class RowPartials:
    """The partials of some rows, one per chunk."""

    first: Int32
    step: Int32  # from a partial to the partial of the next chunk
    chunks: Int32


@device_struct(frozen=True)
class Partials:
    """The partials of all CTAs, with the store of a partial and the combine of a row share. Called by whole warps."""

    slots: Slots
    loads: tuple[tuple[int, int], ...]  # (partials, subtiles of each) in flight per lane: few, more, many partials

    @cute.jit
    def store(self, partial_id, output, r: cutlass.Constexpr[int], reference, total, warp_row, half) -> None:
        """Store row r of a warp's accumulators in 16 bits, in register order.

        The accumulators are half of a partial's columns. :meth:`_combine_band` describes the place of each element.
        """
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
        """Return the index of a band in its partial."""
        return (warp_row // WARP_ROWS * RowFragment.rows + r) * 2 + half

    @cute.jit
    def _combine_subtiles(
        self, subtiles: tuple, partials: RowPartials, rows: PackedRows, dtype: cutlass.Constexpr
    ) -> None:
        """Combine ``subtiles`` (first, end) of rows with these partials."""
        of_band, (begin, end) = self._subtiles_of_band, subtiles
        for band in cutlass.range(begin // of_band, (end + (of_band - 1)) // of_band, unroll=1):
            low, high = cutlass.max(begin, band * of_band), cutlass.min(end, (band + 1) * of_band)
            own = (low - band * of_band, high - band * of_band)
            self._combine_band_of(self.loads, band, own, partials, rows, dtype)

    def _share_subtiles(self, share, shares, rows: PackedRows) -> tuple:
        """Return (first subtile, end) of one of ``shares`` equal shares of the rows."""
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
        """Combine subtiles of a band with the first of ``loads`` that takes all partials at once, or with the last."""
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
        """Combine subtiles [begin, end) of a band.

        A band is 8 rows of half of the columns. A subtile is 32 columns of a band: four lanes share a row, and each
        lane has two columns of each of four accumulator blocks.
        """
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
                # Each lane of a row loads the statistics of some of the partials. Indices past the last partial repeat
                # it with weight 0.
                mine = [chunk + lane % lanes + i for i in range(0, partials_at_once, lanes)]
                places = [slots.place(partials.first + cutlass.min(each, chunks - 1) * partials.step) for each in mine]
                loaded = []
                for i in cutlass.range_constexpr(partials_at_once):
                    address = slots.output(cute.arch.shuffle_sync(places[i // lanes], i % lanes), 0) + mine_in_band
                    loaded.append([copy.load_global(address + each * SUBTILE_BYTES, 4, Int32) for each in subtiles])
                found = [copy.load_global(slots.statistics(place + row, PARTIAL), STATISTICS) for place in places]
                # Partials are added in groups of one per lane of a row, regardless of the number in flight. Roundings
                # are explicit. Otherwise another warp would produce other bits.
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
    """Row shares that any free warp takes by tickets."""

    @cute.jit
    def wait_free(self, tile) -> None:
        """Return when the work tile's partial, if it has one, may be written."""
        # All slots are free in their first epoch.
        if tile.partial_id >= self.slots.slots and tile.chunks > 1 and cute.arch.lane_idx() == 0:
            self.slots.wait_free((tile.partial_id, tile.first_partial))
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, tile, group, ctas: cutlass.Constexpr[int]) -> None:
        """Announce the work tile's partial, if it has one, after its stores are visible to this warp.

        The last partial of its rows makes all of their shares ready. A partial is complete when all ``ctas`` of a
        cluster, which store rows of it, have announced it.
        """
        if tile.chunks > 1:
            slots, first, of_chunk = self.slots, tile.first_partial, tile.tiles_of_chunk
            if cute.arch.lane_idx() == 0 and (ctas == 1 or cute.arch.block_in_cluster_idx()[0] == 0):
                share = (tile.request.o_start, tile.first_row, tile.rows(group), tile.chunk, tile.chunks, of_chunk)
                for kind, value in zip(SHARE[1:], share, strict=True):
                    global_array(Int32, slots.counter(kind, tile.partial_id))[0] = value
            if self._is_last(PARTIALS_DONE, first, tile.chunks * ctas):
                for i in cutlass.range(cute.arch.lane_idx(), tile.chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(READY, each), slots.epoch(each) + 1)

    @cute.jit
    def run(self, partials, others, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr) -> None:
        """Combine shares until the shares of all ``partials`` have been handed out.

        The last ``others`` partials are left to warps that combine faster.
        """
        own_end = (partials - others) * SHARES
        share = self._ticket(own_end)
        while share < partials * SHARES:
            partial_id = share // SHARES
            self._wait_ready(partial_id)
            self._combine(partial_id, share - partial_id * SHARES, partials, a, g, scale, dtype)
            share = self._ticket(own_end)

    @cute.jit
    def _ticket(self, end):
        """Draw the next place in the list of shares, or NO_SHARE if the next place is already at or past ``end``."""
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
        """Combine share ``part`` of the shares of a partial."""
        slots = self.slots
        token, first_row, count, chunk, chunks, of_chunk = (
            load_relaxed(slots.counter(k, partial_id)) for k in SHARE[1:]
        )
        rows = PackedRows(a, g, token, Int32(0), first_row, count, scale, dtype.width // 8).up_to(slots.rows)
        first = partial_id - chunk * of_chunk
        shares = chunks * SHARES
        subtiles = self._share_subtiles(chunk * SHARES + part, shares, rows)
        self._combine_subtiles(subtiles, RowPartials(first, of_chunk, chunks), rows, dtype)
        # No partial reuses the slots of the last partials, and a store that frees them takes 1500 cycles.
        if first + slots.slots < partials:
            cute.arch.sync_warp()  # all lanes have read
            if self._is_last(SHARES_DONE, first, shares):
                for i in cutlass.range(cute.arch.lane_idx(), chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(EPOCH, each), slots.epoch(each) + 1)

    @cute.jit
    def _is_last(self, kind: cutlass.Constexpr[int], first, count):
        """Count one of ``count`` in the slot of the partial ``first``, and return whether it was the last.

        The last one resets the counter to zero, and everything that the others did before is visible to it.
        """
        last = Int32(0)
        if cute.arch.lane_idx() == 0:
            last = count_one(self.slots.counter(kind, first), count)
            if last != 0:
                global_array(Int32, self.slots.counter(kind, first))[0] = 0
        cute.arch.sync_warp()
        return cute.arch.shuffle_sync(last, 0) != 0

    @cute.jit
    def hand_back(self, warps, partials) -> None:
        """Reset every counter to zero in the last of all ``warps`` that combine, as the next launch expects.

        ``partials`` is the number of all partials.
        """
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
    """Return the magnitude of this lane's largest element of row r of accumulators."""
    return _magnitude(largest_of_lane(output, r, True))


def _magnitude(value):
    return ptx("abs.f32 {$w0}, {$r0};", value, results=[Float32])


def partial_scale(largest):
    """Return the power of two that scales ``largest`` of a half row to [2^14, 2^15), and its inverse.

    For infinity it returns 1.
    """
    return ptx(
        "{ .reg .b32 e; .reg .pred p; mov.b32 e, {$r0}; and.b32 e, e, 0x7f800000; setp.eq.b32 p, e, 0x7f800000; "
        f"selp.b32 e, {141 << 23}, e, p; max.u32 e, e, {15 << 23}; "
        f"sub.u32 e, {(14 + 254) << 23}, e; mov.b32 {{$w0}}, e; sub.u32 e, {254 << 23}, e; mov.b32 {{$w1}}, e; }}",
        largest,
        results=[Float32, Float32],
    )


STORING_WARPS = 2 * WARPS  # per partial; each also combines one share
# Counters in the first partial's slot: warps that have stored, and warps that have read the first counter. The epoch of
# other combines comes before them.
_, STORED, READ, *_ = range(SLOT_COUNTERS)


@dataclass(frozen=True)
class OwnSlots(Slots):
    """Slots with at most one partial each."""

    def place(self, partial_id):
        return partial_id * self.rows

    def counter(self, kind: int, partial_id):
        return self._counter(kind, partial_id)


@dataclass(frozen=True)
class OwnRowShares(Partials):
    """Partials whose rows are combined by the CTAs that computed them, each in proportion to its number of partials.

    With CTA parts (``cta_parts.py``), every partial has its own slot, and each CTA knows from the start which partials
    it will have. Shares therefore need no tickets, and no message describes a partial. Each attending warp adds one to
    a counter of its rows when it has stored its part of a partial. When it has no more work tiles, it waits until the
    counter shows all parts of all chunks, and combines its share.

    The path from the last store of one CTA to the first load of another has one addition and one read of a counter.
    With shares by tickets, the path had an addition whose result was awaited, a flag, a ticket, and a share description
    to load.

    There is no circular wait, because a CTA stores all of its partials before it waits.
    """

    @cute.jit
    def announce(self, tile) -> None:
        """Count this warp's part of the work tile's partial, if it has one, after the warp has stored it."""
        if tile.chunks > 1:
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                there = global_pointer(Int32, self.slots.counter(STORED, tile.first_partial))
                cute.arch.red(there, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

    @cute.jit
    def combine(self, tile, warp, a: Addresses, g: DecodeGeometry, scale, dtype) -> None:
        """Combine one warp's share of the rows of a partial of this CTA; ``warp`` is one of STORING_WARPS."""
        rows = PackedRows.create(a, g, tile, scale, dtype.width // 8).up_to(self.slots.rows)
        shares = tile.chunks * STORING_WARPS
        subtiles = self._share_subtiles(tile.chunk * STORING_WARPS + warp, shares, rows)
        # At least one warp has to wait. Otherwise counters would be reset before every store was counted.
        is_spared = (subtiles[0] >= subtiles[1]) & (rows.count > 0)
        before = self._wait_stored(tile.first_partial, shares, is_spared)
        self._combine_subtiles(subtiles, RowPartials(tile.first_partial, tile.tiles_of_chunk, tile.chunks), rows, dtype)
        # The number is used this late so that no warp waits for it.
        if before == shares - 1:
            for kind in (STORED, READ):
                global_array(Int32, self.slots.counter(kind, tile.first_partial))[0] = 0

    @cute.jit
    def _wait_stored(self, first, parts, is_spared):
        """Wait for all ``parts`` of the partials that begin with ``first``, unless this warp ``is_spared``.

        ``parts`` warps in all call this. One lane of each learns the number of earlier warps. The last warp resets both
        counters to zero, as the next launch expects.
        """
        before = Int32(-1)
        if cute.arch.lane_idx() == 0:
            stored, read = (self.slots.counter(kind, first) for kind in (STORED, READ))
            wanted = parts * (1 - is_spared.to(Int32))
            while load_acquire(stored) < wanted:
                pass
            before = cute.arch.atomic_add(global_pointer(Int32, read), Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()
        return before
