"""Skip-softmax on Blackwell: a skipped tile costs its query tile one product and the tile's maximum."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core.device import barrier_all, shared_array
from hopwell.kernels.parts.core.pipeline import SoftmaxBarrier
from hopwell.kernels.parts.rows.mask import LogitRow
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILE_ROWS
from hopwell.kernels.sm100.prefill.softmax import Softmax, Steps

SKIP_ROWS = 64  # rows in which skipped tiles are counted


@dataclass(frozen=True)
class SkippingSoftmax(Softmax):
    """Softmax role that leaves out the exponentials of tiles with negligible weights, and their product with V."""

    skip: SkipRule
    pending: Int32  # shared memory of single CTAs: for each query tile whether its P has to be multiplied

    @property
    def exchanges_always(self) -> bool:
        """The skip rule needs the maximum of a row in each step."""
        return True

    @cute.jit
    def weigh(self, steps: Steps, scores, row: LogitRow, maximum, done):
        unneeded = self.skip.unneeded(self.state, [maximum], row)
        if done == 0:
            unneeded = Int32(0)
        left_out = barrier_all(unneeded, SoftmaxBarrier.TILE + steps.index, HALVES * WARPGROUP)
        if left_out:
            # The thread of the query tile's first row reports, so rows count from there. There are none if the request
            # ends before that row.
            rows = cutlass.max(cutlass.min(row.kv_len - row.positions[0], Q_TILE_ROWS), 0)
            self.skip.note(False, (rows + (SKIP_ROWS - 1)) // SKIP_ROWS)
            self.state.rescale[0] = 1.0
        else:
            self.skip.note(True)
            self.state.choose_reference(0, maximum)
        self.post_rescale(steps, done)
        if const_expr(not self.kernel.config.is_pair):
            if (steps.row == 0) & (steps.half == 0):
                shared_array(Int32, self.pending)[steps.index] = self.skip.pending[0]
        if left_out:
            # Products of a pair are always issued, because the other CTA may need them.
            if const_expr(self.kernel.config.is_pair):
                words = self.kernel.config.half_keys * self.kernel.dtype.width // 32
                tmem.store_zeros(self.place(steps, done), words)
            self.give_early_p(steps, done)
            self.give_late_p(steps, done)
        else:
            self.write_p(steps, scores, done)
