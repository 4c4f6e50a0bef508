"""Commands refuse wrong input with a message, not with a traceback."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.host.fake_dsl import Compiler

from hopwell.__main__ import main
from hopwell.kernels.capability import shipped
from hopwell.kernels.capability.kernel_texts import text_of
from hopwell.kernels.jit import ahead, toolchain
from hopwell.kernels.registry import shipped_configs


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--match", "[", "'[' is not a regular expression"),
        ("--jobs", "-1", "it must be from 1 to"),
        ("--jobs", "0", "it must be from 1 to"),
        ("--jobs", "x", "it must be from 1 to"),
        ("--arch", "sm_77", "invalid choice: 'sm_77'"),
        ("--prefill-types", "fp4", "invalid choice: 'fp4'"),
    ],
)
def test_options_of_compile(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compile", f"{option}={value}"])
    assert caught.value.code == 2
    assert f"argument {option}: {message}" in capsys.readouterr().err.splitlines()[-1]


def test_a_name_that_no_kernel_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--match", "nothing"]) == 1
    assert capsys.readouterr().err == (
        "no kernel for sm_90a with --prefill-types 16bit has a name that matches 'nothing'\n"
    )


def test_the_demo_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "hopwell: --device cuda needs a GPU, and torch finds none; --device cpu runs on the emulator\n"
    )


def test_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE_SEED", "x")
    assert main(["demo", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("hopwell: HOPWELL_EMULATE_SEED must be an integer of at least 0")


def test_help_does_not_import_torch() -> None:
    """PyTorch takes seconds to import, and more on a busy machine."""
    code = """
import sys
from hopwell.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    for arguments in (["--help"], ["compile", "--help"], []):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: hopwell")


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command in ("demo", "compile", "bundle", "cache", "support"):
        assert f"    {command} " in shown


