"""Reasons why some planted faults cannot change the behaviour of the prefill kernels."""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any

from hopwell.emulator.ptx import Kernel, Mem, Reg
from hopwell.emulator.tools.faults import Fault

# (kind of fault, instruction) -> reason
REASONS = (
    (
        "drop bar.sync",
        r"bar\.sync %r\d+, 128",
        "only tells the compiler that a warpgroup has converged; its warps meet again in their matrix products",
    ),
    (
        "wrong barrier number",
        r"bar\.sync 0",
        "the whole CTA meets at the other barrier, which nobody uses yet",
    ),
    (
        "wrong barrier number",
        r"bar\.arrive 1, 256",
        "decides which warpgroup computes its first product first; either may",
    ),
)


def places(kernel: Kernel, start: str, part: str = "") -> list[int]:
    return [i.pc for i in kernel.instrs if i.op.startswith(start) and part in i.op]


def next_warp_barrier(kernel: Kernel, pc: int) -> int:
    return next((i.pc for i in kernel.instrs[pc:] if i.op.startswith("bar.warp.sync")), -1)


def every_lane_arrives(kernel: Kernel, pc: int) -> bool:
    """Whether the instructions from ``pc`` on reach an arrival without a branch to a single lane."""
    first = next(i for i in kernel.instrs[pc:] if i.op.startswith(("bra", "mbarrier.arrive", "bar.")))
    return first.op.startswith("mbarrier.arrive")


def comes_before(kernel: Kernel, pc: int, first: str, other: str) -> bool:
    """Whether, after ``pc``, an instruction starting with ``first`` comes before one starting with ``other``."""
    either = (i.op for i in kernel.instrs[pc + 1 :] if i.op.startswith((first, other)))
    return next(either, other).startswith(first)


def equivalent(fault: Fault, kernel: Kernel) -> str:
    """Return why an undetected fault changes nothing, or ""."""
    for kind, pattern, reason in REASONS:
        if fault.kind == kind and re.match(pattern, fault.text):
            return reason
    waits = fault.kind in ("drop mbarrier wait", "flip wait parity")
    if waits and comes_before(kernel, fault.sites[0], "atom", "mbarrier"):
        return "tickets are taken earlier, but a tile is posted when there is room"
    if waits and comes_before(kernel, fault.sites[0], "bar.arrive", "wgmma"):
        return "K of a tile that is passed over: whose turn it is knows that all have read the tile before the last"
    stores = [i.pc for i in kernel.instrs if i.op.startswith("st.global")]
    if fault.kind == "drop bar.warp.sync" and fault.sites[0] == next_warp_barrier(kernel, stores[-1]):
        return "the warp meets again when it reads its next tile, before it writes to its staging rows"
    if fault.kind == "drop bar.warp.sync" and every_lane_arrives(kernel, fault.sites[0] + 1):
        return "every lane says itself that it has read; a warp that has parted, as in merges, has to meet nevertheless"
    if fault.kind in ("drop fence.proxy.async", "drop bar.warp.sync") and _zeroes_again(kernel, fault.sites[0]):
        return "the same again follows before anything is published"
    return ""


def _zeroes_again(kernel: Kernel, pc: int) -> bool:
    """Whether ``pc`` is behind zeros for the rows before a tile's visible keys. Zeros for the rows behind them follow,
    with a fence and a warp barrier of their own, which cover the first ones."""
    fence = pc - 1 if kernel.instrs[pc].op.startswith("bar.warp.sync") else pc
    others = ("fence", "mbarrier", "bar.sync", "bar.arrive", "barrier", "ld.shared", "cp.async", "tcgen05", "wgmma")
    ops = (i.op for i in kernel.instrs[fence + 1 :] if i.op.startswith(others))
    return all(op.startswith("fence.proxy.async") for op in (kernel.instrs[fence].op, next(ops, "")))


