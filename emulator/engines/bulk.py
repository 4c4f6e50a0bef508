"""cp.async.bulk: plain bulk copies, bulk groups, and the clocks of asynchronous streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes
from ..errors import MemoryFault, Unsupported
from ..machine.state import Cluster, Cta, Warp, array_at, lanes_of
from ..native.layout import (
    CLOCK_KNOWN,
    CLOCK_LANE,
    CLOCK_WARP,
    OFFSET_MASK,
    SHARED_PARTS,
    TOUCH_ASYNC,
    TOUCH_READ,
    TOUCH_WRITE,
    WARP_PARTS,
    MBarrierState,
)
from ..ptx import Instr

if TYPE_CHECKING:
    from ..machine.machine import Machine


# ------------------------------------------------------------------ clocks
def clock_copy(m: Machine, w: Warp, lane: int | None = None) -> np.ndarray:
    """Return a copy of the warp's vector clock, as one operation sees it.

    An operation of one lane does not cover actions of other lanes since the last bar.warp.sync (native/shadow.c,
    core_clock_cut).
    """
    out = array_at(w.vc_address, WARP_PARTS * m.state.cap, np.int32).copy()
    if lane is not None:
        m.core.core_clock_cut(m.address, w.address, 1 << lane, out.ctypes.data)
    return out


def warp_clock(m: Machine, w: Warp) -> np.ndarray:
    """Return the warp's own vector clock, [WARP_PARTS][agents]."""
    return array_at(w.vc_address, WARP_PARTS * m.state.cap, np.int32).reshape(WARP_PARTS, -1)


def join(into: int, source: int, n: int) -> None:
    a = array_at(into, n, np.int32)
    np.maximum(a, array_at(source, n, np.int32), out=a)


def keep(m: Machine, cluster: Cluster, stamp: np.ndarray) -> None:
    """Keep a clock alive for native code while work that uses it may be deferred."""
    cluster.engine.setdefault("clocks", []).append(stamp)


def stream(m: Machine, w: Warp, kind: str, lane: int | None = None) -> tuple[np.ndarray, int, int]:
    """Return (vector clock, agent, clock) of the next operation of a warp's ordered asynchronous stream."""
    cluster = w.cta.cluster
    agent = cluster.agent(m.address, (kind, w.cta.rank, w.id), f"{kind} of warp {w.id}")
    clocks = cluster.engine.setdefault("stream clocks", {})
    clock = clocks[agent] = clocks.get(agent, 0) + 1
    stamp = clock_copy(m, w, lane)
    own = stamp.reshape(WARP_PARTS, -1)
    own[CLOCK_KNOWN, agent] = own[CLOCK_WARP, agent] = clock
    keep(m, cluster, stamp)
    return stamp, agent, clock


def learn(m: Machine, w: Warp, agent: int, clock: int) -> None:
    """Record in the warp's clock that this operation of a stream is complete."""
    if agent:
        vc = warp_clock(m, w)
        for part in (CLOCK_KNOWN, CLOCK_WARP, CLOCK_LANE):
            vc[part, agent] = max(int(vc[part, agent]), clock)


def mbarrier(m: Machine, w: Warp, pc: int, address: int) -> MBarrierState:
    found = m.core.core_mbarrier(m.address, w.address, pc, address)
    if not found:
        m.check(1)
    return MBarrierState.from_address(found)


def arrives(m: Machine, w: Warp, cta: Cta, signal: int, agent: int, clock: int, pc: int) -> None:
    """Record that a copy reaches ``cta`` and the CTA of the mbarrier that it signals; see native/exit.c."""
    for reached in (cta, w.cta.cluster.resolve(signal)[0]):
        m.core.core_incoming(m.address, w.address, reached.address, agent, clock, pc)


# ------------------------------------------------------------------ bulk groups
@dataclass
class BulkCopy:
    """A bulk operation that reads shared memory: ``read`` when its source is free, ``done`` when it is complete."""

    read: bool = False
    done: bool = False
    waited: bool = False  # a wait_group has covered this operation
    agent: int = 0
    clock: int = 0


@dataclass
class Groups:
    current: list[BulkCopy] = field(default_factory=list)
    committed: list[list[BulkCopy]] = field(default_factory=list)


