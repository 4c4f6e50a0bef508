"""Settings: the emulated architecture and the way kernels are run.

``use("sm_100a", schedule="random", seed=3)`` applies inside a ``with`` block. Otherwise environment variables decide:
HOPWELL_EMULATE (an architecture, or ``off``), HOPWELL_EMULATE_SCHEDULE, HOPWELL_EMULATE_SEED, HOPWELL_EMULATE_CHECKS (a
comma-separated list out of race, proxy, sync, strict; ``none``) and HOPWELL_EMULATE_WORKERS.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

from hopwell.kernels.hardware import DEFAULT_ARCH
from hopwell.kernels.jit import settings

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
SCHEDULES = ("eager", "late", "random", "priority")
CHECKS = ("race", "proxy", "sync", "strict")
NUMERICS = ("auto", "hardware", "fast")

RESERVED_BYTES = 1024  # shared memory that the system reserves for each CTA


@dataclasses.dataclass(frozen=True)
class Limits:
    """Resources of one SM (CUDA programming guide, "technical specifications per compute capability")."""

    cta_shared_bytes: int  # maximum for one CTA
    threads: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of all CTAs of an SM, including the 1 KiB that the system reserves for each."""
        return self.cta_shared_bytes + RESERVED_BYTES


_SMALL, _LARGE = Limits(99 << 10, 1536), Limits(227 << 10, 2048)
LIMITS = {
    "sm_80": Limits(163 << 10, 2048), "sm_89": _SMALL, "sm_90a": _LARGE, "sm_100a": _LARGE, "sm_103a": _LARGE,
    "sm_120a": _SMALL, "sm_121a": _SMALL,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """How a launch is emulated.

    arch: the architecture kernels are compiled for and run as; None switches the emulator off.
    schedule: ``eager`` completes asynchronous work at issue; ``late`` as late as possible, newest first. ``random``
        draws warps and completions. ``priority`` gives each warp and asynchronous instruction a random fixed priority,
        and now and then demotes the winner.
    seed: of ``random`` and ``priority``; a failure prints it.
    race, proxy: detect accesses that nothing orders, and asynchronous reads of generic writes without
    fence.proxy.async.
    sync: detect mbarriers that end with transaction bytes left over. Also detect warps that wait for each other at
    different instructions of an aligned barrier, as compute-sanitizer's synccheck does. Hardware permits both.
    strict: reads of registers, shared memory and tensor memory that were never written are errors.
    hazards: ``raise`` at the end of the launch that had them, or ``report`` only.
    banks: count shared-memory bank conflicts.
    resident: clusters that run at the same time at first; more are admitted when those make no progress.
    workers: processes that share a launch's clusters; 0 means one per core when the launch is long enough.
    max_instructions: warp instructions after which a launch counts as hung.
    numerics: rounding of matrix products. ``hardware`` models the tensor cores' alignment and truncation, ``fast``
        chains fused multiply-adds, ``auto`` models only what changes results visibly: 8-bit wgmma with its short
        accumulator.
    sms: what the emulated device says its number of SMs is. A cooperative launch that needs more is refused.
    """

    arch: str | None = DEFAULT_ARCH
    schedule: str = "eager"
    seed: int = 0
    race: bool = False
    proxy: bool = False
    sync: bool = False
    strict: bool = False
    hazards: str = "raise"
    banks: bool = True
    resident: int = 2
    workers: int = 0
    max_instructions: int = 10**12
    numerics: str = "auto"
    sms: int = 132

    def __post_init__(self) -> None:
        if self.arch is not None and self.arch not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {self.arch!r}; the emulator has {', '.join(ARCHITECTURES)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; there are {', '.join(SCHEDULES)}")
        if self.numerics not in NUMERICS:
            raise ValueError(f"unknown numerics {self.numerics!r}; there are {', '.join(NUMERICS)}")
        if self.hazards not in ("raise", "report"):
            raise ValueError(f"hazards must be 'raise' or 'report', not {self.hazards!r}")

    @property
    def limits(self) -> Limits:
        return LIMITS[self.arch or DEFAULT_ARCH]

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the emulated device."""
        number = (self.arch or DEFAULT_ARCH).split("_")[1].rstrip("a")
        return int(number[:-1]), int(number[-1])

    def describe(self) -> str:
        """Return the settings that reproduce the schedule."""
        seed = f", seed={self.seed}" if self.schedule in ("random", "priority") else ""
        checks = "".join(f", {name}=True" for name in CHECKS if getattr(self, name))
        return f"hopwell.emulator.use({self.arch!r}, schedule={self.schedule!r}{seed}{checks})"


def _from_environment() -> Options:
    arch = settings.choice("HOPWELL_EMULATE", ("off", *ARCHITECTURES), DEFAULT_ARCH)
    checks = settings.choices("HOPWELL_EMULATE_CHECKS", CHECKS)
    return Options(
        arch=None if arch == "off" else arch,
        schedule=settings.choice("HOPWELL_EMULATE_SCHEDULE", SCHEDULES, "eager"),
        seed=settings.count("HOPWELL_EMULATE_SEED"),
        workers=settings.count("HOPWELL_EMULATE_WORKERS"),
        race="race" in checks,
        proxy="proxy" in checks,
        sync="sync" in checks,
        strict="strict" in checks,
    )


_current: contextvars.ContextVar[Options | None] = contextvars.ContextVar("hopwell_emulator_options", default=None)


def options() -> Options:
    """Return the settings in force."""
    return _current.get() or _from_environment()


@contextlib.contextmanager
def use(arch: str | None = None, **changes: object) -> Iterator[Options]:
    """Apply settings inside a ``with`` block; what is not named stays as it was.

    Args:
        arch: an architecture such as "sm_100a", or "off".
        **changes: fields of :class:`Options`.
    """
    if arch is not None:
        changes["arch"] = None if arch == "off" else arch
    token = _current.set(dataclasses.replace(options(), **changes))  # type: ignore[arg-type]
    try:
        yield options()
    finally:
        _current.reset(token)
