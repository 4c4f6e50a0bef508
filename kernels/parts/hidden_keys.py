"""Keys inside a request that the mask hides from all of its rows.

The softmax gives hidden keys the weight 0, but 0 * NaN is NaN. Loaders therefore write zeros in place of V, and of its
block scales, wherever no row sees a key. Only decode has such keys: behind a rank's causal bound in decode context
parallel, and among new tokens where no row of the draft mask has a key's bit.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, const_expr

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts.device import DeviceStruct, global_array
from hopwell.kernels.parts.mask import TokenPositions
from hopwell.kernels.parts.sequence import Request
from hopwell.kernels.problem import MaskKind

MASK_BITS = 16  # of an element of the draft mask
MASK_BYTES = MASK_BITS // 8


@dataclass
class HiddenDrafts(DeviceStruct):
    """New tokens of one request whose bit is 0 in every row of the draft mask, or outside the window of each row."""

    first: Int32  # position of the first new token
    end: Int32  # keys of the request
    q_len: Int32
    words: Int64  # address of the first row of the mask; 0 where the caller gives none
    row_bytes: Int32
    window: Int32  # keys to the left of a row's own position that it sees

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
        """Return whether keys up to, but without, ``end`` include new tokens that may be hidden."""
        return (self.words != 0) & (end > self.first)

    def of_tile(self, begin, tile_n: int) -> list:
        """Return a word for each 32 keys of a tile: a bit is 1 where the key is hidden. Called by a whole warp."""
        lane = cute.arch.lane_idx()
        return [
            cute.arch.vote_ballot_sync(self.hides(begin + (i + lane))).to(Uint32) for i in range(0, tile_n, LANES)
        ]


@dataclass
class HiddenKeys(DeviceStruct):
    """How a loader finds the hidden keys of a request. The other masks leave no key of a request hidden."""

    kind: MaskKind
    addresses: Addresses
    geometry: DecodeGeometry

    @staticmethod
    def of(config: Any, a: Addresses, g: Any) -> "HiddenKeys | None":
        """Return what finds the keys that the mask of ``config`` hides; None where it hides none."""
        return HiddenKeys(config.mask, a, g) if config.mask in (MaskKind.DRAFT, MaskKind.CYCLIC) else None

    def end_key(self, request: Request):
        """Return the end of the keys that the request's last row, and with it any row, may see."""
        if const_expr(self.kind is MaskKind.DRAFT):
            return request.kv_len
        positions = TokenPositions.of_request(self.kind, request, self.addresses, self.geometry)
        return cutlass.max(cutlass.min(positions.of(request.q_len - 1) + 1, request.kv_len), 0)

    def drafts(self, request: Request) -> HiddenDrafts | None:
        """Return the hidden new tokens of a request; None for a mask that has no bits."""
        if const_expr(self.kind is not MaskKind.DRAFT):
            return None
        a, g = self.addresses, self.geometry
        row_bytes = Int32(2 * MASK_BYTES * g.draft_words)
        words = a.draft_mask + Int64(request.q_start) * row_bytes * (a.draft_mask != 0).to(Int64)
        sizes = (request.kv_len, request.q_len, words, row_bytes, Int32(g.mask_size))
        return HiddenDrafts(request.first_position, *sizes)


def end_of_seen(hidden: HiddenKeys | None, request: Request):
    """Return the end of the keys of a request that any row may see."""
    return request.kv_len if hidden is None else hidden.end_key(request)
