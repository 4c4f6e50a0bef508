"""The README is correct: its table equals the code's, and its examples run."""

from __future__ import annotations

import pathlib
import re
import runpy

import pytest
import torch

import hopwell
from hopwell import emulator
from hopwell.__main__ import main
from hopwell._commands import demo
from hopwell.kernels import support
from hopwell.kernels.capability.features import ENTRIES as TABLES
from hopwell.kernels.capability.features import support_matrix

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "perf" / "results" / "README.md"
DEMO = (demo.Prefill, demo.Decode, demo.MlaDecode)
ENTRIES = [batch.ENTRY for batch in DEMO]


def test_support_matrix_is_up_to_date() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "support_matrix.py"))["pages"]()
    assert [page.name for page in pages] == ["support.md", "README.md", "quantized_caches.md"]
    for page, text in pages.items():
        assert page.read_text() == text, "run `python docs/support_matrix.py`"
    assert (ROOT / "docs" / "support.md").read_text().endswith(support_matrix())


@pytest.mark.parametrize(
    ("row", "cells"),
    [
        ("Prefill, bf16 or fp16, head dim 64, 128, 192/128", ["● wgmma", "○ tcgen05 (1)", "◐ mma.sync"]),
        ("MLA, fp8 cache, bf16 or fp16 query", ["● wgmma", "○ tcgen05 (8)", "◐ mma.sync (9)"]),
    ],
)
def test_a_row_of_gpus_says_where_a_kernel_has_run_and_with_which_instruction(row: str, cells: list[str]) -> None:
    assert "\n| | H100, H200 | B200, B300 | RTX PRO 6000, RTX 5090, DGX Spark |\n" in README
    assert f"\n| {row} | {' | '.join(cells)} |\n" in README


def test_footnotes_of_the_matrix_stand_below_it() -> None:
    """Their numbers are in the order in which the table cites them."""
    table, _, notes = README.partition("<!-- gpu matrix")[2].partition("<!-- end")[0].rpartition("|\n\n")
    cited = list(dict.fromkeys(re.findall(r" \((\d+)\)", table)))
    assert cited == re.findall(r"^(\d+)\. ", notes, re.MULTILINE) == [str(i + 1) for i in range(len(cited))]
    made = runpy.run_path(str(ROOT / "docs" / "support_matrix.py"))
    assert set(made["note_numbers"]()) == set(made["NOTES"])


def test_every_entry_stands_in_the_first_table() -> None:
    entries = {*TABLES, *support.SAME_AS}
    names = re.findall(r"^\| `hopwell\.([a-z0-9_.]+)` \|", README, re.MULTILINE)
    assert {name.rpartition(".")[2] for name in names} == entries | {"append_paged_kv_cache_with_slot_mapping"}
    assert entries <= set(hopwell.__all__)


def check_demo(capsys: pytest.CaptureFixture[str], device: str) -> None:
    assert main(["demo", "--device", device]) == 0
    shown = capsys.readouterr().out
    assert shown.count(": right\n") == shown.count("right below 8e-03: ") == len(DEMO)
    assert [line for line in shown.splitlines() if line in ENTRIES] == ENTRIES


@pytest.mark.gpu
def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    check_demo(capsys, "cuda")


@pytest.mark.emulator
def test_demo_on_the_emulator(capsys: pytest.CaptureFixture[str]) -> None:
    check_demo(capsys, "cpu")


@pytest.mark.emulator
@pytest.mark.parametrize("wrong", DEMO)
def test_demo_says_what_is_wrong(
    wrong: type[demo.Batch], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong batch here has last tokens that are not attended to."""
    attend = wrong.attend

    def attend_to_fewer(batch: demo.Batch, out: torch.Tensor | None = None) -> torch.Tensor:
        batch.seq_lens -= 1
        return attend(batch, out)

    monkeypatch.setattr(wrong, "attend", attend_to_fewer)
    assert main(["demo", "--device", "cpu"]) == 1
    verdicts = re.findall(r"of the largest output: (\w+)\n", capsys.readouterr().out)
    assert verdicts == ["WRONG" if batch is wrong else "right" for batch in DEMO]


def test_demo_says_what_has_no_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    with emulator.use("sm_89"):
        assert main(["demo", "--device", "cpu"]) == 0
    assert re.findall(r"(\w+) on sm_89 supports no ", capsys.readouterr().out) == ENTRIES


def test_demo_rates() -> None:
    """A call takes a nanosecond here."""
    prefill = demo.Prefill("cpu", [37, 300], 4, 2, q_lens=[5, 130])  # its tokens see 33 to 37 and 171 to 300 keys
    visible = sum(range(33, 38)) + sum(range(171, 301))
    assert prefill.rate(1e-6) == f"{2 * 4 * (128 + 128) * visible / 1e3:.0f} TFLOP/s"
    assert demo.Decode("cpu", [38, 301], 4, 2).rate(1e-6) == f"{339 * 2 * (128 + 128) * 2} GB/s of keys and values"
    assert demo.MlaDecode("cpu", [38, 301], 16).rate(1e-6) == f"{2 * 16 * (576 + 512) * 339 / 1e3:.0f} TFLOP/s"


@pytest.mark.parametrize(("arch", "status"), [("sm_90a", 1), ("sm_100a", 1), ("sm_120a", 1), (None, 2)])
def test_demo_is_emulated_without_kernels_for_the_gpu(
    arch: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arch_of(device: torch.device) -> str:
        if arch is None:
            raise NotImplementedError(f"{device} is too old")
        return arch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(demo.support, "arch_of", arch_of)
    monkeypatch.setattr(demo, "_on_gpu", lambda: 1)
    monkeypatch.setattr(demo, "_on_emulator", lambda: 2)
    assert main(["demo"]) == status


def test_links_lead_somewhere() -> None:
    """Links and pictures to files of this repository, in hand-written documents, exist."""
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/README.md"), RESULTS]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_each_folder_of_results_is_explained() -> None:
    folders = {str(file.parent.relative_to(RESULTS.parent)) for file in RESULTS.parent.rglob("*.md")} - {
        ".",
        "h100",
        "h200",
    }
    named = re.findall(r"`([\w/]+)`", RESULTS.read_text())
    assert [name for name in named if not (RESULTS.parent / name).is_dir()] == []
    assert {folder for folder in folders if not any(f"{folder}/".startswith(f"{name}/") for name in named)} == set()
