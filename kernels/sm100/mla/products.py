"""The mma warps of a pair: the leader's issues all products, and the other CTA's tells it which tiles are there."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.sm100.common import pair, tmem
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, TensorOperand, copy_box, issue
from hopwell.kernels.sm100.common.pair import LeaderRing, PairRing
from hopwell.kernels.sm100.common.resources import BOX_TENSOR_COLUMNS
from hopwell.kernels.sm100.mla.config import CTA_ROWS, CTAS, KEYS, PRODUCT_COLUMNS, Sm100MlaConfig


@device_struct(frozen=True)
class StepOrder:
    """The order in which tiles are taken: K of a step comes before V of the step before it."""

    kernel: Any  # the MlaSm100: configuration only
    work_queue: WorkQueue

    @cute.jit
    def run(self):
        step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.is_work_tile:
            self.take_q(work)
            steps = tile.keys.end - tile.keys.begin
            if steps > 0:
                self.begin_scores(work, step)
                self.scores(work, step)
                for i in cutlass.range(1, steps, unroll=1):
                    self.scores(work, step + 1)
                    self.output(step, (i > 1).to(Int32))
                    step += 1
            self.give_back_q(work)
            if steps > 0:
                self.output(step, (steps > 1).to(Int32))
                step += 1
            work += 1
            tile = self.work_queue.read(work)
        last = work
        while tile.exists:
            work += 1
            tile = self.work_queue.read(work)
        self.drain(last, step)

    @property
    def k_stages(self) -> int:
        """Stages of K in a step."""
        return self.kernel.config.k_boxes

    @property
    def v_stages(self) -> int:
        """Stages of V in a step."""
        return self.kernel.config.v_stages

    def take_q(self, work) -> None:
        """Take Q of a work tile."""

    def give_back_q(self, work) -> None:
        """Release Q after the work tile's last S."""

    def begin_scores(self, work, step) -> None:
        """Prepare Q of a work tile, whose first step is ``step``."""

    def scores(self, work, step) -> None:
        """Take K of a step."""
        raise NotImplementedError

    def output(self, step, accumulate) -> None:
        """Take V of a step."""
        raise NotImplementedError

    def drain(self, work, step) -> None:
        """Finish after ``work`` work tiles and ``step`` steps."""


@device_struct(frozen=True)
class PairOrder(StepOrder):
    """Base of the mma warps of both CTAs."""

    q_ring: PairRing
    k_ring: PairRing
    v_ring: PairRing
    p_ring: LeaderRing

    def take_q(self, work) -> None:
        self.q_ring.take(work)

    def drain(self, work, step) -> None:
        """Wait until all stages have been released in this CTA: its shared memory must not go before the arrivals."""
        self.q_ring.drain(work)
        self.k_ring.drain(step * self.k_stages)
        self.v_ring.drain(step * self.v_stages)
        self.p_ring.wait_empty(step)


@device_struct(frozen=True)
class Relay(PairOrder):
    """The other CTA's mma warp: its rings tell the leader when a stage is full here."""

    @cute.jit
    def scores(self, work, step):
        for i in cutlass.range(self.k_stages, unroll=1):
            self.k_ring.take(step * self.k_stages + i)

    @cute.jit
    def output(self, step, accumulate):
        for i in cutlass.range(self.v_stages, unroll=1):
            self.v_ring.take(step * self.v_stages + i)


