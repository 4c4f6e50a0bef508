from __future__ import annotations

import pathlib
import sys

import pytest

# Batches, the float64 reference and what stands for all kernels: shared with the tests of the kernels.
sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("prefill", "decode", "mla", "kernels")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What compiles for hours is run by name only."""
    if "slow_emulator" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow_emulator")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
