"""Equal portions of the keys of all requests for all CTAs of MLA decode.

Chunks of one length, cut by a rule that looks at nothing but a request, give results that do not depend on the batch
(``split.py``). But they are work in coarse pieces for CTAs, and many partial results of a request.

Portions look at all requests: their steps of keys form one list, request by request, which is cut into as many equal
portions as there are CTAs for a row tile, and each CTA takes one portion for one row tile. So most requests are cut
once or not at all, and CTAs end at the same time. CTAs of different row tiles that have the same portion lie side by
side, so that their keys come from memory once.

Nothing is handed out, hence no tickets: each CTA reads all lengths, adds them up and finds its own chunks.
"""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.device import from_lane, running_sum, trailing_zeros
from hopwell.kernels.parts.split import Span, SplitSchedule, SplitTile, TokenLists, split_units
from hopwell.kernels.splitting import (
    FRACTIONS,
    LEAST_PORTION_STEPS,
    REQUEST_STEPS,
    SNAP_STEPS,
    UNEVEN,
)


@dataclass
class PortionSpan(Span):
    """A request, or a query token that has a list, in the list of all steps. Places in the list are counted in
    fractions of a step."""

    steps: Int32  # 0 where there is no request
    place: Int32  # of its first step
    first_portion: Int32  # that has a chunk of it
    chunks: Int32

    @cute.jit
    def begin(self, chunk, size):
        """Return the first step of a chunk, or the number of all steps for the chunk after the last."""
        # What a request takes besides its steps is shared by its ends: so no half step is added to round.
        inner = ((self.first_portion + chunk) * size - self.place) // FRACTIONS
        begin = cutlass.max(cutlass.min(inner, self.steps), 0)
        begin = Int32(0) if chunk == 0 else begin
        return self.steps if chunk == self.chunks else begin


