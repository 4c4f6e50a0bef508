"""Equal portions of the keys of all requests for all CTAs of MLA decode.

Chunks of one length, cut by a rule that looks at nothing but a request, give results that do not depend on the batch
(``split.py``). But they are work in coarse pieces for CTAs, and many partial results of a request.

Portions look at all requests: their steps of keys form one list, request by request, which is cut into as many equal
portions as there are CTAs for a row tile, and each CTA takes one portion for one row tile. So most requests are cut
once or not at all, and CTAs end at the same time. CTAs of different row tiles that have the same portion lie side by
side, so that their keys come from memory once.

Nothing is handed out, hence no tickets: each CTA reads all lengths, adds them up and finds its own chunks. Until it has
done that it can do nothing else, so what is on this way is short: the lengths of up to 32 requests are read once,
divisions whose divisor does not depend on them are prepared while they come, and numbers are unsigned where they can
be.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.device import DeviceStruct, Divisor, from_lane, quotient, running_sum, trailing_zeros
from hopwell.kernels.parts.split import Span, SplitSchedule, SplitTile, TokenLists
from hopwell.kernels.splitting import (
    FRACTION_BITS,
    FRACTIONS,
    LEAST_PORTION_STEPS,
    REQUEST_STEPS,
    SNAP_STEPS,
    UNEVEN,
)


@dataclass
class Sequence(DeviceStruct):
    """The keys of a request, or of a query token that has a list, in steps."""

    index: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    exists: Int32  # 1, or 0 where there is none or it has no rows
    steps: Int32


@dataclass
class PortionSpan(Span):
    """A request, or a query token that has a list, in the list of all steps. Places in the list are counted in
    fractions of a step."""

    steps: Int32  # 0 where there is no request
    place: Int32  # of its first step
    first_portion: Int32  # that has a chunk of it
    chunks: Int32
    color: Int32  # 0 and 1 by turns, of those that have several chunks

    @cute.jit
    def begin(self, chunk, size):
        """Return the first step of a chunk, or the number of all steps for the chunk after the last."""
        # What a request takes besides its steps is shared by its ends: so no half step is added to round.
        inner = ((self.first_portion + chunk) * size - self.place) >> FRACTION_BITS
        begin = cutlass.max(cutlass.min(inner, self.steps), 0)
        begin = Int32(0) if chunk == 0 else begin
        return self.steps if chunk == self.chunks else begin


@cute.jit
def portion_size(total, longest, portions: Divisor):
    """Say how many fractions of a step are a portion, of ``total`` ones in all requests and ``longest`` in one of them.

    Where portions become little larger, requests of that length are cut into equal chunks, or not at all. With more
    steps than portions, none is shorter than LEAST_PORTION_STEPS: what all CTAs load and leave to be merged, besides
    keys, takes longer than another step then.
    """
    equal = portions.divide(total + (portions.value - 1))
    size = cutlass.max(equal, LEAST_PORTION_STEPS * FRACTIONS if total > portions.value * FRACTIONS else FRACTIONS)
    large, small = cutlass.max(longest, size), cutlass.min(longest, size)
    is_cut = longest >= size
    # The count is of chunks in a request, or else of requests in a chunk.
    count = quotient(large + (Int32(0) if is_cut else small - 1), small)
    even = quotient(longest + (count - 1), count) if is_cut else longest * count
    # Portions that are longer than they need to be leave room for more.
    return even if even - size <= (size // UNEVEN if equal == size else size) else size


@dataclass
class PortionSchedule(SplitSchedule):
    """The schedule of a CTA that has one portion, or one for each of several row tiles where CTAs are few."""

    def _sequence(self, index) -> Sequence:
        q_start, q_len, kv_len = self._lengths(index)
        exists = ((index < self._sequence_count) & (q_len > 0)).to(Int32)
        return Sequence(index, q_start, q_len, kv_len, exists, self._steps(kv_len, exists))

    def _steps(self, kv_len, exists):
        # A request without keys has results too.
        return cutlass.max(quotient(kv_len + (self.tile_n - 1), Int32(self.tile_n)), 1) * exists

    @cute.jit
    def _portion_size(self, sequence: Sequence, portions: Divisor):
        """Say how long a portion is; ``sequence`` is this lane's among the first ones."""
        total, longest = sequence.steps + REQUEST_STEPS * sequence.exists, sequence.steps
        for first in cutlass.range(LANES, self._sequence_count, LANES, unroll=1):
            more = self._sequence(first + cute.arch.lane_idx())
            total += more.steps + REQUEST_STEPS * more.exists
            longest = cutlass.max(longest, more.steps)
        total, longest = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_max(longest)
        return portion_size(total * FRACTIONS, (longest + REQUEST_STEPS) * FRACTIONS, portions)

    @cute.jit
    def _portion_span(self, sequence: Sequence, place, color, size):
        """Return where this lane's request is, the first lane's of which begins at ``place`` and has this ``color`` if
        it is cut; and where the one after it begins, and its color."""
        own = (sequence.steps + REQUEST_STEPS * sequence.exists) * FRACTIONS
        end = place + running_sum(own)
        begin, last_portion = end - own, Int32(self.geometry.portions) - 1
        # A cut this close to where a request begins or ends is made there.
        snap = cutlass.min(Int32(SNAP_STEPS * FRACTIONS), size // 4)
        first_portion = cutlass.min(quotient(begin + snap, size), last_portion)
        last = quotient(cutlass.max(begin + sequence.steps * FRACTIONS - 1 - snap, 0), size)
        chunks = (cutlass.max(cutlass.min(last, last_portion) - first_portion, 0) + 1) * sequence.exists
        up_to_lane = Uint32(0xFFFFFFFF) >> (LANES - 1 - cute.arch.lane_idx()).to(Uint32)
        cut = Uint32(cute.arch.vote_ballot_sync(chunks > 1)) & up_to_lane
        next_color = color + cute.arch.popc(cut).to(Int32)
        own_color = (next_color - (chunks > 1).to(Int32)) & 1
        common = (sequence.index, sequence.q_start, sequence.q_len, sequence.kv_len, sequence.steps)
        return PortionSpan(*common, begin, first_portion, chunks, own_color), end, next_color

    def _portion_tile(self, span: PortionSpan, portion, size, row_tile, merges, group: Divisor) -> SplitTile:
        """Return the unit of a request in a portion, without keys where it ``merges``.

        A portion has two pieces at most, the end of one request and the beginning of another, which have different
        colors. So a portion and a color are a piece's number, in each row tile.
        """
        of_chunk, chunk = 2 * self._most_of_chunk, portion - span.first_portion
        first_row, request = row_tile * self.tile_m, span.request()
        begin, end = span.begin(chunk, size), span.begin(chunk + 1, size)
        last = cutlass.min(group.divide(first_row + (self.tile_m - 1)), request.q_len - 1)
        tokens = (end - begin) * self.tile_n * (1 - merges)
        keys = self._keys_of_tokens(request, group.divide(first_row), last, begin * self.tile_n, tokens)
        piece = portion * of_chunk + span.color * self._most_of_chunk + row_tile
        numbers = (chunk, span.chunks, piece, piece - chunk * of_chunk, Int32(0), of_chunk)
        return SplitTile(request, merges, Int32(0), first_row, keys, *numbers)

    @cute.jit
    def publish(self, board) -> None:
        """Post the units of this CTA's portions, then those that are pieces again, for what has to be merged of their
        rows, then the end. Called by one warp."""
        row_tiles, sequences = self._most_of_chunk, self._sequence_count
        first_sequence = self._sequence(cute.arch.lane_idx())
        group, portions = Divisor.of(Int32(self.geometry.group)), Divisor.of(Int32(self.geometry.portions))
        first_place = Int32(cute.arch.block_idx()[0])
        first_of_portion = Divisor.of(row_tiles)
        size, step = self._portion_size(first_sequence, portions), Int32(0)
        for merges in cutlass.range(2, unroll=1):
            place_in_grid, first, place, color = first_place, Int32(0), Int32(0), Int32(0)
            sequence = first_sequence
            while first < sequences:
                span, end, next_color = self._portion_span(sequence, place, color, size)
                portion = first_of_portion.divide(place_in_grid)
                row_tile = place_in_grid - portion * row_tiles
                has_chunk = (span.first_portion <= portion) & (portion < span.first_portion + span.chunks)
                # Where numbers of new tokens are uneven, a request with fewer may have no rows in this tile.
                has_chunk &= row_tile < self._row_tiles(span.q_len)
                lanes = Uint32(cute.arch.vote_ballot_sync(has_chunk & (span.chunks > merges)))
                while lanes != 0:
                    mine = from_lane(span, trailing_zeros(lanes.to(Int32)))
                    unit = self._portion_tile(mine, portion, size, row_tile, merges, group)
                    board.post(step, unit)
                    if merges == 0:
                        # The unit before it does not matter: nobody has to be told of its piece.
                        self.keeper.posted(step, unit, SplitTile.nothing())
                    step += 1
                    lanes = lanes & (lanes - 1)
                place = cute.arch.shuffle_sync(end, LANES - 1)
                color = cute.arch.shuffle_sync(next_color, LANES - 1)
                first += LANES
                if first < sequences:
                    sequence = self._sequence(first + cute.arch.lane_idx())
                elif place_in_grid + Int32(self.geometry.grid) < self._all_places:
                    place_in_grid += Int32(self.geometry.grid)
                    first, place, color = Int32(0), Int32(0), Int32(0)
                    sequence = first_sequence
        board.post_end(step)

    @property
    def _all_places(self):
        return Int32(self.geometry.portions) * self._most_of_chunk


@dataclass
class ListPortionSchedule(TokenLists, PortionSchedule):
    """Portions of the lists of all query tokens."""

    def _sequence(self, index) -> Sequence:
        seen, _, _, exists = self._listed_token(index)
        exists = exists.to(Int32)
        return Sequence(index, index, Int32(1), seen, exists, self._steps(seen, exists))
