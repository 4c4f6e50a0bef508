"""Candidates of a figure and their colours, the same in all figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

OURS = "hopwell"
OUR_SHADES = ("#a50f26", "#e0445c", "#f2929f", "#f7bcc4", "#fbdfe3")  # one strong hue, lighter from form to form
PEER_COLORS = {
    "FlashAttention 2": "#2f4f7f",
    "FlashAttention 3": "#4f6f9f",
    "FlashAttention 4": "#7f95b8",
    "FlashMLA": "#8d7fae",
    "FlashInfer fa2": "#8fb3a3",
    "FlashInfer fa3": "#a7c4a0",
    "FlashInfer trtllm-gen": "#6f8fa8",
    "FlashInfer cute-dsl": "#7ba8a8",
    "FlashInfer cutlass": "#a8a890",
    "FlashInfer FMHAv2": "#b9aed0",
    "FlashInfer xqa": "#cdbfa6",
    "cuDNN": "#9fb8c8",
    "FlashInfer append": "#7fa08f",
    "torch indexing": "#c4c4c4",
}
OTHER_COLORS = ("#8c8c8c", "#b3b3b3", "#cccccc", "#dddddd")  # for candidates without a colour of their own
# Libraries that candidates of different projects call.
SAME_LIBRARY = dict.fromkeys(("FlashInfer cuDNN", "cuDNN SDPA", "cuDNN fp8 graph"), "cuDNN")
MOST = 8  # candidates in a figure, at most
LEAST_OURS = 2  # of MOST, for our forms, if there are enough

Rates = Mapping[str, Sequence["float | None"]]


def base(candidate: str) -> str:
    """Return a candidate's name without the form of its keys, or the name of the library that it calls."""
    name = candidate.partition(", pages of ")[0]
    return SAME_LIBRARY.get(name, name)


def is_ours(candidate: str) -> bool:
    """Whether the candidate is a form of hopwell."""
    return base(candidate) == OURS


def shown(rates: Rates) -> dict[str, list[float | None]]:
    """Return the rates in a figure: each peer's best form, case by case, and our first forms, :data:`MOST` at most.

    A figure with too many peers omits the peers farthest from the best one.
    """
    peers: dict[str, list[float | None]] = {}
    for name, row in rates.items():
        if not is_ours(name):
            best = peers.get(base(name), [None] * len(row))
            pairs = zip(best, row, strict=True)
            peers[base(name)] = [max(filter(None, pair), default=None) for pair in pairs]
    ours = [name for name in rates if is_ours(name)]
    nearness = {name: _nearness(row, peers.values()) for name, row in peers.items()}
    near = sorted(peers, key=lambda name: -nearness[name])[: MOST - len(ours[:LEAST_OURS])]
    kept = {name: row for name, row in peers.items() if name in near}
    return {name: list(rates[name]) for name in ours[: MOST - len(kept)]} | kept


def _nearness(rates: Sequence[float | None], peers: Iterable[Sequence[float | None]]) -> float:
    """Return a peer's highest rate as a share of the best peer's rate, over all cases."""
    bests = [max(filter(None, column), default=None) for column in zip(*peers, strict=True)]
    return max((rate / best for rate, best in zip(rates, bests, strict=True) if rate and best), default=0.0)


def colors(candidates: Sequence[str]) -> dict[str, str]:
    """Return the colour of each candidate."""
    ours = [name for name in candidates if is_ours(name)]
    others = [name for name in candidates if not is_ours(name) and name not in PEER_COLORS]
    return (
        {name: OUR_SHADES[i % len(OUR_SHADES)] for i, name in enumerate(ours)}
        | {name: PEER_COLORS[name] for name in candidates if name in PEER_COLORS}
        | {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(others)}
    )


def best_of_ours(rates: Rates, at: int) -> str | None:
    """Return our best form at a case; None if none was measured."""
    ours = {name: row[at] or 0.0 for name, row in rates.items() if is_ours(name)}
    best = max(ours, key=lambda name: ours[name], default=None)
    return best if best is not None and ours[best] else None


def ratio(rates: Rates, at: int) -> tuple[str, float] | None:
    """Return our best form at a case, and its rate as a multiple of the best peer's."""
    best = best_of_ours(rates, at)
    best_peer = max((row[at] or 0.0 for name, row in rates.items() if not is_ours(name)), default=0.0)
    if best is None or not best_peer:
        return None
    return best, (rates[best][at] or 0.0) / best_peer
