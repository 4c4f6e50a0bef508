"""Malformed calls among valid ones, first and repeated, with and without device checks, from one seed.

Calls raise only the documented errors, which name an argument. ``--calls 20000 --seed 1000000`` runs more and others.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import FORMS, Form, misaligned

import hopwell
from hopwell.kernels.jit import settings
from tests.api.test_tensor_kinds import KINDS

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ERRORS = (TypeError, ValueError, NotImplementedError)
WIDE = torch.empty(1 << 20, dtype=torch.uint8)
PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, -(2**63), 2**200, 0.0, -0.5, 1e-45, 3e38, 1e39, 10**400),
    *(math.nan, math.inf, 1j, "", "HND", "NHD", "causal", "nvfp4", "x" * 10**6, b"HND", object(), int, torch.float16),
    *((), [], {}, (None, None), [1, 2, 3], range(3), torch.device("cpu"), WIDE.untyped_storage()),
    *(torch.tensor(1.0), torch.tensor([-1.0]), torch.zeros(0), torch.zeros(3, 4, 64), torch.zeros(1, device="meta")),
)
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.uint32, torch.int64, torch.float16, torch.float32, torch.float64)
NUMBERS = (-1, 0, 1, 7, 11, 10**6, 2**31 - 1, -(2**31))


def other_values(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    changed = value.clone()
    if value.numel() and value.dtype == torch.int32:
        changed.view(-1)[rng.randrange(value.numel())] = rng.choice(NUMBERS)
    return changed


def resized(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    sizes = [*value.shape]
    if sizes:
        sizes[rng.randrange(len(sizes))] = rng.choice((0, 1, 2, 3, 7, 16, 96))
    return torch.zeros(sizes, dtype=value.dtype)


CHANGES: tuple[Callable[[torch.Tensor, random.Random], torch.Tensor], ...] = (
    lambda t, rng: KINDS[rng.choice([*KINDS])](t),
    lambda t, rng: torch.zeros(t.shape, dtype=rng.choice(DTYPES)),
    lambda t, rng: t[None],
    lambda t, rng: t[0],
    lambda t, rng: t.flatten(),
    lambda t, rng: t.transpose(0, -1),
    lambda t, rng: torch.zeros((*t.shape, 2), dtype=t.dtype)[..., 0],
    lambda t, rng: torch.zeros((1,) * t.dim(), dtype=t.dtype).expand(t.shape),
    lambda t, rng: misaligned(t),
    resized,
    other_values,
    other_values,
)


def broken(value: Any, rng: random.Random) -> Any:
    """Return ``value`` with something wrong; inside a tuple possibly only one part of it."""
    if isinstance(value, (tuple, list)) and value and rng.random() < 0.6:
        parts = list(value)
        place = rng.randrange(len(parts))
        parts[place] = broken(parts[place], rng)
        return tuple(parts)
    if isinstance(value, torch.Tensor) and rng.random() < 0.8:
        try:
            return rng.choice(CHANGES)(value, rng)
        except (IndexError, NotImplementedError, RuntimeError, ValueError):  # torch has no such tensor
            return None
    return rng.choice(PLAIN)


def failure(form: Form, arguments: dict[str, Any]) -> str | None:
    """Return the fault of a call; None if it behaved correctly."""
    try:
        form.function(**arguments)
    except ERRORS as error:
        text, names = str(error), inspect.signature(form.function).parameters
        if type(error) not in ERRORS or len(text) > 500:
            return f"{type(error).__name__}: {text[:300]}"
        if not isinstance(error, NotImplementedError) and not any(name in text for name in names):
            return f"names no argument: {text}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def test_only_documented_errors(pytestconfig: pytest.Config, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.CHECK, "given", None)
    failures = []
    first = pytestconfig.getoption("--seed")
    for number in range(first, first + pytestconfig.getoption("--calls")):
        recorded.problems.clear()  # they hold their tensors
        rng = random.Random(number)
        form = rng.choice(FORMS)
        arguments = form.build()
        looks = rng.random() < 0.4
        hopwell.check_device_data(looks)
        if form.runs and rng.random() < 0.5:
            for _ in range(rng.choice((1, 2, 3))):
                form.function(**arguments)
        names = [*inspect.signature(form.function).parameters]
        chosen = rng.sample(names, rng.choice((1, 1, 1, 2)))
        for name in chosen:
            arguments[name] = broken(arguments.get(name), rng)
        wrong = failure(form, arguments)
        if wrong is not None:
            failures.append(f"call {number}, {form}, {chosen}, looking={looks}: {wrong}")
    assert not failures, "\n".join(failures[:20])
