"""cp.async: per-lane asynchronous copies of 4 to 16 bytes (sm_80), their groups and their mbarrier form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes
from ..machine.state import Warp, lanes_of
from ..ptx import Instr, Not, Reg
from .bulk import learn, stream

if TYPE_CHECKING:
    from ..machine.machine import Machine


@dataclass
class Copy:
    """The copies of one executed instruction. ``run`` performs them and becomes None afterwards."""

    run: Callable[[], None] | None
    lanes: int  # lanes with copies that no mbarrier tracks yet
    agent: int = 0
    clock: int = 0


JOB = np.dtype([("source", np.uint64), ("target", np.uint32), ("n", np.uint32)])  # copy_job of cp_async.c
READ_ALL, READ_COUNT, READ_UNLESS = range(3)


@decodes("cp.async.ca", "cp.async.cg")
def copy(c: Context, i: Instr) -> Op:
    pc = i.pc
    extra = list(i.args[3:])
    if any("cache_hint" in p for p in i.parts) and extra:
        extra.pop()
    how = [READ_ALL, 0, 0]
    if extra and (isinstance(extra[0], Not) or (isinstance(extra[0], Reg) and extra[0].kind == "p")):
        number, negated = c.pred(extra[0])
        how = [READ_UNLESS, number, int(negated)]
    elif extra:
        how = [READ_COUNT, c.src(extra[0], "u32"), 0]

    def execute(m: Machine, w: Warp, frag: int, mask: int) -> None:
        jobs = np.empty(32, JOB)
        at = jobs.ctypes.data
        count = m.core.core_copy_jobs(m.address, w.address, pc, mask, at)
        m.check(count < 0)
        op = Copy(None, mask)
        if m.tracked:
            # Non-bulk copies belong to the generic proxy (PTX ISA, "cp.async") and need no proxy fence themselves. The
            # async proxy sees their writes only after a proxy fence.
            stamp, op.agent, op.clock = stream(m, w, "cp.async")
            vc = stamp.ctypes.data
            m.check(m.core.core_copy_track(m.address, w.address, pc, at, count, op.agent, op.clock, vc))
        m.add("cp.async bytes", int(jobs["n"][:count].sum()))

        def run() -> None:
            m.check(m.core.core_copy_run(m.address, w.address, pc, jobs.ctypes.data, count))

        if m.defers(pc):
            op.run = run
        else:
            run()
        w.cp_async.append(op)

    words = []
    for a in i.args[:2]:
        row, offset, wide = c.address(a)
        words += [row, offset & 0xFFFFFFFF, int(wide)]
    op = c.python(execute)
    op.words, op.size = [*words, *how], i.args[2].bits
    return op


def complete(m: Machine, w: Warp, ops: list[Copy]) -> None:
    for op in ops:
        if op.run is not None:
            op.run()
        if m.tracked:
            learn(m, w, op.agent, op.clock)


@decodes("cp.async.commit_group")
def commit(c: Context, i: Instr) -> Op:
    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        w.cp_groups.append(w.cp_async)
        w.cp_async = []

    return c.python(run)


@decodes("cp.async.wait_group", "cp.async.wait_all")
def wait(c: Context, i: Instr) -> Op:
    everything = i.parts[2] == "wait_all"
    n = 0 if everything else i.args[0].bits

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        if everything:
            w.cp_groups.append(w.cp_async)
            w.cp_async = []
        done = len(w.cp_groups) - n
        for group in w.cp_groups[: max(0, done)]:
            complete(m, w, group)
        del w.cp_groups[: max(0, done)]

    return c.python(run)


@decodes("cp.async.mbarrier")
def arrive(c: Context, i: Instr) -> Op:
    """Decode cp.async.mbarrier.arrive: an arrival when all prior cp.async of the lane are complete.

    Without .noinc the pending count rises first, so the arrival does not consume an expected one.

    PTX ISA, "cp.async.mbarrier.arrive": the arrival tracks the copies that the executing thread initiated. The
    barrier's phase orders an instruction's copies once all participating lanes have arrived.
    """
    from .bulk import clock_copy, mbarrier
    from .operands import address_operand

    bar, noinc, pc = address_operand(c, i.args[0]), "noinc" in i.parts, i.pc

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        todo = [op for group in w.cp_groups for op in group] + w.cp_async
        for op in todo:
            op.lanes &= ~mask
        arrived = [op for op in todo if not op.lanes]
        w.cp_groups = [[op for op in group if op.lanes] for group in w.cp_groups]
        w.cp_async = [op for op in w.cp_async if op.lanes]
        addresses = [bar.of(w, lane) & 0xFFFFFFFF for lane in lanes_of(mask)]
        if not noinc:
            for a in addresses:
                mbarrier(m, w, pc, a).pending += 1
        stamp = None
        if m.tracked:
            stamp = clock_copy(m, w)
            m.core.core_clock_cut(m.address, w.address, mask, stamp.ctypes.data)
            for op in arrived:
                stamp[op.agent] = max(int(stamp[op.agent]), op.clock)

        def finish() -> None:
            for op in arrived:
                if op.run is not None:
                    op.run()
            for a in addresses:
                m.check(
                    m.core.core_arrive(m.address, w.address, pc, a, stamp.ctypes.data if stamp is not None else None)
                )

        m.post(finish, ("cp.async", w.cta.id, w.id), f"cp.async.mbarrier: {m.where(pc)}", w.cta.cluster, pc)

    return c.python(run)
