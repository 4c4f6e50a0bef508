"""Small cases under compute-sanitizer: a test file runs itself as a script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from hopwell.kernels.jit import toolchain

TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = "hopwellkernels"  # in the symbols of all kernels here


def check_sanitized(tool: str, script: str, *arguments: object) -> None:
    """Check that compute-sanitizer's ``tool`` finds nothing in a run of ``script``."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    # With the oracle's kernels in float64, racecheck of a sparse MLA kernel took 38 instead of 18 s (H200, 2026-11-27).
    options = ["--tool", tool, "--error-exitcode", "86", "--kernel-name", f"kernel_substring={KERNELS}"]
    if tool == "memcheck":  # it reports driver functions that cuda-python fails to find
        options += ["--report-api-errors", "no"]
    command = [sanitizer, *options, sys.executable, script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout
    compiled = next(toolchain.cache_dir().glob(f"*/{toolchain.PTX}")).read_text()
    assert re.search(rf"\.entry \w*{KERNELS}", compiled), "no kernel has been checked: all have other symbols"
