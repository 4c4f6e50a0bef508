"""Turns native faults and hazards into exceptions and sentences that name tensors, lines and warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import BarrierFault, EmulatorError, Hazard, MemoryFault, UninitializedRead, Unsupported
from ..native.layout import (
    ERRORS,
    HAZARD_BARRIER,
    HAZARD_EXIT,
    HAZARD_GLOBAL,
    HAZARD_PROXY,
    HAZARD_SITE,
    HAZARD_TENSOR_FENCE,
    OFFSET_MASK,
    RANK_SHIFT,
    SMEM_BASE,
    TMEM_SENT,
    Fault,
    HazardState,
)

if TYPE_CHECKING:
    from ..machine.machine import Machine
    from ..machine.state import Cluster


def shared_name(machine: Machine, offset: int) -> str:
    """Name a shared-memory offset relative to the user's part, as the kernel's own addresses count."""
    for name, (start, size) in machine.kernel.shared.items():
        if start <= offset - SMEM_BASE < start + size:
            return f"{name}+{offset - SMEM_BASE - start:#x}"
    return f"offset {offset:#x} ({offset - SMEM_BASE} bytes into user shared memory)"


def register_name(machine: Machine, slot: int) -> str:
    from ..decode.registers import ROW_BYTES, WIDTHS

    offset = slot * 64
    for w in WIDTHS:
        base = machine.program.file.base[w]
        if base <= offset < base + machine.kernel.counts[w] * ROW_BYTES[w]:
            prefix = {"r": "%r", "d": "%rd", "q": "%rq", "h": "%rs"}[w]
            return f"{prefix}{(offset - base) // ROW_BYTES[w]} (in order of declaration)"
    return f"row {offset}"


def _memory(machine: Machine, e: Fault, name: str) -> EmulatorError | None:
    m = machine.memory
    if name == "GLOBAL":
        return MemoryFault(f"global access of {e.extra} bytes outside of every tensor: {m.describe(e.address)}")
    if name == "READONLY":
        return MemoryFault(f"write of {e.extra} bytes to an input tensor: {m.describe(e.address)}")
    if name == "UNINIT_GLOBAL":
        return UninitializedRead(f"read of global memory that was never written: {m.describe(e.address)}")
    if name == "SHARED":
        offset = e.address & OFFSET_MASK
        return MemoryFault(f"shared-memory access at {offset:#x}, outside of [{SMEM_BASE:#x}, {e.extra:#x})")
    if name == "UNINIT_SHARED":
        return UninitializedRead(
            f"read of shared memory that was never written: {shared_name(machine, e.address & OFFSET_MASK)}"
        )
    if name == "MISALIGNED":
        return MemoryFault(f"misaligned access: address {e.address:#x} is not a multiple of {e.extra}")
    if name == "MIXED_SPACE":
        return Unsupported("generic addresses of one instruction point into different state spaces")
    if name == "RANK":
        if e.extra >> 32:
            return MemoryFault(f"access to the shared memory of an exited CTA: {e.address:#x}")
        return MemoryFault(f"shared-memory address {e.address:#x}: the cluster has no CTA of rank {e.extra}")
    if name == "LOCAL":
        return MemoryFault(f"local-memory access of {e.extra} bytes at {e.address:#x} out of bounds")
    if name == "PARAM":
        return MemoryFault(f"access of {e.extra} bytes at parameter offset {e.address}")
    if name == "UNINIT_REG":
        return UninitializedRead(f"register {register_name(machine, e.address)} is read before it was written")
    return None


def _barrier(machine: Machine, e: Fault, name: str) -> EmulatorError | None:
    where = shared_name(machine, e.address & OFFSET_MASK) + f" of rank {e.address >> RANK_SHIFT & 255}"
    if name == "MBAR_INIT":
        return BarrierFault(f"mbarrier at {where} is used before mbarrier.init")
    if name == "MBAR_OVERFLOW":
        return BarrierFault(f"mbarrier at {where}: {e.extra} arrivals with only {e.extra2} pending")
    if name == "MBAR_EXITED":
        return BarrierFault(f"mbarrier at {where} is used after its CTA exited")
    if name == "MBAR_COUNT":
        return BarrierFault(f"mbarrier at {where}: arrival count {e.extra} is not in 1 .. 2^20 - 1")
    if name == "MBAR_MISALIGNED":
        return BarrierFault(f"mbarrier address {e.address:#x} is not a multiple of 8")
    if name == "MBAR_MEMORY":
        return BarrierFault(f"write over the live mbarrier at {where}")
    if name == "TX_RANGE":
        return BarrierFault(f"mbarrier at {where}: transaction count leaves -(2^20 - 1) .. 2^20 - 1")
    if name == "BARRIER_COUNT":
        if e.extra2:
            return BarrierFault(f"barrier {e.address} used with {e.extra} threads while {e.extra2} are expected")
        return BarrierFault(f"barrier {e.address}: thread count {e.extra} is not a positive multiple of 32")
    if name == "BARRIER_OVERFLOW":
        return BarrierFault(f"barrier {e.address}: {e.extra} threads arrived, more than it expects")
    if name == "BARRIER_ID":
        return BarrierFault(f"barrier {e.address}: there are barriers 0 to 15")
    if name == "CLUSTER_BARRIER":
        what = "wait without arrive" if e.address else "arrive twice without wait"
        return BarrierFault(f"barrier.cluster: {what}")
    return None


def fault(machine: Machine) -> EmulatorError:
    """Return the exception for the fault in ``machine.state.err``."""
    e: Fault = machine.state.err
    name = ERRORS[e.code]
    found = _memory(machine, e, name) or _barrier(machine, e, name)
    if found is None:
        if name == "SHFL_LANE":
            found = EmulatorError(f"shfl.sync reads lane {e.address}, which does not take part")
        elif name == "TRAP":
            found = EmulatorError("trap")
        elif name == "IN_FLIGHT":
            what = "written" if e.extra else "read"
            found = Hazard(
                f"register {register_name(machine, e.address)} is {what} while an asynchronous operation owns it "
                "(missing wait_group?)"
            )
        elif name == "WGMMA_FENCE":
            if e.extra:
                found = Hazard("the first wgmma of a warp without wgmma.fence before it")
            else:
                found = Hazard(f"wgmma uses {register_name(machine, e.address)}, accessed after the last wgmma.fence")
        elif name == "WGMMA_GROUP":
            found = EmulatorError("wgmma outside of a full warpgroup, or too many operations between issue and wait")
        elif name == "WGMMA_DISAGREE":
            other = machine.where(e.address)
            found = EmulatorError(f"the warps of a warpgroup issue different wgmma operations or descriptors: {other}")
        elif name == "DESCRIPTOR":
            found = Unsupported(f"matrix descriptor {e.address:#x}: layout or base offset")
        elif name == "TMA_EXITED":
            found = MemoryFault("tensor copy into the shared memory of a CTA that has exited")
        elif name == "TMA_RANK":
            found = MemoryFault(f"tensor copy of {e.address} dimensions through a tensor map of {e.extra}")
        elif name == "AGENTS":
            found = EmulatorError("too many mbarriers for the emulator's tables")
        else:
            found = Unsupported(f"native fault {name}")
    lane = f" lane {e.lane}" if e.lane >= 0 else ""
    place = f"cta {tuple(e.cta)} warp {e.warp}{lane}" if e.warp >= 0 else "host"
    found.args = (f"{found.args[0]}\n  at {place}, {machine.where(e.pc)}",)
    return found


# ------------------------------------------------------------------ hazards
def remember_agents(machine: Machine, h: HazardState, clusters: list[Cluster]) -> None:
    names = machine.agent_names
    for cluster_index, agent in (
        (h.cluster, h.agent),
        (h.rank if h.kind == HAZARD_GLOBAL else h.cluster, h.other_agent),
    ):
        for cluster in clusters:
            if cluster.index == cluster_index:
                names.setdefault((cluster_index, agent), agent_name(cluster, agent))


def agent_name(cluster: Cluster, agent: int) -> str:
    if agent in cluster.agent_names:
        return cluster.agent_names[agent]
    for cta in cluster.ctas:
        for b in cta.mbarriers():
            if b.agent == agent:
                return f"TMA signalling the mbarrier at {b.offset:#x}"
    return f"agent {agent}"


def hazard_text(machine: Machine, h: HazardState) -> str:
    """Describe a hazard in one sentence and name its two places."""
    if h.kind == HAZARD_SITE:
        return (
            f"sync: warps wait for each other at two instructions of the aligned barrier {h.cell} [{h.count}x]\n"
            f"    {machine.where(h.other_pc)}\n    {machine.where(h.pc)}, by warp {h.agent} of rank {h.rank}"
        )
    names = machine.agent_names
    first = names.get((h.cluster, h.agent), "?")
    second = names.get((h.rank if h.kind == HAZARD_GLOBAL else h.cluster, h.other_agent), "?")
    if h.kind == HAZARD_BARRIER:
        return (
            f"barrier: {first} arrives at barrier {h.cell} again before it completes [{h.count}x]\n"
            f"    {machine.where(h.pc)}"
        )
    if h.kind == HAZARD_EXIT:
        return (
            f"exit: the CTA of rank {h.rank} may exit before work of {first} has arrived there [{h.count}x]\n"
            f"    {machine.where(h.pc)}"
        )
    verb, other = ("write" if h.write else "read"), ("write" if h.other_write else "read")
    if h.kind == HAZARD_GLOBAL:
        space = f"global memory, {machine.memory.describe(h.cell)}"
    elif h.tmem:
        space = f"tensor memory, lanes {h.cell // 512 * 16}.., column {h.cell % 512}"
    else:
        space = f"shared memory of rank {h.rank}, {shared_name(machine, h.cell * 4)}"
    if h.kind == HAZARD_PROXY:
        head = f"proxy: asynchronous {verb} of a generic {other} without fence.proxy.async"
    elif h.kind == HAZARD_TENSOR_FENCE:
        missing = "after_thread_sync precedes it" if h.tmem == TMEM_SENT else f"before_thread_sync follows the {other}"
        head = f"fence: barriers order {verb} after {other}, but no tcgen05.fence::{missing}"
    else:
        head = f"race: {verb} is not ordered after {other}"
    return (
        f"{head} [{space}; {h.count}x]\n    {verb} by {first}: {machine.where(h.pc)}\n"
        f"    {other} by {second}: {machine.where(h.other_pc)}"
    )
