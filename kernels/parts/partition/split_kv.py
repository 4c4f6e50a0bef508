"""Which keys of which request a decode CTA works on next.

The keys of a request are cut into chunks, and a chunk of one KV head and row tile is a work tile. How long chunks
are depends on nothing but the request's own keys and, of MLA, its new tokens, so that a result never depends on what
else is in the batch. Work tiles form one list, request by request, chunk by chunk, the heads of a chunk side by side
because their keys lie side by side in memory. A CTA that needs work takes a ticket for the next place in it.

No one has told the host how long requests are. A warp of each CTA finds the places of its tickets by walking over the
lengths, a request a lane; tickets only grow, so it walks once.

A request has a work tile for each tile of its own rows: of uneven numbers of new tokens, those with fewer have fewer.

Work tiles of requests with more than one chunk are partials: they leave partial results, see ``partial.py``. Partials
have a numbering of their own in the order of the list.
"""

from dataclasses import dataclass
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.splitting import DOUBLINGS, FAN_IN, LATENT_WORK_TILES, LONG_TOKENS, MAX_CHUNKS
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core.copy import EVICT_FIRST
from hopwell.kernels.parts.core.device import DeviceStruct, bit_length, from_lane, load_int, running_sum
from hopwell.kernels.parts.load.sequence import Request
from hopwell.kernels.parts.partition.tiles import WorkTile, draw_ticket, lane_of
from hopwell.kernels.parts.rows.mask import IntervalMask, TileRange, TokenPositions
from hopwell.kernels.problem import MaskKind


@dataclass
class PackedTile(WorkTile):
    """Some keys of one KV head for one tile of packed rows. ``head`` only says whether there is a tile."""

    def rows(self, group):
        """Packed rows from the first one on; a tile has so many of them as fit."""
        return self.request.q_len * Int32(group) - self.first_row


@dataclass
class SplitTile(PackedTile):
    """Work on a chunk of keys. After the last one the fields but ``head`` are the number of all partials, where these
    are handed out. Where they are not, tiles after the work tiles are partials of this CTA, whose rows it has to
    combine."""

    INTS: ClassVar[int] = 22

    chunk: Int32  # number of the chunk among those of its request
    chunks: Int32  # of the request
    partial_id: Int32  # number of the partial
    first_partial: Int32  # of the same rows: that of the first chunk
    fan_in_partial: Int32  # of the first chunk in its fan-in group of FAN_IN
    tiles_of_chunk: Int32  # of a chunk: from a partial to that of the next chunk

    @property
    def is_work_tile(self):
        """Tell whether there are keys to attend to, or that there are none to be told: it is not there to be
        combined."""
        return self.head == 0

    def kv_policy(self):
        return EVICT_FIRST

    @classmethod
    def nothing(cls) -> "SplitTile":
        """Return a work tile without any chunk."""
        return cls.from_ints([Int32(0)] * cls.INTS)


@dataclass
class Span(DeviceStruct):
    """What a lane knows of its request, however its keys are cut."""

    index: Int32
    q_start: Int32
    q_len: Int32
    kv_len: Int32

    def request(self) -> Request:
        return Request.of_lengths(self.index, self.q_start, self.q_len, self.kv_len)


@dataclass
class RequestSpan(Span):
    """A request's keys in chunks."""

    chunk_tokens: Int32
    first_chunk: Int32  # chunks before this one hold no key that a row sees
    chunks: Int32  # 0 where there is no request


@dataclass
class ScheduleHooks(DeviceStruct):
    """What the warp that schedules does for work tiles beyond posting them: nothing, unless a kernel has more to do."""

    def posted(self, step, work_tile: SplitTile, before: SplitTile) -> None:
        """A work tile has been posted, ``before`` is the one before it, at first :meth:`SplitTile.nothing`."""

    def ended(self, step, last: SplitTile) -> None:
        """``step`` work tiles have been posted, ``last`` was the last."""


