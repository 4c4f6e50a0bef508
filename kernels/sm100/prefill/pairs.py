"""Roles of prefill on CTA pairs: the mma warps of both CTAs, and a schedule whose tickets both share."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from hopwell.kernels.config.base import CTAS
from hopwell.kernels.parts.core.device import device_struct, shared_array
from hopwell.kernels.parts.partition.tiles import WorkQueue, draw_ticket, hand_back_tickets
from hopwell.kernels.sm100.common import pair, tmem
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, TensorOperand, issue
from hopwell.kernels.sm100.common.pair import LeaderRing, PairRing
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILE_ROWS
from hopwell.kernels.sm100.prefill.schedule import LoadingSchedule


@device_struct(frozen=True)
class PairOrder:
    """The order in which both mma warps take tiles: K of a step comes before V of the step before it."""

    kernel: Any  # the PrefillSm100: configuration only
    work_queue: WorkQueue
    q_ring: PairRing
    k_ring: PairRing
    v_ring: PairRing

    @cute.jit
    def run(self):
        kv_step, work, has_scores = Int32(0), Int32(0), Boolean(False)
        tile = self.work_queue.read(work)
        while tile.exists:
            steps = tile.keys.end - tile.keys.begin
            if not has_scores:
                self.q_ring.take(work)
                if steps == 0:
                    self.give_back_q(work)
                else:
                    self.scores(kv_step, work, steps == 1)
            for i in cutlass.range(1, steps, unroll=1):
                self.scores(kv_step + 1, work, i == steps - 1)
                self.output(kv_step, (i > 1).to(Int32))
                kv_step += 1
            following = self.work_queue.read(work + 1)
            following_steps = following.keys.end - following.keys.begin
            has_scores = (steps > 0) & following.exists & (following_steps > 0)
            if has_scores:
                self.q_ring.take(work + 1)
                self.scores(kv_step + 1, work + 1, following_steps == 1)
            if steps > 0:
                self.output(kv_step, (steps > 1).to(Int32))
                kv_step += 1
            work += 1
            tile = following
        # The shared memory of a CTA that has exited cannot take the arrivals.
        for ring, step in ((self.q_ring, work), (self.k_ring, kv_step), (self.v_ring, kv_step)):
            ring.drain(step)

    def give_back_q(self, work) -> None:
        """Release Q of a work tile without keys."""

    def scores(self, kv_step, work, is_last) -> None:
        """Take K of a step, whose S is the work tile's last one if ``is_last``."""
        raise NotImplementedError

    def output(self, kv_step, accumulate) -> None:
        """Take V of a step."""
        raise NotImplementedError


@device_struct(frozen=True)
class Relay(PairOrder):
    """The other CTA's mma warp: its rings tell the leader when a stage is full here."""

    def scores(self, kv_step, work, is_last) -> None:
        self.k_ring.take(kv_step)

    def output(self, kv_step, accumulate) -> None:
        self.v_ring.take(kv_step)


@device_struct(frozen=True)
class PairProducts(PairOrder):
    """The leader's mma warp: issues the products of both CTAs."""

    s_ring: LeaderRing
    p_ring: LeaderRing
    o_ring: LeaderRing
    q: SharedOperand
    k: SharedOperand
    v: SharedOperand
    tensor_memory: Int32

    @cute.jit
    def give_back_q(self, work):
        with cute.arch.elect_one():
            self.q_ring.release(work)

    def _scores(self, kv_step):
        """Return the address of S of a step."""
        return self.tensor_memory + (
            self.kernel.config.columns.first("s") + self.s_ring.stage(kv_step) * self.kernel.tile.n
        )

    def _mma(self, n: int, **majors: bool) -> Mma:
        return Mma(self.kernel.dtype, n, CTAS * Q_TILE_ROWS, **majors, ctas=CTAS)

    @cute.jit
    def scores(self, kv_step, work, is_last):
        """Issue S of a step. P of the step before last was there, and its product has been issued before."""
        self.k_ring.take(kv_step)
        tmem.after_signal()
        with cute.arch.elect_one():
            q, k = self.q.at(self.q_ring.stage(work)), self.k.at(self.k_ring.stage(kv_step))
            issue(self._scores(kv_step), q, k, self._mma(self.kernel.tile.n), (0, self.kernel.layout.depth[0]))
            pair.fill_of_both(self.s_ring, kv_step)
            self.k_ring.release(kv_step)
            if is_last:
                self.q_ring.release(work)

    @cute.jit
    def output(self, kv_step, accumulate):
        """Issue O += P V of a step in two parts. The first part needs the first columns of P of both halves, and O that
        may be added to; the second needs all of P."""
        early, keys = self.kernel.config.early_keys, self.kernel.config.half_keys
        self.v_ring.take(kv_step)
        self.s_ring.wait_released_by_both(kv_step + self.s_ring.stages)
        self.o_ring.wait_released_by_both(kv_step + self.o_ring.stages)
        tmem.after_signal()
        self._issue_keys(kv_step, (0, early), accumulate)
        self.p_ring.wait_for_both(kv_step)
        tmem.after_signal()
        self._issue_keys(kv_step, (early, keys), accumulate)
        with cute.arch.elect_one():
            self.v_ring.release(kv_step)
            pair.fill_of_both(self.o_ring, kv_step)

    @cute.jit
    def _issue_keys(self, kv_step, span: cutlass.Constexpr, accumulate) -> None:
        """Issue the products of the keys ``span`` (begin, end) of both halves of the step."""
        config = self.kernel.config
        output, keys = self.tensor_memory + config.columns.first("o"), config.half_keys
        v, product = self.v.at(self.v_ring.stage(kv_step)), self._mma(config.output_columns, n_major_b=True)
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                p = TensorOperand(self._scores(kv_step) + half * keys, half * keys // product.depth)
                issue(output, p, v, product, (half * keys + span[0], half * keys + span[1]), accumulate)


@dataclass
class PairSchedule(LoadingSchedule):
    """The schedule of both CTAs of a pair: the leader draws tickets for both, and sends them to the other CTA."""

    rank: Int32
    ticket_ring: LeaderRing
    ticket: Int32  # shared memory for a ticket

    def first_place(self) -> Int32:
        return pair.index()

    @cute.jit
    def next_ticket(self, step):
        number, ticket = step - 1, Int32(0)
        if self.rank == pair.LEADER:
            ticket = cute.arch.shuffle_sync(draw_ticket(self.addresses), 0)
            self.ticket_ring.wait_released_by_both(number)
            with cute.arch.elect_one():
                pair.send(self.ticket, ticket, self.ticket_ring.full_barrier(number))
        else:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(self.ticket_ring.full_barrier(number), pair.SENT_BYTES)
            self.ticket_ring.wait_for_both(number)
            ticket = shared_array(Int32, self.ticket)[0]
            cute.arch.sync_warp()
            self.ticket_ring.release(number)
        return Int32(self.geometry.grid) + ticket

    @cute.jit
    def hand_back(self) -> None:
        if self.rank == pair.LEADER:
            hand_back_tickets(self.addresses, Int32(self.geometry.grid))
