"""The queue of tensor-core work of a CTA or CTA pair, and its clocks for the race detector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EmulatorError
from ..machine.state import Cluster, Cta, Warp
from ..native.layout import CLOCK_KNOWN, CLOCK_LANE, CLOCK_SENT, TOUCH_ASYNC, TOUCH_LANE, TOUCH_READ, WARP_PARTS
from .bulk import clock_copy, keep, warp_clock
from .tensor_memory import Mark

if TYPE_CHECKING:
    from ..machine.machine import Machine


def group_ctas(w: Warp, pair: bool) -> list[Cta]:
    """Return the CTAs of an instruction: the warp's own CTA, or both CTAs of its pair."""
    if not pair:
        return [w.cta]
    ctas, even = w.cta.cluster.ctas, w.cta.rank & ~1
    if even + 1 >= len(ctas):
        raise EmulatorError(f"{w}: .cta_group::2 in a cluster without a pair")
    return [ctas[even], ctas[even + 1]]


def queue_key(ctas: list[Cta]) -> tuple:
    """Return the queue's key; tensor-core work of one CTA or pair runs in order."""
    return ("tensor core", ctas[0].id)


@dataclass
class QueueClock:
    """Agents and clock of the tensor-core work that one warp issues.

    The clock of ``issued`` counts the operations too. Tensor-core work is pipelined: it is ordered behind an operation
    as soon as it is ordered behind its issue. All else waits for tcgen05.commit.
    """

    done: int
    issued: int
    clock: int = 0


def queues_of(cluster: Cluster) -> dict[tuple, QueueClock]:
    return cluster.engine.setdefault("tensor queues", {})


def advance(m: Machine, w: Warp, ctas: list[Cta]) -> tuple[np.ndarray, QueueClock]:
    """Advance the clock for an operation that ``w`` issues; return what the operation knows, [WARP_PARTS][agents]."""
    cluster, key = w.cta.cluster, (*queue_key(ctas), w.cta.rank, w.id)
    queues = queues_of(cluster)
    q = queues.get(key)
    if q is None:
        name = f"tensor core of cta {ctas[0].id}, work of {cluster.agent_names[w.state.agent]}"
        done, issued = (cluster.agent(m.address, (*key, kind), name) for kind in ("done", "issued"))
        q = queues[key] = QueueClock(done, issued)
    q.clock += 1
    warp = warp_clock(m, w)
    warp[CLOCK_KNOWN, q.issued] = warp[CLOCK_LANE, q.issued] = q.clock
    stamp = clock_copy(m, w).reshape(WARP_PARTS, -1)
    stamp[CLOCK_KNOWN, q.done] = q.clock
    keep(m, cluster, stamp)
    return stamp, q


def queue_mark(m: Machine, w: Warp, ctas: list[Cta], pc: int) -> Mark:
    """Return agent and clocks of a tensor-core operation that ``w`` issues."""
    stamp, q = advance(m, w, ctas)
    for other in queues_of(w.cta.cluster).values():
        for part in (CLOCK_KNOWN, CLOCK_SENT, CLOCK_LANE):
            stamp[part, other.done] = max(stamp[part, other.done], stamp[part, other.issued])
    for cta in ctas:
        m.core.core_incoming(m.address, w.address, cta.address, q.done, q.clock, pc)
    return Mark(q.done, q.clock, stamp, TOUCH_LANE)


def touch_chunks(m: Machine, cta: Cta, index: np.ndarray, mark: Mark, pc: int) -> None:
    """Record that a tensor-core operation reads 16-byte chunks of shared memory."""
    kind, vc = TOUCH_READ | TOUCH_ASYNC, mark.stamp.ctypes.data
    m.core.core_shadow_chunks(
        m.address, cta.address, index.ctypes.data, index.size, kind, mark.agent, mark.clock, vc, pc
    )


def commit_clocks(m: Machine, w: Warp, ctas: list[Cta], targets: list[int], pc: int) -> list[np.ndarray]:
    """Return for each target what its mbarrier learns from tcgen05.commit: the thread's own work, as after
    fence::before_thread_sync, and that the arrival has come.

    Each CTA has an agent for arrivals at it: an arrival at one CTA does not tell that another CTA's has come.
    """
    stamp, q = advance(m, w, ctas)
    np.maximum(stamp[CLOCK_SENT], stamp[CLOCK_LANE], out=stamp[CLOCK_SENT])
    stamp[CLOCK_SENT, q.done] = q.clock
    cluster, stamps = w.cta.cluster, []
    for target in targets:
        cta = cluster.resolve(target)[0]
        key = (*queue_key(ctas), w.cta.rank, w.id, "arrivals", cta.rank)
        agent = cluster.agent(m.address, key, f"tcgen05.commit of {cluster.agent_names[w.state.agent]}")
        learned = stamp.copy()
        learned[[CLOCK_KNOWN, CLOCK_SENT], agent] = q.clock
        keep(m, cluster, learned)
        stamps.append(learned)
        if len(targets) > 1 or cta is not w.cta:
            m.core.core_arrival(m.address, cta.address, agent, q.clock, pc)
    return stamps
