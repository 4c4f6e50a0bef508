"""Softmax of MLA by pairs of CTAs: two threads share a row of scores, each with half of a step's keys."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_array
from hopwell.kernels.parts.core.fragment import LaneRow
from hopwell.kernels.parts.core.pipeline import Ring, SoftmaxBarrier
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.mask import IntervalMask, LogitRow
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.sm90.mla.key_halves import LatentLogits
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.pair import LeaderRing
from hopwell.kernels.sm100.mla.config import CTA_ROWS, CTAS, KEYS

THREAD_KEYS = KEYS // CTAS
FACTORS = WARPGROUP  # float32 values of a stage of the factor ring: one per thread


@device_struct(frozen=True)
class RowHalf:
    """The place of a thread of a warpgroup among the rows of its CTA. Lanes 0..63 of tensor memory have the first half
    of the rows' columns, lanes 64..127 the second half."""

    warp_row: Int32  # first row of the warp, in the tile of both CTAs
    half: Int32

    @staticmethod
    def of_thread(rank) -> "RowHalf":
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4
        return RowHalf(rank * CTA_ROWS + warp % 2 * LANES, warp // 2)


def thread() -> Int32:
    """Return the index of this thread in its warpgroup."""
    return cute.arch.thread_idx()[0] % WARPGROUP


@device_struct(frozen=True)
class Softmax:
    """The softmax warpgroup: from S in tensor memory to P in shared memory."""

    kernel: Any  # the MlaSm100: configuration only
    s_ring: LeaderRing
    p_ring: LeaderRing
    factor_ring: Ring
    factors: Int32  # shared memory for a value of each thread, one array per stage of the ring
    maxima: Int32  # shared memory for two values of each thread
    weights: Int32  # shared memory of P
    work_queue: WorkQueue
    mask: IntervalMask
    logits: LatentLogits
    state: OnlineSoftmax
    tensor_memory: Int32
    rank: Int32

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        place = RowHalf.of_thread(self.rank)
        step, posted, work = Int32(0), Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.is_work_tile:
            keys = tile.keys
            row = self.logits.logit_row(tile, place.warp_row, LaneRow)
            self.state.reset()
            for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                self.step(row, place.half, n, n >= keys.full_end, n < keys.end - 1, posted, step)
                posted += (n < keys.end - 1).to(Int32)
                step += 1
            reference, total = self.state.partial(0, LaneRow.lanes_per_row)
            self.post(posted, reference)
            self.post(posted + 1, total)
            posted += 2
            work += 1
            tile = self.work_queue.read(work)
        while tile.exists:
            work += 1
            tile = self.work_queue.read(work)

    @cute.jit
    def step(self, row: LogitRow, half, n, masked, has_before, posted, step):
        """Turn S of step ``n`` of the work tile into P; ``has_before`` tells whether it is not the tile's first."""
        first_key = n * KEYS + half * THREAD_KEYS
        row = row.of_tile(first_key)
        self.s_ring.wait_full(step)
        tmem.after_signal()
        column = self.kernel.config.columns.first("s")
        scores = LaneRow(cute.make_rmem_tensor(THREAD_KEYS, Float32), THREAD_KEYS)
        tmem.load(tmem.row_address(self.tensor_memory, column), scores)
        tmem.before_signal()
        cute.arch.sync_warp()
        self.s_ring.release(step)
        if row.needs_mask(masked):
            self.mask.apply(scores, first_key, row)
        self.state.choose_reference(0, self.largest_of_both(self.state.maximum(scores, 0), step))
        if has_before:
            self.post(posted, self.state.rescale[0])
        self.state.exponentials(scores, 0)
        self.write_p(scores, half, step)

    def largest_of_both(self, largest, step):
        """Return the larger of the values of the two threads of a row. Two arrays take turns: a thread may write its
        next value before the other one has read this one."""
        values, mine = shared_array(Float32, self.maxima + step % 2 * (4 * WARPGROUP)), thread()
        values[mine] = largest
        warps = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 2
        cute.arch.barrier(barrier_id=SoftmaxBarrier.ROWS + warps, number_of_threads=CTAS * LANES)
        return cute.arch.fmax(largest, values[mine ^ CTA_ROWS])

    @cute.jit
    def write_p(self, scores: LaneRow, half, step):
        """Write P of this thread: a row of the column block of its keys, or half of a row in 8 bits."""
        words, row = scores.words(self.kernel.dtype), thread() % CTA_ROWS
        vectors = len(words) * 4 // copy.VECTOR_BYTES
        is_whole_row = vectors == copy.VECTORS_PER_ROW
        block, first = (half, 0) if const_expr(is_whole_row) else (0, half * vectors)
        rows = self.weights + block * (CTA_ROWS * copy.SWIZZLE_ROW_BYTES)
        self.p_ring.wait_empty(step)
        for i in cutlass.range_constexpr(vectors):
            copy.store_shared(copy.swizzled_vector(rows, row, first + i), words[4 * i : 4 * i + 4])
        cute.arch.fence_proxy("async.shared", space="cta")
        self.p_ring.fill(step)

    @cute.jit
    def post(self, step, value):
        """Post a value of this thread to the thread of correction with the same index."""
        ring = self.factor_ring
        ring.wait_empty(step)
        shared_array(Float32, self.factors)[ring.stage(step) * FACTORS + thread()] = value
        cute.arch.mbarrier_arrive(ring.full_barrier(step))
