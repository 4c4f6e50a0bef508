"""Merging large pieces of decode: every CTA merges a share of the rows of a request.

A piece of MLA is 130 KB. When the last CTA of a request merged all of its pieces, as ``partial.py`` has it, it spent
85000 cycles on four of them while all others waited (H200, 2026-11-21). So the rows of a request have as many shares
as it has pieces, share p being that of piece p, and shares are handed out by a ticket of their own. A CTA holds one
of them at a time. Between units of work it looks whether its share's pieces are all there; after its last unit it
waits for them. The pieces are added up in the order of the keys, whoever does it.

Slots of pieces go round as in ``partial.py``, and are free again when all shares have been merged. A CTA waits for a
slot before it computes a piece, and merges meanwhile: so whoever waits never holds back what it waits for.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from hopwell.kernels.config import LANES
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import (
    global_array,
    global_pointer,
    load_relaxed,
    store_release,
)
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import GENERATION, GROUPS_THERE, PIECE, PIECES_THERE, SHARE, Merge
from hopwell.kernels.parts.softmax import merged
from hopwell.kernels.splitting import SLOT_COUNTERS, TICKETS, WARP_ROWS

QUAD = 4  # elements that a thread stores and loads at a time
QUAD_BYTES = 4 * QUAD
BLOCK_COLUMNS = 8  # of an accumulator, of which a quad is two elements in two rows
READY = SHARE[0]
NO_SHARE = -1
SHARES_TICKET = 8  # bytes from the first ticket
PIECES_AT_ONCE, QUADS_AT_ONCE = 8, 2  # whose loads a thread has under way


@dataclass(frozen=True)
class SharedMerge(Merge):
    """The threads that look after a CTA's pieces and shares."""

    message: Int32  # shared memory for four words from the first thread to all

    @cute.jit
    def _announce(self, tile, of_chunk, group) -> None:
        """A piece has been written, visibly to all threads here: when it was the last, all shares are ready."""
        slots, piece = self.slots, tile.piece
        first = piece - tile.chunk * of_chunk  # not the tile's, which would take a register all the time
        if self._thread == 0:
            rows = tile.request.q_len * Int32(group) - tile.first_row
            share = (tile.request.o_start, tile.first_row, rows, tile.chunk, tile.chunks)
            for kind, value in zip(SHARE[1:], share, strict=True):
                global_array(Int32, slots.counter(kind, piece))[0] = value
        if self._is_last(PIECES_THERE, first, tile.chunks):
            for i in cutlass.range(self._thread, tile.chunks, self.threads, unroll=1):
                each = first + i * of_chunk
                store_release(slots.counter(READY, each), slots.generation(each) + 1)

    def store_statistics(self, piece, row, reference, total) -> None:
        copy.store_global_f32(self.slots.statistics(self.slots.place(piece) + row, PIECE), (reference, total))

    @cute.jit
    def store_output(self, piece, output, warp_row, column_group) -> None:
        """A warp's accumulators, as they lie in its registers: :meth:`_quad` says where an element is."""
        blocks = self.slots.columns // (2 * BLOCK_COLUMNS)
        first = ((warp_row // WARP_ROWS * 2 + column_group) * blocks) * LANES + cute.arch.lane_idx()
        address = self.slots.output(self.slots.place(piece), 0) + Int64(first * QUAD_BYTES)
        for block in cutlass.range_constexpr(blocks):
            values = [output.registers[4 * block + i] for i in range(4)]
            copy.store_global_f32(address + block * (LANES * QUAD_BYTES), values)

    def _quad(self, item):
        """(row, column) of the first of a quad's elements: two columns of this row and of the one 8 below."""
        blocks = self.slots.columns // (2 * BLOCK_COLUMNS)
        lane, block, rest = item % LANES, item // LANES % blocks, item // (LANES * blocks)
        half, warp = rest % 2, rest // 2
        row = warp * WARP_ROWS + lane // RowFragment.lanes_per_row
        return row, (half * blocks + block) * BLOCK_COLUMNS + 2 * (lane % RowFragment.lanes_per_row)

    @cute.jit
    def help(self, share, done, tile, of_chunk, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr):
        """Between the unit that is ``done`` and the next, ``tile``: merge the share in hand if it is ready, announce
        the piece, and merge on until the next one's slot is free; after the last unit, until all shares have been
        handed out. Takes the share in hand, returns the one that is in hand then.

        The piece is announced second because that takes until it is in the L2 cache."""
        waits, has_piece = Boolean(True), done.chunks > 1
        while waits:
            share, is_ready, waits = self._look(share, tile)
            if is_ready:
                self._merge_share(share, of_chunk, a, g, scale, dtype)
                share = Int32(NO_SHARE)
            if has_piece:
                self._announce(done, of_chunk, g.group)
            has_piece = Boolean(False)
        return share

    @cute.jit
    def _look(self, share, tile):
        """The share in hand, a new one where there is none; whether it is ready; and whether to look again."""
        slots = self.slots
        words = cute.make_tensor(
            cute.make_ptr(Int32, self.message, cute.AddressSpace.smem, assumed_align=4), cute.make_layout(4)
        )
        if self._thread == 0:
            mine, waits = share, Int32(0)
            if mine == NO_SHARE:
                mine = cute.arch.atomic_add(global_pointer(Int32, slots.tickets + SHARES_TICKET), Int32(1))
            found = load_relaxed(slots.counter(READY, mine))
            if not tile.exists:
                waits = (mine < tile.piece).to(Int32)
            elif tile.chunks > 1 and tile.piece >= slots.slots:
                for piece in (tile.piece, tile.first_piece):
                    generation = load_relaxed(slots.counter(GENERATION, piece))
                    waits = waits | (generation != slots.generation(piece)).to(Int32)
            cute.arch.fence_acq_rel_gpu()
            words[0] = mine
            words[1] = (found == slots.generation(mine) + 1).to(Int32)
            words[2] = waits
            words[3] = Int32(0)  # the others are loaded together with it
        self.meet()
        share, is_ready, waits = words[0], words[1] != 0, words[2] != 0
        self.meet()
        return share, is_ready, waits

    @cute.jit
    def _merge_share(self, share, of_chunk, a: Addresses, g: DecodeGeometry, scale, dtype: cutlass.Constexpr) -> None:
        slots = self.slots
        token, first_row, count, chunk, chunks = (load_relaxed(slots.counter(kind, share)) for kind in SHARE[1:])
        count = cutlass.min(count, slots.rows)
        rows = PackedRows(a, g, token, Int32(0), first_row, count, scale, dtype.width // 8)
        first = share - chunk * of_chunk
        warps = (count + (WARP_ROWS - 1)) // WARP_ROWS
        items = warps * (WARP_ROWS * slots.columns // QUAD)
        begin, end = items * chunk // chunks, items * (chunk + 1) // chunks
        self._merge_items(begin, end, first, of_chunk, chunks, rows, dtype)
        self.meet()  # all threads have read
        if self._is_last(GROUPS_THERE, first, chunks):
            self._release(first, of_chunk, chunks)

    @cute.jit
    def _merge_items(self, begin, end, first, step, chunks, rows: PackedRows, dtype: cutlass.Constexpr) -> None:
        """Merge quads, [begin, end) of those of all rows."""
        per_warp = WARP_ROWS * self.slots.columns // QUAD
        for warp in cutlass.range(begin // per_warp, (end + (per_warp - 1)) // per_warp, unroll=1):
            low = cutlass.max(begin, warp * per_warp) + self._thread
            high = cutlass.min(end, (warp + 1) * per_warp)
            for item in cutlass.range(low, high, self.threads * QUADS_AT_ONCE, unroll=1):
                self._merge_quads(item, high, first, step, chunks, rows, dtype)

    @cute.jit
    def _merge_quads(self, item, end, first, step, chunks, rows: PackedRows, dtype: cutlass.Constexpr) -> None:
        """Merge a thread's next quads before ``end``: all in the same two rows, because they are whole warps apart."""
        row, _ = self._quad(item)
        items = [cutlass.min(item + self.threads * k, end - 1) for k in range(QUADS_AT_ONCE)]
        values = [[Float32(0.0)] * QUAD for _ in items]
        references, totals = [-Float32.inf] * 2, [Float32(0.0)] * 2
        for chunk in cutlass.range(0, chunks, PIECES_AT_ONCE, unroll=1):
            places = [self.slots.place(piece) for piece in self._pieces(first, step, chunk, chunks)]
            statistics = [[self._load_statistics(place, row + 8 * r) for place in places] for r in range(2)]
            loaded = [[self._load(place, each) for each in items] for place in places]
            for r in cutlass.range_constexpr(2):
                # What is there again counts for nothing.
                seen = [statistics[r][i][0] if chunk + i < chunks else -Float32.inf for i in range(PIECES_AT_ONCE)]
                sums = [each[1] for each in statistics[r]]
                weights, references[r], totals[r] = merged([references[r], *seen], [totals[r], *sums])
                for k in cutlass.range_constexpr(QUADS_AT_ONCE):
                    for c in cutlass.range_constexpr(2 * r, 2 * r + 2):
                        values[k][c] = values[k][c] * weights[0]
                        for i in cutlass.range_constexpr(PIECES_AT_ONCE):
                            values[k][c] += weights[1 + i] * loaded[i][k][c]
        for r in cutlass.range_constexpr(2):
            if row + 8 * r < rows.count:
                _, first_column = self._quad(item)
                factor = rows.finish(row + 8 * r, references[r], totals[r], first_column == 0)
                for k in cutlass.range_constexpr(QUADS_AT_ONCE):
                    if item + self.threads * k < end:
                        _, column = self._quad(item + self.threads * k)
                        scaled = [values[k][c] * factor for c in range(2 * r, 2 * r + 2)]
                        copy.store_rounded(rows.output(row + 8 * r, column), scaled, dtype)

    def _pieces(self, first, step, chunk, chunks) -> list:
        """The next pieces from ``chunk`` on; past the last one that again."""
        return [first + cutlass.min(chunk + i, chunks - 1) * step for i in range(PIECES_AT_ONCE)]

    def _load_statistics(self, place, row) -> list:
        return copy.load_global_f32(self.slots.statistics(place + row, PIECE), 2)

    def _load(self, place, item) -> list:
        return copy.load_global_f32(self.slots.output(place, 0) + Int64(item * QUAD_BYTES), QUAD)

    @cute.jit
    def hand_back(self, grid) -> None:
        """The last CTA leaves every counter at zero, as the next launch wants to find it."""
        if self._is_last_cta(grid):
            counters = global_array(Int32, self.slots.tickets)
            for i in cutlass.range(self._thread, TICKETS + SLOT_COUNTERS * self.slots.slots, self.threads, unroll=1):
                counters[i] = 0
