"""The wheel: all of the package, nothing but the package, and it works without the source tree."""

from __future__ import annotations

import email
import email.message
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import filelock
import pytest

import hopwell

ROOT = Path(__file__).parents[2]
# Folder of the repository -> its place in the package.
FOLDERS = {
    "api": "hopwell",
    "layouts": "hopwell/layouts",
    "kernels": "hopwell/kernels",
    "emulator": "hopwell/emulator",
    "perf": "hopwell/perf",
}
# Public functions that the support table does not list, because they launch no kernel of their own.
WITHOUT_KERNELS = {
    *("batch_invariant", "check_device_data", "get_batch_indices_positions", "get_seq_lens"),
    *("install", "merge_states", "uninstall", "warm_up"),
}
SHIPPED_SUFFIXES = (".py", ".c", ".h", ".map", ".typed")

# Report of a process in the new environment on its hopwell.
IMPORTS = """
import json, pathlib, pkgutil, sys
import hopwell, hopwell.layouts, hopwell.kernels, hopwell.emulator, hopwell.perf
import hopwell.kernels.sm90.prefill.kernel, hopwell.kernels.sm100.prefill.kernel
here = pathlib.Path(hopwell.__file__).parent
ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "hopwell"}
print(json.dumps(dict(
    file=hopwell.__file__,
    foreign=[name for name, module in ours.items() if here not in pathlib.Path(module.__file__).parents],
    version=hopwell.__version__,
    public={name: getattr(getattr(hopwell, name), "__module__", None) for name in hopwell.__all__},
    modules=["hopwell", *(module.name for module in pkgutil.walk_packages(hopwell.__path__, "hopwell."))],
)))
"""


def sources() -> dict[str, Path]:
    """Return every file that belongs in the wheel, by its name there."""
    return {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, place in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED_SUFFIXES and "__pycache__" not in path.parts
    }


def run(*command: object, **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel of a copy of the sources, because a build writes next to them; once for all test processes."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    tree, out = shared / "packaging-tree", shared / "packaging-wheel"
    with filelock.FileLock(shared / "packaging.lock"):
        if not out.exists():
            leftovers = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
            shutil.copytree(ROOT, tree, ignore=leftovers, dirs_exist_ok=True)
            # The complete folder is moved into place. After a failure, the next process meets the same failure.
            fresh = shared / "packaging-fresh"
            run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", fresh, tree)
            fresh.rename(out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(contents: dict[str, bytes]) -> email.message.Message:
    (name,) = [name for name in contents if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(contents[name])


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel; the tests' environment lends the dependencies.

    Only folders are lent, not their .pth files, so an editable hopwell stays behind.
    """
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True, with_pip=True)
    interpreter = home / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    installed = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    lent = [path for path in sys.path if any(place in (Path(path), *Path(path).parents) for place in installed)]
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(lent) + "\n")
    return interpreter


def in_venv(python: Path, *command: object) -> str:
    """Run a command there, without any environment variable that could lead back to the source tree."""
    home = python.parents[1]
    return run(*command, cwd=home, env={"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(home)})


def test_all_sources_are_inside(contents: dict[str, bytes]) -> None:
    wanted = sources()
    for folder, place in FOLDERS.items():
        assert f"{place}/__init__.py" in wanted, folder
    missing = sorted(set(wanted) - set(contents))
    assert not missing, "package or package data that pyproject.toml does not list"
    changed = [name for name, path in wanted.items() if contents[name] != path.read_bytes()]
    assert not changed


def test_native_sources_are_inside(contents: dict[str, bytes]) -> None:
    """The emulator compiles the native sources on the user's machine."""
    native = [name for name in sources() if name.startswith("hopwell/emulator/native/") and not name.endswith(".py")]
    assert any(name.endswith(".c") for name in native)
    assert set(native) <= set(contents)


def test_nothing_else_is_inside(contents: dict[str, bytes]) -> None:
    extra = {name for name in contents if ".dist-info/" not in name} - set(sources())
    assert not extra
    assert not [name for name in contents if re.search(r"(^|/)(tests?|conftest)\b|/test_", name)]


def test_metadata(contents: dict[str, bytes], metadata: email.message.Message, wheel: Path) -> None:
    assert metadata["Name"] == "hopwell"
    assert metadata["Version"] == hopwell.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert [name for name in contents if name.endswith("/licenses/LICENSE")]
    assert wheel.name.endswith("-py3-none-any.whl"), "pure Python: one wheel for all"


def test_dependencies_are_ranges(metadata: email.message.Message) -> None:
    """Exact pins would conflict with a user's other packages; only the linter's tools are pinned."""
    needed = metadata.get_all("Requires-Dist") or []
    run_time = [requirement for requirement in needed if "extra ==" not in requirement]
    assert {re.split(r"[^\w-]", requirement)[0] for requirement in run_time} >= {
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "torch",
        "cuda-python",
        "numpy",
    }
    assert all(re.search(r"[<>]=?\d", requirement) for requirement in run_time)
    assert not [requirement for requirement in run_time if "==" in requirement]
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert {"test", "perf", "orcjit"} <= extras


def test_it_works_without_the_source_tree(python: Path) -> None:
    imported = json.loads(in_venv(python, python, "-c", IMPORTS))
    assert Path(imported["file"]).is_relative_to(python.parents[1])
    assert imported["foreign"] == [], "modules from elsewhere"
    assert imported["version"] == hopwell.__version__
    assert imported["public"] == {name: getattr(getattr(hopwell, name), "__module__", None) for name in hopwell.__all__}
    wanted = {name.removesuffix(".py") for name in sources() if name.endswith(".py")}
    assert set(imported["modules"]) == {name.removesuffix("/__init__").replace("/", ".") for name in wanted}


def test_command_line(python: Path) -> None:
    """The installed script and ``python -m`` are the same program."""
    script = in_venv(python, python.parent / "hopwell", "support")
    assert script == in_venv(python, python, "-m", "hopwell", "support")
    functions = {name for name in hopwell.__all__ if hasattr(getattr(hopwell, name), "__code__")}
    listed = {name for name in functions if f".{name}`" in script}
    assert functions - listed == WITHOUT_KERNELS


def test_typed(contents: dict[str, bytes]) -> None:
    assert "hopwell/py.typed" in contents
