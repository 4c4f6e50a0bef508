"""The native core: built once per machine with the C compiler, cached by content, loaded with ctypes.

A library of small C functions executes the instructions: one function per opcode and type, each a loop over the 32
lanes of a warp. A kernel is data for these functions, so it needs no compilation.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from hopwell.kernels.jit import cache_folder

from ..errors import HostError
from . import layout
from .layout import I32, I64, U8, U32, U64, P

logger = logging.getLogger("hopwell")

HERE = Path(__file__).parent
FLAGS = ["-std=gnu11", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
# Lane loops must not fuse a multiplication with an addition; only matrix products fuse them (tensor.c).
LANE_FLAGS = ["-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
TENSOR_FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
SOURCES = {
    **dict.fromkeys(("alu_int.c", "alu_float.c", "convert.c", "numbers.c", "memory.c", "matrix.c"), LANE_FLAGS),
    **dict.fromkeys(("warp.c", "sync.c", "tma.c", "cp_async.c", "shadow.c", "global_shadow.c", "exit.c"), LANE_FLAGS),
    **dict.fromkeys(("run.c", "alloc.c", "wgmma.c", "descriptor.c", "product.c"), LANE_FLAGS),
    "tensor.c": TENSOR_FLAGS,
}


def cache_dir() -> Path:
    """Return the folder of built libraries: HOPWELL_CACHE_DIR, or the user's cache directory."""
    path = cache_folder.root() / "emulator"
    with cache_folder.writing(path):
        cache_folder.make(path)
    return path


