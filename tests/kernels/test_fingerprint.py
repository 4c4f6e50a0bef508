"""The cache's hash of kernels: it changes with every source that kernels are compiled from."""

from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import platform
import shutil
import subprocess
import sys
from typing import Any

import pytest
from helpers.host.fake_dsl import Compiler

from hopwell.kernels import fingerprint
from hopwell.kernels.jit.toolchain import artifact, cache_dir
from hopwell.kernels.registry import shipped_configs

SOURCES = fingerprint.SOURCES
CONFIG = next(shipped_configs())


@pytest.fixture
def compiler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Provide a compiler of our own and an empty cache."""
    fake = Compiler(tmp_path / "record")
    fake.install(monkeypatch)
    monkeypatch.setenv("HOPWELL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HOPWELL_JIT", raising=False)
    return fake


@pytest.fixture
def sources(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Return a copy of the package's sources, in place of the sources that this process has imported."""
    copied = tmp_path / "copy" / "kernels"
    shutil.copytree(SOURCES, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "SOURCES", copied)
    return copied


class TestFingerprint:
    def test_place_and_leftovers_do_not_matter(self, sources: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fingerprint.of_disk()
        assert before == fingerprint.IMPORTED
        (sources / "__pycache__").mkdir()
        (sources / "__pycache__" / "config.cpython-311.pyc").write_bytes(b"anything")
        (sources / "notes.txt").write_text("anything")
        assert fingerprint.of_disk() == before
        moved = sources.parent / "moved"
        sources.rename(moved)
        monkeypatch.setattr(fingerprint, "SOURCES", moved)
        assert fingerprint.of_disk() == before

    def test_every_source_matters(self, sources: pathlib.Path) -> None:
        seen = {fingerprint.of_disk()}
        paths = sorted(sources.rglob("*.py"))
        assert any("sm90" in path.parts for path in paths)
        for count, path in enumerate(paths, 2):
            path.write_bytes(path.read_bytes() + b"\n")
            seen.add(fingerprint.of_disk())
            assert len(seen) == count, path

    def test_names_of_sources_matter(self, sources: pathlib.Path) -> None:
        before = fingerprint.of_disk()
        (sources / "parts" / "new.py").touch()
        added = fingerprint.of_disk()
        (sources / "parts" / "new.py").rename(sources / "parts" / "other.py")
        assert len({before, added, fingerprint.of_disk()}) == 3

    @pytest.mark.parametrize("package", fingerprint.TOOLCHAIN)
    def test_versions_matter(self, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.8.99" if name == package else version(name))
        assert fingerprint.of_disk() != fingerprint.IMPORTED

    def test_the_toolchain_is_what_compiles(self) -> None:
        assert {"nvidia-cutlass-dsl", "apache-tvm-ffi"} <= set(fingerprint.TOOLCHAIN)

    def test_the_machine_matters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The object file holds host code, and a home directory may be shared by machines of two kinds."""
        monkeypatch.setattr(platform, "machine", lambda: "other")
        assert fingerprint.of_disk() != fingerprint.IMPORTED

    def test_kernels_are_made_of_nothing_else(self) -> None:
        """Traced code imports no other part of hopwell, because the hash would not see a change there."""
        traced = [*(SOURCES / "config").glob("*.py"), SOURCES / "launch" / "arguments.py"]
        for path in (*traced, *(SOURCES / "parts").rglob("*.py"), *(SOURCES / "sm90").rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in names:
                    assert module.split(".")[0] != "hopwell" or module.startswith("hopwell.kernels"), (path, module)


class TestReplacedSources:
    """A process whose sources are replaced after the import refuses to compile, so that the cache holds no mixture."""

    MESSAGE = "hopwell cannot compile in this process: the sources in .* have changed .*; restart the process"

    def test_before_the_first_compile(self, sources: pathlib.Path, compiler: Compiler) -> None:
        (sources / "masks.py").write_text("# another version")
        with pytest.raises(RuntimeError, match=self.MESSAGE):
            artifact(CONFIG)
        assert compiler.compiled == []
        assert list(cache_dir().glob("*/kernel.o")) == []

    def test_during_a_compile(self, sources: pathlib.Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
        def compile_and_replace(*arguments: Any, **options: Any) -> Any:
            (sources / "sm90" / "prefill" / "kernel.py").write_text("# another version")
            return compiler.compile(*arguments, **options)

        monkeypatch.setattr("cutlass.cute.compile", compile_and_replace)
        with pytest.raises(RuntimeError, match=self.MESSAGE):
            artifact(CONFIG)
        assert compiler.compiled == [CONFIG.name]
        assert list(cache_dir().glob("*/kernel.o")) == []

    def test_kernels_in_the_cache_stay_of_use(self, sources: pathlib.Path, compiler: Compiler) -> None:
        built = artifact(CONFIG)
        (sources / "masks.py").write_text("# another version")
        assert artifact(CONFIG) == built
        assert compiler.compiled == [CONFIG.name]

    def test_the_hash_is_taken_before_other_modules_are_imported(self) -> None:
        """Modules stand in sys.modules in the order in which their imports began."""
        show = (
            "import sys, hopwell.decode; print(*(name for name in sys.modules if name.startswith('hopwell.kernels.')))"
        )
        done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split()[0] == "hopwell.kernels.fingerprint"
        assert "hopwell.kernels.masks" in done.stdout.split()
