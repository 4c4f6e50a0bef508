"""hopwell is inference only: a call that requests a gradient warns once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import CONTEXT, CUDNN, FMHA, FUNCTIONS, MLA, XQA, data, form, ints
from torch.autograd import forward_ad

import hopwell
from hopwell import page
from hopwell._entries import append as append_entry
from hopwell.kernels.append.geometry import append_operands
from hopwell.kernels.jit import settings

PAIR = (data(4, 16, 2, 64), data(4, 16, 2, 64))


def append() -> dict[str, Any]:
    key = data(3, 2, 64)
    indices = dict(batch_indices=ints(0, 0, 0), positions=ints(0, 1, 17), block_tables=ints(2, 3)[None])
    return dict(append_key=key, append_value=key, paged_kv_cache=PAIR, **indices)


def learning(value: Any) -> Any:
    if isinstance(value, tuple):
        return (*value[:-1], learning(value[-1]))
    return value.clone().requires_grad_()


# An entry, a builder of valid arguments for it, and the arguments that may request a gradient.
CASES: list[tuple[Callable[..., Any], Callable[[], dict[str, Any]], tuple[str, ...]]] = [
    (FUNCTIONS[CONTEXT], lambda: form(CONTEXT, "pair-HND"), ("query", "kv_cache")),
    (FUNCTIONS[FMHA], lambda: form(FMHA, "contiguous"), ("qkv",)),
    (FUNCTIONS[CUDNN], lambda: form(CUDNN, "ragged"), ("q", "k_cache", "v_cache")),
    (FUNCTIONS[XQA], lambda: form(XQA, "drafts"), ("query", "kv_cache")),
    (hopwell.trtllm_batch_decode_with_kv_cache, lambda: form(XQA, "drafts"), ("query", "kv_cache")),
    (FUNCTIONS[MLA], lambda: form(MLA, "dense"), ("query", "kv_cache")),
    (hopwell.append_paged_kv_cache, append, ("append_key", "append_value")),
]
pytestmark = pytest.mark.parametrize(
    ("function", "build", "names"), CASES, ids=[function.__name__ for function, _, _ in CASES]
)


@pytest.fixture(autouse=True)
def nothing_launched(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the recording plan of attention, with a second one for append that launches nothing."""

    class AppendPlan:
        has_work = repeatable = True
        anchor, constants = object(), ()
        operands = staticmethod(append_operands)

        def __init__(self, problem: Any):
            pass

        def launch(self, *_: Any) -> None:
            pass

        def function(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(append_entry, "AppendPlan", AppendPlan)
    monkeypatch.setattr(page, "_APPEND", append_entry.AppendCalls())
    return recorded


def warned(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Call the function, and return its warnings in this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(**arguments)
    return [str(warning.message) for warning in caught if os.path.samefile(warning.filename, __file__)]


@pytest.mark.parametrize("remembered", [False, True])
def test_an_entry_warns_once(
    function: Callable[..., Any], build: Callable[[], dict[str, Any]], names: tuple[str, ...], remembered: bool
) -> None:
    arguments, name = build(), names[-1]
    if remembered:
        with torch.no_grad():
            for _ in range(3):
                assert warned(function, {**arguments, name: learning(arguments[name])}) == []
    with torch.inference_mode():
        assert warned(function, arguments) == []
    mutated = {**arguments, name: learning(arguments[name])}
    (message,) = warned(function, mutated)
    assert f"no gradient flows through {name};" in message
    for other in names:
        assert warned(function, {**arguments, other: learning(arguments[other])}) == []


def test_a_call_under_check_raises(
    function: Callable[..., Any],
    build: Callable[[], dict[str, Any]],
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings.CHECK, "given", True)
    arguments = build()
    for name in names * 2:
        with pytest.raises(ValueError, match=f"no gradient flows through {name};"):
            function(**{**arguments, name: learning(arguments[name])})


def test_calls_without_a_gradient_do_not_warn(
    function: Callable[..., Any], build: Callable[[], dict[str, Any]], names: tuple[str, ...], recorded: Any
) -> None:
    arguments = build()
    for name in names:
        with torch.no_grad():
            assert warned(function, {**arguments, name: learning(arguments[name])}) == []
    assert warned(function, arguments) == []
    detached = {**arguments, names[0]: learning(arguments[names[0]])}
    with torch.no_grad():
        assert warned(function, detached) == []


def test_tangents_are_refused_by_name(
    function: Callable[..., Any], build: Callable[[], dict[str, Any]], names: tuple[str, ...]
) -> None:
    def dual(value: Any) -> Any:
        if isinstance(value, tuple):
            return (*value[:-1], dual(value[-1]))
        return forward_ad.make_dual(value, torch.ones_like(value))

    arguments = build()
    for _ in range(3):
        function(**arguments)
        with forward_ad.dual_level():
            function(**arguments)  # without a tangent
            for name in names:
                with pytest.raises(ValueError, match=f"no tangent flows through {name};"):
                    function(**{**arguments, name: dual(arguments[name])})


def test_tensors_of_vmap_are_refused_by_name(
    function: Callable[..., Any], build: Callable[[], dict[str, Any]], names: tuple[str, ...]
) -> None:
    arguments, name = build(), names[0]
    if isinstance(arguments[name], tuple):
        query, *rest = arguments[name]
        call = lambda part: function(**{**arguments, name: (part, *rest)})  # noqa: E731
    else:
        query = arguments[name]
        call = lambda part: function(**{**arguments, name: part})  # noqa: E731
    for _ in range(3):
        function(**arguments)
    with pytest.raises(ValueError, match=rf"{name}.* must be a tensor whose memory"):
        torch.vmap(call)(torch.stack([query, query]))
