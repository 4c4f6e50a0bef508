"""Exceptions of the emulator. Each message says where: CTA, warp, PTX line and, when known, Python source line.

The names say what went wrong; an "Error" behind each would add nothing.
"""

# ruff: noqa: N818

from __future__ import annotations


class EmulatorError(Exception):
    """Base class: the kernel, or its launch, did something that is wrong on hardware too, or that is not emulated."""


class Unsupported(EmulatorError):
    """The kernel uses an instruction or form that the emulator does not have."""


class MemoryFault(EmulatorError):
    """Out-of-bounds, misaligned or forbidden access."""


class UninitializedRead(EmulatorError):
    """Something was read that was never written."""


class BarrierFault(EmulatorError):
    """A barrier was misused: wrong counts, not initialised, destroyed, bytes left over."""


class Deadlock(EmulatorError):
    """No warp can make progress; the message lists every warp, barrier and pending asynchronous operation."""


class Hazard(EmulatorError):
    """The race detector or the proxy check found accesses that nothing orders."""


class HostError(EmulatorError):
    """The host side cannot run: no C compiler, unknown kernel, self-test failed."""
