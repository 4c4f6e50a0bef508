from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

# Batches and how they are checked are those of decode, the float64 reference is that of prefill.
sys.path += [str(pathlib.Path(__file__).parents[1] / part) for part in ("prefill", "decode")]


@pytest.fixture
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests are cut by their own lengths alone."""
    import hopwell
    from hopwell import _switches
    from hopwell.kernels import settings

    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", None)
    hopwell.batch_invariant(True)
    yield
    _switches.forget_calls()
