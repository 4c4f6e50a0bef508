"""Selects sets of tests, because all tests that compile kernels take hours.

The core set, ``pytest --core``, is the first test of a change. It has all host tests, including tests of traced parts.
It has two tests of each kernel of ``core_kernels.py``: the first that only compiles it and the first that runs it in
the emulator. For tests that name no kernel, one case of each file belongs to it, so every entry runs once.

The set of functions, ``pytest --functions``, runs in CI as well. It has a case of each test function. For functions
that name kernels, its cases cover every choice in which the kernels differ: each mask, fetch, element type and head
dim. They also cover every value of other parameters, such as schedules. The combination of choices within a case is
arbitrary. This set excludes the core set.

Both sets exclude tests with the marker ``nightly``. Their cases run in one adverse schedule, see
``helpers/device/schedules.py``. The nightly set, ``pytest --nightly``, has all tests, each case in all its schedules.

Sets have no GPU tests. With ``-m gpu`` they have only GPU tests, and the same rules choose these.

``--shard 3/12`` runs the third of twelve parts of any set.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any

import pytest
from core_kernels import KERNELS

COMPILING = ("compile", "emulator", "slow_emulator", "gpu")
COST_OF_A_KERNEL = 3  # compiling a kernel takes about as long as this number of emulator runs

SETS = {
    "--core": "run the core set of tests, see selection.py",
    "--functions": "run the rest of the set of functions, without the core set",
    "--nightly": "run all tests, in all schedules",
}


def shard(text: str) -> tuple[int, int]:
    """Return the index and the number of shards of ``INDEX/NUMBER``; the first index is 1."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"it must be INDEX/NUMBER with 1 <= INDEX <= NUMBER, got {text!r}")
    return int(found[1]), int(found[2])


def asks_for_gpu(expression: str) -> bool:
    """Return whether the expression of ``-m`` selects GPU tests by name."""
    return "gpu" in expression.replace("not gpu", "")


def members(name: str, items: Sequence[pytest.Item], on_gpu: bool = False) -> list[pytest.Item]:
    """Return the tests of the set ``name``, a key of ``SETS``, in their order; ``on_gpu``: of the GPU tests."""
    here = [item for item in items if bool(item.get_closest_marker("gpu")) == on_gpu]
    if name == "--nightly":
        return here
    of_a_change = [item for item in here if not item.get_closest_marker("nightly")]
    core_set = core(of_a_change)
    if name == "--core":
        return core_set
    in_core = set(core_set)
    return [item for item in functions(of_a_change) if item not in in_core]


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _kernel(item: pytest.Item) -> Any:
    """Return the config among a test's parameters, or None."""
    configs = (value for value in _params(item).values() if hasattr(value, "family") and hasattr(value, "arch"))
    return next(configs, None)


def _kinds(item: pytest.Item) -> list[str]:
    return [kind for kind in COMPILING if item.get_closest_marker(kind)]


def cell(config: Any) -> tuple[Hashable, ...]:
    """Return the family, the architecture, and the element types of queries and of K/V of a kernel's config."""
    return (config.family, config.arch, getattr(config, "dtype", ""), getattr(config, "kv_type", None))


def core(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the core set in their order."""
    taken: set[Hashable] = set()
    chosen = []
    for item in items:
        kinds, config = _kinds(item), _kernel(item)
        if kinds and config is not None and config.name not in KERNELS:
            continue
        place = (*kinds, item.path if config is None else config.name)
        if not kinds or place not in taken:
            chosen.append(item)
        taken.add(place)
    return chosen


def functions(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the set of functions in their order, with the core set included."""
    core_set = core(items)
    cases_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set(core_set)
    compiled = {config.name for item in core_set if _kinds(item) and (config := _kernel(item))}
    # Tests that only read compiler output come last, since kernels of other tests cost them nothing.
    for cases in sorted(cases_of.values(), key=lambda cases: "compile" in _kinds(cases[0])):
        if not chosen.issuperset(cases):
            chosen.update(_covering(cases, chosen, compiled))
    return [item for item in items if item in chosen]


def _covering(cases: list[pytest.Item], chosen: set[pytest.Item], compiled: set[str]) -> list[pytest.Item]:
    """Return cases of one test function that cover every choice, greedily, and add their kernels to ``compiled``."""
    names = {item: config.name for item in cases if (config := _kernel(item))}
    has = {item: _choices(item) for item in cases}
    found = [item for item in cases if item in chosen]
    if "compile" in _kinds(cases[0]):
        found += [item for item in cases if item not in chosen and names.get(item) in compiled]
    taken = Counter(choice for item in found for choice in has[item])
    every = set().union(*has.values())

    def worth(item: pytest.Item) -> tuple[float, int]:
        """Return the missing choices per cost of a case; among equals, the case with rarer choices ranks first."""
        is_new = item in names and names[item] not in compiled
        missing = sum(choice not in taken for choice in has[item])
        return missing / (COST_OF_A_KERNEL if is_new else 1), -sum(taken[choice] for choice in has[item])

    while every > taken.keys():
        best = max(cases, key=worth)
        found.append(best)
        taken.update(has[best])
        if best in names:
            compiled.add(names[best])
    return found


def _choices(item: pytest.Item) -> set[tuple[str, str]]:
    """Return the fields of a test's config and its other parameters; for a test without a config, only its
    existence.
    """
    config = _kernel(item)
    if config is None:
        return {("", "")}
    others = {(name, str(value)) for name, value in _params(item).items() if value is not config}
    return others | {(f.name, str(getattr(config, f.name))) for f in fields(config)}
