"""Windows of prefill without a causal mask."""

from __future__ import annotations

from typing import Any

from hopwell._checks import arguments as checks
from hopwell.kernels.problem import Mask, MaskKind


def right_of_causal(window_right: Any, where: str) -> None:
    """Check that a call with a causal mask has no right bound of its own."""
    right = checks.host_int("window_right", window_right, minimum=-1)
    if right >= 0:
        raise ValueError(f"window_right must be -1 {where}, got {right}")


def full_or_window(left: int, window_right: Any, tokens: int) -> Mask:
    """Return the mask of rows that see keys p - left to p + window_right; -1 means all keys of a side.

    No request has more than ``tokens`` queries, so no row has as many keys of its own request to its right.
    """
    right = checks.host_int("window_right", window_right, minimum=-1)
    right = tokens if right < 0 else min(right, tokens)
    if left < 0 and right >= tokens - 1:
        return Mask(MaskKind.FULL)
    if right > 0:
        return Mask(MaskKind.LOCAL, left, window_right=right)
    return Mask(MaskKind.SLIDING_WINDOW, left) if left >= 0 else Mask(MaskKind.CAUSAL)
