"""Masks in kernels: the keys that a query row sees, and hence the KV tiles that a query tile visits.

A mask has an interval of keys: the row at position ``p`` sees no key outside ``lo <= j < hi``. The bounds come from the
rule in ``masks.py``. ``lo`` and ``hi`` never decrease with ``p``, so the first and the last row of a tile bound all
other rows. Tile ranges and the per-element predicate follow from the bounds. A mask that also hides keys inside its
interval is a subclass of ``IntervalMask`` with its own predicate, see ``MASK_TYPES``.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16, Uint32, Uint64, const_expr

from hopwell.kernels.launch.arguments import DecodeGeometry
from hopwell.kernels.masks import SIDE_BITS, MaskEnum, MaskKind
from hopwell.kernels.parts.core.device import device_struct, global_array, load_index
from hopwell.kernels.parts.load.sequence import Request


@device_struct
class TileRange:
    """KV tiles of one query tile. Tiles in [full_begin, full_end) are visible to every row and need no predicate."""

    begin: Int32
    end: Int32
    full_begin: Int32
    full_end: Int32
    first_key: Int32  # no row of the tile sees a key before this one


@device_struct
class LogitRow:
    """Inputs that turn scores into logits, besides the scores: a lane's rows, with the slope of one head."""

    positions: tuple  # absolute key position of each row
    kv_len: Int32
    slope: Float32

    def of_tile(self, tile_start) -> "LogitRow":
        """Return the row with the per-tile data from memory for the keys from ``tile_start`` on.

        A whole warp calls this before it waits for scores.
        """
        return self

    def needs_mask(self, may_hide):
        """Whether the tile has hidden keys; ``may_hide`` is the answer according to the tile's position."""
        return may_hide


@device_struct
class TokenPositions:
    """Positions of a request's new tokens among its keys, for masks with a diagonal."""

    kind: MaskKind
    first: Int32  # of the first new token. With DCP: among the keys of all ranks, relative to the rank's first key
    dcp_world: Int32

    @staticmethod
    def of_request(kind: MaskKind, request: Request, a: Any, g: DecodeGeometry) -> "TokenPositions":
        """Return the positions of decode's rows; ``a`` are DecodeAddresses."""
        first = request.first_position
        if const_expr(kind is MaskKind.CYCLIC):
            # An invalid negative length would wrap around in differences.
            first = cutlass.max(load_index(a.dcp_kv_lens, request.index), 0) - request.q_len - Int32(g.dcp_rank)
        return TokenPositions(kind, first, Int32(g.dcp_world))

    def of(self, token):
        """Return the last key that a new token sees, or -1 or less if it sees none."""
        place = self.first + token
        if const_expr(self.kind is MaskKind.CYCLIC):
            return cutlass.max(place, 0) // self.dcp_world - (place < 0).to(Int32)
        return place


@device_struct(frozen=True)
class WindowSides:
    """The device's form of :class:`~hopwell.kernels.masks.Sides`."""

    left: Int32
    right: Int32


