"""What candidates are held against: a large matrix product and a plain read of memory, measured beside them.

The floor of a case is the time that its FLOP or its bytes take at these rates, whichever is longer. It is no strict
bound: long prefill at head dim 256 is up to 7 % faster than the product of random numbers (H200, 2026-11-23).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from hopwell.perf.family import Call, Candidate

MATMUL = "bf16 matmul"
READ = "memory read"

MATMUL_SIZE = 8192
READ_BYTES = 4 << 30  # more than any cache holds


class Ceiling(NamedTuple):
    prepare: Candidate
    amount: float  # FLOP or bytes of a call


def matmul(t: object) -> Call:
    """A product of random square matrices."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def read(t: object) -> Call:
    """Each number once. torch.sum would be 8 % slower (H200, 2026-11-21)."""
    from hopwell.perf import memory

    numbers = torch.empty(READ_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    found = torch.empty(memory.PROGRAMS, dtype=torch.int32, device="cuda")
    sizes = dict(programs=memory.PROGRAMS, block=memory.BLOCK)

    def call() -> torch.Tensor:
        memory.read_all[(memory.PROGRAMS,)](numbers, found, numbers.numel(), **sizes, num_warps=4, num_stages=4)
        return found

    return call


CEILINGS = {MATMUL: Ceiling(matmul, 2.0 * MATMUL_SIZE**3), READ: Ceiling(read, READ_BYTES)}
