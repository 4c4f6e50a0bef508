"""The warps of sm_120 prefill that multiply: 16 query rows each, from Q K^T to the rows of the output."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import shared_address, tied, warp_in_group
from hopwell.kernels.parts.epilogue import WARP_ROWS
from hopwell.kernels.parts.warp_mma import MMA_COLUMNS, MMA_DEPTH, accumulate
from hopwell.kernels.skeleton import SharedTiles
from hopwell.kernels.sm90.attend import RowOperands, Turns
from hopwell.kernels.sm90.mma import WARPGROUP_ROWS
from hopwell.kernels.sm90.prefill_attend import PrefillAttend
from hopwell.kernels.sm90.skip import SkippingAttend

Q_REGISTERS_TO = 128  # columns of Q that a lane holds beside O of as many columns; wider rows are read anew


@dataclass
class WarpAttend(PrefillAttend):
    stages_in_q = True

    def operands(self, row_group, column_group) -> "WarpOperands":
        return WarpOperands.create(self.kernel, self.tiles, row_group)

    def turns(self, group) -> Turns:
        return Turns(group, 1)

    def staging(self, consumer_warp):
        """This warp's own rows of the first column block of Q."""
        return shared_address(self.tiles.q.iterator) + consumer_warp * (WARP_ROWS * copy.SWIZZLE_ROW_BYTES)


@dataclass
class SkippingWarpAttend(SkippingAttend, WarpAttend):
    """Attention over products of warps that leaves tiles out by the rule of :class:`SkippingAttend`."""


@dataclass
class WarpOperands(RowOperands):
    """Operands of one warp: K and V in shared memory, all else in registers."""

    q: Any  # words of two elements, in the order of products
    q_tile: Int32  # address of the warp's rows in the only stage
    k_tile: Int32
    v_tile: Int32
    kernel: Any  # configuration only

    @staticmethod
    def create(kernel, tiles: SharedTiles, row_group) -> "WarpOperands":
        tile_n = kernel.tile.n
        depth_qk, depth_v = kernel.config.depth
        first_row = row_group * WARPGROUP_ROWS + warp_in_group() * WARP_ROWS
        kept = depth_qk if depth_qk <= Q_REGISTERS_TO else MMA_DEPTH
        return WarpOperands(
            s=cute.make_rmem_tensor(tile_n // 2, Float32),
            o=cute.make_rmem_tensor(depth_v // 2, Float32),
            p=cute.make_rmem_tensor(tile_n // 4, Uint32),
            dtype=kernel.dtype,
            tile_n=tile_n,
            depth_qk=depth_qk,
            depth_v=depth_v,
            q=cute.make_rmem_tensor(kept // 4, Uint32),
            q_tile=shared_address(tiles.q.iterator) + first_row * copy.SWIZZLE_ROW_BYTES,
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator),
            kernel=kernel,
        )

    @property
    def keeps_q(self) -> bool:
        return self.depth_qk <= Q_REGISTERS_TO

    def begin(self, q_stage) -> None:
        if const_expr(self.keeps_q):
            for step in range(self.depth_qk // MMA_DEPTH):
                for i, word in enumerate(self._q_words(self.q_tile, step)):
                    self.q[4 * step + i] = word

    def _q_words(self, tile, step: int) -> list:
        """Q of the warp's rows for one product, from the stage at ``tile``."""
        config, lane = self.kernel.config, cute.arch.lane_idx()
        row, chunk = lane % WARP_ROWS, 2 * step + lane // WARP_ROWS
        return copy.load_matrix_x4(copy.tile_chunk(tile, row, chunk, self.kernel.tile.m, config.q_columns, False))

    def issue_qk(self, q_stage, k_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.operand_columns[0], self.kernel.source.columns_first
        stage = self.k_tile + k_stage * (self.tile_n * columns * 2)
        q_tile = tied(self.q_tile, k_stage)  # the compiler would keep Q in registers that there are not
        self.s.fill(0.0)
        for step in range(self.depth_qk // MMA_DEPTH):
            a = [self.q[4 * step + i] for i in range(4)] if self.keeps_q else self._q_words(q_tile, step)
            for pair in range(self.tile_n // (2 * MMA_COLUMNS)):
                # Two eights of keys by two chunks of columns.
                key, chunk = 16 * pair + lane // 16 * 8 + lane % 8, 2 * step + lane // 8 % 2
                b = copy.load_matrix_x4(copy.tile_chunk(stage, key, chunk, self.tile_n, columns, columns_first))
                for half in range(2):
                    accumulate(self.s, 2 * pair + half, a, b[2 * half : 2 * half + 2], self.dtype)

    def issue_pv(self, v_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.operand_columns[1], self.kernel.source.columns_first
        stage = self.v_tile + v_stage * (self.tile_n * columns * 2)
        for step in range(self.tile_n // MMA_DEPTH):
            a = [self.p[4 * step + i] for i in range(4)]
            for pair in range(self.depth_v // (2 * MMA_COLUMNS)):
                key, chunk = 16 * step + lane % 16, 2 * pair + lane // 16
                place = copy.tile_chunk(stage, key, chunk, self.tile_n, columns, columns_first)
                b = copy.load_matrix_x4(place, transposes=True)
                for half in range(2):
                    accumulate(self.o, 2 * pair + half, a, b[2 * half : 2 * half + 2], self.dtype)

    def wait(self, pending: int) -> None:
        """Products are there when they have been issued."""
