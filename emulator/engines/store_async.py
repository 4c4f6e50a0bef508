"""st.async: stores of registers to the shared memory of a cluster that complete bytes on an mbarrier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes, items
from ..errors import MemoryFault, Unsupported
from ..machine.state import Warp, lanes_of
from ..native.layout import OFFSET_MASK, RANK_SHIFT, SHARED_PARTS, TOUCH_WRITE
from ..ptx import Instr, type_size
from . import bulk
from .operands import Address, address_operand

if TYPE_CHECKING:
    from ..machine.machine import Machine


@dataclass
class AsyncStore:
    """Decoded st.async; calling it executes the instruction."""

    pc: int
    target: Address
    signal: Address
    rows: list[int]
    size: int  # bytes of an element

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> None:
        n = self.size * len(self.rows)
        for lane in lanes_of(mask):
            target, signal = (a.of(w, lane) & 0xFFFFFFFF for a in (self.target, self.signal))
            # PTX ISA, "st.async": the mbarrier is in the CTA of the destination.
            if target % n or target >> RANK_SHIFT != signal >> RANK_SHIFT:
                raise MemoryFault(
                    f"{w} lane {lane}: st.async of {n} bytes to {target:#x} with the mbarrier at {signal:#x}: not "
                    f"aligned, or in another CTA\n  {m.where(self.pc)}"
                )
            get = w.get64 if self.size == 8 else w.get32
            values = [get(row, lane) for row in self.rows]
            self.issue(m, w, lane, target, signal, np.array(values, f"<u{self.size}").view(np.uint8))

    def issue(self, m: Machine, w: Warp, lane: int, target: int, signal: int, data: np.ndarray) -> None:
        """Store ``data`` later. PTX ISA: a weak store, with a release of cluster scope at the mbarrier."""
        cta, pc, offset = w.cta.cluster.resolve(target)[0], self.pc, target & OFFSET_MASK
        if m.tracked:
            b = bulk.mbarrier(m, w, pc, signal)
            stamp = bulk.clock_copy(m, w, lane)
            bulk.join(b.vc, stamp.ctypes.data, SHARED_PARTS * m.state.cap)
            stamp[b.agent] = b.phase + 1
            bulk.keep(m, w.cta.cluster, stamp)
            bulk.arrives(m, w, cta, signal, b.agent, b.phase + 1, pc)
            m.core.core_shadow_bytes(
                m.address, cta.address, offset, data.size, TOUCH_WRITE, b.agent, b.phase + 1, stamp.ctypes.data, pc
            )

        def run() -> None:
            if cta.exited or offset + data.size > cta.smem_size:
                raise MemoryFault(f"st.async to {target:#x}, outside of a running CTA's shared memory: {m.where(pc)}")
            cta.smem[offset : offset + data.size] = data
            if cta.init is not None:
                cta.init[offset : offset + data.size] = 1
            m.check(m.core.core_complete_tx(m.address, w.address, pc, signal, data.size))

        m.post(run, ("st.async", m.events_issued), f"st.async: {m.where(pc)}", w.cta.cluster, pc)


@decodes("st.async")
def store_async(c: Context, i: Instr) -> Op:
    if "mbarrier::complete_tx::bytes" not in i.op or "shared::cluster" not in i.op:
        raise Unsupported(i.op)
    t = i.parts[-1]
    rows = [c.src(x, t) for x in items(i.args[1])]
    return c.python(AsyncStore(i.pc, address_operand(c, i.args[0]), address_operand(c, i.args[2]), rows, type_size(t)))
