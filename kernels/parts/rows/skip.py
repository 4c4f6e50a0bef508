"""Skip-softmax: skip KV tiles whose weights are negligible in every row of a warpgroup.

A warpgroup skips a tile if the tile's largest weight is below ``factor / kv_len`` of the largest weight so far, in
every row. The first tile is never skipped. Skipping drops the tile's exponentials and its product with V. K and V are
still loaded, because other rows may need them. The warpgroup still waits for both, because a stage may be released only
after TMA has written all of it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.parts.core.device import device_struct, global_pointer
from hopwell.kernels.parts.rows.mask import LogitRow
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax


@device_struct
class SkipRule:
    factor: Float32
    pending: Any  # whether the latest tile still needs its product with V
    skipped: Any  # tiles skipped by this warpgroup, counted once per 64 rows; a tile of fewer rows counts once

    @staticmethod
    def create(factor) -> "SkipRule":
        state = [cute.make_rmem_tensor(1, Int32) for _ in range(2)]
        state[1].fill(0)
        return SkipRule(factor, *state)

    def note(self, counts: bool, row_blocks=1) -> None:
        """Record whether the latest tile counts, for ``row_blocks`` blocks of 64 rows."""
        self.pending[0] = int(counts)
        if not counts:
            self.skipped[0] += row_blocks

    @cute.jit
    def unneeded(self, softmax: OnlineSoftmax, maxima: list, row: LogitRow):
        """Whether a tile with row maxima ``maxima`` is negligible compared with the largest scores so far.

        Rows of the query tile past the end of the request hold the queries of the next request, and do not vote.
        """
        excess = -Float32.inf
        for r in cutlass.range_constexpr(len(maxima)):
            # A row that has seen no key has -inf in both. The difference is NaN, which fmax ignores.
            own = maxima[r] - softmax.largest[r] if row.positions[r] < row.kv_len else -Float32.inf
            excess = cute.arch.fmax(excess, own)
        threshold = cute.math.log2(self.factor / row.kv_len.to(Float32), fastmath=True)
        return 1 - (excess * softmax.scale >= threshold).to(Int32)

    @cute.jit
    def report(self, address, is_reporter) -> None:
        """Add this warpgroup's skipped tiles to the counter.

        One thread per group of threads with the same rows reports.
        """
        if address != 0 and is_reporter:
            cute.arch.atomic_add(global_pointer(Int32, address), self.skipped[0])
