"""Small cases under compute-sanitizer: a test file runs itself as a script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

TOOLS = ("memcheck", "racecheck", "synccheck")


def check_sanitized(tool: str, script: str, *arguments: object) -> None:
    """Check that compute-sanitizer's ``tool`` finds nothing in a run of ``script``."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    options = ["--tool", tool, "--error-exitcode", "86"]
    if tool == "memcheck":  # it reports driver functions that cuda-python fails to find
        options += ["--report-api-errors", "no"]
    command = [sanitizer, *options, sys.executable, script, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout
