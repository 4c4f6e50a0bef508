"""The cache folder: private, trusted only if no other user can write it, and plain messages for failed writes."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator

import pytest
from helpers.host.fake_dsl import Compiler

from hopwell.kernels.jit import cache_folder, settings, toolchain
from hopwell.kernels.jit.cache_folder import UNFINISHED
from hopwell.kernels.jit.toolchain import OBJECT, artifact, cache_dir
from hopwell.kernels.registry import shipped_configs

CONFIG, OTHER = list(shipped_configs())[:2]
STRANGER = 4242


@pytest.fixture(autouse=True)
def compiler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    fake = Compiler(tmp_path / "record")
    fake.install(monkeypatch)
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("HOPWELL_JIT", "HOPWELL_CACHE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "_functions", {})
    return fake


@pytest.fixture(params=[0o000, 0o002, 0o277])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_folders_are_private_whatever_the_umask(umask: int) -> None:
    built = artifact(CONFIG).path
    for folder in (built, built.parent, built.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not any(path.stat().st_mode & 0o022 for path in built.iterdir())
    assert artifact(CONFIG).is_sound()


@pytest.mark.parametrize("name", ["a folder with spaces", "$HOME;{x}", 'a "quoted" one'])
def test_any_name_will_do(name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / name))
    assert artifact(CONFIG).is_sound()


def test_a_single_quote_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "it's"))
    with pytest.raises(ValueError, match="HOPWELL_CACHE_DIR must not have a single quote"):
        artifact(CONFIG)


@pytest.mark.parametrize("place", ["root", "version", "kernel", "file"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_refused(
    place: str, mode: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = artifact(CONFIG).path
    places = {"root": built.parent.parent, "version": built.parent, "kernel": built, "file": built / OBJECT}
    path = places[place]
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(
        PermissionError, match=r"can be written by others.*chmod -R go-w.*HOPWELL_CACHE_TRUST"
    ) as caught:
        toolchain.function(CONFIG)
    assert str(path) in str(caught.value)
    monkeypatch.setenv("HOPWELL_CACHE_TRUST", "all")
    assert artifact(CONFIG).path == built
    assert len(compiler.compiled) == 1


def test_what_somebody_else_owns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    artifact(CONFIG)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setattr(cache_folder, "ROOT", STRANGER + 1)
    with pytest.raises(PermissionError, match=rf"belongs to user {os.getuid()}.*HOPWELL_CACHE_DIR"):
        artifact(CONFIG)


def test_what_root_has_made_is_used(monkeypatch: pytest.MonkeyPatch, compiler: Compiler) -> None:
    built = artifact(CONFIG).path
    for path in (*built.iterdir(), built, built.parent, built.parent.parent):
        path.chmod(path.stat().st_mode & ~0o222 | 0o055)
    monkeypatch.setattr(cache_folder, "ROOT", os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    monkeypatch.setenv("HOPWELL_JIT", "forbid")
    assert artifact(CONFIG).path == built
    for path in (built.parent.parent, built.parent, built):
        path.chmod(0o700)


class TestFailures:
    """The message names the folder and a remedy."""

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
    def test_to_write(self, code: int, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(code, os.strerror(code), "some file")

        monkeypatch.setattr(shutil, "move", fail)
        with pytest.raises(OSError, match=r"cannot write to the cache.*HOPWELL_CACHE_DIR") as caught:
            artifact(CONFIG)
        assert (caught.value.errno, caught.value.filename) == (code, str(cache_dir()))

    def test_of_a_compiler_that_found_the_disk_full(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler.fails = True
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
        with pytest.raises(OSError, match="No space left on device; free space"):
            artifact(CONFIG)

    def test_of_a_file_in_the_place_of_the_folder(self, tmp_path: pathlib.Path) -> None:
        (tmp_path / "cache").touch()
        with pytest.raises(NotADirectoryError, match="cannot write to the cache"):
            artifact(CONFIG)


def test_leftovers_of_killed_compiles_are_swept() -> None:
    folder = artifact(CONFIG).path.parent
    dead, alive = (folder / f"{UNFINISHED}{name}" for name in ("dead", "alive"))
    for path in (dead, alive, folder / f"{UNFINISHED}{OTHER.name}"):
        (path / "dump").mkdir(parents=True)
    with cache_folder.lock(folder / "alive"):
        artifact(OTHER)
    assert [path.name for path in folder.glob(f"{UNFINISHED}*")] == [alive.name]


class TestSettings:
    """An invalid value is an error at its first use, with the variable and the valid values."""

    @pytest.mark.parametrize("value", ["Forbid", "1", "forbid "])
    def test_jit(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_JIT", value)
        with pytest.raises(ValueError, match=rf"HOPWELL_JIT must be one of allow, forbid, or unset; got '{value}'"):
            artifact(CONFIG)

    def test_trust(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_CACHE_TRUST", "everybody")
        with pytest.raises(ValueError, match="HOPWELL_CACHE_TRUST must be one of owner, all"):
            artifact(CONFIG)

    @pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", str(2**64)])
    def test_numbers(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_EMULATE_SEED", value)
        with pytest.raises(ValueError, match="HOPWELL_EMULATE_SEED must be an integer of at least 0"):
            settings.count("HOPWELL_EMULATE_SEED")

    def test_empty_ones_are_as_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_X", "")
        assert settings.count("HOPWELL_X", 3) == 3
        assert settings.choice("HOPWELL_X", ("a", "b"), "b") == "b"
        assert settings.choices("HOPWELL_X", ("a", "b")) == set()
