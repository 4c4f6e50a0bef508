from __future__ import annotations

import pathlib
import sys

import pytest

# Tests of the entries are run on other architectures here.
sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("prefill", "decode", "mla")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What compiles for hours is run by name only."""
    if "slow_emulator" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow_emulator")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
