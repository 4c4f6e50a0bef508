"""Which tests the core set and the pairwise set take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from selection import core, pairwise

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


def test_each_pair_of_values_is_in_one_test() -> None:
    choices: dict[str, Sequence[Any]] = dict(
        mask=("full", "causal", "window"), pages=(1, 16, 64), dtype=("bf16", "fp16")
    )
    items = [
        item("emulator", **dict(zip(choices, values, strict=True))) for values in itertools.product(*choices.values())
    ]
    found = [one.callspec.params for one in pairwise(items)]
    for one, other in itertools.combinations(choices, 2):
        for pair in itertools.product(choices[one], choices[other]):
            assert any((params[one], params[other]) == pair for params in found), (one, other, pair)
    assert 9 <= len(found) <= 11 < len(items)


def test_every_value_is_in_where_a_test_has_one_parameter() -> None:
    items = [item("emulator", seed=seed) for seed in range(5)]
    assert pairwise(items) == items


def test_kernels_that_run_are_looked_at_too() -> None:
    """Tests of what the compiler made take the kernels that other tests run, and few besides, whatever their order."""
    configs = list(shipped_configs("sm_90a", Family.DECODE))
    looks = [item("compile", file="test_a.py", config=config) for config in configs]
    runs = [item("emulator", file="test_b.py", config=config) for config in configs]
    found = pairwise(looks + runs)
    looked_at, run = ({one.callspec.params["config"].name for one in found if one in kind} for kind in (looks, runs))
    assert run <= looked_at
    assert len(looked_at) < len(configs) / 2
    for name in ("mask", "rows", "kv_type", "head_dim_qk"):
        values = {getattr(one.callspec.params["config"], name) for one in found if one in runs}
        assert values == {getattr(config, name) for config in configs}


def test_the_core_set_is_part_of_the_pairwise_set() -> None:
    configs = list(shipped_configs("sm_90a", Family.PREFILL))
    items = [item(), item("traced"), *(item("emulator", config=config) for config in configs)]
    assert set(core(items)) < set(pairwise(items)) < set(items)
