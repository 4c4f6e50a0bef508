"""The entries' signatures against those of the FlashInfer that is installed, where one is."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

import hopwell

HOMES = {
    "trtllm_batch_context_with_kv_cache": "prefill",
    "trtllm_fmha_v2_prefill": "prefill",
    "cudnn_batch_prefill_with_kv_cache": "cudnn",
    "xqa_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache": "decode",
    "trtllm_batch_decode_with_kv_cache_mla": "mla",
}

# What differs from FlashInfer 0.7.2 with intent, by entry and parameter: (its default, ours).
REQUIRED = inspect.Parameter.empty
KNOWN: dict[str, dict[str, tuple[Any, Any]]] = {
    "cudnn_batch_prefill_with_kv_cache": {
        "actual_seq_lens_q": (None, REQUIRED),  # as its documentation has them
        "actual_seq_lens_kv": (None, REQUIRED),
        "lse_base": ("log2", "ln"),  # natural, as before the parameter came
    },
    "trtllm_batch_context_with_kv_cache": {"backend": ("trtllm-gen", None)},  # any name is taken
}


def defaults(function: Any) -> dict[str, Any]:
    """Each parameter that can be given by name, with its default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.kind in named}


def differences(theirs: Any, ours: Any, known: dict[str, tuple[Any, Any]]) -> list[str]:
    """What callers of ``theirs`` cannot rely on with ``ours``; ``known`` differences are left out."""
    wanted, got = defaults(theirs), defaults(ours)
    found = [f"{name} is missing" for name in wanted if name not in got]
    for name in wanted.keys() & got.keys():
        pair = (wanted[name], got[name])
        if pair != known.get(name) and (pair[0] != pair[1] or type(pair[0]) is not type(pair[1])):
            found.append(f"{name} defaults to {pair[1]!r}, theirs to {pair[0]!r}")
    return sorted(found)


@pytest.mark.parametrize("name", HOMES)
def test_what_the_installed_one_takes_is_taken(name: str) -> None:
    pytest.importorskip("flashinfer")
    theirs = getattr(importlib.import_module(f"flashinfer.{HOMES[name]}"), name)
    found = differences(theirs, getattr(hopwell, name), KNOWN.get(name, {}))
    assert not found, f"{name}: " + "; ".join(found)


def test_differences_are_listed() -> None:
    def theirs(a: int, b: int = 1, *, c: bool = False, d: str = "x", e: int | None = None) -> None: ...

    def ours(a: int, b: int = 2, *, c: int = 0, d: str = "y") -> None: ...

    assert differences(theirs, ours, {"d": ("x", "y")}) == [
        "b defaults to 2, theirs to 1",
        "c defaults to 0, theirs to False",
        "e is missing",
    ]
