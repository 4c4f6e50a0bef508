"""The location of one request's tokens, from device-side offsets and lengths, and its hidden new tokens.

The draft mask can hide new tokens from all rows of a request. The softmax gives hidden keys the weight 0, but 0 * NaN
is NaN. Loaders therefore write zeros in place of V and its block scales if no row sees a key. Other masks hide keys
from all rows only before the first and after the last visible key.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry, Geometry
from hopwell.kernels.parts.core.device import device_struct, global_array, load_int
from hopwell.kernels.problem import MaskKind


@device_struct
class Request:
    index: Int32
    q_start: Int32  # first row of the request in query
    o_start: Int32
    k_start: Int32  # first row in contiguous K; 0 for paged K
    v_start: Int32
    lse_start: Int32
    q_len: Int32
    kv_len: Int32

    @staticmethod
    def of_lengths(index, q_start, q_len, kv_len) -> "Request":
        """Return a decode request: its output begins at the same row as its queries, and K and V are paged."""
        return Request(index, q_start, q_start, Int32(0), Int32(0), q_start, q_len, kv_len)

    @property
    def first_position(self):
        """Absolute key position of query row 0 (bottom-right alignment); negative if kv_len < q_len."""
        return self.kv_len - self.q_len


def _tokens(offset, token_elements):
    """Convert an offset in elements to a row number. The division is unsigned: uint32 offsets use all 32 bits."""
    return (offset.to(Uint32) // Uint32(token_elements)).to(Int32)


def load_request(index, addresses: Addresses, geometry: Geometry) -> Request:
    a, g = addresses, geometry
    q_start = _tokens(load_int(a.q_offsets, index, 0), g.q_token_elements)
    q_end = _tokens(load_int(a.q_offsets, index + (a.q_lens == 0).to(Int32), 0), g.q_token_elements)
    k_start = _tokens(load_int(a.k_offsets, index, 0), g.k_token_elements)
    k_end = _tokens(load_int(a.k_offsets, index + (a.kv_lens == 0).to(Int32), 0), g.k_token_elements)
    o_start = _tokens(load_int(a.o_offsets, index, q_start * Int32(g.o_token_elements)), g.o_token_elements)
    rows_left = Int32(g.tokens) - cutlass.max(q_start, o_start)  # in Q and the output, which end with the same token
    lse_request = Int32(g.lse_request)
    lse_row = index * cutlass.max(lse_request, 0) + o_start * (lse_request < 0).to(Int32)
    return Request(
        index=index,
        q_start=q_start,
        o_start=o_start,
        k_start=k_start,
        v_start=_tokens(load_int(a.v_offsets, index, k_start * Int32(g.v_token_elements)), g.v_token_elements),
        lse_start=_tokens(load_int(a.lse_offsets, index, lse_row * Int32(g.lse_token_elements)), g.lse_token_elements),
        q_len=cutlass.min(load_int(a.q_lens, index, q_end - q_start), rows_left),
        kv_len=cutlass.min(load_int(a.kv_lens, index, k_end - k_start), Int32(g.capacity)),
    )


MASK_BITS = 16  # per element of the draft mask
MASK_BYTES = MASK_BITS // 8


@device_struct
class HiddenDrafts:
    """New tokens of one request whose bit is 0 in every row of the draft mask, or outside the window of each row."""

    first: Int32  # position of the first new token
    end: Int32  # keys of the request
    q_len: Int32
    words: Int64  # address of the mask's first row; 0 if the caller gives no mask
    row_bytes: Int32
    window: Int32  # number of keys to the left of its own position that a row sees

    @cute.jit
    def hides(self, key):
        """Return whether no row sees ``key``, which may differ by lane."""
        hidden = Boolean(False)
        if self.words != 0 and key >= self.first and key < self.end:
            seen, bit = Uint32(0), key - self.first
            for token in cutlass.range(self.q_len, unroll=4):
                row = global_array(Uint16, self.words + token * self.row_bytes)
                in_window = (key + self.window >= self.first + token).to(Uint32)
                seen |= (row[bit // MASK_BITS].to(Uint32) >> (bit % MASK_BITS).to(Uint32)) & in_window
            hidden = seen == 0
        return hidden

    def overlap(self, end):
        """Return whether keys before ``end`` include new tokens that may be hidden."""
        return (self.words != 0) & (end > self.first)

    def of_tile(self, begin, tile_n: int) -> list:
        """Return one word per 32 keys of a tile, with a 1 for each hidden key. Called by a whole warp."""
        lane = cute.arch.lane_idx()
        return [cute.arch.vote_ballot_sync(self.hides(begin + (i + lane))).to(Uint32) for i in range(0, tile_n, LANES)]


@device_struct
class DraftRows:
    """The draft mask of all requests."""

    addresses: Addresses
    geometry: DecodeGeometry

    @staticmethod
    def of(config: Any, a: Addresses, g: Any) -> "DraftRows | None":
        """Return the draft mask of a kernel, or None for a kernel with another mask."""
        return DraftRows(a, g) if config.mask is MaskKind.DRAFT else None

    def of_request(self, request: Request) -> HiddenDrafts:
        """Return the hidden new tokens of a request."""
        a, g = self.addresses, self.geometry
        row_bytes = Int32(2 * MASK_BYTES * g.draft_words)
        words = a.draft_mask + Int64(request.q_start) * row_bytes * (a.draft_mask != 0).to(Int64)
        sizes = (request.kv_len, request.q_len, words, row_bytes, Int32(g.mask_size))
        return HiddenDrafts(request.first_position, *sizes)


def hidden_drafts(rows: DraftRows | None, request: Request) -> HiddenDrafts | None:
    """Return the hidden new tokens of a request, or None if the kernel has no draft mask."""
    return None if rows is None else rows.of_request(request)
