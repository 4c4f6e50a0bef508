"""A stand-in for the DSL's compiler, to test the cache around it in milliseconds and in many processes at once.

It writes the same files as the DSL, with contents that change from compile to compile, and records each compile.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hopwell.kernels.jit import toolchain


@dataclass
class Compiler:
    """Stand-in for ``cute.compile``. All processes forked from here write to one record."""

    record: Path
    seconds: float = 0.0  # of a compile
    fails: bool = False
    hangs: bool = False  # with its files half written

    def compile(self, kernel: Any, *arguments: Any, options: str) -> Compiled:
        with self.record.open("a") as record:
            record.write(f"{os.getpid()} {kernel} {options}\n")
        if self.fails:
            raise RuntimeError("no such instruction")
        words = shlex.split(options)
        dump = words[words.index("--dump-dir") + 1]
        (arch,) = re.findall(r"--gpu-arch (\S+)", options)
        unique = f"{kernel} {arch} {os.getpid()} {time.perf_counter_ns()}"
        # The DSL names its files after the traced function, not after hopwell's names.
        Path(dump, f"cutlass_{arch}.ptx").write_text(f"ptx of {unique}")
        if self.hangs:
            self.record.with_suffix(".hanging").touch()
            time.sleep(60)
        Path(dump, f"cutlass_{arch}.cubin").write_bytes(b"\x7fELF" + unique.encode())
        time.sleep(self.seconds)
        return Compiled(unique)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Install the stand-in at the place where ``toolchain`` imports the DSL and the kernel."""
        cutlass, cute, prefill = (types.ModuleType(name) for name in ("cutlass", "cutlass.cute", "prefill"))
        cutlass.cute, cute.compile = cute, self.compile  # type: ignore[attr-defined]
        prefill.build = lambda config: (config.name, ())  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cutlass", cutlass)
        monkeypatch.setitem(sys.modules, "cutlass.cute", cute)
        monkeypatch.setitem(sys.modules, "hopwell.kernels.sm90.prefill.kernel", prefill)
        monkeypatch.setattr(toolchain, "_finds_no_gpu", lambda: False)  # the stand-in detects no architecture

    @property
    def compiled(self) -> list[str]:
        """Names of the kernels of all compiles, in order."""
        return [line.split()[1] for line in self.record.read_text().splitlines()] if self.record.exists() else []


@dataclass
class Compiled:
    unique: str

    def export_to_c(self, path: str, *, function_name: str) -> None:
        Path(path).write_bytes(f"object {function_name} of {self.unique}".encode() * 100)
