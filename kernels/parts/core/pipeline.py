"""Producer-consumer edges over mbarriers, declared as data.

A kernel lists its edges once. The list creates and initialises the barriers, sizes their shared memory, checks arrive
counts against the warps that will arrive, and draws itself for documentation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from hopwell.kernels.parts.core.device import DeviceStruct


@dataclass(frozen=True)
class Edge:
    """A ring of ``stages`` buffers that ``producer`` fills and ``consumer`` empties.

    Arrivals are counted in threads. One for each warp is enough, because a warp meets before it arrives. It is every
    lane where lanes read or write the stage with instructions of their own: compute-sanitizer takes no notice of the
    meeting and would report all but the arriving lane, and cp.async arrives for the lane that issued it. TMA completes
    the rest of a full barrier's phase by bytes. An edge of 0 bytes is nothing but a signal: what it is about lies
    elsewhere.
    """

    name: str
    producer: str
    consumer: str
    stages: int
    producer_warps: int
    consumer_warps: int
    stage_bytes: int
    producer_lanes: int = 1  # of each warp that arrive
    consumer_lanes: int = 1
    copying_lanes: int = 0  # of each producer warp, for which copies arrive besides
    # cp.async writes through the generic proxy, and its producer has gone on when the writes are done: where the tensor
    # cores read the stage, it is for the consumer to fence.
    consumer_fences: bool = False

    def __post_init__(self) -> None:
        for field, least in (("stages", 1), ("producer_warps", 1), ("consumer_warps", 1), ("stage_bytes", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"edge {self.name}: {field} must be at least {least}, got {getattr(self, field)}")
        if self.stages & (self.stages - 1):
            raise ValueError(f"edge {self.name}: a ring takes a power of two of stages, got {self.stages}")

    @property
    def full_arrivals(self) -> int:
        """Say how many arrivals make a stage full."""
        return self.producer_warps * (self.producer_lanes + self.copying_lanes)

    @property
    def barriers(self) -> int:
        return 2 * self.stages

    @property
    def field(self) -> str:
        """Return the name of the edge's ring among a kernel's rings."""
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
    """Refuse edges whose arrive counts differ from the number of warps that play the role: such a kernel would hang."""
    for e in edges:
        for role, count in ((e.producer, e.producer_warps), (e.consumer, e.consumer_warps)):
            if role not in warps:
                raise ValueError(f"edge {e.name}: no warps play the role {role!r}; roles are {sorted(warps)}")
            if warps[role] != count:
                raise ValueError(f"edge {e.name}: {role} has {warps[role]} warps but {count} arrivals are expected")


@dataclass
class Ring(DeviceStruct):
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
        """Return at once for the first ``stages`` steps: a fresh barrier counts as having completed phase 1."""
        cute.arch.mbarrier_wait(self.empty + self.stage(step), self._parity(step) ^ 1)

    @cute.jit
    def fill(self, step) -> None:
        """Call this from every producer warp, converged, when it has written its share of the stage."""
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.full_barrier(step))

    @cute.jit
    def fill_rest(self, step) -> None:
        """Arrive for all lanes of a producer warp but one, which has arrived with the bytes that TMA writes."""
        if const_expr(self.producer_lanes > 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.full_barrier(step), arrive_count=self.producer_lanes - 1)

    def wait_released(self, step) -> None:
        """Wait for this step's own release, in a ring whose stages are not the producer's at first."""
        self.wait_empty(step + self.stages)

    @cute.jit
    def release(self, step) -> None:
        """Call this from every consumer warp, converged, when its reads of the stage have completed."""
        self.release_by(step, self.consumer_lanes)

    @cute.jit
    def release_by(self, step, lanes) -> None:
        """Release a stage by so many lanes of a warp, ``consumer_lanes`` whatever they are computed from."""
        if cute.arch.lane_idx() < lanes:
            cute.arch.mbarrier_arrive(self.empty + self.stage(step))


@cute.jit
def create_rings(barriers, edges: cutlass.Constexpr) -> tuple:
    """Initialise the barriers (one thread of the CTA does) and return one Ring an edge. The caller synchronises."""
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
