"""The tests in the core set and in the set of functions."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from core_kernels import KERNELS
from helpers.device import schedules
from selection import COMPILING, SETS, asks_for_gpu, cell, core, functions, members, shard

from hopwell.kernels.problem import Family
from hopwell.kernels.registry import shipped_configs
from tests.decode import test_emulated as decode_emulated
from tests.decode import test_sm100 as decode_sm100
from tests.decode import test_sm120 as decode_sm120
from tests.kernels import test_compile as kernels_compile
from tests.kernels import test_sm100_decode_compile as decode_compile
from tests.kernels import test_sm100_swap_ab_compile as mla_swap_ab_compile
from tests.mla import test_emulated as mla_emulated
from tests.mla import test_sm100_swap_ab as mla_swap_ab
from tests.mla import test_sm120 as mla_sm120
from tests.prefill import test_emulated as prefill_emulated
from tests.prefill import test_sm100 as prefill_sm100
from tests.prefill import test_sm100_narrow as prefill_sm100_narrow

ROOT = Path(__file__).parents[2]
NAMING_KERNELS = (
    *(decode_emulated, decode_sm100, decode_sm120, decode_compile, kernels_compile, mla_emulated, mla_sm120),
    *(mla_swap_ab, mla_swap_ab_compile, prefill_emulated, prefill_sm100, prefill_sm100_narrow),
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
        found = ((name, value) for name, value in vars(module).items() if name.startswith("test_"))
        for _, function in found:
            marks = [*of_module, *getattr(function, "pytestmark", [])]
            kinds = {mark.name for mark in marks} & {"compile", "emulator", "slow_emulator", "gpu"}
            if not kinds or kinds & {"slow_emulator", "gpu"}:
                continue
            for mark in marks:
                for case in mark.args[1] if mark.name == "parametrize" else ():
                    values = case if isinstance(case, tuple) else (case,)
                    values = case.values if isinstance(case, ParameterSet) else values
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


def test_sets_have_gpu_tests_only_on_request() -> None:
    items = [
        item(),
        *(item("gpu", function=name, seed=seed) for name in ("test_one", "test_other") for seed in range(2)),
    ]
    gpu = items[1:]
    for name in SETS:
        assert members(name, items) == ([] if name == "--functions" else items[:1])
    assert members("--core", items, on_gpu=True) == gpu[:1], "one case of the file"
    assert members("--functions", items, on_gpu=True) == gpu[2:3], "a case of the other function"
    assert members("--nightly", items, on_gpu=True) == gpu
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    named = [item("gpu", config=config) for config in configs]
    listed = [one for one in named if one.callspec.params["config"].name in KERNELS]
    assert members("--core", named, on_gpu=True) == listed


@pytest.mark.parametrize(
    ("expression", "on_gpu"), [("gpu", True), ("not gpu", False), ("", False), ("not gpu and emulator", False)]
)
def test_the_marker_expression_asks_for_gpu_tests(expression: str, on_gpu: bool) -> None:
    assert asks_for_gpu(expression) == on_gpu


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


def test_sets_of_a_change_have_no_nightly_tests() -> None:
    """The nightly set has every test that needs no GPU."""
    files = ("test_a.py", "test_b.py")
    items = [item(*marks, file=file) for file in files for marks in (("emulator", "nightly"), ("emulator",), ("gpu",))]
    assert members("--core", items) == [items[1], items[4]]
    assert members("--functions", items) == []
    assert members("--nightly", items) == [items[0], items[1], items[3], items[4]]


def test_the_sets_of_a_change_share_no_test() -> None:
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    items = [item(), *(item("emulator", config=config, seed=seed) for config in configs for seed in range(2))]
    core_set, rest, nightly = (members(name, items) for name in SETS)
    assert not set(core_set) & set(rest)
    assert {*core_set, *rest} == set(functions(items)) < set(nightly)


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "-1/3", "a/b", "1/3/5"])
def test_a_shard_that_does_not_exist(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="1 <= INDEX <= NUMBER"):
        shard(text)


def run(*options: str) -> str:
    """Return the output of pytest that only collects the tests in ``tests/versions``."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/versions", *options]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.run(command, cwd=ROOT, text=True, check=False, **streams).stdout


def test_shards_have_each_test_once() -> None:
    shards = [re.findall(r"^tests/.*::.*", run("--nightly", "--shard", f"{index}/2"), re.MULTILINE) for index in (1, 2)]
    both = [*shards[0], *shards[1]]
    assert abs(len(shards[0]) - len(shards[1])) <= 1
    assert sorted(both) == sorted({*both} | {*re.findall(r"^tests/.*::.*", run("--nightly"), re.MULTILINE)})


def test_one_set_at_a_time() -> None:
    assert "--core and --nightly: give one of them" in run("--core", "--nightly")


def test_a_change_runs_one_adverse_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "only_one", False)
    every = [setting.keywords["schedule"] for setting in schedules.schedules(5)]
    assert every == ["eager", "priority", "random"]
    monkeypatch.setattr(schedules, "only_one", True)
    assert [setting.keywords["schedule"] for setting in schedules.schedules(5)] == ["priority"]
