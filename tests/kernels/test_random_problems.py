"""Random problems of prefill, decode and MLA, against float64. ``--problems 500 --seed 1000`` runs more and others.

On the emulator most of the time goes into compiling. ``--per-kernel 20`` draws 20 problems for each kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from helpers.cases.draw import Draw
from helpers.cases.random_decode import narrow_decode
from helpers.cases.random_problems import (
    KINDS,
    context_call,
    cudnn_call,
    fmha_v2_call,
    fp8_prefill,
    narrow_cache_prefill,
    problem,
)

from hopwell.kernels import registry
from hopwell.kernels.config.base import KvType


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "number" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(option) for option in ("--seed", "--problems"))
        metafunc.parametrize("number", range(first, first + count))


@pytest.mark.nightly
def test_random_problems(number: int, device: str, pytestconfig: pytest.Config) -> None:
    draw, check = problem(number, device, pytestconfig.getoption("--per-kernel"))
    try:
        check(draw)
    except Exception as error:
        raise AssertionError(f"{error!r}; drawn: {check.__name__} {draw.noted}") from error


class ResolvedError(Exception):
    """Ends a call when its kernel is known, before anything compiles."""


def resolved(number: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Draw]:
    """Return the config of the kernel that serves a problem, and its draw."""
    resolve = registry.resolve

    def stop(of: Any, arch: str) -> Any:
        config = resolve(of, arch)
        if of.query.is_meta:  # a sample problem of the table of features
            return config
        raise ResolvedError(config)

    draw, check = problem(number, "cpu", per_kernel=4)
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_100a")
    monkeypatch.setattr(registry, "resolve", stop)
    with pytest.raises(ResolvedError) as found:
        check(draw)
    monkeypatch.undo()
    return found.value.args[0], draw


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [context_call, fmha_v2_call, cudnn_call, fp8_prefill, narrow_cache_prefill])
def test_kernels_with_tcgen05_have_their_share(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA has no other kernels on Blackwell."""
    numbers = range(KINDS.index(kind), 4 * 16 * len(KINDS), 4 * len(KINDS))
    found = [resolved(number, monkeypatch)[0].matrix_instruction for number in numbers]
    assert 5 <= sum("tcgen05" in instruction for instruction in found) <= 14, found


@pytest.mark.nightly
def test_narrow_decode_has_tcgen05_kernels_of_all_caches_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kinds draw 8 rows or fewer over these caches, or head dims with other kernels, in most cases."""
    numbers = range(KINDS.index(narrow_decode), 4 * 40 * len(KINDS), 4 * len(KINDS))
    found = [resolved(number, monkeypatch)[0] for number in numbers]
    assert all("tcgen05" in config.matrix_instruction for config in found), found
    shares = Counter((config.kv_type, config.rows) for config in found)
    assert set(shares) == set(itertools.product((KvType.E4M3, KvType.INT8, KvType.NVFP4), (16, 32, 64))), shares


@pytest.mark.nightly
def test_problems_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel stays, and the rest of the problem changes."""
    first = KINDS.index(fp8_prefill)
    found = [resolved(first + i * len(KINDS), monkeypatch) for i in range(5)]
    assert len({config.name for config, _ in found[:4]}) == 1
    assert len({str(draw.noted) for _, draw in found[:4]}) == 4
    assert found[4][0].name != found[0][0].name
