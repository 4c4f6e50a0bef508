"""Fault campaign: plants one synchronisation fault at a time and reports the undetected ones.

A case is a Python function that launches the kernel once, through hopwell's public API or an emulated function. The
campaign records the launch with a copy of all memory in reach, and runs every fault on that copy. The first run is
under the race detector and in strict mode, in the eager schedule. Late, random and priority schedules follow until a
fault is detected. Detection is an error, a deadlock, a race or proxy report, or results that differ from the unaltered
kernel's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..decode.program import Program
from ..errors import Deadlock, EmulatorError
from ..host import module
from ..machine.launch import Launch
from ..machine.machine import Machine
from ..machine.memory import GlobalMemory, Span
from ..machine.state import array_at
from ..options import Options, options
from ..ptx import Kernel
from .faults import Fault, faults

SCHEDULES: list[dict[str, Any]] = [
    {"schedule": "eager", "race": True, "proxy": True, "sync": True, "strict": True},
    {"schedule": "late"},
    {"schedule": "random", "seed": 1},
    *({"schedule": "priority", "seed": k} for k in range(1, 4)),
]


@dataclass
class Recorded:
    """One launch and its initial memory."""

    program: Program
    launch: Launch
    spans: list[Span]
    before: list[np.ndarray]


@dataclass
class Outcome:
    fault: Fault
    found: str = ""  # detected by: error, deadlock, race, wrong result, warning; "" if undetected
    schedule: str = ""
    detail: str = ""
    reason: str = ""  # why an undetected fault cannot change behaviour, if known


@dataclass
class Campaign:
    outcomes: list[Outcome] = field(default_factory=list)
    launches: int = 0
    seconds: float = 0.0

    def effective(self) -> list[Outcome]:
        """Faults that can change behaviour on this problem."""
        return [o for o in self.outcomes if not o.reason]

    @property
    def rate(self) -> float:
        effective = self.effective()
        return sum(bool(o.found) for o in effective) / len(effective) if effective else 1.0

    def undetected(self) -> list[Outcome]:
        return [o for o in self.effective() if not o.found]


def memory_bytes(memory: GlobalMemory) -> list[np.ndarray]:
    return [array_at(r.base, r.size, np.uint8) for r in memory.regions]


def record(case: Callable[[], Any], pattern: str = "") -> list[Recorded]:
    """Run a case and keep the launches of kernels with ``pattern`` in their names."""
    kept: list[Recorded] = []
    original = module.run

    def recording(program: Program, launch: Launch, spans: Any) -> Any:
        if pattern in program.kernel.name:
            memory = GlobalMemory(spans, track=False)
            flat = [s for r in memory.regions for s in r.spans]
            kept.append(Recorded(program, launch, flat, [b.copy() for b in memory_bytes(memory)]))
        return original(program, launch, spans)

    module.run = recording
    try:
        case()
    finally:
        module.run = original
    return kept


class Runner:
    """Runs variants of one recorded launch on copies of its memory."""

    def __init__(self, recorded: Recorded, base: Options):
        self.recorded, self.base = recorded, replace(base, workers=1, hazards="report", banks=False)
        self.golden: list[np.ndarray] = []
        self.known: set[str] = set()
        self.covered = np.zeros(0)
        self.blocked = np.zeros(0)
        self.instructions: list[int] = []  # of the unaltered kernel, in each schedule

    def run(self, program: Program, budget: int, **settings: Any) -> tuple[str, str, list[np.ndarray], Any]:
        """Run a program and return (what happened, detail, memory afterwards, report)."""
        memory = GlobalMemory(self.recorded.spans, track=False)
        # The tensors of the recorded launch may be freed: their addresses lead to copies.
        images = [before.copy() for before in self.recorded.before]
        for k, image in enumerate(images):
            memory.table[k].host = image.ctypes.data
        machine = Machine(
            program, self.recorded.launch, memory, replace(self.base, max_instructions=budget, **settings)
        )
        try:
            report = machine.run()
        except Deadlock as e:
            return "deadlock", str(e).splitlines()[0], [], None
        except EmulatorError as e:
            return "error", str(e).splitlines()[0], [], None
        return "", "", images, report

    def reference(self) -> list[str]:
        """Run the unaltered kernel in every schedule and return its complaints; none are expected."""
        complaints = []
        for settings in SCHEDULES:
            what, detail, images, report = self.run(self.recorded.program, 10**12, **settings)
            self.instructions.append(0 if report is None else report.instructions)
            if what:
                complaints.append(f"{settings}: {what}: {detail}")
                continue
            if not self.golden:
                self.golden = images
                self.covered, self.blocked = report.counts.copy(), report.blocked.copy()
                self.known = {*report.hazards, *report.warnings}
                complaints += report.hazards
            elif self.differs(images):
                complaints.append(f"{settings}: results differ from the eager schedule's")
            self.blocked = np.maximum(self.blocked, report.blocked)
        return complaints

    def differs(self, images: list[np.ndarray]) -> int:
        return sum(int((a != b).sum()) for a, b in zip(images, self.golden, strict=True))

    def try_fault(self, fault: Fault) -> Outcome:
        outcome = Outcome(fault)
        if not any(self.covered[pc] for pc in fault.sites):
            outcome.reason = "not executed on this problem"
            return outcome
        program = self.recorded.program.with_edits(dict(fault.edits))
        for settings, instructions in zip(SCHEDULES, self.instructions, strict=True):
            # CTAs that wait for partials poll, in the late schedule 30 times as often as in the eager one.
            what, detail, images, report = self.run(program, instructions * 6 + 100_000, **settings)
            if not what and (wrong := self.differs(images)):
                what, detail = "wrong result", f"{wrong} bytes"
            if not what and (new := [h for h in report.hazards if h not in self.known]):
                what, detail = "race", new[0].splitlines()[0]
            if not what and (new := [text for text in report.warnings if text not in self.known]):
                what, detail = "warning", new[0]
            if what:
                outcome.found, outcome.detail = what, detail
                outcome.schedule = " ".join(f"{k}={v}" for k, v in settings.items() if k in ("schedule", "seed"))
                return outcome
        if fault.kind == "drop mbarrier wait" and not any(self.blocked[pc] for pc in fault.sites):
            outcome.reason = (
                "never waits on this problem: the phase is complete before, by an order that other waits give"
            )
        if fault.kind == "drop wgmma.fence":
            # The emulator checks the very rule that the fence serves.
            outcome.reason = "no register of these products is accessed since the fence before"
        return outcome


def run_campaign(
    case: Callable[[], Any],
    pattern: str = "",
    kinds: Iterable[str] = (),
    say: Callable[[str], None] = print,
    equivalent: Callable[[Fault, Kernel], str] | None = None,
) -> Campaign:
    """Plant every fault in the case's last matching launch.

    Args:
        case: launches the kernel.
        pattern: part of the kernel's name.
        kinds: kinds of faults to plant; all by default.
        say: receives progress, a line each.
        equivalent: returns why an undetected fault cannot change behaviour, or "".
    """
    started = time.perf_counter()
    launches = record(case, pattern)
    if not launches:
        raise EmulatorError(f"the case launched no kernel whose name contains {pattern!r}")
    runner = Runner(launches[-1], options())
    say(f"kernel {runner.recorded.program.kernel.name[:80]}")
    for complaint in runner.reference():
        say(f"  the unaltered kernel: {complaint}")
    out = Campaign()
    wanted = set(kinds)
    for fault in faults(runner.recorded.program.kernel):
        if wanted and fault.kind not in wanted:
            continue
        outcome = runner.try_fault(fault)
        if equivalent and not outcome.found and not outcome.reason:
            outcome.reason = equivalent(fault, runner.recorded.program.kernel)
        out.outcomes.append(outcome)
        verdict = (
            f"{outcome.found} ({outcome.schedule}) {outcome.detail}"
            if outcome.found
            else outcome.reason or "NOT DETECTED"
        )
        say(f"  {fault.kind:32s} line {fault.line:5d}  {verdict[:140]}")
    out.seconds = time.perf_counter() - started
    for line in summary(out):
        say(line)
    return out


def summary(campaign: Campaign) -> list[str]:
    lines = []
    for kind in dict.fromkeys(o.fault.kind for o in campaign.outcomes):
        mine = [o for o in campaign.outcomes if o.fault.kind == kind]
        found = [o for o in mine if o.found]
        how = ", ".join(
            f"{n} {what}"
            for what in ("error", "deadlock", "race", "wrong result", "warning")
            if (n := sum(o.found == what for o in found))
        )
        missed = [o.fault.line for o in mine if not o.found and not o.reason]
        lines.append(
            f"{kind:32s} {len(found):4d} of {len(mine) - sum(bool(o.reason) for o in mine):4d} detected ({how})"
            + (f", {sum(bool(o.reason) for o in mine)} without effect" if any(o.reason for o in mine) else "")
            + (f", undetected at PTX lines {missed}" if missed else "")
        )
    effective = campaign.effective()
    lines.append(
        f"{sum(bool(o.found) for o in effective)} of {len(effective)} faults that can change behaviour are detected "
        f"({100 * campaign.rate:.1f} %), {len(campaign.outcomes) - len(effective)} more have no effect; "
        f"{campaign.seconds:.0f} s"
    )
    return lines


def as_json(campaign: Campaign) -> str:
    return json.dumps(
        [
            {
                "kind": o.fault.kind,
                "line": o.fault.line,
                "instruction": o.fault.text,
                "found": o.found,
                "schedule": o.schedule,
                "detail": o.detail,
                "reason": o.reason,
            }
            for o in campaign.outcomes
        ],
        indent=1,
    )
