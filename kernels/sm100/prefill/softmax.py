"""Softmax of Blackwell prefill: two threads share a row of scores, and half of their arithmetic works on pairs."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.parts.core.device import barrier_all, device_struct, ptx, shared_array
from hopwell.kernels.parts.core.fragment import LaneRow
from hopwell.kernels.parts.core.pipeline import SoftmaxBarrier
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.epilogue import RowResults
from hopwell.kernels.parts.rows.head_scales import output_scale_of, with_scale_of
from hopwell.kernels.parts.rows.mask import IntervalMask, LogitRow
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import E4M3_POWER, OnlineSoftmax, tile_reference
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.prefill.config import HALVES, Q_TILE_ROWS, ROLES

# 2^f for -1/2 <= f <= 1/2 is 1 + f * (this polynomial, lowest power first), with a relative error of at most 3e-6. A
# power of two is exact.
_POWERS = (0.6931241750717163, 0.24024099111557007, 0.055906426161527634, 0.009582852013409138)
# Adding this to a number up to 2^22 leaves the nearest integer in the lowest bits.
_ROUNDING = float(3 << 22)
_LEAST_EXPONENT = -127.0  # of a nonzero result; the polynomial is 0 at exactly this exponent
SLACK_BELOW = 2.0  # powers of two by which all e4m3 weights of a tile may lie below their largest value
EXCHANGED_BYTES = 2 * 4 * LANES * ROLES.roles["softmax"].warps  # two float32 of each softmax thread
LARGEST_SUM = 2.0**64  # of the exponentials of a step, at most 2^SLACK, or 2^headroom in e4m3, each


@dataclass
class PackedSoftmax(OnlineSoftmax):
    """Softmax that processes two columns per instruction if possible, and evaluates some
    exponentials as polynomials."""

    polynomial_eighths: int

    only_rises = True  # whether references move up only

    @classmethod
    def of(cls, scale, polynomial_eighths: int) -> "PackedSoftmax":
        common = OnlineSoftmax.create(scale, LaneRow.rows)
        return cls(**vars(common), polynomial_eighths=polynomial_eighths)

    @cute.jit
    def exponentials(self, scores, r: cutlass.Constexpr[int]) -> None:
        offset = -(self._safe(self.reference[r]) * self.scale)
        if const_expr(self.headroom > 0.0):
            offset += self.headroom
        scale, offset = (self.scale, self.scale), (offset, offset)
        sums = [(Float32(0.0), Float32(0.0))] * 2
        for pair in cutlass.range_constexpr(scores.columns // 2):
            values = (scores.get(r, 2 * pair), scores.get(r, 2 * pair + 1))
            exponents = cute.arch.fma_packed_f32x2(values, scale, offset)
            powers = self._powers(exponents, pair)
            scores.set(r, 2 * pair, powers[0])
            scores.set(r, 2 * pair + 1, powers[1])
            sums[pair % 2] = cute.arch.add_packed_f32x2(sums[pair % 2], powers)
        even, odd = cute.arch.add_packed_f32x2(*sums)
        # Polynomials turn NaN into a number near 2^128. The sum shows it before later steps could scale it down.
        self.row_sum[r] += Float32(math.nan) if even + odd > LARGEST_SUM else even + odd

    def _powers(self, exponents: tuple, pair: int) -> tuple:
        # Both kinds are spread evenly, so that both pipes stay busy. The slower kind comes first.
        if (pair + 2) * self.polynomial_eighths % 8 >= self.polynomial_eighths:
            return tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
        return polynomial_powers(exponents)


@dataclass
class Fp8PackedSoftmax(PackedSoftmax):
    """Softmax of e4m3 weights, which reach 2^headroom.

    The reference moves up to any larger score, because e4m3 ends soon beyond 2^headroom. It moves down to a tile whose
    scores all lie further below it than SLACK_BELOW, as in ``TileSoftmax``. e4m3 ends at 2^-9, so rounding relative to
    a far larger score would take such a tile's weight. In between it stays, and O needs no correction (lazy rescale).
    """

    headroom = E4M3_POWER
    only_rises = False

    @cute.jit
    def choose_reference(self, r: cutlass.Constexpr[int], row_max) -> None:
        self.largest[r] = cute.arch.fmax(self.largest[r], row_max)
        reference, before = tile_reference(self, r, row_max), self.reference[r]
        # A tile that the row does not see leaves the reference as it is.
        is_near = (reference * self.scale >= before * self.scale - SLACK_BELOW) | (row_max == -Float32.inf)
        self.follow(r, before if (row_max <= before) & is_near else reference)


def polynomial_powers(exponents: tuple) -> tuple:
    """Return 2^x of two x up to 128, computed on the multiplication and integer pipes."""
    # With ``nan``, a NaN becomes a number near 2^128, which is infinity in P, instead of 0.
    exponents = tuple(cute.arch.fmax(exponent, Float32(_LEAST_EXPONENT), nan=True) for exponent in exponents)

    def both(value: float) -> tuple:
        return (Float32(value), Float32(value))

    shifted = cute.arch.add_packed_f32x2(exponents, both(_ROUNDING))
    rounded = cute.arch.add_packed_f32x2(shifted, both(-_ROUNDING))
    fractions = cute.arch.fma_packed_f32x2(rounded, both(-1.0), exponents)
    powers = both(_POWERS[-1])
    for factor in (*_POWERS[-2::-1], 1.0):
        powers = cute.arch.fma_packed_f32x2(powers, fractions, both(factor))
    return tuple(_add_exponent(power, integer) for power, integer in zip(powers, shifted, strict=True))


def _add_exponent(power, integer):
    """Return ``power`` times 2 to the integer in the lowest bits of ``integer``."""
    return ptx(
        "{ .reg .b32 a, b; mov.b32 a, {$r1}; mov.b32 b, {$r0}; shl.b32 a, a, 23; add.s32 b, a, b; mov.b32 {$w0}, b; }",
        power,
        integer,
        results=[Float32],
    )


@device_struct(frozen=True)
class Softmax:
    """The softmax warpgroups: two for each query tile, each with half of the keys of a step.

    The two threads of a row choose the same reference. They exchange their maxima through shared memory in steps in
    which a reference may move, and their sums at the end of a work tile.
    """

    kernel: Any  # the PrefillSm100: configuration only
    s_ring: Any
    p_ring: Any
    factor_ring: Any
    factors: Int32  # shared memory for a factor of each row, one array per stage of the ring
    exchanged: Int32  # shared memory for a value of each thread, two arrays used in turn
    work_queue: WorkQueue
    mask: IntervalMask
    score: ScoreMap
    state: PackedSoftmax
    output_scale: Any  # a Float32 or HeadScales
    tensor_memory: Int32

    @cute.jit
    def run(self, addresses, geometry):
        warpgroup = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4)
        q_tiles = self.kernel.config.q_tiles
        index, half = Int32(0) if q_tiles == 1 else warpgroup // HALVES, warpgroup % HALVES
        row, keys = cute.arch.thread_idx()[0] % Q_TILE_ROWS, self.kernel.config.half_keys
        column = self.kernel.config.columns.first("s") + index * self.kernel.tile.n + half * keys
        scores = tmem.row_address(self.tensor_memory, column)
        kv_step, posted, work = Int32(0), Int32(0), Int32(0)
        tile = self.work_queue.look(work)
        while tile.exists:
            span, request = tile.keys, tile.request
            tile_row = self.kernel.first_row(index) + row
            position = request.first_position + tile.first_row + tile_row
            logit_row = LogitRow((position,), request.kv_len, self.score.slope(tile.head))
            role = self.of_tile(tile, addresses)
            role.state.reset()
            if span.begin < span.end:
                steps = Steps(scores, index, q_tiles, half, row, kv_step, posted, work, span.end - 1)
                step = partial(role.step, steps, logit_row)
                for n in cutlass.range(span.end - 1, span.full_end - 1, -1, unroll=1):
                    step(n, True)
                for n in cutlass.range(span.full_end - 1, span.full_begin - 1, -1, unroll=1):
                    step(n, False)
                if const_expr(self.mask.has_left_edge):
                    for n in cutlass.range(span.full_begin - 1, span.begin - 1, -1, unroll=1):
                        step(n, True)
                kv_step += span.end - span.begin
                posted += span.end - span.begin - 1
            turn = kv_step + self.ending_turns * work
            other_sum = self.exchange(turn, half, self.state.row_sum[0])
            self.state.row_sum[0] = self.state.row_sum[0] + other_sum
            if const_expr(not self.exchanges_always):
                self.state.largest[0] = self.larger_of_both(turn + 1, half, self.state.largest[0])
            # The tile is read again here, so that the steps need no registers for the values of the row results.
            tile = self.work_queue.look(work)
            self.work_queue.release(work)
            if half == 0:
                tile_row = self.kernel.first_row(index) + cute.arch.thread_idx()[0] % Q_TILE_ROWS
                count = tile.request.q_len - tile.first_row
                head_dim = self.kernel.config.head_dim_qk
                role = self.of_tile(tile, addresses)
                results = RowResults.create(tile, count, role.score, head_dim, addresses, geometry)
                scale = output_scale_of(self.output_scale, addresses, tile)
                factor = results.finish(role.state, 0, tile_row, LaneRow.lanes_per_row) * scale
                cute.arch.sync_warp()  # rows without results have diverged the lanes
                self.post(q_tiles * posted + index, row, factor)
            posted += 1
            work += 1
            tile = self.work_queue.look(work)

    def of_tile(self, tile, addresses) -> "Softmax":
        """Return this role with the softmax scale of the tile's KV head, if each KV head has its own."""
        if not self.kernel.config.k_head_scales:
            return self
        score, state = with_scale_of(self.score, self.state, addresses, tile.kv_head)
        return replace(self, score=score, state=state)

    @cute.jit
    def step(self, steps: "Steps", row: LogitRow, n, masked: cutlass.Constexpr):
        """Turn this thread's half of S of tile ``n`` into P, and post the factor of O for the product P V."""
        done, keys = steps.last - n, self.kernel.config.half_keys
        self.s_ring.wait_full(steps.of_tile(steps.kv_step + done))
        tmem.after_signal()
        if const_expr(self.kernel.config.loads_maximum and not masked):
            scores, maximum = tmem.load_row_with_maximum(self.place(steps, done), keys)
        else:
            scores, first_key = tmem.load_row(self.place(steps, done), keys), n * self.kernel.tile.n + steps.half * keys
            self.score.apply(scores, row.slope, first_key, row.positions)
            if const_expr(masked):
                self.mask.apply(scores, first_key, row)
            maximum = self.state.maximum(scores, 0)
        turn = steps.kv_step + self.ending_turns * steps.work + done
        self.weigh(steps, scores, row, self.row_maximum(turn, steps.half, maximum), done)

    def place(self, steps: "Steps", done):
        """Return the address of this thread's half of S after ``done`` steps of the work tile. The only query tile of a
        CTA has two places in turn."""
        if self.kernel.config.q_tiles > 1:
            return steps.scores
        return steps.scores + self.s_ring.stage(steps.kv_step + done) * self.kernel.tile.n

    @cute.jit
    def row_maximum(self, turn, half, maximum):
        """Return the maximum of this thread's row, or just of its half if no row of the warp moves its reference. Most
        steps move none, and then need no exchange."""
        largest = maximum
        if const_expr(self.exchanges_always):
            largest = self.larger_of_both(turn, half, maximum)
        else:
            stays = not self.state.moves(0, maximum)
            if not barrier_all(stays, self.rows_barrier(), HALVES * LANES):
                largest = self.larger_of_both(turn, half, maximum)
        return largest

    @property
    def exchanges_always(self) -> bool:
        """Whether threads exchange the maxima of all steps. Both then know the largest score of a row."""
        return not self.state.only_rises

    @property
    def ending_turns(self) -> int:
        """Exchanges at the end of a work tile: sums, and the largest scores if not all maxima have been exchanged."""
        return 1 if self.exchanges_always else 2

    def larger_of_both(self, turn, half, value):
        """Return the larger of the values of the two threads of this row."""
        return cute.arch.fmax(value, self.exchange(turn, half, value))

    @staticmethod
    def rows_barrier():
        """Return the barrier of the two warps that share this warp's rows."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return SoftmaxBarrier.ROWS + (warp // (4 * HALVES) * 4 + warp % 4)

    @cute.jit
    def exchange(self, turn, half, value):
        """Return the ``value`` of the other thread of this row. ``turn`` counts exchanges.

        Turns alternate between two arrays. A thread writes this array again only in the turn after next, or later. A
        barrier of the next turn comes before that, so the other thread has read its value by then.
        """
        thread = cute.arch.thread_idx()[0]
        values = shared_array(Float32, self.exchanged + turn % 2 * (EXCHANGED_BYTES // 2))
        values[thread] = value
        cute.arch.barrier(barrier_id=self.rows_barrier(), number_of_threads=HALVES * LANES)
        return values[thread + WARPGROUP * (1 - 2 * half)]

    @cute.jit
    def weigh(self, steps: "Steps", scores, row: LogitRow, maximum, done):
        """Turn logits into P, after ``done`` steps of the work tile."""
        self.state.choose_reference(0, maximum)
        self.post_rescale(steps, done)
        self.write_p(steps, scores, done)

    @cute.jit
    def post_rescale(self, steps: "Steps", done):
        if (done > 0) & (steps.half == 0):
            self.post(steps.of_tile(steps.posted + done - 1), steps.row, self.state.rescale[0])

    @cute.jit
    def write_p(self, steps: "Steps", scores, done):
        config, dtype = self.kernel.config, self.kernel.dtype
        for column in cutlass.range_constexpr(0, config.half_keys, tmem.COLUMNS_AT_ONCE):
            if const_expr(column == config.early_keys):
                self.give_early_p(steps, done)
            part = scores.part(column, min(tmem.COLUMNS_AT_ONCE, config.half_keys - column))
            self.state.exponentials(part, 0)
            tmem.store_words(self.place(steps, done) + column * dtype.width // 32, part.words(dtype))
        self.give_late_p(steps, done)

    @cute.jit
    def give_early_p(self, steps: "Steps", done):
        """Signal that the first columns of P have replaced S. Their product overlaps the remaining exponentials."""
        tmem.wait_stores()
        tmem.before_signal()
        cute.arch.sync_warp()
        self.s_ring.release(steps.of_tile(steps.kv_step + done))

    @cute.jit
    def give_late_p(self, steps: "Steps", done):
        """Signal that all columns of P have replaced S."""
        tmem.wait_stores()
        tmem.before_signal()
        self.p_ring.fill(steps.of_tile(steps.kv_step + done))

    @cute.jit
    def post(self, step, row, factor):
        """Post the factor for this thread's row of O to correction."""
        ring = self.factor_ring
        ring.wait_empty(step)
        shared_array(Float32, self.factors)[ring.stage(step) * Q_TILE_ROWS + row] = factor
        cute.arch.mbarrier_arrive(ring.full_barrier(step))


@device_struct(frozen=True)
class Steps:
    """Position of a thread in the steps of all work tiles."""

    scores: Int32  # its half of a row in tensor memory, in the first place of the query tile's scores
    index: Int32  # of the query tile in this CTA
    q_tiles: int  # of a CTA
    half: Int32  # of the keys of a step
    row: Int32  # within the query tile
    kv_step: Int32  # steps before this work tile
    posted: Int32  # factors before this work tile
    work: Int32  # work tiles before this one
    last: Int32  # the rightmost tile of keys, which comes first

    def of_tile(self, step):
        """Return the step in rings whose stages the query tiles of a CTA use in turn."""
        return self.q_tiles * step + self.index
