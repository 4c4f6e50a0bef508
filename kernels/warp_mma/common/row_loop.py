"""Consumer warps of sm_120 prefill: 16 query rows each, from Q K^T to the rows of the output."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import shared_address, tied, warp_in_warpgroup
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, MMA_DEPTH, multiply
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS, OutputRows, output_rows
from hopwell.kernels.parts.rows.mask import TileRange
from hopwell.kernels.sm90.common.row_loop import PingPong, RowOperands
from hopwell.kernels.sm90.prefill.rows import PrefillAttend
from hopwell.kernels.sm90.prefill.skip import SkippingAttend

STEP_BYTES = 32  # of a row of K that ldmatrix reads at a time


@dataclass
class WarpAttend(PrefillAttend):
    stages_in_q = True

    def operands(self, row_block, column_half, addresses, geometry) -> "WarpOperands":
        place = self.warp_row(row_block), column_half
        return self.kernel.operands_type.create(self.kernel, self.tiles, place, addresses, geometry)

    @property
    def _row_warps(self) -> int:
        """Warps of a warpgroup that have their own rows; the others have the same rows and other columns."""
        return WARPS // self.kernel.config.v_splits

    def place(self, consumer) -> tuple:
        return consumer, warp_in_warpgroup() // self._row_warps

    def warp_row(self, row_block):
        return (row_block * self._row_warps + warp_in_warpgroup() % self._row_warps) * WARP_ROWS

    def own_keys(self, tile, row) -> TileRange:
        # If warps share rows, one warpgroup has all rows of the tile.
        return super().own_keys(tile, row) if self.kernel.config.v_splits == 1 else tile.keys

    @cute.jit
    def unmasked_steps(self, operands, ping_pong, q_stage, row, kv_step, keys):
        start, end = keys.full_end - 1, keys.full_begin - 1
        if const_expr(self.kernel.config.dequantizes and max(self.kernel.config.depth) > BLOCK_COLUMNS):
            # With 128 registers ptxas moves and spills O in the first of a kernel's loops over steps: 27 of 467
            # instructions at 128 columns without a mask. A loop of one step before it leaves none of 363 instructions,
            # and under masks at most 3 of the 14 to 16. Up to 64 columns there are 2 to 4 without this loop, and up to
            # 12 with it (2026-11-25).
            rest = cutlass.max(start - 1, end)
            for n in cutlass.range(start, rest, -1, unroll=1):
                self.next_step(operands, ping_pong, q_stage, row, kv_step, n, False)
                kv_step += 1
            start = rest
        for n in cutlass.range(start, end, -1, unroll=1):
            self.next_step(operands, ping_pong, q_stage, row, kv_step, n, False)
            kv_step += 1
        return kv_step

    def ping_pong(self, consumer) -> PingPong:
        return PingPong(consumer, 1)

    def staging(self, consumer_warp):
        """Return the address of this warp's part of Q's place, which stages its output. It is the warp's own rows of
        the first column block, unless several warps have the same rows."""
        return shared_address(self.tiles.q.iterator) + consumer_warp * (WARP_ROWS * copy.SWIZZLE_ROW_BYTES)

    def store(self, *arguments) -> None:
        # Other lanes may have read the rows of Q that the output now overwrites.
        if const_expr(self.kernel.config.v_splits > 1):
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP, number_of_threads=WARPGROUP)
        else:
            cute.arch.sync_warp()
        super().store(*arguments)

    def output_rows(self) -> type[OutputRows]:
        return output_rows(self.kernel.out_dtype, stages_pairs=not self.kernel.config.has_narrow_kv)


@dataclass
class SkippingWarpAttend(SkippingAttend, WarpAttend):
    """Attention over products of single warps that skips tiles by the rule of :class:`SkippingAttend`."""


@dataclass
class WarpOperands(RowOperands):
    """Operands of one warp: K and V in shared memory, all others in registers."""

    q: Any  # words of Q, in the order of products
    q_tile: Int32  # address of the warp's rows in the only stage
    k_tile: Int32
    v_tile: Int32
    kernel: Any  # configuration only

    p_bits = 16  # of an element of P
    step_products = 1  # products for STEP_BYTES of K
    most_q_words = 32  # words that a lane keeps; longer rows of Q are read again for each tile

    @classmethod
    def create(cls, kernel, tiles: SharedTiles, place, addresses, geometry) -> "WarpOperands":
        """Return the operands for ``place``: the first of the warp's rows in the tile, and its part of V's columns."""
        return cls(**cls.fields(kernel, tiles, *place))

    @classmethod
    def fields(cls, kernel, tiles: SharedTiles, first_row, column_half) -> dict[str, Any]:
        """Return the values of the fields above and of the base class by name."""
        tile_n = kernel.tile.n
        depth_qk, depth_v = kernel.config.depth
        columns = kernel.config.operand_columns[1]
        first_block = column_half * (columns // (BLOCK_COLUMNS * kernel.config.v_splits))
        v_row = copy.block_row(0, first_block, tile_n, columns, kernel.source.columns_first)
        words = cls.q_words(kernel.config)
        return dict(
            s=cute.make_rmem_tensor(tile_n // 2, Float32),
            o=cute.make_rmem_tensor(depth_v // 2, Float32),
            p=cute.make_rmem_tensor(tile_n * cls.p_bits // 64, Uint32),
            dtype=kernel.dtype,
            tile_n=tile_n,
            depth_qk=depth_qk,
            depth_v=depth_v,
            q=cute.make_rmem_tensor(words if words <= cls.most_q_words else 4, Uint32),
            q_tile=shared_address(tiles.q.iterator) + first_row * copy.SWIZZLE_ROW_BYTES,
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator) + v_row * copy.SWIZZLE_ROW_BYTES,
            kernel=kernel,
        )

    @classmethod
    def q_words(cls, config) -> int:
        """Return the words of Q that a lane multiplies."""
        return 4 * cls.step_products * cls.steps(config)

    @staticmethod
    def steps(config) -> int:
        """Return the number of ldmatrix reads that cover the columns of K."""
        return config.depth[0] * config.operand_bits // (8 * STEP_BYTES)

    @property
    def columns_first(self) -> bool:
        """Whether tiles of K and V store their column blocks first, see ``copy.swizzled_layout``."""
        return self.kernel.source.columns_first

    @property
    def keeps_q(self) -> bool:
        return self.q_words(self.kernel.config) <= self.most_q_words

    def begin(self, q_stage, tile, n) -> None:
        if const_expr(self.keeps_q):
            for step in range(self.steps(self.kernel.config)):
                for i, word in enumerate(self.read_q(self.q_tile, step)):
                    self.q[4 * self.step_products * step + i] = word

    def read_q(self, tile, step: int) -> list:
        """Read Q of the warp's rows for the products of a step, from the stage at ``tile``."""
        config, lane = self.kernel.config, cute.arch.lane_idx()
        row, vector = lane % WARP_ROWS, 2 * step + lane // WARP_ROWS
        return copy.load_matrix_x4(copy.tile_vector(tile, row, vector, self.kernel.tile.m, config.q_columns, False))

    def _q_of_step(self, tile, step: int) -> list[list]:
        """Return operand A of each product of a step."""
        words = range(4 * self.step_products)
        a = [self.q[len(words) * step + i] for i in words] if self.keeps_q else self.read_q(tile, step)
        return [a[i : i + 4] for i in range(0, len(a), 4)]

    def issue_qk(self, q_stage, k_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.operand_columns[0], self.columns_first
        stage = self.k_tile + k_stage * (self.tile_n * columns * HALFWORD_BYTES)
        # without the tie the compiler would keep Q in registers, and there are too few
        q_tile = tied(self.q_tile, k_stage)
        self.s.fill(0.0)
        for step in range(self.steps(config)):
            a = self._q_of_step(q_tile, step)
            for pair in range(self.tile_n // (2 * MMA_COLUMNS)):
                # Lanes address two core matrices of keys, each for two vectors of columns.
                key, vector = 16 * pair + lane // 16 * 8 + lane % 8, 2 * step + lane // 8 % 2
                words = copy.load_matrix_x4(copy.tile_vector(stage, key, vector, self.tile_n, columns, columns_first))
                for half in range(2):
                    core_matrix = 2 * pair + half
                    for rows, keys in zip(a, self.keys(words[2 * half : 2 * half + 2], step, core_matrix), strict=True):
                        self.accumulate(self.s, core_matrix, rows, keys)

    def keys(self, words: list, step: int, core_matrix: int) -> list:
        """Return operand B of each product of a step, from a lane's words of eight keys."""
        return [words]

    def issue_pv(self, v_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.operand_columns[1], self.columns_first
        stage = self.v_tile + v_stage * (self.tile_n * columns * HALFWORD_BYTES)
        for step in range(self.tile_n // MMA_DEPTH):
            a = [self.p[4 * step + i] for i in range(4)]
            for pair in range(self.depth_v // (2 * MMA_COLUMNS)):
                key, vector = 16 * step + lane % 16, 2 * pair + lane // 16
                place = copy.tile_vector(stage, key, vector, self.tile_n, columns, columns_first)
                b = copy.load_matrix_x4(place, transposes=True)
                for half in range(2):
                    self.accumulate(self.o, 2 * pair + half, a, b[2 * half : 2 * half + 2])

    def accumulate(self, registers, fragment: int, a, b) -> None:
        """Add a product to the four registers of a fragment."""
        d = [registers[4 * fragment + i] for i in range(4)]
        for i, value in enumerate(self.product(d, a, b)):
            registers[4 * fragment + i] = value

    def product(self, d, a, b) -> tuple:
        return multiply(d, a, b, self.dtype)

    def wait(self, pending: int) -> None:
        """Do nothing: mma.sync products are complete when issued."""


@dataclass
class ConvertedOperands(WarpOperands):
    """Operands of K and V that a warpgroup has dequantized. This warpgroup leaves the threads fewer registers."""

    most_q_words = 16
    columns_first = False  # independent of the layout of the loaded tiles
