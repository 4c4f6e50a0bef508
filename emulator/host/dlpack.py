"""CPU tensors that claim to be CUDA tensors, because a compiled host function checks its arguments' device."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

CUDA = 2  # kDLCUDA


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Handle:
    """The object that from_dlpack expects."""

    def __init__(self, capsule: Any):
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0


def mark_as_cuda(capsule: Any) -> None:
    """Change the device in an unused ``dltensor`` capsule."""
    _Tensor.from_address(_pointer(capsule, b"dltensor")).device.type = CUDA


def as_cuda(tensor: torch.Tensor) -> Any:
    """Return a TVM-FFI tensor over the same memory that claims to be on CUDA device 0."""
    import tvm_ffi

    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    mark_as_cuda(capsule)
    return tvm_ffi.from_dlpack(_Handle(capsule))
