from __future__ import annotations

import pytest


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.emulator)],
    ids=["gpu", "emulator"],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a call are. With tensors on the CPU the same kernel runs on the emulator."""
    return request.param
