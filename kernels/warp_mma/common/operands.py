"""Matrix operands of the consumer warps of sm_120 prefill: 16 query rows each."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address, tied, warp_in_warpgroup
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import NamedBarrier
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, MMA_DEPTH, multiply
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.sm90.common.operands import RowOperands

STEP_BYTES = 32  # of a row of K that ldmatrix reads at a time


@device_struct(frozen=True)
class WarpPlace:
    """Place of a warp in a tile: 16 rows, and all of V's columns or one of two halves."""

    row_block: Any  # the number of the warpgroup
    column_half: Any
    warp_row: Any  # first row in the tile
    splits: int  # warps that have the same rows

    @staticmethod
    def of(kernel, consumer) -> "WarpPlace":
        """Return the place of this warp, which belongs to warpgroup ``consumer``."""
        row_warps = WARPS // kernel.config.v_splits
        column_half = warp_in_warpgroup() // row_warps
        warp_row = (consumer * row_warps + warp_in_warpgroup() % row_warps) * WARP_ROWS
        return WarpPlace(consumer, column_half, warp_row, kernel.config.v_splits)

    @property
    def has_own_keys(self) -> bool:
        """Whether the warpgroup may skip tiles of keys. If warps share rows, one warpgroup has all rows of the tile."""
        return self.splits == 1

    def meet(self) -> None:
        """Wait for the warps that have the same rows of Q."""
        if const_expr(self.splits > 1):
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP, number_of_threads=WARPGROUP)
        else:
            cute.arch.sync_warp()


@device_struct
class WideElements:
    """16-bit K and V as operands of products. Subclasses convert narrower elements."""

    kernel: Any  # configuration only

    p_bits = 16  # of an element of P
    step_products = 1  # products for STEP_BYTES of K
    most_q_words = 32  # words that a lane keeps; longer rows of Q are read again for each tile

    @classmethod
    def create(cls, kernel, addresses, geometry) -> "WideElements":
        return cls(kernel)

    def begin(self, tile, n) -> None:
        """Prepare for work tile ``tile``, whose visible keys begin with tile ``n``."""

    def after_qk(self) -> None:
        """Continue after Q K^T of a tile has been issued."""

    def after_rounding(self) -> None:
        """Continue after P of a tile has been rounded."""

    def round_scores(self, s, p) -> None:
        """Round S to P."""
        for i in range(cute.size(p)):
            p[i] = copy.pack_x2(self.kernel.dtype, s[2 * i], s[2 * i + 1])

    def read_q(self, tile, step: int) -> list:
        """Read Q of the warp's rows for the products of a step, from the stage at ``tile``."""
        config, lane = self.kernel.config, cute.arch.lane_idx()
        row, vector = lane % WARP_ROWS, 2 * step + lane // WARP_ROWS
        return copy.load_matrix_x4(
            copy.tile_vector(tile, row, vector, self.kernel.tile.m, config.layout.q_columns, False)
        )

    def keys(self, words: list, step: int, core_matrix: int) -> list:
        """Return operand B of each product of a step, from a lane's words of eight keys."""
        return [words]

    def product(self, d, a, b) -> tuple:
        return multiply(d, a, b, self.kernel.dtype)


@device_struct
class DequantizedElements(WideElements):
    """16-bit K and V that a warpgroup has dequantized. This warpgroup leaves the threads fewer registers."""

    most_q_words = 16


