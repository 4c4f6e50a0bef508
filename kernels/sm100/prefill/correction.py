"""Correction warpgroup: rescales O in tensor memory when a reference moves, then normalises and stores it."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.parts.core.device import device_struct, shared_array
from hopwell.kernels.parts.core.fragment import LaneRow
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.epilogue import ConvertedRows, output_rows
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.prefill.config import Q_TILE_ROWS


@device_struct(frozen=True)
class Correction:
    kernel: Any  # the PrefillSm100: configuration only
    factor_ring: Any
    o_ring: Any
    factors: Int32  # shared memory, as in Softmax
    work_queue: WorkQueue
    tensor_memory: Int32

    @cute.jit
    def run(self, addresses, geometry):
        row = cute.arch.thread_idx()[0] % Q_TILE_ROWS
        posted, kv_step, stored, work = Int32(0), Int32(0), Int32(0), Int32(0)
        q_tiles = self.kernel.config.q_tiles
        for index in cutlass.range_constexpr(q_tiles):
            self.o_ring.release(index)
        tile = self.work_queue.read(work)
        while tile.exists:
            steps = tile.keys.end - tile.keys.begin
            for _ in cutlass.range(1, steps, unroll=1):
                kv_step += 1
                for index in cutlass.range(q_tiles, unroll=1):
                    self.correct(index, q_tiles * posted + index, row, kv_step)
                    self.o_ring.release(q_tiles * kv_step + index)
                posted += 1
            if steps > 0:
                kv_step += 1
            kind = output_rows(self.kernel.out_dtype, stages_pairs=False)
            rows = kind.of(tile, self.kernel.config.head_dim_v, addresses, geometry)
            for index in cutlass.range(q_tiles, unroll=1):
                factor = self.take(q_tiles * posted + index, row)
                if steps > 0:
                    done = kv_step - 1 if const_expr(self.kernel.config.is_pair) else q_tiles * stored + index
                    self.o_ring.wait_full(done)
                    tmem.after_signal()
                self.store(rows, index, factor, steps > 0)
                if steps > 0:
                    self.o_ring.release(q_tiles * kv_step + index)
            if steps > 0:
                stored += 1
            posted += 1
            work += 1
            tile = self.work_queue.read(work)

    @cute.jit
    def take(self, step, row):
        """Return this thread's factor of ``step`` from shared memory."""
        ring = self.factor_ring
        ring.wait_full(step)
        factor = shared_array(Float32, self.factors)[ring.stage(step) * Q_TILE_ROWS + row]
        ring.release(step)
        return factor

    def output(self, index) -> Int32:
        """Return the address of this thread's row of O of a query tile."""
        c = self.kernel.config
        return tmem.row_address(self.tensor_memory, c.columns.first("o") + index * c.output_columns)

    @cute.jit
    def correct(self, index, step, row, kv_step):
        """Multiply O by the factors of ``step``, for the product of ``kv_step``. Most factors are 1, and a warp skips O
        if all of its rows have factor 1 (lazy rescale).

        In single CTAs, S of the step was issued after the preceding product with V, so no product of O is in flight.
        Pairs issue S first, and signal each product.
        """
        factor = self.take(step, row)
        if const_expr(self.kernel.config.is_pair):
            self.o_ring.wait_full(kv_step - 1)
        if cute.arch.vote_any_sync(factor != 1.0):
            tmem.after_signal()
            for first in cutlass.range_constexpr(0, self.kernel.config.output_columns, tmem.COLUMNS_AT_ONCE):
                place = self.output(index) + first
                values = tmem.load_row(place)
                tmem.store_words(place, [values.get(0, c) * factor for c in range(tmem.COLUMNS_AT_ONCE)])
            tmem.wait_stores()
        tmem.before_signal()
        cute.arch.sync_warp()

    @cute.jit
    def store(self, rows: ConvertedRows, index, factor, has_keys):
        """Write O times ``factor`` to this thread's row of the output, or zeros if no row has a key."""
        token = self.kernel.first_row(index) + cute.arch.thread_idx()[0] % Q_TILE_ROWS
        for first in cutlass.range_constexpr(0, rows.columns, tmem.COLUMNS_AT_ONCE):
            values = LaneRow(cute.make_rmem_tensor(tmem.COLUMNS_AT_ONCE, Float32), tmem.COLUMNS_AT_ONCE)
            values.registers.fill(0.0)
            if has_keys:
                tmem.load(self.output(index) + first, values)
            if token < rows.count:
                scaled = [values.get(0, c) * factor for c in range(min(tmem.COLUMNS_AT_ONCE, rows.columns - first))]
                rows.write_row(token, scaled, self.kernel.out_dtype, first)
            cute.arch.sync_warp()
        tmem.before_signal()
        cute.arch.sync_warp()
