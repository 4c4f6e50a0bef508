"""Which tests the core set takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core_set import core

from hopwell.kernels.families import shipped_configs
from hopwell.kernels.problem import Family


def item(*markers: str, file: str = "test_a.py", **params: Any) -> Any:
    marked = SimpleNamespace(get_closest_marker=lambda name: name if name in markers else None, path=Path(file))
    if params:
        marked.callspec = SimpleNamespace(params=params)
    return marked


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
