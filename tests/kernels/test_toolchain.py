"""The cache of compiled kernels: compiled once, never partial, repaired after damage, and renewed with the sources.

The compiler behind the cache is a stand-in; test_compile.py has real compiles.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import platformdirs
import pytest
from helpers.host.fake_dsl import Compiler

from hopwell.__main__ import main
from hopwell.kernels import compile_ahead, fingerprint
from hopwell.kernels.capability import shipped
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.jit import toolchain
from hopwell.kernels.jit.cache_folder import UNFINISHED
from hopwell.kernels.jit.toolchain import (
    CUBIN,
    META,
    OBJECT,
    PTX,
    RUNTIME,
    Artifact,
    artifact,
    cache_dir,
    runtime_library,
)
from hopwell.kernels.problem import Family
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.support import PREFILL_TYPES

FORK = multiprocessing.get_context("fork")  # children have the stand-in, and need no time to start
CONFIGS = list(shipped_configs())[:3]
CONFIG = CONFIGS[0]
NOBODY = 65534  # a user's number


@pytest.fixture(autouse=True)
def compiler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Provide a compiler of the tests and an empty cache."""
    fake = Compiler(tmp_path / "record")
    fake.install(monkeypatch)
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HOPWELL_JIT", raising=False)
    monkeypatch.setattr(toolchain, "_functions", {})
    return fake


@pytest.fixture
def unprivileged(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cache and the process belong to a user without root's right to read everything."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("HOPWELL_CACHE_DIR", f"{folder}/cache")
        monkeypatch.setattr(fingerprint, "check", lambda: None)  # this user may not read the sources
        compiler.record = pathlib.Path(folder, "record")
        is_root = os.geteuid() == 0
        if is_root:
            os.chown(folder, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, 0)
        try:
            yield
        finally:
            if is_root:
                os.setresuid(0, 0, 0)


def files(built: Artifact) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in built.path.iterdir()}