def begin(w: Warp, lane: int) -> BulkCopy:
    copy = BulkCopy()
    w.bulk.setdefault(lane, Groups()).current.append(copy)
    return copy


@decodes("cp.async.bulk.commit_group")
def commit(c: Context, i: Instr) -> Op:
    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        for lane, g in w.bulk.items():
            if mask >> lane & 1 and g.current:
                g.committed.append(g.current)
                g.current = []

    return c.python(run)


@decodes("cp.async.bulk.wait_group")
def wait(c: Context, i: Instr) -> Op:
    read_only, n = "read" in i.parts, i.args[0].bits

    def run(m: Machine, w: Warp, frag: int, mask: int) -> object:
        todo = []
        for lane, g in w.bulk.items():
            if mask >> lane & 1:
                todo += [op for group in g.committed[: len(g.committed) - n] for op in group]

        def ready() -> bool:
            return all((op.read if read_only else op.done) for op in todo)

        if not ready():
            return m.block(w, frag, ready, f"cp.async.bulk.wait_group {n}")
        for op in todo:
            op.waited = True
            if m.tracked:
                learn(m, w, op.agent, op.clock)
        for g in w.bulk.values():
            while len(g.committed) > n and all(op.done for op in g.committed[0]):
                g.committed.pop(0)
        return None

    return c.python(run)


def at_cta_exit(m: Machine, cta: Cta) -> None:
    """Check at CTA exit that bulk operations have read their shared memory, which the next CTA then reuses."""
    for w in cta.warps:
        for g in w.bulk.values():
            if any(not op.waited for group in [g.current, *g.committed] for op in group):
                m.warn(
                    f"CTA exits while a bulk store of warp {w.id} may still read its shared memory: "
                    "no wait_group covers it"
                )


def at_cluster_end(m: Machine, cluster: Cluster) -> None:
    """Look for bytes that an mbarrier still expects. They harm nobody on hardware, unless a copy is still in flight."""
    for cta in cluster.ctas:
        for b in cta.mbarriers():
            if b.alive and b.tx:
                side = "were announced but never arrived" if b.tx > 0 else "arrived but were never announced"
                text = f"cta {cta.id}: the mbarrier at {b.offset:#x} ends with {abs(b.tx)} bytes that {side}"
                if m.options.sync:
                    m.other_hazards.append(f"sync: {text}")
                else:
                    m.warn(text)


