"""The kernel of the self-test: takes a tensor map and prefetches it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .compile import compile_function
from .module import Function, Module

if TYPE_CHECKING:
    from .selftest import Known


class Probe:
    """Describes the tensor at the anchor's address with known extents, strides and box."""

    def __init__(self, known: Known):
        self.known = known

    @cute.jit
    def __call__(self, anchor: cute.Tensor, stream: cuda.CUstream):
        k = self.known
        tensor = cute.make_tensor(anchor.iterator, cute.make_layout(k.shape, stride=k.stride))
        box = cute.make_ordered_layout(k.box, order=tuple(range(len(k.box))))
        smem = cute.make_composed_layout(cute.make_swizzle(k.swizzle, 4, 3), 0, box)
        atom, _ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, k.box)
        self.kernel(atom).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom):
        cpasync.prefetch_descriptor(atom)


def compile_probe(known: Known, folder: Path) -> tuple[Function, Any]:
    """Return the compiled probe and a tensor to call it with."""
    dtype = getattr(cutlass, known.dtype)
    anchor = make_fake_tensor(dtype, (cute.sym_int(),), stride=(1,), assumed_align=128)
    compile_function(
        Probe(known), anchor, make_fake_stream(use_tvm_ffi_env_stream=True), arch="sm_90a", name="probe", folder=folder
    )
    torch_type = {"Float8E4M3FN": "float8_e4m3fn", "BFloat16": "bfloat16"}.get(known.dtype, known.dtype.lower())
    size = 1 + sum((n - 1) * s for n, s in zip(known.shape, known.stride, strict=True))
    storage = torch.zeros(size * 4 + 128, dtype=torch.uint8)
    offset = -storage.data_ptr() % 128
    tensor = storage[offset:].view(torch.uint8)[: size * 4 // 4 * 4]
    return Module(folder / "probe.o", folder / "probe.ptx").function("probe"), tensor.view(getattr(torch, torch_type))[
        :size
    ]
