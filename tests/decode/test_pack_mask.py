"""``pack_mask`` and the oracle's mask words agree for trees and for any booleans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.batches.decode import draft_words

from hopwell.decode import pack_mask

TREES = {
    "root": [-1],
    "chain": [-1, 0, 1, 2, 3],
    "chain of 70": [token - 1 for token in range(70)],
    "siblings": [-1] * 33,
    "tree": [-1, 0, 0, 1, 3, 3, 2],
    "children first": [3, 0, 1, -7],
}


def ancestors(parents: Sequence[int]) -> torch.Tensor:
    """Return [q_len, q_len]: token by token, itself and its parent's parents."""
    visible = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for token in range(len(parents)):
        seen = token
        while seen >= 0:
            visible[token, seen] = True
            seen = parents[seen]
    return visible


def bits(words: torch.Tensor) -> torch.Tensor:
    """Return the bits of uint16 words [..., n] as booleans [..., 16 * n]."""
    return (words.int()[..., None] >> torch.arange(16) & 1).bool().flatten(-2)


def same_as_oracle(words: torch.Tensor, visible: torch.Tensor) -> None:
    rows, q_len = visible.shape
    assert (words.dtype, words.shape, words.is_contiguous()) == (torch.uint16, (rows, 2 * math.ceil(q_len / 32)), True)
    oracle = draft_words([visible], words.shape[-1] // 2, torch.Generator().manual_seed(0))
    assert torch.equal(bits(words)[:, :q_len], bits(oracle)[:, :q_len])
    assert not bits(words)[:, q_len:].any()


@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_trees(parents: list[int]) -> None:
    words, visible = pack_mask(parents=parents), ancestors(parents)
    same_as_oracle(words, visible)
    assert torch.equal(words, pack_mask(visible[None])[0])
    for dtype in (torch.int32, torch.uint32, torch.int64):
        tensor = torch.tensor(parents, dtype=torch.int32).view(dtype) if dtype.itemsize == 4 else torch.tensor(parents)
        assert torch.equal(pack_mask(parents=tensor), words)


@pytest.mark.parametrize("q_len", [1, 16, 31, 32, 33, 100])
def test_any_booleans(q_len: int) -> None:
    visible = torch.rand(3, q_len, q_len, generator=torch.Generator().manual_seed(q_len)) < 0.5
    words = pack_mask(visible.mT.contiguous().mT)
    for one, mask in zip(words, visible, strict=True):
        same_as_oracle(one, mask)
    assert torch.equal(pack_mask(visible.flatten(0, 1)), words.flatten(0, 1))


def test_requests_of_different_trees_and_bounds() -> None:
    trees = [[-1, 0, 0, 1], [-1, 0, 1, 2]]
    words = pack_mask(parents=trees, q_len_per_req=40)
    assert words.shape == (2, 4, 4)
    for one, parents in zip(words, trees, strict=True):
        same_as_oracle(one[:, :2].contiguous(), ancestors(parents))
    assert not words[..., 2:].int().any()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "neither": ({}, ValueError, "^one of mask and parents must be given, got neither$"),
    "both": (dict(mask=torch.ones(1, 1).bool(), parents=[-1]), ValueError, "got both$"),
    "words": (
        dict(mask=torch.zeros(2, 2, dtype=torch.uint16)),
        ValueError,
        "^mask must be torch.bool, got",
    ),
    "a list": (dict(mask=[[True]]), TypeError, "^mask must be a torch.Tensor, got a list of 1$"),
    "one row": (dict(mask=torch.ones(3).bool()), ValueError, r"^mask must have shape .*, got \(3,\)$"),
    "not square": (dict(mask=torch.ones(2, 3, 4).bool()), ValueError, r"^mask must have shape .*, got \(2, 3, 4\)$"),
    "no tokens": (dict(mask=torch.ones(2, 0, 0).bool()), ValueError, r"^mask must have shape .*, got \(2, 0, 0\)$"),
    "empty list": (dict(parents=[]), ValueError, r"^parents must have shape .*, got \(0,\)$"),
    "ragged list": (dict(parents=[[-1], [-1, 0]]), ValueError, "^parents as a list must have the same number of ints"),
    "floats": (dict(parents=[-1.0, 0.0]), ValueError, "^parents must be torch.int32 or .*, got torch.float32"),
    "past the end": (dict(parents=[-1, 2]), ValueError, r"^parents\[1\] must be less than 2, .*, got 2$"),
    "own parent": (
        dict(parents=[-1, 1]),
        ValueError,
        r"^parents\[1\] must be a token that does not .*, got 1$",
    ),
    "cycle": (dict(parents=[[-1, 0, 1], [-1, 2, 1]]), ValueError, r"^parents\[1, 1\] must be a token that .*, got 2$"),
    "bound": (dict(parents=[-1] * 3, q_len_per_req=2), ValueError, "^q_len_per_req must be at least 3, .*, got 2$"),
    "bound of a float": (dict(parents=[-1], q_len_per_req=2.0), TypeError, "^q_len_per_req must be an int"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pack_mask(**arguments)


def test_parents_in_a_tensor_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    for parents, words in (([-1, 2], [[1, 0], [2, 0]]), ([1, 0], [[3, 0], [3, 0]])):
        given = torch.tensor(parents)
        assert pack_mask(parents=given).tolist() == words
        with monkeypatch.context() as patch:
            patch.setenv("HOPWELL_CHECK", "1")
            with pytest.raises(ValueError, match=r"^parents\["):
                pack_mask(parents=given)
