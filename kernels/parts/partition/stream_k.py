"""Stream-K scheduling of decode with few rows: the leaves that a CTA works on next.

An *output tile* of stream-K is one row tile of a request and KV head. The keys that it attends to are cut into leaves
of a fixed number of keys, counted from right to left. The output tiles of a head, request after request, form a *head
list*. If requests have more rows than a tile, each row tile of a head has its own head list.

Head lists are cut into ranges. Every CTA owns one range. At the end of a head list are short ranges, one subtree long,
which CTAs that are done take by tickets. Neighbouring CTAs process the same leaves of all head lists at the same time.
The keys of these leaves are neighbours in memory, or identical. A single list with one head after the other took 169
instead of 135 us for 1 x 131072 tokens (H200, 2026-11-23). The part of an output tile in a range is a *segment*.

The results of leaves are combined as a tree in which every leaf has a fixed place, see ``tree.py``. The boundaries of
ranges therefore never change a bit. To leave few nodes, segments consist of whole subtrees of 2^shift leaves of an
output tile, except for its last subtree. A subtree that crosses the end of a range within the output tile belongs to
the next range.

The host does not know the lengths of requests. A warp of each CTA adds up their leaves, and then walks over them to the
places of its ranges.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.splitting import FIRST_LEAVES, OWN_SHARE, WASTE
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.copy import EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.parts.core.device import Divisor, bit_length, device_struct, from_lane, running_sum, trailing_zeros
from hopwell.kernels.parts.partition.split_kv import ATTEND, KeySchedule, PackedTile, Span, TopkTokens
from hopwell.kernels.parts.partition.tiles import draw_ticket, hand_back_tickets, lane_of


@device_struct(frozen=True)
class StreamKRanges:
    """Ranges and subtrees of head lists. CTAs own the ranges or take them by tickets."""

    leaves: Int32  # of a head list
    own_waves: Int32  # waves of ranges owned by CTAs; a wave has one range of each head list
    own: Int32  # leaves of an owned range
    shift: Int32  # log2 of the leaves of a subtree

    @staticmethod
    @cute.jit
    def of(
        head_lists, leaves, requests, ctas: Divisor, own_waves: Divisor, most_subtrees: cutlass.Constexpr[int]
    ) -> "StreamKRanges":
        """Cut head lists so that a CTA's equal share has at most ``most_subtrees`` subtrees.

        ``own_waves`` is the number of whole waves of CTAs. Work taken by tickets has to be combined, unless output
        tiles are as short as subtrees. 32 x 8192 tokens take 247 us if every CTA owns its share, and 251 us if an
        eighth is handed out by tickets. 256 x 1024 tokens take 251 and 247 us (H200, 2026-11-23).
        """
        share = ctas.divide(head_lists * leaves)
        shift = cutlass.max(bit_length(share) - (most_subtrees.bit_length() - 1), 0)
        own = cutlass.max(share - share // OWN_SHARE, 1)
        waves = own_waves.value
        if waves > 0:
            all_own = own_waves.divide(leaves + (waves - 1))
            if ((all_own - share) * WASTE <= cutlass.max(share, WASTE)) & (leaves > requests << shift):
                own = all_own
                # Ranges of a single request begin at multiples of ``own``. Subtrees may then be as long as the largest
                # power of two that divides it. This gives fewer nodes and fewer rounds of combines.
                if requests == 1:
                    shift = cutlass.max(shift, trailing_zeros(own))
        return StreamKRanges(leaves, waves, own, shift)

    @cute.jit
    def own_range(self, wave):
        """Return (first leaf, end) of the CTAs of a wave. Waves past the owned ones are empty."""
        first = self.leaves if wave >= self.own_waves else cutlass.min(wave * self.own, self.leaves)
        return first, cutlass.min(first + self.own, self.leaves)

    def handed_out(self, wave):
        """Return (first leaf, end) of a wave of tickets. Waves past the last leaf are empty."""
        size = Int32(1) << self.shift
        first = cutlass.min(self.own_waves * self.own + wave * size, self.leaves)
        return first, cutlass.min(first + size, self.leaves)

    @property
    def has_tickets(self):
        return self.own_waves * self.own < self.leaves

    def subtree(self, leaf, first_level):
        """Return the first leaf of a leaf's subtree, counted in its output tile, or of its node of the first level."""
        shift = cutlass.max(self.shift, first_level)
        return (leaf >> shift) << shift

    @property
    def head_list_slots(self):
        """Slots for nodes of a head list."""
        return 2 * (self.leaves >> self.shift) + 2


