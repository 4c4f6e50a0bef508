"""Merging pieces of MLA where the keys of all requests are cut into portions: each CTA merges as many rows as it has
computed pieces of.

Every piece has a slot of its own then, and each CTA knows from the beginning which pieces it will have. So no share is
handed out, and nobody has to be told what a piece is: each warp that attends adds one to a counter of its rows when it
has stored its part of a piece. When there are no more units, it waits until that counter says that all parts of all
chunks are there, and merges its share. On the way from the last store of one CTA to the first load of another lie one
addition and one look at a counter. With shares handed out by tickets there were an addition whose result was waited
for, a flag, a ticket, and a description of the share to load.

Nobody waits in a circle, because a CTA stores all of its pieces before it waits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts.device import global_array, global_pointer, load_acquire
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import BUNDLES_THERE, PIECES_THERE, Slots
from hopwell.kernels.parts.shares import Pieces, RowPieces

STORING_WARPS = 2 * WARPS  # of a piece, which merge a share each as well
COUNTS = (PIECES_THERE, BUNDLES_THERE)  # of warps, in a first piece's slot: those that have stored, that need not wait


@dataclass(frozen=True)
class OwnSlots(Slots):
    """Slots of which each has one piece at most."""

    def place(self, piece):
        return piece * self.rows

    def counter(self, kind: int, piece):
        return self._counter(kind, piece)


@dataclass(frozen=True)
class OwnShares(Pieces):
    """Pieces whose rows are merged by the CTAs that have computed them."""

    @cute.jit
    def announce(self, tile) -> None:
        """This warp has stored its part of the unit's piece, if it is one."""
        if tile.chunks > 1:
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                there = global_pointer(Int32, self.slots.counter(PIECES_THERE, tile.first_piece))
                cute.arch.red(there, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

    @cute.jit
    def merge(self, tile, warp, a: Addresses, g: DecodeGeometry, scale, dtype) -> None:
        """Merge the share of one of STORING_WARPS in the rows of a piece of this CTA."""
        rows = PackedRows.create(a, g, tile, scale, dtype.width // 8).up_to(self.slots.rows)
        shares = tile.chunks * STORING_WARPS
        subtiles = self._share_subtiles(tile.chunk * STORING_WARPS + warp, shares, rows)
        # Some warp waits, or else counters would be reset before all have been counted.
        is_spared = (subtiles[0] >= subtiles[1]) & (rows.count > 0)
        before = self._wait_stored(tile.first_piece, shares, is_spared)
        self._merge_subtiles(subtiles, RowPieces(tile.first_piece, tile.units_of_chunk, tile.chunks), rows, dtype)
        # This is late so that nobody waits for the number.
        if before == shares - 1:
            for kind in cutlass.range_constexpr(len(COUNTS)):
                global_array(Int32, self.slots.counter(COUNTS[kind], tile.first_piece))[0] = 0

    @cute.jit
    def _wait_stored(self, first, parts, is_spared):
        """Wait for all parts of the pieces whose first one is ``first``, if this warp needs them. As many warps come
        here as there are parts; one lane learns how many have come before, the last of whom leaves both counters at
        zero, as the next launch wants to find them."""
        before = Int32(-1)
        if cute.arch.lane_idx() == 0:
            there, seen = (self.slots.counter(kind, first) for kind in COUNTS)
            wanted = parts * (1 - is_spared.to(Int32))
            while load_acquire(there) < wanted:
                pass
            before = cute.arch.atomic_add(global_pointer(Int32, seen), Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()
        return before
