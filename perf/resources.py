"""Registers, stack, spills and memories of compiled kernels, in Markdown."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tabulate import tabulate

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import KernelConfig
from hopwell.kernels.jit.toolchain import Artifact, artifact
from hopwell.kernels.registry import build
from hopwell.kernels.support import PREFILL_TYPES
from hopwell.perf.loops import innermost
from hopwell.perf.sass import Sass, cuda_tool, disassemble, sass_loops
from hopwell.perf.warp_model import product_of

HEADERS = [
    "kernel",
    "registers",
    "stack, bytes",
    "spills",
    "of them in a step",
    "shared memory, bytes",
    "tensor memory, columns",
]
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ALLOCATION = re.compile(r"\btcgen05\.alloc\.\S+ \[[^\]]+\], (\d+);")
# Instructions of tensor memory and of its products, in loops of a kernel with tcgen05.
_TENSOR_MEMORY = re.compile(r"UTC\w*MMA|LDTM|STTM")


@dataclass(frozen=True)
class Resources:
    """Resources that the assembler assigned to a kernel.

    Spills count instructions that store or load a spilled register. Step spills count only loops that multiply or
    access tensor memory, and take the loop with the most.
    """

    registers: int
    stack: int
    spills: int
    step_spills: int
    system_shared: int  # bytes of shared memory beyond the kernel's own
    local: int
    tensor_columns: int

    @staticmethod
    def of(built: Artifact) -> Resources:
        command = [cuda_tool("cuobjdump"), "-res-usage", str(built.cubin)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        [usage] = _USAGE.findall(said)
        registers, stack, shared, local = map(int, usage)
        code = disassemble(built.cubin)
        spills = {i for i, one in enumerate(code) if one.root in ("LDL", "STL")}
        steps = innermost(sass_loops(code), lambda loop: any(_is_of_a_step(code[i]) for i in loop.path))
        in_steps = max((len(spills & set(loop.path)) for loop in steps), default=0)
        columns = sum(map(int, _ALLOCATION.findall(built.ptx.read_text())))
        return Resources(registers, stack, len(spills), in_steps, shared, local, columns)


def _is_of_a_step(one: Sass) -> bool:
    return product_of(one) is not None or _TENSOR_MEMORY.match(one.root) is not None


def shipped(arch: str, pattern: str = "") -> Iterator[KernelConfig]:
    """Yield the attention kernels compiled ahead for ``arch`` whose names match ``pattern``."""
    for config in kernels_to_ship(arch, PREFILL_TYPES):
        if isinstance(config, KernelConfig) and re.search(pattern, config.name):
            yield config


def table(configs: Iterable[KernelConfig]) -> str:
    """Return a table with a row for each kernel, compiling kernels as needed."""
    rows = []
    for config in configs:
        has, (kernel, _) = Resources.of(artifact(config)), build(config)
        numbers = (has.registers, has.stack, has.spills, has.step_spills, kernel.shared_bytes, has.tensor_columns)
        rows.append([config.name, *map(str, numbers)])
    return tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True)
