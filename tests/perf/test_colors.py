"""Figures: their bars and their colours."""

from __future__ import annotations

from hopwell.perf import colors

RATES = {
    "hopwell": [4.0, 4.0],
    "hopwell, pages of 16": [5.0, 3.0],
    "FlashAttention 4": [2.0, None],
    "FlashAttention 4, pages of 128": [2.5, None],
    "other": [None, 8.0],
}


def test_peers_have_one_bar_each() -> None:
    shown = colors.shown(RATES)
    assert list(shown) == ["hopwell", "hopwell, pages of 16", "FlashAttention 4", "other"]
    assert shown["FlashAttention 4"] == [2.5, None]


def test_front_ends_of_a_library_share_a_bar() -> None:
    rates = {"FlashInfer cuDNN, pages of 16": [1.0, 3.0], "cuDNN SDPA": [2.0, None], "cuDNN fp8 graph": [None, 4.0]}
    assert colors.shown(rates) == {"cuDNN": [2.0, 4.0]}
    assert "cuDNN" in colors.PEER_COLORS


def test_no_more_bars_than_fit() -> None:
    many = {f"hopwell, pages of {1 << i}": [1.0] for i in range(7)} | {f"peer {i}": [1.0] for i in range(5)}
    shown = colors.shown(many)
    assert len(shown) == colors.MOST
    assert sum(map(colors.is_ours, shown)) == colors.MOST - 5


def test_peers_far_behind_make_room() -> None:
    """A peer is left out by its best case, and two forms of ours remain."""
    many = {f"hopwell, pages of {1 << i}": [1.0, 1.0] for i in range(3)}
    peers = {f"peer {i}": [1.0 + i, None] for i in range(colors.MOST - 2)} | {"late": [1.0, 1.0], "far": [0.5, None]}
    shown = colors.shown(many | peers)
    assert list(shown) == [*list(many)[:2], *(f"peer {i}" for i in range(1, colors.MOST - 2)), "late"]


def test_ratio_is_to_the_best_peer() -> None:
    assert colors.ratio(RATES, 0) == ("hopwell, pages of 16", 5.0 / 2.5)
    assert colors.ratio(RATES, 1) == ("hopwell", 4.0 / 8.0)
    assert colors.ratio({"hopwell": [1.0]}, 0) is None


def test_a_peer_keeps_its_colour() -> None:
    alone, together = colors.colors(["FlashInfer fa3"]), colors.colors(["hopwell", "FlashInfer xqa", "FlashInfer fa3"])
    assert alone["FlashInfer fa3"] == together["FlashInfer fa3"]
    assert len(set(together.values())) == 3
