"""State of every CTA, warp and asynchronous operation at a deadlock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..native.layout import WAIT_CONVERGE, WAIT_NO, WAIT_PYTHON, WAIT_TRY, WAIT_WORD, Frag

if TYPE_CHECKING:
    from ..machine.machine import Machine
    from ..machine.state import Cta, Warp


def waiting_for(machine: Machine, w: Warp, f: Frag) -> str:
    if f.wait == WAIT_NO:
        return "ready"
    if f.wait == WAIT_TRY:
        cta, offset = w.cta.cluster.resolve(f.info[0])
        for b in cta.mbarriers():
            if b.offset == offset:
                return f"waits for mbarrier {offset:#x} of rank {cta.rank}, parity {f.info[1]} (phase {b.phase})"
        return f"waits for mbarrier {offset:#x}"
    if f.wait == WAIT_WORD:
        if f.info[0] == -2:
            return "waits for the other warps of its warpgroup (wgmma.wait_group)"
        if f.info[0] < 0:
            return "waits at the cluster barrier"
        b = w.cta.state.bars[f.info[0]]
        return f"waits at barrier {f.info[0]} ({b.arrived} of {b.expected} threads)"
    if f.wait == WAIT_CONVERGE:
        missing = w.state.live & f.want & ~f.mask & 0xFFFFFFFF
        return f"waits for lanes {missing:#010x} of its warp"
    if f.wait == WAIT_PYTHON:
        return f"waits: {w.waits.get(f.pc, (None, 'asynchronous operation'))[1]}"
    return "?"


def _barriers(cta: Cta) -> list[str]:
    out = []
    for b in sorted(cta.mbarriers(), key=lambda b: b.offset):
        if b.alive:
            tx = f", {b.tx} transaction bytes outstanding" if b.tx else ""
            out.append(f"    mbarrier {b.offset:#x}: phase {b.phase}, {b.pending} of {b.count} arrivals pending{tx}")
    for k, n in enumerate(cta.state.bars):
        if n.arrived:
            out.append(f"    barrier {k}: {n.arrived} of {n.expected} threads arrived")
    return out


def dump(machine: Machine) -> str:
    """Describe every CTA with its barriers, every warp with its position, and every pending asynchronous operation."""
    out = []
    for cluster in machine.active:
        for cta in cluster.ctas:
            out.append(f"CTA {cta.id}, rank {cta.rank}:")
            out += _barriers(cta)
            for w in cta.warps:
                if not w.state.live:
                    out.append(f"    warp {w.id}: exited")
                for k in range(w.state.n_frags):
                    f = w.state.frags[k]
                    lanes = "" if f.mask == 0xFFFFFFFF else f" lanes {f.mask:#010x}"
                    out.append(f"    warp {w.id}{lanes}: {waiting_for(machine, w, f)} | {machine.where(f.pc)}")
    for queue in machine.queues.values():
        out.append(f"pending: {queue[0].what}" + (f" and {len(queue) - 1} more behind it" if len(queue) > 1 else ""))
    if machine.pending:
        out.append(f"{len(machine.pending)} clusters have not started")
    return "\n".join(out)
