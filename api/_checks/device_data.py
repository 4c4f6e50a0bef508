"""The switch for checks of device data before launches: lengths, tables, offsets, top-k indices and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hopwell._calls.switches import forget_calls
from hopwell._checks import arguments as checks
from hopwell.kernels.jit import settings
from hopwell.kernels.launch.device_data import Rule, first_fault
from hopwell.kernels.launch.tickets import is_capturing


def check_device_data(enable: bool) -> None:
    """Check the device data of every call before its launch, or stop doing so; overrides ``HOPWELL_CHECK``.

    The check compares lengths, tables, offsets, top-k indices and scales on the device with the limits of the call's
    shapes. It also checks the destination of each new token of ``append_paged_kv_cache``. Scales in a cache are checked
    only for tokens that are read. The host waits once for the outcome, and a ValueError names the argument, the index
    and the value.

    This is the first thing to try if a result looks wrong. While it is on, every call also goes through all other
    checks. While it is off, it costs nothing. Launches captured by a CUDA graph are not checked, because nothing can
    wait during a capture.

    Args:
        enable: whether to check.

    Raises:
        TypeError: ``enable`` is not a bool.
    """
    settings.CHECK.set(checks.flag("enable", enable))
    forget_calls()


def is_enabled() -> bool:
    """Return whether device data is checked."""
    return settings.CHECK.is_on


def check(rules: Iterable[Rule], on: torch.device, name: Callable[[str], str] = str) -> None:
    """Raise a ValueError for the first element of device data that breaks one of ``rules``.

    ``name`` maps an operand to the argument that contains it. There is no check while a CUDA graph is captured.
    """
    if on.type == "cuda" and is_capturing():
        return
    fault = first_fault(rules)
    if fault is not None:
        raise ValueError(fault.message(name(fault.operand)))
