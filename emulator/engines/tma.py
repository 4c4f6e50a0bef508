"""cp.async.bulk.tensor: tiled tensor copies between global and swizzled shared memory.

Each active lane issues its own copy, because PTX elects no lane. Loads count their bytes on an mbarrier. Stores and
reductions belong to the bulk group of the issuing lane.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..decode.op import Context, Op, decodes, items
from ..errors import MemoryFault, Unsupported
from ..machine.state import AGAIN, Warp, first_lane, lanes_of
from ..native.layout import OFFSET_MASK, SHARED_PARTS, TOUCH_ASYNC, TOUCH_READ, TOUCH_WRITE, WINDOW_SHIFT
from ..ptx import Instr
from . import bulk
from .operands import REDUCTIONS, Address, address_operand
from .tensor_map import TensorMap, decode

if TYPE_CHECKING:
    from ..machine.machine import Machine
    from ..machine.state import Cta

_maps: dict[bytes, TensorMap] = {}


def tensor_map(m: Machine, address: int) -> TensorMap:
    """Return the descriptor at a generic address: a __grid_constant__ parameter or global memory."""
    if address >> WINDOW_SHIFT == 4:
        raw = m.param_bytes[address & 0xFFFFFFFF :][:64]
    else:
        pointer = m.core.core_host_pointer(m.address, address, address + 128)
        if not pointer:
            raise Unsupported(f"tensor map at {m.memory.describe(address)}")
        raw = ctypes.string_at(pointer, 64)
    found = _maps.get(raw)
    if found is None:
        found = _maps[raw] = decode(raw)
    return found


def publish(m: Machine, address: int) -> bool:
    """Give the native path a decoded descriptor from the kernel parameters; return False for descriptors elsewhere."""
    offset = address & 0xFFFFFFFF
    if address >> WINDOW_SHIFT != 4 or offset % 64:
        return False
    m.maps[offset // 64] = ctypes.addressof(tensor_map(m, address).native)
    return True


@dataclass
class TensorCopy:
    """Decoded operands of one cp.async.bulk.tensor; calling it executes the instruction."""

    pc: int
    load: bool
    map: Address
    dims: int
    coords: list[int]  # rows; the gather form has more rows than dims
    shared: Address
    bar: Address | None = None
    multicast: int | None = None  # row of the CTA mask
    pair: bool = False  # .cta_group::2: the barrier address names the CTA of the pair that gets the signal
    reduce: int = -1
    gather4: bool = False

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> object:
        native = self.load and self.multicast is None and not self.gather4 and m.options.schedule == "eager"
        # Decode a descriptor that the native path has not seen, then let the path try again.
        if native and publish(m, self.map.of(w, first_lane(mask))):
            return AGAIN
        for lane in lanes_of(mask):
            tm = tensor_map(m, self.map.of(w, lane))
            if tm.rank != self.dims:  # an illegal instruction on an H200
                raise MemoryFault(
                    f"{w} lane {lane}: tensor copy of {self.dims} dimensions through a tensor map of {tm.rank}\n"
                    f"  {m.where(self.pc)}"
                )
            at = [int(np.int32(np.uint32(w.get32(row, lane)))) for row in self.coords]
            if self.load:
                self.issue_load(m, w, lane, tm, at)
            else:
                self.issue_store(m, w, lane, tm, at)
        return None

    # -- loads
    def targets(self, w: Warp, lane: int, shared: int, bar: int) -> list[tuple[Cta, int]]:
        """Return (receiving CTA, full address of the mbarrier that counts its bytes) for each copy of the tile."""
        cluster = w.cta.cluster
        cta, _ = cluster.resolve(shared)
        if self.multicast is None:
            return [(cta, bar)]
        ranks = w.get16(self.multicast, lane)
        out = []
        for rank in range(16):
            if ranks >> rank & 1:
                # PTX ISA, "cp.async.bulk.tensor": with .cta_group::2 the signal goes to the even or odd CTA of the
                # destination's pair. The parity of the barrier's own CTA selects between them.
                owner = (rank & ~1) | (bar >> 24 & 1) if self.pair else rank
                out.append((cluster.resolve(rank << 24)[0], owner << 24 | bar & OFFSET_MASK))
        return out

    def issue_load(self, m: Machine, w: Warp, lane: int, tm: TensorMap, at: list[int]) -> None:
        assert self.bar is not None
        shared = self.shared.of(w, lane) & 0xFFFFFFFF
        bar = self.bar.of(w, lane) & 0xFFFFFFFF
        offset = shared & OFFSET_MASK
        targets = self.targets(w, lane, shared, bar)
        boxes = [[at[0], y] for y in at[1:5]] if self.gather4 else [at]
        pointer = ctypes.addressof(tm.native)
        size = m.core.core_tma_bytes(pointer)
        m.add("tensor load bytes", size * len(boxes) * len(targets))
        vc = agent = clock = 0
        if m.tracked:
            vc, agent, clock = self.track_load(m, w, lane, targets, offset, tm, size * len(boxes))
        pc = self.pc

        def run() -> None:
            buffer = np.empty(size * len(boxes), np.uint8)
            for k, box in enumerate(boxes):
                at_box = (ctypes.c_int32 * 5)(*box)
                m.check(
                    m.core.core_tma_gather(
                        m.address,
                        w.address,
                        pc,
                        pointer,
                        ctypes.addressof(at_box),
                        buffer.ctypes.data + k * size,
                        vc,
                        agent,
                        clock,
                    )
                )
            for cta, signal in targets:
                if cta.exited:
                    raise MemoryFault(f"tensor copy into the shared memory of a CTA that has exited: {m.where(pc)}")
                n, data = buffer.size, buffer.ctypes.data
                m.check(
                    m.core.core_smem_write(
                        m.address, w.address, pc, cta.address, offset, tm.native.swizzle, data, n, tm.native.expand, 128
                    )
                )
                m.check(
                    m.core.core_complete_tx(m.address, w.address, pc, signal, m.core.core_tma_transaction(pointer, n))
                )

        m.post(run, ("tma", m.events_issued), f"tensor load: {m.where(pc)}", w.cta.cluster, pc)

    def track_load(
        self, m: Machine, w: Warp, lane: int, targets, offset: int, tm: TensorMap, size: int
    ) -> tuple[int, int, int]:
        """Record a load for the race detector, with the mbarrier phase that its bytes complete as its clock.

        A load happens after its issue and before the end of that phase.
        """
        vc = agent = clock = 0
        for cta, signal in targets:
            b = bulk.mbarrier(m, w, self.pc, signal)
            stamp = bulk.clock_copy(m, w, lane)
            bulk.join(b.vc, stamp.ctypes.data, SHARED_PARTS * m.state.cap)
            agent, clock = b.agent, b.phase + 1
            stamp[agent] = clock
            vc = stamp.ctypes.data
            bulk.arrives(m, w, cta, signal, agent, clock, self.pc)
            self.touch(m, cta, offset, tm, size, TOUCH_WRITE, agent, clock, vc)
            bulk.keep(m, w.cta.cluster, stamp)
        return vc, agent, clock

    def touch(
        self, m: Machine, cta: Cta, offset: int, tm: TensorMap, size: int, how: int, agent: int, clock: int, vc: int
    ) -> None:
        """Tell the race detector of an access to a box in shared memory."""
        place = (cta.address, offset, tm.native.swizzle, size)
        m.core.core_shadow_box(m.address, *place, how | TOUCH_ASYNC, agent, clock, vc, self.pc)

    # -- stores
    def issue_store(self, m: Machine, w: Warp, lane: int, tm: TensorMap, at: list[int]) -> None:
        shared = self.shared.of(w, lane) & 0xFFFFFFFF
        cta, offset = w.cta.cluster.resolve(shared)
        pointer = ctypes.addressof(tm.native)
        size = m.core.core_tma_bytes(pointer)
        m.add("tensor store bytes", size)
        copy = bulk.begin(w, lane)
        vc = agent = clock = 0
        if m.tracked:
            stamp, agent, clock = bulk.stream(m, w, "bulk store", lane)
            vc = stamp.ctypes.data
            copy.agent, copy.clock = agent, clock
            self.touch(m, cta, offset, tm, size, TOUCH_READ, agent, clock, vc)
        buffer = np.empty(size, np.uint8)
        at_box = (ctypes.c_int32 * 5)(*at)
        pc = self.pc

        def read() -> None:
            m.check(
                m.core.core_smem_read(
                    m.address, w.address, pc, cta.address, offset, tm.native.swizzle, buffer.ctypes.data, size, 128
                )
            )
            copy.read = True

        def write() -> None:
            m.check(
                m.core.core_tma_scatter(
                    m.address,
                    w.address,
                    pc,
                    pointer,
                    ctypes.addressof(at_box),
                    buffer.ctypes.data,
                    self.reduce,
                    vc,
                    agent,
                    clock,
                )
            )
            copy.done = True

        key = ("tma", m.events_issued)
        m.post(read, key, f"tensor store, reading: {m.where(pc)}", w.cta.cluster, pc)
        m.post(write, key, f"tensor store, writing: {m.where(pc)}", w.cta.cluster, pc)


@decodes("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")
def tensor_copy(c: Context, i: Instr) -> Op:
    p = i.parts
    if any(x.startswith("im2col") or x.startswith("tile::scatter") for x in p):
        raise Unsupported(i.op)
    load = p[p.index("tensor") + 2].startswith("shared")
    mem = i.args[1 if load else 0]
    copy = TensorCopy(
        i.pc,
        load,
        address_operand(c, mem),
        int(p[p.index("tensor") + 1].removesuffix("d")),
        [c.src(x, "b32") for x in items(mem.coords[0])],
        address_operand(c, i.args[0 if load else 1]),
        pair="cta_group::2" in p,
        gather4="tile::gather4" in p,
    )
    if load:
        copy.bar = address_operand(c, i.args[2])
        if "multicast::cluster" in p:
            copy.multicast = c.src(i.args[3], "b16")
        elif not copy.gather4:
            return native_load(c, copy)
    elif p[1] == "reduce":
        copy.reduce = next(REDUCTIONS[x] for x in p if x in REDUCTIONS)
    return c.python(copy)


def native_load(c: Context, copy: TensorCopy) -> Op:
    """Build the native form: tma.c performs loads without deferral, and ``copy`` performs all others."""
    assert copy.bar is not None
    words = []
    for a in (copy.map, copy.shared, copy.bar):
        words += [a.row, a.offset & 0xFFFFFFFF, int(a.wide)]
    return c.system("tma_load", words=[*words, *copy.coords], vec=len(copy.coords), handler=copy)
