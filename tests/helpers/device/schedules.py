"""Emulator settings for launches: one ordinary and some adverse schedules, with the detectors on.

Tests of a change, ``pytest --core`` and ``--functions``, run each case in one adverse schedule. All other runs, such as
``pytest --nightly``, have all schedules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hopwell import emulator

# Context of a launch, such as the settings of the emulator.
Setting = Callable[[], contextlib.AbstractContextManager[Any]]
PLAIN: tuple[Setting, ...] = (contextlib.nullcontext, contextlib.nullcontext)

only_one = False  # conftest.py sets it


def setting(schedule: str, seed: int = 0, arch: str = "sm_90a", **more: int) -> Setting:
    return functools.partial(emulator.use, arch, schedule=schedule, seed=seed, race=True, proxy=True, **more)


def schedules(seed: int, adverse: int = 2, **more: Any) -> Sequence[Setting]:
    """Return the settings: all of them, or the first adverse one if ``only_one`` is set.

    The seed depends on the case, so that the cases together see many schedules.
    """
    drawn = [setting(("random", "priority")[(seed + i) % 2], seed + i, **more) for i in range(adverse)]
    return drawn[:1] if only_one else (setting("eager", **more), *drawn)
