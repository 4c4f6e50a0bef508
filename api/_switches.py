"""Settings that can be changed between calls, and what has to be forgotten then."""

from __future__ import annotations

from collections.abc import Callable

from hopwell import _checks as checks
from hopwell.kernels.jit import settings

_forgetful: list[Callable[[], None]] = []  # what forgets the calls that would be repeated as they were


def on_switch(forget: Callable[[], None]) -> None:
    """Have ``forget`` called whenever a setting is changed."""
    _forgetful.append(forget)


def forget_calls() -> None:
    """Let every call go through all checks again, because a setting has been changed."""
    for forget in _forgetful:
        forget()


def batch_invariant(enable: bool) -> None:
    """Give every request the same bits whatever else is in its batch, or let MLA decode be faster; in place of
    ``HOPWELL_BATCH_INVARIANT``.

    All entries but MLA's are always batch invariant: a request's output and log-sum-exp have the bits that it would get
    alone. MLA decode cuts the keys of all requests into equal CTA parts, which keeps every multiprocessor busy to the
    end, so that where a request's keys are cut, and with it the rounding of its last bits, depends on the lengths of
    the others. With this setting it cuts requests by their own lengths alone. Products of up to 16 rows (heads times
    new tokens) are batch invariant either way. Results are deterministic either way: the same call gives the same bits.

    Args:
        enable: whether results have to be batch invariant.

    Raises:
        TypeError: ``enable`` is no bool.
    """
    settings.BATCH_INVARIANT.set(checks.flag("enable", enable))
    forget_calls()
