"""Producer-consumer edges over mbarriers, declared as data.

A kernel lists its edges once. The list creates and initialises the barriers, and gives the size of their shared memory.
It also checks arrive counts against the warps of each role, and prints itself for documentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from hopwell.kernels.parts.core.device import device_struct


@dataclass(frozen=True)
class Edge:
    """A ring of ``stages`` buffers that ``producer`` fills and ``consumer`` empties.

    Arrivals are counted in threads. One arrival per warp is enough, because the warp synchronises before it arrives.
    Every lane arrives if lanes read or write the stage with their own instructions, for two reasons. compute-sanitizer
    ignores the warp synchronisation and would report all lanes except the arriving one. cp.async arrives for the lane
    that issued it.

    TMA completes the rest of a full barrier's phase by bytes. An edge of 0 bytes is only a signal: its data lies
    elsewhere.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    producer_warps: int
    consumer_warps: int
    stage_bytes: int
    producer_lanes: int = 1  # arriving lanes of each warp
    consumer_lanes: int = 1
    copying_lanes: int = 0  # lanes of each producer warp whose copies arrive in addition
    # cp.async writes through the generic proxy, and its producer has moved on when the writes complete. If the tensor
    # cores read the stage, the consumer therefore has to fence.
    consumer_fences: bool = False

    def __post_init__(self) -> None:
        for field, least in (("stages", 1), ("producer_warps", 1), ("consumer_warps", 1), ("stage_bytes", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"edge {self.name}: {field} must be at least {least}, got {getattr(self, field)}")
        if self.stages & (self.stages - 1):
            raise ValueError(f"edge {self.name}: a ring takes a power of two of stages, got {self.stages}")

    @property
    def full_arrivals(self) -> int:
        """Arrivals that make a stage full."""
        return self.producer_warps * (self.producer_lanes + self.copying_lanes)

    @property
    def barriers(self) -> int:
        return 2 * self.stages

    @property
    def field(self) -> str:
        """Name of the edge's ring among a kernel's rings."""
        return self.name.lower().replace(" ", "_")


def barrier_count(edges: Sequence[Edge]) -> int:
    return sum(edge.barriers for edge in edges)


def describe(edges: Sequence[Edge]) -> str:
    """Describe the edges as a table, one line each."""
    return "\n".join(
        f"{e.name}: {e.producer} ({e.producer_warps} warp{'s' * (e.producer_warps > 1)}) -> {e.consumer} "
        f"({e.consumer_warps} warps), {e.stages} stage{'s' * (e.stages > 1)} of {e.stage_bytes} bytes"
        for e in edges
    )


def check_arrivals(edges: Sequence[Edge], warps: dict[str, int]) -> None:
    """Refuse edges whose arrive counts differ from the warps of the role: such a kernel would hang."""
    for e in edges:
        for role, count in ((e.producer, e.producer_warps), (e.consumer, e.consumer_warps)):
            if role not in warps:
                raise ValueError(f"edge {e.name}: no warps play the role {role!r}; roles are {sorted(warps)}")
            if warps[role] != count:
                raise ValueError(f"edge {e.name}: {role} has {warps[role]} warps but {count} arrivals are expected")


@device_struct
class Ring:
    """The two barrier arrays of an edge. ``step`` counts uses of the ring since the kernel began."""

    full: Any
    empty: Any
    stages: int
    producer_lanes: int = 1
    consumer_lanes: int = 1
    consumer_fences: bool = False

    def stage(self, step):
        return step & (self.stages - 1)

    def _parity(self, step):
        return (step >> (self.stages.bit_length() - 1)) & 1

    def full_barrier(self, step):
        return self.full + self.stage(step)

    def wait_full(self, step) -> None:
        cute.arch.mbarrier_wait(self.full_barrier(step), self._parity(step))
        if self.consumer_fences:
            cute.arch.fence_proxy("async.shared", space="cta")

    def wait_empty(self, step) -> None:
        """Wait until the stage is empty; returns at once for the first ``stages`` steps.

        A fresh barrier counts as having completed phase 1.
        """
        cute.arch.mbarrier_wait(self.empty + self.stage(step), self._parity(step) ^ 1)

    @cute.jit
    def fill(self, step) -> None:
        """Mark the stage as full.

        Every producer warp calls this, converged, when it has written its share of the stage.
        """
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full_barrier(step))

    @cute.jit
    def fill_rest(self, step) -> None:
        """Arrive for all lanes of a producer warp except one, which has arrived with TMA's byte count."""
        if const_expr(self.producer_lanes > 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.full_barrier(step), arrive_count=self.producer_lanes - 1)

    def wait_released(self, step) -> None:
        """Wait for this step's own release, in a ring whose stages do not belong to the producer at first."""
        self.wait_empty(step + self.stages)

    @cute.jit
    def release(self, step) -> None:
        """Release the stage. Every consumer warp calls this, converged, when its reads of the stage have completed."""
        self.release_by(step, self.consumer_lanes)

    @cute.jit
    def release_by(self, step, lanes) -> None:
        """Release a stage by ``lanes`` lanes of a warp; the value must equal ``consumer_lanes``."""
        if cute.arch.lane_idx() < lanes:
            cute.arch.mbarrier_arrive(self.empty + self.stage(step))


@cute.jit
def create_rings(barriers, edges: cutlass.Constexpr) -> tuple:
    """Initialise the barriers in one thread of the CTA, and return one Ring per edge. The caller synchronises."""
    rings, offset = [], 0
    for edge in edges:
        full, empty = barriers + offset, barriers + (offset + edge.stages)
        lanes = (edge.producer_lanes, edge.consumer_lanes)
        rings.append(Ring(full, empty, edge.stages, *lanes, edge.consumer_fences))
        offset += edge.barriers
    if cute.arch.thread_idx()[0] == 0:
        for edge, ring in zip(edges, rings, strict=True):
            for stage in cutlass.range_constexpr(edge.stages):
                cute.arch.mbarrier_init(ring.full + stage, edge.full_arrivals)
                cute.arch.mbarrier_init(ring.empty + stage, edge.consumer_warps * edge.consumer_lanes)
        cute.arch.mbarrier_init_fence()
    return tuple(rings)
