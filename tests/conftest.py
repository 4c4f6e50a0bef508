from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Compiling a kernel rewrites its parts' functions in place, and they no longer run as Python afterwards. Workers of
    # pytest-xdist take tests in this order too.
    items.sort(key=lambda item: item.get_closest_marker("traced") is None)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
