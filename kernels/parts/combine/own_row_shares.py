"""Combine of MLA partials with CTA parts: each CTA combines rows in proportion to its number of partials.

With CTA parts (``cta_parts.py``), every partial has its own slot, and each CTA knows from the start which partials it
will have. Shares therefore need no tickets, and no message describes a partial. Each attending warp adds one
to a counter of its rows when it has stored its part of a partial. When it has no more work tiles, it waits until the
counter shows all parts of all chunks, and combines its share.

The path from the last store of one CTA to the first load of another has one addition and one read of a counter. With
shares by tickets, the path had an addition whose result was awaited, a flag, a ticket, and a share description to load.

There is no circular wait, because a CTA stores all of its partials before it waits.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import SLOT_COUNTERS, Slots
from hopwell.kernels.parts.combine.row_shares import Partials, RowPartials
from hopwell.kernels.parts.core.device import global_array, global_pointer, load_acquire
from hopwell.kernels.parts.rows.packed import PackedRows

STORING_WARPS = 2 * WARPS  # per partial; each also combines one share
# Counters in the first partial's slot: warps that have stored, and warps that have read the first counter. The epoch of
# other combines comes before them.
_, STORED, READ, *_ = range(SLOT_COUNTERS)


@dataclass(frozen=True)
class OwnSlots(Slots):
    """Slots with at most one partial each."""

    def place(self, partial_id):
        return partial_id * self.rows

    def counter(self, kind: int, partial_id):
        return self._counter(kind, partial_id)


@dataclass(frozen=True)
class OwnRowShares(Partials):
    """Partials whose rows are combined by the CTAs that computed them."""

    @cute.jit
    def announce(self, tile) -> None:
        """Count this warp's part of the work tile's partial, if it has one, after the warp has stored it."""
        if tile.chunks > 1:
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                there = global_pointer(Int32, self.slots.counter(STORED, tile.first_partial))
                cute.arch.red(there, Int32(1), op="add", dtype="u32", sem="release", scope="gpu")

    @cute.jit
    def combine(self, tile, warp, a: Addresses, g: DecodeGeometry, scale, dtype) -> None:
        """Combine one warp's share of the rows of a partial of this CTA; ``warp`` is one of STORING_WARPS."""
        rows = PackedRows.create(a, g, tile, scale, dtype.width // 8).up_to(self.slots.rows)
        shares = tile.chunks * STORING_WARPS
        subtiles = self._share_subtiles(tile.chunk * STORING_WARPS + warp, shares, rows)
        # At least one warp has to wait. Otherwise counters would be reset before every store was counted.
        is_spared = (subtiles[0] >= subtiles[1]) & (rows.count > 0)
        before = self._wait_stored(tile.first_partial, shares, is_spared)
        self._combine_subtiles(subtiles, RowPartials(tile.first_partial, tile.tiles_of_chunk, tile.chunks), rows, dtype)
        # The number is used this late so that no warp waits for it.
        if before == shares - 1:
            for kind in (STORED, READ):
                global_array(Int32, self.slots.counter(kind, tile.first_partial))[0] = 0

    @cute.jit
    def _wait_stored(self, first, parts, is_spared):
        """Wait for all ``parts`` of the partials that begin with ``first``, unless this warp ``is_spared``.

        ``parts`` warps in all call this. One lane of each learns the number of earlier warps. The last warp resets both
        counters to zero, as the next launch expects.
        """
        before = Int32(-1)
        if cute.arch.lane_idx() == 0:
            stored, read = (self.slots.counter(kind, first) for kind in (STORED, READ))
            wanted = parts * (1 - is_spared.to(Int32))
            while load_acquire(stored) < wanted:
                pass
            before = cute.arch.atomic_add(global_pointer(Int32, read), Int32(1), sem="relaxed", scope="gpu")
        cute.arch.sync_warp()
        return before
