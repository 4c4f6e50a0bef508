"""The queue of tensor-core work of a CTA or CTA pair, and its clock for the race detector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import EmulatorError
from ..machine.state import Cta, Warp
from .bulk import join, keep

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
    """The tensor-core queue's clock for the race detector."""

    agent: int
    clock: int = 0
    vc: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))


def queue_clock(m: Machine, w: Warp, ctas: list[Cta]) -> tuple[np.ndarray, QueueClock]:
    """Advance the queue's clock for one operation issued by ``w``."""
    cluster, key = w.cta.cluster, queue_key(ctas)
    q = cluster.engine.get(("clock", key))
    if q is None:
        agent = cluster.agent(m.address, key, f"tensor core of cta {ctas[0].id}")
        q = cluster.engine["clock", key] = QueueClock(agent, 0, np.zeros(2 * m.state.cap, np.int32))
    join(q.vc.ctypes.data, w.vc_address, 2 * m.state.cap)
    q.clock += 1
    q.vc[q.agent] = q.clock
    stamp = q.vc.copy()
    keep(m, cluster, stamp)
    return stamp, q
