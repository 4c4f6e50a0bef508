"""Skip-softmax on Hopper: a skipped tile costs a consumer warpgroup one product, the maxima of its rows and a vote."""

import cutlass
import cutlass.cute as cute

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core.device import barrier_all, device_struct
from hopwell.kernels.parts.core.pipeline import NamedBarrier
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.sm90.common.attend import MainLoop


@device_struct
class SkippingLoop(MainLoop):
    """Main loop that leaves out the exponentials and the product with V of tiles with negligible weights."""

    skip: SkipRule

    @cute.jit
    def first_step(self, attend, operands, ping_pong, q_stage, kv_step, n, row):
        MainLoop.first_step(self, attend, operands, ping_pong, q_stage, kv_step, n, row)
        self.skip.pending[0] = 1

    @cute.jit
    def next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = attend.rings.k, attend.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            operands.add_values(v_ring.stage(kv_step), attend.softmax)
        ping_pong.pass_on()
        operands.wait(0)
        k_ring.release(kv_step + 1)
        v_ring.release(kv_step)
        scores = operands.scores()
        attend.to_logits(scores, n, row, masked)
        maxima = [attend.softmax.maximum(scores, r) for r in range(scores.rows)]
        unneeded = self.skip.unneeded(attend.softmax, maxima, row)
        if barrier_all(unneeded, NamedBarrier.WARPGROUP + ping_pong.consumer, WARPGROUP):
            self.skip.note(False)
        else:
            self.skip.note(True)
            for r in cutlass.range_constexpr(scores.rows):
                attend.softmax.accumulate(scores, r, maxima[r])
            operands.rescale(attend.softmax)
            operands.round_scores()

    @cute.jit
    def last_step(self, attend, operands, kv_step):
        v_ring = attend.rings.v
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            operands.add_values(v_ring.stage(kv_step), attend.softmax)
        operands.wait(0)
        v_ring.release(kv_step)
