"""Skip-softmax: KV tiles that cannot matter to any row of a consumer warpgroup cost it one matrix product only.

A tile other than the first is left out when in each of the warpgroup's 64 rows its largest weight is below
``factor / kv_len`` of the largest weight so far. Its exponentials and its product with V are left out; K and V are
still fetched, because the other warpgroups of the CTA may need them.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warpgroup

from hopwell.kernels.config import WARPGROUP
from hopwell.kernels.parts.device import DeviceStruct, barrier_all, global_pointer
from hopwell.kernels.sm90.attend import GROUP_BARRIER, Attend


@dataclass
class SkipRule(DeviceStruct):
    factor: Float32
    scale: Float32  # of the softmax, to base-2 logits
    pending: Any  # whether the latest tile has a product with V to come
    skipped: Any  # tiles left out by this warpgroup

    @staticmethod
    def create(factor, scale) -> "SkipRule":
        state = [cute.make_rmem_tensor(1, Int32) for _ in range(2)]
        state[1].fill(0)
        return SkipRule(factor, scale, *state)

    def note(self, counts: bool) -> None:
        """Remember of the latest tile whether it counts."""
        self.pending[0] = int(counts)
        if not counts:
            self.skipped[0] += 1

    def unneeded(self, largest, maxima, kv_len):
        """Whether a tile with the row maxima ``maxima`` is too small beside the ``largest`` scores so far."""
        # Of a row without a key yet, -inf in both, the difference is NaN, which fmax ignores.
        excess = maxima[0] - largest[0]
        for r in range(1, len(maxima)):
            excess = cute.arch.fmax(excess, maxima[r] - largest[r])
        threshold = cute.math.log2(self.factor / kv_len.to(Float32), fastmath=True)
        return 1 - (excess * self.scale >= threshold).to(Int32)

    @cute.jit
    def report(self, addresses, v_parts: cutlass.Constexpr[int]) -> None:
        """Add what this warpgroup left out; of ``v_parts`` that share their rows the first one counts."""
        sharing = WARPGROUP * v_parts
        if addresses.skipped != 0 and cute.arch.thread_idx()[0] % sharing == WARPGROUP % sharing:
            cute.arch.atomic_add(global_pointer(Int32, addresses.skipped), self.skipped[0])


@dataclass
class SkippingAttend(Attend):
    skip: SkipRule

    @cute.jit
    def first_step(self, operands, q_stage, kv_step, n, row):
        Attend.first_step(self, operands, q_stage, kv_step, n, row)
        self.skip.pending[0] = 1

    @cute.jit
    def next_step(self, operands, turns, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        _, k_ring, v_ring = self.rings
        k_ring.wait_full(kv_step + 1)
        turns.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            operands.issue_pv(v_ring.stage(kv_step))
        turns.pass_on()
        warpgroup.wait_group(0)
        k_ring.release(kv_step + 1)
        v_ring.release(kv_step)
        scores = operands.scores()
        self.to_logits(scores, n, row, masked)
        maxima = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        unneeded = self.skip.unneeded(self.softmax.largest, maxima, row.kv_len)
        if barrier_all(unneeded, GROUP_BARRIER + turns.group, WARPGROUP):
            self.skip.note(False)
        else:
            self.skip.note(True)
            for r in cutlass.range_constexpr(scores.rows):
                self.softmax.accumulate(scores, r, maxima[r])
            self.rescale(operands)
            operands.round_scores()

    @cute.jit
    def last_step(self, operands, kv_step):
        _, _, v_ring = self.rings
        v_ring.wait_full(kv_step)
        if self.skip.pending[0] != 0:
            operands.issue_pv(v_ring.stage(kv_step))
        warpgroup.wait_group(0)
        v_ring.release(kv_step)
