"""The operations on tensors that a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operations_of(call: Callable[[], Any], *, nested: bool = False) -> list[str]:
    """Return the names of the operations of ``call``; with ``nested``, also of the operations inside them.

    The profiler sees them. Under a dispatch mode a call would go through its op instead, and none is repeated.
    """
    with torch.autograd.profiler.profile() as profile:
        call()
    events = [event for event in profile.function_events if nested or event.cpu_parent is None]
    return [event.name.removeprefix("aten::") for event in events]
