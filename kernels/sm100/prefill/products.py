"""The mma warp, which issues all products of Blackwell prefill."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from hopwell.kernels.parts.core.device import device_struct, shared_address, shared_array
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, TensorOperand, issue
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILES


def operands(kernel, tiles) -> tuple[SharedOperand, SharedOperand, SharedOperand]:
    """Return the operands Q, K and V in the shared memory of a CTA."""
    layout, columns_first, (k_rows, v_rows) = kernel.config.layout, kernel.source.columns_first, kernel.kv_rows
    q = SharedOperand.of(tiles.q, kernel.q_rows, layout.q_columns, columns_first=False)
    k = SharedOperand.of(tiles.k, k_rows, layout.operand_columns[0], columns_first)
    v = SharedOperand.of(tiles.v, v_rows, layout.operand_columns[1], columns_first, reduces_rows=True)
    return q, k, v


@device_struct(frozen=True)
class Products:
    kernel: Any  # the PrefillSm100: configuration only
    rings: Any  # fields have the names of edges
    q: SharedOperand
    k: SharedOperand
    v: SharedOperand
    tensor_memory: Int32
    pending: Int32  # as in SkippingSoftmax

    @cute.jit
    def run(self, work_queue):
        kv_step, work, has_scores = Int32(0), Int32(0), Boolean(False)
        tile = work_queue.read(work)
        while tile.exists:
            steps = tile.keys.end - tile.keys.begin
            if not has_scores:
                for index in cutlass.range_constexpr(Q_TILES):
                    self.rings.q.wait_full(Q_TILES * work + index)
            if steps == 0:
                self.give_back_q(work)
            elif not has_scores:
                self.first_step(kv_step, work, steps == 1)
            for i in cutlass.range(1, steps, unroll=1):
                self.next_step(kv_step, work, (i > 1).to(Int32), i == steps - 1)
                kv_step += 1
            following = work_queue.read(work + 1)
            following_steps = following.keys.end - following.keys.begin
            has_scores = (steps > 0) & following.exists & (following_steps > 0)
            if has_scores:
                self.last_step_and_first(kv_step, work, (steps > 1).to(Int32), following_steps == 1)
            elif steps > 0:
                self.last_step(kv_step, (steps > 1).to(Int32))
            kv_step += (steps > 0).to(Int32)
            work += 1
            tile = following
        self.drain(work, kv_step)

    def drain(self, work, kv_step) -> None:
        """Wait until all stages have been released: the shared memory of a CTA that has exited cannot take the
        arrivals."""
        q_ring, k_ring, v_ring = self.rings.q, self.rings.k, self.rings.v
        for ring, step in ((q_ring, Q_TILES * work), (k_ring, kv_step), (v_ring, kv_step)):
            for stage in range(ring.stages):
                ring.wait_empty(step + stage)

    # Loops over query tiles are not unrolled: the compiler would compute all descriptors of Q before the loop and run
    # out of uniform registers.

    @cute.jit
    def first_step(self, kv_step, work, is_last):
        """Issue S of both query tiles for the rightmost keys. Q is released by its last S."""
        k_ring = self.rings.k
        k_ring.wait_full(kv_step)
        tmem.after_signal()
        for index in cutlass.range(Q_TILES, unroll=1):
            self._issue_s(index, kv_step, work, is_last)
        with cute.arch.elect_one():
            self._release(k_ring, kv_step)

    @cute.jit
    def next_step(self, kv_step, work, accumulate, is_last):
        """For each query tile issue O += P V of the keys of ``kv_step``, then S of the next keys."""
        k_ring, v_ring = self.rings.k, self.rings.v
        k_ring.wait_full(kv_step + 1)
        v_ring.wait_full(kv_step)
        for index in cutlass.range(Q_TILES, unroll=1):
            self._issue_o(index, kv_step, accumulate)
            self._issue_s(index, kv_step + 1, work, is_last)
        with cute.arch.elect_one():
            self._release(v_ring, kv_step)
            self._release(k_ring, kv_step + 1)

    @cute.jit
    def last_step_and_first(self, kv_step, work, accumulate, is_last):
        """For each query tile complete O with V of the leftmost keys, then issue S of the rightmost keys of the next
        work tile. As in the other steps, a product of one query tile overlaps the softmax of the other."""
        k_ring, v_ring = self.rings.k, self.rings.v
        v_ring.wait_full(kv_step)
        for index in cutlass.range(Q_TILES, unroll=1):
            self._complete_o(index, kv_step, accumulate)
            k_ring.wait_full(kv_step + 1)
            self.rings.q.wait_full(Q_TILES * (work + 1) + index)
            tmem.after_signal()
            self._issue_s(index, kv_step + 1, work + 1, is_last)
        with cute.arch.elect_one():
            self._release(v_ring, kv_step)
            self._release(k_ring, kv_step + 1)

    @cute.jit
    def last_step(self, kv_step, accumulate):
        """Issue the products with V of the leftmost keys, which complete O. No work tile with keys follows."""
        v_ring = self.rings.v
        v_ring.wait_full(kv_step)
        for index in cutlass.range(Q_TILES, unroll=1):
            self._complete_o(index, kv_step, accumulate)
        with cute.arch.elect_one():
            self._release(v_ring, kv_step)

    @cute.jit
    def give_back_q(self, work):
        """Release Q of a work tile without keys."""
        with cute.arch.elect_one():
            for index in cutlass.range_constexpr(Q_TILES):
                self._release(self.rings.q, Q_TILES * work + index)

    def _release(self, ring, step) -> None:
        """Release a stage once all products issued so far have read it."""
        tmem.commit(shared_address(ring.empty + ring.stage(step)))

    def _scores(self, index):
        return self.tensor_memory + (self.kernel.config.columns.first("s") + index * self.kernel.tile.n)

    @cute.jit
    def _issue_s(self, index, kv_step, work, is_last) -> None:
        """Issue S of a query tile, and release its Q if this is the last S of the work tile."""
        k_ring, s_ring = self.rings.k, self.rings.s
        with cute.arch.elect_one():
            scores, q, k = self._scores(index), self.q.at(index), self.k.at(k_ring.stage(kv_step))
            issue(scores, q, k, Mma(self.kernel.dtype, self.kernel.tile.n), (0, self.kernel.layout.depth[0]))
            tmem.commit(shared_address(s_ring.full_barrier(Q_TILES * kv_step + index)))
            if is_last:
                self._release(self.rings.q, Q_TILES * work + index)

    @cute.jit
    def _complete_o(self, index, kv_step, accumulate) -> None:
        """Issue the last product of a query tile's O, and signal that O is complete."""
        self._issue_o(index, kv_step, accumulate)
        with cute.arch.elect_one():
            tmem.commit(shared_address(self.rings.o.full_barrier(index)))

    @cute.jit
    def _issue_o(self, index, kv_step, accumulate) -> None:
        """Issue O += P V in two parts. The first part needs the first columns of P of both halves, and O that may be
        added to; the second needs all of P. The whole warp calls this."""
        s_ring, p_ring, o_ring = self.rings.s, self.rings.p, self.rings.o
        step, early, keys = Q_TILES * kv_step + index, self.kernel.config.early_keys, self.kernel.config.half_keys
        s_ring.wait_released(step)
        o_ring.wait_released(step)
        tmem.after_signal()
        self._issue_keys(index, kv_step, (0, early), accumulate)
        p_ring.wait_full(step)
        tmem.after_signal()
        self._issue_keys(index, kv_step, (early, keys), accumulate)

    @cute.jit
    def _issue_keys(self, index, kv_step, span: cutlass.Constexpr, accumulate) -> None:
        """Issue the products of the keys ``span`` (begin, end) of both halves of the step."""
        c = self.kernel.config
        output = self.tensor_memory + (c.columns.first("o") + index * c.output_columns)
        v, product = self.v.at(self.rings.v.stage(kv_step)), Mma(self.kernel.dtype, c.output_columns, n_major_b=True)
        with cute.arch.elect_one():
            if const_expr(c.skip_softmax):
                if shared_array(Int32, self.pending)[index] != 0:
                    self._issue_halves(output, index, v, product, span, accumulate)
            else:
                self._issue_halves(output, index, v, product, span, accumulate)

    def _issue_halves(self, output, index, v, product: Mma, span: tuple[int, int], accumulate) -> None:
        keys = self.kernel.config.half_keys
        for half in range(HALVES):
            p = TensorOperand(self._scores(index) + half * keys, half * keys // product.depth)
            issue(output, p, v, product, (half * keys + span[0], half * keys + span[1]), accumulate)