def compiler() -> str:
    """Find the C compiler: CC, or gcc, or cc."""
    for name in (os.environ.get("CC"), "gcc", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise HostError(
        "hopwell's emulator needs a C compiler (gcc) to build its native core, and found none. Install gcc, "
        "or set CC to a GCC-compatible compiler. Running on a GPU does not need it."
    )


@functools.lru_cache(maxsize=1)
def _host_flags() -> tuple[str, ...]:
    """Instruction-set flags, part of the cache key because several machines may share a home directory."""
    if platform.machine() in ("x86_64", "AMD64"):
        try:
            cpu = Path("/proc/cpuinfo").read_text()
        except OSError:
            return ()
        if all(f" {flag}" in cpu for flag in ("avx2", "fma", "f16c")):
            return ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
    return ()


def run_compiler(arguments: list[str]) -> None:
    command = [compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise HostError(f"building the emulator's native code failed:\n{' '.join(command)}\n{done.stderr[-4000:]}")


def digest(*parts: str | bytes) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() if isinstance(part, str) else part)
        h.update(b"\0")
    return h.hexdigest()[:20]


def source_digest(names: list[str]) -> str:
    return digest(compiler(), *_host_flags(), *(name.encode() + (HERE / name).read_bytes() for name in sorted(names)))


def build(stem: str, key: str, make) -> Path:
    """Build ``<cache>/<stem>-<key>.so`` once, and again if it is damaged; ``make(path)`` writes the file.

    One build serves all processes that ask for it at the same time.
    """
    path = cache_dir() / f"{stem}-{key}.so"
    for one in (path, _hash_file(path)):
        cache_folder.check(one)
    if _is_sound(path):
        return path
    with cache_folder.writing(path.parent), cache_folder.lock(path):
        if not _is_sound(path):
            with cache_folder.unfinished(path) as scratch:
                out = scratch / path.name
                make(out)
                _hash_file(out).write_text(hashlib.sha256(out.read_bytes()).hexdigest())
                cache_folder.protect(scratch)
                # A process that loaded a damaged library keeps its file, so the rebuilt library is a new file.
                for source, target in ((out, path), (_hash_file(out), _hash_file(path))):
                    cache_folder.replace(source, target)
    return path


def _hash_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _is_sound(path: Path) -> bool:
    """Whether a library is identical to the built one; loading a damaged library may kill the process."""
    try:
        return _hash_file(path).read_text() == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _make_core(out: Path) -> None:
    logger.info("building the emulator's core with %s, once; this takes some seconds", compiler())
    objects = []
    for name, flags in SOURCES.items():
        obj = out.with_name(name + ".o")
        run_compiler([*FLAGS, *flags, *_host_flags(), "-c", str(HERE / name), "-o", str(obj)])
        objects.append(str(obj))
    run_compiler(["-shared", "-o", str(out), *objects, "-lm"])


def _signatures(lib: ctypes.CDLL) -> None:
    table = {
        "core_run": (ctypes.c_int, [P, P, I64]),
        "core_check": (ctypes.c_int, [P, P, I32, U32]),
        "core_advance": (None, [P, P, I32, U32]),
        "core_poll": (ctypes.c_int, [P, P]),
        "core_timeout": (ctypes.c_int, [P]),
        "core_host_pointer": (P, [P, U64, U64]),
        "core_clock_cut": (None, [P, P, U32, P]),
        "core_complete_tx": (ctypes.c_int, [P, P, I32, U32, I64]),
        "core_arrive": (ctypes.c_int, [P, P, I32, U32, P]),
        "core_mbarrier": (P, [P, P, I32, U32]),
        "core_cluster_new": (P, [P, U32, U32, U32, I32]),
        "core_cluster_free": (None, [P, P]),
        "core_tmem_shadow": (None, [P, P]),
        "core_new_agent": (I32, [P, P]),
        "core_arrival": (None, [P, P, I32, I32, I32]),
        "core_incoming": (None, [P, P, P, I32, I32, I32]),
        "core_layout": (ctypes.POINTER(U32), []),
        "core_machine_open": (None, [P, I32]),
        "core_machine_close": (None, [P]),
        "core_region_free": (None, [P]),
        "core_global_touch": (None, [P, P, U64, U32, ctypes.c_int, I32, I32, I32, P]),
        "core_shadow_bytes": (None, [P, P, U32, U32, U32, I32, I32, P, I32]),
        "core_shadow_chunks": (None, [P, P, P, I32, U32, I32, I32, P, I32]),
        "core_shadow_box": (None, [P, P, U32, U32, I64, U32, I32, I32, P, I32]),
        "core_shadow_tmem": (None, [P, P, U32, U32, U32, U32, I32, I32, P, I32]),
        "core_tma_bytes": (I64, [P]),
        "core_tma_transaction": (I64, [P, I64]),
        "core_tma_gather": (ctypes.c_int, [P, P, I32, P, P, P, P, I32, I32]),
        "core_tma_scatter": (ctypes.c_int, [P, P, I32, P, P, P, I32, P, I32, I32]),
        "core_smem_write": (ctypes.c_int, [P, P, I32, P, U32, U32, P, I64, U32, U32]),
        "core_smem_read": (ctypes.c_int, [P, P, I32, P, U32, U32, P, I64, U32]),
        "core_bulk_read": (ctypes.c_int, [P, P, I32, U64, P, I64, P, I32, I32]),
        "core_bulk_write": (ctypes.c_int, [P, P, I32, U64, P, I64, I32, I32, P, I32, I32]),
        "core_chunks": (I32, [U64, U32, U32, I32, I32, I32, P]),
        "core_copy_jobs": (I32, [P, P, I32, U32, P]),
        "core_copy_track": (ctypes.c_int, [P, P, I32, P, I32, I32, I32, P]),
        "core_copy_run": (ctypes.c_int, [P, P, I32, P, I32]),
        "core_wgmma_outstanding": (I32, [P]),
        "core_decode": (None, [P, I32, I32, I32, P]),
        "core_gather": (None, [P, P, I32, I32, I32, I32, P, I32, I32]),
        "core_gemm": (None, [P, P, P, I32, I32, I32, I32, I32, I32]),
        "core_product": (None, [P, P, P, P, I32, I32, I32, I32, U32, U32]),
        "core_load_accumulators": (None, [P, P, I32, P, I32]),
        "core_store_accumulators": (None, [P, P, I32, P, I32]),
        "core_load_accumulators_f16": (None, [P, P, I32, P, I32]),
        "core_store_accumulators_f16": (None, [P, P, I32, P, I32]),
        "core_load_a": (None, [P, P, I32, I32, P, I32]),
    }
    for name, (result, arguments) in table.items():
        fn = getattr(lib, name)
        fn.restype, fn.argtypes = result, arguments


@functools.lru_cache(maxsize=1)
def core() -> ctypes.CDLL:
    """Return the loaded core library."""
    names = [*SOURCES, *(path.name for path in HERE.glob("*.h"))]
    lib = ctypes.CDLL(str(build("core", source_digest(names), _make_core)))
    _signatures(lib)
    want = layout.expected_layout()
    have = lib.core_layout()
    found = [have[k] for k in range(len(want))]
    if found != want:
        raise HostError(f"native structure layout {found} differs from Python's {want}")
    return lib


@functools.cache
def function_address(name: str) -> int:
    """Return the address of an exported function, or 0 if the core does not have it."""
    try:
        return ctypes.cast(getattr(core(), name), P).value or 0
    except AttributeError:
        return 0


__all__ = [
    "U8",
    "build",
    "cache_dir",
    "compiler",
    "core",
    "digest",
    "function_address",
    "run_compiler",
    "source_digest",
]
