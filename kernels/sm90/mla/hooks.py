"""Hooks of the schedule warp of MLA decode: loads of Q, and slots for partials in batch-invariant kernels."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.row_shares import RowShares
from hopwell.kernels.parts.partition.split_kv import ScheduleHooks


@dataclass
class QueryHooks(ScheduleHooks):
    """Hooks that load the rows of Q of every work tile."""

    kernel: Any  # the MlaSm90: configuration only
    descriptor: Any  # TMA descriptor of Q
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
    """Hooks of batch-invariant kernels, which hand out row shares: they also reserve a slot for each work tile's
    partial and announce the partial."""

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
