"""Compiling a CuTe DSL function for the emulator: object file, PTX and line information in a cache folder."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hopwell.kernels.jit import cache_folder


def compile_function(
    function: Callable[..., Any], *arguments: Any, arch: str, name: str = "entry", folder: Path
) -> None:
    """Compile with TVM-FFI and write ``<folder>/<name>.o`` and ``<name>.ptx``; needs no GPU."""
    import cutlass.cute as cute

    cache_folder.make(folder)
    with tempfile.TemporaryDirectory() as dump:
        options = f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx --generate-line-info --dump-dir {shlex.quote(dump)}"
        compiled = cute.compile(function, *arguments, options=options)
        compiled.export_to_c(str(folder / f"{name}.o"), function_name=name)
        found = sorted(Path(dump).glob("*.ptx"))
        if len(found) != 1:
            raise RuntimeError(f"the DSL left {len(found)} PTX files in {dump}")
        shutil.copy(found[0], folder / f"{name}.ptx")
