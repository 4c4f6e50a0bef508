"""The sweep of workloads: which cases it picks, what it counts, what its files say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.perf import __main__ as command
from hopwell.perf import measure
from hopwell.perf.family import Family
from hopwell.perf.prefill import PREFILL
from hopwell.perf.prefill_workloads import LENGTHS, Prefill
from hopwell.perf.results import Labels, Run

RESULTS = Path(__file__).parents[2] / "perf" / "results"


@dataclass(frozen=True)
class Copy:
    """A case of a family that needs no GPU: copies of so many numbers."""

    name: str
    x: int
    series: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.x} numbers"

    @property
    def work(self) -> float:
        return 4.0 * self.x

    @property
    def max_error(self) -> float:
        return 1e-3


class Numbers:
    def __init__(self, case: Copy):
        self.numbers = torch.arange(case.x, dtype=torch.float32)

    def error(self, out: torch.Tensor) -> float:
        return ((out - self.numbers).norm() / self.numbers.norm()).item()


def missing(numbers: Numbers) -> Any:
    raise ImportError("not installed\nby anybody")


COPIES = Family(
    Labels("copies", "GB/s", "read once", "numbers", "ceiling"),
    unit_size=1e9,
    cases=(Copy("C1", 100), Copy("C2", 200), Copy("line-8", 8, "a line"), Copy("line-16", 16, "a line")),
    inputs=Numbers,
    candidates={
        "clone": lambda t: t.numbers.clone,
        "wrong, and fast": lambda t: lambda: t.numbers + 1.0,
        "absent": missing,
        "ceiling": lambda t: lambda: None,
    },
    ceiling_work=8e6,
    host_calls=lambda: {"nothing": lambda: None, "hopwell.nothing": lambda: None},
    remarks={"clone": lambda t: f"all {len(t.numbers)} of them" if len(t.numbers) == 200 else "", "absent": missing},
)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family above, and a card on which every call takes 2 ms."""
    monkeypatch.setattr(command, "_families", lambda: (COPIES,))
    monkeypatch.setattr(Run, "here", lambda labels: Run("no GPU", "today", {}, labels))
    monkeypatch.setattr(measure, "interleaved", lambda calls: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(measure, "host_microseconds", lambda calls: dict.fromkeys(calls, 1.5))
    monkeypatch.setattr(measure, "first_call_milliseconds", lambda calls, name: 40.0)


def sweep(out: Path, *arguments: str) -> Any:
    return CliRunner().invoke(command.app, ["sweep", "--out", str(out), *arguments])


@pytest.mark.usefixtures("without_gpu")
def test_a_sweep_writes_what_it_measured(tmp_path: Path) -> None:
    done = sweep(tmp_path)
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "copies.json",
        "copies.md",
        "copies.png",
        "copies-series.png",
    }
    run = Run.load(tmp_path / "copies.json")
    assert run.rate("C2: 200 numbers", "clone") == pytest.approx(800 / 2e-3 / 1e9)
    assert run.rate("C2: 200 numbers", "ceiling") == pytest.approx(4.0)
    assert run.candidates == ["clone", "ceiling"], "a wrong result must not get a figure"
    text = (tmp_path / "copies.md").read_text()
    assert "| GB/s    |   C1 |   C2 |" in text
    assert "| us    |     C1 |     C2 |" in text
    assert "| clone | 2000.0 | 2000.0 |" in text
    assert "By numbers: a line" in text
    assert "| GB/s    |   8 |   16 |" in text
    assert "- no figure for absent on C1, C2, line-8, line-16: ImportError: not installed\n" in text
    assert "ArithmeticError" in text
    assert "- clone on C2: all 200 of them\n" in text
    assert text.count("clone on") == 1
    assert "| nothing                 |  1.5 |" in text
    assert "| hopwell.nothing |   40 |" in text


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("arguments", "cases", "candidates"),
    [
        (["--cases", "C1"], ["C1"], 4),
        (["--cases", "line-*,C2"], ["C2", "line-8", "line-16"], 4),
        (["--cases", "C?", "--candidates", "clone", "--candidates", "wrong, *"], ["C1", "C2"], 2),
    ],
)
def test_names_and_globs_pick(arguments: list[str], cases: list[str], candidates: int, tmp_path: Path) -> None:
    assert sweep(tmp_path, *arguments).exit_code == 0
    rows = Run.load(tmp_path / "copies.json").rows
    assert list(dict.fromkeys(row.workload.split(":")[0] for row in rows)) == cases
    assert len({row.candidate for row in rows}) == candidates


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("wrong", [["--cases", "C1,P9"], ["--candidates", "clon"]])
def test_a_name_that_is_none_is_refused(wrong: list[str], tmp_path: Path) -> None:
    done = sweep(tmp_path, *wrong)
    assert done.exit_code == 2
    assert "is named" in done.output
    assert not list(tmp_path.iterdir())


