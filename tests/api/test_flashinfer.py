"""The entries' signatures against the installed FlashInfer, if there is one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

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

REQUIRED = inspect.Parameter.empty


class Known(NamedTuple):
    """Intended differences from FlashInfer 0.7.2.

    They are defaults (theirs, ours), places of positional parameters (theirs, ours), and parameters of hopwell alone.
    """

    defaults: Mapping[str, tuple[Any, Any]] = {}
    places: Mapping[int, tuple[str, str]] = {}
    added: tuple[str, ...] = ()


KNOWN = {
    "trtllm_batch_context_with_kv_cache": Known(
        defaults={"backend": ("trtllm-gen", None)},  # any name is taken
        places={20: ("kv_cache_sf", "kv_block_scales")},  # the documentation's name, which means the same
        added=("kv_block_scales", "lse_base"),
    ),
    "cudnn_batch_prefill_with_kv_cache": Known(
        defaults={
            "actual_seq_lens_q": (None, REQUIRED),  # as its documentation has them
            "actual_seq_lens_kv": (None, REQUIRED),
            "lse_base": ("log2", "ln"),  # natural, as before the parameter came
        },
        added=("lse_layout",),
    ),
    "xqa_batch_decode_with_kv_cache": Known(added=("lse", "return_lse", "return_lse_base")),
    "trtllm_batch_decode_with_kv_cache": Known(added=("return_lse_base",)),
    "trtllm_batch_decode_with_kv_cache_mla": Known(
        places={  # the documentation's, in which the factor is not there yet
            14: ("skip_softmax_threshold_scale_factor", "enable_pdl"),
            15: ("enable_pdl", "backend"),
        },
    ),
}


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Each parameter that can be given by name."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind in named}


def differences(theirs: Any, ours: Any, known: Known) -> list[str]:
    """Return the properties of ``theirs`` that callers cannot rely on with ``ours``, except ``known`` differences.

    A place that takes only a name here gives an error, which is not a wrong result.
    """
    wanted, got = parameters(theirs), parameters(ours)
    found = [f"{name} is missing" for name in wanted if name not in got]
    found += [f"{name} is new" for name in got if name not in wanted and name not in known.added]
    for name in wanted.keys() & got.keys():
        pair = wanted[name].default, got[name].default
        if pair != known.defaults.get(name) and (pair[0] != pair[1] or type(pair[0]) is not type(pair[1])):
            found.append(f"{name} defaults to {pair[1]!r}, theirs to {pair[0]!r}")
    places = [
        [name for name, p in names.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        for names in (wanted, got)
    ]
    for place, names in enumerate(zip(*places, strict=False)):
        if names[0] != names[1] and names != known.places.get(place):
            found.append(f"{names[1]} is at place {place}, where they have {names[0]}")
    return sorted(found)


@pytest.mark.parametrize("name", HOMES)
def test_what_the_installed_one_takes_is_taken(name: str) -> None:
    """An installed FlashInfer that cannot be imported is an error, because it would hide all differences."""
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("FlashInfer is not installed")
    theirs = getattr(importlib.import_module(f"flashinfer.{HOMES[name]}"), name)
    found = differences(theirs, getattr(hopwell, name), KNOWN.get(name, Known()))
    assert not found, f"{name}: " + "; ".join(found)


def test_differences_are_listed() -> None:
    def theirs(a: int, f: int, b: int = 1, *, c: bool = False, d: str = "x", e: int | None = None) -> None: ...

    def ours(f: int, a: int, b: int = 2, *, c: int = 0, d: str = "y", g: int = 0, h: int = 0) -> None: ...

    assert differences(theirs, ours, Known({"d": ("x", "y")}, {0: ("a", "f")}, ("g",))) == [
        "a is at place 1, where they have f",
        "b defaults to 2, theirs to 1",
        "c defaults to 0, theirs to False",
        "e is missing",
        "h is new",
    ]
