"""st.async and red.async: stores of registers to the shared memory of a cluster, and reductions there.

Both complete their bytes on an mbarrier.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes, items
from ..errors import MemoryFault, UninitializedRead, Unsupported
from ..machine.state import Warp, lanes_of
from ..native.layout import OFFSET_MASK, RANK_SHIFT, SHARED_PARTS, TOUCH_STRONG, TOUCH_WRITE
from ..ptx import Instr, type_size
from . import bulk
from .operands import Address, address_operand

if TYPE_CHECKING:
    from ..machine.machine import Machine


# Operation -> types: PTX ISA, "red.async".
REDUCTIONS = {
    "add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"), "inc": ("u32",), "dec": ("u32",),
    "and": ("b32",), "or": ("b32",), "xor": ("b32",),
}  # fmt: skip
COMBINE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "inc": lambda old, limit: 0 if old >= limit else old + 1,
    "dec": lambda old, limit: limit if old == 0 or old > limit else old - 1,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """One word in memory becomes ``combine(word, register)``."""

    combine: Callable[[int, int], int]
    type: np.dtype

    def of(self, memory: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Return the bytes that replace ``memory``."""
        old, value = (int(np.ascontiguousarray(x).view(self.type)[0]) for x in (memory, data))
        bits = 8 * self.type.itemsize
        return np.frombuffer((self.combine(old, value) % (1 << bits)).to_bytes(bits // 8, "little"), np.uint8)


@dataclass
class AsyncStore:
    """Decoded st.async or red.async; calling it executes the instruction."""

    pc: int
    target: Address
    signal: Address
    rows: list[int]
    size: int  # bytes of an element
    name: str = "st.async"
    reduction: Reduction | None = None

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> None:
        n = self.size * len(self.rows)
        for lane in lanes_of(mask):
            target, signal = (a.of(w, lane) & 0xFFFFFFFF for a in (self.target, self.signal))
            # PTX ISA, "st.async": the mbarrier is in the CTA of the destination.
            if target % n or target >> RANK_SHIFT != signal >> RANK_SHIFT:
                raise MemoryFault(
                    f"{w} lane {lane}: {self.name} of {n} bytes to {target:#x} with the mbarrier at {signal:#x}: not "
                    f"aligned, or in another CTA\n  {m.where(self.pc)}"
                )
            get = w.get64 if self.size == 8 else w.get32
            values = [get(row, lane) for row in self.rows]
            self.issue(m, w, lane, target, signal, np.array(values, f"<u{self.size}").view(np.uint8))

    def issue(self, m: Machine, w: Warp, lane: int, target: int, signal: int, data: np.ndarray) -> None:
        """Store or add ``data`` later. PTX ISA: with a release of cluster scope at the mbarrier.

        Reductions are relaxed, and do not race with each other.
        """
        cta, pc, offset = w.cta.cluster.resolve(target)[0], self.pc, target & OFFSET_MASK
        if m.tracked:
            b = bulk.mbarrier(m, w, pc, signal)
            stamp = bulk.clock_copy(m, w, lane)
            bulk.join(b.vc, stamp.ctypes.data, SHARED_PARTS * m.state.cap)
            stamp[b.agent] = b.phase + 1
            bulk.keep(m, w.cta.cluster, stamp)
            bulk.arrives(m, w, cta, signal, b.agent, b.phase + 1, pc)
            kind = TOUCH_WRITE | (TOUCH_STRONG if self.reduction else 0)
            m.core.core_shadow_bytes(
                m.address, cta.address, offset, data.size, kind, b.agent, b.phase + 1, stamp.ctypes.data, pc
            )

        def run() -> None:
            if cta.exited or offset + data.size > cta.smem_size:
                raise MemoryFault(
                    f"{self.name} to {target:#x}, outside of a running CTA's shared memory: {m.where(pc)}"
                )
            cells = cta.smem[offset : offset + data.size]
            if self.reduction and cta.init is not None and not cta.init[offset : offset + data.size].all():
                raise UninitializedRead(f"{self.name} on shared memory that was never written: {m.where(pc)}")
            cells[:] = self.reduction.of(cells, data) if self.reduction else data
            if cta.init is not None:
                cta.init[offset : offset + data.size] = 1
            m.check(m.core.core_complete_tx(m.address, w.address, pc, signal, data.size))

        m.post(run, (self.name, m.events_issued), f"{self.name}: {m.where(pc)}", w.cta.cluster, pc)


@decodes("st.async")
def store_async(c: Context, i: Instr) -> Op:
    if "mbarrier::complete_tx::bytes" not in i.op or "shared::cluster" not in i.op:
        raise Unsupported(i.op)
    t = i.parts[-1]
    rows = [c.src(x, t) for x in items(i.args[1])]
    return c.python(AsyncStore(i.pc, address_operand(c, i.args[0]), address_operand(c, i.args[2]), rows, type_size(t)))


@decodes("red.async")
def reduce_async(c: Context, i: Instr) -> Op:
    operation, t = i.parts[-2:]
    if "mbarrier::complete_tx::bytes" not in i.op or t not in REDUCTIONS.get(operation, ()):
        raise Unsupported(i.op)
    target, value, signal = i.args
    reduction = Reduction(COMBINE[operation], np.dtype(f"<{'i' if t[0] == 's' else 'u'}{type_size(t)}"))
    where = address_operand(c, target), address_operand(c, signal)
    return c.python(AsyncStore(i.pc, *where, [c.src(value, t)], type_size(t), "red.async", reduction))
