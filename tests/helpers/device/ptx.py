"""Runs hand-written PTX in the emulator, without compiling anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hopwell.emulator import LaunchReport, use
from hopwell.emulator.decode.program import Program
from hopwell.emulator.host import module
from hopwell.emulator.machine.launch import Launch
from hopwell.emulator.machine.memory import Span, span_of
from hopwell.emulator.ptx import parse_module

REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<64>;
    .reg .b32 %r<128>;
    .reg .b64 %d<64>;
    .reg .b128 %q<4>;
"""


def module_text(
    body: str,
    sizes: Sequence[int],
    shared: int = 0,
    target: str = "sm_90a",
    dynamic: bool = False,
    directives: str = "",
) -> str:
    """Return a module with one kernel ``k``; the thread id is in %tid, the lane in %lane.

    A parameter of 8 bytes arrives in %a<i>; a larger parameter has its address there.
    """
    params = ", ".join(
        f".param .u64 p{k}" if size == 8 else f".param .align 64 .b8 p{k}[{size}]" for k, size in enumerate(sizes)
    )
    loads = "".join(
        f"    ld.param.u64 %a{k}, [p{k}];\n"
        if size == 8
        else f"    mov.b64 %a{k}, p{k}; cvta.param.u64 %a{k}, %a{k};\n"
        for k, size in enumerate(sizes)
    )
    static = f"    .shared .align 1024 .b8 smem[{shared}];\n" if shared else ""
    external = ".extern .shared .align 1024 .b8 dynamic[];\n" if dynamic else ""
    return (
        f".version 9.0\n.target {target}\n.address_size 64\n{external}"
        f".visible .entry k({params}) {directives}\n{{\n{static}{REGISTERS}    .reg .b64 %a<{max(1, len(sizes))}>;\n"
        f"    .reg .b32 %tid, %lane, %warp;\n{loads}"
        f"    mov.u32 %tid, %tid.x;\n    and.b32 %lane, %tid, 31;\n    shr.u32 %warp, %tid, 5;\n{body}\n    ret;\n}}\n"
    )


def run_ptx(
    body: str,
    *args: torch.Tensor | int | bytes,
    grid: int | tuple[int, int, int] = 1,
    block: int = 32,
    cluster: int = 1,
    shared: int = 0,
    smem: int = 0,
    target: str = "sm_90a",
    spans: Sequence[Span] | None = None,
    roles: str | None = None,
    directives: str = "",
    **settings: object,
) -> LaunchReport:
    """Run a kernel body once; tensors are passed as addresses, bytes as they are.

    ``roles`` names a role per tensor argument, separated by blanks, "inout" by default. ``settings`` are fields of the
    emulator's options.
    """
    params = [packed(a) for a in args]
    text = module_text(body, [len(p) for p in params], shared, target, dynamic=bool(smem), directives=directives)
    kernel = parse_module(text)["k"]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if spans is None:
        named = roles.split() if roles else ["inout"] * len(tensors)
        spans = [span_of(f"arg{k}", t, role) for k, (t, role) in enumerate(zip(tensors, named, strict=True))]
    shape = (grid, 1, 1) if isinstance(grid, int) else grid
    launch = Launch("k", shape, (block, 1, 1), (cluster, 1, 1), smem, params)
    arch = target if target != "sm_80" else "sm_80"
    with use(arch, **settings):
        return module.run(Program(kernel), launch, spans)


def packed(value: torch.Tensor | int | bytes) -> bytes:
    if isinstance(value, bytes):
        return value
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return number.to_bytes(8, "little", signed=number < 0)


def empty(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)
