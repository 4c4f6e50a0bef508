"""The schema of a run's file: every checked-in run has it, and a file without it is refused by field."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from hopwell.perf import commands as command
from hopwell.perf.colors import is_ours
from hopwell.perf.results import Labels, Row, Run

RESULTS = Path(command.__file__).parent / "results"
FILES = sorted(RESULTS.rglob("*.json"))
RUN = Run(
    "NVIDIA B200",
    "2026-11-26",
    {"hopwell": "0.1.0", "torch": "2.13.0"},
    Labels("decode", "GB/s", "keys and values, each read once", "keys of a request", ["memory read"]),
    [
        Row("D1: 1 x 8", "hopwell, pages of 16", milliseconds=0.5, rate=100.0, error=1e-3),
        Row("D1: 1 x 8", "peer", failure="not served"),
    ],
    ceiling_rates={"memory read, GB/s": [7000.0]},
)


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    RUN.write(tmp_path / "decode.json")
    return json.loads((tmp_path / "decode.json").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_checked_in_runs(path: Path) -> None:
    run = Run.load(path)
    family = path.stem
    assert run.labels.family.lower() == family
    assert run.gpu
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in run.date.split(", "))
    assert "torch" in run.versions
    assert any(is_ours(row.candidate) for row in run.rows)
    for row in run.rows:
        assert (row.rate is None) == (row.milliseconds is None), (row.workload, row.candidate)
        assert row.rate is None or row.rate > 0
        assert row.rate or row.failure, "a row without a figure has a reason"
        assert not row.rate or row.error is None or row.error >= 0, "only a wrong result may be NaN"
    places = [(row.workload, row.candidate) for row in run.rows]
    assert len(set(places)) == len(places), "a candidate has one row for each case"


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    RUN.write(tmp_path / "decode.json")
    assert Run.load(tmp_path / "decode.json") == RUN


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("gpu",), 7, "decode.json.gpu must be str, got 7"),
        (("rows", 0, "rate"), "100", r"decode.json.rows[0].rate must be float, got '100'"),
        (("rows", 1, "x"), 1.5, r"decode.json.rows[1].x must be int, got 1.5"),
        (("rows", 1, "x"), True, r"decode.json.rows[1].x must be int, got True"),
        (
            ("rows", 1, "speed"),
            1.5,
            "decode.json.rows[1] has unknown fields speed; its fields are workload",
        ),
        (("versions", "torch"), None, r"decode.json.versions['torch'] must be str, got None"),
        (("labels", "ceilings"), "read", "decode.json.labels.ceilings must be a list, got 'read'"),
        (("ceiling_rates", "memory read, GB/s"), [None], "must be float, got None"),
    ],
)
def test_wrong_fields_are_named(
    raw: dict[str, Any], place: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    inner: Any = raw
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    (tmp_path / "decode.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=re.escape(message)):
        Run.load(tmp_path / "decode.json")


def test_missing_fields_are_named(raw: dict[str, Any], tmp_path: Path) -> None:
    wrong = copy.deepcopy(raw)
    del wrong["labels"]["unit"]
    path = tmp_path / "decode.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(ValueError, match=r"decode\.json\.labels lacks unit; its fields are family, unit"):
        Run.load(path)
    done = CliRunner().invoke(command.app, ["show", str(path)])
    assert done.exit_code == 2
    assert "lacks unit" in re.sub(r"\s+", " ", done.output.replace("│", " "))
    path.write_text("{")
    with pytest.raises(ValueError, match=r"decode\.json is not JSON"):
        Run.load(path)
