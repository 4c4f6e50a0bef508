"""The warpgroup of Hopper prefill that widens K and V: it reads tiles as they are in memory and writes the tiles of 16
bits that are multiplied. Those that multiply see no difference, so their results have the bits that K and V of 16 bits
with the same values would give."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, const_expr

from hopwell.kernels.config import WARPGROUP
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, shared_address
from hopwell.kernels.parts.scheduler import Board
from hopwell.kernels.parts.widen import widened
from hopwell.kernels.skeleton import SharedTiles

CHUNK_ELEMENTS = copy.CHUNK_BYTES  # of 8 bits in a chunk, which becomes two chunks


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
    def widen(self, step) -> None:
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
            words = copy.load_shared(_chunk(source, row, chunk, n, loaded, columns_first), 4)
            for half in cutlass.range_constexpr(2):
                place = _chunk(target, row, 2 * chunk + half, n, columns, False)
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


def _chunk(stage, row, chunk, rows: int, columns: int, columns_first: bool):
    """Address of a row's 16-byte chunk in a stage of :func:`copy.swizzled_layout`."""
    block, place = chunk // copy.CHUNKS_PER_ROW, chunk % copy.CHUNKS_PER_ROW
    # Where a row lies, it has the same number modulo the swizzle's period as in the tile.
    return copy.swizzled_chunk(stage, copy.block_row(row, block, rows, columns, columns_first), place)


@dataclass
class Widening(DeviceStruct):
    """What the warpgroup does: K and V of every step of every work tile."""

    key: WideningStream
    value: WideningStream
    board: Board

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: tuple, board: Board) -> "Widening":
        """``rings`` are those of K and V as they are loaded, then as they are multiplied."""
        streams = [
            WideningStream(
                kernel, shared_address(source.iterator), rings[i], shared_address(target.iterator), rings[2 + i], i
            )
            for i, (source, target) in enumerate(zip(tiles.loaded, (tiles.k, tiles.v), strict=True))
        ]
        return Widening(*streams, board)

    @cute.jit
    def run(self) -> None:
        step, work = Int32(0), Int32(0)
        tile = self.board.read(work)
        while tile.exists:
            for _ in cutlass.range(tile.keys.end - tile.keys.begin, unroll=1):
                self.key.widen(step)
                self.value.widen(step)
                step += 1
            work += 1
            tile = self.board.read(work)
