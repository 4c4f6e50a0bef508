from __future__ import annotations

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--calls", type=int, default=1500, help="calls that tests/api/test_api_seeded_fuzz.py makes")


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


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.emulator)],
    ids=["gpu", "emulator"],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a call are. With tensors on the CPU the same kernel runs on the emulator."""
    return request.param
