"""Memory read bandwidth, one of the ceilings."""

import triton
import triton.language as tl

PROGRAMS = 132 * 8
BLOCK = 4096  # int32


@triton.jit
def read_all(numbers, found, count, programs: tl.constexpr, block: tl.constexpr):
    """Read ``count`` int32; using their values only keeps the compiler from removing the loads."""
    seen = tl.zeros([block], dtype=tl.int32)
    for first in range(tl.program_id(0) * block, count, programs * block):
        seen |= tl.load(numbers + first + tl.arange(0, block))
    tl.store(found + tl.program_id(0), tl.max(seen, 0))
