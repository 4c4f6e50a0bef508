"""Which tests the core set and the set of values take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selection import core, values

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


def test_each_value_is_in_one_test() -> None:
    choices: dict[str, Sequence[Any]] = dict(
        mask=("full", "causal", "window"), pages=(1, 16, 64), dtype=("bf16", "fp16")
    )
    every = itertools.product(*choices.values())
    items = [item("emulator", **dict(zip(choices, chosen, strict=True))) for chosen in every]
    found = [one.callspec.params for one in values(items)]
    for name, wanted in choices.items():
        assert {params[name] for params in found} == set(wanted)
    assert len(found) == 3


def test_values_take_turns() -> None:
    """Every config needs a case of its own, and the schedules share them."""
    items = [item("emulator", config=n, schedule=name) for n in range(20) for name in ("eager", "random")]
    found = [one.callspec.params["schedule"] for one in values(items)]
    assert len(found) == 20
    assert found.count("eager") == found.count("random")


def test_every_value_is_in_where_a_test_has_one_parameter() -> None:
    items = [item("emulator", seed=seed) for seed in range(5)]
    assert values(items) == items


def test_kernels_that_run_are_looked_at_too() -> None:
    """Tests of what the compiler made take the kernels that other tests run, and few besides, whatever their order."""
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    looks = [item("compile", file="test_a.py", config=config) for config in configs]
    runs = [item("emulator", file="test_b.py", config=config) for config in configs]
    found = values(looks + runs)
    looked_at, run = ({one.callspec.params["config"].name for one in found if one in kind} for kind in (looks, runs))
    assert run <= looked_at
    assert len(looked_at) < len(configs) / 2
    for name in ("mask", "rows", "kv_type", "head_dim_qk"):
        chosen = {getattr(one.callspec.params["config"], name) for one in found if one in runs}
        assert chosen == {getattr(config, name) for config in configs}


def test_the_core_set_is_part_of_the_set_of_values() -> None:
    configs = list(shipped_configs("sm_90a", Family.PREFILL))
    items = [item(), item("traced"), *(item("emulator", config=config) for config in configs)]
    assert set(core(items)) < set(values(items)) < set(items)
