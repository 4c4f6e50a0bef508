"""Report of a launch: counts, hazards, warnings."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..machine.machine import Machine

# Instruction classes by opcode; the first matching pattern counts.
CLASSES = [
    ("matrix", r"wgmma\.mma_async|tcgen05\.mma|mma\."),
    ("tensor copy", r"cp\.(reduce\.)?async\.bulk\.tensor"),
    ("bulk copy", r"cp\.(reduce\.)?async\.bulk\.(?!commit|wait|prefetch)(global|shared)"),
    ("async copy", r"cp\.async\.(ca|cg)"),
    ("tensor memory", r"tcgen05\.(ld|st|cp|shift)"),
    ("mbarrier", r"mbarrier"),
    ("barrier", r"bar\.|barrier"),
    ("fence or wait", r"fence|membar|.*wait|.*commit"),
    ("shared load/store", r"(ld|st|atom|red)\.(\w+\.)*shared|ldmatrix|stmatrix"),
    ("global load/store", r"(ld|st|atom|red)\b"),
    ("exchange", r"shfl|vote|redux|elect|match|movmatrix|activemask"),
    ("function", r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh)\."),
    ("conversion", r"cvt"),
    ("control", r"bra|ret|exit|trap"),
    ("float", r"(add|sub|mul|fma|mad|min|max|neg|abs|div|copysign|setp|selp)\S*\.(f16|bf16|f32|f64)"),
]
_PATTERNS = [(name, re.compile(pattern)) for name, pattern in CLASSES]


@functools.lru_cache(maxsize=4096)
def classify(opcode: str) -> str:
    for name, pattern in _PATTERNS:
        if pattern.match(opcode):
            return name
    return "integer and move"


@dataclass
class Access:
    """Shared-memory accesses of one instruction: wavefronts needed, and the minimum for its width."""

    pc: int
    where: str
    executions: int
    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal


@dataclass
class LaunchReport:
    """Counts of one launch, and what the detectors found.

    instructions: warp instructions; a branch of one lane counts as much as one of 32.
    classes: warp instructions by class (see CLASSES). opcodes: by full opcode.
    totals: what the engines counted: "tensor load bytes", "tensor store bytes", "matrix flops", ...
    shared: per load or store of shared memory, its wavefronts (bank conflicts are those beyond the ideal).
    hazards: sentences of the race detector and of the proxy and sync checks. warnings: text -> occurrences.
    never_written: (name, elements, first element) of output tensors that were not written completely.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    seconds: float
    instructions: int = 0
    classes: dict[str, int] = field(default_factory=dict)
    opcodes: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    shared: list[Access] = field(default_factory=list)
    hazards: list[str] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    never_written: list[tuple[str, int, int]] = field(default_factory=list)
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    blocked: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    workers: int = 1

    @classmethod
    def of(cls, m: Machine, seconds: float) -> LaunchReport:
        r = cls(m.kernel.name, m.launch.grid, m.launch.block, m.launch.cluster, seconds)
        r.counts, r.blocked, r.workers = m.count.copy(), m.blocked.copy(), m.processes
        r.totals, r.warnings = dict(m.totals), dict(m.warnings)
        for name, n in (("matrix flops", m.state.matrix_flops), ("tensor load bytes", m.state.tma_load_bytes)):
            if n:
                r.totals[name] = r.totals.get(name, 0) + n
        r.hazards = m.hazard_texts()
        r.never_written = m.memory.never_written()
        for pc, instr in enumerate(m.kernel.instrs):
            n = int(m.count[pc])
            if not n:
                continue
            r.instructions += n
            r.opcodes[instr.op] = r.opcodes.get(instr.op, 0) + n
            kind = classify(instr.op)
            r.classes[kind] = r.classes.get(kind, 0) + n
            if m.bank_ideal[pc]:
                r.shared.append(Access(pc, m.where(pc), n, int(m.bank_passes[pc]), int(m.bank_ideal[pc])))
        return r

    @property
    def bank_conflicts(self) -> int:
        """Shared-memory wavefronts beyond the minimum for the access widths.

        The hardware's count is at least this value.
        """
        return sum(a.conflicts for a in self.shared)

    def __str__(self) -> str:
        rate = self.instructions / self.seconds / 1e6 if self.seconds else 0.0
        lines = [
            f"{self.kernel[:72]}",
            f"  grid {self.grid}, block {self.block}, cluster {self.cluster}: {self.instructions} warp instructions "
            f"in {self.seconds:.2f} s ({rate:.2f} M/s, {self.workers} process{'es' if self.workers > 1 else ''})",
        ]
        lines += [f"  {n:12d}  {name}" for name, n in sorted(self.classes.items(), key=lambda x: -x[1])]
        lines += [f"  {n:12d}  {name}" for name, n in sorted(self.totals.items())]
        worst = sorted((a for a in self.shared if a.conflicts), key=lambda a: -a.conflicts)[:5]
        lines += [f"  bank conflicts: {a.wavefronts} wavefronts instead of {a.ideal}: {a.where}" for a in worst]
        lines += [f"  never written: {n} elements of {name}, first {k}" for name, n, k in self.never_written]
        lines += [f"  {text}" for text in self.hazards]
        lines += [f"  warning: {text} ({n}x)" for text, n in self.warnings.items()]
        return "\n".join(lines)
