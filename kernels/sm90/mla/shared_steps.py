"""The consumer role of MLA decode of many rows: two warpgroups, left and right, that share each step."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.row_shares import Partials
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import NamedBarrier, Rings
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.sm90.decode.rows import store_rows
from hopwell.kernels.sm90.mla.key_halves import LatentLogits

WARP_SUM_BYTES = LANES * RowFragment.rows * 4  # of a warp: the row sums of each lane


@device_struct
class SharedSteps:
    """The two consumer warpgroups over the work tiles. Subclasses have the steps of left and of right."""

    kernel: Any  # configuration only
    tiles: SharedTiles
    rings: Rings
    work_queue: WorkQueue
    mask: IntervalMask
    softmax: OnlineSoftmax
    output_scale: Float32
    combine: Partials
    logits: LatentLogits

    sums_at = 0  # start of the sums in the memory of both, behind other values

    @staticmethod
    def operands(kernel, tiles: SharedTiles) -> tuple[Any, Any]:
        """Return the operands of left and of right."""
        raise NotImplementedError

    def left_step(self, operands, q_stage, row, step, n, masked) -> None:
        """Run the left warpgroup through tiles A and B of step ``n`` of the work tile, the ``step``-th of this CTA."""
        raise NotImplementedError

    def right_step(self, operands, q_stage, row, step, n, masked, is_first) -> None:
        """Run the right warpgroup through the same tiles; ``is_first`` tells whether the step is the tile's first."""
        raise NotImplementedError

    def give_back_q(self, operands, work, consumer) -> None:
        """Release Q after the work tile's last products."""
        self.rings.q.release(work)

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        q_ring = self.rings.q
        consumer = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) - 1
        left, right = self.operands(self.kernel, self.tiles)
        warp_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS
        step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.is_work_tile:
            keys = tile.keys
            # This barrier, like the barrier in Attend.run, tells the compiler that the warps have converged.
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + consumer, number_of_threads=WARPGROUP)
            self.softmax.reset()
            left.o.fill(0.0)
            row, q_stage = self.logits.logit_row(tile, warp_row), q_ring.stage(work)
            q_ring.wait_full(work)
            if keys.begin < keys.end:
                if consumer == 0:
                    for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                        self.left_step(left, q_stage, row, step, n, n >= keys.full_end)
                        step += 1
                else:
                    for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                        self.right_step(right, q_stage, row, step, n, n >= keys.full_end, n == keys.end - 1)
                        step += 1
            self.give_back_q(left, work, consumer)
            self.add_sums()
            self.store(left, tile, work, warp_row, consumer, addresses, geometry)
            work += 1
            tile = self.work_queue.read(work)
        partition = self.kernel.partition
        partition.finish(self.combine, self.work_queue, tile, work, addresses, geometry, self.output_scale)

    def scores(self, operands, q_stage, step, kv_halves: tuple[int, ...]) -> None:
        """Issue S of a tile, one half at a time as they arrive."""
        for i, kv_half in enumerate(kv_halves):
            ring = (self.rings.k, self.rings.v)[kv_half]
            ring.wait_full(step)
            operands.issue_half(kv_half, q_stage, ring.stage(step), i > 0)

    @cute.jit
    def store(self, operands, tile, work, warp_row, column_half, addresses, geometry):
        """Write this warp's rows to the output, or to a partial if the request has several chunks."""
        columns = self.kernel.config.head_dim_v // self.kernel.config.v_splits
        self.kernel.partition.wait_slot(self.rings, work)
        if tile.chunks == 1:
            rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
            store_rows(operands, rows, self.softmax, self.kernel.out_dtype, columns, warp_row, column_half)
        else:
            self.store_partial(operands, tile.partial_id, warp_row, column_half)
        self.kernel.partition.stored(self.combine, self.rings, tile, work)

    @cute.jit
    def store_partial(self, operands, partial_id, warp_row, column_half) -> None:
        output = operands.output()
        if warp_row < self.combine.slots.rows:
            for r in cutlass.range_constexpr(output.rows):
                reference, total = self.softmax.partial(r, output.lanes_per_row)
                self.combine.store(partial_id, output, r, reference, total, warp_row, column_half)

    @cute.jit
    def add_sums(self) -> None:
        """Add the other warpgroup's row sums to this one's; each has processed half of the keys."""
        mine, its = self._sums(0), self._sums(1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine[r] = self.softmax.row_sum[r]
        self.meet()
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.row_sum[r] = self.softmax.row_sum[r] + its[r]
        self.meet()

    def meet(self) -> None:
        """Wait for both warpgroups."""
        cute.arch.barrier(barrier_id=NamedBarrier.COMBINE, number_of_threads=2 * WARPGROUP)

    def _sums(self, other: int):
        """Return the location of the sums of a thread's rows, or of the matching thread's rows in
        the other warpgroup."""
        thread = (cute.arch.thread_idx()[0] - WARPGROUP) ^ (other * WARPGROUP)
        return self._state(self.sums_at + thread * RowFragment.rows, RowFragment.rows)

    def _state(self, place, size: int):
        pointer = cute.recast_ptr(self.tiles.staging, dtype=Float32)
        return cute.make_tensor(pointer + place, cute.make_layout(size))
