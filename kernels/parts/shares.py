"""Merging large pieces of decode: warps merge shares of the rows of a request while others compute the next pieces.

A piece of MLA is large: up to 64 rows of 512 columns. When the last CTA of a request merged all of its pieces, as
``partial.py`` has it, it spent 85000 cycles on four of them while all others waited; with a share for every CTA, merged
between its units, a quarter of the time passed between units (H200, 2026-11-22). So a warp or two of each CTA do
nothing else, and those that attend merge what is left when there are no more units. Pieces are float16, each half row
times a power of two of its own: the largest element has 11 bits then, and one 2^-29 as large still has them.

This is how shares are merged where CTAs take tickets for units, and what ``own_shares.py`` has in common with it, where
they do not.

Piece p comes with some shares of the rows that it belongs to: all shares of all pieces are one list, and a warp that
has merged one takes a ticket for the next. It waits until all pieces of those rows have been announced, and adds them
up in the order of the keys: which warp it is never changes a bit.

Slots of pieces go round as in ``partial.py``, and are free again when all shares have been merged, if a later piece
wants them. Nobody waits in a circle: units and shares are handed out in the order of their lists, a share waits for
pieces that come before those of the next rows, and a piece for a slot of rows that come before its own, because the
ring holds more than the pieces of one request and of one round of all CTAs: those of the last round wait for shares
that are merged beside units.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.copy import EIGHT
from hopwell.kernels.parts.device import (
    DeviceStruct,
    fma,
    global_array,
    global_pointer,
    load_relaxed,
    quotient,
    store_release,
)
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import BUNDLES_THERE, GENERATION, PIECE, PIECES_THERE, SHARE, Slots, count_one
from hopwell.kernels.parts.softmax import largest_of_lane, merged
from hopwell.kernels.splitting import SHARES, SLOT_COUNTERS, STATISTICS, TICKETS, WARP_ROWS

SUBTILE_BYTES, SUBTILE_COLUMNS = LANES * copy.VECTOR_BYTES, EIGHT * RowFragment.lanes_per_row
READY = SHARE[0]
NO_SHARE = (1 << 31) - 1
SCALES = 2  # where the inverse scales of the halves of a row lie in its statistics
WARPS_TICKET, SHARES_TICKET = 4, 8  # bytes from the first ticket


@dataclass(frozen=True)
class RowPieces(DeviceStruct):
    """The pieces of some rows: one for each chunk."""

    first: Int32
    step: Int32  # from a piece to that of the next chunk
    chunks: Int32


@dataclass(frozen=True)
class Pieces(DeviceStruct):
    """The pieces of all CTAs: how one is stored, and how a share of rows is merged. Called by whole warps."""

    slots: Slots
    loads: tuple[tuple[int, int], ...]  # pieces, and subtiles of each, under way in a lane: few pieces, more, many

    @cute.jit
    def store(self, piece, output, r: cutlass.Constexpr[int], reference, total, warp_row, half) -> None:
        """Store row r of a warp's accumulators, which are half of a piece's columns, in 16 bits, as they lie in
        registers. :meth:`_merge_band` says where an element is."""
        largest = cute.arch.warp_reduction_max(largest_size(output, r), threads_in_group=output.lanes_per_row)
        scale, inverse = piece_scale(largest)
        subtiles = self._subtiles_of_band
        first = self.slots.output(self.slots.place(piece), 0) + Int64(
            self._band(warp_row, r, half) * subtiles * SUBTILE_BYTES
        )
        for subtile in cutlass.range_constexpr(subtiles):
            values = [output.get(r, subtile * EIGHT + c) * scale for c in range(EIGHT)]
            words = [copy.pack_x2(Float16, *values[c : c + 2]) for c in range(0, EIGHT, 2)]
            copy.store_global(first + subtile * SUBTILE_BYTES + cute.arch.lane_idx() * copy.VECTOR_BYTES, words)
        if output.first_column() == 0:
            row = self.slots.place(piece) + warp_row + output.first_row() + output.row_offset(r)
            if half == 0:
                copy.store_global(self.slots.statistics(row, PIECE), (reference, total))
            global_array(Float32, self.slots.statistics(row, SCALES))[half] = inverse

    @property
    def _subtiles_of_band(self) -> int:
        return self.slots.columns // (2 * SUBTILE_COLUMNS)

    def _band(self, warp_row, r, half):
        """Return the number of a band among those of a piece."""
        return (warp_row // WARP_ROWS * RowFragment.rows + r) * 2 + half

    @cute.jit
    def _merge_subtiles(self, subtiles: tuple, pieces: RowPieces, rows: PackedRows, dtype: cutlass.Constexpr) -> None:
        """Merge (first subtile, end) of rows that have these pieces."""
        of_band, (begin, end) = self._subtiles_of_band, subtiles
        for band in cutlass.range(begin // of_band, (end + (of_band - 1)) // of_band, unroll=1):
            low, high = cutlass.max(begin, band * of_band), cutlass.min(end, (band + 1) * of_band)
            own = (low - band * of_band, high - band * of_band)
            self._merge_band_of(self.loads, band, own, pieces, rows, dtype)

    def _share_subtiles(self, share, shares, rows: PackedRows) -> tuple:
        """Return the (first subtile, end) of one of the equal ``shares`` of rows."""
        bands = (rows.count + (WARP_ROWS - 1)) // WARP_ROWS * (RowFragment.rows * 2)
        return tuple(quotient(bands * self._subtiles_of_band * (share + i), shares) for i in range(2))

    @cute.jit
    def _merge_band_of(
        self, loads: cutlass.Constexpr, band, subtiles, pieces: RowPieces, rows: PackedRows, dtype: cutlass.Constexpr
    ) -> None:
        """Merge subtiles of a band with the first of these ``loads`` that take all pieces at once, or with the last."""
        (pieces_at_once, subtiles_at_once), *rest = loads
        if const_expr(len(rest) > 0):
            if pieces.chunks > pieces_at_once:
                self._merge_band_of(tuple(rest), band, subtiles, pieces, rows, dtype)
            else:
                self._merge_band(pieces_at_once, subtiles_at_once, band, *subtiles, pieces, rows, dtype)
        else:
            self._merge_band(pieces_at_once, subtiles_at_once, band, *subtiles, pieces, rows, dtype)

    @cute.jit
    def _merge_band(
        self,
        pieces_at_once: cutlass.Constexpr[int],
        subtiles_at_once: cutlass.Constexpr[int],
        band,
        begin,
        end,
        pieces: RowPieces,
        rows: PackedRows,
        dtype: cutlass.Constexpr,
    ) -> None:
        """Merge subtiles [begin, end) of a band. A band is 8 rows of half of the columns, a subtile 32 columns of it: a
        row for four lanes, two columns each of four accumulator blocks for a lane."""
        slots, lane, lanes = self.slots, cute.arch.lane_idx(), RowFragment.lanes_per_row
        chunks = pieces.chunks
        half, r, warp = band % 2, band // 2 % RowFragment.rows, band // (2 * RowFragment.rows)
        row = warp * WARP_ROWS + RowFragment.row_offset(r) + RowFragment.first_row()
        mine_in_band = band * (self._subtiles_of_band * SUBTILE_BYTES) + lane * copy.VECTOR_BYTES
        for subtile in cutlass.range(begin, end, subtiles_at_once, unroll=1):
            subtiles = [cutlass.min(subtile + k, end - 1) for k in range(subtiles_at_once)]
            values = [[Float32(0.0)] * EIGHT for _ in subtiles]
            reference, total = -Float32.inf, Float32(0.0)  # the sum over this lane's pieces
            for chunk in cutlass.range(0, chunks, pieces_at_once, unroll=1):
                # Each of the lanes of a row knows some of the pieces. Past the last that again, which counts nothing.
                mine = [chunk + lane % lanes + i for i in range(0, pieces_at_once, lanes)]
                places = [slots.place(pieces.first + cutlass.min(each, chunks - 1) * pieces.step) for each in mine]
                loaded = []
                for i in cutlass.range_constexpr(pieces_at_once):
                    piece = slots.output(cute.arch.shuffle_sync(places[i // lanes], i % lanes), 0) + mine_in_band
                    loaded.append([copy.load_global(piece + each * SUBTILE_BYTES, 4, Int32) for each in subtiles])
                found = [copy.load_global(slots.statistics(place + row, PIECE), STATISTICS) for place in places]
                # Pieces are added as many at a time as a row has lanes, however many are under way, and roundings are
                # spelled out: another warp would find other bits.
                for nth in cutlass.range_constexpr(len(mine)):
                    if chunk + nth * lanes < chunks:
                        its_chunk, (seen, its_total, *scales) = mine[nth], found[nth]
                        seen = seen if its_chunk < chunks else -Float32.inf
                        largest = cute.arch.warp_reduction_max(seen, threads_in_group=lanes)
                        weights, reference, _ = merged([reference, largest, seen], [Float32(0.0)] * 3)
                        kept, _, weight = weights
                        total = fma(weight, its_total, total * kept)
                        weight = weight * (scales[0] if half == 0 else scales[1])
                        for k in cutlass.range_constexpr(subtiles_at_once):
                            values[k] = [value * kept for value in values[k]]
                        for i in cutlass.range_constexpr(lanes):
                            its_weight = cute.arch.shuffle_sync(weight, lane // lanes * lanes + i)
                            for k in cutlass.range_constexpr(subtiles_at_once):
                                for c in cutlass.range_constexpr(EIGHT // 2):
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
                        for c in cutlass.range_constexpr(0, EIGHT, 2):
                            scaled = [values[k][c] * factor, values[k][c + 1] * factor]
                            copy.store_rounded(rows.output(row, column + RowFragment.column_offset(c)), scaled, dtype)


@dataclass(frozen=True)
class Shares(Pieces):
    """Pieces whose shares are handed out to whichever warp has time for them."""

    @cute.jit
    def wait_free(self, tile) -> None:
        """Return when the unit's piece, if it is one, may be written."""
        # In their first generation all slots are free.
        if tile.piece >= self.slots.slots and tile.chunks > 1 and cute.arch.lane_idx() == 0:
            self.slots.wait_free((tile.piece, tile.first_piece))
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, tile, group) -> None:
        """The unit's piece, if it is one, has been written, visibly to this warp: when it was the last of its rows,
        all of their shares are ready."""
        if tile.chunks > 1:
            slots, first, of_chunk = self.slots, tile.first_piece, tile.units_of_chunk
            if cute.arch.lane_idx() == 0:
                share = (tile.request.o_start, tile.first_row, tile.rows(group), tile.chunk, tile.chunks, of_chunk)
                for kind, value in zip(SHARE[1:], share, strict=True):
                    global_array(Int32, slots.counter(kind, tile.piece))[0] = value
            if self._is_last(PIECES_THERE, first, tile.chunks):
                for i in cutlass.range(cute.arch.lane_idx(), tile.chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(READY, each), slots.generation(each) + 1)

    @cute.jit
    def run(self, pieces, others, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr) -> None:
        """Merge shares until those of all ``pieces`` have been handed out, but leave the last ``others`` pieces to
        warps that merge faster."""
        own_end = (pieces - others) * SHARES
        share = self._ticket(own_end)
        while share < pieces * SHARES:
            piece = share // SHARES
            self._wait_ready(piece)
            self._merge(piece, share - piece * SHARES, pieces, a, g, scale, dtype)
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
    def _wait_ready(self, piece) -> None:
        if cute.arch.lane_idx() == 0:
            wanted = self.slots.generation(piece) + 1
            found = load_relaxed(self.slots.counter(READY, piece))
            while found != wanted:
                found = load_relaxed(self.slots.counter(READY, piece))
            cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()

    @cute.jit
    def _merge(self, piece, part, pieces, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr) -> None:
        """Share ``part`` of those that come with a piece."""
        slots = self.slots
        token, first_row, count, chunk, chunks, of_chunk = (load_relaxed(slots.counter(k, piece)) for k in SHARE[1:])
        rows = PackedRows(a, g, token, Int32(0), first_row, count, scale, dtype.width // 8).up_to(slots.rows)
        first = piece - chunk * of_chunk
        shares = chunks * SHARES
        subtiles = self._share_subtiles(chunk * SHARES + part, shares, rows)
        self._merge_subtiles(subtiles, RowPieces(first, of_chunk, chunks), rows, dtype)
        # Nobody wants the slots of the last pieces again, and to say that they are free takes 1500 cycles.
        if first + slots.slots < pieces:
            cute.arch.sync_warp()  # all lanes have read
            if self._is_last(BUNDLES_THERE, first, shares):
                for i in cutlass.range(cute.arch.lane_idx(), chunks, LANES, unroll=1):
                    each = first + i * of_chunk
                    store_release(slots.counter(GENERATION, each), slots.generation(each) + 1)

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
    def hand_back(self, warps, pieces) -> None:
        """The last of all ``warps`` that merge leaves every counter at zero, as the next launch wants to find it. There
        were so many ``pieces``."""
        last = Int32(0)
        if cute.arch.lane_idx() == 0:
            last = count_one(self.slots.tickets + WARPS_TICKET, warps)
        cute.arch.sync_warp()
        if cute.arch.shuffle_sync(last, 0) != 0:
            counters, slots = global_array(Int32, self.slots.tickets), self.slots.slots
            if cute.arch.lane_idx() < TICKETS:
                counters[cute.arch.lane_idx()] = 0
            for i in cutlass.range(cute.arch.lane_idx(), cutlass.min(slots, pieces), LANES, unroll=1):
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
def piece_scale(largest, *, loc=None, ip=None):
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
