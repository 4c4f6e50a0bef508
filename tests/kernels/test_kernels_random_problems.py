"""Random problems of prefill, decode and MLA, against float64. ``--problems 500 --seed 1000`` runs more and others."""

from __future__ import annotations

import pytest
from helpers.random_problems import KINDS, Draw


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = (metafunc.config.getoption(option) for option in ("--seed", "--problems"))
    metafunc.parametrize("number", range(first, first + count))


def test_random_problems(number: int, device: str) -> None:
    draw = Draw(number, device)
    try:
        KINDS[number % len(KINDS)](draw)
    except Exception as error:
        raise AssertionError(f"{error!r}; drawn: {KINDS[number % len(KINDS)].__name__} {draw.noted}") from error
