"""Runs compiled kernels on the CPU: the PTX of sm_90a, sm_100a, sm_103a and sm_120a, one warp instruction at a time.

    from hopwell import emulator

    module = emulator.load("kernel.o", "kernel.ptx")        # what a TVM-FFI function exports, and its PTX
    attend = module.function("attend")
    with emulator.use("sm_90a", schedule="random", seed=7, race=True, proxy=True):
        attend(query, addresses, geometry, 0.125, tensors={"query": query, "out": (out, "out")})
    print(emulator.report())

README.md beside this file is the guide.
"""

from __future__ import annotations

from .diagnosis.report import LaunchReport
from .errors import (
    BarrierFault,
    Deadlock,
    EmulatorError,
    Hazard,
    HostError,
    MemoryFault,
    UninitializedRead,
    Unsupported,
)
from .host.load import load
from .host.module import Function, Module, memory, reports
from .machine.memory import Span, span_of
from .options import Options, options, use


def report() -> LaunchReport:
    """Return the report of the last emulated launch in this thread."""
    done = reports()
    if not done:
        raise EmulatorError("nothing has been launched yet")
    return done[-1]


__all__ = [
    "BarrierFault",
    "Deadlock",
    "EmulatorError",
    "Function",
    "Hazard",
    "HostError",
    "LaunchReport",
    "MemoryFault",
    "Module",
    "Options",
    "Span",
    "UninitializedRead",
    "Unsupported",
    "load",
    "memory",
    "options",
    "report",
    "reports",
    "span_of",
    "use",
]
