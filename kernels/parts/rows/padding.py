"""Rows of a padded log-sum-exp that belong to no query.

Such a tensor has as many rows for each request as the caller's bound says. Tiles write those of a request's queries;
the others become -inf here, because callers reduce over all of them. To fill the tensor before the launch would take
0.8 us on the host, half of a warm call without its launch, and a launch more (no GPU's host, 2026-11-24).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from hopwell.kernels.parts.core.device import global_array
from hopwell.kernels.parts.load.sequence import load_request


@cute.jit
def fill_padding(addresses, geometry) -> None:
    """Write -inf into every row past its request's queries, a thread of the grid a row at a time. Called once by all of
    them, before warps take their roles: nothing lives in registers then, and no tile writes these rows."""
    threads = Int64(cute.arch.block_dim()[0])
    row = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
    end = geometry.batch * Int64(geometry.lse_request) * (addresses.lse != 0).to(Int64)
    while row < end:
        index = (row // geometry.lse_request).to(Int32)
        token = (row - Int64(index) * geometry.lse_request).to(Int32)
        if token >= load_request(index, addresses, geometry).q_len:
            lse = global_array(Float32, addresses.lse)
            for head in cutlass.range(Int32(geometry.heads), unroll=1):
                lse[row * geometry.lse_row + head * geometry.lse_head] = -Float32.inf
        row += cute.arch.grid_dim()[0] * threads