# ------------------------------------------------------------------ cp.async.bulk
@dataclass
class BulkCopyOp:
    """Decoded cp.async.bulk; calling it executes the instruction."""

    pc: int
    to_shared: bool
    from_global: bool
    dst: object
    src: object
    size: int  # row
    bar: object = None
    multicast: int | None = None
    reduce: int = -1
    format: int = 0

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> None:
        for lane in lanes_of(mask):
            n = w.get32(self.size, lane)
            dst, src = self.dst.of(w, lane), self.src.of(w, lane)  # type: ignore[attr-defined]
            # PTX ISA, "cp.async.bulk": size and both addresses are multiples of 16.
            if n % 16 or dst % 16 or src % 16:
                raise MemoryFault(
                    f"{w} lane {lane}: bulk copy of {n} bytes from {src:#x} to {dst:#x}: not multiples of 16\n"
                    f"  {m.where(self.pc)}"
                )
            if self.to_shared:
                self.load(m, w, lane, dst & 0xFFFFFFFF, src, n)
            else:
                self.store(m, w, lane, dst, src & 0xFFFFFFFF, n)

    def load(self, m: Machine, w: Warp, lane: int, dst: int, src: int, n: int) -> None:
        cluster, pc = w.cta.cluster, self.pc
        bar = self.bar.of(w, lane) & 0xFFFFFFFF  # type: ignore[attr-defined]
        if self.multicast is None:
            targets = [(cluster.resolve(dst)[0], bar)]
        else:
            ranks = [r for r in range(16) if w.get16(self.multicast, lane) >> r & 1]
            targets = [(cluster.resolve(r << 24)[0], r << 24 | bar & OFFSET_MASK) for r in ranks]
        offset = dst & OFFSET_MASK
        m.add("bulk load bytes", n * len(targets))
        source_cta, source_offset = (None, 0) if self.from_global else cluster.resolve(src & 0xFFFFFFFF)
        vc = agent = clock = 0
        if m.tracked:
            for cta, signal in targets:
                b = mbarrier(m, w, pc, signal)
                stamp = clock_copy(m, w, lane)
                join(b.vc, stamp.ctypes.data, SHARED_PARTS * m.state.cap)
                agent, clock = b.agent, b.phase + 1
                stamp[agent] = clock
                keep(m, cluster, stamp)
                vc = stamp.ctypes.data
                arrives(m, w, cta, signal, agent, clock, pc)
                touch = m.core.core_shadow_bytes
                if source_cta is not None:
                    m.core.core_incoming(m.address, w.address, source_cta.address, agent, clock, pc)
                    touch(
                        m.address, source_cta.address, source_offset, n, TOUCH_READ | TOUCH_ASYNC, agent, clock, vc, pc
                    )
                touch(m.address, cta.address, offset, n, TOUCH_WRITE | TOUCH_ASYNC, agent, clock, vc, pc)

        def run() -> None:
            buffer = np.empty(n, np.uint8)
            if source_cta is None:
                status = m.core.core_bulk_read(m.address, w.address, pc, src, buffer.ctypes.data, n, vc, agent, clock)
            else:
                status = m.core.core_smem_read(
                    m.address, w.address, pc, source_cta.address, source_offset, 0, buffer.ctypes.data, n, 16
                )
            m.check(status)
            for cta, signal in targets:
                m.check(
                    m.core.core_smem_write(
                        m.address, w.address, pc, cta.address, offset, 0, buffer.ctypes.data, n, 0, 16
                    )
                )
                m.check(m.core.core_complete_tx(m.address, w.address, pc, signal, n))

        m.post(run, ("bulk", m.events_issued), f"bulk load: {m.where(pc)}", cluster, pc)

    def store(self, m: Machine, w: Warp, lane: int, dst: int, src: int, n: int) -> None:
        cta, offset = w.cta.cluster.resolve(src)
        copy, pc = begin(w, lane), self.pc
        m.add("bulk store bytes", n)
        vc = agent = clock = 0
        if m.tracked:
            stamp, agent, clock = stream(m, w, "bulk store", lane)
            copy.agent, copy.clock, vc = agent, clock, stamp.ctypes.data
            m.core.core_shadow_bytes(m.address, cta.address, offset, n, TOUCH_READ | TOUCH_ASYNC, agent, clock, vc, pc)
        buffer = np.empty(n, np.uint8)

        def read() -> None:
            m.check(m.core.core_smem_read(m.address, w.address, pc, cta.address, offset, 0, buffer.ctypes.data, n, 16))
            copy.read = True

        def write() -> None:
            m.check(
                m.core.core_bulk_write(
                    m.address, w.address, pc, dst, buffer.ctypes.data, n, self.reduce, self.format, vc, agent, clock
                )
            )
            copy.done = True

        key = ("bulk", m.events_issued)
        m.post(read, key, f"bulk store, reading: {m.where(pc)}", w.cta.cluster, pc)
        m.post(write, key, f"bulk store, writing: {m.where(pc)}", w.cta.cluster, pc)


@decodes("cp.async.bulk", "cp.reduce.async.bulk")
def bulk_copy(c: Context, i: Instr) -> Op:
    from ..decode.memory import FORMATS
    from .operands import REDUCTIONS, address_operand

    p = i.parts
    k = p.index("bulk")
    to, source = p[k + 1], p[k + 2]
    if "cp_mask" in p:
        raise Unsupported(i.op)
    op = BulkCopyOp(
        i.pc,
        to.startswith("shared"),
        source == "global",
        address_operand(c, i.args[0]),
        address_operand(c, i.args[1]),
        c.src(i.args[2], "u32"),
    )
    if op.to_shared:
        op.bar = address_operand(c, i.args[3])
        if "multicast::cluster" in p:
            op.multicast = c.src(i.args[4], "b16")
    if p[1] == "reduce":
        if op.to_shared:
            raise Unsupported(i.op)
        op.reduce, op.format = next(REDUCTIONS[x] for x in p if x in REDUCTIONS), FORMATS[p[-1]]
    return c.python(op)


@decodes("cp.async.bulk.prefetch")
def prefetch(c: Context, i: Instr) -> Op:
    return c.nop()
