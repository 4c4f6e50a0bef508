"""Skip-softmax on Hopper: a skipped tile costs a consumer warpgroup one product, the maxima of its rows and a vote."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import barrier_all
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.sm90.prefill.fp8 import Fp8Attend
from hopwell.kernels.sm90.prefill.rows import PrefillAttend


@dataclass
class SkippingAttend(PrefillAttend):
    skip: SkipRule

    @cute.jit
    def first_step(self, operands, ping_pong, q_stage, kv_step, n, row):
        PrefillAttend.first_step(self, operands, ping_pong, q_stage, kv_step, n, row)
        self.skip.pending[0] = 1

    @cute.jit
    def next_step(self, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = self.rings.k, self.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            self.begin_pv(operands, v_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(0)
        k_ring.release(kv_step + 1)
        v_ring.release(kv_step)
        scores = operands.scores()
        self.to_logits(scores, n, row, masked)
        maxima = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        unneeded = self.skip.unneeded(self.softmax.largest, maxima, row.kv_len)
        if barrier_all(unneeded, NamedBarrier.WARPGROUP + ping_pong.consumer, WARPGROUP):
            self.skip.note(False)
        else:
            self.skip.note(True)
            for r in cutlass.range_constexpr(scores.rows):
                self.softmax.accumulate(scores, r, maxima[r])
            self.rescale(operands)
            operands.round_scores()

    @cute.jit
    def last_step(self, operands, kv_step):
        v_ring = self.rings.v
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            self.begin_pv(operands, v_ring.stage(kv_step))
        operands.wait(0)
        v_ring.release(kv_step)


@dataclass
class SkippingFp8Attend(SkippingAttend, Fp8Attend):
    """Attention over 8-bit operands that skips tiles by the rule of :class:`SkippingAttend`."""
