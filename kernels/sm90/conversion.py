"""The warpgroup of Hopper prefill that stands between those that load K and V and those that multiply them.

Where the queries have 16 bits, it widens K and V of 8 bits. Those that multiply see no difference, so their results
have the bits that K and V of 16 bits with the same values would give. Where the queries have 8 bits as well, it
transposes V: products of 8-bit operands take keys along the rows of shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, prmt, shared_address, warp_in_group
from hopwell.kernels.parts.scheduler import Board
from hopwell.kernels.parts.widen import widened
from hopwell.kernels.skeleton import SharedTiles

CHUNK_ELEMENTS = copy.CHUNK_BYTES  # of 8 bits in a chunk, which becomes two chunks
PAIRED_KEYS = 32  # that a warp transposes at a time: two chunks of a row of the target


@dataclass
class WideningStream(DeviceStruct):
    """K or V: stages of ``source``, filled through ``source_ring``, become stages of ``target``."""

    kernel: Any  # configuration only
    source: Int32
    source_ring: Any
    target: Int32
    target_ring: Any
    operand: int  # 0 for K, 1 for V

    @cute.jit
    def convert(self, step) -> None:
        """Widen the tile of ``step``; called by the whole warpgroup."""
        config, n = self.kernel.config, self.kernel.tile.n
        loaded, columns = config.columns[self.operand], config.operand_columns[self.operand]
        chunks = config.depth[self.operand] // CHUNK_ELEMENTS  # of a row
        columns_first = self.kernel.source.columns_first
        self.source_ring.wait_full(step)
        self.target_ring.wait_empty(step)
        source = self.source + self.source_ring.stage(step) * (2 * n * loaded)
        target = self.target + self.target_ring.stage(step) * (2 * n * columns)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        for i in cutlass.range(thread, n * chunks, WARPGROUP, unroll=4):
            row, chunk = i // chunks, i % chunks
            words = copy.load_shared(copy.tile_chunk(source, row, chunk, n, loaded, columns_first), 4)
            for half in cutlass.range_constexpr(2):
                place = copy.tile_chunk(target, row, 2 * chunk + half, n, columns, False)
                copy.store_shared(place, self._wide(words[2 * half]) + self._wide(words[2 * half + 1]))
        # The tensor cores read what was written here through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(self.target_ring.full_barrier(step))
        self.source_ring.release(step)

    def _wide(self, word) -> list:
        """Four elements as two words of two of the kernel's 16-bit type."""
        words = widened(self.kernel.config.kv_type, word)
        if const_expr(self.kernel.dtype is BFloat16):
            words = [copy.pack_x2(BFloat16, *copy.unpack_f16_x2(word)) for word in words]
        return list(words)


# How bytes of two words are interleaved: the even ones of both, and the odd ones.
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531


@dataclass
class TransposingStream(DeviceStruct):
    """V of 8 bits: stages of ``source`` [keys, columns] become stages of ``target`` [columns, keys].

    Keys and columns are permuted on the way, within sixteens. Keys 2t, 2t + 1, 8 + 2t and 8 + 2t + 1 come to lie side
    by side, because lane t of a quad has P of these keys in its accumulators, and its operand takes four neighbours.
    Even columns come before odd ones: both are rows of the target that stmatrix writes without bank conflicts then,
    and :class:`~hopwell.kernels.parts.fragment.SplitRowFragment` puts them in order again.
    """

    kernel: Any  # configuration only
    source: Int32
    source_ring: Any
    target: Int32
    target_ring: Any

    @cute.jit
    def convert(self, step) -> None:
        """Transpose the tile of ``step``; called by the whole warpgroup."""
        config, n = self.kernel.config, self.kernel.tile.n
        chunks = config.depth[1] // copy.CHUNK_BYTES  # of 16 columns
        self.source_ring.wait_full(step)
        self.target_ring.wait_empty(step)
        source = self.source + self.source_ring.stage(step) * (2 * n * config.columns[1])
        target = self.target + self.target_ring.stage(step) * config.converted_bytes["V"]
        for i in cutlass.range(warp_in_group(), n // PAIRED_KEYS * chunks, WARPS, unroll=4):
            self._transpose(source, target, i // chunks, i % chunks)
        # The tensor cores read what was written here through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(self.target_ring.full_barrier(step))
        self.source_ring.release(step)

    def _transpose(self, source, target, pair, chunk) -> None:
        """32 keys of 16 columns, by one warp."""
        config, n = self.kernel.config, self.kernel.tile.n
        lane = cute.arch.lane_idx()
        key = PAIRED_KEYS * pair + lane
        place = copy.tile_chunk(source, key, chunk, n, config.columns[1], self.kernel.source.columns_first)
        words = copy.load_matrix_x4(place, transposes=True)
        turned = [
            prmt(words[2 * half], words[2 * half + 1], select)
            for half in range(2)
            for select in (EVEN_BYTES, ODD_BYTES)
        ]
        # Matrices 0 and 1 are even and odd columns of the first sixteen keys, 2 and 3 of the others.
        row, column = copy.CHUNK_BYTES * chunk + lane % 16, 2 * pair + lane // 16
        width = config.transposed_columns // 2
        copy.store_matrix_x4(copy.tile_chunk(target, row, column, config.depth[1], width, False), turned)


@dataclass
class Conversion(DeviceStruct):
    """What the warpgroup does: the tiles of every step of every work tile."""

    streams: tuple
    board: Board

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: tuple, board: Board) -> "Conversion":
        """``rings`` are those of K and V as they are loaded, then of what is converted of them as it is multiplied."""
        sources = [shared_address(source.iterator) for source in tiles.loaded]
        if kernel.config.transposes_v:
            target = shared_address(tiles.v.iterator)
            return Conversion((TransposingStream(kernel, sources[1], rings[1], target, rings[2]),), board)
        targets = [shared_address(tile.iterator) for tile in (tiles.k, tiles.v)]
        streams = [WideningStream(kernel, sources[i], rings[i], targets[i], rings[2 + i], i) for i in range(2)]
        return Conversion(tuple(streams), board)

    @cute.jit
    def run(self) -> None:
        step, work = Int32(0), Int32(0)
        tile = self.board.read(work)
        while tile.exists:
            for _ in cutlass.range(tile.keys.end - tile.keys.begin, unroll=1):
                for stream in self.streams:
                    stream.convert(step)
                step += 1
            work += 1
            tile = self.board.read(work)