def test_list_prints_names_and_compiles_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "artifact", None)
    assert main(["compile", "--list", "--arch", "sm_100a", "--match", "^append_.*bf16_e4m3$"]) == 0
    assert capsys.readouterr().out == "append_sm_100a_bf16_e4m3\n"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Return a stand-in for the compiler, which compiles kernels in this process, one at a time, and an empty cache."""
    fake = Compiler(tmp_path / "record")
    fake.install(monkeypatch)
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HOPWELL_JIT", raising=False)
    monkeypatch.setattr(toolchain, "compile_ahead", lambda configs, jobs: map(toolchain.artifact, configs))
    return fake


def test_compile_announces_time_and_size_and_shows_progress(
    compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = list(shipped_configs())[:3]
    monkeypatch.setattr(shipped, "kernels_to_ship", lambda arch, types: iter(configs))
    monkeypatch.setattr(ahead, "SECONDS_A_KERNEL", 400.0)
    toolchain.artifact(configs[1])
    compiler.seconds = 0.6
    assert main(["compile", "--jobs", "2"]) == 0
    before, *progress, after = capsys.readouterr().out.splitlines()
    folder = toolchain.cache_dir()
    assert before == "3 kernels, 1 of them compiled; compiling 2 in 2 processes: about 7 min and 2.1 MB"
    seconds = r"\d+ s"  # a busy machine takes longer
    patterns = [
        rf"\[1/3\] {configs[0].name}, {seconds} left",
        rf"\[2/3\] {configs[1].name}, {seconds} left",
        rf"\[3/3\] {configs[2].name}",
    ]
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(patterns, progress, strict=True))
    assert re.fullmatch(f"3 kernels in {re.escape(str(folder))}, {seconds}", after)
    assert main(["compile"]) == 0
    assert capsys.readouterr().out == "3 kernels, all of them compiled\n"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (121, "2 min"), (9000, "2.5 h")])
def test_durations(seconds: float, text: str) -> None:
    assert ahead.duration(seconds) == text


class TestCache:
    @pytest.fixture
    def root(self, compiler: Compiler) -> Path:
        """Return a cache with a kernel of this version, two of another version, an emulator library and a foreign
        folder.
        """
        built = toolchain.artifact(next(shipped_configs())).path
        root = built.parent.parent
        for name in ("one", "two"):
            shutil.copytree(built, root / ("0" * 16) / name)
        (root / "emulator").mkdir()
        (root / "emulator" / "core-0.so").write_bytes(bytes(1_000_000))
        (root / "mine").mkdir()
        (root / "emulator" / "mine").touch()
        return root

    @staticmethod
    def left(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.glob("*/*") if path.suffix != ".lock"} | {
            path.name for path in root.iterdir()
        }

    def test_contents(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = self.left(root)
        assert main(["cache"]) == 0
        place, ours, stale, emulated = capsys.readouterr().out.splitlines()
        assert place == str(root)
        assert ours.startswith("  this version of hopwell and its toolchain: 1 kernels, ")
        assert stale.startswith("  other versions (--prune removes them): 2 kernels, ")
        assert emulated == "  the emulator: 1.0 MB"
        assert self.left(root) == before

    def test_prune(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = self.left(root)
        assert main(["cache", "--prune"]) == 0
        stale = "0" * 16
        assert self.left(root) == before - {stale, f"{stale}/one", f"{stale}/two"}
        assert str(root) in capsys.readouterr().out

    def test_clear(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["cache", "--clear"]) == 0
        assert self.left(root) == {"mine", "emulator", "emulator/mine"}
        assert capsys.readouterr().out == f"removed 1.0 MB from {root}\n"

    def test_an_empty_one(self, capsys: pytest.CaptureFixture[str], compiler: Compiler) -> None:
        assert main(["cache"]) == 0
        assert main(["cache", "--clear"]) == 0
        assert "0 kernels, 0.0 MB" in capsys.readouterr().out

    def test_one_removal_at_a_time(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            main(["cache", "--clear", "--prune"])
        assert end.value.code == 2
        assert "argument --prune: not allowed with argument --clear" in capsys.readouterr().err


class TestSelection:
    """Options that would be ignored are refused."""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--page-size", "32"], "argument --page-size: it goes with --model, which is not given"),
            (["--max-drafts", "0"], "argument --max-drafts: it goes with --model, which is not given"),
            (["--model", "x", "--prefill-types", "fp8"], "argument --prefill-types: not allowed with argument --model"),
            (["--kernel", "x", "--arch", "sm_90a"], "argument --arch: not allowed with argument --kernel"),
            (["--kernel", "x", "--match", ""], "argument --match: not allowed with argument --kernel"),
        ],
    )
    @pytest.mark.parametrize("command", [["compile"], ["bundle", "folder"]])
    def test_excluded(
        self, command: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            main([*command, *arguments])
        assert end.value.code == 2
        assert message in capsys.readouterr().err

    def test_a_missing_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compile", "--model", "/no/such/config.json"]) == 1
        assert capsys.readouterr().err == (
            "hopwell: model must be a config.json or a folder with one, got '/no/such/config.json'\n"
        )

    def test_a_wrong_kernel(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compile", "--kernel", "x:y=z"]) == 1
        assert "hopwell: kernel 'x:y=z': the type must be one of" in capsys.readouterr().err


class TestBundle:
    def test_the_cache(self, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """A bundle of all kernels of the cache serves a machine with an empty cache, and it must not compile."""
        configs = list(shipped_configs())[:3]
        for config in configs[:2]:
            toolchain.artifact(config)
        folder = tmp_path / "bundle"
        for _ in range(2):  # the second time, the bundle has them
            assert main(["bundle", str(folder)]) == 0
            assert capsys.readouterr().out == f"2 kernels in {folder}, 0.0 MB; HOPWELL_BUNDLE={folder} uses them\n"
        assert all(path.stat().st_mode & 0o444 == 0o444 for path in folder.rglob("*"))
        assert not any(path.stat().st_mode & 0o022 for path in folder.rglob("*"))

    def test_use(self, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        configs = list(shipped_configs())[:2]
        toolchain.artifact(configs[0])
        folder = tmp_path / "bundle"
        assert main(["bundle", str(folder)]) == 0
        monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "empty"))
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        with pytest.raises(RuntimeError, match="HOPWELL_JIT=forbid"):
            toolchain.artifact(configs[0])
        monkeypatch.setenv("HOPWELL_BUNDLE", str(folder))
        found = toolchain.artifact(configs[0])
        assert folder in found.path.parents
        assert found.is_sound()
        assert not (tmp_path / "empty").exists()
        with pytest.raises(RuntimeError, match=f"or in the bundle {folder}, and HOPWELL_JIT=forbid"):
            toolchain.artifact(configs[1])
        monkeypatch.setenv("HOPWELL_JIT", "allow")
        assert tmp_path / "empty" in toolchain.artifact(configs[1]).path.parents, "a bundle is only read"
        found.path.parent.chmod(0o777)
        with pytest.raises(PermissionError, match=r"can be written by others.*HOPWELL_BUNDLE"):
            toolchain.artifact(configs[0])

    def test_other_versions(self, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / "bundle"
        (folder / ("0" * 16)).mkdir(parents=True)
        monkeypatch.setenv("HOPWELL_BUNDLE", str(folder))
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        with pytest.raises(RuntimeError, match=f"the bundle {folder}, which has kernels of other versions only"):
            toolchain.artifact(next(shipped_configs()))

    def test_a_missing_folder(self, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_BUNDLE", str(tmp_path / "none"))
        with pytest.raises(ValueError, match="HOPWELL_BUNDLE must be a folder that `python -m hopwell bundle`"):
            toolchain.artifact(next(shipped_configs()))

    def test_a_selection_is_compiled_first(
        self, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = next(shipped_configs())
        other = toolchain.artifact(list(shipped_configs())[1]).path.name
        assert main(["bundle", str(tmp_path / "bundle"), "--kernel", text_of(config)]) == 0
        assert compiler.compiled == [other, config.name]
        kernels = [path.name for path in (tmp_path / "bundle").glob("*/*")]
        assert kernels == [config.name]
        assert "1 kernels in" in capsys.readouterr().out

    def test_an_empty_cache(self, compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bundle", str(tmp_path / "bundle")]) == 1
        assert "there are no kernels in" in capsys.readouterr().err