@device_struct(frozen=True)
class Products(PairOrder):
    """The leader's mma warp: issues the products of both CTAs."""

    s_ring: LeaderRing
    o_ring: LeaderRing
    q: SharedOperand  # a stage is 128 bytes of each row
    k: SharedOperand
    v: SharedOperand
    p: SharedOperand
    tensor_memory: Int32

    @staticmethod
    def operands(config: Sm100MlaConfig, tiles) -> dict[str, SharedOperand]:
        value_columns = PRODUCT_COLUMNS // CTAS * config.q_bytes // HALFWORD_BYTES
        v = SharedOperand.of(tiles.v, config.stage_keys, value_columns, columns_first=False, reduces_rows=True)
        blocks = dict(q=(tiles.q, CTA_ROWS), k=(tiles.k, KEYS // CTAS), p=(tiles.p, CTA_ROWS))
        return dict(
            v=v, **{name: SharedOperand.of(*tile, BLOCK_COLUMNS, columns_first=False) for name, tile in blocks.items()}
        )

    @cute.jit
    def give_back_q(self, work):
        with cute.arch.elect_one():
            self.q_ring.release(work)

    @cute.jit
    def begin_scores(self, work, step):
        """Copy the first boxes of Q to tensor memory. Softmax has S of the work tile before, so its products with Q are
        done."""
        self.s_ring.wait_released_by_both(step)
        tmem.after_signal()
        with cute.arch.elect_one():
            for i in cutlass.range(self.kernel.config.q_boxes_in_tmem, unroll=1):
                copy_box(self.q_place(i), self.q.at(self.q_ring.stage(work) * self.k_stages + i), CTAS)

    def q_place(self, i):
        """Return the address of box ``i`` of Q in tensor memory."""
        return self.tensor_memory + (self.kernel.config.columns.first("q") + i * BOX_TENSOR_COLUMNS)

    @cute.jit
    def scores(self, work, step):
        """Issue S = Q K^T of a step, box by box as keys arrive."""
        self.s_ring.wait_released_by_both(step)
        tmem.after_signal()
        box = BLOCK_COLUMNS * HALFWORD_BYTES // self.kernel.config.q_bytes
        whole, rest = divmod(self.kernel.config.head_dim_qk, box)
        in_tmem = self.kernel.config.q_boxes_in_tmem
        # Not unrolled: the compiler would compute all descriptors and barriers before the loop over steps, and spill.
        for i in cutlass.range(min(whole, in_tmem), unroll=1):
            self.add_box(work, step, i, box, True)
        for i in cutlass.range(in_tmem, whole, unroll=1):
            self.add_box(work, step, i, box, False)
        if const_expr(rest > 0):
            self.add_box(work, step, Int32(whole), rest, in_tmem > whole)
        with cute.arch.elect_one():
            pair.fill_of_both(self.s_ring, step)

    @cute.jit
    def add_box(self, work, step, i, columns: cutlass.Constexpr[int], in_tmem: cutlass.Constexpr[bool]):
        """Add the product of the first ``columns`` columns of the step's box ``i`` to S. ``in_tmem``: whether the box
        of Q is in tensor memory."""
        place = self.tensor_memory + self.kernel.config.columns.first("s")
        mma = Mma(self.kernel.dtype, KEYS, CTAS * CTA_ROWS, ctas=CTAS)
        stage, block = step * self.k_stages + i, self.q_ring.stage(work) * self.k_stages + i
        self.k_ring.take(stage)
        tmem.after_signal()
        with cute.arch.elect_one():
            q = TensorOperand(self.q_place(i)) if const_expr(in_tmem) else self.q.at(block)
            issue(place, q, self.k.at(self.k_ring.stage(stage)), mma, (0, columns), (i > 0).to(Int32))
            self.k_ring.release(stage)

    @cute.jit
    def output(self, step, accumulate):
        """Issue O += P V of a step, or O = P V if not ``accumulate``."""
        self.p_ring.wait_for_both(step)
        self.o_ring.wait_released_by_both(step)
        tmem.after_signal()
        products = self.kernel.config.products
        place = self.tensor_memory + self.kernel.config.columns.first("o")
        mma = Mma(self.kernel.dtype, PRODUCT_COLUMNS, CTAS * CTA_ROWS, n_major_b=True, ctas=CTAS)
        for i in cutlass.range(self.v_stages, unroll=1):
            stage, adds = step * self.v_stages + i, accumulate if i < products else Int32(1)
            self.v_ring.take(stage)
            tmem.after_signal()
            with cute.arch.elect_one():
                columns = place + i % products * (PRODUCT_COLUMNS // CTAS)
                span = (0, self.kernel.config.stage_keys)
                issue(columns, self.p.at(i // products), self.v.at(self.v_ring.stage(stage)), mma, span, adds)
                self.v_ring.release(stage)
        with cute.arch.elect_one():
            pair.release_to_both(self.p_ring, step)
            pair.fill_of_both(self.o_ring, step)
