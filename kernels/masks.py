"""Masks: the keys that a row sees, their names in kernels and messages, and their rows of the support matrix.

A mask that is an interval of keys is defined only here. Tile ranges, the tiles that need a predicate, and the predicate
follow from its bounds, see ``parts/rows/mask.py``. Problems and configs name masks, so this module does not need the
DSL.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

WIDEST = 1 << 30  # largest window: positions of keys and rows, minus the window, fit 32 bits


def at_least(value: Any, least: int) -> Any:
    """Return the larger of the two; ``value`` is a tensor, a number, or a value that a kernel computes."""
    if isinstance(value, torch.Tensor):
        return value.clamp(min=least)
    from cutlass import max as larger  # the DSL takes seconds to import, and only traced kernels get here

    return larger(value, least)


def _to_itself(position: Any, size: Any) -> Any:
    return position + 1


def _window(position: Any, size: Any) -> Any:
    return at_least(position - size, 0)


class Sides(NamedTuple):
    """Numbers of keys to the left and to the right of a row's own key that the row sees."""

    left: int
    right: int


SIDE_BITS = 32  # a kernel gets both sides in one integer


def _left_side(position: Any, sides: Any) -> Any:
    return _window(position, sides.left)


def _right_side(position: Any, sides: Any) -> Any:
    return position + sides.right + 1


def _chunk(position: Any, size: Any) -> Any:
    return at_least(position, 0) & -size


@dataclass(frozen=True)
class MaskRule:
    """Rule of a kind of mask: the row at ``position`` sees keys ``first(position, size)`` to ``end(position, size) -
    1``.

    Both bounds are clipped to the existing keys. Neither decreases with the position.

    Attributes:
        name: the mask's name in kernels and messages.
        feature, title: the row of the support matrix.
        first, end: the bounds; None if the mask has no bound on that side.
        size: the field of :class:`Mask` that the bounds depend on, if any.
        prefill: whether prefill kernels take the mask. Decode and MLA list their masks themselves.
        ahead: whether prefill kernels with the mask are compiled ahead. The others are compiled on demand.
    """

    name: str
    feature: str
    title: str
    first: Callable[[Any, Any], Any] | None = None
    end: Callable[[Any, Any], Any] | None = None
    size: str = ""
    prefill: bool = True
    ahead: bool = True

    @property
    def has_sides(self) -> bool:
        """Whether the size of the mask is a number of keys on each side."""
        return self.size == "sides"

    @property
    def depends_on_position(self) -> bool:
        """Whether rows see different keys."""
        return self.first is not None or self.end is not None


class MaskEnum(enum.Enum):
    """Kinds of masks. Each is a :class:`MaskRule`, whose name is the member's value."""

    rule: MaskRule

    def __new__(cls, rule: MaskRule) -> MaskEnum:
        """Create the member of a rule."""
        member = object.__new__(cls)
        member._value_ = rule.name
        member.rule = rule
        return member


class MaskKind(MaskEnum):
    """Kinds of masks. Row t of a request with q_len queries and kv_len keys is at p = kv_len - q_len + t."""

    # A row sees every key of the request.
    FULL = MaskRule("full", "full", "no mask")
    # A row sees keys 0..p (bottom-right aligned).
    CAUSAL = MaskRule("causal", "causal", "causal mask (bottom-right)", end=_to_itself)
    # A row sees keys p - window_left..p.
    SLIDING_WINDOW = MaskRule("sliding_window", "window", "sliding window", _window, _to_itself, "window_left")
    # A row sees keys p - window_left..p + window_right.
    LOCAL = MaskRule("local", "local_window", "window on both sides", _left_side, _right_side, "sides", ahead=False)
    # A row sees keys (p // chunk) * chunk..p.
    CHUNKED = MaskRule("chunked", "chunked", "chunked mask", _chunk, _to_itself, "chunk")
    # A row sees keys p - window_left.. before the new tokens, and the new tokens in draft_mask; without one, up to p:
    # ``DraftMask``.
    DRAFT = MaskRule(
        "draft",
        "speculative",
        "several tokens per request with a mask (speculative decoding)",
        _window,
        size="window_left",
        prefill=False,
    )
    # A DCP rank holds every n-th key of a request; a row sees the rank's keys up to p: DcpRank. ``TokenPositions`` has
    # p.
    CYCLIC = MaskRule(
        "cyclic", "dcp", "decode context parallel: a rank has every n-th key", end=_to_itself, prefill=False
    )


@dataclass(frozen=True)
class Mask:
    """A mask kind with its parameters.

    ``window_left`` counts keys to the left of the row's own position, ``window_right`` of a local mask keys to its
    right. A negative number means no bound. ``chunk`` is a power of two.
    """

    kind: MaskEnum
    window_left: int = -1
    chunk: int = 0
    window_right: int = 0

    @property
    def sides(self) -> Sides:
        """Keys to the left and to the right, within the widest window."""
        return Sides(_clipped(self.window_left), _clipped(self.window_right))

    @property
    def size(self) -> int | Sides:
        """Parameter of the kind, from which its bounds are computed; 0 if it has none."""
        rule = self.kind.rule
        if rule.has_sides:
            return self.sides
        return _clipped(getattr(self, rule.size)) if rule.size else 0

    @property
    def packed_size(self) -> int:
        """The size as one integer of 64 bits."""
        size = self.size
        return size.left | size.right << SIDE_BITS if isinstance(size, Sides) else size


def _clipped(size: int) -> int:
    return WIDEST if size < 0 else min(size, WIDEST)
