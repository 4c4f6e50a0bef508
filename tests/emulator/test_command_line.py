"""Commands of the emulator report a missing GPU, compiler or file in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hopwell.emulator import native
from hopwell.emulator.__main__ import main


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for results on a machine without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.mark.parametrize(
    "command", [["compare-hardware", "--out"], ["compare-outputs", "--record"], ["derive-approximations", "--out"]]
)
def test_without_a_gpu(command: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, str(out / "results")]) == 1
    assert capsys.readouterr().err == "hopwell.emulator: this command needs a GPU, and torch finds none\n"
    assert list(out.iterdir()) == []


def test_without_a_compiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    native.core.cache_clear()
    assert main(["build"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hopwell.emulator: hopwell's emulator needs a C compiler (gcc)")


@pytest.mark.parametrize(
    "command",
    [["campaign", "none.py:case"], ["example", "sm_90a", "none.py"], ["compare-outputs", "--against", "none"]],
)
def test_without_the_file(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 2
    assert f"there is no '{command[-1]}'" in capsys.readouterr().err.splitlines()[-1]


def test_help_says_which_commands_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("compare a Hopper GPU with the emulator (needs the GPU)", "(--record needs a GPU)"):
        assert words in shown
    assert shown.count("(needs the GPU)") == 2
