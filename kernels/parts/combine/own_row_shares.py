"""Merging partials of MLA where the keys of all requests are cut into CTA parts: each CTA combines as many rows as it
has computed partials of.

Every partial has a slot of its own then, and each CTA knows from the beginning which partials it will have. So no share
is handed out, and nobody has to be told what a partial is: each warp that attends adds one to a counter of its rows
when it has stored its part of a partial. When there are no more work tiles, it waits until that counter says that all
parts of all chunks are there, and combines its share. On the way from the last store of one CTA to the first load of
another lie one addition and one look at a counter. With shares handed out by tickets there were an addition whose
result was waited for, a flag, a ticket, and a description of the share to load.

Nobody waits in a circle, because a CTA stores all of its partials before it waits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import GROUPS_THERE, PARTIALS_THERE, Slots
from hopwell.kernels.parts.combine.row_shares import Partials, RowPartials
from hopwell.kernels.parts.core.device import global_array, global_pointer, load_acquire
from hopwell.kernels.parts.rows.packed import PackedRows

STORING_WARPS = 2 * WARPS  # of a partial, which combine a share each as well
COUNTS = (
    PARTIALS_THERE,
    GROUPS_THERE,
)  # of warps, in a first partial's slot: those that have stored, that need not wait


@dataclass(frozen=True)
class OwnSlots(Slots):
    """Slots of which each has one partial at most."""

    def place(self, partial_id):
        return partial_id * self.rows

    def counter(self, kind: int, partial_id):
        return self._counter(kind, partial_id)


@dataclass(frozen=True)
class OwnRowShares(Partials):
    """Partials whose rows are combined by the CTAs that have computed them."""

    @cute.jit
    def announce(self, tile) -> None:
        """This warp has stored its part of the work tile's partial, if it is one."""
        if tile.chunks > 1:
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                there = global_pointer(Int32, self.slots.counter(PARTIALS_THERE, tile.first_partial))
                cute.arch.red(there, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

    @cute.jit
    def combine(self, tile, warp, a: Addresses, g: DecodeGeometry, scale, dtype) -> None:
        """Combine the share of one of STORING_WARPS in the rows of a partial of this CTA."""
        rows = PackedRows.create(a, g, tile, scale, dtype.width // 8).up_to(self.slots.rows)
        shares = tile.chunks * STORING_WARPS
        subtiles = self._share_subtiles(tile.chunk * STORING_WARPS + warp, shares, rows)
        # Some warp waits, or else counters would be reset before all have been counted.
        is_spared = (subtiles[0] >= subtiles[1]) & (rows.count > 0)
        before = self._wait_stored(tile.first_partial, shares, is_spared)
        self._combine_subtiles(subtiles, RowPartials(tile.first_partial, tile.tiles_of_chunk, tile.chunks), rows, dtype)
        # This is late so that nobody waits for the number.
        if before == shares - 1:
            for kind in cutlass.range_constexpr(len(COUNTS)):
                global_array(Int32, self.slots.counter(COUNTS[kind], tile.first_partial))[0] = 0

    @cute.jit
    def _wait_stored(self, first, parts, is_spared):
        """Wait for all parts of the partials whose first one is ``first``, if this warp needs them. As many warps come
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
