"""Cases by the bits of their operands, and tables of documents written from the files of runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.perf import commands as command
from hopwell.perf import precision
from hopwell.perf.documents import BEGIN, END, with_tables, write_predictions
from hopwell.perf.results import ERROR_TITLE, OVER_PEER, OVER_WIDE, Labels, Row, Run

DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").glob("measured*.md"))
LABELS = Labels("copies", "MB/s", "read once", "numbers", ("read",))
# Figures of (case, candidate): microseconds, MB/s, relative error.
FIGURES = {
    ("P1", "hopwell"): (10.0, 100.0, 1e-3),
    ("P1", "hopwell, pages of 16"): (12.5, 80.0, 1e-3),
    ("P1", "peer"): (20.0, 50.0, 2e-3),
    ("P1", "peer, pages of 16"): (25.0, 40.0, 2e-3),
    ("P1-fp8", "hopwell"): (8.0, 125.0, 2e-2),
    ("P1-fp8", "peer"): (5.0, 200.0, 3e-2),
    ("P1-nvfp4-cache", "hopwell, pages of 16"): (25.0, 40.0, 1e-3),
    ("P2-nvfp4-cache", "hopwell, pages of 16"): (25.0, 40.0, None),
}


@pytest.fixture
def run() -> Run:
    rows = [
        Row(f"{case}: a copy", who, milliseconds=time / 1e3, rate=rate, error=error)
        for (case, who), (time, rate, error) in FIGURES.items()
    ]
    rows.append(Row("P1: a copy", "wrong", error=1e20, failure="wrong result"))
    return Run("no GPU", "today", {}, LABELS, rows)


@pytest.mark.parametrize(
    ("name", "wide", "group"),
    [
        ("P1", "P1", precision.SIXTEEN_BITS),
        ("d64-512", "d64-512", precision.SIXTEEN_BITS),
        ("P1-fp8", "P1", precision.E4M3),
        ("chunk-fp8-cache", "chunk", precision.E4M3),
        ("P1-fp8-nvfp4", "P1", precision.NVFP4),
        ("D2-q4-nvfp4", "D2-q4", precision.NVFP4),
        ("P1-nvfp4-cache", "P1", precision.NVFP4),
    ],
)
def test_names_tell_precision(name: str, wide: str, group: str) -> None:
    assert (precision.wide_name(name), precision.precision(name)) == (wide, group)


def cells(text: str, title: str) -> list[str]:
    """Return the figures of the first table row with this title."""
    [line, *_] = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_precisions_have_tables_of_their_own(run: Run) -> None:
    text = run.markdown()
    parts = [text.index(f"In {group}:") for group in ("16 bits", "e4m3", "NVFP4")]
    assert parts == sorted(parts)
    wide, narrow, packed = text[parts[0] : parts[1]], text[parts[1] : parts[2]], text[parts[2] :]
    assert cells(wide, OVER_PEER) == ["2.00"]
    assert OVER_WIDE not in wide
    assert cells(narrow, OVER_PEER) == ["0.62"]
    assert cells(narrow, OVER_WIDE) == ["1.25"]
    assert "pages of 16" not in narrow, "nothing was measured with them"
    assert OVER_PEER not in packed
    assert cells(packed, OVER_WIDE) == ["0.50", "-"], "pages of 16 are held against their own, where there are any"


def test_errors_are_of_what_is_right(run: Run) -> None:
    text = run.markdown()
    wide, narrow, packed = (part.split("\n\n")[0] for part in text.split("relative error, 1e-3")[1:])
    assert "2.00" in wide
    assert "wrong" not in wide
    assert "20.00" in narrow
    assert packed.count("1.00") == 1


def test_precisions_have_plots_of_their_own(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run.save(tmp_path / "copies.json")
    assert {path.name for path in tmp_path.glob("*.png")} == {"copies.png", "copies-fp8.png", "copies-nvfp4.png"}


def test_a_run_knows_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    here = Run.here(LABELS)
    assert (here.gpu, here.versions["torch"]) == ("some GPU", torch.__version__)


def test_cases_are_in_the_order_of_their_family(run: Run) -> None:
    run.sort(["P2-nvfp4-cache: a copy", "P1: a copy"])
    assert run.alone == [f"{name}: a copy" for name in ("P2-nvfp4-cache", "P1", "P1-fp8", "P1-nvfp4-cache")]
    assert [row.candidate for row in run.rows if row.workload == "P1-fp8: a copy"] == ["hopwell", "peer"]


def document(folder: Path, cases: str, path: str = "runs/copies.json") -> Path:
    text = f"Before.\n<!-- table of {path}: {cases} -->\nold\n<!-- end of table -->\nAfter.\n"
    (folder / "page.md").write_text(text)
    return folder / "page.md"


def test_tables_of_documents(run: Run, tmp_path: Path) -> None:
    """Each peer has one row, with its best form; writing once more changes nothing."""
    run.write(tmp_path / "runs" / "copies.json")
    page = document(tmp_path, "P1")
    assert CliRunner().invoke(command.app, ["document", str(page)]).exit_code == 0
    text = page.read_text()
    assert text.startswith(
        "Before.\n<!-- table of runs/copies.json: P1 -->\n\nno GPU, today ([all](runs/copies.md)):\n"
    )
    assert text.endswith("- P1: a copy\n\n<!-- end of table -->\nAfter.\n")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("|")]
    assert {name.strip(): figure.strip() for name, figure in rows[2:]} == {
        "hopwell": "100",
        "hopwell, pages of 16": "80",
        "peer": "50",
        "best of hopwell / best peer": "2.00",
    }
    assert with_tables(page) == text


def test_summaries_of_narrow_cases_have_errors(run: Run) -> None:
    """A candidate has one row, with the largest error of its forms."""
    run.rows.append(Row("P1-fp8: a copy", "peer, pages of 16", rate=1.0, error=4e-2))
    assert ERROR_TITLE not in run.summary(["P1: a copy"])
    errors = run.summary(["P1-fp8: a copy"]).split("\n\n")[1]
    assert errors.startswith(f"| {ERROR_TITLE} ")
    assert (cells(errors, "hopwell"), cells(errors, "peer")) == (["20.00"], ["40.00"])
    assert "pages" not in errors


@pytest.mark.parametrize(("cases", "path", "message"), [("P9", "runs/copies.json", "P9"), ("P1", "none.json", "none")])
def test_what_is_not_there_is_named(run: Run, tmp_path: Path, cases: str, path: str, message: str) -> None:
    run.write(tmp_path / "runs" / "copies.json")
    page = document(tmp_path, cases, path)
    before = page.read_text()
    done = CliRunner().invoke(command.app, ["document", str(page)])
    assert done.exit_code == 2
    assert message in re.sub(r"[\s│]", "", done.output)  # a narrow terminal breaks lines anywhere
    assert page.read_text() == before


def test_predictions_are_written_into_their_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_predictions(page, "new\n")
    assert page.read_text() == f"before\n{BEGIN}\nnew\n{END}\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="must have"):
        write_predictions(page, "new\n")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_checked_in_tables_are_those_of_their_runs(document: Path) -> None:
    text = document.read_text()
    assert "<!-- table of " in text
    assert text == with_tables(document), f"python -m hopwell.perf document {document.name} writes them again"
