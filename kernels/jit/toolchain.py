"""Compile, store and load kernels: the only module that knows how the DSL turns a kernel into a callable.

A kernel is compiled once for each (config, source code, toolchain versions). Its host function and cubin become one
object file in a cache directory, next to its PTX and cubin for inspection. Loading the file takes about 1 ms, and a few
tens of milliseconds for the first file of a process.

Environment:
    HOPWELL_CACHE_DIR   folder of compiled kernels; default: the user's cache directory (see cache_folder)
    HOPWELL_CACHE_TRUST whose compiled kernels are loaded: ``owner`` (the user's own and root's, the default) or ``all``
    HOPWELL_BUNDLE      folder of ``python -m hopwell bundle``, for kernels that the cache does not have; only read
    HOPWELL_JIT=forbid  raise instead of compiling, for deployments that compile ahead (``python -m hopwell compile``)
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import multiprocessing
import os
import pathlib
import shlex
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hopwell.kernels import fingerprint
from hopwell.kernels.jit import cache_folder, settings

if TYPE_CHECKING:
    from hopwell.kernels.registry import Buildable

logger = logging.getLogger("hopwell")

OBJECT, PTX, CUBIN, META = "kernel.o", "kernel.ptx", "kernel.cubin", "meta.json"
RUNTIME = "libcute_dsl_runtime.so"


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel on disk."""

    path: pathlib.Path

    @property
    def object_file(self) -> pathlib.Path:
        return self.path / OBJECT

    @property
    def ptx(self) -> pathlib.Path:
        return self.path / PTX

    @property
    def cubin(self) -> pathlib.Path:
        return self.path / CUBIN

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.path / META).read_text())

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file: GPUs run the object file, the emulator runs the PTX."""
        return {name: hashlib.sha256((self.path / name).read_bytes()).hexdigest() for name in (OBJECT, PTX, CUBIN)}

    def is_sound(self) -> bool:
        """Return whether all files are unchanged since they were written."""
        try:
            return self.meta["sha256"] == self.digests()
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a damaged meta file can raise any of them
            return False


def version() -> str:
    """Return the name of the folders with the kernels of this version of the sources and the toolchain."""
    return fingerprint.IMPORTED[:16]


def cache_dir() -> pathlib.Path:
    """Return the directory of compiled kernels for this version of the sources and the toolchain."""
    return cache_folder.root() / version()


_functions: dict[str, Callable[..., None]] = {}
_lock = threading.RLock()  # the DSL compiles one kernel at a time


def function(config: Buildable) -> Callable[..., None]:
    """Return the launch function of ``config`` from memory or from disk; compile it if it is missing.

    Raises:
        RuntimeError: the kernel is not compiled yet and HOPWELL_JIT=forbid.
    """
    found = _functions.get(config.name)
    if found is None:
        with _lock:
            found = _functions.get(config.name) or _load(artifact(config), config.name)
            _functions[config.name] = found
    return found


def compile_ahead(configs: Iterable[Buildable], jobs: int | None = None) -> Iterator[Artifact]:
    """Compile the kernels that are not on disk, in ``jobs`` processes (default: one for each CPU); no GPU needed.

    Yields each kernel as soon as it is compiled. One process is this process; more than one are spawned.
    """
    if jobs == 1:
        yield from map(artifact, configs)
        return
    spawn = multiprocessing.get_context("spawn")  # forked children of a process that has used CUDA cannot use it
    with concurrent.futures.ProcessPoolExecutor(jobs or os.cpu_count(), mp_context=spawn) as pool:
        for done in concurrent.futures.as_completed([pool.submit(artifact, config) for config in configs]):
            yield done.result()


def stored(config: Buildable) -> Artifact | None:
    """Return the compiled kernel in the cache or else in the bundle; None if neither has it undamaged."""
    for root in filter(None, (cache_folder.root(), cache_folder.bundle())):
        found = Artifact(root / version() / config.name)
        cache_folder.check(found.path, root)
        if found.is_sound():
            return found
    return None


def artifact(config: Buildable) -> Artifact:
    """Return the compiled kernel on disk; compile it if it is missing or damaged.

    If several processes need the same kernel at once, the first compiles it and the others wait.
    """
    forbidden = settings.choice("HOPWELL_JIT", ("allow", "forbid"), "allow") == "forbid"
    found = stored(config)
    if found is not None:
        return found
    found = Artifact(cache_dir() / config.name)
    if forbidden:
        raise RuntimeError(_missing(config))
    with cache_folder.writing(found.path.parent):
        cache_folder.make(found.path.parent)
        with _lock, cache_folder.lock(found.path):
            if not found.is_sound():
                _compile(config, found)
    return found


def _missing(config: Buildable) -> str:
    """Return the message for a kernel that must not be compiled, with the command that compiles it."""
    from hopwell.kernels.capability import kernel_texts

    bundle = cache_folder.bundle()
    places = [str(cache_dir())]
    if bundle is not None:
        other = "" if (bundle / version()).is_dir() else ", which has kernels of other versions only"
        places.append(f"the bundle {bundle}{other}")
    return (
        f"kernel {config.name} is not in {' or in '.join(places)}, and HOPWELL_JIT=forbid; compile it with "
        f"`HOPWELL_JIT=allow python -m hopwell compile --kernel {kernel_texts.text_of(config)}`, or unset HOPWELL_JIT"
    )


def _compile(config: Buildable, target: Artifact) -> None:
    import cutlass.cute as cute

    from hopwell.kernels import registry

    if "'" in str(target.path):
        # The DSL hands the path to its compiler passes between single quotes.
        raise ValueError(f"HOPWELL_CACHE_DIR must not have a single quote in its path, got {cache_folder.root()}")
    fingerprint.check()
    logger.info("compiling %s, which takes seconds; later calls and processes find it in the cache", config.name)
    start = time.perf_counter()
    # The finished directory is renamed into place, so that other processes see all of it or nothing.
    with cache_folder.unfinished(target.path) as work:
        dump = work / "dump"
        cache_folder.make(dump)
        if _finds_no_gpu():
            _name_default_arch()
        kernel, arguments = registry.build(config)
        options = (
            f"--enable-tvm-ffi --gpu-arch {config.target} --generate-line-info --keep-ptx --keep-cubin "
            f"--dump-dir {shlex.quote(str(dump))}"
        )
        with warnings.catch_warnings():
            # The warning is about long unrolled loops, but loops over registers must be unrolled whatever their length.
            warnings.filterwarnings("ignore", message=".*static loop has")
            compiled = cute.compile(kernel, *arguments, options=options)
        fresh = Artifact(work / "kernel")
        cache_folder.make(fresh.path)
        compiled.export_to_c(str(fresh.object_file), function_name=config.name)
        for kept, place in (("*.ptx", fresh.ptx), ("*.cubin", fresh.cubin)):
            (produced,) = dump.glob(kept)
            shutil.move(produced, place)
        seconds = time.perf_counter() - start
        meta = {"name": config.name, "sha256": fresh.digests(), "seconds": round(seconds, 2)}
        (fresh.path / META).write_text(json.dumps(meta, indent=1))
        cache_folder.protect(fresh.path)
        fingerprint.check()  # again, because tracing the kernel read the sources
        cache_folder.replace(fresh.path, target.path)
    logger.info("compiled %s in %.1f s", config.name, seconds)


def _finds_no_gpu() -> bool:
    """Return whether there is a driver without a GPU for this process, as with an empty CUDA_VISIBLE_DEVICES."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0) != 0
    except OSError:
        return False