def test_cases_of_prefill() -> None:
    names = [case.name for case in PREFILL.cases]
    assert len(set(names)) == len(names)
    lines = [case for case in PREFILL.cases if case.series]
    assert [case.x for case in lines] == 3 * list(LENGTHS)
    assert {case.name for case in lines} == {f"d{d}-{n}" for d, n in itertools.product((64, 128, 256), LENGTHS)}
    for case in lines:
        assert isinstance(case, Prefill)
        assert case.tokens == (16384 if case.x <= 16384 else case.x)


@pytest.mark.parametrize(("causal", "left"), [(False, -1), (True, -1), (True, 0), (True, 3), (True, 7), (True, 100)])
def test_work_counts_visible_keys(causal: bool, left: int) -> None:
    """The diagonal of a causal mask counts half, and so does nothing else."""
    q_lens, kv_lens = (1, 5, 8), (9, 5, 20)
    case = Prefill("", "", q_lens, kv_lens, 3, 1, 16, 8, causal=causal, window_left=left)
    visible = 0.0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for position in range(kv_len - q_len, kv_len):
            first = max(position - left, 0) if left >= 0 else 0
            visible += position - first + 0.5 if causal else kv_len
    assert case.work == 2 * 3 * (16 + 8) * visible


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: str(path.relative_to(RESULTS)))
def test_checked_in_tables_are_those_of_their_figures(path: Path) -> None:
    run = Run.load(path)
    assert json.loads(path.read_text())["labels"] == vars(run.labels)
    assert path.with_suffix(".md").read_text() == run.markdown(), "python -m hopwell.perf show writes it again"


@pytest.mark.gpu
def test_a_sweep_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "FIRST_CALLS", 1)
    done = sweep(tmp_path, "--cases", "short,d64-512", "--candidates", "hopwell*")
    assert done.exit_code == 0, done.output
    run = Run.load(tmp_path / "prefill.json")
    assert len(run.rows) == 10
    assert all(row.rate and row.failure is None for row in run.rows), done.output
    assert len(run.first_call_milliseconds) == 3


def test_warm_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is timed without the others, the first round counts for nothing, and the median of the rest is reported."""
    now, log = [0.0], []
    costs = {"slow": iter([9e-6] * 2 + [5e-6] * 2 + [7e-6] * 2 + [6e-6] * 2), "fast": iter([9e-6] * 2 + [1e-6] * 6)}

    def call(name: str) -> None:
        now[0] += next(costs[name])
        log.append(name)

    def synchronize() -> None:
        now[0] += 1.0
        log.append("synchronize")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    calls = {name: partial(call, name) for name in costs}
    found = measure.host_microseconds(calls, at_once=2, rounds=3)
    assert found == pytest.approx({"slow": 6.0, "fast": 1.0})
    assert log[:6] == ["synchronize", "slow", "slow", "synchronize", "fast", "fast"]


def numbers_to_add() -> dict[str, Any]:
    """What a process of its own finds in this module."""
    return {"add": lambda: torch.ones(4) + 1, "fail": missing}


def test_first_calls_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setattr(measure, "FIRST_CALLS", 1)
    monkeypatch.setattr(measure, "FIRST_CALL", measure.FIRST_CALL.replace("torch.cuda.synchronize()", ""))
    assert 0.0 < measure.first_call_milliseconds(numbers_to_add, "add") < 1e4
    with pytest.raises(subprocess.CalledProcessError):
        measure.first_call_milliseconds(numbers_to_add, "fail")
