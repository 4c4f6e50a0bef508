"""The sweep of workloads: its cases, its counts, and its files."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.perf import commands as command
from hopwell.perf import measure
from hopwell.perf.append import APPEND
from hopwell.perf.ceilings import CEILINGS, MATMUL, MATMUL_8, READ, Ceiling
from hopwell.perf.decode import DECODE
from hopwell.perf.family import Family
from hopwell.perf.mla import MLA
from hopwell.perf.prefill import PREFILL
from hopwell.perf.prefill_workloads import LENGTHS, Prefill
from hopwell.perf.results import Labels, Row, Run

RESULTS = Path(__file__).parents[2] / "perf" / "results"


@dataclass(frozen=True)
class Copy:
    """A case of a family that needs no GPU: copies of this number of elements."""

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
    def demand(self) -> dict[str, float]:
        return {"multiply": float(self.x**2), "read": 8.0 * self.x}

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
    Labels("copies", "MB/s", "read once", "numbers", ("multiply", "read")),
    unit_size=1e6,
    cases=(Copy("C1", 100), Copy("C2", 200), Copy("line-8", 8, "a line"), Copy("line-16", 16, "a line")),
    inputs=Numbers,
    candidates={
        "clone": lambda t: t.numbers.clone,
        "wrong, and fast": lambda t: lambda: t.numbers + 1.0,
        "absent": missing,
        "absent as well": missing,
    },
    host_calls=lambda: {"nothing": lambda: None, "hopwell.nothing": lambda: None},
    remarks={"clone": lambda t: f"all {len(t.numbers)} of them" if len(t.numbers) == 200 else "", "absent": missing},
)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the family above, and a card on which every call takes 2 ms."""
    monkeypatch.setattr(command, "_families", lambda: (COPIES,))
    for name, amount in (("multiply", 8e6), ("read", 4e5)):
        monkeypatch.setitem(CEILINGS, name, Ceiling(lambda t: lambda: None, amount))
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
    assert run.rate("C2: 200 numbers", "clone") == pytest.approx(800 / 2e-3 / 1e6)
    assert run.candidates == ["clone"], "a wrong result must not get a figure"
    text = (tmp_path / "copies.md").read_text()
    assert "| MB/s     |   C1 |   C2 |" in text
    assert "| us              |     C1 |     C2 |" in text
    assert "| clone           | 2000.0 | 2000.0 |" in text
    assert "By numbers: a line" in text
    assert "| MB/s     |   8 |   16 |" in text
    everywhere = "on C1, C2, line-8, line-16"
    assert f"- no figure for absent; absent as well {everywhere}: ImportError: not installed\n" in text
    assert f"- no figure for wrong, and fast {everywhere}: wrong result\n" in text
    assert all((row.error or 0) > 1e-3 for row in run.rows if row.candidate == "wrong, and fast")
    assert "- clone on C2: all 200 of them\n" in text
    assert text.count("clone on") == 1
    assert "| nothing                 |  1.5 |" in text
    assert "| hopwell.nothing |   40 |" in text


@pytest.mark.usefixtures("without_gpu")
def test_what_is_measured_stays_when_a_later_case_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2.0, 2.0])
    monkeypatch.setattr(measure, "interleaved", lambda calls: dict.fromkeys(calls, next(times)))
    assert sweep(tmp_path).exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["copies.json"], "plots take their time"
    run = Run.load(tmp_path / "copies.json")
    assert [run.rate(case.title, "clone") is not None for case in COPIES.cases] == [True, True, False, False]
    assert CliRunner().invoke(command.app, ["show", str(tmp_path / "copies.json")]).exit_code == 0
    assert "| clone" in (tmp_path / "copies.md").read_text()


@pytest.mark.usefixtures("without_gpu")
def test_the_floor_is_the_longest_time_at_a_ceiling(tmp_path: Path) -> None:
    """In 2 ms there are 8e6 products, 4000 in a us, and 4e5 bytes, 200 in a us."""
    assert sweep(tmp_path).exit_code == 0
    run = Run.load(tmp_path / "copies.json")
    assert run.ceilings == ["multiply", "read"]
    assert run.roofline("C1: 100 numbers") == pytest.approx(400 / 4.0), "800 bytes take longer than 1e4 products"
    assert run.roofline("C2: 200 numbers") == pytest.approx(800 / 10.0), "4e4 products take longer than 1600 bytes"
    text = (tmp_path / "copies.md").read_text()
    assert "| clone    |    0 |    0 |\n| roofline |  100 |   80 |\n\n" in text
    assert "| floor: multiply |    2.5 |   10.0 |\n| floor: read     |    4.0 |    8.0 |\n\n" in text
    assert "| roofline | 100 |  100 |\n\n" in text


