"""Hooks of the scheduling warp of MLA decode: loads of Q, and slots for partials in batch-invariant kernels."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.row_shares import RowShares
from hopwell.kernels.parts.partition.split_kv import ScheduleHooks


@dataclass
class QueryHooks(ScheduleHooks):
    """This is what every work tile needs besides its keys: rows of Q."""

    kernel: Any  # the MlaSm90: configuration only
    descriptor: Any  # of Q
    tiles: Any
    rings: Any
    addresses: Addresses
    geometry: DecodeGeometry

    @cute.jit
    def posted(self, step, work_tile, before) -> None:
        q_ring = self.rings.q
        self.kernel.fetch_rows(self.descriptor, self.addresses, self.geometry, work_tile, self.tiles.q, q_ring, step)


@dataclass
class LatentWorkTiles(QueryHooks):
    """Where shares are handed out, work tiles need a slot for their partial as well, and that others learn of the
    partial."""

    combine: RowShares

    @cute.jit
    def posted(self, step, work_tile, before) -> None:
        QueryHooks.posted(self, step, work_tile, before)
        if step > 0:
            self._announce(step - 1, before)
        self.combine.wait_free(work_tile)
        self.rings.partial.release(step)

    @cute.jit
    def ended(self, step, last) -> None:
        if step > 0:
            self._announce(step - 1, last)

    def _announce(self, step, work_tile) -> None:
        self.rings.partial.wait_full(step)
        self.combine.announce(work_tile, self.geometry.group)
