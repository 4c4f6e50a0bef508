"""Emulator settings for launches: one ordinary and some adverse schedules, with the detectors on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from helpers.decode_cases import Setting
from hopwell import emulator


def setting(schedule: str, seed: int = 0, arch: str = "sm_90a", **more: int) -> Setting:
    return functools.partial(emulator.use, arch, schedule=schedule, seed=seed, race=True, proxy=True, **more)


def schedules(seed: int, adverse: int = 2, **more: Any) -> Sequence[Setting]:
    """Return the settings. The seed depends on the case, so that the cases together see many schedules."""
    drawn = [setting(("random", "priority")[(seed + i) % 2], seed + i, **more) for i in range(adverse)]
    return setting("eager", **more), *drawn
