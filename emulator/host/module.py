"""Compiled kernels as callables: an exported object file, linked with the stand-in runtime, plus the kernels' PTX.

``export_to_c`` of a TVM-FFI function writes the object file, and hopwell's compile cache keeps it. Each object file is
linked with its own copy of the stand-in runtime. This needs no patch of the DSL, not even its import, and does not
affect modules bound to the real runtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import native
from ..decode.program import Program
from ..diagnosis.report import LaunchReport
from ..errors import EmulatorError, HostError
from ..machine.launch import Launch
from ..machine.memory import GlobalMemory, Span, span_of
from ..options import RESERVED_BYTES, options
from ..ptx import Kernel, parse_module
from .dlpack import as_cuda
from .runtime import Runtime, take_error

Tensors = Mapping[str, Any] | Sequence[Span]

_local = threading.local()
_programs: dict[tuple[str, str], Program] = {}


def reports() -> list[LaunchReport]:
    """Reports of the launches of this thread's last call, in order."""
    return list(getattr(_local, "reports", []))


def _shim(out: Path) -> None:
    native.run_compiler([*native.FLAGS, "-O1", "-c", str(native.HERE / "shim.c"), "-o", str(out)])


def _link(object_file: Path, out: Path) -> None:
    shim = out.with_name("shim.o")
    _shim(shim)
    version_script = f"-Wl,--version-script={native.HERE / 'module.map'}"
    native.run_compiler(["-shared", "-Wl,-Bsymbolic", version_script, "-o", str(out), str(object_file), str(shim)])


@functools.cache
def _load_tvm_ffi() -> None:
    """Load tvm_ffi, whose import loads libtvm_ffi globally; the module needs its symbols."""
    import tvm_ffi  # noqa: F401


class Module:
    """An emulated module, with its functions and kernels by name."""

    def __init__(self, object_file: str | Path, ptx: str | Path):
        _load_tvm_ffi()
        object_file = Path(object_file)
        self.ptx_text = Path(ptx).read_text()
        self.ptx_key = native.digest(self.ptx_text)
        key = native.digest(native.source_digest(["shim.c", "core.h", "module.map"]), object_file.read_bytes())
        self.library = ctypes.CDLL(str(native.build("module", key, functools.partial(_link, object_file))))
        self.runtime = Runtime(self._launch, self._param_sizes)
        self.library.hopwell_emulator_connect(ctypes.byref(self.runtime.callbacks))

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        return parse_module(self.ptx_text)

    def kernel(self, name: str) -> Kernel:
        if name not in self.kernels:
            raise HostError(f"the module's PTX has no kernel {name[:100]!r}; it has {[k[:60] for k in self.kernels]}")
        return self.kernels[name]

    def program(self, name: str) -> Program:
        key = (self.ptx_key, name)
        if key not in _programs:
            _programs[key] = Program(self.kernel(name))
        return _programs[key]

    def _param_sizes(self, name: str) -> list[int]:
        return [p.size for p in self.kernel(name).params]

    def _launch(self, name: str, launch: Launch) -> None:
        call = _local.call
        report = run(self.program(name), launch, call.spans)
        _local.reports.append(report)

    def function(self, name: str) -> Function:
        import tvm_ffi

        address = ctypes.cast(getattr(self.library, "__tvm_ffi_" + name), ctypes.c_void_p).value
        return Function(self, name, tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.library))


class _Call:
    def __init__(self, spans: Sequence[Span] | None):
        self.spans = spans


@contextlib.contextmanager
def memory(tensors: Tensors) -> Iterator[None]:
    """Name the memory that launches in this ``with`` block may access, for callers that pass only addresses."""
    previous = getattr(_local, "memory", None)
    _local.memory = tensors
    try:
        yield
    finally:
        _local.memory = previous


class Function:
    """Callable like the compiled function, with CPU tensors.

    ``tensors`` names the memory a kernel may reach. It is a mapping from name to tensor or to (tensor, role) with role
    "in", "out" or "inout", or a sequence of :class:`Span`. It defaults to the tensors that :func:`memory` named.
    Tensors among the arguments are added. Without any of these, all live torch storages may be touched.
    """

    def __init__(self, module: Module, name: str, function: Any):
        self.module, self.name, self.function = module, name, function

    def __call__(self, *args: Any, tensors: Tensors | None = None) -> Any:
        spans = None
        if tensors is None:
            tensors = getattr(_local, "memory", None)
        if tensors is not None:
            spans = spans_of(tensors)
            spans += [span_of(f"argument {k}", a) for k, a in enumerate(args) if isinstance(a, torch.Tensor)]
        previous = getattr(_local, "call", None)
        _local.call, _local.reports = _Call(spans), []
        take_error()
        try:
            return self.function(*[as_cuda(a) if isinstance(a, torch.Tensor) else a for a in args])
        except Exception as e:
            error = take_error()
            if error is not None:
                raise error from None
            raise e
        finally:
            _local.call = previous


def spans_of(tensors: Tensors) -> list[Span]:
    if not isinstance(tensors, Mapping):
        return list(tensors)
    out = []
    for name, value in tensors.items():
        tensor, role = value if isinstance(value, tuple) else (value, "inout")
        if tensor is not None:
            out.append(span_of(name, tensor, role))
    return out


HAZARDS_SHOWN = 20  # shown in an error message; one missing barrier causes hundreds


def run(program: Program, launch: Launch, spans: Sequence[Span] | None) -> LaunchReport:
    """Emulate one launch with the current settings, and raise its errors."""
    from ..errors import Hazard
    from ..machine.machine import Machine

    o = options()
    if o.arch is None:
        raise EmulatorError("the emulator is switched off (HOPWELL_EMULATE=off)")
    shared = launch.smem + program.kernel.static_smem
    if shared > o.limits.cta_shared_bytes:
        raise HostError(
            f"kernel {program.kernel.name[:80]} asks for {shared} bytes of shared memory; a CTA of {o.arch} can have "
            f"{o.limits.cta_shared_bytes}"
        )
    room = o.sms * min(o.limits.shared_bytes // (shared + RESERVED_BYTES), o.limits.threads // launch.threads)
    if launch.is_cooperative and launch.ctas > room:
        raise HostError(
            f"kernel {program.kernel.name[:80]}: a cooperative launch of {launch.ctas} CTAs of {shared} bytes and "
            f"{launch.threads} threads; {o.sms} multiprocessors have room for {room}"
        )
    memory = GlobalMemory(spans, track=o.strict or spans is not None)
    report = Machine(program, launch, memory, o).run()
    if report.hazards and o.hazards == "raise":
        _local.reports = [*getattr(_local, "reports", []), report]
        shown = report.hazards[:HAZARDS_SHOWN]
        rest = len(report.hazards) - len(shown)
        more = f"\nand {rest} more, in emulator.report().hazards" if rest else ""
        raise Hazard("\n".join(shown) + more + f"\n(kernel {program.kernel.name[:80]}; replay: {o.describe()})")
    return report
