"""Settings that may change between calls, and the caches that a change must clear."""

from __future__ import annotations

from collections.abc import Callable

from hopwell._checks import arguments as checks
from hopwell.kernels.jit import settings

_forgetful: list[Callable[[], None]] = []  # functions that clear remembered calls


def on_switch(forget: Callable[[], None]) -> None:
    """Call ``forget`` whenever a setting changes."""
    _forgetful.append(forget)


def forget_calls() -> None:
    """Clear all remembered calls after a setting changed, so that every call goes through all checks again."""
    for forget in _forgetful:
        forget()


def batch_invariant(enable: bool) -> None:
    """Make MLA decode batch invariant (bits independent of the batch) or faster; overrides ``HOPWELL_BATCH_INVARIANT``.

    All entries except MLA's are always batch invariant: a request's output and log-sum-exp have the bits that it would
    get alone. By default MLA decode cuts the keys of all requests into equal CTA parts, which keeps every SM busy to
    the end. The cuts in a request's keys, and so the rounding of its last bits, then depend on the other requests'
    lengths. With this setting each request is cut by its own length only.

    Products of up to 16 rows (heads times new tokens) are batch invariant either way. Results are deterministic either
    way: the same call gives the same bits.

    Args:
        enable: whether results must be batch invariant.

    Raises:
        TypeError: ``enable`` is not a bool.
    """
    settings.BATCH_INVARIANT.set(checks.flag("enable", enable))
    forget_calls()
