"""clusterlaunchcontrol: a running cluster takes over a cluster of the grid that has not started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes, items
from ..machine.state import Warp, first_lane
from ..native.layout import SHARED_PARTS, TOUCH_ASYNC, TOUCH_WRITE
from ..ptx import SINK, Instr
from .bulk import arrives, clock_copy, join, keep, mbarrier

if TYPE_CHECKING:
    from ..machine.machine import Machine

# The response is opaque in PTX. The emulator stores the first CTA id of the cancelled cluster, then a flag word.
RESPONSE_BYTES = 16


@decodes("clusterlaunchcontrol.try_cancel")
def try_cancel(c: Context, i: Instr) -> Op:
    from .operands import address_operand

    target, bar = address_operand(c, i.args[0]), address_operand(c, i.args[1])
    everywhere = "multicast::cluster::all" in i.op

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        lane, cluster = first_lane(mask), w.cta.cluster
        cta, offset = cluster.resolve(target.of(w, lane) & 0xFFFFFFFF)
        signal = bar.of(w, lane) & 0xFFFFFFFF
        taken = m.pending.popleft() if m.pending else None
        response = np.array([*(taken or (0, 0, 0)), int(taken is not None)], np.uint32).view(np.uint8)
        targets = [(t, t.rank << 24 | signal & 0xFFFFFF) for t in cluster.ctas] if everywhere else [(cta, signal)]
        if m.tracked:
            for t, s in targets:
                b = mbarrier(m, w, i.pc, s)
                stamp = clock_copy(m, w, lane)
                join(b.vc, stamp.ctypes.data, SHARED_PARTS * m.state.cap)
                stamp[b.agent] = b.phase + 1
                keep(m, cluster, stamp)
                arrives(m, w, t, s, b.agent, b.phase + 1, i.pc)
                m.core.core_shadow_bytes(
                    m.address, t.address, offset, RESPONSE_BYTES, TOUCH_WRITE | TOUCH_ASYNC, b.agent, b.phase + 1,
                    stamp.ctypes.data, i.pc,
                )  # fmt: skip

        def answer() -> None:
            for t, s in targets:
                t.smem[offset : offset + RESPONSE_BYTES] = response
                if t.init is not None:
                    t.init[offset : offset + RESPONSE_BYTES] = 1
                m.check(m.core.core_complete_tx(m.address, w.address, i.pc, s, RESPONSE_BYTES))

        m.post(answer, ("launch control", cluster.index), f"try_cancel: {m.where(i.pc)}", cluster, i.pc)

    return c.python(run)


@decodes("clusterlaunchcontrol.query_cancel")
def query_cancel(c: Context, i: Instr) -> Op:
    what = i.parts[2]
    source = c.src(i.args[1], "b128")
    predicate = c.pred_dst(i.args[0]) if what == "is_canceled" else None
    rows = []
    if predicate is None:
        rows = [None if r is SINK else c.dst(r, "b32") for r in items(i.args[0])]
    axis = 0 if len(rows) > 1 else max(0, "xyz".find(what[-1]))

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        words = w.raw[source : source + 512].view(np.uint32).reshape(32, 4)
        if predicate is not None:
            w.put_pred(predicate, mask, sum(1 << k for k in range(32) if words[k, 3]))
            return
        for k, row in enumerate(rows[:3]):
            if row is not None:
                w.put32(row, mask, words[:, axis + k])

    return c.python(run)
