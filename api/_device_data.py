"""Whether launches look at device data first: lengths, tables, offsets, lists and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hopwell import _checks as checks
from hopwell._switches import forget_calls
from hopwell.kernels.jit import settings
from hopwell.kernels.launch.device_data import Rule, first_fault
from hopwell.kernels.launch.tickets import is_capturing


def check_device_data(enable: bool) -> None:
    """Look at the device data of every call before its launch, or stop doing so; in place of ``HOPWELL_CHECK``.

    Lengths, tables, offsets, lists of tokens and scales on the device are compared there with what the call's shapes
    allow, and so is the place that ``append_paged_kv_cache`` writes each new token to; of scales in a cache, those of
    tokens that are read. The host waits once for the outcome, and a ValueError
    names the argument, the index and the value. It is the first thing to try where a result looks wrong. While it is
    on, every call goes through all other checks as well; while it is off, it costs nothing. Launches that a CUDA graph
    captures are not looked at, as nothing can wait there.

    Args:
        enable: whether to look.

    Raises:
        TypeError: ``enable`` is no bool.
    """
    settings.CHECK.set(checks.flag("enable", enable))
    forget_calls()


def is_enabled() -> bool:
    """Tell whether device data is looked at."""
    return settings.CHECK.is_on


def check(rules: Iterable[Rule], on: torch.device, name: Callable[[str], str] = str) -> None:
    """Raise a ValueError for the first element of device data that breaks one of ``rules``. ``name`` returns the
    argument that an operand lies in. While a CUDA graph is captured there is no check."""
    if on.type == "cuda" and is_capturing():
        return
    fault = first_fault(rules)
    if fault is not None:
        raise ValueError(fault.message(name(fault.operand)))