@pytest.mark.usefixtures("without_gpu")
def test_the_roofline_is_over_the_ceilings_there_are(tmp_path: Path) -> None:
    assert sweep(tmp_path, "--candidates", "clone", "--candidates", "read").exit_code == 0
    text = (tmp_path / "copies.md").read_text()
    assert re.search(r"\| read +\| +100 \| +100 \|", text), "it may not be the one that decides"
    assert "floor: read" in text
    assert "roofline" not in text
    assert "multiply" not in text
    assert sweep(tmp_path, "--candidates", "clone").exit_code == 0
    text = (tmp_path / "copies.md").read_text()
    assert "clone" in text
    assert "roofline" not in text
    assert "floor" not in text


@pytest.mark.usefixtures("without_gpu")
def test_failures_are_cut_between_words() -> None:
    reason = "a sentence that goes on " * 10

    def fail(numbers: Numbers) -> Any:
        raise RuntimeError(reason)

    family = replace(COPIES, candidates={"fails": fail})
    [row] = command._measure(family, COPIES.cases[0], ["fails"], lambda step: None)
    assert row.failure is not None
    assert 100 < len(row.failure) <= 120
    kept = row.failure.removesuffix(" ...")
    assert kept != row.failure
    assert f"RuntimeError: {reason}".startswith(f"{kept} ")


@pytest.mark.usefixtures("without_gpu")
def test_what_cannot_be_captured_or_held_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "interleaved", lambda calls: {})
    [row] = command._measure(COPIES, COPIES.cases[0], ["clone"], lambda step: None)
    assert (row.rate, row.failure) == (None, "it cannot be captured in a CUDA graph")

    def fill_the_card(case: Copy) -> Any:
        raise torch.OutOfMemoryError

    [row] = command._measure(replace(COPIES, inputs=fill_the_card), COPIES.cases[0], ["clone"], lambda step: None)
    assert (row.rate, row.failure) == (None, "out of memory")


