"""Main loops of Hopper prefill over 16-bit operands that overlap more of a step with its products.

Both are bitwise equal to ``MainLoop``: they compute the same values in another order.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute

from hopwell.kernels.parts.core.device import one_when_known
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.sm90.common.attend import MainLoop, WarpgroupPlace
from hopwell.kernels.sm90.common.operands import Operands

GATED_EIGHTHS = 7  # eighths of the second row's exponentials that precede the wait for P V


class OverlappedLoop(MainLoop):
    """Main loop that rescales O between the issue of Q K^T and the issue of P V, so that Q K^T hides it.

    ``MainLoop`` rescales at the end of a step, while the tensor cores do nothing for this warpgroup. Relative to that
    order: 1.00 to 1.03 of the rate (H100 at its power limit, 2026-11-25, see ``docs/kernels/prefill.md``).
    """

    @cute.jit
    def next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = attend.rings.k, attend.rings.v
        self.begin_step(attend, operands, ping_pong, q_stage, kv_step)
        k_ring.release(kv_step + 1)
        attend.to_logits(operands.scores(), n, row, masked)
        attend.softmax.step(operands.scores())
        operands.wait(0)
        v_ring.release(kv_step)
        operands.round_scores()

    @cute.jit
    def begin_step(self, attend, operands, ping_pong, q_stage, kv_step):
        """Issue Q K^T of a tile and P V of the one before (``kv_step``); wait for S."""
        k_ring, v_ring = attend.rings.k, attend.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        operands.rescale(attend.softmax)
        v_ring.wait_full(kv_step)
        operands.issue_pv(v_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(1)

    @cute.jit
    def last_step(self, attend, operands, kv_step):
        operands.rescale(attend.softmax)
        MainLoop.last_step(self, attend, operands, kv_step)


class PairedLoop(OverlappedLoop):
    """Main loop that runs unmasked steps in pairs with one P each, so that rounding one P does not wait for the other's
    product.

    ptxas moves the wait for P V ahead of nearly all exponentials: 237 stall cycles behind "S is there", where P V takes
    512. So the release of K depends on exponentials of the second row here, and the wait for P V follows it. Little but
    the last exponentials comes after: 181 and 261 of the 705 stall cycles from S to the end of a step, 580 of 817 in
    ``MainLoop``.

    Relative to that loop: 1.03 of the rate at 1 x 16384 and 4 x 4096 tokens at the power limit, 1.02 after a rest
    (H100, 2026-11-25). One P with the same dependence was no faster than ``OverlappedLoop``.
    """

    @cute.jit
    def unmasked_steps(self, attend, operands, ping_pong, q_stage, row, kv_step, keys):
        count, n = keys.full_end - keys.full_begin, keys.full_end - 1
        if count % 2 != 0:
            self.next_step(attend, operands, ping_pong, q_stage, row, kv_step, n, False)
            kv_step += 1
            n -= 1
        for _ in cutlass.range(count // 2, unroll=1):
            self.half_pair(attend, operands, ping_pong, q_stage, row, kv_step, n)
            self.half_pair(attend, operands.turned(), ping_pong, q_stage, row, kv_step + 1, n - 1)
            kv_step += 2
            n -= 2
        return kv_step

    @cute.jit
    def half_pair(self, attend, operands, ping_pong, q_stage, row, kv_step, n):
        """Run a step that multiplies ``operands.p`` and writes the next P to the other place."""
        k_ring, v_ring, scores = attend.rings.k, attend.rings.v, operands.scores()
        self.begin_step(attend, operands, ping_pong, q_stage, kv_step)
        attend.to_logits(scores, n, row, False)
        maxima = [attend.softmax.maximum(scores, r) for r in range(scores.rows)]
        attend.softmax.accumulate(scores, 0, maxima[0])
        attend.softmax.choose_reference(1, maxima[1])
        gate = scores.columns * GATED_EIGHTHS // 8
        sums = attend.softmax.some_exponentials(scores, 1, None, 0, gate)
        k_ring.release_by(kv_step + 1, k_ring.consumer_lanes * one_when_known(*sums))
        sums = attend.softmax.some_exponentials(scores, 1, sums, gate, scores.columns)
        attend.softmax.add_up(1, sums)
        operands.wait(0)
        v_ring.release(kv_step)
        operands.turned().round_scores()


@dataclass
class PairedOperands(Operands):
    """``Operands`` with registers for a second P."""

    other: Any

    @staticmethod
    def create(kernel, tiles: SharedTiles, place: WarpgroupPlace, addresses, geometry) -> "PairedOperands":
        one = Operands.create(kernel, tiles, place, addresses, geometry)
        parts = {field.name: getattr(one, field.name) for field in fields(one)}
        return PairedOperands(**parts, other=cute.make_rmem_tensor_like(one.p))

    def turned(self) -> "PairedOperands":
        """Return the operands with the two places of P exchanged."""
        return replace(self, p=self.other, other=self.p)
