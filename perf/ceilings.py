"""Ceilings for candidates, measured beside them: large matrix products and a plain read of memory.

The floor of a case is the time of its FLOP or its bytes at these rates, whichever is longer. The floor is not a strict
bound: long prefill at head dim 256 is up to 7 % faster than the product of random numbers (H200, 2026-11-23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from hopwell.perf.family import Call, Candidate

MATMUL = "bf16 matmul"
MATMUL_8 = "e4m3 matmul"
READ = "memory read"

MATMUL_SIZE = 8192
READ_BYTES = 4 << 30  # more than any cache holds


class Ceiling(NamedTuple):
    prepare: Candidate
    amount: float  # FLOP or bytes of a call
    unit: str = "TFLOP/s"
    unit_size: float = 1e12  # FLOP or bytes per second in one unit


def matmul(t: object) -> Call:
    """Prepare a product of random square matrices."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def matmul_8(t: object) -> Call:
    """Prepare a product of random square e4m3 matrices, accumulated without promotion, as fast as the
    library offers.
    """
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one, out = torch.ones((), device="cuda"), torch.empty_like(a, dtype=torch.bfloat16)
    options: dict[str, Any] = dict(out_dtype=out.dtype, use_fast_accum=True, out=out)
    return lambda: torch._scaled_mm(a, b.t(), one, one, **options)


def read(t: object) -> Call:
    """Prepare to read each number once. torch.sum would be 8 % slower (H200, 2026-11-21)."""
    from hopwell.perf import memory

    numbers = torch.empty(READ_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    found = torch.empty(memory.PROGRAMS, dtype=torch.int32, device="cuda")
    sizes = dict(programs=memory.PROGRAMS, block=memory.BLOCK)

    def call() -> torch.Tensor:
        memory.read_all[(memory.PROGRAMS,)](numbers, found, numbers.numel(), **sizes, num_warps=4, num_stages=4)
        return found

    return call


CEILINGS = {
    MATMUL: Ceiling(matmul, 2.0 * MATMUL_SIZE**3),
    MATMUL_8: Ceiling(matmul_8, 2.0 * MATMUL_SIZE**3),
    READ: Ceiling(read, READ_BYTES, "GB/s", 1e9),
}


def matmul_of(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """Return the name of the ceiling for products of these types; the wider type decides."""
    both_narrow = q_dtype == kv_dtype == torch.float8_e4m3fn
    return MATMUL_8 if both_narrow else MATMUL
