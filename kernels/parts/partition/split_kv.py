"""Split-KV scheduling of decode: the request and keys that a CTA works on next.

A request's keys are cut into chunks. A chunk of one KV head and row tile is a work tile. The chunk length depends only
on the request's own keys and, for MLA, on its new tokens. A result therefore never depends on the rest of the batch.
Work tiles form one list, request by request and chunk by chunk. The heads of a chunk are neighbours in the list,
because their keys are neighbours in memory. A CTA that needs work takes a ticket for the next place in the list. The
CTAs of a cluster share each work tile. Clusters take places in turn instead, so that both CTAs know them.

The host does not know the lengths of requests. A warp of each CTA finds the places of its tickets by walking over the
lengths, one request per lane. Tickets only grow, so the warp walks once.

A request has work tiles only for its own row tiles. If numbers of new tokens are uneven, requests with fewer tokens
have fewer work tiles.

A work tile of a request with more than one chunk writes a partial result, see ``partials.py``. Partials are numbered
separately, in the order of the list.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.splitting import DOUBLINGS, FAN_IN, LATENT_WORK_TILES, LONG_TOKENS, MAX_CHUNKS
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core.copy import EVICT_FIRST
from hopwell.kernels.parts.core.device import bit_length, device_struct, from_lane, load_int, running_sum
from hopwell.kernels.parts.load.sequence import Request
from hopwell.kernels.parts.partition.tiles import WorkTile, draw_ticket, lane_of
from hopwell.kernels.parts.rows.mask import IntervalMask, TileRange, TokenPositions
from hopwell.kernels.problem import MaskKind

ATTEND, COMBINE = 0, 1  # kinds of packed tiles, besides END_OF_WORK


@device_struct
class PackedTile(WorkTile):
    """The work tile of decode: some keys of one KV head for one tile of packed rows."""

    request: Request
    kind: Int32  # ATTEND; COMBINE if the CTA only combines partials; END_OF_WORK after the last tile
    kv_head: Int32
    first_row: Int32  # the first packed row of the tile, within the request
    keys: TileRange

    @property
    def exists(self):
        return self.kind >= 0

    def rows(self, group):
        """Return the number of packed rows from ``first_row`` on. The tile holds the rows that fit."""
        return self.request.q_len * Int32(group) - self.first_row


@dataclass
class SplitTile(PackedTile):
    """A work tile of split-KV: a chunk of keys.

    Without tickets, the tiles after the work tiles are this CTA's partials again, because the CTA has to combine their
    rows. With tickets, the end of the work has :attr:`all_partials` alone.
    """

    INTS: ClassVar[int] = 22

    chunk: Int32  # index of the chunk in its request
    chunks: Int32  # number of chunks of the request
    partial_id: Int32  # number of this partial
    first_partial: Int32  # partial of the same rows in the first chunk
    fan_in_partial: Int32  # partial of the first chunk in this chunk's fan-in group of FAN_IN
    tiles_of_chunk: Int32  # work tiles of a chunk: the distance from a partial to the partial of the next chunk

    @property
    def is_work_tile(self):
        """Whether the tile has keys to attend to, or belongs to a request without keys."""
        return self.kind == ATTEND

    @property
    def all_partials(self):
        """The number of all partials of the launch, in the tile of :meth:`end_after`."""
        return self.partial_id

    @classmethod
    def end_after(cls, partials) -> "SplitTile":
        """Return the end of the work of a launch with this number of partials."""
        return replace(cls.end(), partial_id=partials)

    def kv_policy(self):
        return EVICT_FIRST

    @classmethod
    def nothing(cls) -> "SplitTile":
        """Return a work tile without any chunk."""
        return cls.from_ints([Int32(0)] * cls.INTS)


@device_struct
class Span:
    """A lane's data about its request, for any way of cutting the keys."""

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
    chunks: Int32  # 0 if there is no request


@device_struct
class ScheduleHooks:
    """Hooks of the scheduler warp: its place among CTAs, and more work for each work tile. The defaults do nothing."""

    def first_place(self):
        """Return the place of this CTA's first CTA part and row tile. The next ones follow at a distance of the grid's
        size."""
        return Int32(cute.arch.block_idx()[0])

    def draw(self, addresses: Addresses, step):
        """Return the place of the CTA's work tile number ``step`` in the list of work tiles, in lane 0. By default it
        is a ticket."""
        return draw_ticket(addresses)

    def posted(self, step, work_tile: SplitTile, before: SplitTile) -> None:
        """Handle a posted work tile; ``before`` is the work tile before it, at first :meth:`SplitTile.nothing`."""

    def ended(self, step, last: SplitTile) -> None:
        """Handle the end, after ``step`` posted work tiles; ``last`` is the last one."""


