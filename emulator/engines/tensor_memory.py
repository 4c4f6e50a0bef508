"""Tensor memory of sm_100: 128 lanes x 512 columns of 32 bits per CTA; loads and stores.

Fragment layouts of the load and store shapes: PTX ISA, "tcgen05 data movement shape"; CUTLASS, copy_traits_sm100.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..decode.op import Context, Op, decodes, items
from ..errors import EmulatorError, Hazard, MemoryFault, UninitializedRead, Unsupported
from ..machine.state import Cta, Warp, first_lane
from ..native.layout import (
    AUX_MOVE,
    BUSY_LOAD,
    BUSY_NO,
    FULL,
    KIND_LANE,
    TOUCH_ASYNC,
    TOUCH_READ,
    TOUCH_WRITE,
)
from ..ptx import Imm, Instr
from .bulk import learn, stream
from .operands import Address, address_operand

if TYPE_CHECKING:
    from ..machine.machine import Machine

LANES, COLUMNS = 128, 512
POISON = np.uint32(0x7FC0DEAD)


class TensorMemory:
    """Cells of tensor memory, with the allocated columns."""

    def __init__(self, strict: bool):
        self.cells = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool) if strict else None
        self.free = [(0, COLUMNS)]
        self.allocated: dict[int, int] = {}
        self.released: list[tuple[int, int]] = []
        self.relinquished = False
        self.meetings: list[tuple[str, int]] = []  # allocations and frees of a pair, each joined by a warp of this CTA
        self.joined: dict[int, int] = {}  # warp -> the one that it waits in
        self.reserved: dict[int, int] = {}  # warp -> first column of the allocation that its peer has not joined yet
        self.freed: np.ndarray | None = None  # what the warps that have freed columns knew

    def check(self, m: Machine, column: int, n: int, what: str) -> None:
        for start, size in self.allocated.items():
            if start <= column and column + n <= start + size:
                return
        for start, size in self.released:
            if start <= column and column + n <= start + size:
                m.warn(f"tensor-memory columns {column}..{column + n - 1} used after tcgen05.dealloc: {what}")
                return
        raise MemoryFault(
            f"tensor-memory columns {column}..{column + n - 1} are not allocated ({self.allocated}): {what}"
        )


def tensor_memory(m: Machine, cta: Cta) -> TensorMemory:
    found = cta.engine.get("tmem")
    if found is None:
        found = cta.engine["tmem"] = TensorMemory(m.options.strict)
        if m.tracked:
            m.core.core_tmem_shadow(m.address, cta.address)
    return found


def converged(m: Machine, w: Warp, frag: int, mask: int) -> bool:
    return not w.state.live & ~mask & FULL


def wait_for_lanes(m: Machine, w: Warp, frag: int) -> object:
    return m.block(w, frag, lambda: not w.state.live & ~w.state.frags[frag].mask & FULL, "the other lanes of its warp")


# ------------------------------------------------------------------ loads and stores
@dataclass(frozen=True)
class Fragment:
    """Cells of one warp's registers, from the address on: rows[lane, register], columns[lane, register]."""

    rows: np.ndarray
    columns: np.ndarray
    packed: bool  # two 16-bit columns in one register, the first of them in ``columns``

    @property
    def registers(self) -> int:
        return self.rows.shape[1]

    @cached_property
    def last_row(self) -> int:
        return int(self.rows.max())

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Runs of neighbouring columns, as first column and number."""
        used = np.unique([self.columns, self.columns + self.packed])
        return [(int(run[0]), len(run)) for run in np.split(used, np.flatnonzero(np.diff(used) != 1) + 1)]


def fragment(i: Instr, split: int) -> Fragment:
    p = i.parts
    shape = next(x for x in p if x[:2] in ("16", "32") and "b" in x and "x" in x)
    repeat = next(int(x[1:]) for x in p if x[0] == "x" and x[1:].isdigit())
    t = np.arange(32)[:, None]
    packed = any(x.startswith(("pack::", "unpack::")) for x in p)
    if shape == "32x32b":
        q = np.arange(repeat)[None]
        rows, columns = t + 0 * q, q + 0 * t
    elif shape == "16x64b":
        q = np.arange(repeat)[None]
        rows, columns = (t >> 2) + 8 * (t & 1) + 0 * q, (t >> 1 & 1) + 2 * q
    elif shape == "16x128b":
        q = np.arange(2 * repeat)[None]
        rows, columns = (t >> 2) + 8 * (q & 1), (t & 3) + 4 * (q >> 1)
    elif shape == "16x256b":
        q = np.arange(4 * repeat)[None]
        rows, columns = (t >> 2) + 8 * (q >> 1 & 1), 2 * (t & 3) + (q & 1) + 8 * (q >> 2)
    elif shape == "16x32bx2":
        q = np.arange(repeat)[None]
        rows, columns = (t & 15) + 0 * q, q + (t >> 4) * split
    else:
        raise Unsupported(i.op)
    return Fragment(rows, columns * (2 if packed else 1), packed)


@dataclass
class Transfer:
    """Decoded tcgen05.ld or tcgen05.st."""

    pc: int
    fragment: Fragment
    base: Address
    rows: list[int]  # register-file rows

    def cells(self, m: Machine, w: Warp, mask: int) -> tuple[TensorMemory, np.ndarray, np.ndarray]:
        """Return lanes and columns for each register, after checking that the warp may access them."""
        address = self.base.of(w, first_lane(mask))
        lane, column = address >> 16 & 0xFFFF, address & 0xFFFF
        # PTX ISA, "tcgen05.ld": all threads of the warp specify the same address.
        if not self.base.is_uniform(w, mask):
            raise MemoryFault(f"{w}: lanes give different addresses of tensor memory\n  {m.where(self.pc)}")
        if lane % 16:
            raise MemoryFault(
                f"{w} accesses tensor memory from lane {lane}, not a multiple of 16\n  {m.where(self.pc)}"
            )
        # PTX ISA, "tcgen05 access restrictions": warp k of a warpgroup reaches lanes 32k .. 32k + 31.
        first, last = 32 * (w.id % 4), lane + self.fragment.last_row
        if lane < first or last >= first + 32:
            raise MemoryFault(
                f"{w} accesses tensor-memory lanes {lane}..{last} but may only access {first}..{first + 31}\n"
                f"  {m.where(self.pc)}"
            )
        tm = tensor_memory(m, w.cta)
        tm.check(m, column, sum(self.fragment.spans[-1]), m.where(self.pc))
        return tm, lane + self.fragment.rows, column + self.fragment.columns

    def track(self, m: Machine, w: Warp, lanes: np.ndarray, columns: np.ndarray, write: bool) -> tuple[int, int]:
        """Record the access in the race detector. Element 0 of ``lanes`` and ``columns`` is at the address."""
        stamp, agent, clock = stream(m, w, "tcgen05.st" if write else "tcgen05.ld")
        if write:
            w.state.tensor_stores = agent
        else:
            w.state.tensor_loads = agent
        groups = (1 if self.fragment.last_row < 16 else 3) << int(lanes[0, 0]) // 16
        spans = [(int(columns[0, 0]) + first, n) for first, n in self.fragment.spans]
        touch(m, w.cta, groups, spans, write, Mark(agent, clock, stamp), self.pc)
        return agent, clock


class Mark(NamedTuple):
    """Agent, clock and knowledge of an access to tensor memory; ``how`` is TOUCH_LANE if one thread issues it."""

    agent: int
    clock: int
    stamp: np.ndarray
    how: int = 0


ALL_GROUPS = 0xFF


def touch(m: Machine, cta: Cta, groups: int, spans: list[tuple[int, int]], write: bool, mark: Mark, pc: int) -> None:
    """Record cells in the race detector.

    ``groups``: a bit for each 16 lanes. ``spans``: first column and number of columns of each run.
    """
    kind = mark.how | TOUCH_ASYNC | (TOUCH_WRITE if write else TOUCH_READ)
    vc = mark.stamp.ctypes.data
    for first, n in spans:
        m.core.core_shadow_tmem(m.address, cta.address, groups, first, n, kind, mark.agent, mark.clock, vc, pc)


@dataclass
class PendingLoad:
    """A tcgen05.ld with registers that are not written yet."""

    run: object
    slots: np.ndarray
    agent: int
    clock: int


CANONICAL_NAN = 0x7FFFFFFF


@dataclass(frozen=True)
class Reduction:
    """.min or .max of the registers of a tcgen05.ld.red; ``row`` receives it.

    PTX ISA, "tcgen05.ld" and "min": NaN loses unless .NaN is given, and -0 < +0.
    """

    row: int
    largest: bool
    type: str  # f32, s32, u32
    absolute: bool = False
    nan: bool = False

    def of(self, values: np.ndarray) -> np.ndarray:
        """Return the reduction of uint32 [lane][register]."""
        if self.type != "f32":
            found = values.view(np.int32 if self.type == "s32" else np.uint32)
            return (found.max(1) if self.largest else found.min(1)).view(np.uint32)
        bits = values & np.uint32(0x7FFFFFFF) if self.absolute else values
        is_nan = bits & np.uint32(0x7FFFFFFF) > 0x7F800000
        # Integers in the order of the floats.
        order = np.where(bits >> 31, np.uint32(0x7FFFFFFF) - (bits & np.uint32(0x7FFFFFFF)), bits | np.uint32(1 << 31))
        order[is_nan] = 0 if self.largest else 0xFFFFFFFF
        pick = (order.argmax(1) if self.largest else order.argmin(1))[:, None]
        found = np.take_along_axis(bits, pick, 1)[:, 0]
        found[is_nan.any(1) if self.nan else is_nan.all(1)] = CANONICAL_NAN
        return found


@dataclass
class Load(Transfer):
    reduction: Reduction | None = None

    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> object:
        if not converged(m, w, frag, mask):
            return wait_for_lanes(m, w, frag)
        tm, lanes, columns = self.cells(m, w, mask)
        agent = clock = 0
        if m.tracked:
            agent, clock = self.track(m, w, lanes, columns, False)

        def run() -> None:
            if tm.written is not None and not tm.written[lanes, columns].all():
                raise UninitializedRead(f"{w} reads tensor memory that was never written\n  {m.where(self.pc)}")
            values = tm.cells[lanes, columns]
            if self.fragment.packed:
                values = (values & np.uint32(0xFFFF)) | tm.cells[lanes, columns + 1] << np.uint32(16)
            for k, row in enumerate(self.rows):
                w.row32(row)[...] = values[:, k]
            if self.reduction:
                w.row32(self.reduction.row)[...] = self.reduction.of(values)

        slots = np.array([*self.rows, *([self.reduction.row] if self.reduction else [])]) // 64
        load = PendingLoad(run, slots, agent, clock)
        if m.tracked or m.options.strict or m.defers(self.pc):
            w.state.n_busy += int((w.busy[slots] == BUSY_NO).sum())
            w.busy[slots] = BUSY_LOAD
            w.tmem_loads.append(load)
            if not m.defers(self.pc):
                run()
                load.run = None
        else:
            run()
        if m.options.strict:
            w.written[slots] = FULL
        m.add("tensor memory load bytes", 128 * len(self.rows))
        return None


def write_registers(w: Warp) -> None:
    for load in w.tmem_loads:
        if load.run is not None:
            load.run()
            load.run = None
        w.state.n_busy -= int((w.busy[load.slots] == BUSY_LOAD).sum())
        w.busy[load.slots] = BUSY_NO


def complete_loads(m: Machine, w: Warp) -> None:
    write_registers(w)
    for load in w.tmem_loads:
        if m.tracked:
            learn(m, w, load.agent, load.clock)
    w.tmem_loads.clear()


def touched_early(m: Machine, w: Warp) -> None:
    """Complete a pending load when an instruction uses one of its registers.

    ptxas tracks such registers, and shipped kernels rely on that. PTX itself requires tcgen05.wait::ld before the use.
    Strict mode enforces this rule, except for moves, which compilers place before the wait. The use of a register does
    not order the load before later accesses to tensor memory (PTX ISA, "register dependencies, same thread").
    """
    insn = m.program.insns[m.state.ev_pc]
    if m.options.strict and not (insn.kind == KIND_LANE and insn.aux & AUX_MOVE):
        raise Hazard(f"{w} uses the result of tcgen05.ld before tcgen05.wait::ld\n  at {m.where(m.state.ev_pc)}")
    if m.options.strict:
        write_registers(w)
    else:
        complete_loads(m, w)


@decodes("tcgen05.ld")
def load(c: Context, i: Instr) -> Op:
    args = list(i.args)
    reduction = reduction_of(c, i, c.file.register(args.pop(1))) if "red" in i.parts else None
    split = args[2].bits if len(args) > 2 and isinstance(args[2], Imm) else 0
    f = fragment(i, split)
    rows = [c.file.register(r) for r in items(args[0])]
    if len(rows) != f.registers:
        raise Unsupported(f"{i.op} with {len(rows)} registers")
    return c.python(Load(i.pc, f, address_operand(c, args[1]), rows, reduction))


def reduction_of(c: Context, i: Instr, row: int) -> Reduction:
    """Decode the modifiers of tcgen05.ld.red (PTX ISA 8.8; not on sm_100)."""
    p, target = i.parts, c.file.kernel.target
    of_kind = next((t for t in ("f32", "s32", "u32") if t in p), "")
    of_shape = ("32x32b" in p or "16x32bx2" in p) and "x1" not in p
    if not target.startswith(("sm_101", "sm_103", "sm_110")):
        raise Unsupported(f"{i.op} on {target}, which has no tcgen05.ld.red")
    if not of_kind or not of_shape or (("abs" in p or "NaN" in p) and of_kind != "f32"):
        raise Unsupported(i.op)
    return Reduction(row, "max" in p, of_kind, "abs" in p, "NaN" in p)


@dataclass
class Store(Transfer):
    def __call__(self, m: Machine, w: Warp, frag: int, mask: int) -> object:
        if not converged(m, w, frag, mask):
            return wait_for_lanes(m, w, frag)
        tm, lanes, columns = self.cells(m, w, mask)
        values = np.stack([w.row32(row) for row in self.rows], 1)
        agent = clock = 0
        if m.tracked:
            agent, clock = self.track(m, w, lanes, columns, True)

        def run() -> None:
            if self.fragment.packed:
                tm.cells[lanes, columns] = values & np.uint32(0xFFFF)
                tm.cells[lanes, columns + 1] = values >> np.uint32(16)
            else:
                tm.cells[lanes, columns] = values
            if tm.written is not None:
                tm.written[lanes, columns] = True
                if self.fragment.packed:
                    tm.written[lanes, columns + 1] = True

        if m.defers(self.pc):
            w.tmem_stores.append((run, agent, clock))
        else:
            for earlier in w.tmem_stores:
                if earlier[0] is not None:
                    earlier[0]()
            run()
            w.tmem_stores = [(None, a, k) for _, a, k in w.tmem_stores] + [(None, agent, clock)]
        m.add("tensor memory store bytes", 128 * len(self.rows))
        return None


@decodes("tcgen05.st")
def store(c: Context, i: Instr) -> Op:
    split = i.args[1].bits if len(i.args) > 2 and isinstance(i.args[1], Imm) else 0
    f = fragment(i, split)
    rows = [c.src(r, "b32") for r in items(i.args[-1])]
    if len(rows) != f.registers:
        raise Unsupported(f"{i.op} with {len(rows)} registers")
    return c.python(Store(i.pc, f, address_operand(c, i.args[0]), rows))


@decodes("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(c: Context, i: Instr) -> Op:
    loads = "wait::ld" in i.parts

    def run(m: Machine, w: Warp, frag: int, mask: int) -> None:
        if loads:
            complete_loads(m, w)
        else:
            for todo, agent, clock in w.tmem_stores:
                if todo is not None:
                    todo()
                if m.tracked:
                    learn(m, w, agent, clock)
            w.tmem_stores.clear()
        m.progress()

    return c.python(run)


def at_warp_exit(m: Machine, w: Warp) -> None:
    if any(todo is not None for todo, _, _ in w.tmem_stores):
        raise EmulatorError(f"{w} exits with tcgen05.st outstanding")
