"""Runs the same PTX on a GPU and in the emulator: both take a module's text and launch its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..decode.program import Program
from ..engines import tensor_map
from ..errors import HostError
from ..host import module
from ..machine.launch import Launch
from ..machine.memory import span_of
from ..options import use
from ..ptx import parse_module

Parameter = torch.Tensor | int | bytes  # a tensor's address, a 32-bit number, a tensor map


def packed(value: Parameter) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, torch.Tensor):
        return int(value.data_ptr()).to_bytes(8, "little")
    return (value & 0xFFFFFFFF).to_bytes(4, "little")


class Device(Protocol):
    """A device that runs kernels."""

    name: str
    torch_device: str

    def launch(
        self,
        text: str,
        grid: int,
        block: int,
        smem: int,
        parameters: Sequence[Parameter],
        reached: Sequence[torch.Tensor] = (),
        kernel: str = "k",
    ) -> None:
        """Run a kernel of the module ``text`` and wait for it. ``reached`` lists tensors that descriptors point to."""

    def tensor_map(self, kind: int, tensor: torch.Tensor, box: Sequence[int], nan_fill: bool = False) -> bytes:
        """Return the descriptor of a contiguous tensor without a swizzle; ``kind`` is a CUtensorMapDataType."""


class Emulated:
    """The emulator, with its best model of the rounding of matrix products."""

    name, torch_device = "emulator", "cpu"

    def __init__(self, arch: str, numerics: str = "hardware"):
        self.arch, self.numerics = arch, numerics

    def launch(
        self,
        text: str,
        grid: int,
        block: int,
        smem: int,
        parameters: Sequence[Parameter],
        reached: Sequence[torch.Tensor] = (),
        kernel: str = "k",
    ) -> None:
        program = Program(parse_module(text)[kernel])
        raw = [packed(p) for p in parameters]
        launch = Launch(kernel, (grid, 1, 1), (block, 1, 1), (1, 1, 1), smem, raw)
        tensors = [*(p for p in parameters if isinstance(p, torch.Tensor)), *reached]
        spans = [span_of(f"tensor {k}", t) for k, t in enumerate(tensors)]
        with use(self.arch, numerics=self.numerics, schedule="eager", race=False, proxy=False, strict=False):
            module.run(program, launch, spans)

    def tensor_map(self, kind: int, tensor: torch.Tensor, box: Sequence[int], nan_fill: bool = False) -> bytes:
        dims, strides = extents(tensor)
        return tensor_map.encode(kind, tensor.data_ptr(), dims, strides, box, [1] * len(dims), 0, nan_fill=nan_fill)


def extents(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the extents from the innermost dimension, and the strides in bytes of all other dimensions."""
    size = tensor.element_size()
    return list(tensor.shape)[::-1], [s * size for s in tensor.stride()[-2::-1]]


def require_gpu() -> None:
    """Raise HostError if torch finds no GPU."""
    if not torch.cuda.is_available():
        raise HostError("this command needs a GPU, and torch finds none")


class Gpu:
    """The current CUDA device, through the driver's interface.

    Raises:
        HostError: torch finds no GPU.
    """

    torch_device = "cuda"

    def __init__(self) -> None:
        require_gpu()
        from cuda.bindings import driver

        self.driver = driver
        self.name = torch.cuda.get_device_name()
        torch.zeros(1, device="cuda")  # makes the context current
        self.functions: dict[tuple[str, str], Any] = {}

    def call(self, result: tuple) -> Any:
        status, *values = result
        if status != self.driver.CUresult.CUDA_SUCCESS:
            raise HostError(f"the CUDA driver says {status}")
        return values[0] if values else None

    def launch(
        self,
        text: str,
        grid: int,
        block: int,
        smem: int,
        parameters: Sequence[Parameter],
        reached: Sequence[torch.Tensor] = (),
        kernel: str = "k",
    ) -> None:
        d = self.driver
        if (text, kernel) not in self.functions:
            loaded = self.call(d.cuModuleLoadData(text.encode() + b"\0"))
            self.functions[text, kernel] = self.call(d.cuModuleGetFunction(loaded, kernel.encode()))
        function = self.functions[text, kernel]
        if smem > 48 << 10:
            most = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(d.cuFuncSetAttribute(function, most, smem))
        values = [(ctypes.c_char * len(raw)).from_buffer_copy(raw) for raw in map(packed, parameters)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = torch.cuda.current_stream().cuda_stream
        self.call(d.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, smem, stream, ctypes.addressof(pointers), 0))
        torch.cuda.synchronize()

    def tensor_map(self, kind: int, tensor: torch.Tensor, box: Sequence[int], nan_fill: bool = False) -> bytes:
        d = self.driver
        dims, strides = extents(tensor)
        u32, u64 = d.cuuint32_t, d.cuuint64_t
        found = self.call(
            d.cuTensorMapEncodeTiled(
                d.CUtensorMapDataType(kind),
                len(dims),
                tensor.data_ptr(),
                [u64(n) for n in dims],
                [u64(s) for s in strides],
                [u32(n) for n in box],
                [u32(1)] * len(dims),
                d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
                d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
                d.CUtensorMapFloatOOBfill(int(nan_fill)),
            )
        )
        return np.array([int(word) for word in found.opaque], np.uint64).tobytes()


def entry(name: str, parameters: str, body: str) -> str:
    """Return a kernel's text. ``parameters`` is a blank-separated list of u32, u64 and map, named %a0, %a1, ..."""
    kinds = parameters.split()
    declared = ", ".join(
        f".param .align 64 .b8 {name}_{k}[128]" if kind == "map" else f".param .{kind} {name}_{k}"
        for k, kind in enumerate(kinds)
    )
    loads = "".join(
        f".reg .b64 %a{k}; mov.b64 %a{k}, {name}_{k}; cvta.param.u64 %a{k}, %a{k};\n"
        if kind == "map"
        else f".reg .b{kind[1:]} %a{k}; ld.param.{kind} %a{k}, [{name}_{k}];\n"
        for k, kind in enumerate(kinds)
    )
    registers = ".reg .pred %p<8>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .b32 %thread, %block, %index;\n"
    thread = (
        "mov.u32 %thread, %tid.x; mov.u32 %block, %ctaid.x; mov.u32 %r0, %ntid.x;\n"
        "mad.lo.u32 %index, %block, %r0, %thread;\n"
    )
    return f".visible .entry {name}({declared})\n{{\n{registers}{loads}{thread}{body}\nret;\n}}\n"


def module_text(arch: str, *entries: str, shared: bool = False) -> str:
    external = ".extern .shared .align 1024 .b8 smem[];\n" if shared else ""
    return f".version 8.6\n.target {arch}\n.address_size 64\n{external}" + "".join(entries)
