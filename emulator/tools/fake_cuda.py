"""Runs a GPU script for torch and CuTe DSL on the CPU: the only module of the emulator that patches libraries.

hopwell itself needs none of this. Other scripts (NVIDIA's CUTLASS examples, which validate the emulator) create CUDA
tensors, ask CUDA for its devices and launch functions compiled in memory. Each of these actions is redirected:

* tensors are created on the CPU, and their DLPack capsules say CUDA, or the DSL would give them generic addresses;
* torch.cuda and cuda.bindings report one device of the emulated architecture;
* the DSL asks cuda.bindings for the number of devices once per function, and gets 1;
* CUTE_DSL_LIBS names the stand-in runtime before the DSL is imported, and the DSL keeps the PTX of compiled functions;
* numpy computes references that exist only on CUDA (torch._scaled_mm).
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import types
from pathlib import Path
from typing import Any

from .. import native
from ..decode.program import Program
from ..errors import HostError
from ..host.dlpack import mark_as_cuda
from ..host.module import run
from ..host.runtime import Runtime
from ..machine.launch import Launch
from ..options import options
from ..ptx import Kernel, parse_module


def _make_runtime(out: Path) -> None:
    native.run_compiler([*native.FLAGS, "-O1", "-shared", "-o", str(out), str(native.HERE / "shim.c")])


class DumpedKernels:
    """Kernels by name, from the PTX files that the DSL writes into a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.programs: dict[str, Program] = {}
        self.sources: dict[str, Kernel] = {}
        self.reports: list = []
        self.runtime = Runtime(self.launch, lambda name: [p.size for p in self.kernel(name).params])

    def kernel(self, name: str) -> Kernel:
        if name not in self.sources:
            for path in sorted(self.folder.glob("*.ptx"), key=lambda p: p.stat().st_mtime, reverse=True):
                text = path.read_text()
                if name in text:
                    self.sources.update(parse_module(text))
                    break
            else:
                raise HostError(f"no PTX file in {self.folder} has kernel {name[:100]}")
        return self.sources[name]

    def launch(self, name: str, launch: Launch) -> None:
        if name not in self.programs:
            self.programs[name] = Program(self.kernel(name))
        self.reports.append(run(self.programs[name], launch, None))
        print(self.reports[-1], flush=True)


def connect() -> DumpedKernels:
    """Point the DSL at the stand-in runtime. The call must precede the DSL's import."""
    import ctypes

    library = native.build("runtime", native.source_digest(["shim.c", "core.h"]), _make_runtime)
    folder = Path(tempfile.mkdtemp(prefix="hopwell_ptx_"))
    os.environ.update(CUTE_DSL_LIBS=str(library), CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=str(folder))
    os.environ["CUTE_DSL_ARCH"] = options().arch or "sm_90a"
    kernels = DumpedKernels(folder)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.hopwell_emulator_connect(ctypes.byref(kernels.runtime.callbacks))
    kernels.library = loaded  # type: ignore[attr-defined]
    return kernels


# ------------------------------------------------------------------ torch
def _redirect_torch(sms: int, capability: tuple[int, int]) -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, kinds: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            kwargs = dict(kwargs or {})
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            if func is torch.Tensor.cuda:
                return args[0].clone()
            if func is torch.Tensor.to:
                args = tuple("cpu" if isinstance(a, (str, torch.device)) and "cuda" in str(a) else a for a in args)
            return func(*args, **kwargs)

    OnCpu().__enter__()
    stream = types.SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None)
    properties = types.SimpleNamespace(
        multi_processor_count=sms, major=capability[0], minor=capability[1], name="emulated", L2_cache_size=1 << 20,
        total_memory=1 << 34,
    )  # fmt: skip
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "current_stream": lambda *a: stream,
        "default_stream": lambda *a: stream,
        "Stream": lambda *a, **k: stream,
        "stream": lambda s: contextlib.nullcontext(),
        "get_device_properties": lambda *a: properties,
        "synchronize": lambda *a: None,
        "get_device_capability": lambda *a: capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "set_device": lambda *a: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._scaled_mm = _scaled_mm  # type: ignore[assignment]
    _report_comparisons(torch)


comparisons: list[tuple[float, float]] = []  # largest error and largest value of each


def _report_comparisons(torch: Any) -> None:
    """Print the distances that a script's own check computes."""
    original = torch.testing.assert_close

    @functools.wraps(original)
    def assert_close(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
        a, b = actual.detach().double(), expected.detach().double()
        error, largest = float((a - b).abs().max()), float(b.abs().max())
        comparisons.append((error, largest))
        print(f"[check] shape {tuple(a.shape)}: largest error {error:.3e}, largest value {largest:.3e}", flush=True)
        original(actual, expected, *args, **kwargs)

    torch.testing.assert_close = assert_close


def _scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, out_dtype: Any = None, **_: Any) -> Any:
    """Compute a block-scaled product with cuBLAS's 128x4 scale layout."""
    import numpy as np
    import torch

    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    e2m1 = np.concatenate([e2m1, -e2m1])

    def values(x: Any) -> np.ndarray:
        if "float4" not in str(x.dtype):
            return x.float().numpy()
        raw = x.view(torch.uint8).numpy()
        return np.stack([e2m1[raw & 15], e2m1[raw >> 4]], -1).reshape(raw.shape[0], -1)

    def scaled(x: Any, s: Any) -> np.ndarray:
        v = values(x)
        block = 32 if "e8m0" in str(s.dtype) else 16
        rows, cols = v.shape[0], v.shape[1] // block
        flat = s.reshape(-1).float().numpy()
        tiles = flat.reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4).transpose(0, 3, 2, 1, 4)
        return v * np.repeat(tiles.reshape(-(-rows // 128) * 128, -1)[:rows, :cols], block, 1)

    return torch.from_numpy(scaled(a, scale_a) @ scaled(b.transpose(0, 1), scale_b).T).to(out_dtype)


# ------------------------------------------------------------------ the DSL
def _redirect_dsl(sms: int) -> None:
    import cutlass.cute.testing as cute_testing
    import cutlass.testing as testing
    from cuda.bindings import driver
    from cutlass.cute import runtime as cute_runtime
    from cutlass.cutlass_dsl import cuda_jit_executor
    from cutlass.utils import hardware_info

    cuda_jit_executor.CudaDialectJitCompiledFunction.num_devices = 1
    ok = driver.CUresult.CUDA_SUCCESS
    driver.cuInit = lambda *a: (ok,)
    driver.cuDeviceGetCount = lambda: (ok, 1)
    info = hardware_info.HardwareInfo
    info.__init__ = lambda self, *a, **k: None
    info.get_max_active_clusters = lambda self, n, *a, **k: max(1, sms // n)
    info.get_device_multiprocessor_count = lambda self: sms
    info.get_l2_cache_size_in_bytes = lambda self: 1 << 20
    for module in (cute_testing, testing):
        module.benchmark = lambda *a, **k: 1.0
    tensor = cute_runtime._Tensor
    original = tensor.load_dltensor

    def load_dltensor(self: Any) -> Any:
        if self._dltensor_wrapper is None:
            mark_as_cuda(self._dlpack_data)
        return original(self)

    tensor.load_dltensor = load_dltensor


def install(sms: int) -> DumpedKernels:
    """Install all redirections, in the order that the imports require."""
    kernels = connect()
    import cutlass  # noqa: F401

    _redirect_dsl(sms)
    _redirect_torch(sms, options().capability)
    return kernels
