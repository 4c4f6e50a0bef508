"""Which tests the core set and the set of functions take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selection import core, functions

from hopwell.kernels.families import shipped_configs
from hopwell.kernels.problem import Family


class Item:
    """What the sets look at of a test."""

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


def test_one_kernel_stands_for_its_cell() -> None:
    decode = list(shipped_configs("sm_90a", Family.DECODE))
    items = [item("compile", config=config) for config in decode]
    cells = {(config.dtype, config.kv_type) for config in decode}
    assert len(core(items)) == len(cells) > 2
    assert core(items)[0] is items[0]


def test_one_case_of_a_file_where_no_kernel_is_named() -> None:
    files = ("test_a.py", "test_b.py")
    items = [item("emulator", file=file, seed=seed) for file in files for seed in range(3)]
    assert core(items) == [items[0], items[3]]


def test_a_case_of_each_function() -> None:
    items = [item("emulator", function=name, seed=seed) for name in ("test_one", "test_other") for seed in range(5)]
    assert functions(items) == [items[0], items[5]]


def test_each_choice_of_kernels_is_in_one_case() -> None:
    """Cases that could stand for one another take turns, so that schedules are met about as often."""
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
    """Tests of what the compiler made take the kernels that other tests run, and few besides, whatever their order."""
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
