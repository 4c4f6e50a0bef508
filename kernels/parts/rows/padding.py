"""Padding rows of a log-sum-exp tensor, which belong to no query.

A padded tensor has the caller's maximum number of rows for each request. Tiles write the rows of a request's queries.
The kernel fills the other rows with -inf here, because callers reduce over all rows. Filling the tensor before the
launch would cost another launch and 0.8 us on the host (host without a GPU, 2026-11-24). This is half of a warm call
without its launch.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from hopwell.kernels.parts.core.device import global_array
from hopwell.kernels.parts.load.sequence import load_request


@cute.jit
def fill_padding(addresses, geometry) -> None:
    """Write -inf to every row past its request's queries. Each thread of the grid writes one row at a time.

    All threads call this once, before warps take their roles: no registers are live yet, and no tile writes these rows.
    """
    threads = Int64(cute.arch.block_dim()[0])
    row = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
    rows = Int64(geometry.lse_rows)
    end = geometry.batch * rows * (geometry.lse_request > 0).to(Int64)
    while row < end:
        index = (row // rows).to(Int32)
        token = (row - Int64(index) * rows).to(Int32)
        if token >= load_request(index, addresses, geometry).q_len:
            lse = global_array(Float32, addresses.lse)
            place = (Int64(index) * geometry.lse_request + token) * geometry.lse_row
            for head in cutlass.range(Int32(geometry.heads), unroll=1):
                lse[place + head * geometry.lse_head] = -Float32.inf
        row += cute.arch.grid_dim()[0] * threads