def names(kernel: Kernel, barrier: int) -> bool:
    """Whether an instruction names the barrier of this number."""
    return any(re.match(rf"bar\.\w+ {barrier}\b", i.text) for i in kernel.instrs)


def uses_a_free_barrier(fault: Fault, kernel: Kernel) -> bool:
    """Whether a fault replaces the number of a barrier by one that no instruction uses."""
    return fault.kind == "wrong barrier number" and not names(kernel, int(fault.text.split()[1].rstrip(",")) + 1)


def follows_a_node(fault: Fault, kernel: Kernel) -> bool:
    """Whether a fault drops the warp barrier behind the store of a tree's node."""
    before = kernel.instrs[: fault.sites[0]]
    return fault.kind == "drop bar.warp.sync" and any(re.match(r"st\.\w+\.v4", i.op) for i in before[-4:])


def reason_of_tensor_fence(fault: Fault, kernel: Kernel) -> str:
    """Return why a dropped fence at an end of the kernel changes nothing, or ""."""
    if fault.kind == "drop tcgen05.fence":
        accesses = [at for op in ("tcgen05.ld", "tcgen05.st", "tcgen05.mma") for at in places(kernel, op)]
        if fault.sites[0] < min(accesses):
            return "nobody has accessed tensor memory yet"
        if fault.sites[0] > max(accesses):
            return "only tcgen05.dealloc follows, which needs the order and no fence"
    return ""


# TELLING: instructions that may tell other threads of completed loads.
# LEAVING: instructions after which the next wait may not run.
TELLING = ("bar", "barrier", "mbarrier", "fence", "membar", "st", "stmatrix", "atom", "red", "cp", "tcgen05")
LEAVING = ("bra", "brx", "call", "ret", "exit", "trap")


def registers(value: Any) -> set[str]:
    """Return the names of the registers in an operand, or in a list of operands."""
    if isinstance(value, Reg):
        return {value.name}
    if isinstance(value, (list, tuple)):
        return set().union(*map(registers, value))
    return registers(list(vars(value).values())) if is_dataclass(value) else set()


def pending_loads(kernel: Kernel) -> list[frozenset[str]]:
    """Return for each instruction the registers of loads of tensor memory that may be incomplete before it."""
    instrs = kernel.instrs
    pending: list[frozenset[str] | None] = [None] * len(instrs)
    work = [(0, frozenset())]
    while work:
        pc, arriving = work.pop()
        known = pending[pc] if pc < len(instrs) else arriving
        if known is not None and arriving <= known:
            continue
        i, before = instrs[pc], arriving | (known or frozenset())
        pending[pc] = after = before
        if i.op.startswith("tcgen05.ld"):
            after |= registers([operand for operand in i.args if not isinstance(operand, Mem)])
        elif i.op.startswith("tcgen05.wait::ld") and i.guard is None:
            after = frozenset()
        ends = i.parts[0] in ("bra", "ret", "exit") and i.guard is None
        work += [(following, after) for following in (i.target, *(() if ends else (pc + 1,))) if following >= 0]
    return [found or frozenset() for found in pending]


def reason_of_tensor_wait(fault: Fault, kernel: Kernel) -> str:
    """Return a reason if a warp waits for its loads of tensor memory again before it uses what they load, or "".

    Nothing between the two waits accesses registers of the loads that the dropped wait is for, or tells other threads
    that they are complete.
    """
    pc, instrs, every = fault.sites[0], kernel.instrs, places(kernel, "tcgen05.wait::ld")
    following = next((wait for wait in every if wait > pc), None)
    if fault.kind != "drop tcgen05.wait" or pc not in every or following is None or instrs[following].guard:
        return ""
    loaded, between = pending_loads(kernel)[pc], instrs[pc + 1 : following]
    tells = any(i.parts[0] in (*TELLING, *LEAVING) and not i.op.startswith("tcgen05.ld") for i in between)
    is_used = any(loaded & registers(i.args) for i in between)
    return "" if tells or is_used else "the warp waits for the load again before it uses what was loaded"
