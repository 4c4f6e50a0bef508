"""The core set of tests, ``pytest --core``: what a change is tried with first.

All of the host's tests belong to it, those of traced parts among them. Of those that compile kernels it has one kernel
of each cell (family, architecture, element type of queries, of K and V), both compiled alone and run on the emulator,
and where a test names no kernel, one case of each file: every part and every entry runs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

COMPILING = ("compile", "emulator", "slow_emulator")
KERNELS_OF_A_CELL = 1  # in either kind of test


def cell(item: pytest.Item) -> Hashable | None:
    """Say what a test that compiles kernels stands for in the core set; None for the other tests.

    Tests of the same cell can stand for each other there.
    """
    kinds = [kind for kind in COMPILING if item.get_closest_marker(kind)]
    if not kinds:
        return None
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    for config in params:
        if hasattr(config, "family") and hasattr(config, "arch"):
            kv = getattr(config, "kv_type", None)
            return (*kinds, config.family, config.arch, getattr(config, "dtype", ""), kv)
    return (*kinds, item.path)


def core(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the core set in their order: the first ones of each cell, and all that compile nothing."""
    taken: Counter[Hashable] = Counter()
    chosen = []
    for item in items:
        place = cell(item)
        if place is not None:
            taken[place] += 1
        if place is None or taken[place] <= KERNELS_OF_A_CELL:
            chosen.append(item)
    return chosen