class TestCompile:
    def test_an_entry_has_all_that_is_needed(self, compiler: Compiler) -> None:
        built = artifact(CONFIG)
        assert built.path == cache_dir() / CONFIG.name
        assert set(files(built)) == {OBJECT, PTX, CUBIN, META}
        assert built.object_file.read_bytes().startswith(f"object {CONFIG.name} ".encode())
        assert built.ptx.read_text().startswith("ptx of ")
        assert built.cubin.read_bytes().startswith(b"\x7fELF")
        assert built.meta["name"] == CONFIG.name
        assert built.meta["seconds"] >= 0
        assert built.is_sound()
        options = compiler.record.read_text()
        assert "--enable-tvm-ffi" in options
        assert f"--gpu-arch {CONFIG.arch} " in options

    def test_a_second_request_does_not_compile(self, compiler: Compiler) -> None:
        first = files(artifact(CONFIG))
        assert files(artifact(CONFIG)) == first
        assert compiler.compiled == [CONFIG.name]

    def test_each_config_has_its_entry(self, compiler: Compiler) -> None:
        built = [artifact(config) for config in CONFIGS]
        assert compiler.compiled == [config.name for config in CONFIGS]
        assert len({one.object_file.read_bytes() for one in built}) == len(CONFIGS)

    def test_log_lines_before_and_after(self, compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
        compiler.seconds = 0.25
        with caplog.at_level(logging.INFO, logger="hopwell"):
            artifact(CONFIG)
            artifact(CONFIG)
        before, after = caplog.records
        assert before.getMessage().startswith(f"compiling {CONFIG.name}, which takes seconds")
        assert after.created - before.created >= 0.2
        seconds = re.fullmatch(rf"compiled {CONFIG.name} in (\d+\.\d) s", after.getMessage())
        assert seconds is not None
        assert 0.2 <= float(seconds[1]) < 5
        assert 0.25 <= Artifact(cache_dir() / CONFIG.name).meta["seconds"] < 5

    def test_a_failed_compile_leaves_nothing(self, compiler: Compiler) -> None:
        compiler.fails = True
        with pytest.raises(RuntimeError, match="no such instruction"):
            artifact(CONFIG)
        assert [path.name for path in cache_dir().iterdir() if not path.name.endswith(".lock")] == []
        compiler.fails = False
        assert artifact(CONFIG).is_sound()

    def test_functions_are_loaded_once(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = []

        def load(built: Artifact, name: str) -> Callable[..., None]:
            loaded.append(name)
            return lambda: None

        monkeypatch.setattr(toolchain, "_load", load)
        first, other = toolchain.function(CONFIG), toolchain.function(CONFIGS[1])
        assert toolchain.function(CONFIG) is first is not other
        assert loaded == compiler.compiled == [CONFIG.name, CONFIGS[1].name]


class TestDamage:
    """A damaged entry is compiled again, and then needs no other compile."""

    @staticmethod
    def rebuilt(compiler: Compiler) -> None:
        again = artifact(CONFIG)
        assert len(compiler.compiled) == 2, "damage was not seen"
        assert again.is_sound()
        assert set(files(again)) == {OBJECT, PTX, CUBIN, META}
        artifact(CONFIG)
        assert len(compiler.compiled) == 2

    @pytest.mark.parametrize("name", [OBJECT, PTX, CUBIN, META])
    @pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "edited", "longer"])
    def test_of_a_file(self, damage: str, name: str, compiler: Compiler) -> None:
        path = artifact(CONFIG).path / name
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(
                {
                    "empty": b"",
                    "truncated": content[: len(content) // 2],
                    "edited": content[:-9] + bytes(b ^ 1 for b in content[-9:]),
                    "longer": content + b"0",
                }[damage]
            )
        self.rebuilt(compiler)

    @pytest.mark.parametrize(
        "text",
        [
            *("{}", "[]", "null", "7", '"sha256"', '{"sha256": null}', '{"sha256": "0"}', "\xff"),
            pytest.param("[" * 100_000, id="nested too deep"),
        ],
    )
    def test_of_the_description(self, text: str, compiler: Compiler) -> None:
        built = artifact(CONFIG)
        (built.path / META).write_bytes(text.encode("latin-1"))
        self.rebuilt(compiler)

    def test_of_the_whole_entry(self, compiler: Compiler) -> None:
        shutil.rmtree(artifact(CONFIG).path)
        self.rebuilt(compiler)

    def test_a_directory_in_the_place_of_a_file(self, compiler: Compiler) -> None:
        built = artifact(CONFIG)
        built.object_file.unlink()
        built.object_file.mkdir()
        (built.object_file / "left").touch()
        self.rebuilt(compiler)

    @pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
    def test_another_kind_in_the_place_of_the_entry(
        self, kind: str, compiler: Compiler, tmp_path: pathlib.Path
    ) -> None:
        place, linked = artifact(CONFIG).path, tmp_path / "linked"
        shutil.rmtree(place)
        if kind == "file":
            place.touch()
        else:
            place.symlink_to(linked)
        if kind == "link to a folder":
            linked.mkdir()
            (linked / "kept").touch()
        self.rebuilt(compiler)
        assert linked.exists() == (kind == "link to a folder") == (linked / "kept").exists()

    def test_a_file_in_the_place_of_the_version(self, compiler: Compiler) -> None:
        version = artifact(CONFIG).path.parent
        shutil.rmtree(version)
        version.touch()
        self.rebuilt(compiler)

    def test_a_file_in_the_place_of_an_unfinished_entry(self, compiler: Compiler) -> None:
        place = artifact(CONFIG).path
        shutil.rmtree(place)
        place.with_name(f"{UNFINISHED}{place.name}").touch()
        self.rebuilt(compiler)

    def test_a_folder_in_the_place_of_the_lock(self, compiler: Compiler) -> None:
        place = artifact(CONFIG).path
        shutil.rmtree(place)
        lock = place.with_name(f"{place.name}.lock")
        lock.unlink(missing_ok=True)
        (lock / "left").mkdir(parents=True)
        self.rebuilt(compiler)

    @pytest.mark.parametrize("name", ["", OBJECT, PTX, CUBIN, META])
    def test_of_permissions(self, name: str, unprivileged: None, compiler: Compiler) -> None:
        place = artifact(CONFIG).path
        place.with_name(f"{place.name}.lock").chmod(0o000)
        (place / name).chmod(0o000)
        self.rebuilt(compiler)

    def test_of_one_entry_leaves_others_alone(self, compiler: Compiler) -> None:
        artifact(CONFIG)
        other = files(artifact(CONFIGS[1]))
        artifact(CONFIG).object_file.unlink()
        artifact(CONFIG)
        assert files(artifact(CONFIGS[1])) == other


class TestPlace:
    def test_environment(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "elsewhere" / "deep"))
        assert artifact(CONFIG).path.parent.parent == tmp_path / "elsewhere" / "deep"

    def test_home(self, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("HOPWELL_CACHE_DIR", "~/kernels")
        assert cache_dir().parent == tmp_path / "kernels"

    @pytest.mark.parametrize("value", [None, ""])
    def test_default(self, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: f"/caches/{name}")
        if value is None:
            monkeypatch.delenv("HOPWELL_CACHE_DIR")
        else:
            monkeypatch.setenv("HOPWELL_CACHE_DIR", value)
        assert cache_dir().parent == pathlib.Path("/caches/hopwell")

    def test_sources_and_toolchain_have_a_directory_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = cache_dir()
        monkeypatch.setattr(fingerprint, "IMPORTED", "f" * 64)
        assert cache_dir().parent == before.parent
        assert cache_dir() != before


class TestForbid:
    def test_missing_kernels_are_an_error(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        for request in (artifact, toolchain.function):
            with pytest.raises(RuntimeError) as caught:
                request(CONFIG)
            message = str(caught.value)
            assert CONFIG.name in message
            assert str(cache_dir()) in message
            assert "HOPWELL_JIT=forbid" in message
            assert (
                "compile it with `HOPWELL_JIT=allow python -m hopwell compile --kernel PrefillConfig:arch=sm_90a,"
                in message
            )
        assert compiler.compiled == []
        assert not cache_dir().exists(), "a read-only cache must do"

    @pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
    @pytest.mark.parametrize("types", PREFILL_TYPES)
    def test_the_advice_is_a_command(self, types: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command compiles the missing kernel and no other, also if no plain ``compile`` makes it."""
        *_, config = (c for c in shipped.kernels_to_ship(arch, (types,)) if c.family is Family.PREFILL)
        for kernel in (config, replace(config, uneven_pages=True), replace(config, compiled_for="sm_90a")):
            monkeypatch.setenv("HOPWELL_JIT", "forbid")
            with pytest.raises(RuntimeError) as caught:
                artifact(kernel)
            command = re.search("`HOPWELL_JIT=allow python -m hopwell (.*)`", str(caught.value))
            assert command is not None
            monkeypatch.setenv("HOPWELL_JIT", "allow")
            asked: list[Any] = []
            monkeypatch.setattr(toolchain, "compile_ahead", lambda configs, jobs, to=asked: to.extend(configs) or [])
            assert main(command[1].split()) == 0
            assert asked == [kernel]

    def test_damaged_kernels_are_an_error(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        artifact(CONFIG).object_file.write_bytes(b"")
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        with pytest.raises(RuntimeError, match="HOPWELL_JIT=forbid"):
            artifact(CONFIG)
        assert len(compiler.compiled) == 1

    def test_compiled_kernels_are_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        built = artifact(CONFIG)
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        assert artifact(CONFIG) == built


class TestProcesses:
    @staticmethod
    def run(count: int, work: Callable[[int], Any]) -> list[Any]:
        """Return the results of ``work(number)`` in ``count`` processes that begin together."""
        begin, results = FORK.Barrier(count), FORK.Queue()

        def child(number: int) -> None:
            begin.wait(60)
            try:
                results.put((number, work(number)))
            except BaseException as error:
                results.put((number, repr(error)))

        processes = [FORK.Process(target=child, args=(number,)) for number in range(count)]
        for process in processes:
            process.start()
        got = dict(results.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        return [got[number] for number in range(count)]

    def test_eight_want_one_kernel(self, compiler: Compiler) -> None:
        compiler.seconds = 0.5

        def work(number: int) -> tuple[bool, bytes]:
            built = artifact(CONFIG)
            return built.is_sound(), built.object_file.read_bytes()

        results = self.run(8, work)
        assert compiler.compiled == [CONFIG.name]
        assert results == [results[0]] * 8
        assert results[0][0]

    def test_eight_find_a_damaged_kernel(self, compiler: Compiler) -> None:
        artifact(CONFIG).object_file.write_bytes(b"damaged")
        compiler.seconds = 0.3
        results = self.run(8, lambda number: artifact(CONFIG).object_file.read_bytes())
        assert len(compiler.compiled) == 2
        assert len(set(results)) == 1
        assert results[0] != b"damaged"

    def test_different_kernels_do_not_wait_for_each_other(self, compiler: Compiler) -> None:
        compiler.seconds = 1.0
        start = time.perf_counter()
        self.run(3, lambda number: str(artifact(CONFIGS[number]).path))
        assert time.perf_counter() - start < 2.5
        assert sorted(compiler.compiled) == sorted(config.name for config in CONFIGS)

    def test_a_failed_compile_is_tried_by_the_next(self, compiler: Compiler) -> None:
        def work(number: int) -> str:
            compiler.fails = number == 0
            if number:
                time.sleep(0.2)
            return artifact(CONFIG).path.name

        first, second = self.run(2, work)
        assert "no such instruction" in first
        assert second == CONFIG.name
        assert artifact(CONFIG).is_sound()

    def test_a_killed_compile_leaves_no_entry_and_no_lock(self, compiler: Compiler) -> None:
        compiler.hangs = True
        process = FORK.Process(target=artifact, args=(CONFIG,))
        process.start()
        hanging = compiler.record.with_suffix(".hanging")
        deadline = time.monotonic() + 30
        while not hanging.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert not (cache_dir() / CONFIG.name).exists()
        compiler.hangs = False
        start = time.perf_counter()
        assert artifact(CONFIG).is_sound()
        assert time.perf_counter() - start < 5, "a dead process holds the lock"

    def test_nobody_sees_an_unfinished_entry(self, compiler: Compiler) -> None:
        """An entry appears with all of its files at once."""
        compiler.seconds = 0.3
        process = FORK.Process(target=artifact, args=(CONFIG,))
        process.start()
        place, seen = cache_dir() / CONFIG.name, []
        while process.is_alive():
            if place.exists():
                seen.append({path.name for path in place.iterdir()})
        process.join(60)
        assert all(names == {OBJECT, PTX, CUBIN, META} for names in seen)
        assert Artifact(place).is_sound()

    def test_threads_compile_once(self, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        compiler.seconds = 0.2
        monkeypatch.setattr(toolchain, "_load", lambda built, name: object())
        together, got = threading.Barrier(8), []

        def work() -> None:
            together.wait()
            got.append(toolchain.function(CONFIG))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(got) == 8
        assert len(set(map(id, got))) == 1
        assert compiler.compiled == [CONFIG.name]

    def test_compile_ahead_takes_what_is_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command's processes are fresh ones, with the real compiler, which they must not need."""
        built = {str(artifact(config).path) for config in CONFIGS}
        monkeypatch.setenv("HOPWELL_JIT", "forbid")
        assert {str(one.path) for one in compile_ahead(CONFIGS, jobs=2)} == built


class TestRuntime:
    """The DSL builds that host functions are linked with."""

    @pytest.fixture
    def folder(self, tmp_path: pathlib.Path) -> str:
        for major in (9, 12, 13):
            library = tmp_path / f"cu{major}" / "lib" / RUNTIME
            library.parent.mkdir(parents=True)
            library.touch()
        (tmp_path / "cu14" / "lib").mkdir(parents=True)
        return str(tmp_path)

    @pytest.mark.parametrize(("driver", "chosen"), [(None, 13), (15, 13), (13, 13), (12, 12), (11, 9)])
    def test_newest_that_the_driver_can_run(self, driver: int | None, chosen: int, folder: str) -> None:
        assert runtime_library([folder], driver) == pathlib.Path(folder, f"cu{chosen}", "lib", RUNTIME)

    @pytest.mark.parametrize(("folders", "driver"), [([], None), (["/nowhere"], 13), (None, 8)])
    def test_none(self, folders: list[str] | None, driver: int | None, folder: str) -> None:
        with pytest.raises(RuntimeError, match=f"for a driver of CUDA {driver} "):
            runtime_library([folder] if folders is None else folders, driver)

    def test_the_installed_one_is_found(self) -> None:
        toolchain._load_runtime()


def test_a_description_is_for_reading(compiler: Compiler) -> None:
    """meta.json describes the entry to a person who looks into the cache."""
    built = artifact(CONFIG)
    assert json.loads((built.path / META).read_text()) == built.meta
    assert isinstance(CONFIG, PrefillConfig)
    assert built.path.name == built.meta["name"] == CONFIG.name
