"""Exceptions of the emulator. Each message names the CTA, warp, PTX line and, if known, the Python source line.

The names state the fault; the suffix "Error" would add nothing.
"""

# ruff: noqa: N818

from __future__ import annotations


class EmulatorError(Exception):
    """Base class: the kernel or its launch did something illegal on hardware, or something that is not emulated."""


class Unsupported(EmulatorError):
    """The kernel uses an instruction or form that the emulator does not support."""


class MemoryFault(EmulatorError):
    """Out-of-bounds, misaligned or forbidden access."""


class UninitializedRead(EmulatorError):
    """A read of memory or a register that was never written."""


class BarrierFault(EmulatorError):
    """Misuse of a barrier: wrong counts, not initialised, destroyed, bytes left over."""


class Deadlock(EmulatorError):
    """No warp can make progress; the message lists every warp, barrier and pending asynchronous operation."""


class Hazard(EmulatorError):
    """Accesses without an order between them, found by the race detector or the proxy check."""


class HostError(EmulatorError):
    """The host side cannot run: no C compiler, unknown kernel, self-test failed."""
