"""Callbacks of the stand-in runtime: register kernels by name, decode launch configurations, run launches."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import HostError
from ..machine.launch import Launch
from ..options import options

# cudaDeviceAttr
ATTRIBUTES = {8: 49152, 1: 1024, 10: 32}
ATTRIBUTE_SM_COUNT, ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR = 16, 75, 76
ATTRIBUTE_SM_THREADS, ATTRIBUTE_SM_SHARED, ATTRIBUTE_CTA_SHARED = 39, 81, 97
# cudaLaunchConfig_t: grid, block, dynamic bytes, stream, attributes, count; cudaLaunchAttribute: id, padding, 64 bytes
CONFIG_BYTES, ATTRIBUTE_BYTES, ATTRIBUTE_CLUSTER = 56, 72, 4

Launcher = Callable[[str, Launch], None]
_handles = itertools.count(0x1000, 16)
# Two modules with the same content share one library, which stays loaded. Kernel handles outlive the module that made
# them, so the library's callbacks must outlive it too.
_kernels: dict[int, str] = {}
_alive: list[Runtime] = []
# Errors belong to a call in this thread, because a library has the callbacks of the latest module made of it.
_errors = threading.local()


def take_error() -> BaseException | None:
    """Return the exception that a callback raised in this thread since the last call."""
    error = getattr(_errors, "pending", None)
    _errors.pending = None
    return error


@dataclass
class Runtime:
    """Callbacks of one emulated module.

    ``launcher`` gets the kernel's name and the launch. ``param_sizes`` gives the bytes of each parameter of a kernel.
    """

    launcher: Launcher
    param_sizes: Callable[[str], list[int]]

    def __post_init__(self) -> None:
        _alive.append(self)
        self.callbacks = Callbacks(
            *[kind(self._guarded(getattr(self, name))) for name, kind in Callbacks._fields_]  # type: ignore[misc]
        )

    def _guarded(self, fn):
        """Wrap a C callback, which cannot raise: store the exception for the caller and return a failure."""

        def wrapped(*args):
            try:
                return fn(*args)
            except BaseException as e:
                _errors.pending = e
                return 1

        return wrapped

    # -- callbacks
    def load(self, library, image) -> int:
        library[0] = 0x77
        return 0

    def get_kernel(self, kernel, library, name: bytes) -> int:
        handle = next(_handles)
        _kernels[handle] = name.decode()
        kernel[0] = handle
        return 0

    def launch(self, config: int, kernel: int, args) -> int:
        raw = ctypes.string_at(config, CONFIG_BYTES)
        gx, gy, gz, bx, by, bz = struct.unpack_from("<6I", raw, 0)
        smem, _stream, attributes, count = struct.unpack_from("<QQQI", raw, 24)
        cluster, kept = (1, 1, 1), {}
        for k in range(count):
            a = ctypes.string_at(attributes + ATTRIBUTE_BYTES * k, ATTRIBUTE_BYTES)
            (kind,) = struct.unpack_from("<I", a, 0)
            if kind == ATTRIBUTE_CLUSTER:
                cluster = struct.unpack_from("<3I", a, 8)
            kept[kind] = a[8:24]
        name = _kernels.get(kernel)
        if name is None:
            raise HostError(f"launch of an unknown kernel handle {kernel:#x}")
        params = [ctypes.string_at(args[k], size) for k, size in enumerate(self.param_sizes(name))]
        self.launcher(name, Launch(name, (gx, gy, gz), (bx, by, bz), cluster, smem, params, kept))
        return 0

    def encode(self, target, dtype, rank, address, *layout) -> int:
        """Stand in for cuTensorMapEncodeTiled."""
        from ..engines import tensor_map

        dims, strides, box, steps, interleave, swizzle, l2, oob = layout
        if interleave:
            raise HostError("tensor map with interleave")
        raw = tensor_map.encode(
            dtype,
            address or 0,
            [dims[k] for k in range(rank)],
            [strides[k] for k in range(rank - 1)],
            [box[k] for k in range(rank)],
            [steps[k] for k in range(rank)],
            swizzle,
            l2,
            bool(oob),
        )
        ctypes.memmove(target, raw, 128)
        return 0

    def device_attribute(self, attribute: int) -> int:
        o = options()
        of_device = {
            ATTRIBUTE_SM_COUNT: o.sms,
            ATTRIBUTE_MAJOR: o.capability[0],
            ATTRIBUTE_MINOR: o.capability[1],
            ATTRIBUTE_SM_THREADS: o.limits.threads,
            ATTRIBUTE_SM_SHARED: o.limits.shared_bytes,
            ATTRIBUTE_CTA_SHARED: o.limits.cta_shared_bytes,
        }
        return (ATTRIBUTES | of_device).get(attribute, 0)


_pointer, _u32, _u64 = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)


class Callbacks(ctypes.Structure):
    """``callbacks`` of shim.c; the field names are the method names above."""

    _fields_ = [
        ("load", ctypes.CFUNCTYPE(ctypes.c_int, _pointer, ctypes.c_void_p)),
        ("get_kernel", ctypes.CFUNCTYPE(ctypes.c_int, _pointer, ctypes.c_void_p, ctypes.c_char_p)),
        ("launch", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, _pointer)),
        (
            "encode",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.c_void_p,
                ctypes.c_int,
                ctypes.c_uint32,
                ctypes.c_void_p,
                _u64,
                _u64,
                _u32,
                _u32,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.c_int,
            ),
        ),
        ("device_attribute", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
    ]
