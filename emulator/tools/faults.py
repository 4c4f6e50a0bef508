"""The faults that a campaign plants, one at a time, in a kernel's PTX."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from ..ptx import Imm, Instr, Kernel, Mem


@dataclass(frozen=True)
class Fault:
    """``edits``: replacement instructions by instruction number."""

    kind: str
    line: int
    text: str
    edits: tuple[tuple[int, Instr], ...]

    @property
    def sites(self) -> list[int]:
        return [pc for pc, _ in self.edits]


def _removed(i: Instr) -> Instr:
    return Instr("pragma", ["pragma"], [], text=f"(removed) {i.text}")


def _as_if_done(i: Instr) -> Instr:
    """Return a try_wait that ignores its barrier."""
    return Instr("mov.pred", ["mov", "pred"], [i.args[0], Imm(1)], i.guard, i.guard_not, text=f"(no wait) {i.text}")


def _changed(i: Instr, note: str, **fields: object) -> Instr:
    out = copy.copy(i)
    out.args = list(i.args)
    out.text = f"({note}) {i.text}"
    for name, value in fields.items():
        setattr(out, name, value)
    return out


def _with_immediate(i: Instr, position: int, change: int, note: str) -> Instr | None:
    """Return the instruction with an immediate operand changed, or None if it does not have one there."""
    args = list(i.args)
    if position >= len(args) or not isinstance(args[position], Imm):
        return None
    value = args[position].bits + change
    if value < 0:
        return None
    args[position] = Imm(value)
    return _changed(i, note, args=args)


def waits(kernel: Kernel) -> list[list[Instr]]:
    """Return the try_wait sites of each wait: a first test and a loop on the same barrier are neighbours."""
    groups: list[list[Instr]] = []
    last: Instr | None = None
    for i in kernel.instrs:
        if not i.op.startswith("mbarrier.try_wait"):
            continue
        if last is not None and i.args[1:] == last.args[1:] and i.pc - last.pc < 12:
            groups[-1].append(i)
        else:
            groups.append([i])
        last = i
    return groups


REMOVALS = {
    "drop bar.sync": "bar.sync",
    "drop barrier.sync": "barrier.sync",
    "drop bar.arrive": "bar.arrive",
    "drop barrier.cluster": "barrier.cluster",
    "drop bar.warp.sync": "bar.warp.sync",
    "drop mbarrier.arrive": "mbarrier.arrive.",
    "drop remote arrive": "mbarrier.arrive.",
    "drop fence.proxy.async": "fence.proxy.async",
    "drop fence.release": "fence.release",
    "drop fence.acquire": "fence.acquire",
    "drop fence.acq_rel": "fence.acq_rel",
    "drop tensor copy": "cp.async.bulk.tensor",
    "drop bulk copy": "cp.async.bulk.global",
    "drop bulk commit_group": "cp.async.bulk.commit_group",
    "drop bulk wait_group": "cp.async.bulk.wait_group",
    "drop cp.async wait": "cp.async.wait",
    "drop cp.async arrival": "cp.async.mbarrier",
    "drop wgmma.wait_group": "wgmma.wait_group",
    "drop wgmma.commit_group": "wgmma.commit_group",
    "drop wgmma.fence": "wgmma.fence",
    "drop tcgen05.wait": "tcgen05.wait",
    "drop tcgen05.commit": "tcgen05.commit",
    "drop tcgen05.fence": "tcgen05.fence",
    "drop tcgen05.dealloc": "tcgen05.dealloc",
    "drop global store": "st.global",
}


def faults(kernel: Kernel) -> Iterator[Fault]:
    """Yield every known fault, for every instruction that it fits."""
    for group in waits(kernel):
        first = group[0]
        yield Fault("drop mbarrier wait", first.line, first.text, tuple((i.pc, _as_if_done(i)) for i in group))
    for group in waits(kernel):
        first = group[0]
        flipped = tuple((i.pc, _changed(i, "other parity", flipped=True)) for i in group)
        yield Fault("flip wait parity", first.line, first.text, flipped)
    for kind, prefix in REMOVALS.items():
        for i in kernel.instrs:
            if prefix == "mbarrier.arrive." and ("expect_tx" in i.op or is_remote(i) != (kind == "drop remote arrive")):
                continue
            if i.op.startswith(prefix):
                yield Fault(kind, i.line, i.text, ((i.pc, _removed(i)),))
    yield from _alterations(kernel)


def is_remote(i: Instr) -> bool:
    """Whether an arrival is at the mbarrier of any CTA of the cluster."""
    return "shared::cluster" in i.op


def _in_clusters(kernel: Kernel) -> Iterator[Fault]:
    """Yield faults of arrivals: too early, at the own CTA's mbarrier instead of a peer's, or not at all CTAs'."""
    product: Instr | None = None
    for i in kernel.instrs:
        if i.parts[0] == "mapa":
            own = Instr(f"mov.{i.parts[-1]}", ["mov", i.parts[-1]], i.args[:2], i.guard, i.guard_not)
            own.text = f"(own CTA) {i.text}"
            yield Fault("own CTA for a peer", i.line, i.text, ((i.pc, own),))
        if i.parts[0] == "bra":
            product = None
        elif i.op.startswith("tcgen05.mma"):
            product = i
        elif i.op.startswith("tcgen05.commit"):
            if product is not None and not _defined_between(kernel, product, i):
                swapped = (product.pc, _changed(i, "too early")), (i.pc, _changed(product, "after its commit"))
                yield Fault("commit before its last product", i.line, i.text, swapped)
            if "multicast::cluster" in i.parts:
                op = i.op.replace(".multicast::cluster", "")
                alone = _changed(i, "one CTA", op=op, parts=op.split("."), args=i.args[:1])
                yield Fault("commit to one CTA", i.line, i.text, ((i.pc, alone),))


