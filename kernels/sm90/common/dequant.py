"""Converting warpgroups of prefill, between the warps that load K and V and the ones that multiply them.

They serve wgmma on Hopper, and tcgen05. With 16-bit queries they dequantize 8-bit or 4-bit K and V. The roles that
attend see no difference, so results are bitwise equal to the results for 16-bit K and V with the same values. With
8-bit queries one warpgroup transposes V: 8-bit products need the keys along the rows of shared memory.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, prmt, shared_address, warp_in_warpgroup
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import NamedBarrier, Reader
from hopwell.kernels.parts.dequant import e2m1
from hopwell.kernels.parts.dequant.eight_bit import dequantized_words
from hopwell.kernels.parts.load.block_scales import ScaleRows
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS

VECTOR_ELEMENTS = copy.VECTOR_BYTES  # 8-bit elements in a vector, which becomes two vectors
VECTOR_CODES = 2 * copy.VECTOR_BYTES  # 4-bit codes in a vector, which becomes four vectors: two blocks
BLOCK_VECTORS = BLOCK_COLUMNS // VECTOR_ELEMENTS  # vectors of 8-bit elements that become a column block
DEQUANTIZED_ROWS = WARPGROUP // BLOCK_VECTORS  # rows of a column block that a warpgroup dequantizes at a time
# vectors of a thread read from shared memory and not dequantized yet, if K and V share a warpgroup
VECTORS_IN_FLIGHT = 8
CODES_IN_FLIGHT = 2  # vectors of codes
SCALES_APART = 8  # registers of a thread for scales that are not adjacent
PAIRED_KEYS = 32  # keys that a warp transposes at a time: two vectors of a row of the target


class Converter:
    """Converter of K or V from loaded stages to stages to multiply. It may also need block scales
    from global memory."""

    def look_up(self, tile, n) -> list:
        """Return the values that a lane needs before it can read the scales of tile ``n``; a loop carries them."""
        return []

    def read(self, tile, n, entry: list) -> list:
        """Return the scales of tile ``n``."""
        return []

    def convert(self, step, scales: list) -> None:
        """Convert the tile of ``step``; the whole warpgroup calls this."""
        raise NotImplementedError

    def show(self, step) -> None:
        """Signal the converted tile of ``step`` to its consumers."""
        if const_expr(self.kernel.reader is Reader.TENSOR_CORES):
            # The tensor cores read these writes through another proxy.
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(self.target_ring.full_barrier(step))

    def hand_over(self, step) -> None:
        """Signal the converted tile of ``step`` to its consumers, and release the loaded one."""
        self.show(step)
        self.source_ring.release(step)


@device_struct
class E4m3Converter(Converter):
    """Dequantizes stages of ``source``, filled through ``source_ring``, into 16-bit stages of ``target``.

    If there is no separate memory for the target, conversion is in place. The loaded tile is then in the warpgroup's
    registers before it is overwritten, and stages are released on ``target_ring``.

    A thread reads vector c of the 4 vectors of a row that fill one column block when dequantized, and repeats this
    every 32 rows. A group of 8 lanes covers two rows. Neither its reads nor its writes have bank conflicts: the rows
    differ in bits 0 and 2, which determine the swizzle of the vectors.

    Reads wait for the tensor cores, which read shared memory most of the time. So registers alone limit the number of
    reads in flight. Issued one at a time, each followed by its conversion and store, the reads took longer than all
    computation.
    """

    kernel: Any  # configuration only
    source: Int32
    source_ring: Any
    target: Int32
    target_ring: Any
    operand: int  # 0 for K, 1 for V

    @property
    def in_place(self) -> bool:
        return self.kernel.config.dequantizes_in_place

    @property
    def columns_first(self) -> bool:
        """Whether the target stores its column blocks first, see ``copy.swizzled_layout``."""
        return self.in_place and self.kernel.source.columns_first

    def source_stage(self, step):
        """Wait for the loaded tile of ``step`` and return its address."""
        self.source_ring.wait_full(step)
        columns = self.kernel.layout.stage_columns[self.operand]
        return self.source + self.source_ring.stage(step) * (self.kernel.tile.n * columns * HALFWORD_BYTES)

    def give_back(self, step) -> None:
        """Release the loaded tile after its last read. For conversion in place, wait instead until the whole warpgroup
        has read it."""
        if self.in_place:
            cute.arch.barrier(barrier_id=NamedBarrier.DEQUANT, number_of_threads=WARPGROUP)
        else:
            self.source_ring.release(step)

    def target_stage(self, step):
        """Return the address of the dequantized tile of ``step``, once its place is free."""
        if not self.in_place:
            self.target_ring.wait_empty(step)
        columns = self.kernel.layout.operand_columns[self.operand]
        return self.target + self.target_ring.stage(step) * (self.kernel.tile.n * columns * HALFWORD_BYTES)

    def read_ahead(self, step, read: Callable, count: int, in_flight: int) -> Iterator:
        """Yield the address of the dequantized tile, and then the results of ``read`` for 0 to ``count`` - 1. Before
        the address is yielded, ``in_flight`` reads have been issued, or all reads if the tile is converted in place."""
        in_flight = count if self.in_place else min(count, in_flight)
        results = [read(i) for i in range(in_flight)]
        if in_flight == count:
            self.give_back(step)
        yield self.target_stage(step)
        for i in range(count):
            yield results[i]
            if len(results) < count:
                results.append(read(len(results)))
                if len(results) == count:
                    self.give_back(step)

    @cute.jit
    def convert(self, step, scales) -> None:
        config, n = self.kernel.config, self.kernel.tile.n
        loaded, columns = config.layout.columns[self.operand], config.layout.operand_columns[self.operand]
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row, vector = thread // BLOCK_VECTORS, thread % BLOCK_VECTORS
        row ^= (row & 1) * BLOCK_VECTORS
        places = [
            (first, block) for first in range(0, n, DEQUANTIZED_ROWS) for block in range(columns // BLOCK_COLUMNS)
        ]
        stage, columns_first = self.source_stage(step), self.kernel.source.columns_first
        sources = [
            copy.tile_vector(stage, row, half * BLOCK_VECTORS + vector, n, loaded, columns_first) for half in range(2)
        ]

        def read(i: int) -> list:
            first, block = places[i]
            place = sources[block % 2] + self._distance(first, block // 2, loaded, columns_first)
            return copy.load_shared(place, 4)

        vectors = self.read_ahead(step, read, len(places), VECTORS_IN_FLIGHT // config.converting_warpgroups)
        stage = next(vectors)
        targets = [copy.tile_vector(stage, row, 2 * vector + half, n, columns, self.columns_first) for half in range(2)]
        for (first, block), words in zip(places, vectors, strict=True):
            wide = [w for word in words for w in dequantized_words(config.kv_type, self.kernel.dtype, word)]
            for half in cutlass.range_constexpr(2):
                place = targets[half] + self._distance(first, block, columns, self.columns_first)
                copy.store_shared(place, wide[4 * half : 4 * half + 4])
        self.show(step)

    def _distance(self, row: int, block: int, columns: int, columns_first: bool) -> int:
        """Return the bytes between a row of the first column block of a stage with ``columns`` columns and a later row
        or block."""
        return copy.block_row(row, block, self.kernel.tile.n, columns, columns_first) * copy.SWIZZLE_ROW_BYTES


@dataclass
class Nvfp4Converter(E4m3Converter):
    """NVFP4 converter. A thread converts a row, or an equal part of a row if steps have few keys. It reads the block
    scales of its part from global memory."""

    scales: ScaleRows
    table: tuple  # lookup table from codes to values

    @property
    def row_parts(self) -> int:
        """Threads that share a row: the threads available for it, reduced so that each has whole vectors."""
        vectors = self.kernel.layout.depth[self.operand] // VECTOR_CODES
        return math.gcd(WARPGROUP // self.kernel.tile.n, vectors)

    @property
    def apart(self) -> bool:
        """Whether scales that are not adjacent get a register each, if there are enough registers. In place with
        float16 there are not: four registers spilled in each step (by machine code, 2026-11-25)."""
        has_registers = not self.in_place or self.kernel.dtype is not Float16
        return has_registers and self.scales.blocks // self.row_parts <= SCALES_APART

    def _factors(self, scales: list, pair: int):
        """Return the scales of two adjacent blocks of a thread."""
        return self.scales.factors(scales, pair, self.kernel.dtype, apart=self.apart)

    def _place(self) -> tuple:
        """Return a thread's row of a tile and its part of the row."""
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        return thread // self.row_parts, thread % self.row_parts

    def look_up(self, tile, n) -> list:
        return [self.scales.look_up(tile, n * self.kernel.tile.n + self._place()[0], n)]

    def read(self, tile, n, entry: list) -> list:
        row, part = self._place()
        return self.scales.read(tile, n * self.kernel.tile.n + row, entry[0], part, self.row_parts, apart=self.apart)

    @cute.jit
    def convert(self, step, scales) -> None:
        config, n = self.kernel.config, self.kernel.tile.n
        loaded, columns_first = config.layout.columns[self.operand], self.kernel.source.columns_first
        vectors = config.layout.depth[self.operand] // VECTOR_CODES // self.row_parts  # of a thread
        cute.arch.sync_warp()  # lanes whose keys are not needed have read no scales, and have run ahead
        row, part = self._place()
        # Lanes without a row, if there are fewer parts than lanes, read the row of another lane.
        loaded_row = cutlass.min(row, n - 1) if const_expr(n * self.row_parts < WARPGROUP) else row
        stage = self.source_stage(step)

        def read(i: int) -> list:
            place = copy.tile_vector(stage, loaded_row, part * vectors + i, n, loaded, columns_first)
            return copy.load_shared(place, 4)

        packed = self.read_ahead(step, read, vectors, CODES_IN_FLIGHT)
        target = next(packed)
        for i, words in enumerate(packed):
            self._store_packed(target, row, 4 * (part * vectors + i), words, self._factors(scales, i))
        self.show(step)

    @cute.jit
    def _store_packed(self, target, row, vector, words, factors) -> None:
        """Dequantize a vector of codes and write the result as vectors ``vector`` and following of a row."""
        n, dtype, columns = (
            self.kernel.tile.n,
            self.kernel.dtype,
            self.kernel.layout.operand_columns[self.operand],
        )
        for j in cutlass.range_constexpr(4):
            wide = e2m1.scaled(words[j], factors, dtype, half=j // 2, table=self.table)
            if row < n:
                copy.store_shared(copy.tile_vector(target, row, vector + j, n, columns, self.columns_first), wide)


# Byte permutes of two words: the even bytes of both, and the odd bytes of both.
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531


@device_struct
class TransposingConverter(Converter):
    """Transposes 8-bit V: stages of ``source`` [keys, columns] become stages of ``target`` [columns, keys].

    The transpose permutes keys and columns within sixteens. Keys 2t, 2t + 1, 8 + 2t and 8 + 2t + 1 become adjacent.
    Lane t of a quad has P of these keys in its accumulators, and its operand takes four adjacent keys. Even columns
    precede odd ones, so that stmatrix writes both as rows of the target without bank conflicts.
    :class:`~hopwell.kernels.parts.core.fragment.SplitRowFragment` restores the column order.
    """

    kernel: Any  # configuration only
    source: Int32
    source_ring: Any
    target: Int32
    target_ring: Any

    @cute.jit
    def convert(self, step, scales) -> None:
        config, n = self.kernel.config, self.kernel.tile.n
        vectors = config.layout.transposed_rows // copy.VECTOR_BYTES  # of 16 columns
        self.source_ring.wait_full(step)
        self.target_ring.wait_empty(step)
        source = self.source + self.source_ring.stage(step) * (n * config.layout.columns[1] * HALFWORD_BYTES)
        target = self.target + self.target_ring.stage(step) * config.layout.converted_bytes["v"]
        for vector in cutlass.range(warp_in_warpgroup(), vectors, WARPS, unroll=1):
            self._transpose(source, target, vector)
        self.hand_over(step)

    def _transpose(self, source, target, vector) -> None:
        """Transpose 16 columns with one warp, 32 keys at a time."""
        config, n = self.kernel.config, self.kernel.tile.n
        lane, columns, columns_first = cute.arch.lane_idx(), config.layout.columns[1], self.kernel.source.columns_first
        width = config.layout.transposed_columns // HALFWORD_BYTES
        first = copy.tile_vector(source, lane, vector, n, columns, columns_first)
        step = copy.block_row(PAIRED_KEYS, 0, n, columns, columns_first) * copy.SWIZZLE_ROW_BYTES
        # Matrices 0 and 1 are even and odd columns of the first sixteen keys, 2 and 3 of the second sixteen.
        row = copy.VECTOR_BYTES * vector + lane % 16
        place = copy.tile_vector(target, row, lane // 16, config.layout.transposed_rows, width, False)
        for pair in range(n // PAIRED_KEYS):
            words = copy.load_matrix_x4(first + pair * step, transposes=True)
            turned = [
                prmt(words[2 * half], words[2 * half + 1], select)
                for half in range(2)
                for select in (EVEN_BYTES, ODD_BYTES)
            ]
            # A pair has two vectors of a row. The swizzle only flips address bits, so an exclusive or leads from one
            # vector to the next: 24 instead of 75 instructions, 1.01 of the rate (H100, 2026-11-25).
            block, within = divmod(2 * pair, copy.VECTORS_PER_ROW)
            block_start = block * config.layout.transposed_rows * copy.SWIZZLE_ROW_BYTES
            copy.store_matrix_x4((place ^ (within * copy.VECTOR_BYTES)) + block_start, turned)


@device_struct
class Conversion:
    """Main loop of a converting warpgroup over the tiles of every step of every work tile."""

    converters: tuple
    work_queue: WorkQueue

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings, work_queue: WorkQueue, addresses, geometry) -> "Conversion":
        """Return the converters of K and V, or of V alone."""
        sources = [shared_address(source.iterator) for source in tiles.loaded]
        if kernel.config.transposes_v:
            target = shared_address(tiles.v.iterator)
            return Conversion(
                (TransposingConverter(kernel, sources[1], rings.v, target, rings.converted_v),), work_queue
            )
        targets = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        if kernel.config.dequantizes_in_place:
            loaded, converted = (rings.loaded_k, rings.loaded_v), (rings.k, rings.v)
        else:
            loaded, converted = (rings.k, rings.v), (rings.converted_k, rings.converted_v)
        places = [(kernel, sources[i], loaded[i], targets[i], converted[i], i) for i in range(2)]
        if kernel.config.kv_element.block:
            scales = (
                ScaleRows.key(kernel.config, addresses, geometry),
                ScaleRows.value(kernel.config, addresses, geometry, interleaves=not kernel.config.linear_v_scales),
            )
            table = e2m1.table_words(kernel.dtype, sources[0] + cute.arch.thread_idx()[0] * copy.VECTOR_BYTES)
            return Conversion(
                tuple(Nvfp4Converter(*place, each, table) for place, each in zip(places, scales, strict=True)),
                work_queue,
            )
        return Conversion(tuple(E4m3Converter(*place) for place in places), work_queue)

    @cute.jit
    def run_share(self, warp) -> None:
        """Run the share of the warpgroup of ``warp``, counted from the first converting warp: all tiles, or only K or
        only V."""
        if const_expr(self.converters[0].kernel.config.converting_warpgroups > 1):
            for i in cutlass.range_constexpr(len(self.converters)):
                if warp // WARPS == i:
                    Conversion((self.converters[i],), self.work_queue).run()
        else:
            self.run()

    @cute.jit
    def run(self) -> None:
        step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            # Scales come from global memory: page ids two steps before their tile, scales one step. They reuse the
            # registers of the scales that have just been used.
            n = tile.keys.end - 1
            entries = [converter.look_up(tile, n) for converter in self.converters]
            scales = [converter.read(tile, n, entry) for converter, entry in zip(self.converters, entries, strict=True)]
            entries = [converter.look_up(tile, n - 1) for converter in self.converters]
            for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                for i in cutlass.range_constexpr(len(self.converters)):
                    self.converters[i].convert(step, scales[i])
                    scales[i] = self.converters[i].read(tile, n - 1, entries[i])
                    entries[i] = self.converters[i].look_up(tile, n - 2)
                step += 1
            work += 1
            tile = self.work_queue.read(work)


def dequantize_queries(kernel, tile, stage, row_block, barrier: int, consumer) -> None:
    """Dequantize the rows of ``row_block`` in a stage of Q, in place: e4m3 queries of NVFP4 keys and values.

    The whole warpgroup ``consumer`` must call this once, before the products. It meets at the named barrier ``barrier``
    + ``consumer``. TMA fills the last column blocks of a stage with e4m3 rows, which have half of the bytes of float16
    rows. Each column block becomes two, one block after the other from the left. The overwritten bytes have been read
    by then, so a thread holds only 16 registers of Q at a time.
    """
    config, rows = kernel.config, kernel.tile.m
    assert config.v_splits == 1, "two warpgroups with halves of the value have the same rows of Q"
    wide, loaded = config.layout.q_columns, config.layout.loaded_q_columns
    target = shared_address(tile.iterator) + stage * (rows * wide * HALFWORD_BYTES)
    source = target + config.layout.first_loaded_q_block * rows * copy.SWIZZLE_ROW_BYTES
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    row, vector = row_block * WARPGROUP_ROWS + thread // BLOCK_VECTORS, thread % BLOCK_VECTORS
    for first in range(0, wide // BLOCK_COLUMNS, 2):
        places = [
            (row + below, block * BLOCK_VECTORS + vector)
            for block in range(first, min(first + 2, wide // BLOCK_COLUMNS))
            for below in range(0, WARPGROUP_ROWS, DEQUANTIZED_ROWS)
        ]
        words = [copy.load_shared(copy.tile_vector(source, *place, rows, loaded, False), 4) for place in places]
        cute.arch.barrier(barrier_id=barrier + consumer, number_of_threads=WARPGROUP)
        for (at, narrow_vector), narrow in zip(places, words, strict=True):
            halves = [half for word in narrow for half in dequantized_words(KvType.E4M3, Float16, word)]
            for i in range(2):
                place = copy.tile_vector(target, at, 2 * narrow_vector + i, rows, wide, False)
                copy.store_shared(place, halves[4 * i : 4 * i + 4])
    # The tensor cores read these writes through another proxy, and TMA overwrites them with the next Q through it.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=barrier + consumer, number_of_threads=WARPGROUP)
