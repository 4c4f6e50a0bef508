"""Cases of whole models: decode steps of small models in the emulator, and the errors that a measurement refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hopwell.perf import decode_step
from hopwell.perf.decode_step import EAGER, Shape, StepCase, attention_error, hopwell_attention, prepared
from hopwell.perf.generate import CASES
from hopwell.perf.quantized import BF16, MAX_ERROR, NVFP4

SMALL = Shape("small", 256, 256, 2, 4, 2, 64, windows=(20, 0), sinks=True)


@pytest.mark.emulator
@pytest.mark.parametrize("kv", [BF16, NVFP4])
def test_a_step_attends_to_the_appended_tokens(kv: torch.dtype) -> None:
    case = StepCase("small", SMALL, 3, 90, kv, EAGER)
    model, cache, hidden = case.tensors("cpu")
    attention = hopwell_attention(SMALL, cache)
    before = [part.clone() for part in cache.data[0]]
    assert attention_error(SMALL, cache, attention) < MAX_ERROR
    assert not any(torch.equal(old, new) for old, new in zip(before, cache.data[0], strict=True))
    assert prepared(model, attention, hidden, EAGER, cache)().isfinite().all()


def test_wrong_attention_has_a_large_error() -> None:
    case = StepCase("small", SMALL, 3, 90, BF16, EAGER)
    _, cache, _ = case.tensors("cpu")
    exact = decode_step.exact_attention(SMALL, cache)

    def without(change: Callable[..., Any]) -> float:
        return attention_error(SMALL, cache, lambda *arguments: exact(*change(*arguments)))

    assert without(lambda *arguments: arguments) == 0
    assert without(lambda i, q, k, v, window, sinks: (i, q, k, v, 0, sinks)) > MAX_ERROR
    assert without(lambda i, q, k, v, window, sinks: (i, q, k, v, window, None)) > MAX_ERROR
    assert without(lambda i, q, k, v, window, sinks: (i, q, k.flip(0), v, window, sinks)) > MAX_ERROR


def test_names_are_apart_and_begin_titles() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.title.startswith(f"{case.name}: ") for case in CASES)
    assert all("hopwell" in case.candidates for case in CASES)
