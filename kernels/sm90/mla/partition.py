"""How MLA decode of many rows splits keys and combines partials: by CTA parts, or for each request on its own.

Each way is a schedule with hooks of the schedule warp, slots for partials, and a combine. CTA parts cut the keys of all
requests into equal parts. The batch-invariant way splits each request by its own length only.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.config.splitting import LATENT_PARTIAL_BYTES
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.partials import Slots
from hopwell.kernels.parts.combine.row_shares import OwnRowShares, OwnSlots, Partials, RowShares
from hopwell.kernels.parts.core.pipeline import Edge, Roles
from hopwell.kernels.parts.partition.cta_parts import CtaPartSchedule, TopkCtaPartSchedule
from hopwell.kernels.parts.partition.split_kv import KeySchedule, ScheduleHooks, SplitSchedule, TopkSchedule
from hopwell.kernels.parts.partition.tiles import draw_ticket

# Pairs (partials, subtiles of each) that an attend warp keeps in flight when it combines. With many partials a row
# share is one subtile: 1 x 65536 tokens, 347 instead of 330 TFLOP/s (H200, 2026-11-22).
ATTEND_LOADS = ((4, 4), (8, 2), (16, 1))
LIST_ATTEND_LOADS = ((4, 4), (16, 1))  # with all three pairs, ptxas spills


@dataclass
class QueryHooks(ScheduleHooks):
    """Hooks that load the rows of Q of every work tile."""

    kernel: Any  # the MlaSm90: configuration only
    descriptor: Any  # TMA descriptor of Q
    tiles: Any
    rings: Any
    addresses: Addresses
    geometry: DecodeGeometry

    @property
    def ctas(self) -> int:
        """CTAs that share a work tile."""
        return self.kernel.config.work_tile_ctas

    def first_place(self):
        return ScheduleHooks.first_place(self) // self.ctas

    def draw(self, addresses: Addresses, step):
        if self.ctas == 1:
            return draw_ticket(addresses)
        return self.first_place() + step * Int32(self.geometry.grid)

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
        self.combine.announce(work_tile, self.geometry.group, self.ctas)


class KeyPartition:
    """Base of the two ways."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    @property
    def attend_loads(self) -> tuple:
        """Pairs that an attend warp has in flight."""
        return LIST_ATTEND_LOADS if self.kernel.config.sparse else ATTEND_LOADS


class CtaParts(KeyPartition):
    """Equal parts of all keys for the CTAs. Each CTA combines rows in proportion to its number of partials."""

    dequant_warps = 2  # of 8-bit keys

    def schedule(self, *parts: Any, hooks: QueryHooks) -> KeySchedule:
        """Return the schedule; ``parts`` are the fields of :class:`KeySchedule`."""
        return (TopkCtaPartSchedule if self.kernel.config.sparse else CtaPartSchedule)(*parts, hooks)

    def edges(self, roles: Roles) -> list[Edge]:
        return []

    def hooks(self, *parts: Any) -> QueryHooks:
        """Return the hooks of the schedule warp; ``parts`` are the fields of :class:`QueryHooks`."""
        return QueryHooks(*parts)

    def combine(self, addresses: Addresses, geometry: DecodeGeometry, loads=None) -> Partials:
        """Return the partials; ``loads`` are the pairs that a warp has in flight, by default of an attend warp."""
        slots = OwnSlots.create(addresses, geometry, self.kernel.config.head_dim_v, LATENT_PARTIAL_BYTES)
        return OwnRowShares(slots, loads or self.attend_loads)

    def run_idle_warp(self, addresses, geometry, schedule, output_scale) -> None:
        """Do nothing in a producer warp that neither loads nor dequantizes: it exits at once."""

    def wait_slot(self, rings, work) -> None:
        """Do nothing: every partial has a slot of its own."""

    def stored(self, combine: Partials, rings, tile, work) -> None:
        """Count this warp's part of the work tile's partial."""
        combine.announce(tile)

    @cute.jit
    def finish(self, combine: Partials, work_queue, tile, work, addresses, geometry, output_scale) -> None:
        """Combine this CTA's shares after its last work tile; ``tile`` follows the last work tile."""
        outputs = (addresses, geometry, output_scale, self.kernel.out_dtype)
        while tile.exists:
            combine.combine(tile, cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS, *outputs)
            work += 1
            tile = work_queue.read(work)


class RequestSplits(KeyPartition):
    """Splits of each request by its own length, which makes results batch-invariant. Warps take shares by tickets."""

    # One warp stays free to combine beside work tiles, because work tiles wait for the slots that it frees.
    dequant_warps = 1
    storing_role = "attend"

    def schedule(self, *parts: Any, hooks: QueryHooks) -> KeySchedule:
        config = self.kernel.config
        return (TopkSchedule if config.sparse else SplitSchedule)(*parts, config.chunk_tokens, False, True, hooks)

    def edges(self, roles: Roles) -> list[Edge]:
        return [roles.edge("partial", self.storing_role, "schedule", 1)]

    def hooks(self, *parts: Any) -> QueryHooks:
        addresses, geometry = parts[-2:]
        return LatentWorkTiles(*parts, self.combine(addresses, geometry))

    def combine(self, addresses: Addresses, geometry: DecodeGeometry, loads=None) -> Partials:
        slots = Slots.create(addresses, geometry, self.kernel.config.head_dim_v, LATENT_PARTIAL_BYTES)
        return RowShares(slots, loads or self.attend_loads)

    def run_idle_warp(self, addresses, geometry, schedule, output_scale) -> None:
        """Combine row shares whose partials are complete."""
        combine, partials = self.combine(addresses, geometry, self.kernel.config.combine_loads), schedule.partials()
        combine.run(partials, Int32(geometry.grid), addresses, geometry, output_scale, self.kernel.out_dtype)
        combine.hand_back(self._combining_warps(geometry), partials)

    def wait_slot(self, rings, work) -> None:
        """Wait until the work tile's slot may be written."""
        rings.partial.wait_released(work)

    def stored(self, combine: Partials, rings, tile, work) -> None:
        """Signal that the slot has been written."""
        rings.partial.fill(work)

    @cute.jit
    def finish(self, combine: RowShares, work_queue, tile, work, addresses, geometry, output_scale) -> None:
        """Combine row shares until none is left, after the last work tile."""
        combine.run(tile.all_partials, Int32(0), addresses, geometry, output_scale, self.kernel.out_dtype)
        combine.hand_back(self._combining_warps(geometry), tile.all_partials)

    def _combining_warps(self, geometry: DecodeGeometry):
        """Return the number of warps of all CTAs that combine."""
        return Int32(geometry.grid) * (self.kernel.idle_warps + WARPS * self.kernel.config.consumer_warpgroups)
