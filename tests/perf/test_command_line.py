"""Commands of the measurements report a missing package, tool, file or GPU in one line."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hopwell.perf import MissingError, __main__, commands, resources, sass

INSTALL = 'pip install "hopwell[perf]"'


def main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the program as the command line does; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["hopwell.perf", *map(str, arguments)])
    try:
        return __main__.main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from hopwell.perf.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == f"hopwell.perf: {package} is not installed; {INSTALL}\n"


def test_without_what_writes_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "hopwell.perf.resources")
    monkeypatch.setitem(sys.modules, "tabulate", None)
    assert main(monkeypatch, "resources", "--match", "^decode_") == 1
    assert capsys.readouterr().err == f"hopwell.perf: tabulate is not installed; {INSTALL}\n"


def test_another_missing_module_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hopwell.perf.commands", None)
    with pytest.raises(ModuleNotFoundError):
        main(monkeypatch, "--help")


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(monkeypatch, "sweep", "--out", tmp_path) == 1
    assert capsys.readouterr().err == "hopwell.perf: a sweep needs a GPU, and torch finds none\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_disassembler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def not_installed(package: str) -> None:
        raise sass.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(sass.importlib.metadata, "files", not_installed)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingError, match="cuobjdump is not installed"):
        sass.cuda_tool("cuobjdump")
    monkeypatch.setattr(resources, "table", lambda configs: sass.cuda_tool("cuobjdump"))
    assert main(monkeypatch, "resources") == 1
    assert capsys.readouterr().err == f"hopwell.perf: cuobjdump is not installed; {INSTALL}\n"


def test_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "show", tmp_path / "none.json") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hopwell.perf: [Errno 2] No such file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resources", "--arch", "sm_77"], "must be one of sm_90a"),
        (["resources", "--match", "["], "'[' is not a regular expression"),
        (["resources", "--match", "nothing"], "no attention kernel for sm_90a has a name that matches 'nothing'"),
        (["model", "--arch", "sm_90a"], "must be one of sm_100a, sm_103a"),
    ],
)
def test_options(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(commands.app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_help_says_which_command_needs_a_gpu() -> None:
    commands_of = {command.name or command.callback.__name__: command for command in commands.app.registered_commands}
    needs = {name for name, command in commands_of.items() if "Needs a GPU" in (command.callback.__doc__ or "")}
    assert needs == {"sweep", "generate"}
    others = {name for name, command in commands_of.items() if "needs no GPU" in (command.callback.__doc__ or "")}
    assert needs | others == set(commands_of)
