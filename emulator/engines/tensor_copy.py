"""tcgen05.cp (shared to tensor memory), tcgen05.shift and tcgen05.commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decode.op import Context, Op, decodes
from ..errors import EmulatorError, MemoryFault, Unsupported
from ..machine.state import Cta, Warp, first_lane, lanes_of
from ..native.layout import OFFSET_MASK
from ..ptx import Instr
from .tensor_core import chunks
from .tensor_memory import ALL_GROUPS, tensor_memory, touch
from .tensor_queue import commit_clocks, group_ctas, queue_key, queue_mark, touch_chunks

if TYPE_CHECKING:
    from ..machine.machine import Machine

# Multicast form -> the 32-lane quarters that receive each group of 32 source rows.
QUARTERS: dict[object, dict[int, tuple[int, ...]]] = {
    "warpx4": {0: (0, 1, 2, 3)},
    "warpx2::02_13": {0: (0, 2), 1: (1, 3)},
    "warpx2::01_23": {0: (0, 1), 1: (2, 3)},
}


def single_lane(m: Machine, w: Warp, mask: int, pc: int) -> int:
    if mask & (mask - 1):
        raise EmulatorError(
            f"{w}: a single-thread instruction is issued by {bin(mask).count('1')} lanes\n  {m.where(pc)}"
        )
    return first_lane(mask)


@dataclass
class Copy:
    """Decoded tcgen05.cp: ``rows`` x ``bits`` from shared memory, one row to a lane."""

    pc: int
    pair: bool
    rows: int
    bits: int
    form: str
    target: Any
    descriptor: int
    unpack: int  # bits of a packed source element, 0 for a plain copy

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> None:
        lane = single_lane(m, w, mask, self.pc)
        address, descriptor = self.target.of(w, lane), w.get64(self.descriptor, lane)
        ctas = group_ctas(w, self.pair)
        column, width = address & 0xFFFF, self.bits // 32
        index = chunks(m, descriptor, self.rows, self.bits // 8, True, 2)
        if m.tracked:
            mark = queue_mark(m, w, ctas, self.pc)
            for cta in ctas:
                tensor_memory(m, cta)
                touch_chunks(m, cta, index, mark, self.pc)
                touch(m, cta, ALL_GROUPS, [(column, width)], True, mark, self.pc)
        what = f"tcgen05.cp: {m.where(self.pc)}"
        m.add("tensor memory copy bytes", self.rows * self.bits // 8 * len(ctas))
        m.post(lambda: self.run(m, ctas, index, address, what), queue_key(ctas), what, w.cta.cluster, self.pc)

    def run(self, m: Machine, ctas: list[Cta], index: np.ndarray, address: int, what: str) -> None:
        column, width = address & 0xFFFF, self.bits // 32
        for cta in ctas:
            tm = tensor_memory(m, cta)
            tm.check(m, column, width, what)
            if int(index.max()) * 16 + 16 > cta.smem.size:
                raise MemoryFault(f"source outside of shared memory: {what}")
            raw = cta.smem[: cta.smem.size // 16 * 16].reshape(-1, 16)[index].reshape(self.rows, -1)
            if self.unpack:
                raw = spread(raw, self.unpack)
            words = np.ascontiguousarray(raw).view(np.uint32).reshape(self.rows, width)
            for rows, lanes in self.placement(address):
                tm.cells[lanes, column : column + width] = words[rows]
                if tm.written is not None:
                    tm.written[lanes, column : column + width] = True
        m.progress()

    def placement(self, address: int) -> list[tuple[slice, slice]]:
        if self.form in QUARTERS:
            return [
                (slice(32 * part, 32 * part + 32), slice(32 * q, 32 * q + 32))
                for part, quarters in QUARTERS[self.form].items()
                for q in quarters
            ]
        if self.rows == 4:  # .4x256b: one row to the first lane of each quarter
            lane = address >> 16 & 31
            return [(slice(q, q + 1), slice(32 * q + lane, 32 * q + lane + 1)) for q in range(4)]
        return [(slice(0, 128), slice(0, 128))]


def spread(raw: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the sixteen packed 4- or 6-bit elements of each 16-byte chunk to one byte each.

    A 4-bit element has two zeros on each side of its byte (0b00ABCD00 in CUTLASS mma_traits_sm120.hpp). A 6-bit element
    has two zeros above it (PTX ISA, "optional decompression").
    """
    chunk = raw.reshape(raw.shape[0], -1, 16).astype(np.uint32)
    out = np.empty(chunk.shape, np.uint8)
    for k in range(16):
        at = k * bits
        word = chunk[..., at // 8] | (chunk[..., min(15, at // 8 + 1)] << 8)
        out[..., k] = ((word >> (at % 8)) & ((1 << bits) - 1)) << (2 if bits == 4 else 0)
    return out.reshape(raw.shape)


@decodes("tcgen05.cp")
def copy(c: Context, i: Instr) -> Op:
    from .operands import address_operand

    p = i.parts
    shape = next(x for x in p if x[0].isdigit() and x.endswith("b"))
    rows, bits = (int(x) for x in shape[:-1].split("x"))
    form = next((x for x in p if x.startswith("warpx")), "")
    unpack = 4 if any("b4x16_p64" in x for x in p) else 6 if any("b6x16_p32" in x for x in p) else 0
    if (rows, form) not in ((128, ""), (4, ""), (32, "warpx4"), (64, "warpx2::02_13"), (64, "warpx2::01_23")):
        raise Unsupported(i.op)
    return c.python(
        Copy(
            i.pc, "cta_group::2" in p, rows, bits, form, address_operand(c, i.args[0]), c.src(i.args[1], "b64"), unpack
        )
    )


@decodes("tcgen05.shift")
def shift(c: Context, i: Instr) -> Op:
    """Decode tcgen05.shift.down: shift 32-byte elements of lanes 1.. down by one, in lanes that the address selects."""
    from .operands import address_operand

    target, pair = address_operand(c, i.args[0]), "cta_group::2" in i.parts

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        lane = single_lane(m, w, mask, i.pc)
        address, ctas = target.of(w, lane), group_ctas(w, pair)
        first, column = address >> 16 & 0xFFFF, address & 0xFFFF
        if first % 32:  # PTX ISA, "tcgen05.shift": the lane of the address is a multiple of 32
            raise MemoryFault(f"{w}: tcgen05.shift from lane {first}, not a multiple of 32\n  {m.where(i.pc)}")
        if m.tracked:
            mark = queue_mark(m, w, ctas, i.pc)
            for cta in ctas:
                tensor_memory(m, cta)
                touch(m, cta, 3 << first // 16, [(column, 8)], True, mark, i.pc)

        def move() -> None:
            for cta in ctas:
                tm = tensor_memory(m, cta)
                tm.check(m, column, 8, m.where(i.pc))
                for cells in (tm.cells, tm.written):
                    if cells is not None:
                        block = cells[first : first + 32, column : column + 8]
                        block[:-1] = block[1:].copy()
            m.progress()

        m.post(move, queue_key(ctas), f"tcgen05.shift: {m.where(i.pc)}", w.cta.cluster, i.pc)

    return c.python(run)


@decodes("tcgen05.commit")
def commit(c: Context, i: Instr) -> Op:
    """Decode tcgen05.commit: arrive on an mbarrier when all earlier tensor-core work is complete.

    The .multicast::cluster form arrives on the barrier at the same offset of every CTA in the mask.
    """
    from .operands import address_operand

    bar, pair = address_operand(c, i.args[0]), "cta_group::2" in i.parts
    ranks_row = c.src(i.args[1], "b16") if "multicast::cluster" in i.parts else None

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        ctas = group_ctas(w, pair)
        for lane in lanes_of(mask):
            address = bar.of(w, lane) & 0xFFFFFFFF
            targets = [address]
            if ranks_row is not None:
                ranks = w.get16(ranks_row, lane)
                targets = [r << 24 | address & OFFSET_MASK for r in range(16) if ranks >> r & 1]
            stamps = commit_clocks(m, w, ctas, targets, i.pc) if m.tracked else [None] * len(targets)

            def arrive(targets=targets, stamps=stamps) -> None:
                for target, stamp in zip(targets, stamps, strict=True):
                    if w.cta.cluster.resolve(target)[0].exited:
                        m.warn(f"tcgen05.commit signals a CTA that has exited: {m.where(i.pc)}")
                        continue
                    vc = stamp.ctypes.data if stamp is not None else None
                    m.check(m.core.core_arrive(m.address, w.address, i.pc, target, vc))

            m.post(arrive, queue_key(ctas), f"tcgen05.commit: {m.where(i.pc)}", w.cta.cluster, i.pc)

    return c.python(run)