def _defined_between(kernel: Kernel, first: Instr, last: Instr) -> bool:
    """Whether an instruction between them writes the address that ``last`` uses."""
    address = last.args[0].base
    return any(i.args and i.args[0] == address for i in kernel.instrs[first.pc + 1 : last.pc])


def _in_votes(kernel: Kernel) -> Iterator[Fault]:
    """Yield faults of barriers that combine a predicate of all their threads."""
    for i in kernel.instrs:
        if i.parts[0] not in ("bar", "barrier") or i.parts[-2:] not in (["and", "pred"], ["or", "pred"]):
            continue
        own = Instr("mov.pred", ["mov", "pred"], [i.args[0], i.args[-1]], i.guard, i.guard_not)
        own.text = f"(own vote) {i.text}"
        yield Fault("vote without the others", i.line, i.text, ((i.pc, own),))
        altered = _with_immediate(i, 2, 32, "one warp more") if len(i.args) > 3 else None
        if altered is not None:
            yield Fault("barrier waits for one warp more", i.line, i.text, ((i.pc, altered),))


def _alterations(kernel: Kernel) -> Iterator[Fault]:
    yield from _in_clusters(kernel)
    yield from _in_votes(kernel)
    for i in kernel.instrs:
        if "expect_tx" in i.op:
            yield Fault("drop expect_tx", i.line, i.text, ((i.pc, _removed(i)),))
            plain = [a for a in i.args if isinstance(a, Mem)]
            arrive = Instr(
                i.op.replace(".expect_tx", ""), [p for p in i.parts if p != "expect_tx"], plain, i.guard, i.guard_not
            )
            arrive.text = f"(no bytes) {i.text}"
            if i.parts[1] == "arrive":
                yield Fault("expect no bytes", i.line, i.text, ((i.pc, arrive),))
        if i.op.startswith("mbarrier.init"):
            for change, kind in ((1, "one arrival too many expected"), (-1, "one arrival too few expected")):
                altered = _with_immediate(i, 1, change, kind)
                if altered is not None:
                    yield Fault(kind, i.line, i.text, ((i.pc, altered),))
        if i.op.startswith(("wgmma.wait_group", "cp.async.bulk.wait_group", "cp.async.wait_group")):
            altered = _with_immediate(i, 0, 1, "one group later")
            if altered is not None:
                yield Fault("wait for one group less", i.line, i.text, ((i.pc, altered),))
        if i.op.startswith(("bar.sync", "barrier.sync", "bar.arrive")):
            altered = _with_immediate(i, 1, 32, "one warp more")
            if altered is not None:
                yield Fault("barrier waits for one warp more", i.line, i.text, ((i.pc, altered),))
            altered = _with_immediate(i, 0, 1, "next barrier")
            if altered is not None:
                yield Fault("wrong barrier number", i.line, i.text, ((i.pc, altered),))
