"""Two small kernels at the two ends of a programmatic dependent launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import const_expr
from cutlass.cute.runtime import load_module, make_fake_stream, make_fake_tensor

from hopwell import emulator
from hopwell.emulator.host.compile import compile_function
from hopwell.kernels.support import target_of

THREADS = 128
NAPS, NAP_NS = 100, 10_000  # 1 ms: much longer than a launch and a small kernel after it


class Copy:
    """One CTA copies ``source`` to ``target``, both of 32-bit words.

    With ``late``, it first lets the next grid start, and sleeps. Otherwise it starts as early as the previous grid
    allows, and does not wait for that grid's end. A real kernel must wait.
    """

    def __init__(self, late: bool):
        self.late = late

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: cuda.CUstream):
        self.kernel(source, target).launch(
            grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=const_expr(not self.late)
        )

    @cute.kernel
    def kernel(self, source: cute.Tensor, target: cute.Tensor):
        if const_expr(self.late):
            cute.arch.griddepcontrol_launch_dependents()
            for _ in cutlass.range(NAPS, unroll=1):
                cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[cutlass.Int32(NAP_NS)])
        for i in range(cute.arch.thread_idx()[0], cute.size(source), THREADS):
            target[i] = source[i]


def copy_function(late: bool, device: str, folder: Path) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """Return the kernel as a function of two contiguous tensors, on the current stream; compiled into ``folder``."""
    words = [make_fake_tensor(cutlass.Int32, (cute.sym_int(),), stride=(1,), assumed_align=4) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compile_function(Copy(late), *words, stream, arch=target_of(torch.device(device)), folder=folder)
    built, ptx = folder / "entry.o", folder / "entry.ptx"
    if device == "cuda":
        function = load_module(str(built), enable_tvm_ffi=True)["entry"]
    else:
        function = emulator.load(built, ptx).function("entry")
    return lambda source, target: function(*(t.view(torch.int32).flatten() for t in (source, target)))
