"""Correction of MLA by pairs of CTAs: rescales O in tensor memory, stores results and partials, and combines."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.row_shares import Partials
from hopwell.kernels.parts.core.device import device_struct, shared_array
from hopwell.kernels.parts.core.fragment import LaneRow, RowFragment
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.parts.partition.split_kv import SplitTile
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.sm90.decode.rows import store_rows
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.pair import LeaderRing
from hopwell.kernels.sm100.mla.config import CTA_ROWS, CTAS
from hopwell.kernels.sm100.mla.softmax import FACTORS, RowHalf, thread


@device_struct(frozen=True)
class HalfRows:
    """Half of the columns of O of 16 rows, with the state of their softmax."""

    fragment: RowFragment
    states: tuple  # (reference, sum) of each row of the fragment

    def output(self) -> RowFragment:
        return self.fragment

    def partial(self, r: int, lanes_per_row: int):
        """Return (reference, sum) of row r."""
        return self.states[r]


@device_struct(frozen=True)
class Correction:
    """The correction warpgroup. A warp has 32 rows of its CTA and half of the columns."""

    kernel: Any  # the MlaSm100: configuration only
    o_ring: LeaderRing
    factor_ring: Ring
    factors: Int32  # shared memory, as in Softmax
    work_queue: WorkQueue
    rings: Any
    combine: Partials
    output_scale: Float32
    tensor_memory: Int32
    rank: Int32

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        step, taken, work = Int32(0), Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.is_work_tile:
            steps = tile.keys.end - tile.keys.begin
            for _ in cutlass.range(1, steps, unroll=1):
                factor = self.take(taken)
                self.o_ring.wait_full(step)
                self.correct(factor)
                cute.arch.sync_warp()
                self.o_ring.release(step)
                taken += 1
                step += 1
            reference, total = self.take(taken), self.take_sum(taken + 1)
            taken += 2
            if steps > 0:
                self.o_ring.wait_full(step)
                tmem.after_signal()
            self.kernel.partition.wait_slot(self.rings, work)
            self.store(tile, reference, total, steps > 0, addresses, geometry)
            self.kernel.partition.stored(self.combine, self.rings, tile, work)
            if steps > 0:
                cute.arch.sync_warp()
                self.o_ring.release(step)
                step += 1
            work += 1
            tile = self.work_queue.read(work)
        partition = self.kernel.partition
        partition.finish(self.combine, self.work_queue, tile, work, addresses, geometry, self.output_scale)

    @cute.jit
    def take(self, step):
        """Return the value that the softmax thread of this thread's row half has posted."""
        self.factor_ring.wait_full(step)
        value = self._posted(step)[thread()]
        self.factor_ring.release(step)
        return value

    @cute.jit
    def take_sum(self, step):
        """Return the sum of the values that the two softmax threads of this thread's row have posted."""
        self.factor_ring.wait_full(step)
        values = self._posted(step)
        total = values[thread()] + values[thread() ^ CTA_ROWS]
        self.factor_ring.release(step)
        return total

    def _posted(self, step):
        return shared_array(Float32, self.factors + self.factor_ring.stage(step) * (4 * FACTORS))

    @property
    def columns(self) -> int:
        """Columns of O in a lane: half of a row."""
        return self.kernel.config.head_dim_v // CTAS

    def _output(self, lane=0):
        """Return the address of O in this warp's lanes from ``lane`` on."""
        return tmem.row_address(self.tensor_memory, self.kernel.config.columns.first("o")) + (lane << 16)

    @cute.jit
    def correct(self, factor):
        """Multiply O by each row's factor. Most factors are 1, and a warp skips O if all of its rows have factor 1."""
        if cute.arch.vote_any_sync(factor != 1.0):
            tmem.after_signal()
            at_once = self.kernel.config.rescaled_columns
            values = LaneRow(cute.make_rmem_tensor(at_once, Float32), at_once)
            for first in cutlass.range_constexpr(0, self.columns, at_once):
                place = self._output() + first
                tmem.load(place, values)
                tmem.store_words(place, [values.get(0, c) * factor for c in range(at_once)])
            tmem.wait_stores()
        tmem.before_signal()

    @cute.jit
    def store(self, tile: SplitTile, reference, total, has_keys, addresses, geometry):
        """Write this warp's half rows to the output, or to a partial if the request has several chunks."""
        place = RowHalf.of_thread(self.rank)
        for first in cutlass.range(0, LANES, RowFragment.warp_rows, unroll=1):
            rows = self.load(first, reference, total, has_keys)
            warp_row = place.warp_row + first
            if tile.chunks == 1:
                dtype = self.kernel.out_dtype
                packed = PackedRows.create(addresses, geometry, tile, self.output_scale, dtype.width // 8)
                store_rows(rows, packed, rows, dtype, self.columns, warp_row, place.half)
            elif warp_row < self.combine.slots.rows:
                self.store_partial(rows, tile.partial_id, warp_row, place.half)
        tmem.before_signal()

    @cute.jit
    def load(self, first, reference, total, has_keys) -> HalfRows:
        """Load 16 rows of this warp from row ``first`` on."""
        fragment = RowFragment(
            cute.make_rmem_tensor(self.columns // 2, Float32), self.columns // RowFragment.lanes_per_row
        )
        fragment.registers.fill(0.0)
        if has_keys:
            tmem.load_rows(self._output(first), fragment)
        states = []
        for r in cutlass.range_constexpr(RowFragment.rows):
            lane = first + RowFragment.first_row() + RowFragment.row_offset(r)
            states.append(tuple(cute.arch.shuffle_sync(value, lane) for value in (reference, total)))
        return HalfRows(fragment, tuple(states))

    def store_partial(self, rows: HalfRows, partial_id, warp_row, half) -> None:
        for r in range(RowFragment.rows):
            self.combine.store(partial_id, rows.fragment, r, *rows.states[r], warp_row, half)
