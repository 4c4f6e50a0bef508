"""Random problems of prefill, decode and MLA, against float64. ``--problems 500 --seed 1000`` runs more and others."""

from __future__ import annotations

import pytest
from helpers.cases.random_problems import KINDS, Draw


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = (metafunc.config.getoption(option) for option in ("--seed", "--problems"))
    metafunc.parametrize("number", range(first, first + count))


@pytest.mark.nightly
def test_random_problems(number: int, device: str) -> None:
    draw, check = Draw(number, device), KINDS[number % len(KINDS)]
    try:
        check(draw)
    except Exception as error:
        raise AssertionError(f"{error!r}; drawn: {check.__name__} {draw.noted}") from error
