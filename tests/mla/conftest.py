from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

# Calls of decode and of MLA are mixed in some tests, see mixed_calls.py.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "decode"))


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
