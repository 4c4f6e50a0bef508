"""Start-up test of private details of the pinned DSL version: TMA descriptor format and stand-in entry points.

The test compiles, exports and launches a tiny kernel whose tensor maps describe known tensors. Instead of running the
kernel, the test decodes the descriptors among its parameters and compares every field.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import native
from ..engines import tensor_map
from ..errors import HostError
from ..machine.launch import Launch
from . import module

# Order of CUtensorMapDataType in the hardware field, by DSL type name.
HARDWARE_TYPE = {"Float16": 6, "BFloat16": 10, "Float32": 7, "Uint8": 0, "Float8E4M3FN": 0, "Int32": 3}


@dataclass(frozen=True)
class Known:
    """A tensor map with known fields: extents, strides in elements, box, element type and swizzle bits."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


KNOWN = (
    Known("BFloat16", (64, 300), (1, 64), (64, 32), 3),
    Known("Float16", (128, 17, 5), (1, 128, 128 * 17), (32, 8, 1), 2),
    Known("Float32", (64, 40, 3, 2), (1, 64, 2560, 8192), (8, 16, 1, 1), 1),
    Known("Float8E4M3FN", (256, 1000), (1, 1024), (128, 64), 3),
    Known("BFloat16", (64, 16, 4, 3, 2), (1, 4096, 65536, 262144, 1048576), (64, 8, 1, 1, 1), 3),
)


def check_fields(found: tensor_map.TensorMap, known: Known, address: int) -> list[str]:
    """List the differences between a decoded descriptor and the tensor it describes."""
    size = int(tensor_map.ELEMENT_BYTES[found.dtype])
    # The host code may drop or append extents of one and reorder dimensions by stride; compare only extents above one.
    wanted = sorted((s * size, n, b) for n, s, b in zip(known.shape, known.stride, known.box, strict=True) if n > 1)
    have = sorted((s, n, b) for n, s, b in zip(found.dims, (size, *found.strides), found.box, strict=True) if n > 1)
    problems = []
    if found.address != address:
        problems.append(f"address {found.address:#x}, expected {address:#x}")
    if found.dtype != HARDWARE_TYPE[known.dtype]:
        problems.append(f"element type {found.dtype}, expected {HARDWARE_TYPE[known.dtype]} for {known.dtype}")
    if found.swizzle != known.swizzle:
        problems.append(f"swizzle {found.swizzle}, expected {known.swizzle}")
    if have != wanted:
        problems.append(f"(stride in bytes, extent, box) {have}, expected {wanted}")
    return problems


def descriptors(launch: Launch) -> list[bytes]:
    """Return the 128-byte parameters that look like tensor maps."""
    return [p[:128] for p in launch.params if len(p) >= 128]


def run_selftest() -> list[str]:
    """Return the problems found; an empty list means that the emulator understands the installed DSL."""
    from .probe import compile_probe  # imports the DSL, which takes longer than a small launch

    problems: list[str] = []
    for known in KNOWN:
        with tempfile.TemporaryDirectory() as folder:
            function, tensor = compile_probe(known, Path(folder))
            problems += [f"{known}: {p}" for p in _launch_probe(function, tensor, known)]
    return problems


def _launch_probe(function: module.Function, tensor: Any, known: Known) -> list[str]:
    seen: list[Launch] = []
    function.module.runtime.launcher = lambda name, launch: seen.append(launch)
    function(tensor)
    if len(seen) != 1:
        return [f"{len(seen)} launches instead of one"]
    found = descriptors(seen[0])
    if len(found) != 1:
        return [f"{len(found)} tensor maps among the parameters instead of one"]
    return check_fields(tensor_map.decode(found[0]), known, tensor.data_ptr())


def dsl_version() -> str | None:
    """Return the version of the installed DSL, or None, since exported kernels run without it."""
    try:
        return importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        return None


def ensure() -> None:
    """Run the self-test once per DSL version and emulator; raise HostError if it fails."""
    version = dsl_version()
    if version is None:
        return
    sources = Path(tensor_map.__file__).read_bytes() + (native.HERE / "shim.c").read_bytes()
    marker = native.cache_dir() / f"selftest-{native.digest(version, sources)}.ok"
    if marker.exists():
        return
    problems = run_selftest()
    if problems:
        raise HostError(
            f"nvidia-cutlass-dsl {version} encodes tensor maps differently than the emulator expects:\n"
            + "\n".join(problems)
        )
    marker.touch()
