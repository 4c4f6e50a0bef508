"""tcgen05.alloc, dealloc and relinquish_alloc_permit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes
from ..errors import MemoryFault
from ..machine.state import BLOCK, Cluster, Warp, array_at, first_lane
from ..native.layout import CLOCK_KNOWN, CLOCK_WARP, TOUCH_ASYNC, TOUCH_WRITE, WARP_PARTS
from ..ptx import Instr
from .bulk import clock_copy, join
from .operands import address_operand
from .tensor_memory import ALL_GROUPS, COLUMNS, Mark, TensorMemory, converged, tensor_memory, touch, wait_for_lanes
from .tensor_queue import group_ctas

if TYPE_CHECKING:
    from ..machine.machine import Machine


def meet_peer(m: Machine, w: Warp, frag: int, what: str, n: int, pc: int) -> object:
    """Wait until a warp of the peer CTA executes the same instruction.

    PTX ISA, "tcgen05 issue granularity": with .cta_group::2 two warps, one in each CTA of the pair, perform allocation
    instructions together. The first may block until the second arrives.
    """
    own, peer = (tensor_memory(m, cta) for cta in sorted(group_ctas(w, True), key=lambda cta: cta is not w.cta))
    if w.id not in own.joined:
        own.joined[w.id] = len(own.meetings)
        own.meetings.append((what, n))
        m.progress()
    k = own.joined[w.id]
    if len(peer.meetings) <= k:
        return m.block(w, frag, lambda: len(peer.meetings) > k, f"{what} of {n} columns by the peer CTA")
    if peer.meetings[k] != (what, n):
        other, columns = peer.meetings[k]
        raise MemoryFault(
            f"{w}: {what} of {n} columns with .cta_group::2 meets {other} of {columns} columns in the peer CTA\n"
            f"  {m.where(pc)}"
        )
    del own.joined[w.id]
    return None


@decodes("tcgen05.alloc")
def alloc(c: Context, i: Instr) -> Op:
    target, count, pair = address_operand(c, i.args[0]), c.src(i.args[1], "u32"), "cta_group::2" in i.parts

    def run(m: Machine, w: Warp, frag: int, mask: int) -> object:
        if not converged(m, w, frag, mask):
            return wait_for_lanes(m, w, frag)
        lane = first_lane(mask)
        n = w.get32(count, lane)
        tm = tensor_memory(m, w.cta)
        # PTX ISA, "tcgen05.alloc": a power of two from 32 to 512; no allocation after the permit has been relinquished.
        if n < 32 or n > COLUMNS or n & (n - 1):
            raise MemoryFault(
                f"{w}: tcgen05.alloc of {n} columns: not a power of two from 32 to 512\n  {m.where(i.pc)}"
            )
        if tm.relinquished:
            raise MemoryFault(f"{w}: tcgen05.alloc after tcgen05.relinquish_alloc_permit\n  {m.where(i.pc)}")
        start = tm.reserved.get(w.id)
        if start is None:
            fit = next((k for k, (_, size) in enumerate(tm.free) if size >= n), None)
            if fit is None:
                return m.block(w, frag, lambda: any(size >= n for _, size in tm.free), f"tcgen05.alloc of {n} columns")
            start, size = tm.free[fit]
            tm.free[fit : fit + 1] = [(start + n, size - n)] if size > n else []
            tm.allocated[start] = n
        if pair:
            tm.reserved[w.id] = start
            if meet_peer(m, w, frag, "tcgen05.alloc", n, i.pc) is not None:
                return BLOCK
            del tm.reserved[w.id]
        if m.tracked and tm.freed is not None:
            join(w.vc_address, tm.freed.ctypes.data, tm.freed.size)
        cta, offset = w.cta.cluster.resolve(target.of(w, lane) & 0xFFFFFFFF)
        cta.smem[offset : offset + 4].view(np.uint32)[0] = start
        if cta.init is not None:
            cta.init[offset : offset + 4] = 1
        if m.tracked:
            # The address arrives through the async proxy but counts as written when the instruction completes.
            vc = w.vc_address
            m.core.core_shadow_bytes(
                m.address, cta.address, offset, 4, TOUCH_WRITE | TOUCH_ASYNC, w.state.agent, own_clock(w), vc, i.pc
            )
        m.progress()
        return None

    return c.python(run)


def own_clock(w: Warp) -> int:
    return int(array_at(w.vc_address, w.state.agent + 1, np.int32)[w.state.agent])


@decodes("tcgen05.dealloc")
def dealloc(c: Context, i: Instr) -> Op:
    base, count, pair = c.src(i.args[0], "u32"), c.src(i.args[1], "u32"), "cta_group::2" in i.parts

    def run(m: Machine, w: Warp, frag: int, mask: int) -> object:
        if not converged(m, w, frag, mask):
            return wait_for_lanes(m, w, frag)
        lane = first_lane(mask)
        start, n = w.get32(base, lane) & 0xFFFF, w.get32(count, lane)
        tm = tensor_memory(m, w.cta)
        if tm.allocated.get(start) != n:
            raise MemoryFault(f"{w}: tcgen05.dealloc of columns {start}+{n} matches no allocation\n  {m.where(i.pc)}")
        if pair and meet_peer(m, w, frag, "tcgen05.dealloc", n, i.pc) is not None:
            return BLOCK
        del tm.allocated[start]
        if m.tracked:
            free_clock(m, w, tm, start, n, i.pc)
        tm.released.append((start, n))
        tm.free = sorted([*tm.free, (start, n)])
        m.progress()
        return None

    return c.python(run)


def free_clock(m: Machine, w: Warp, tm: TensorMemory, start: int, n: int, pc: int) -> None:
    """Record a dealloc: barriers must order all accesses before it. It needs no fence unless they are relaxed.

    PTX ISA, "issue granularity": it suffices that no access is concurrent.
    """
    clock = clock_copy(m, w).reshape(WARP_PARTS, -1)
    clock[CLOCK_WARP] = np.maximum(clock[CLOCK_WARP], clock[CLOCK_KNOWN])
    touch(m, w.cta, ALL_GROUPS, [(start, n)], True, Mark(w.state.agent, own_clock(w), clock), pc)
    tm.freed = clock if tm.freed is None else np.maximum(tm.freed, clock)


@decodes("tcgen05.relinquish_alloc_permit")
def relinquish(c: Context, i: Instr) -> Op:
    def run(m: Machine, w: Warp, frag: int, mask: int) -> object:
        if not converged(m, w, frag, mask):
            return wait_for_lanes(m, w, frag)
        tensor_memory(m, w.cta).relinquished = True
        return None

    return c.python(run)


def at_cluster_end(m: Machine, cluster: Cluster) -> None:
    for cta in cluster.ctas:
        tm = cta.engine.get("tmem")
        if tm is not None and tm.allocated:
            raise MemoryFault(
                f"cta {cta.id} exited without freeing tensor-memory columns {tm.allocated} (start: count)"
            )
