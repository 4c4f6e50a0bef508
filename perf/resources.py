"""Registers, stack and spills of compiled kernels, in Markdown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import KernelConfig
from hopwell.kernels.jit.toolchain import artifact
from hopwell.kernels.registry import build
from hopwell.kernels.support import PREFILL_TYPES
from hopwell.perf.loops import innermost
from hopwell.perf.sass import cuda_tool, disassemble, sass_loops
from hopwell.perf.warp_model import product_of

HEADERS = ["kernel", "registers", "stack, bytes", "spills", "of them in a step", "shared memory, bytes"]


@dataclass(frozen=True)
class Resources:
    """Resources that the assembler assigned to a kernel.

    Spills count instructions that store or load a spilled register. Step spills count only loops that multiply, and
    take the loop with the most.
    """

    registers: int
    stack: int
    spills: int
    step_spills: int

    @staticmethod
    def of(cubin: Path) -> Resources:
        command = [cuda_tool("cuobjdump"), "-res-usage", str(cubin)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", said)
        code = disassemble(cubin)
        spills = {i for i, one in enumerate(code) if one.root in ("LDL", "STL")}
        steps = innermost(sass_loops(code), lambda loop: any(product_of(code[i]) for i in loop.path))
        in_steps = max((len(spills & set(loop.path)) for loop in steps), default=0)
        return Resources(int(registers), int(stack), len(spills), in_steps)


def shipped(arch: str, pattern: str = "") -> Iterator[KernelConfig]:
    """Yield the attention kernels compiled ahead for ``arch`` whose names match ``pattern``."""
    for config in kernels_to_ship(arch, PREFILL_TYPES):
        if isinstance(config, KernelConfig) and re.search(pattern, config.name):
            yield config


def table(configs: Iterable[KernelConfig]) -> str:
    """Return a table with a row for each kernel, compiling kernels as needed."""
    rows = []
    for config in configs:
        has, (kernel, _) = Resources.of(artifact(config).cubin), build(config)
        numbers = (has.registers, has.stack, has.spills, has.step_spills, kernel.shared_bytes)
        rows.append([config.name, *map(str, numbers)])
    return tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