def _name_default_arch() -> None:
    """Name the architecture that the DSL falls back to if it detects no GPU. Kernels are compiled for their own.

    The DSL's message about a failed detection asks for the architecture, which detects again until Python's stack is
    full. With 8 processes this took each 30 s, and with 64 more than 8 minutes (DSL 4.8.1, 2026-11-27).
    """
    from cutlass.cutlass_dsl import CuTeDSL

    if "CUTE_DSL_ARCH" not in os.environ:
        CuTeDSL._get_dsl().envar.arch = "sm_100a"


def _load(built: Artifact, name: str) -> Callable[..., None]:
    """Load the function of a compiled kernel, with orcjit if it is installed, else with the DSL.

    The DSL takes ten times as long, because it has to be imported first. It is needed for releases of apache-tvm-ffi
    that are too old for orcjit.
    """
    _load_runtime()
    if not _has_orcjit():
        from cutlass.cute.runtime import load_module

        module = load_module(str(built.object_file), enable_tvm_ffi=True)
        # The module is never freed: its destructors would call CUDA while the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        return getattr(module, name)
    import tvm_ffi_orcjit

    module = tvm_ffi_orcjit.default_session().load_module(
        built.object_file,
        cxx=os.devnull,  # a compiler would only be asked for a C++ runtime that the object does not need
        keep_module_alive=True,  # its destructors would call CUDA while the process ends
    )
    return module.get_function(name)


@functools.cache
def _has_orcjit() -> bool:
    return importlib.util.find_spec("tvm_ffi_orcjit") is not None


@functools.cache
def _load_runtime() -> None:
    """Load the library that host functions call. They find it among the symbols of the process."""
    import nvidia_cutlass_dsl

    ctypes.CDLL(str(runtime_library(nvidia_cutlass_dsl.__path__, _driver_cuda())), mode=ctypes.RTLD_GLOBAL)


def runtime_library(folders: Iterable[str], driver_cuda: int | None) -> pathlib.Path:
    """Return the DSL's runtime for the newest CUDA version that the driver can run, as the DSL itself chooses it.

    Without a driver nothing is launched, and any runtime will do.
    """
    found = [path for folder in folders for path in pathlib.Path(folder).glob(f"cu[0-9]*/lib/{RUNTIME}")]
    builds = {int(path.parts[-3].removeprefix("cu")): path for path in found}
    usable = [major for major in builds if driver_cuda is None or major <= driver_cuda]
    if not usable:
        raise RuntimeError(
            f"no {RUNTIME} for a driver of CUDA {driver_cuda} in {[*folders]}, only for CUDA {sorted(builds)}; "
            "install another extra of nvidia-cutlass-dsl, or update the driver"
        )
    return builds[max(usable)]


def _driver_cuda() -> int | None:
    """Return the major CUDA version that the driver can run, or None without a driver.

    The query uses ctypes: importing cuda.bindings takes longer than loading a kernel.
    """
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return version.value // 1000 if status == 0 else None
