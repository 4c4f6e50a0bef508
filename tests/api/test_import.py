"""Importing hopwell: light, quick, and clear about an untested toolchain."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hopwell._checks.toolchain import PACKAGE, TESTED, check_toolchain


def test_import_leaves_the_toolchain_alone_and_is_fast() -> None:
    code = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import hopwell
seconds = time.perf_counter() - start
heavy = [m for m in set(sys.modules) - before if m.split(".")[0] in ("cutlass", "tvm_ffi_orcjit", "cuda")]
assert not heavy, heavy
assert seconds < 1.5, seconds
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", ["4.8.0", "4.8.1", "4.8.2", "4.8.99", "4.8.2rc1", "4.8.1.post1"])
def test_tested_versions_pass(version: str) -> None:
    check_toolchain(lambda package: version)


@pytest.mark.parametrize("version", ["4.7.9", "4.9.0", "4.9.0.dev0", "5.0", "0.1", "not a version"])
def test_other_versions_are_named(version: str) -> None:
    with pytest.raises(ImportError) as caught:
        check_toolchain(lambda package: version)
    message = str(caught.value)
    assert f"{PACKAGE} {TESTED}" in message
    assert f"installed: {version}." in message
    assert f'pip install "{PACKAGE}[cu13]{TESTED}"' in message


def test_missing_toolchain_is_named() -> None:
    def version_of(package: str) -> str:
        raise importlib.metadata.PackageNotFoundError(package)

    with pytest.raises(ImportError, match=re.escape(f"needs {PACKAGE} {TESTED}, installed: none.")):
        check_toolchain(version_of)


def test_import_stops_at_another_toolchain() -> None:
    code = """
import importlib.metadata
importlib.metadata.version = lambda package: "5.0"
try:
    import hopwell
except ImportError as error:
    assert str(error).startswith("hopwell needs "), error
else:
    raise AssertionError("imported")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_are_imported_when_they_are_used() -> None:
    """Names are the same objects as in their modules, and ``dir`` lists them before the import."""
    code = """
import sys, hopwell
assert "torch" not in sys.modules
assert {*hopwell.__all__, "decode", "layouts"} <= set(dir(hopwell))
for name in hopwell.__all__:
    getattr(hopwell, name)
    assert name in vars(hopwell), name
from hopwell import *
assert hopwell.append_paged_kv_cache is hopwell.page.append_paged_kv_cache is append_paged_kv_cache
assert not hasattr(hopwell, "no_such_name") and not hasattr(hopwell.kernels, "no_such_name")
from hopwell.kernels import Plan, execute
assert hopwell.kernels.execute is hopwell.kernels.launch.plan.execute is execute
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_range_is_the_one_that_is_installed() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert f'"{PACKAGE}[cu13]{TESTED}"' in project.read_text()