@dataclass
class SplitSchedule(DeviceStruct):
    geometry: DecodeGeometry
    addresses: Addresses
    mask: IntervalMask
    tile_m: int
    tile_n: int
    chunk_tokens: int  # of short requests
    halves: bool  # whether they are half as long in requests of middle length
    hooks: ScheduleHooks

    @property
    def _sequence_count(self):
        """Say how many requests, or tokens with lists, there are."""
        return Int32(self.geometry.batch)

    @property
    def _most_of_chunk(self):
        """Say how many work tiles have the same keys where a request has the most new tokens."""
        return Int32(self.geometry.kv_heads) * Int32(self.geometry.row_tiles)

    def _row_tiles(self, q_len):
        """Say how many tiles the rows of a request with ``q_len`` new tokens have."""
        return (cutlass.max(q_len, 0) * Int32(self.geometry.group) + (self.tile_m - 1)) // self.tile_m

    def _of_chunk(self, q_len):
        """Say how many work tiles of a request with ``q_len`` new tokens have the same keys. They lie side by side."""
        return Int32(self.geometry.kv_heads) * self._row_tiles(q_len)

    def _most_chunks(self, q_len):
        """Say how many chunks a request of ``q_len`` new tokens has at most."""
        return Int32(MAX_CHUNKS)

    def _lengths(self, index):
        """Return (first token, new tokens, keys) of a request, of the last one where there is none of that index."""
        g, a = self.geometry, self.addresses
        safe = cutlass.min(index, Int32(g.batch) - 1)
        q_start = load_int(a.q_offsets, safe, safe * Int32(g.q_len))
        q_end = load_int(a.q_offsets, safe + 1, q_start + Int32(g.q_len))
        # Tiles and slots have room for as many rows as the bound says, and behind the end of Q there are none.
        q_len = cutlass.min(cutlass.min(q_end - q_start, Int32(g.q_len)), Int32(g.tokens) - q_start)
        # A negative length, which is no length, would wrap around in differences. Behind a table's end are no pages.
        kv_len = cutlass.max(cutlass.min(load_int(a.kv_lens, safe, 0), Int32(g.capacity)), 0)
        if const_expr(self.mask.kind is MaskKind.CYCLIC):
            # A rank may hold keys behind its causal bound, which no row sees: they count as past the end.
            request = Request.of_lengths(safe, q_start, q_len, kv_len)
            last = TokenPositions.of_request(self.mask.kind, request, a, g).of(q_len - 1)
            kv_len = cutlass.max(cutlass.min(kv_len, last + 1), 0)
        return q_start, q_len, kv_len

    @cute.jit
    def _span(self, index):
        chunks = Int32(0)
        q_start, q_len, kv_len = self._lengths(index)
        seen, begin = kv_len, Int32(0)
        if const_expr(self.mask.has_left_edge):
            begin, _ = self.mask.keys(kv_len - q_len, kv_len)
            begin = cutlass.max(cutlass.min(begin, seen - 1), 0)
        shift = self._shift(begin, seen, q_len)
        first = begin >> shift
        if index < Int32(self.geometry.batch):
            chunks = cutlass.max(((seen - 1) >> shift) + 1 - first, 1)
        return RequestSpan(index, q_start, q_len, kv_len, Int32(1) << shift, first, chunks)

    @cute.jit
    def _shift(self, begin, seen, q_len):
        """Return log2 of the keys of a chunk, of a request's keys [begin, seen)."""
        shift = Int32(self.chunk_tokens.bit_length() - 1)
        if const_expr(self.halves):
            shift -= (seen > self.chunk_tokens and seen < LONG_TOKENS).to(Int32)
        most = self._most_chunks(q_len)
        for _ in cutlass.range_constexpr(DOUBLINGS):
            shift += (((seen - 1) >> shift) - (begin >> shift) >= most).to(Int32)
        return shift

    def _tile(self, span: RequestSpan, work_tile, partials) -> SplitTile:
        """Return the work tile of a request; ``partials`` are those of all requests before."""
        of_chunk, request = self._of_chunk(span.q_len), span.request()
        chunk = work_tile // of_chunk
        place = work_tile - chunk * of_chunk
        kv_head, first_row = self._head(place, self._row_tiles(span.q_len))
        keys = self._keys(request, first_row, (span.first_chunk + chunk) * span.chunk_tokens, span.chunk_tokens)
        first_partial = partials + place
        fan_in_partial = first_partial + chunk // FAN_IN * FAN_IN * of_chunk
        numbers = (chunk, span.chunks, first_partial + chunk * of_chunk, first_partial, fan_in_partial, of_chunk)
        return SplitTile(request, kv_head, kv_head, first_row, keys, *numbers)

    def _head(self, place, row_tiles):
        """Return (KV head, first row) of one of the work tiles that have the same keys, where a head has so many tiles
        of rows."""
        kv_head = place // row_tiles
        return kv_head, (place - kv_head * row_tiles) * self.tile_m

    def _keys(self, request: Request, first_row, begin, tokens) -> TileRange:
        """Return the KV tiles that the rows from ``first_row`` on visit in the chunk of ``tokens`` keys from ``begin``
        on."""
        group = Int32(self.geometry.group)
        last = cutlass.min((first_row + (self.tile_m - 1)) // group, request.q_len - 1)
        return self._keys_of_tokens(request, first_row // group, last, begin, tokens)

    def _keys_of_tokens(self, request: Request, first_token, last_token, begin, tokens) -> TileRange:
        """Return the KV tiles that these new tokens of a request visit in the chunk of ``tokens`` keys from ``begin``
        on."""
        positions = TokenPositions.of_request(self.mask.kind, request, self.addresses, self.geometry)
        first, last = positions.of(first_token), positions.of(last_token)
        keys = self.mask.tiles(first, last, request, self.tile_n)
        end = cutlass.min(keys.end, begin // self.tile_n + tokens // self.tile_n)
        begin = cutlass.min(cutlass.max(keys.begin, begin // self.tile_n), end)
        full_end = cutlass.max(cutlass.min(keys.full_end, end - 1), begin)
        full_begin = cutlass.min(cutlass.max(keys.full_begin, begin), full_end)
        return TileRange(begin, end, full_begin, full_end, keys.first_key)

    @cute.jit
    def _requests(self, first):
        """Return a lane's request among those from ``first`` on, and the work tiles, and the partials, of all up to
        it."""
        span = self._span(first + cute.arch.lane_idx())
        of_chunk = self._of_chunk(span.q_len)
        return span, running_sum(span.chunks * of_chunk), running_sum(split_tiles(span.chunks, of_chunk))

    @cute.jit
    def partials(self):
        """Count all partials that there will be. Called by a warp."""
        first, partials = Int32(0), Int32(0)
        while first < self._sequence_count:
            _, _, last_partial = self._requests(first)
            partials += cute.arch.shuffle_sync(last_partial, LANES - 1)
            first += LANES
        return partials

    @cute.jit
    def publish(self, work_queue) -> None:
        """Post every work tile that this CTA gets, then the end. Called by one warp."""
        step, first, work_tiles, partials = Int32(0), Int32(0), Int32(0), Int32(0)
        ticket = draw_ticket(self.addresses)
        span, last_work_tile, last_partial = self._requests(first)
        place, latest = cute.arch.shuffle_sync(ticket, 0), SplitTile.nothing()
        while first < self._sequence_count:
            if place >= work_tiles + cute.arch.shuffle_sync(last_work_tile, LANES - 1):
                work_tiles += cute.arch.shuffle_sync(last_work_tile, LANES - 1)
                partials += cute.arch.shuffle_sync(last_partial, LANES - 1)
                first += LANES
                span, last_work_tile, last_partial = self._requests(first)
            else:
                lane = lane_of(place, work_tiles + last_work_tile)
                mine = from_lane(span, lane)
                of_chunk = self._of_chunk(mine.q_len)
                before = cute.arch.shuffle_sync(last_work_tile, lane) - mine.chunks * of_chunk
                partials_before = cute.arch.shuffle_sync(last_partial, lane) - split_tiles(mine.chunks, of_chunk)
                work_tile = self._tile(mine, place - work_tiles - before, partials + partials_before)
                work_queue.post(step, work_tile)
                self.hooks.posted(step, work_tile, latest)
                latest = work_tile
                step += 1
                # No ticket is drawn before there is room: a work tile that waits here may be one that another CTA could
                # begin with.
                work_queue.ring.wait_empty(step)
                place = cute.arch.shuffle_sync(draw_ticket(self.addresses), 0)
        self.hooks.ended(step, latest)
        work_queue.post_end(step, partials)


@dataclass
class LatentSchedule(SplitSchedule):
    """Partials of MLA are large: a long request has no more of them than it takes to keep all CTAs busy."""

    def _most_chunks(self, q_len):
        return cutlass.max(Int32(LATENT_WORK_TILES) // cutlass.max(self._row_tiles(q_len), 1), 2)


class TopkTokens:
    """Every query token has a list of tokens: to the other parts it is a request of its own, with its list's entries as
    keys. A base class before a kind of schedule. There is one KV head."""

    addresses: Addresses
    geometry: DecodeGeometry

    @property
    def _sequence_count(self):
        return Int32(self.geometry.tokens)

    @cute.jit
    def _request_of(self, place):
        """Return the request of the new token at a place among those of all. Where requests have uneven numbers of
        them, it is the last one that does not begin behind the place."""
        g, offsets = self.geometry, self.addresses.q_offsets
        request = place // Int32(g.q_len)
        if offsets != 0:
            low, high = Int32(0), Int32(g.batch)
            for _ in cutlass.range(bit_length(high), unroll=1):
                middle = (low + high) // 2
                is_before = load_int(offsets, middle, Int32(0)) <= place
                low, high = (middle if is_before else low), (high if is_before else middle)
            request = low
        return request

    def _topk_keys(self, kv_len, q_len, token):
        """Say how many entries of its list a new token of a request sees: of short requests those that there are."""
        return cutlass.max(cutlass.min(kv_len - q_len + token + 1, Int32(self.geometry.topk)), 0)

    @cute.jit
    def _topk_token(self, place):
        """Return (keys that the new token at a place sees, new tokens and keys of its request), and whether a request
        has the token: there may be more behind those of the last one."""
        q_start, q_len, kv_len = self._lengths(self._request_of(place))
        exists = (place < self._sequence_count) & (q_start <= place) & (place < q_start + q_len)
        return self._topk_keys(kv_len, q_len, place - q_start), q_len, kv_len, exists


@dataclass
class TopkSchedule(TopkTokens, LatentSchedule):
    """A token's work tiles follow those of the token before, so that slots are needed for the partials of one token at
    a time. Chunks are as long as if it saw what its request's last token sees."""

    @cute.jit
    def _span(self, index):
        keys, q_len, kv_len, exists = self._topk_token(index)
        seen = cutlass.min(kv_len, Int32(self.geometry.topk))
        shift = self._shift(Int32(0), seen, q_len)
        chunks = cutlass.max(((seen - 1) >> shift) + 1, 1) * exists.to(Int32)
        return RequestSpan(index, index, Int32(1), keys, Int32(1) << shift, Int32(0), chunks)


def split_tiles(chunks, of_chunk):
    """Say how many partials are among the work tiles of a request."""
    return chunks * of_chunk * (chunks > 1).to(Int32)
