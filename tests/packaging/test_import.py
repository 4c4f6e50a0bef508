"""Importing hopwell as an application does: with another release of the toolchain, without a GPU, leaving nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hopwell._checks.toolchain import PACKAGE, TESTED


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("version", ["4.7.9", "4.9.0", "5.1"])
def test_another_release_gives_one_message(version: str, tmp_path: Path) -> None:
    """The message names the installed distribution, before any import from that release."""
    information = tmp_path / f"{PACKAGE.replace('-', '_')}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {version}\n")
    (tmp_path / "cutlass.py").write_text("raise RuntimeError('imported')")
    done = run("import hopwell", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("Error:") == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: hopwell needs {PACKAGE} {TESTED}, installed: {version}. ")
    assert f'pip install "{PACKAGE}[cu13]{TESTED}"' in last


def test_no_gpu_is_needed_or_touched(tmp_path: Path) -> None:
    """A process that forks workers must be able to import hopwell first, and a read-only home must do."""
    code = """
import torch
import hopwell, hopwell.kernels, hopwell.layouts
from hopwell.kernels.registry import shipped_configs
assert sum(1 for _ in shipped_configs()) > 100
assert not torch.cuda.is_initialized()
"""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    done = run(
        code, CUDA_VISIBLE_DEVICES="", HOME=str(home), XDG_CACHE_HOME="", HOPWELL_CACHE_DIR=str(tmp_path / "cache")
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert list(home.iterdir()) == []
