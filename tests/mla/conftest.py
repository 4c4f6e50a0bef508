from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def batch_invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split requests by their own lengths alone."""
    import hopwell
    from hopwell._calls import switches
    from hopwell.kernels.jit import settings

    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", None)
    hopwell.batch_invariant(True)
    yield
    switches.forget_calls()
