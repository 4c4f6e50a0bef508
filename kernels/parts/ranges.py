"""Which leaves of which request a CTA of decode with few rows works on next.

A *line* is what one tile of a KV head's rows of a request attends to, cut into leaves of so many keys, counted from
right to left. The lines of a head, request after request, are a *strip*; where requests have more rows than a tile, a
head has a strip for each tile of them. Strips are cut into ranges: one of its own for every CTA, and at the end short
ones, as long as a subtree, for those that are done, handed out by tickets. Ranges of all strips that have the same
leaves go to neighbouring CTAs at the same time, because their keys are neighbours in memory, or the same: with one list
of all heads, one behind the other, 1 x 131072 tokens took 169 instead of 135 us (H200, 2026-11-23). What a range has of
a line is a *segment*.

What is computed of leaves is merged as a tree in which every leaf has its place, see ``tree.py``, so that it never
changes a bit where ranges begin. So that few nodes are left, segments are whole subtrees of 2^shift leaves of a line,
but for the line's last: one in which a range ends within the line is the next range's.

No one has told the host how long requests are: a warp of each CTA adds up their leaves, and then walks over them to the
places of its ranges.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.copy import EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.parts.device import DeviceStruct, Divisor, bit_length, from_lane, running_sum, trailing_zeros
from hopwell.kernels.parts.scheduler import draw_ticket, hand_back_tickets, lane_of
from hopwell.kernels.parts.split import PackedTile, RequestSpan, SplitSchedule, TokenLists
from hopwell.kernels.splitting import OWN_SHARE, WASTE


@dataclass(frozen=True)
class Ranges(DeviceStruct):
    """How strips of leaves are cut into ranges and subtrees, which CTAs own or are handed."""

    leaves: Int32  # of a strip
    own_layers: Int32  # of ranges that CTAs own, one of each strip
    own: Int32  # leaves of such a range
    shift: Int32  # log2 of the leaves of a subtree

    @staticmethod
    @cute.jit
    def of(
        strips, leaves, requests, ctas: Divisor, own_layers: Divisor, most_subtrees: cutlass.Constexpr[int]
    ) -> "Ranges":
        """Cut strips so that a CTA's equal share has ``most_subtrees`` subtrees at most; there are ``own_layers`` whole
        layers of CTAs. What is handed out has to be merged, unless lines are as short as subtrees: 32 x 8192 tokens
        take 247 us where every CTA has its share, 251 where an eighth is handed out, 256 x 1024 tokens 251 and 247
        (H200, 2026-11-23)."""
        share = ctas.divide(strips * leaves)
        shift = cutlass.max(bit_length(share) - (most_subtrees.bit_length() - 1), 0)
        own = cutlass.max(share - share // OWN_SHARE, 1)
        layers = own_layers.value
        if layers > 0:
            all_own = own_layers.divide(leaves + (layers - 1))
            if ((all_own - share) * WASTE <= cutlass.max(share, WASTE)) & (leaves > requests << shift):
                own = all_own
                # Ranges of a single request begin at multiples of ``own``, so that subtrees may be as long as the
                # largest power of two in it: fewer nodes, and fewer rounds of merges.
                if requests == 1:
                    shift = cutlass.max(shift, trailing_zeros(own))
        return Ranges(leaves, layers, own, shift)

    @cute.jit
    def own_range(self, layer):
        """Return (first leaf, end) of the CTAs of a layer; behind the layers that CTAs own they have none."""
        first = self.leaves if layer >= self.own_layers else cutlass.min(layer * self.own, self.leaves)
        return first, cutlass.min(first + self.own, self.leaves)

    def handed_out(self, layer):
        """Return (first leaf, end) of a layer of tickets; layers behind the last leaf have none."""
        size = Int32(1) << self.shift
        first = cutlass.min(self.own_layers * self.own + layer * size, self.leaves)
        return first, cutlass.min(first + size, self.leaves)

    @property
    def has_tickets(self):
        return self.own_layers * self.own < self.leaves

    def subtree(self, leaf):
        """Return the first leaf of the subtree of a leaf, counted in its line."""
        return (leaf >> self.shift) << self.shift

    @property
    def strip_slots(self):
        """Say how many places there are for nodes of a strip."""
        return 2 * (self.leaves >> self.shift) + 2


def layer_and_strip(number, strips: Divisor):
    """Return (layer, strip) of a CTA, or of a ticket: those of a layer have the same leaves of all strips."""
    layer = strips.divide(number)
    return layer, number - layer * strips.value


@dataclass
class RangeTile(PackedTile):
    """A segment of a line, which is what a CTA gets at a time."""

    INTS: ClassVar[int] = 23

    leaves: Int32  # of the line
    line_start: Int32  # leaves before it in the strip
    first_leaf: Int32  # of the segment
    end_leaf: Int32
    shift: Int32  # as in Ranges
    first_slot: Int32  # of the strip
    cache_policy: Int32  # of K and V, see copy.tma_load

    def kv_policy(self):
        return self.cache_policy


@dataclass
class RangeSchedule(SplitSchedule):
    """The schedule of kernels that merge leaves; ``chunk_tokens`` are the keys of a leaf."""

    most_subtrees: int  # in a CTA's equal share
    resident_leaves: int  # of all KV heads, whose keys and values fit into the L2 cache

    def _shift(self, begin, seen, q_len):
        return Int32(self.chunk_tokens.bit_length() - 1)

    @cute.jit
    def _leaves(self, first):
        """Count the leaves that requests from ``first`` on have in a strip. Called by a warp."""
        chunks = Int32(0)
        for each in cutlass.range(first, self._sequence_count, LANES, unroll=4):
            chunks += self._span(each + cute.arch.lane_idx()).chunks
        return cute.arch.shuffle_sync(running_sum(chunks), LANES - 1)

    @cute.jit
    def _requests(self, first):
        """Return a lane's request among those from ``first`` on, and the leaves in a strip of all up to it."""
        span = self._span(first + cute.arch.lane_idx())
        return span, running_sum(span.chunks)

    def _segment(self, span: RequestSpan, place: tuple, line_start, begin, end, ranges: Ranges, policy) -> RangeTile:
        """Leaves [begin, end) of a request's line, in the strip, KV head and rows of ``place``."""
        request, tokens = span.request(), span.chunk_tokens
        strip, head, first_row = place
        # Leaves are counted from right to left, and are those of all rows: a tile has every leaf of its request, be it
        # that none of its rows sees a key of it.
        first = span.first_chunk + span.chunks - end
        keys = self._keys_of_tokens(request, Int32(0), request.q_len - 1, first * tokens, (end - begin) * tokens)
        numbers = (span.chunks, line_start, begin, end, ranges.shift, strip * ranges.strip_slots, policy)
        return RangeTile(request, head, head, first_row, keys, *numbers)

    @cute.jit
    def publish(self, board) -> None:
        """Post every segment that this CTA gets, then the end. Called by one warp."""
        ctas, row_tiles = Divisor.of(Int32(self.geometry.grid)), Int32(self.geometry.row_tiles)
        strips = Divisor.of(self._most_of_chunk)
        # Divisions take their time, and these need no lengths.
        own_layers = strips.divide(ctas.value)
        own_layers = replace(Divisor.of(cutlass.max(own_layers, 1)), value=own_layers)
        layer, strip = layer_and_strip(Int32(cute.arch.block_idx()[0]), strips)
        head, first_row = self._head(strip, row_tiles)
        step, first, before = Int32(0), Int32(0), Int32(0)
        span, last_leaf = self._requests(first)
        leaves = cute.arch.shuffle_sync(last_leaf, LANES - 1)
        if self._sequence_count > LANES:
            leaves += self._leaves(first + LANES)
        ranges = Ranges.of(strips.value, leaves, self._sequence_count, ctas, own_layers, self.most_subtrees)
        is_resident = leaves * Int32(self.geometry.kv_heads) <= self.resident_leaves
        policy = Int32(EVICT_NORMAL) if is_resident else Int32(EVICT_FIRST)
        leaf, end = ranges.own_range(layer)
        goes_on = (leaf < ranges.leaves) | ranges.has_tickets
        while goes_on:
            in_requests = before + cute.arch.shuffle_sync(last_leaf, LANES - 1)
            if leaf >= end:
                # No ticket is drawn before there is room: a range that waits here may be one that another CTA could
                # begin with.
                board.ring.wait_empty(step)
                layer, strip = layer_and_strip(cute.arch.shuffle_sync(draw_ticket(self.addresses), 0), strips)
                head, first_row = self._head(strip, row_tiles)
                leaf, end = ranges.handed_out(layer)
                goes_on = leaf < ranges.leaves
            elif (leaf < before) | (leaf >= in_requests):
                # The next ticket may be for the same leaves of another head: back to the beginning then.
                first = Int32(0) if leaf < before else first + LANES
                before = Int32(0) if leaf < before else in_requests
                span, last_leaf = self._requests(first)
            else:
                lane = lane_of(leaf, before + last_leaf)
                mine = from_lane(span, lane)
                line_start = before + cute.arch.shuffle_sync(last_leaf, lane) - mine.chunks
                segment_begin, segment_end = ranges.subtree(leaf - line_start), ranges.subtree(end - line_start)
                if end >= line_start + mine.chunks:
                    segment_end = mine.chunks
                if segment_begin < segment_end:
                    place = (strip, head, first_row)
                    board.post(step, self._segment(mine, place, line_start, segment_begin, segment_end, ranges, policy))
                    step += 1
                leaf = line_start + mine.chunks
                goes_on = (leaf < end) | ranges.has_tickets
        board.post_end(step)
        if ranges.has_tickets:
            hand_back_tickets(self.addresses, ctas.value)


@dataclass
class ListRangeSchedule(TokenLists, RangeSchedule):
    """Ranges of the lists of all query tokens."""

    @cute.jit
    def _span(self, index):
        leaf, leaves = Int32(self.chunk_tokens), Int32(0)
        seen, _, _, exists = self._listed_token(index)
        # A token that no request has has no leaves, not one without keys.
        if exists:
            leaves = cutlass.max((seen + (leaf - 1)) // leaf, 1)
        return RequestSpan(index, index, Int32(1), seen, leaf, Int32(0), leaves)