@cute.jit
def portion_size(total, longest, portions):
    """Say how many fractions of a step are a portion, of ``total`` ones in all requests and ``longest`` in one of them.

    Where portions become little larger, requests of that length are cut into equal chunks, or not at all.
    """
    size = cutlass.max((total + (portions - 1)) // portions, LEAST_PORTION_STEPS * FRACTIONS)
    chunks, requests = cutlass.max(longest // size, 1), (size + (longest - 1)) // longest  # one of them is 1
    even = (longest * requests + (chunks - 1)) // chunks
    return even if even - size <= size // UNEVEN else size


@dataclass
class PortionSchedule(SplitSchedule):
    """The schedule of a CTA that has one portion, or one for each of several row tiles where CTAs are few."""

    @property
    def _items_count(self):
        """Say how many requests, or tokens with lists, there are."""
        return Int32(self.geometry.batch)

    def _item(self, index):
        """Return (index, first token, new tokens, keys) of a request, and 1 if it exists and has rows, else 0."""
        q_start, q_len, kv_len = self._lengths(index)
        return index, q_start, q_len, kv_len, ((index < self._items_count) & (q_len > 0)).to(Int32)

    def _steps(self, kv_len, exists):
        # A request without keys has results too.
        return cutlass.max((kv_len + (self.tile_n - 1)) // self.tile_n, 1) * exists

    @cute.jit
    def _portion_size(self):
        total, longest = Int32(0), Int32(0)
        for first in cutlass.range(0, self._items_count, LANES, unroll=4):
            *_, kv_len, exists = self._item(first + cute.arch.lane_idx())
            steps = self._steps(kv_len, exists)
            total += steps + REQUEST_STEPS * exists
            longest = cutlass.max(longest, steps)
        total, longest = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_max(longest)
        return portion_size(total * FRACTIONS, (longest + REQUEST_STEPS) * FRACTIONS, Int32(self.geometry.portions))

    @cute.jit
    def _portion_spans(self, first, place, size):
        """Return a lane's request among those from ``first`` on, the first of which begins at ``place``; where the next
        of each begins; and the pieces of all up to it."""
        index, q_start, q_len, kv_len, exists = self._item(first + cute.arch.lane_idx())
        steps = self._steps(kv_len, exists)
        own = (steps + REQUEST_STEPS * exists) * FRACTIONS
        end = place + running_sum(own)
        begin, last_portion = end - own, Int32(self.geometry.portions) - 1
        # A cut this close to where a request begins or ends is made there.
        snap = cutlass.min(Int32(SNAP_STEPS * FRACTIONS), size // 4)
        first_portion = cutlass.min((begin + snap) // size, last_portion)
        last = cutlass.min(cutlass.max(begin + steps * FRACTIONS - 1 - snap, 0) // size, last_portion)
        chunks = (cutlass.max(last - first_portion, 0) + 1) * exists
        span = PortionSpan(index, q_start, q_len, kv_len, steps, begin, first_portion, chunks)
        return span, end, running_sum(split_units(chunks, self._units_of_chunk))

    def _portion_tile(self, span: PortionSpan, chunk, size, pieces, row_tile, merges) -> SplitTile:
        """Return the unit of a request, without keys where it ``merges``; ``pieces`` are those of all requests
        before."""
        first_row, request = row_tile * self.tile_m, span.request()
        begin, end = span.begin(chunk, size), span.begin(chunk + 1, size)
        keys = self._keys(request, first_row, begin * self.tile_n, (end - begin) * self.tile_n * (1 - merges))
        unit = self._unit(request, Int32(0), first_row, keys, chunk, span.chunks, pieces + row_tile)
        return replace(unit, head=merges)

    @cute.jit
    def publish(self, board) -> None:
        """Post the units of this CTA's portions, then those that are pieces again, for what has to be merged of their
        rows, then the end. Called by one warp."""
        row_tiles, items = self._units_of_chunk, self._items_count
        size, step, latest = self._portion_size(), Int32(0), SplitTile.nothing()
        for merges in cutlass.range(2, unroll=1):
            place_in_grid, first, place, pieces = Int32(cute.arch.block_idx()[0]), Int32(0), Int32(0), Int32(0)
            while first < items:
                span, end, last_piece = self._portion_spans(first, place, size)
                portion = place_in_grid // row_tiles
                has_chunk = (span.first_portion <= portion) & (portion < span.first_portion + span.chunks)
                lanes = Uint32(cute.arch.vote_ballot_sync(has_chunk & (span.chunks > merges)))
                while lanes != 0:
                    lane = trailing_zeros(lanes.to(Int32))
                    mine = from_lane(span, lane)
                    before = pieces + cute.arch.shuffle_sync(last_piece, lane) - split_units(mine.chunks, row_tiles)
                    row_tile = place_in_grid - portion * row_tiles
                    unit = self._portion_tile(mine, portion - mine.first_portion, size, before, row_tile, merges)
                    board.post(step, unit)
                    if merges == 0:
                        self.keeper.posted(step, unit, latest)
                    latest = unit
                    step += 1
                    lanes = lanes & (lanes - 1)
                pieces += cute.arch.shuffle_sync(last_piece, LANES - 1)
                place = cute.arch.shuffle_sync(end, LANES - 1)
                first += LANES
                if (first >= items) & (place_in_grid + Int32(self.geometry.grid) < self._all_places):
                    place_in_grid += Int32(self.geometry.grid)
                    first, place, pieces = Int32(0), Int32(0), Int32(0)
        self.keeper.ended(step, latest)
        board.post_end(step)

    @property
    def _all_places(self):
        return Int32(self.geometry.portions) * self._units_of_chunk


@dataclass
class ListPortionSchedule(TokenLists, PortionSchedule):
    """Portions of the lists of all query tokens."""

    def _item(self, index):
        place, seen, exists = self._listed_token(index)
        return place, place, Int32(1), seen, exists.to(Int32)
