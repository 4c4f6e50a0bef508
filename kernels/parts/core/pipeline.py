"""Warp roles, the producer-consumer edges between them over mbarriers, declared as data, and named barriers.

A kernel lists its roles and its edges once. Arrive counts follow from the warps of the roles. The list of edges creates
and initialises the barriers, gives the size of their shared memory, and prints itself for documentation.

Barrier 0 of the named barriers belongs to ``cute.arch.sync_threads``.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core.device import device_struct


@dataclass(frozen=True)
class Edge:
    """A ring of ``stages`` buffers that ``producer`` fills and ``consumer`` empties. ``name`` is a field of Rings.

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

    @property
    def full_arrivals(self) -> int:
        """Arrivals that make a stage full."""
        return self.producer_warps * (self.producer_lanes + self.copying_lanes)

    @property
    def barriers(self) -> int:
        return 2 * self.stages


class Reader(enum.Enum):
    """Readers of tiles of K and V, which decide the arrive counts of the edge."""

    TENSOR_CORES = enum.auto()
    LANES = enum.auto()  # lanes of warps, each of which arrives
    SYNCED_LANES = enum.auto()  # lanes of warps that synchronise before they release a stage
    BOTH = enum.auto()  # tensor cores, and lanes that load an operand into registers

    def arrivals(self, *, copies_rows: bool, writes_zeros: bool, copies_scales: bool = False) -> dict[str, Any]:
        """Return the arrivals of an edge of K or V, as arguments of :meth:`Roles.edge`.

        ``copies_rows`` tells whether lanes of the load warp copy rows, instead of TMA. ``writes_zeros`` tells whether
        they write zeros for hidden keys. Lanes that read a stage have to see these writes without a proxy fence, so
        all lanes of the load warp arrive. ``copies_scales`` tells whether lanes copy block scales beside the tile.
        """
        by_lanes = self is not Reader.TENSOR_CORES
        producer_lanes = LANES if copies_rows or (writes_zeros and by_lanes) else 1
        copying_lanes = LANES if copies_scales and not copies_rows else 0
        every_lane = {
            Reader.TENSOR_CORES: False,
            Reader.LANES: True,
            Reader.SYNCED_LANES: max(producer_lanes, copying_lanes) > 1,
            Reader.BOTH: True,
        }[self]
        return dict(
            producer_lanes=producer_lanes,
            consumer_lanes=LANES if every_lane else 1,
            copying_lanes=copying_lanes,
            consumer_fences=copies_rows and self in (Reader.TENSOR_CORES, Reader.BOTH),
        )


@dataclass(frozen=True)
class Roles:
    """Number of warps of each role of a kernel, by name."""

    warps: dict[str, int]

    def edge(self, name: str, producer: str, consumer: str, stages: int, stage_bytes: int = 0, **arrivals: Any) -> Edge:
        """Return the edge from one role to another. ``arrivals`` are fields of :class:`Edge`."""
        return Edge(
            name,
            producer,
            consumer,
            stages,
            self._of(name, producer),
            self._of(name, consumer),
            stage_bytes,
            **arrivals,
        )

    def _of(self, edge: str, role: str) -> int:
        if role not in self.warps:
            raise ValueError(f"edge {edge}: no warps play the role {role!r}; roles are {sorted(self.warps)}")
        return self.warps[role]


def barrier_count(edges: Sequence[Edge]) -> int:
    return sum(edge.barriers for edge in edges)


def describe(edges: Sequence[Edge]) -> str:
    """Describe the edges as a table, one line each."""
    return "\n".join(
        f"{e.name}: {e.producer} ({e.producer_warps} warp{'s' * (e.producer_warps > 1)}) -> {e.consumer} "
        f"({e.consumer_warps} warps), {e.stages} stage{'s' * (e.stages > 1)} of {e.stage_bytes} bytes"
        for e in edges
    )


@device_struct
class Ring:
    """The two barrier arrays of an edge. ``step`` counts uses of the ring since the kernel began."""

    full: Any
    empty: Any
    stages: int
    producer_lanes: int = 1
    consumer_lanes: int = 1
    consumer_fences: bool = False

    @property
    def _has_power_of_two(self) -> bool:
        return self.stages & (self.stages - 1) == 0

    def stage(self, step):
        return step & (self.stages - 1) if self._has_power_of_two else step % self.stages

    def _parity(self, step):
        used = step >> (self.stages.bit_length() - 1) if self._has_power_of_two else step // self.stages
        return used & 1

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


@device_struct
class Rings:
    """Rings of a kernel by the name of their edge, and None for edges that the kernel does not have.

    K and V of MLA are the left and right halves of a key. Loaded and converted tiles are the tiles before and after
    dequantization or a transpose, see each kernel's edges. Operand A is dequantized K or V^T in tensor memory. Relayed
    tiles are the tiles of the other CTA of a pair, see ``sm100/common/pair.py``.
    """

    q: Ring
    k: Ring
    v: Ring
    work: Ring
    loaded_k: Ring | None = None
    loaded_v: Ring | None = None
    converted_k: Ring | None = None
    converted_v: Ring | None = None
    partial: Ring | None = None
    a: Ring | None = None
    leaf: Ring | None = None
    s: Ring | None = None
    p: Ring | None = None
    factor: Ring | None = None
    o: Ring | None = None
    relayed_q: Ring | None = None
    relayed_k: Ring | None = None
    relayed_v: Ring | None = None
    ticket: Ring | None = None


@cute.jit
def create_rings(barriers, edges: cutlass.Constexpr) -> Rings:
    """Initialise the barriers in one thread of the CTA, and return the rings. The caller synchronises."""
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
    return Rings(**{edge.name: ring for edge, ring in zip(edges, rings, strict=True)})


class NamedBarrier(enum.IntEnum):
    """Barriers of kernels whose consumers are warpgroups or warps with S, P and O in registers."""

    PING_PONG = 1  # 1 to 3, by consumer warpgroup: its turn at the tensor cores
    WARPGROUP = 4  # 4 to 6, by consumer warpgroup: its four warps meet
    COMBINE = 7  # warpgroups that combine partials
    ALL_CONSUMERS = 8  # all consumer warps, whose products are in tensor memory
    DEQUANT = 11  # the warpgroup that dequantizes in place, also of kernels with barriers of ``SoftmaxBarrier``


class SoftmaxBarrier(enum.IntEnum):
    """Barriers of kernels whose S and O are in tensor memory."""

    TILE = 1  # 1 and 2, by query tile: whether all of its rows leave a tile of keys out
    ROWS = 3  # 3 to 10, by 32 rows of a query tile: the two warps that share rows exchange values
