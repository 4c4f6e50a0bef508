"""Masks: which keys a row sees, what kernels and messages call that, and which row of the support matrix it is.

This is the one place for a mask that is an interval of keys: tile ranges, the tiles that need a predicate, and the
predicate follow from its bounds, see ``parts/rows/mask.py``. Problems and configs name masks, so that nothing here
needs the DSL.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WIDEST = 1 << 30  # of windows: positions of keys and rows, less the window, fit 32 bits


def at_least(value: Any, least: int) -> Any:
    """Return the larger of the two, where ``value`` is a tensor, a number, or one that a kernel computes."""
    if isinstance(value, torch.Tensor):
        return value.clamp(min=least)
    from cutlass import max as larger  # the DSL is there where kernels are traced, and takes seconds to import

    return larger(value, least)


def _to_itself(position: Any, size: Any) -> Any:
    return position + 1


def _window(position: Any, size: Any) -> Any:
    return at_least(position - size, 0)


def _chunk(position: Any, size: Any) -> Any:
    return at_least(position, 0) & -size


@dataclass(frozen=True)
class MaskRule:
    """What a kind of mask says. The row at ``position`` sees keys ``first(position, size)`` up to, but without,
    ``end(position, size)``, as far as there are keys. Neither decreases with the position.

    Attributes:
        name: what kernels and messages call it.
        feature, title: the row of the support matrix.
        first, end: the bounds; None where the mask has none on that side.
        size: the field of :class:`Mask` that bounds depend on, if any.
        prefill: whether kernels of prefill take it. Those of decode and MLA say themselves what they take.
    """

    name: str
    feature: str
    title: str
    first: Callable[[Any, Any], Any] | None = None
    end: Callable[[Any, Any], Any] | None = None
    size: str = ""
    prefill: bool = True

    @property
    def depends_on_position(self) -> bool:
        """Tell whether rows see different keys."""
        return self.first is not None or self.end is not None


class MaskKinds(enum.Enum):
    """Kinds of masks, each a :class:`MaskRule`, whose name is the member's value."""

    rule: MaskRule

    def __new__(cls, rule: MaskRule) -> MaskKinds:
        """Make the member of a rule."""
        member = object.__new__(cls)
        member._value_ = rule.name
        member.rule = rule
        return member


class MaskKind(MaskKinds):
    """Which keys a row sees. Row t of a request with q_len queries and kv_len keys is at p = kv_len - q_len + t."""

    # A row sees every key of the request.
    FULL = MaskRule("full", "full", "no mask")
    # A row sees keys 0..p (bottom-right aligned).
    CAUSAL = MaskRule("causal", "causal", "causal mask (bottom-right)", end=_to_itself)
    # A row sees keys p - window_left..p.
    SLIDING_WINDOW = MaskRule("sliding_window", "window", "sliding window", _window, _to_itself, "window_left")
    # Keys (p // chunk) * chunk..p.
    CHUNKED = MaskRule("chunked", "chunked", "chunked mask", _chunk, _to_itself, "chunk")
    # Keys p - window_left.., of the request's queries those of draft_mask, without one up to p: ``DraftMask``.
    DRAFT = MaskRule(
        "draft",
        "speculative",
        "several tokens per request with a mask (speculative decoding)",
        _window,
        size="window_left",
        prefill=False,
    )
    # Keys up to p of every n-th key of the request, which is what one rank has: see DcpRank. ``TokenPositions`` has p.
    CYCLIC = MaskRule(
        "cyclic", "dcp", "decode context parallel: a rank has every n-th key", end=_to_itself, prefill=False
    )


@dataclass(frozen=True)
class Mask:
    """A mask kind with its parameters.

    ``window_left`` counts keys to the left of the row's own position, where a negative number is no window; ``chunk``
    is a power of two.
    """

    kind: MaskKinds
    window_left: int = -1
    chunk: int = 0

    @property
    def size(self) -> int:
        """Return the parameter of the kind, which its bounds are computed with; 0 where it has none."""
        given = getattr(self, self.kind.rule.size) if self.kind.rule.size else 0
        return WIDEST if given < 0 else min(given, WIDEST)
