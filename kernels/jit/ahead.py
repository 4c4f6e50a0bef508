"""Ahead-of-time compilation of many kernels, with progress reported as lines of text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hopwell.kernels.jit import toolchain
from hopwell.kernels.registry import Buildable

# Time: mean of 14 prefill and decode kernels on two cores with other load. Size: mean of 662 kernels (2026-11-26).
SECONDS_A_KERNEL = 5.0
BYTES_A_KERNEL = 1_070_000

Say = Callable[[str], None]


def compile_and_report(configs: Sequence[Buildable], jobs: int | None, say: Say) -> None:
    """Compile the kernels that are not in the cache, in ``jobs`` processes (default: one for each CPU).

    ``say`` gets a line with the number of kernels and an estimate of time and size. A line for each kernel follows,
    with the time left at the rate so far, and a last line at the end.
    """
    folder = toolchain.cache_dir()
    missing = {config.name for config in configs if toolchain.stored(config) is None}
    if not missing:
        say(f"{len(configs)} kernels, all of them compiled")
        return
    processes = jobs or os.cpu_count() or 1
    say(
        f"{len(configs)} kernels, {len(configs) - len(missing)} of them compiled; compiling {len(missing)} in "
        f"{processes} processes: about {duration(len(missing) * SECONDS_A_KERNEL / processes)} and "
        f"{size(len(missing) * BYTES_A_KERNEL)}"
    )
    begin, compiled = time.perf_counter(), 0
    for done, built in enumerate(toolchain.compile_ahead(configs, jobs), 1):
        compiled += built.path.name in missing
        seconds = time.perf_counter() - begin
        left = (len(missing) - compiled) * seconds / compiled if compiled else 0.0
        say(f"[{done}/{len(configs)}] {built.path.name}" + f", {duration(left)} left" * (left > 0))
    say(f"{len(configs)} kernels in {folder}, {duration(time.perf_counter() - begin)}")


def duration(seconds: float) -> str:
    """Return ``seconds`` in whole seconds, minutes or hours, as 90 s, 12 min or 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(octets: float) -> str:
    """Return a number of bytes in megabytes or gigabytes."""
    return f"{octets / 1e6:.1f} MB" if octets < 1e9 else f"{octets / 1e9:.1f} GB"