def wave_and_head_list(number, head_lists: Divisor):
    """Return (wave, head list) of a CTA or ticket. A wave has the same leaves of all head lists."""
    wave = head_lists.divide(number)
    return wave, number - wave * head_lists.value


@dataclass
class LeafSpan(Span):
    """A request's keys in leaves."""

    leaf_tokens: Int32
    first_leaf: Int32  # leaves before this one hold no key that a row sees
    leaves: Int32  # 0 if there is no request


@dataclass
class StreamKTile(PackedTile):
    """A segment of an output tile: the work tile of stream-K."""

    INTS: ClassVar[int] = 24

    leaves: Int32  # of the output tile
    output_tile_start: Int32  # leaves before the output tile in the head list
    first_leaf: Int32  # of the segment
    end_leaf: Int32
    shift: Int32  # log2 of the leaves of a subtree, as in StreamKRanges
    first_slot: Int32  # of the head list
    cache_policy: Int32  # L2 policy of K and V, see copy.tma_load
    first_level: Int32  # of the tree; leaves below it are accumulated one after the other

    def kv_policy(self):
        return self.cache_policy


@dataclass
class StreamKSchedule(KeySchedule):
    """The schedule of kernels that combine leaves. ``tile_n`` is the number of keys of a leaf."""

    most_subtrees: int  # maximum number of subtrees in a CTA's equal share
    resident_leaves: int  # leaves of all KV heads whose keys and values fit into the L2 cache
    accumulated_levels: int  # most levels of the tree that a CTA accumulates

    def _span(self, index):
        shift = Int32(self.tile_n.bit_length() - 1)
        q_start, q_len, kv_len, begin = self._visible(index)
        first, leaves = self._cut(index, begin, kv_len, shift)
        return LeafSpan(index, q_start, q_len, kv_len, Int32(1) << shift, first, leaves)

    @cute.jit
    def _leaves(self, first):
        """Return the number of leaves in a head list of the requests from ``first`` on. Called by a warp."""
        leaves = Int32(0)
        for each in cutlass.range(first, self._sequence_count, LANES, unroll=4):
            leaves += self._span(each + cute.arch.lane_idx()).leaves
        return cute.arch.shuffle_sync(running_sum(leaves), LANES - 1)

    @cute.jit
    def _requests(self, first):
        """Return a lane's request, counted from request ``first``, and the leaves in a head list up to its end."""
        span = self._span(first + cute.arch.lane_idx())
        return span, running_sum(span.leaves)

    def _segment(
        self, span: LeafSpan, place: tuple, output_tile_start, begin, end, ranges: StreamKRanges, policy
    ) -> StreamKTile:
        """Return the segment with leaves [begin, end) of a request's output tile.

        ``place`` is (head list, KV head, first row).
        """
        request, tokens = span.request(), span.leaf_tokens
        head_list, head, first_row = place
        # Leaves are counted from right to left and shared by all rows. A tile has every leaf of its request, even if
        # none of its rows sees a key of the leaf.
        first = span.first_leaf + span.leaves - end
        keys = self._keys_of_tokens(request, Int32(0), request.q_len - 1, first * tokens, (end - begin) * tokens)
        numbers = (span.leaves, output_tile_start, begin, end, ranges.shift, head_list * ranges.head_list_slots, policy)
        return StreamKTile(request, Int32(ATTEND), head, first_row, keys, *numbers, self._first_level(span))

    def _first_level(self, span: LeafSpan):
        """Return the level of the lowest nodes of a request's tree. It depends on the request alone."""
        if const_expr(self.accumulated_levels == 0):
            return Int32(0)
        levels = bit_length(span.leaves - 1) - FIRST_LEAVES
        return cutlass.max(cutlass.min(levels, self.accumulated_levels), 0)

    @cute.jit
    def publish(self, work_queue) -> None:
        """Post every segment that this CTA gets, then the end. Called by one warp."""
        ctas, row_tiles = Divisor.of(Int32(self.geometry.grid)), Int32(self.geometry.row_tiles)
        head_lists = Divisor.of(self._most_of_chunk)
        # Divisions are slow. These divisions do not need the lengths, so they run first.
        own_waves = head_lists.divide(ctas.value)
        own_waves = replace(Divisor.of(cutlass.max(own_waves, 1)), value=own_waves)
        wave, head_list = wave_and_head_list(Int32(cute.arch.block_idx()[0]), head_lists)
        head, first_row = self._head(head_list, row_tiles)
        step, first, before = Int32(0), Int32(0), Int32(0)
        span, last_leaf = self._requests(first)
        leaves = cute.arch.shuffle_sync(last_leaf, LANES - 1)
        if self._sequence_count > LANES:
            leaves += self._leaves(first + LANES)
        ranges = StreamKRanges.of(head_lists.value, leaves, self._sequence_count, ctas, own_waves, self.most_subtrees)
        is_resident = leaves * Int32(self.geometry.kv_heads) <= self.resident_leaves
        policy = Int32(EVICT_NORMAL) if is_resident else Int32(EVICT_FIRST)
        leaf, end = ranges.own_range(wave)
        goes_on = (leaf < ranges.leaves) | ranges.has_tickets
        while goes_on:
            in_requests = before + cute.arch.shuffle_sync(last_leaf, LANES - 1)
            if leaf >= end:
                # A ticket is drawn only when the queue has room: another CTA could start on a range that would wait
                # here.
                work_queue.ring.wait_empty(step)
                wave, head_list = wave_and_head_list(cute.arch.shuffle_sync(draw_ticket(self.addresses), 0), head_lists)
                head, first_row = self._head(head_list, row_tiles)
                leaf, end = ranges.handed_out(wave)
                goes_on = leaf < ranges.leaves
            elif (leaf < before) | (leaf >= in_requests):
                # The next ticket may select the same leaves of another head. The walk then restarts at the first
                # request.
                first = Int32(0) if leaf < before else first + LANES
                before = Int32(0) if leaf < before else in_requests
                span, last_leaf = self._requests(first)
            else:
                lane = lane_of(leaf, before + last_leaf)
                mine = from_lane(span, lane)
                output_tile_start = before + cute.arch.shuffle_sync(last_leaf, lane) - mine.leaves
                level = self._first_level(mine)
                first_leaf, end_leaf = (ranges.subtree(each - output_tile_start, level) for each in (leaf, end))
                if end >= output_tile_start + mine.leaves:
                    end_leaf = mine.leaves
                if first_leaf < end_leaf:
                    place = (head_list, head, first_row)
                    work_queue.post(
                        step, self._segment(mine, place, output_tile_start, first_leaf, end_leaf, ranges, policy)
                    )
                    step += 1
                leaf = output_tile_start + mine.leaves
                goes_on = (leaf < end) | ranges.has_tickets
        work_queue.post_end(step)
        if ranges.has_tickets:
            hand_back_tickets(self.addresses, ctas.value)


@dataclass
class TopkStreamKSchedule(TopkTokens, StreamKSchedule):
    """Stream-K schedule over the top-k lists of all query tokens."""

    @cute.jit
    def _span(self, index):
        leaf, leaves = Int32(self.tile_n), Int32(0)
        seen, _, _, exists = self._topk_token(index)
        # A place without a token has no leaves; a token without keys has one.
        if exists:
            leaves = cutlass.max((seen + (leaf - 1)) // leaf, 1)
        return LeafSpan(index, index, Int32(1), seen, leaf, Int32(0), leaves)