@device_struct
class IntervalMask:
    """A mask that hides no key inside its interval.

    A subclass that overrides ``apply`` to hide more keys sets ``is_interval`` to False: every tile then takes the
    predicate. The subclass may also override ``first_hidden``, so that tiles before that key skip the predicate.
    """

    kind: MaskEnum
    size: Any  # the parameter of the bounds, see ``Mask.size``: an Int32, or WindowSides

    is_interval: ClassVar[bool] = True  # whether rows see every key between their bounds

    @property
    def has_left_edge(self) -> bool:
        return self.kind.rule.first is not None

    @property
    def has_diagonal(self) -> bool:
        """Whether tiles besides the last one take the predicate at the right end of their range."""
        return self.kind.rule.depends_on_position or not self.is_interval

    def first_hidden(self, request: Request):
        """Return a key before which every row of ``request`` sees all keys of its interval."""
        return request.kv_len if self.is_interval else Int32(0)

    def keys(self, position, kv_len):
        """Return the visible keys [lo, hi) of the row at ``position``; empty when hi <= lo."""
        rule, lo, hi = self.kind.rule, Int32(0), kv_len
        if const_expr(rule.end is not None):
            hi = cutlass.min(kv_len, rule.end(position, self.size))
        if const_expr(rule.first is not None):
            lo = rule.first(position, self.size)
        return lo, hi

    def tiles(self, first_position, last_position, request: Request, tile_n: int) -> TileRange:
        """Return the KV tiles that the rows of ``request`` at ``first_position``..``last_position`` visit."""
        kv_len = request.kv_len
        first_lo, first_hi = self.keys(first_position, kv_len)
        last_lo, last_hi = self.keys(last_position, kv_len)
        end = (cutlass.max(last_hi, 0) + (tile_n - 1)) // tile_n
        begin = cutlass.min(first_lo // tile_n, end)
        # The last tile is always processed with the predicate, so the full range stops before it.
        full_end = cutlass.min(cutlass.max(first_hi, 0) // tile_n, end - 1)
        if const_expr(not self.is_interval):
            full_end = cutlass.min(full_end, self.first_hidden(request) // tile_n)
        full_end = cutlass.max(full_end, begin)
        full_begin = cutlass.min((last_lo + (tile_n - 1)) // tile_n, full_end)
        return TileRange(begin, end, full_begin, full_end, first_lo)

    @cute.jit
    def apply(self, scores, tile_start, row):
        """Write -inf to scores of the fragment ``scores`` whose key its row in ``row`` (a LogitRow) does not see."""
        for r in cutlass.range_constexpr(scores.rows):
            lo, hi = self.keys(row.positions[r], row.kv_len)
            origin = tile_start + scores.first_column()
            hi -= origin
            lo -= origin
            for c in cutlass.range_constexpr(scores.columns):
                visible = scores.column_offset(c) < hi
                if const_expr(self.has_left_edge):
                    visible = visible and scores.column_offset(c) >= lo
                scores.set(r, c, scores.get(r, c) if visible else -Float32.inf)


WORD_BITS = 32
TOPK_KEYS = 2 * WORD_BITS  # per tile


@dataclass
class DraftRow(LogitRow):
    first_draft: Int32  # position of the request's first new token among its keys
    q_len: Int32
    words: tuple  # for each row of the lane, the address of its mask bits

    @staticmethod
    def create(request, tokens, a, g) -> "DraftRow":
        """Return the rows of these new ``tokens`` of a request."""
        positions = tuple(request.first_position + token for token in tokens)
        words = tuple(a.draft_mask + Int64(request.q_start + token) * (4 * g.draft_words) for token in tokens)
        return DraftRow(positions, request.kv_len, Float32(0.0), request.first_position, request.q_len, words)

    @cute.jit
    def word(self, r: cutlass.Constexpr[int], index):
        """Return 32 bits: the keys from new token 32 * ``index`` on that row r sees.

        All bits of keys before the new tokens are set. Bits of keys that the request does not have are arbitrary: the
        interval ends before them. Without a mask in memory, a new token sees itself and earlier new tokens.
        """
        bits = Uint32(0xFFFFFFFF)
        if index >= 0:
            bits = Uint32(0)
            if self.words[r] == 0:
                hidden = index * WORD_BITS + (WORD_BITS - 1) - (self.positions[r] - self.first_draft)
                if hidden < WORD_BITS:
                    bits = Uint32(0xFFFFFFFF) >> cutlass.max(hidden, 0).to(Uint32)
            elif index * WORD_BITS < self.q_len:
                # The caller's elements are 16 bits wide, so the address may have only 16-bit alignment.
                halves = global_array(Uint16, self.words[r])
                bits = halves[2 * index].to(Uint32) | halves[2 * index + 1].to(Uint32) << Uint32(16)
        return bits


@dataclass
class DraftMask(IntervalMask):
    """A sliding window; among the new tokens, the caller's bits decide."""

    is_interval = False

    def first_hidden(self, request: Request):
        return cutlass.max(request.first_position, 0)

    @cute.jit
    def apply(self, scores, tile_start, row):
        start = tile_start - row.first_draft
        first_word, shift = start >> 5, (start & 31).to(Uint32)
        for r in cutlass.range_constexpr(scores.rows):
            lo, hi = self.keys(row.positions[r], row.kv_len)
            origin = tile_start + scores.first_column()
            lo -= origin
            hi -= origin
            words = [row.word(r, first_word)]
            for c in cutlass.range_constexpr(scores.columns):
                nth_word, place = divmod(scores.column_offset(c), WORD_BITS)
                if const_expr(place == 0):
                    # Keys from tile_start + 32 * nth_word on take the upper bits of one word and the lower bits of the
                    # next.
                    words.append(row.word(r, first_word + (nth_word + 1)))
                    above = words[-1] << (Uint32(31) - shift) << Uint32(1)
                    bits = ((words[-2] >> shift) | above) >> scores.first_column().to(Uint32)
                visible = (bits >> Uint32(place)) & Uint32(1) != Uint32(0)
                visible = visible and scores.column_offset(c) < hi and scores.column_offset(c) >= lo
                scores.set(r, c, scores.get(r, c) if visible else -Float32.inf)


@dataclass
class TopkRow(LogitRow):
    table: Int64  # address of all top-k lists
    table_row: Int64  # elements from one list to the next
    index: Int32  # of the list, shared by all rows
    tile_start: Int32
    words: tuple  # one bit per key, for TOPK_KEYS keys from tile_start on: whether the entry is valid

    @staticmethod
    def create(request, positions: tuple, a, g) -> "TopkRow":
        table = (a.key_table, g.key_table_row, request.index)
        return TopkRow(positions, request.kv_len, Float32(0.0), *table, Int32(0), (Uint32(0), Uint32(0)))

    @cute.jit
    def of_tile(self, tile_start):
        # Each lane reads two entries. Alternatively each lane could read the entries of its own columns while it
        # applies the mask. That took 84.4 instead of 81.2 us with 64 lists of 2048 and 128 heads (H200, 2026-11-23).
        tokens = self.table + 4 * self.table_row * self.index
        words = []
        for i in cutlass.range_constexpr(len(self.words)):
            key = tile_start + (WORD_BITS * i + cute.arch.lane_idx())
            token = load_index(tokens, cutlass.max(cutlass.min(key, self.kv_len - 1), 0))
            words.append(cute.arch.vote_ballot_sync((token >= 0) & (key < self.kv_len)).to(Uint32))
        return replace(self, tile_start=tile_start, words=tuple(words))

    def needs_mask(self, may_hide):
        """Whether the tile has an invalid entry. This is rare: most lists are full of valid entries."""
        return self.words[0] & self.words[1] != Uint32(0xFFFFFFFF)


@dataclass
class TopkMask(IntervalMask):
    """Top-k mask: keys are list entries. A row sees all entries except negative ones, which may be anywhere."""

    @cute.jit
    def apply(self, scores, tile_start, row):
        first = (tile_start - row.tile_start + scores.first_column()).to(Uint64)
        bits = ((row.words[1].to(Uint64) << Uint64(WORD_BITS)) | row.words[0].to(Uint64)) >> first
        words = (bits.to(Uint32), (bits >> Uint64(WORD_BITS)).to(Uint32))
        for c in cutlass.range_constexpr(scores.columns):
            word, place = divmod(scores.column_offset(c), WORD_BITS)
            visible = (words[word] >> Uint32(place)) & Uint32(1) != Uint32(0)
            for r in cutlass.range_constexpr(scores.rows):
                scores.set(r, c, scores.get(r, c) if visible else -Float32.inf)


# Mask kinds that are not intervals. A new kind needs its class here; no kernel names mask classes.
MASK_TYPES: dict[MaskEnum, type[IntervalMask]] = {MaskKind.DRAFT: DraftMask}


def mask_type(kind: MaskEnum) -> type[IntervalMask]:
    """Return the mask class of a kind."""
    return MASK_TYPES.get(kind, IntervalMask)


def create_mask(kind: MaskEnum, packed_size) -> IntervalMask:
    """Return the mask of a prefill kernel, whose geometry has :attr:`Mask.packed_size`."""
    if kind.rule.has_sides:
        left, right = packed_size & ((1 << SIDE_BITS) - 1), packed_size >> SIDE_BITS
        return mask_type(kind)(kind, WindowSides(Int32(left), Int32(right)))
    return mask_type(kind)(kind, Int32(packed_size))
