"""Pairs of CTAs that share matrix instructions: the even CTA of a cluster of two, the leader, issues them for both.

Barriers of an edge that leads to or from the issuing warp are in the leader. Both CTAs have them at the same address.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from hopwell.kernels.config.base import CTAS
from hopwell.kernels.parts.core import cluster
from hopwell.kernels.parts.core.device import device_struct, ptx, shared_address
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.sm100.common import tmem

BOTH = 3  # mask of the CTAs of a pair
LEADER = 0  # rank of the CTA that issues products


def index() -> Int32:
    """Return the number of this pair in the grid."""
    return cute.arch.cluster_idx()[0]


# An arrival with .release.cluster and a wait with .acquire.cluster also order global memory. ptxas emits a fence of the
# whole GPU for the one, and invalidates L1 for the other. Fences that are restricted to shared memory cost neither.


def arrive_at_leader(barrier) -> None:
    """Arrive at the leader's barrier that has the address of ``barrier``. Earlier accesses to shared memory are visible
    to threads of both CTAs that wait for it with :func:`wait`."""
    ptx(
        f"{{ .reg .b32 at; mapa.shared::cluster.u32 at, {{$r0}}, {LEADER}; "
        "fence.release.sync_restrict::shared::cta.cluster; "
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [at]; }",
        shared_address(barrier),
    )


def wait(barrier, parity) -> None:
    """Wait for a phase of a barrier at which threads of both CTAs arrive with :func:`arrive_at_leader`."""
    ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [{$r0}], {$r1}; "
        "@!p bra again; fence.acquire.sync_restrict::shared::cluster.cluster; }",
        shared_address(barrier),
        Int32(parity),
    )


SENT_BYTES = 4


def send(address, word, barrier) -> None:
    """Store a word in the shared memory of the CTA that is not the leader. It completes SENT_BYTES of a phase of
    ``barrier`` there."""
    at, there = (cluster.address_in(1 - LEADER, place) for place in (address, shared_address(barrier)))
    cluster.store_async(at, [word], there)


def release_to_both(ring, step) -> None:
    """Release the stage in both CTAs once all products issued so far are done. One thread of the leader calls this."""
    tmem.commit(shared_address(ring.empty + ring.stage(step)), CTAS, BOTH)


def fill_of_both(ring, step) -> None:
    """Mark the stage as full in both CTAs once all products issued so far are done. One thread of the leader calls
    this."""
    tmem.commit(shared_address(ring.full_barrier(step)), CTAS, BOTH)


@dataclass
class LeaderRing(Ring):
    """A ring whose arrivals from warps of both CTAs are at the leader's barriers.

    The issuing warp is the producer or the consumer. The barriers of the other direction are in each CTA, and products
    arrive at them.
    """

    @staticmethod
    def of(ring: Ring) -> "LeaderRing":
        return LeaderRing(**vars(ring))

    def wait_for_both(self, step) -> None:
        """Wait, in the leader, until warps of both CTAs have filled the stage."""
        wait(self.full_barrier(step), self._parity(step))

    def wait_released_by_both(self, step) -> None:
        """Wait, in the leader, until warps of both CTAs have released the stage; returns at once for the first
        ``stages`` steps."""
        wait(self.empty + self.stage(step), self._parity(step) ^ 1)

    @cute.jit
    def fill(self, step) -> None:
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            arrive_at_leader(self.full_barrier(step))

    @cute.jit
    def release(self, step) -> None:
        if cute.arch.lane_idx() == 0:
            arrive_at_leader(self.empty + self.stage(step))


@device_struct
class PairRing:
    """A ring of tiles that each CTA loads for itself and the leader's products read in both.

    A warp of the other CTA, the relay, waits for each of its own full stages and tells the leader.
    """

    own: Ring
    relayed: LeaderRing  # full when the other CTA's stage is

    @classmethod
    def of_tiles(cls, rings) -> "list[PairRing]":
        """Return the rings of Q, K and V."""
        pairs = ((rings.q, rings.relayed_q), (rings.k, rings.relayed_k), (rings.v, rings.relayed_v))
        return [cls(own, LeaderRing.of(relayed)) for own, relayed in pairs]

    def take(self, step) -> None:
        """Wait, in the leader, until the stage is full in both CTAs."""
        self.own.wait_full(step)
        self.relayed.wait_for_both(step)

    def release(self, step) -> None:
        release_to_both(self.own, step)

    @property
    def stages(self) -> int:
        return self.own.stages

    def stage(self, step) -> Any:
        return self.own.stage(step)

    def drain(self, step) -> None:
        """Wait until all stages used before ``step`` have been released in this CTA."""
        for stage in range(self.stages):
            self.own.wait_empty(step + stage)


@device_struct
class RelayRing(PairRing):
    """The same ring in the other CTA, whose relay takes the tiles in the leader's order."""

    def take(self, step) -> None:
        """Tell the leader, once the stage is full in this CTA."""
        self.own.wait_full(step)
        self.relayed.fill(step)