@dataclass
class WarpOperands(RowOperands):
    """Operands of one warp: K and V in shared memory, all others in registers."""

    q: Any  # words of Q, in the order of products
    q_tile: Int32  # address of the warp's rows in the only stage
    k_tile: Int32
    v_tile: Int32
    kernel: Any  # configuration only
    elements: Any  # conversion of K and V

    @classmethod
    def create(cls, kernel, tiles: SharedTiles, place: WarpPlace, addresses, geometry) -> "WarpOperands":
        elements = kernel.elements
        tile_n = kernel.tile.n
        depth_qk, depth_v = kernel.layout.depth
        columns = kernel.layout.operand_columns[1]
        first_block = place.column_half * (columns // (BLOCK_COLUMNS * kernel.config.v_splits))
        v_row = copy.block_row(0, first_block, tile_n, columns, kernel.source.columns_first)
        words = q_words(kernel)
        return cls(
            s=cute.make_rmem_tensor(tile_n // 2, Float32),
            o=cute.make_rmem_tensor(depth_v // 2, Float32),
            p=cute.make_rmem_tensor(tile_n * elements.p_bits // 64, Uint32),
            dtype=kernel.dtype,
            tile_n=tile_n,
            depth_qk=depth_qk,
            depth_v=depth_v,
            q=cute.make_rmem_tensor(words if words <= elements.most_q_words else 4, Uint32),
            q_tile=shared_address(tiles.q.iterator) + place.warp_row * copy.SWIZZLE_ROW_BYTES,
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator) + v_row * copy.SWIZZLE_ROW_BYTES,
            kernel=kernel,
            elements=elements.create(kernel, addresses, geometry),
        )

    @property
    def columns_first(self) -> bool:
        """Whether tiles of K and V store their column blocks first, see ``copy.swizzled_layout``. Dequantized tiles do
        not."""
        return self.kernel.source.columns_first and not self.kernel.config.dequantizes

    @property
    def keeps_q(self) -> bool:
        return q_words(self.kernel) <= self.elements.most_q_words

    def begin(self, q_stage, tile, n) -> None:
        if const_expr(self.keeps_q):
            for step in range(q_steps(self.kernel.config)):
                for i, word in enumerate(self.elements.read_q(self.q_tile, step)):
                    self.q[4 * self.elements.step_products * step + i] = word
        self.elements.begin(tile, n)

    def round_scores(self) -> None:
        self.elements.round_scores(self.s, self.p)
        self.elements.after_rounding()

    def _q_of_step(self, tile, step: int) -> list[list]:
        """Return operand A of each product of a step."""
        words = range(4 * self.elements.step_products)
        a = [self.q[len(words) * step + i] for i in words] if self.keeps_q else self.elements.read_q(tile, step)
        return [a[i : i + 4] for i in range(0, len(a), 4)]

    def issue_qk(self, q_stage, k_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.layout.operand_columns[0], self.columns_first
        stage = self.k_tile + k_stage * (self.tile_n * columns * HALFWORD_BYTES)
        # without the tie the compiler would keep Q in registers, and there are too few
        q_tile = tied(self.q_tile, k_stage)
        self.s.fill(0.0)
        for step in range(q_steps(config)):
            a = self._q_of_step(q_tile, step)
            for pair in range(self.tile_n // (2 * MMA_COLUMNS)):
                # Lanes address two core matrices of keys, each for two vectors of columns.
                key, vector = 16 * pair + lane // 16 * 8 + lane % 8, 2 * step + lane // 8 % 2
                words = copy.load_matrix_x4(copy.tile_vector(stage, key, vector, self.tile_n, columns, columns_first))
                for half in range(2):
                    core_matrix = 2 * pair + half
                    for rows, keys in zip(a, self._keys(words, half, step, core_matrix), strict=True):
                        self.accumulate(self.s, core_matrix, rows, keys)
        self.elements.after_qk()

    def _keys(self, words: list, half: int, step: int, core_matrix: int) -> list:
        """Return operand B of each product of a step, from a lane's words of one of two core matrices of keys."""
        return self.elements.keys(words[2 * half : 2 * half + 2], step, core_matrix)

    def issue_pv(self, v_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.layout.operand_columns[1], self.columns_first
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
        for i, value in enumerate(self.elements.product(d, a, b)):
            registers[4 * fragment + i] = value

    def wait(self, pending: int) -> None:
        """Do nothing: mma.sync products are complete when issued."""


def q_words(kernel) -> int:
    """Return the words of Q that a lane multiplies."""
    return 4 * kernel.elements.step_products * q_steps(kernel.config)


def q_steps(config) -> int:
    """Return the number of ldmatrix reads that cover the columns of K."""
    return config.layout.depth[0] * config.layout.operand_bits // (8 * STEP_BYTES)
