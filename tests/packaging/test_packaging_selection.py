"""The tests in the core set and in the set of functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core_kernels import KERNELS
from selection import COMPILING, cell, core, functions

from hopwell.kernels.problem import Family
from hopwell.kernels.registry import shipped_configs
from tests.decode import test_decode_emulated, test_decode_sm120
from tests.kernels import test_kernels_compile
from tests.mla import test_mla_emulated, test_mla_sm120
from tests.prefill import test_prefill_emulated, test_prefill_sm100

NAMING_KERNELS = (
    *(test_decode_emulated, test_decode_sm120, test_kernels_compile, test_mla_emulated, test_mla_sm120),
    *(test_prefill_emulated, test_prefill_sm100),
)


class Item:
    """The parts of a test that the sets use."""

    def __init__(self, *markers: str, file: str = "test_a.py", function: str = "test", **params: Any) -> None:
        self.path = Path(file)
        self.nodeid = f"{file}::{function}[{'-'.join(map(str, params.values()))}]"
        self._markers = markers
        if params:
            self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._markers else None


def item(*markers: str, **places: Any) -> Any:
    return Item(*markers, **places)


def test_tests_of_the_host_are_all_in() -> None:
    items = [item(), item("traced"), item(file="test_b.py")]
    assert core(items) == items


def test_listed_kernels_are_in_once_in_either_kind_of_test() -> None:
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    listed = [config for config in configs if config.name in KERNELS]
    assert len(listed) > 5
    items = [item(kind, config=config, seed=seed) for kind in COMPILING for config in configs for seed in range(2)]
    found = core(items)
    assert [one.callspec.params["seed"] for one in found] == [0] * len(found)
    assert [(one._markers, one.callspec.params["config"]) for one in found] == [
        ((kind,), config) for kind in COMPILING for config in listed
    ]


def kernels_of_tests() -> Iterator[tuple[str, Any]]:
    """Yield the kind of test and the config of each case that names a kernel, except slow cases and those on a GPU."""
    for module in NAMING_KERNELS:
        of_module = getattr(module, "pytestmark", [])
        of_module = of_module if isinstance(of_module, list) else [of_module]
        for name, function in vars(module).items():
            marks = [*of_module, *getattr(function, "pytestmark", [])]
            kinds = {mark.name for mark in marks} & {"compile", "emulator", "slow_emulator", "gpu"}
            if not name.startswith("test_") or not kinds or kinds & {"slow_emulator", "gpu"}:
                continue
            for mark in marks:
                for case in mark.args[1] if mark.name == "parametrize" else ():
                    values = getattr(case, "values", case if isinstance(case, tuple) else (case,))
                    yield from ((kind, value) for kind in kinds for value in values if hasattr(value, "family"))


def test_each_cell_of_tests_has_a_listed_kernel() -> None:
    """The list has only kernels that tests name."""
    every, listed, names = set(), set(), set()
    for kind, config in kernels_of_tests():
        every.add((kind, *cell(config)))
        if config.name in KERNELS:
            listed.add((kind, *cell(config)))
            names.add(config.name)
    assert len(every) > 50
    assert every == listed
    assert names == set(KERNELS)


def test_one_case_of_a_file_where_no_kernel_is_named() -> None:
    files = ("test_a.py", "test_b.py")
    items = [item("emulator", file=file, seed=seed) for file in files for seed in range(3)]
    assert core(items) == [items[0], items[3]]


def test_a_case_of_each_function() -> None:
    items = [item("emulator", function=name, seed=seed) for name in ("test_one", "test_other") for seed in range(5)]
    assert functions(items) == [items[0], items[5]]


def test_each_choice_of_kernels_is_in_one_case() -> None:
    """Equivalent cases take turns, so that each schedule is met about equally often."""
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    schedules = ("eager", "random")
    items = [item("emulator", config=config, schedule=name) for config in configs for name in schedules]
    found = [one.callspec.params for one in functions(items)]
    for name in ("mask", "rows", "kv_type", "dtype", "head_dim_qk", "box_rows"):
        assert {getattr(params["config"], name) for params in found} == {getattr(config, name) for config in configs}
    counts = [sum(params["schedule"] == name for params in found) for name in schedules]
    assert min(counts) >= len(found) // 3
    assert len(found) < len(configs) / 4


def test_kernels_that_run_are_looked_at_too() -> None:
    """Tests of compiler output take the kernels that other tests run, and few more, in any order."""
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    looks = [item("compile", file="test_a.py", config=config) for config in configs]
    runs = [item("emulator", file="test_b.py", config=config) for config in configs]
    found = functions(looks + runs)
    looked_at, run = ({one.callspec.params["config"].name for one in found if one in kind} for kind in (looks, runs))
    assert run <= looked_at
    assert len(looked_at) < len(configs) / 2
    for name in ("mask", "rows", "kv_type", "head_dim_qk"):
        chosen = {getattr(one.callspec.params["config"], name) for one in found if one in runs}
        assert chosen == {getattr(config, name) for config in configs}


def test_the_core_set_is_part_of_the_set_of_functions() -> None:
    configs = list(shipped_configs("sm_90a", Family.PREFILL))
    items = [item(), item("traced"), *(item("emulator", config=config) for config in configs)]
    assert set(core(items)) < set(functions(items)) < set(items)
