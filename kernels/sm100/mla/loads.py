"""Loads of MLA by pairs of CTAs. Operand B of a product of both CTAs is half in each CTA. So each CTA loads half of a
step's keys for Q K^T. For P V it loads half of the value's columns of all keys.

The unit is a box of 64 keys and 128 bytes of each, 8 KiB. A stage of K is a box. A stage of V is two boxes with 128 of
the 256 columns of a product: 64 keys of 16 bits, or 128 keys of 8 bits.
"""

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.parts.dequant.latent_rows import LANES_PER_ROW, DequantizedOperand, LatentRowFormat
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import KvOperand, PageBoxes
from hopwell.kernels.parts.load.page_size import page_size
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.sm100.mla.config import CTAS, Sm100MlaConfig

BOX_BYTES = 64 * copy.SWIZZLE_ROW_BYTES
VALUE_BOXES = 2  # of a stage of V


@dataclass
class LatentBoxes(PageBoxes):
    """A work tile's keys in pages of 8 tokens and more, fetched by TMA. A tile has 64 keys, a box one column block."""

    columns_first = False

    @property
    def box_bytes(self) -> int:
        return self.box_rows * copy.SWIZZLE_ROW_BYTES

    def look_up(self, tile) -> tuple:
        """Read the table for a tile."""
        return self.locate(tile)[:2]

    def places(self, tile, found: tuple) -> list:
        """Return (slot, core matrix of rows) of each TMA box of a tile, from the result of :meth:`look_up`."""
        slots, core_matrices = found
        return [(cute.arch.shuffle_sync(slots, i), self._core_matrix(core_matrices, i)) for i in range(self.boxes)]

    def needs_zeros(self, first_key, keys: int):
        """Whether some of ``keys`` keys from ``first_key`` on have to be zeroed after their load."""
        return first_key + keys > self.end_key

    def expect(self, barrier, size: int) -> None:
        """Announce ``size`` bytes at a barrier. Called by a whole warp, as are the functions below."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def load_block(self, places: list, block, destination, barrier) -> None:
        """Issue the loads of column block ``block`` of a tile."""
        with cute.arch.elect_one():
            for i, (slot, core_matrix) in enumerate(places):
                coordinates = (block * BLOCK_COLUMNS, core_matrix * copy.ATOM_ROWS, slot)
                copy.tma_load(self.descriptor, destination + i * self.box_bytes, barrier, coordinates, self.policy)

    def finish(self, barrier) -> None:
        """Do nothing: TMA completes the barrier."""


class LaneCopies:
    """Mixin of keys that lanes copy, of which rows that are not needed become zeros."""

    def look_up(self, tile) -> list:
        return self.read_table(tile)

    def needs_zeros(self, first_key, keys: int) -> bool:
        return False

    def expect(self, barrier, size: int) -> None:
        """Do nothing: every lane arrives when its copies are done."""

    def finish(self, barrier) -> None:
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)


@dataclass
class LatentRows(LaneCopies, PageRows):
    """A work tile's keys in smaller pages or in a top-k list."""

    def places(self, tile, found: list) -> list:
        """Return the addresses of the rows that a lane copies vectors of: eight lanes share a row."""
        rows_at_once, row = LANES // copy.VECTORS_PER_ROW, cute.arch.lane_idx() // copy.VECTORS_PER_ROW
        addresses = self.locate(tile, found)
        return [
            cute.arch.shuffle_sync(address, first + row)
            for address in addresses
            for first in range(0, LANES, rows_at_once)
        ]

    def load_block(self, places: list, block, destination, barrier) -> None:
        lane, vectors = cute.arch.lane_idx(), copy.VECTORS_PER_ROW
        vector, offset = lane % vectors, block * copy.SWIZZLE_ROW_BYTES
        # Only the last block of K may be narrower than a box.
        is_whole = not isinstance(block, int) or (block + 1) * vectors <= self.vectors
        for i, row in enumerate(places):
            wanted = row != 0 if is_whole else (row != 0) & (vector < self.vectors - block * vectors)
            target = copy.swizzled_vector(destination, i * (LANES // vectors) + lane // vectors, vector)
            copy.async_copy_or_zero(target, row + (offset + vector * copy.VECTOR_BYTES), wanted)


@dataclass
class EightBitRows(LaneCopies, PageRows):
    """Rows of 8-bit keys, to be dequantized in place as in ``parts/dequant/latent_rows.py``. Four lanes copy 64 bytes
    of a row, each to the place of the first of its two result vectors. They copy the row's scales to the place of the
    second.
    """

    row_format: LatentRowFormat = field(kw_only=True)

    @classmethod
    def create(cls, operand: DequantizedOperand, tile, descriptor, shared, tile_n: int, box_rows: int):
        form = operand.row_format
        return super().create(operand, tile, descriptor, shared, tile_n, box_rows, row_format=form)

    def places(self, tile, found: list) -> list:
        """Return the addresses of two rows of each lane."""
        return self.locate(tile, found)

    def load_block(self, places: list, block, destination, barrier) -> None:
        form, vectors = self.row_format, copy.VECTORS_PER_ROW
        wide_block = block - form.eight_bit_blocks if isinstance(block, int) else -1
        lanes = vectors if wide_block >= 0 else LANES_PER_ROW
        lane_row, vector = cute.arch.lane_idx() // lanes, cute.arch.lane_idx() % lanes
        for first in range(0, len(places) * LANES, LANES // lanes):
            row = cute.arch.shuffle_sync(places[first // LANES], first % LANES + lane_row)
            source = row + vector * copy.VECTOR_BYTES
            if wide_block >= 0:
                target = copy.swizzled_vector(destination, first + lane_row, vector)
                copy.async_copy_or_zero(target, source + (form.to_wide + wide_block * copy.SWIZZLE_ROW_BYTES), row != 0)
                continue
            target = copy.swizzled_vector(destination, first + lane_row, 2 * vector)
            copy.async_copy_or_zero(target, source + block * BLOCK_COLUMNS, row != 0)
            if form.to_scales is not None:
                copy.async_copy_or_zero(target ^ copy.VECTOR_BYTES, row + form.to_scales, row != 0)


LatentSource = LatentBoxes | LatentRows | EightBitRows


@device_struct(frozen=True)
class LatentLoad:
    """Base of the warps that load keys."""

    kernel: Any  # the MlaSm100: configuration only
    ring: Ring
    loaded: Ring  # of boxes that are dequantized next; equal to ``ring`` if none are
    shared: Int32  # address of the first stage
    descriptor: Any
    operand: KvOperand
    work_queue: WorkQueue
    rank: Int32

    @classmethod
    def create(cls, kernel, ring, loaded, tiles, atom, addresses, geometry, work_queue, rank, **more) -> "LatentLoad":
        operand = kernel.divided(latent_operand(kernel, addresses, geometry))
        shared, descriptor = shared_address(tiles.iterator), None if atom is None else copy.tma_descriptor(atom)
        return cls(kernel, ring, loaded or ring, shared, descriptor, operand, work_queue, rank, **more)

    @cute.jit
    def run(self):
        step, work, zeroed = Int32(0), Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            rest = (self.kernel.tile.n, self.kernel.config.box_rows)
            source = self.kernel.source.create(self.operand, tile, self.descriptor, self.shared, *rest)
            if tile.keys.begin < tile.keys.end:
                # The table is read a step ahead.
                found = self.look_up(source, tile.keys.end - 1)
                for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                    zeroed = self.load_step(source, found, n, step, zeroed)
                    found = self.look_up(source, n - 1)
                    step += 1
            work += 1
            tile = self.work_queue.read(work)

    def look_up(self, source: LatentSource, n) -> list:
        """Read the table for the tiles that this warp loads in step ``n``."""
        raise NotImplementedError

    def load_step(self, source: LatentSource, found: list, n, step, zeroed):
        """Load step ``n`` of the work tile, the ``step``-th of this CTA. ``zeroed`` counts the steps with zeroed rows;
        it is returned with its new value."""
        raise NotImplementedError


@dataclass(frozen=True)
class LoadK(LatentLoad):
    """Loads all columns of this CTA's half of a step's keys."""

    def look_up(self, source: LatentSource, n) -> list:
        return [source.look_up(CTAS * n + self.rank)]

    @cute.jit
    def load_step(self, source: LatentSource, found, n, step, zeroed):
        boxes, places = self.kernel.config.k_boxes, source.places(CTAS * n + self.rank, found[0])
        for block in cutlass.range_constexpr(boxes):
            box = step * boxes + block
            self.ring.wait_empty(box)
            barrier = (self.loaded if block < self.kernel.config.dequantized_boxes else self.ring).full_barrier(box)
            source.expect(barrier, BOX_BYTES)
            source.load_block(places, block, self.shared + self.ring.stage(box) * BOX_BYTES, barrier)
            source.finish(barrier)
        return zeroed


@dataclass(frozen=True)
class LoadV(LatentLoad):
    """Loads this CTA's half of the value's columns of all keys of a step. Rows past the last key become zeros."""

    zeroing_barrier: Any

    def look_up(self, source: LatentSource, n) -> list:
        return [source.look_up(CTAS * n + i) for i in range(CTAS)]

    @property
    def stages(self) -> int:
        """Stages of a step."""
        return self.kernel.config.v_stages

    @cute.jit
    def load_step(self, source: LatentSource, found, n, step, zeroed):
        """Load a step in the order of its products. The last step of a request may have rows to zero; its stages
        then complete on a barrier of their own, as in :meth:`KvSource.fill`."""
        first_key, size = n * (CTAS * self.kernel.tile.n), VALUE_BOXES * BOX_BYTES
        needs_zeros = source.needs_zeros(first_key, CTAS * self.kernel.tile.n)
        if needs_zeros:
            source.expect(self.zeroing_barrier, self.stages * size)
        places = [source.places(CTAS * n + i, found[i]) for i in range(CTAS)]
        products = self.kernel.config.products
        for group in cutlass.range_constexpr(self.stages // products):
            first, end = group * products, (group + 1) * products
            if const_expr(self.kernel.config.dequantized_boxes > 0):
                # Not unrolled: the addresses of all rows of all stages would be computed before the loop, and spill.
                for i in cutlass.range(first, end, unroll=1):
                    self.load_stage(source, places, group, i, step, needs_zeros)
            else:
                for i in cutlass.range_constexpr(first, end):
                    self.load_stage(source, places, group, i, step, needs_zeros)
        if needs_zeros:
            cute.arch.mbarrier_wait(self.zeroing_barrier, zeroed & 1)
            zeroed += 1
            for i in cutlass.range_constexpr(self.stages):
                for box in cutlass.range_constexpr(VALUE_BOXES):
                    begin = source.end_key - (first_key + self._keys(i // products, box) * self.kernel.tile.n)
                    self._zero_rows(self._place(step * self.stages + i) + box * BOX_BYTES, cutlass.max(begin, 0))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_arrive(self.ring.full_barrier(step * self.stages + i))
        return zeroed

    @cute.jit
    def load_stage(self, source: LatentSource, places: list, group: cutlass.Constexpr[int], i, step, needs_zeros):
        """Load stage ``i`` of a step, which is one of ``group``."""
        stage = step * self.stages + i
        self.ring.wait_empty(stage)
        barrier = self.loaded.full_barrier(stage)
        if needs_zeros:
            barrier = self.zeroing_barrier
        else:
            source.expect(barrier, VALUE_BOXES * BOX_BYTES)
        for box in cutlass.range_constexpr(VALUE_BOXES):
            block, place = value_block(self.kernel.config, self.rank, i, box), self._place(stage) + box * BOX_BYTES
            source.load_block(places[self._keys(group, box)], block, place, barrier)
        source.finish(barrier)

    def _keys(self, group: int, box: int) -> int:
        """Return which 64 keys of the step a box has; ``group`` counts stages of all products."""
        return group if self.stages > self.kernel.config.products else box

    def _place(self, stage):
        return self.shared + self.ring.stage(stage) * (VALUE_BOXES * BOX_BYTES)

    @cute.jit
    def _zero_rows(self, place, begin):
        """Zero the rows of a box from ``begin`` on. Called by a whole warp."""
        vectors = copy.VECTORS_PER_ROW
        for i in cutlass.range(begin * vectors + cute.arch.lane_idx(), self.kernel.tile.n * vectors, LANES, unroll=1):
            copy.store_shared_zero(place + i * copy.VECTOR_BYTES)


def value_block(config: Sm100MlaConfig, rank, stage, box: int):
    """Return the column block of a box of a stage of a step of V."""
    products = config.products
    first_block = rank * (config.v_stages * VALUE_BOXES // CTAS)
    if config.v_stages > products:
        return first_block + (stage % products * VALUE_BOXES + box)
    return first_block + stage


def latent_operand(kernel, a: Addresses, g: DecodeGeometry) -> KvOperand:
    """Return the latent keys of an MLA kernel."""
    c = kernel.config
    strides = c.layout.kv_strides(g.k_page, g.k_head, g.k_row)
    table = (a.key_table, g.key_table_row, page_size(g.page_divisor, g.k_rows, c.uneven_pages))
    dim, kind = sum(c.layout.kv_dims), dict(is_value=True, read_once=c.reads_kv_once, topk=c.sparse)
    if const_expr(c.kv_type is KvType.WIDE):
        return KvOperand(a.key, *strides, *table, dim, dim, dim, **kind)
    form = LatentRowFormat.of(c.kv_type, kernel.dtype, 0, c.head_dim_qk, c.head_dim_v)
    return DequantizedOperand(a.key, *strides, *table, dim, dim, dim, **kind, row_format=form)