@device_struct
class KeySchedule:
    """Base of the schedules of decode: the lengths, rows and keys of requests, however keys are cut."""

    geometry: DecodeGeometry
    addresses: Addresses
    mask: IntervalMask
    tile_m: int
    tile_n: int

    @property
    def _sequence_count(self):
        """Number of requests, or of tokens with top-k lists."""
        return Int32(self.geometry.batch)

    @property
    def _most_of_chunk(self):
        """Work tiles with the same keys in a request that has the most new tokens."""
        return Int32(self.geometry.kv_heads) * Int32(self.geometry.row_tiles)

    def _row_tiles(self, q_len):
        """Return the number of row tiles of a request with ``q_len`` new tokens."""
        return (cutlass.max(q_len, 0) * Int32(self.geometry.group) + (self.tile_m - 1)) // self.tile_m

    def _lengths(self, index):
        """Return (first token, new tokens, keys) of a request. An ``index`` past the end gives the last request."""
        g, a = self.geometry, self.addresses
        safe = cutlass.min(index, Int32(g.batch) - 1)
        q_start = load_int(a.q_offsets, safe, safe * Int32(g.q_len))
        q_end = load_int(a.q_offsets, safe + 1, q_start + Int32(g.q_len))
        # Tiles and slots have room only for the caller's maximum of new tokens, and Q has no rows past its end.
        q_len = cutlass.min(cutlass.min(q_end - q_start, Int32(g.q_len)), Int32(g.tokens) - q_start)
        # An invalid negative length would wrap around in differences. There are no pages past the end of a page table.
        kv_len = cutlass.max(cutlass.min(load_int(a.kv_lens, safe, 0), Int32(g.capacity)), 0)
        if const_expr(self.mask.kind is MaskKind.CYCLIC):
            # A DCP rank may hold keys past its causal bound. No row sees them, so they count as past the end.
            request = Request.of_lengths(safe, q_start, q_len, kv_len)
            last = TokenPositions.of_request(self.mask.kind, request, a, g).of(q_len - 1)
            kv_len = cutlass.max(cutlass.min(kv_len, last + 1), 0)
        return q_start, q_len, kv_len

    def _visible(self, index):
        """Return (first token, new tokens, keys, first key that some row sees) of a request."""
        q_start, q_len, kv_len = self._lengths(index)
        begin = Int32(0)
        if const_expr(self.mask.has_left_edge):
            begin, _ = self.mask.keys(kv_len - q_len, kv_len)
            begin = cutlass.max(cutlass.min(begin, kv_len - 1), 0)
        return q_start, q_len, kv_len, begin

    @cute.jit
    def _cut(self, index, begin, kv_len, shift):
        """Return (first, number) of the parts of 2^shift keys that have keys [begin, kv_len) of a request.

        Past the last request the number is 0.
        """
        first, count = begin >> shift, Int32(0)
        if index < Int32(self.geometry.batch):
            count = cutlass.max(((kv_len - 1) >> shift) + 1 - first, 1)
        return first, count

    def _head(self, place, row_tiles):
        """Return (KV head, first row) of the work tile at ``place`` among the work tiles with the same keys.

        Each head has ``row_tiles`` tiles of rows.
        """
        kv_head = place // row_tiles
        return kv_head, (place - kv_head * row_tiles) * self.tile_m

    def _keys_of_tokens(self, request: Request, first_token, last_token, begin, tokens) -> TileRange:
        """Return the KV tiles that these new tokens of a request visit in a chunk.

        The chunk has ``tokens`` keys from ``begin`` on.
        """
        positions = TokenPositions.of_request(self.mask.kind, request, self.addresses, self.geometry)
        first, last = positions.of(first_token), positions.of(last_token)
        keys = self.mask.tiles(first, last, request, self.tile_n)
        end = cutlass.min(keys.end, begin // self.tile_n + tokens // self.tile_n)
        begin = cutlass.min(cutlass.max(keys.begin, begin // self.tile_n), end)
        full_end = cutlass.max(cutlass.min(keys.full_end, end - 1), begin)
        full_begin = cutlass.min(cutlass.max(keys.full_begin, begin), full_end)
        return TileRange(begin, end, full_begin, full_end, keys.first_key)


@dataclass
class SplitSchedule(KeySchedule):
    """The list of the chunks of all requests, from which CTAs draw by ticket."""

    chunk_tokens: int  # chunk length of short requests
    halves: bool  # whether requests of middle length have chunks of half that length
    latent: bool  # whether partials are large (MLA): a long request then has only enough to keep all CTAs busy
    hooks: ScheduleHooks

    def _of_chunk(self, q_len):
        """Return the number of work tiles with the same keys, for ``q_len`` new tokens.

        These work tiles are neighbours in the list.
        """
        return Int32(self.geometry.kv_heads) * self._row_tiles(q_len)

    def _most_chunks(self, q_len):
        """Return the maximum number of chunks of a request with ``q_len`` new tokens."""
        if not self.latent:
            return Int32(MAX_CHUNKS)
        return cutlass.max(Int32(LATENT_WORK_TILES) // cutlass.max(self._row_tiles(q_len), 1), 2)

    def _span(self, index):
        q_start, q_len, kv_len, begin = self._visible(index)
        shift = self._shift(begin, kv_len, q_len)
        first, chunks = self._cut(index, begin, kv_len, shift)
        return RequestSpan(index, q_start, q_len, kv_len, Int32(1) << shift, first, chunks)

    @cute.jit
    def _shift(self, begin, seen, q_len):
        """Return log2 of the chunk length of a request with the visible keys [begin, seen)."""
        shift = Int32(self.chunk_tokens.bit_length() - 1)
        if const_expr(self.halves):
            shift -= (seen > self.chunk_tokens and seen < LONG_TOKENS).to(Int32)
        most = self._most_chunks(q_len)
        for _ in cutlass.range_constexpr(DOUBLINGS):
            shift += (((seen - 1) >> shift) - (begin >> shift) >= most).to(Int32)
        return shift

    def _tile(self, span: RequestSpan, work_tile, partials) -> SplitTile:
        """Return the work tile at index ``work_tile`` of a request.

        ``partials`` is the number of partials of all earlier requests.
        """
        of_chunk, request = self._of_chunk(span.q_len), span.request()
        chunk = work_tile // of_chunk
        place = work_tile - chunk * of_chunk
        kv_head, first_row = self._head(place, self._row_tiles(span.q_len))
        keys = self._keys(request, first_row, (span.first_chunk + chunk) * span.chunk_tokens, span.chunk_tokens)
        first_partial = partials + place
        fan_in_partial = first_partial + chunk // FAN_IN * FAN_IN * of_chunk
        numbers = (chunk, span.chunks, first_partial + chunk * of_chunk, first_partial, fan_in_partial, of_chunk)
        return SplitTile(request, Int32(ATTEND), kv_head, first_row, keys, *numbers)

    def _keys(self, request: Request, first_row, begin, tokens) -> TileRange:
        """Return the KV tiles that the rows from ``first_row`` on visit in a chunk.

        The chunk has ``tokens`` keys from ``begin`` on.
        """
        group = Int32(self.geometry.group)
        last = cutlass.min((first_row + (self.tile_m - 1)) // group, request.q_len - 1)
        return self._keys_of_tokens(request, first_row // group, last, begin, tokens)

    @cute.jit
    def _requests(self, first):
        """Return a lane's request, counted from request ``first``, and the work tiles and partials up to its end."""
        span = self._span(first + cute.arch.lane_idx())
        of_chunk = self._of_chunk(span.q_len)
        return span, running_sum(span.chunks * of_chunk), running_sum(split_tiles(span.chunks, of_chunk))

    @cute.jit
    def partials(self):
        """Return the number of all partials. Called by a warp."""
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
        ticket = self.hooks.draw(self.addresses, step)
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
                # A ticket is drawn only when the queue has room: another CTA could start on a work tile that would wait
                # here.
                work_queue.ring.wait_empty(step)
                place = cute.arch.shuffle_sync(self.hooks.draw(self.addresses, step), 0)
        self.hooks.ended(step, latest)
        work_queue.post(step, SplitTile.end_after(partials))


class TopkTokens:
    """Schedule mixin for top-k indices: each query token has its own list and is a request to the other parts.

    The entries of the list are the keys of that request. This is a base class before a kind of schedule. There is one
    KV head.
    """

    addresses: Addresses
    geometry: DecodeGeometry

    @property
    def _sequence_count(self):
        return Int32(self.geometry.tokens)

    @cute.jit
    def _request_of(self, place):
        """Return the request of the new token at ``place`` among all new tokens.

        If requests have uneven numbers of new tokens, this is the last request that begins at or before ``place``.
        """
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
        """Return the number of list entries that a new token sees.

        In a short request, this is its number of visible keys.
        """
        return cutlass.max(cutlass.min(kv_len - q_len + token + 1, Int32(self.geometry.topk)), 0)

    @cute.jit
    def _topk_token(self, place):
        """Return (keys that the new token sees, new tokens of its request, keys of its request, whether it exists).

        The token is at ``place`` among all new tokens. Places past the last request's tokens belong to no request.
        """
        q_start, q_len, kv_len = self._lengths(self._request_of(place))
        exists = (place < self._sequence_count) & (q_start <= place) & (place < q_start + q_len)
        return self._topk_keys(kv_len, q_len, place - q_start), q_len, kv_len, exists


@dataclass
class TopkSchedule(TopkTokens, SplitSchedule):
    """Split-KV schedule over top-k lists. Each token's work tiles follow the tiles of the token before.

    Slots are therefore needed for the partials of one token at a time. The chunk length is computed as if the token saw
    the keys of its request's last token.
    """

    @cute.jit
    def _span(self, index):
        keys, q_len, kv_len, exists = self._topk_token(index)
        seen = cutlass.min(kv_len, Int32(self.geometry.topk))
        shift = self._shift(Int32(0), seen, q_len)
        chunks = cutlass.max(((seen - 1) >> shift) + 1, 1) * exists.to(Int32)
        return RequestSpan(index, index, Int32(1), keys, Int32(1) << shift, Int32(0), chunks)


def split_tiles(chunks, of_chunk):
    """Return the number of partials among the work tiles of a request."""
    return chunks * of_chunk * (chunks > 1).to(Int32)
