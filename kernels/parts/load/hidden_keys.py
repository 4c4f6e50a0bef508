"""New tokens of a request that the draft mask hides from all of its rows.

The softmax gives hidden keys the weight 0, but 0 * NaN is NaN. Loaders therefore write zeros in place of V and its
block scales if no row sees a key. Other masks hide keys from all rows only before the first and after the last visible
key.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core.device import device_struct, global_array
from hopwell.kernels.parts.load.sequence import Request
from hopwell.kernels.problem import MaskKind

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
