"""Persistent scheduling of query tiles: the query tile that a CTA works on next.

Tiles form one list, request by request. The heads of a request are divided into groups (head swizzle). Within a group,
tiles are ordered longest first if causality makes them unequal. A CTA's first place in the list is its own number. For
every further tile it takes a ticket, which is the next place. The CTA that computes a tile never affects the result,
only its time. A group has few heads, so that several CTAs read the same K and V at the same time, from the L2 cache.

One warp walks the list ahead of all others. It publishes each tile with everything that the others need to know about
it. Tickets, divisions and the dependent loads of lengths and offsets therefore cost the other warps nothing.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core.copy import ATOM_ROWS, EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.parts.core.device import device_struct, from_lane, global_array, global_pointer, running_sum
from hopwell.kernels.parts.load.sequence import Request, load_request
from hopwell.kernels.parts.rows.mask import IntervalMask, TileRange


class WorkTile:
    """The work that a CTA takes at a time, as every role needs to know it. All fields are Int32."""

    INTS: ClassVar[int] = 16

    @property
    def exists(self):
        """Whether this is not the end of the work."""
        raise NotImplementedError

    @classmethod
    def from_ints(cls, values: list) -> "WorkTile":
        return cls(Request(*values[:8]), *values[8:11], TileRange(*values[11:16]), *values[16:])

    @classmethod
    def end(cls) -> "WorkTile":
        """Return the end of the work, which follows the last tile."""
        return cls.from_ints([Int32(END_OF_WORK)] * cls.INTS)


@device_struct
class QueryTile(WorkTile):
    """The work tile of prefill: a query tile of one or several heads."""

    request: Request
    head: Int32  # the tile's first head; END_OF_WORK after the last tile
    kv_head: Int32
    first_row: Int32  # the first token of the tile, within the request
    keys: TileRange

    def kv_policy(self):
        """Return the L2 cache policy of K and V if heads share tiles, see copy.tma_load.

        The keys of a request with few tokens are read once. The keys of other requests are read by one tile after the
        other, and should stay in L2.
        """
        is_short = self.request.q_len <= ATOM_ROWS
        return Int32(EVICT_NORMAL) + is_short.to(Int32) * (EVICT_FIRST - EVICT_NORMAL)

    @property
    def exists(self):
        return self.head >= 0


END_OF_WORK = -1


@cute.jit
def draw_ticket(addresses):
    """Draw the next ticket, for lane 0. The caller reads the result later, when it has arrived."""
    ticket = Int32(0)
    if cute.arch.lane_idx() == 0:
        ticket = cute.arch.atomic_add(global_pointer(Int32, addresses.tickets), Int32(1))
    return ticket


@cute.jit
def hand_back_tickets(addresses, ctas) -> None:
    """Reset both counters to zero in the last CTA, for the next launch on this stream.

    One warp of each CTA calls this when it draws no more tickets.
    """
    if cute.arch.lane_idx() == 0:
        done = global_pointer(Int32, addresses.tickets + 4)
        if cute.arch.atomic_add(done, Int32(1)) == ctas - 1:
            global_array(Int32, addresses.tickets)[0] = 0
            global_array(Int32, addresses.tickets)[1] = 0


def lane_of(place, last_places):
    """Return the lane whose request has ``place`` in the list.

    ``last_places`` is each lane's own value: the number of places up to the end of its request.
    """
    return cute.arch.popc(cute.arch.vote_ballot_sync(last_places <= place))


@device_struct
class TileSchedule:
    """The list of tiles and the walk of this CTA through it."""

    geometry: Geometry
    addresses: Addresses
    mask: IntervalMask
    tile_n: int
    tile_shape: TileShape

    @property
    def alternates(self) -> bool:
        """Whether tickets alternate between the first and the second half of the list, see :meth:`_place`."""
        return False

    @cute.jit
    def _requests(self, first):
        """Return a lane's request, counted from request ``first``, and the number of tiles up to its end."""
        index, tiles = first + cute.arch.lane_idx(), Int32(0)
        request = load_request(cutlass.min(index, Int32(self.geometry.batch) - 1), self.addresses, self.geometry)
        if index < Int32(self.geometry.batch):
            tiles = self._tiles(request)
        return request, running_sum(tiles)

    def _tiles(self, request: Request):
        return self._q_tiles(request) * (Int32(self.geometry.heads) // self.tile_shape.heads)

    def _q_tiles(self, request: Request):
        return (request.q_len + (self.tile_shape.tokens - 1)) // self.tile_shape.tokens

    def _coordinates(self, q_tiles, place):
        """Return (query tile, its first head) at a place of a request's list.

        Each group of heads has its tiles from last to first, and each tile for all heads of the group. Heads that share
        K and V therefore run side by side.
        """
        head_swizzle = Int32(self.geometry.head_swizzle)
        first = place // (head_swizzle * q_tiles) * head_swizzle
        place -= first * q_tiles
        row = place // head_swizzle
        return q_tiles - 1 - row, (first + place - row * head_swizzle) * self.tile_shape.heads

    def _work_tile(self, request: Request, place) -> QueryTile:
        """Return the tile at a place of the request's list."""
        q_tile, head = self._coordinates(self._q_tiles(request), place)
        first_row = q_tile * self.tile_shape.tokens
        last_row = cutlass.min(first_row + self.tile_shape.tokens, request.q_len) - 1
        position = request.first_position
        keys = self.mask.tiles(position + first_row, position + last_row, request, self.tile_n)
        kv_head = head // (Int32(self.geometry.heads) // Int32(self.geometry.kv_heads))
        return QueryTile(request, head, kv_head, first_row, keys)

    def first_place(self) -> Int32:
        """Return the number of this CTA, or of its pair."""
        return cute.arch.block_idx()[0]

    def next_ticket(self, step):
        """Return the next ticket, after ``step`` tiles."""
        return Int32(self.geometry.grid) + cute.arch.shuffle_sync(draw_ticket(self.addresses), 0)

    @cute.jit
    def _count(self, last_tile):
        """Return the number of tiles of all requests. ``last_tile`` is the second result of ``_requests(0)``."""
        count = cute.arch.shuffle_sync(last_tile, LANES - 1)
        if Int32(self.geometry.batch) > LANES:
            rest = Int32(0)
            for first in cutlass.range(LANES, Int32(self.geometry.batch), LANES, unroll=4):
                _, more = self._requests(first)
                rest += cute.arch.shuffle_sync(more, LANES - 1)
            count += rest
        return count

    def _place(self, ticket, count):
        """Return the place of a ticket in a list of ``count`` tiles.

        Alternating tickets select tiles from the first and the second half in turn. In a mixed batch, requests with
        many queries are limited by products and requests with few queries by memory. Each kind is contiguous in the
        batch. Both kinds side by side take only the time of the slower one.
        """
        if not self.alternates:
            return ticket
        half = (count + 1) // 2
        return cutlass.min((ticket & 1) * half + (ticket >> 1) + (ticket >= count).to(Int32) * count, count)

    @cute.jit
    def publish(self, work_queue) -> None:
        """Post every tile that this CTA gets, then the end. Called by one warp."""
        step, first, tiles, count = Int32(0), Int32(0), Int32(0), Int32(0)
        request, last_tile = self._requests(first)
        if const_expr(self.alternates):
            count = self._count(last_tile)
        place = self._place(self.first_place(), count)
        while first < Int32(self.geometry.batch):
            if place >= tiles + cute.arch.shuffle_sync(last_tile, LANES - 1):
                tiles += cute.arch.shuffle_sync(last_tile, LANES - 1)
                first += LANES
                request, last_tile = self._requests(first)
            else:
                lane = lane_of(place, tiles + last_tile)
                mine = from_lane(request, lane)
                before = tiles + cute.arch.shuffle_sync(last_tile, lane) - self._tiles(mine)
                tile = self._work_tile(mine, place - before)
                work_queue.post(step, tile)
                self.published(tile, step)
                step += 1
                # A ticket is drawn only when the queue has room: another CTA could start on a tile that would wait
                # here.
                work_queue.ring.wait_empty(step)
                place = self._place(self.next_ticket(step), count)
                if const_expr(self.alternates):
                    if place < tiles:
                        tiles, first = Int32(0), Int32(0)
                        request, last_tile = self._requests(first)
        work_queue.post_end(step)
        self.hand_back()

    def hand_back(self) -> None:
        """Hand back the tickets of this CTA, or of its pair."""
        hand_back_tickets(self.addresses, Int32(self.geometry.grid))

    def published(self, tile: QueryTile, step) -> None:
        """Do more work for a tile just posted, in the same warp. The default does nothing."""


@dataclass
class AlternatingSchedule(TileSchedule):
    """A list in two halves whose tiles are taken alternately."""

    @property
    def alternates(self) -> bool:
        return True


@device_struct
class WorkQueue:
    """Work tiles passed through shared memory, one ring slot each."""

    slots: Any  # Int32 [kind.INTS, stages] in shared memory
    ring: Any
    kind: type[WorkTile]

    @cute.jit
    def post(self, step, tile) -> None:
        values = cutlass.extract_mlir_values(tile)
        self.ring.wait_empty(step)
        slot = self.slots[None, self.ring.stage(step)]
        with cute.arch.elect_one():
            for i in cutlass.range_constexpr(self.kind.INTS):
                slot[i] = Int32(values[i])
            cute.arch.mbarrier_arrive(self.ring.full_barrier(step))

    def post_end(self, step) -> None:
        """Post the end of the work: a whole tile, because readers load one before they check it."""
        self.post(step, self.kind.end())

    def read(self, step) -> WorkTile:
        """Read the tile of ``step`` and release its slot. Called by every reading warp."""
        tile = self.look(step)
        self.release(step)
        return tile

    def look(self, step) -> WorkTile:
        """Return the tile of ``step``, whose slot is kept until :meth:`release`."""
        self.ring.wait_full(step)
        slot = self.slots[None, self.ring.stage(step)]
        return self.kind.from_ints([slot[i] for i in range(self.kind.INTS)])

    def release(self, step) -> None:
        """Release the slot of ``step``. The lanes of the warp synchronise first: combining may have diverged them."""
        cute.arch.sync_warp()
        self.ring.release(step)
