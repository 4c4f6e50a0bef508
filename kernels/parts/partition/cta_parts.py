"""Equal CTA parts of the keys of all requests for all CTAs of MLA decode.

Chunks of one length, cut by a rule that looks at nothing but a request, give results that do not depend on the batch
(``split.py``). But they are work in coarse partials for CTAs, and many partial results of a request.

CTA parts look at all requests: their steps of keys form one list, request by request, which is cut into as many equal
CTA parts as there are CTAs for a row tile, and each CTA takes one CTA part for one row tile. So most requests are cut
once or not at all, and CTAs end at the same time. CTAs of different row tiles that have the same CTA part lie side by
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

from hopwell.kernels.config.splitting import (
    FRACTION_BITS,
    FRACTIONS,
    LEAST_CTA_PART_STEPS,
    REQUEST_STEPS,
    SNAP_STEPS,
    UNEVEN,
)
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.device import DeviceStruct, Divisor, from_lane, quotient, running_sum, trailing_zeros
from hopwell.kernels.parts.partition.split_kv import Span, SplitSchedule, SplitTile, TopkTokens


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
class CtaPartSpan(Span):
    """A request, or a query token that has a list, in the list of all steps. Places in the list are counted in
    fractions of a step."""

    steps: Int32  # 0 where there is no request
    place: Int32  # of its first step
    first_cta_part: Int32  # that has a chunk of it
    chunks: Int32
    color: Int32  # 0 and 1 by turns, of those that have several chunks

    @cute.jit
    def begin(self, chunk, size):
        """Return the first step of a chunk, or the number of all steps for the chunk after the last."""
        # What a request takes besides its steps is shared by its ends: so no half step is added to round.
        inner = ((self.first_cta_part + chunk) * size - self.place) >> FRACTION_BITS
        begin = cutlass.max(cutlass.min(inner, self.steps), 0)
        begin = Int32(0) if chunk == 0 else begin
        return self.steps if chunk == self.chunks else begin


@cute.jit
def cta_part_size(total, longest, cta_parts: Divisor):
    """Say how many fractions of a step are a CTA part, of ``total`` ones in all requests and ``longest`` in one of
    them.

    Where CTA parts become little larger, requests of that length are cut into equal chunks, or not at all. With more
    steps than CTA parts, none is shorter than LEAST_CTA_PART_STEPS: what all CTAs load and leave to be combined,
    besides keys, takes longer than another step then.
    """
    equal = cta_parts.divide(total + (cta_parts.value - 1))
    size = cutlass.max(equal, LEAST_CTA_PART_STEPS * FRACTIONS if total > cta_parts.value * FRACTIONS else FRACTIONS)
    large, small = cutlass.max(longest, size), cutlass.min(longest, size)
    is_cut = longest >= size
    # The count is of chunks in a request, or else of requests in a chunk.
    count = quotient(large + (Int32(0) if is_cut else small - 1), small)
    even = quotient(longest + (count - 1), count) if is_cut else longest * count
    # CTA parts that are longer than they need to be leave room for more.
    return even if even - size <= (size // UNEVEN if equal == size else size) else size


@dataclass
class CtaPartSchedule(SplitSchedule):
    """The schedule of a CTA that has one CTA part, or one for each of several row tiles where CTAs are few."""

    def _sequence(self, index) -> Sequence:
        q_start, q_len, kv_len = self._lengths(index)
        exists = ((index < self._sequence_count) & (q_len > 0)).to(Int32)
        return Sequence(index, q_start, q_len, kv_len, exists, self._steps(kv_len, exists))

    def _steps(self, kv_len, exists):
        # A request without keys has results too.
        return cutlass.max(quotient(kv_len + (self.tile_n - 1), Int32(self.tile_n)), 1) * exists

    @cute.jit
    def _cta_part_size(self, sequence: Sequence, cta_parts: Divisor):
        """Say how long a CTA part is; ``sequence`` is this lane's among the first ones."""
        total, longest = sequence.steps + REQUEST_STEPS * sequence.exists, sequence.steps
        for first in cutlass.range(LANES, self._sequence_count, LANES, unroll=1):
            more = self._sequence(first + cute.arch.lane_idx())
            total += more.steps + REQUEST_STEPS * more.exists
            longest = cutlass.max(longest, more.steps)
        total, longest = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_max(longest)
        return cta_part_size(total * FRACTIONS, (longest + REQUEST_STEPS) * FRACTIONS, cta_parts)

    @cute.jit
    def _cta_part_span(self, sequence: Sequence, place, color, size):
        """Return where this lane's request is, the first lane's of which begins at ``place`` and has this ``color`` if
        it is cut; and where the one after it begins, and its color."""
        own = (sequence.steps + REQUEST_STEPS * sequence.exists) * FRACTIONS
        end = place + running_sum(own)
        begin, last_cta_part = end - own, Int32(self.geometry.cta_parts) - 1
        # A cut this close to where a request begins or ends is made there.
        snap = cutlass.min(Int32(SNAP_STEPS * FRACTIONS), size // 4)
        first_cta_part = cutlass.min(quotient(begin + snap, size), last_cta_part)
        last = quotient(cutlass.max(begin + sequence.steps * FRACTIONS - 1 - snap, 0), size)
        chunks = (cutlass.max(cutlass.min(last, last_cta_part) - first_cta_part, 0) + 1) * sequence.exists
        up_to_lane = Uint32(0xFFFFFFFF) >> (LANES - 1 - cute.arch.lane_idx()).to(Uint32)
        cut = Uint32(cute.arch.vote_ballot_sync(chunks > 1)) & up_to_lane
        next_color = color + cute.arch.popc(cut).to(Int32)
        own_color = (next_color - (chunks > 1).to(Int32)) & 1
        common = (sequence.index, sequence.q_start, sequence.q_len, sequence.kv_len, sequence.steps)
        return CtaPartSpan(*common, begin, first_cta_part, chunks, own_color), end, next_color

    def _cta_part_tile(self, span: CtaPartSpan, cta_part, size, row_tile, combines, group: Divisor) -> SplitTile:
        """Return the work tile of a request in a CTA part, without keys where it ``combines``.

        A CTA part has two partials at most, the end of one request and the beginning of another, which have different
        colors. So a CTA part and a color are a partial's number, in each row tile.
        """
        of_chunk, chunk = 2 * self._most_of_chunk, cta_part - span.first_cta_part
        first_row, request = row_tile * self.tile_m, span.request()
        begin, end = span.begin(chunk, size), span.begin(chunk + 1, size)
        last = cutlass.min(group.divide(first_row + (self.tile_m - 1)), request.q_len - 1)
        tokens = (end - begin) * self.tile_n * (1 - combines)
        keys = self._keys_of_tokens(request, group.divide(first_row), last, begin * self.tile_n, tokens)
        partial_id = cta_part * of_chunk + span.color * self._most_of_chunk + row_tile
        numbers = (chunk, span.chunks, partial_id, partial_id - chunk * of_chunk, Int32(0), of_chunk)
        return SplitTile(request, combines, Int32(0), first_row, keys, *numbers)

    @cute.jit
    def publish(self, work_queue) -> None:
        """Post the work tiles of this CTA's CTA parts, then those that are partials again, for what has to be combined
        of their rows, then the end. Called by one warp."""
        row_tiles, sequences = self._most_of_chunk, self._sequence_count
        first_sequence = self._sequence(cute.arch.lane_idx())
        group, cta_parts = Divisor.of(Int32(self.geometry.group)), Divisor.of(Int32(self.geometry.cta_parts))
        first_place = Int32(cute.arch.block_idx()[0])
        first_of_cta_part = Divisor.of(row_tiles)
        size, step = self._cta_part_size(first_sequence, cta_parts), Int32(0)
        for combines in cutlass.range(2, unroll=1):
            place_in_grid, first, place, color = first_place, Int32(0), Int32(0), Int32(0)
            sequence = first_sequence
            while first < sequences:
                span, end, next_color = self._cta_part_span(sequence, place, color, size)
                cta_part = first_of_cta_part.divide(place_in_grid)
                row_tile = place_in_grid - cta_part * row_tiles
                has_chunk = (span.first_cta_part <= cta_part) & (cta_part < span.first_cta_part + span.chunks)
                # Where numbers of new tokens are uneven, a request with fewer may have no rows in this tile.
                has_chunk &= row_tile < self._row_tiles(span.q_len)
                lanes = Uint32(cute.arch.vote_ballot_sync(has_chunk & (span.chunks > combines)))
                while lanes != 0:
                    mine = from_lane(span, trailing_zeros(lanes.to(Int32)))
                    work_tile = self._cta_part_tile(mine, cta_part, size, row_tile, combines, group)
                    work_queue.post(step, work_tile)
                    if combines == 0:
                        # The work tile before it does not matter: nobody has to be told of its partial.
                        self.hooks.posted(step, work_tile, SplitTile.nothing())
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
        work_queue.post_end(step)

    @property
    def _all_places(self):
        return Int32(self.geometry.cta_parts) * self._most_of_chunk


@dataclass
class TopkCtaPartSchedule(TopkTokens, CtaPartSchedule):
    """CTA parts of the lists of all query tokens."""

    def _sequence(self, index) -> Sequence:
        seen, _, _, exists = self._topk_token(index)
        exists = exists.to(Int32)
        return Sequence(index, index, Int32(1), seen, exists, self._steps(seen, exists))
