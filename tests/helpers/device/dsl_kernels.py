"""Compiles kernels written in the DSL once and caches them, so a second test run compiles nothing."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from hopwell.emulator import native
from hopwell.emulator.host.compile import compile_function
from hopwell.emulator.host.load import cached_function
from hopwell.emulator.host.module import Function

TORCH = {
    cutlass.BFloat16: torch.bfloat16,
    cutlass.Float16: torch.float16,
    cutlass.Float32: torch.float32,
    cutlass.TFloat32: torch.float32,
    cutlass.Float8E4M3FN: torch.float8_e4m3fn,
    cutlass.Float8E5M2: torch.float8_e5m2,
    cutlass.Int8: torch.int8,
    cutlass.Uint8: torch.uint8,
    cutlass.Int32: torch.int32,
}


def fake(dtype: Any, rank: int = 2, align: int = 16) -> Any:
    """Make a row-major tensor of any extents."""
    stride = (*tuple(cute.sym_int64() for _ in range(rank - 1)), 1)
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(rank)), stride=stride, assumed_align=align)


def compiled(make: Callable[[], Any], parameters: tuple, arguments: Callable[[], tuple], arch: str) -> Function:
    """Return the emulated function of ``make()`` called with ``arguments()`` and a stream.

    ``parameters`` distinguish this kernel from other kernels of the same module.
    """
    source = Path(inspect.getsourcefile(make) or "").read_bytes()
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    key = "test-" + native.digest(source, Path(__file__).read_bytes(), version, arch, repr(parameters))

    def build(folder: Path) -> None:
        compile_function(make(), *arguments(), make_fake_stream(use_tvm_ffi_env_stream=True), arch=arch, folder=folder)

    return cached_function(key, build)
