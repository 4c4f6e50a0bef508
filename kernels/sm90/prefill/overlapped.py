"""Main loops of Hopper prefill over 16-bit operands that hide more of a step under its products.

Both give the bits of ``Attend``: what is computed is the same, in another order.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import cutlass
import cutlass.cute as cute

from hopwell.kernels.parts.core.device import one_when_known
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.sm90.common.row_loop import Operands
from hopwell.kernels.sm90.prefill.rows import PrefillAttend

GATED_EIGHTHS = 7  # eighths of the second row's exponentials that come before the wait for P V


@dataclass
class OverlappedAttend(PrefillAttend):
    """O is brought to a new reference between the issue of Q K^T and that of P V, hence under Q K^T.

    At the end of a step, as in ``Attend``, nothing runs on the tensor cores for this warpgroup meanwhile. Against that
    order: 1.00 to 1.03 of the rate (H100 at its power limit, 2026-11-25, see ``docs/kernels/prefill.md``).
    """

    @cute.jit
    def next_step(self, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = self.rings.k, self.rings.v
        self.begin_step(operands, ping_pong, q_stage, kv_step)
        k_ring.release(kv_step + 1)
        self.to_logits(operands.scores(), n, row, masked)
        self.softmax.step(operands.scores())
        operands.wait(0)
        v_ring.release(kv_step)
        operands.round_scores()

    @cute.jit
    def begin_step(self, operands, ping_pong, q_stage, kv_step):
        """Issue Q K^T of a tile and P V of the one before (``kv_step``); S is there on return."""
        k_ring, v_ring = self.rings.k, self.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        self.rescale(operands)
        v_ring.wait_full(kv_step)
        operands.issue_pv(v_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(1)

    @cute.jit
    def last_step(self, operands, kv_step):
        self.rescale(operands)
        PrefillAttend.last_step(self, operands, kv_step)


@dataclass
class PairedAttend(OverlappedAttend):
    """Unmasked steps come two by two and have a P each, so that rounding one does not wait for the other's product.

    ptxas moves the wait for P V ahead of nearly all exponentials: 237 stall cycles behind "S is there", where P V takes
    512. The release of K therefore depends on exponentials of the second row here, and the wait for P V follows it,
    with little but the last exponentials behind it: 181 and 261 of the 705 stall cycles from S to the end of a step,
    580 of 817 in ``Attend``. Against that loop: 1.03 of the rate at 1 x 16384 and 4 x 4096 tokens at the power limit,
    1.02 after a rest (H100, 2026-11-25). One P and the same dependence were no faster than ``OverlappedAttend``.
    """

    def operands(self, row_block, column_half, addresses, geometry) -> "PairedOperands":
        return PairedOperands.create(self.kernel, self.tiles, row_block, column_half)

    @cute.jit
    def unmasked_steps(self, operands, ping_pong, q_stage, row, kv_step, keys):
        count, n = keys.full_end - keys.full_begin, keys.full_end - 1
        if count % 2 != 0:
            self.next_step(operands, ping_pong, q_stage, row, kv_step, n, False)
            kv_step += 1
            n -= 1
        for _ in cutlass.range(count // 2, unroll=1):
            self.half_pair(operands, ping_pong, q_stage, row, kv_step, n)
            self.half_pair(operands.turned(), ping_pong, q_stage, row, kv_step + 1, n - 1)
            kv_step += 2
            n -= 2
        return kv_step

    @cute.jit
    def half_pair(self, operands, ping_pong, q_stage, row, kv_step, n):
        """Do a step that multiplies ``operands.p`` and leaves the next P in the other place."""
        k_ring, v_ring, scores = self.rings.k, self.rings.v, operands.scores()
        self.begin_step(operands, ping_pong, q_stage, kv_step)
        self.to_logits(scores, n, row, False)
        maxima = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        self.softmax.accumulate(scores, 0, maxima[0])
        self.softmax.choose_reference(1, maxima[1])
        gate = scores.columns * GATED_EIGHTHS // 8
        sums = self.softmax.some_exponentials(scores, 1, None, 0, gate)
        k_ring.release_by(kv_step + 1, k_ring.consumer_lanes * one_when_known(*sums))
        sums = self.softmax.some_exponentials(scores, 1, sums, gate, scores.columns)
        self.softmax.add_up(1, sums)
        operands.wait(0)
        v_ring.release(kv_step)
        operands.turned().round_scores()


@dataclass
class PairedOperands(Operands):
    """``Operands`` with a place for one more P."""

    other: Any

    @staticmethod
    def create(kernel, tiles: SharedTiles, row_block, column_half) -> "PairedOperands":
        one = Operands.create(kernel, tiles, row_block, column_half)
        parts = {field.name: getattr(one, field.name) for field in fields(one)}
        return PairedOperands(**parts, other=cute.make_rmem_tensor_like(one.p))

    def turned(self) -> "PairedOperands":
        """Exchange the two places of P."""
        return replace(self, p=self.other, other=self.p)
