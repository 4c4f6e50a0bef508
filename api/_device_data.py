"""Whether launches look at device data first: lengths, tables, offsets, lists and scales."""

from __future__ import annotations

from collections.abc import Callable

from hopwell import _checks as checks
from hopwell._switches import forget_calls
from hopwell.kernels import settings
from hopwell.kernels.device_data import first_fault
from hopwell.kernels.problem import AttentionProblem
from hopwell.kernels.tickets import is_capturing


def check_device_data(enable: bool) -> None:
    """Look at the device data of every call before its launch, or stop doing so; in place of ``HOPWELL_CHECK``.

    Lengths, tables, offsets, lists of tokens and scales on the device are compared there with what the call's shapes
    allow; of scales in a cache, those of tokens that are read. The host waits once for the outcome, and a ValueError
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


def check(problem: AttentionProblem, name: Callable[[str], str]) -> None:
    """Raise what is wrong in the device data of a problem; ``name`` tells the argument that an operand is given as."""
    device = problem.query.device
    if device.type == "cuda" and is_capturing():
        return
    fault = first_fault(problem)
    if fault is not None:
        raise ValueError(fault.message(name(fault.operand)))
