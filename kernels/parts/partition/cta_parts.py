"""CTA parts for MLA decode: the keys of all requests are cut into equal parts, one per CTA.

Split-KV (``split_kv.py``) cuts chunks of one length by a rule that depends only on the request. Its results do not
depend on the batch. But its work tiles are coarse, and a request has many partial results.

CTA parts depend on all requests. The steps of keys of all requests form one list, request by request. The list is cut
into equal CTA parts, one for each CTA of a row tile. Each CTA takes one CTA part for one row tile. Most requests are
therefore cut once or not at all, and all CTAs end at the same time. CTAs of different row tiles with the same CTA part
are neighbours, so that their keys come from memory once.

There are no tickets: each CTA reads all lengths, adds them up and finds its own chunks. The CTA can do nothing else
before that, so this path is short. The lengths of up to 32 requests are read once. Divisions whose divisor does not
depend on the lengths are prepared while the lengths arrive. Numbers are unsigned if possible.
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
from hopwell.kernels.parts.core.device import Divisor, device_struct, from_lane, quotient, running_sum, trailing_zeros
from hopwell.kernels.parts.partition.split_kv import (
    ATTEND,
    COMBINE,
    KeySchedule,
    ScheduleHooks,
    Span,
    SplitTile,
    TopkTokens,
)


@device_struct
class KeySteps:
    """The keys of a request in steps. With top-k lists, a query token counts as a request."""

    index: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32
    exists: Int32  # 1, or 0 if there is no request or it has no rows
    steps: Int32


@dataclass
class CtaPartSpan(Span):
    """A request, or a query token with a top-k list, in the list of all steps.

    Places in the list are counted in fractions of a step.
    """

    steps: Int32  # 0 if there is no request
    place: Int32  # place of its first step
    first_cta_part: Int32  # the first CTA part with a chunk of it
    chunks: Int32
    color: Int32  # alternates between 0 and 1 over the requests with several chunks

    @cute.jit
    def begin(self, chunk, size):
        """Return the first step of a chunk, or the number of all steps for the chunk past the last one."""
        # The two ends of a request share its cost besides the steps, so rounding adds no half step.
        inner = ((self.first_cta_part + chunk) * size - self.place) >> FRACTION_BITS
        begin = cutlass.max(cutlass.min(inner, self.steps), 0)
        begin = Int32(0) if chunk == 0 else begin
        return self.steps if chunk == self.chunks else begin


@cute.jit
def cta_part_size(total, longest, cta_parts: Divisor):
    """Return the size of a CTA part in fractions of a step.

    ``total`` is the number of fractions of all requests, ``longest`` the number of the longest request. If CTA parts
    become only little larger, requests of that length are cut into equal chunks, or not at all.

    With more steps than CTA parts, no CTA part is shorter than LEAST_CTA_PART_STEPS. Below that, the loads besides keys
    and the combine work of all CTAs take longer than another step.
    """
    equal = cta_parts.divide(total + (cta_parts.value - 1))
    size = cutlass.max(equal, LEAST_CTA_PART_STEPS * FRACTIONS if total > cta_parts.value * FRACTIONS else FRACTIONS)
    large, small = cutlass.max(longest, size), cutlass.min(longest, size)
    is_cut = longest >= size
    # ``count`` is the number of chunks of a request, or else the number of requests in a chunk.
    count = quotient(large + (Int32(0) if is_cut else small - 1), small)
    even = quotient(longest + (count - 1), count) if is_cut else longest * count
    # CTA parts that are already longer than necessary may grow more.
    return even if even - size <= (size // UNEVEN if equal == size else size) else size


@dataclass
class CtaPartSchedule(KeySchedule):
    """The schedule of a CTA with one CTA part. If CTAs are few, it has one CTA part for each of several row tiles."""

    hooks: ScheduleHooks

    def _sequence(self, index) -> KeySteps:
        q_start, q_len, kv_len = self._lengths(index)
        exists = ((index < self._sequence_count) & (q_len > 0)).to(Int32)
        return KeySteps(index, q_start, q_len, kv_len, exists, self._steps(kv_len, exists))

    def _steps(self, kv_len, exists):
        # A request without keys has results too.
        return cutlass.max(quotient(kv_len + (self.tile_n - 1), Int32(self.tile_n)), 1) * exists

    @cute.jit
    def _cta_part_size(self, sequence: KeySteps, cta_parts: Divisor):
        """Return the size of a CTA part. ``sequence`` is this lane's sequence among the first ones."""
        total, longest = sequence.steps + REQUEST_STEPS * sequence.exists, sequence.steps
        for first in cutlass.range(LANES, self._sequence_count, LANES, unroll=1):
            more = self._sequence(first + cute.arch.lane_idx())
            total += more.steps + REQUEST_STEPS * more.exists
            longest = cutlass.max(longest, more.steps)
        total, longest = cute.arch.warp_reduction_sum(total), cute.arch.warp_reduction_max(longest)
        return cta_part_size(total * FRACTIONS, (longest + REQUEST_STEPS) * FRACTIONS, cta_parts)

    @cute.jit
    def _cta_part_span(self, sequence: KeySteps, place, color, size):
        """Return (span of this lane's request, place and color of the request after it).

        The first lane's request begins at ``place``, and has this ``color`` if it is cut.
        """
        own = (sequence.steps + REQUEST_STEPS * sequence.exists) * FRACTIONS
        end = place + running_sum(own)
        begin, last_cta_part = end - own, Int32(self.geometry.cta_parts) - 1
        # A cut this close to the begin or end of a request moves there.
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

    def _cta_part_tile(self, span: CtaPartSpan, cta_part, size, row_tile, kind, group: Divisor) -> SplitTile:
        """Return the tile of a request in a CTA part, without keys if its ``kind`` is COMBINE.

        A CTA part has at most two partials: the end of one request and the beginning of another. They have different
        colors. The CTA part and the color therefore number a partial in each row tile.
        """
        of_chunk, chunk = 2 * self._most_of_chunk, cta_part - span.first_cta_part
        first_row, request = row_tile * self.tile_m, span.request()
        begin, end = span.begin(chunk, size), span.begin(chunk + 1, size)
        last = cutlass.min(group.divide(first_row + (self.tile_m - 1)), request.q_len - 1)
        tokens = (end - begin) * self.tile_n * (COMBINE - kind)
        keys = self._keys_of_tokens(request, group.divide(first_row), last, begin * self.tile_n, tokens)
        partial_id = cta_part * of_chunk + span.color * self._most_of_chunk + row_tile
        numbers = (chunk, span.chunks, partial_id, partial_id - chunk * of_chunk, Int32(0), of_chunk)
        return SplitTile(request, kind, Int32(0), first_row, keys, *numbers)

    @cute.jit
    def publish(self, work_queue) -> None:
        """Post the work tiles of this CTA's CTA parts, then the work tiles to combine, then the end.

        Called by one warp.

        The work tiles to combine are this CTA's own partials again, for its share of their rows.
        """
        row_tiles, sequences = self._most_of_chunk, self._sequence_count
        first_sequence = self._sequence(cute.arch.lane_idx())
        group, cta_parts = Divisor.of(Int32(self.geometry.group)), Divisor.of(Int32(self.geometry.cta_parts))
        first_place = self.hooks.first_place()
        first_of_cta_part = Divisor.of(row_tiles)
        size, step = self._cta_part_size(first_sequence, cta_parts), Int32(0)
        for kind in cutlass.range(COMBINE + 1, unroll=1):
            place_in_grid, first, place, color = first_place, Int32(0), Int32(0), Int32(0)
            sequence = first_sequence
            while first < sequences:
                span, end, next_color = self._cta_part_span(sequence, place, color, size)
                cta_part = first_of_cta_part.divide(place_in_grid)
                row_tile = place_in_grid - cta_part * row_tiles
                has_chunk = (span.first_cta_part <= cta_part) & (cta_part < span.first_cta_part + span.chunks)
                # If numbers of new tokens are uneven, a request with fewer tokens may have no rows in this tile.
                has_chunk &= row_tile < self._row_tiles(span.q_len)
                # A request with one chunk has a tile to attend to, and none to combine.
                lanes = Uint32(cute.arch.vote_ballot_sync(has_chunk & (span.chunks > kind)))
                while lanes != 0:
                    mine = from_lane(span, trailing_zeros(lanes.to(Int32)))
                    work_tile = self._cta_part_tile(mine, cta_part, size, row_tile, kind, group)
                    work_queue.post(step, work_tile)
                    if kind == ATTEND:
                        # The hook gets no previous work tile, because no partial has to be announced.
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
    """CTA parts over the top-k lists of all query tokens."""

    def _sequence(self, index) -> KeySteps:
        seen, _, _, exists = self._topk_token(index)
        exists = exists.to(Int32)
        return KeySteps(index, index, Int32(1), seen, exists, self._steps(seen, exists))
