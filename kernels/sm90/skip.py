"""Skip-softmax on Hopper: a tile that is left out costs a consumer warpgroup a product, its rows' maxima and a vote."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.device import barrier_all
from hopwell.kernels.parts.skip import SkipRule
from hopwell.kernels.sm90.attend import WARPGROUP_BARRIER
from hopwell.kernels.sm90.byte_prefill import ByteAttend
from hopwell.kernels.sm90.prefill_attend import PrefillAttend


@dataclass
class SkippingAttend(PrefillAttend):
    skip: SkipRule

    @cute.jit
    def first_step(self, operands, turns, q_stage, kv_step, n, row):
        PrefillAttend.first_step(self, operands, turns, q_stage, kv_step, n, row)
        self.skip.pending[0] = 1

    @cute.jit
    def next_step(self, operands, turns, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = self.rings.k, self.rings.v
        k_ring.wait_full(kv_step + 1)
        turns.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            self.begin_pv(operands, v_ring.stage(kv_step))
        turns.pass_on()
        operands.wait(0)
        k_ring.release(kv_step + 1)
        v_ring.release(kv_step)
        scores = operands.scores()
        self.to_logits(scores, n, row, masked)
        maxima = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        unneeded = self.skip.unneeded(self.softmax.largest, maxima, row.kv_len)
        if barrier_all(unneeded, WARPGROUP_BARRIER + turns.consumer, WARPGROUP):
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
class SkippingByteAttend(SkippingAttend, ByteAttend):
    """Attention over 8-bit operands that leaves tiles out by the rule of :class:`SkippingAttend`."""