def test_calls_that_cannot_be_captured_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other calls are timed. A graph that replays in a tiny part of its calls' time does not hold their
    launches.
    """

    def capture(call: Any, graph_ms: float) -> Any:
        call()
        return measure.Captured(Silent(), 2, 9e3 if call is elsewhere else 4.0)  # type: ignore[arg-type]

    def elsewhere() -> None: ...

    def refuse() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(measure.Captured, "of", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Silent())
    calls = {"refuses": refuse, "elsewhere": elsewhere, "runs": lambda: None}
    assert measure.interleaved(calls) == {"runs": 2.0}


class Silent:
    """A graph or an event, 4 ms after any other."""

    def replay(self) -> None: ...
    def record(self) -> None: ...
    def elapsed_time(self, other: Silent) -> float:
        return 4.0


def test_failures_have_a_line_for_cases_and_candidates() -> None:
    run = unmeasured(
        *(Row(f"{case}: 1", name, failure="no windows") for case in ("P1", "P2") for name in ("one", "other")),
        Row("P1: 1", "third", failure="no windows"),
        Row("P1: 1", "fourth", failure="wrong result"),
    )
    lines = [line for line in run.markdown().splitlines() if "no figure" in line]
    assert lines == [
        "- no figure for one; other on P1, P2: no windows",
        "- no figure for third on P1: no windows",
        "- no figure for fourth on P1: wrong result",
    ]


def unmeasured(*rows: Row) -> Run:
    return Run("no GPU", "today", {}, COPIES.labels, list(rows))


@pytest.mark.parametrize(
    ("count", "in_rows"), [(1, [1]), (6, [6]), (7, [4, 3]), (16, [6, 6, 4]), (17, [6, 6, 5]), (19, [5, 5, 5, 4])]
)
def test_bars_come_in_rows(count: int, in_rows: list[int], figures: list[Any], tmp_path: Path) -> None:
    names = [f"case {i}" for i in range(count)]
    unmeasured(*(Row(name, who, rate=1.0) for name in names for who in ("clone", "read"))).save(tmp_path / "run.json")
    [figure] = figures
    found = [[label.get_text() for label in axes.get_xticklabels()] for axes in figure.axes]
    assert [len(row) for row in found] == in_rows
    assert list(itertools.chain(*found)) == names
    assert len({axes.get_xlim() for axes in figure.axes}) == 1, "bars of one width"
    assert legend(figure) == {"clone", "read"}


def test_bars_of_ours_say_how_they_compare(figures: list[Any], tmp_path: Path) -> None:
    rates = {"hopwell": 3.0, "hopwell, pages of 16": 2.0, "peer, pages of 16": 1.0, "peer": 1.5, "read": 4.0}
    unmeasured(*(Row("case", name, rate=rate) for name, rate in rates.items())).save(tmp_path / "run.json")
    [figure] = figures
    assert [text.get_text() for text in figure.axes[0].texts] == ["2.00"]
    assert legend(figure) == {"hopwell", "hopwell, pages of 16", "peer", "read"}


def test_lines_have_one_legend_beside_them(figures: list[Any], tmp_path: Path) -> None:
    rows = [Row(f"{i}-{x}", who, f"series {i}", x, rate=x) for i in range(5) for x in (1, 2) for who in ("one", "read")]
    rows.append(Row("4-1", "other", "series 4", 1, rate=1.0))
    unmeasured(*rows).save(tmp_path / "run.json")
    [figure] = figures
    assert [axes.get_title() for axes in figure.axes] == [f"series {i}" for i in range(5)]
    assert len({axes.get_position().y0 for axes in figure.axes}) == 2
    assert legend(figure) == {"one", "other", "read"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the saved figures."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig

    def keep(figure: Any, *arguments: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def legend(figure: Any) -> set[str]:
    """Return the entries of the one legend, which hides no axes."""
    [found] = figure.legends
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert not found.get_window_extent().overlaps(axes.get_window_extent())
    return {text.get_text() for text in found.get_texts()}


@pytest.mark.parametrize(
    ("family", "ceilings"),
    [
        (PREFILL, [MATMUL, MATMUL_8, READ]),
        (DECODE, [READ]),
        (MLA, [MATMUL, MATMUL_8, READ]),
        (APPEND, [READ]),
    ],
    ids=["prefill", "decode", "mla", "append"],
)
def test_families_measure_what_may_decide(family: Family, ceilings: list[str]) -> None:
    assert list(family.measured)[len(family.candidates) :] == ceilings == list(family.labels.ceilings)
    for case in family.cases:
        assert set(case.demand) <= {MATMUL, MATMUL_8, READ}
        assert len({MATMUL, MATMUL_8} & set(case.demand)) == (family is not APPEND)


def test_demand_of_prefill() -> None:
    """The case has 4 new tokens of 6, 8 heads with head dims 16 and 8, and 2 KV heads."""
    case = Prefill("", "", (4,), (6,), 8, 2, 16, 8, causal=False)
    queries = 2 * 4 * 8 * (16 + 8)
    assert case.demand == {MATMUL: 2 * 8 * (16 + 8) * 4 * 6, READ: queries + 2 * 6 * 2 * (16 + 8)}
    skipping = replace(case, skip_softmax=1.0)
    assert skipping.demand == {MATMUL: 2 * 8 * (16 + 2) * 4 * 6, READ: queries + 2 * 6 * 2 * (16 + 2)}
    assert skipping.work == case.work
    assert replace(case, causal=True).demand[MATMUL] == replace(case, causal=True).work


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("arguments", "cases", "candidates"),
    [
        (["--cases", "C1"], ["C1"], 6),
        (["--cases", "C2,C1"], ["C2", "C1"], 6),
        (["--cases", "C?", "--candidates", "clone", "--candidates", "wrong, *"], ["C1", "C2"], 2),
    ],
)
def test_names_and_globs_pick(arguments: list[str], cases: list[str], candidates: int, tmp_path: Path) -> None:
    assert sweep(tmp_path, *arguments).exit_code == 0
    rows = Run.load(tmp_path / "copies.json").rows
    found = list(dict.fromkeys(row.workload.split(":")[0] for row in rows))
    assert found == sorted(cases), "a file has the order of the family"
    [(_, chosen, _)] = command._chosen(arguments[1], None)
    assert [case.name for case in chosen] == cases, "cases are measured in the order of the patterns"
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
    """Only the diagonal of a causal mask counts half."""
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
    """Each call is timed alone, the first round is dropped, and the median of the rest is reported."""
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
    """Return the inputs that a separate process finds in this module."""
    return {"add": lambda: torch.ones(4) + 1, "fail": missing}


def test_first_calls_have_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    monkeypatch.setattr(measure, "FIRST_CALLS", 1)
    monkeypatch.setattr(measure, "FIRST_CALL", measure.FIRST_CALL.replace("torch.cuda.synchronize()", ""))
    assert 0.0 < measure.first_call_milliseconds(numbers_to_add, "add") < 1e4
    with pytest.raises(subprocess.CalledProcessError):
        measure.first_call_milliseconds(numbers_to_add, "fail")
