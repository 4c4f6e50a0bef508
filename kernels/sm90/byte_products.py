"""Products of one warp over 8-bit keys and values, which it widens in its registers: S^T = K Q^T, and what those with
V share with it.

Tiles of 16-bit keys are multiplied by whole warpgroups out of shared memory. Those of 8-bit keys would have to go
through it twice, and where memory is the limit, the tensor cores have time to spare. So a warp reads bytes straight
into the fragments of mma.sync. All products are of float16, which holds every e4m3 and int8 exactly, and weights better
than bf16.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, shared_address
from hopwell.kernels.parts.fragment import ColumnFragment
from hopwell.kernels.parts.warp_mma import MMA_COLUMNS, QUAD, accumulate, place_in_warp
from hopwell.kernels.parts.widen import widened

BLOCK_BYTES = copy.SWIZZLE_ROW_BYTES


@dataclass(frozen=True)
class ColumnBlock:
    """``width`` columns of keys or values in a row of 128 bytes, an equal part of them side by side for each lane."""

    index: int
    width: int

    @staticmethod
    def all(head_dim: int) -> "list[ColumnBlock]":
        """Return the column blocks of a head dim, the last of which may be half a block."""
        widths = [min(head_dim - first, BLOCK_BYTES) for first in range(0, head_dim, BLOCK_BYTES)]
        return [ColumnBlock(i, BLOCK_BYTES // (1 if width > BLOCK_BYTES // 2 else 2)) for i, width in enumerate(widths)]

    @property
    def first(self) -> int:
        return self.index * BLOCK_BYTES

    @property
    def key_part(self) -> int:
        """Columns of Q and K that a lane holds."""
        return self.width // QUAD

    @property
    def value_part(self) -> int:
        """Columns of V and O that a lane holds."""
        return self.width // (LANES // QUAD)


def padded(head_dim: int) -> int:
    """Columns of all blocks."""
    return sum(block.width for block in ColumnBlock.all(head_dim))


@dataclass
class ByteProducts(DeviceStruct):
    """Products of 8 * ``products`` rows with 8-bit K and V. Q is in registers, K and V in shared memory. Lane (g, t) of
    ``place_in_warp`` has part t of a column block of Q and K."""

    q: Any
    unit: Any  # of each row: what its scores have to be multiplied by
    q_tile: Int32  # addresses of stage 0
    k_tile: Int32
    v_tile: Int32
    products: int
    kernel: Any  # configuration only

    @staticmethod
    def fields(kernel, tiles, products: int) -> dict[str, Any]:
        """Return the values of the fields above by their names."""
        width = padded(kernel.config.head_dim_qk)
        return dict(
            q=cute.make_rmem_tensor(width * products * MMA_COLUMNS // LANES // 2, Uint32),
            unit=cute.make_rmem_tensor(2 * products, Float32),
            q_tile=shared_address(tiles.q.iterator),
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator),
            products=products,
            kernel=kernel,
        )

    @property
    def blocks(self) -> list[ColumnBlock]:
        return ColumnBlock.all(self.kernel.config.head_dim_qk)

    def load_q(self, stage, first_row) -> None:
        """Load Q of the warp's rows as float16. Each row gets those of bf16's exponents that it needs."""
        g, t = place_in_warp()
        tile = self.q_tile + stage * (self.kernel.tile.m * self.kernel.config.q_columns * 2)
        for product in range(self.products):
            words = []
            for block in self.blocks:
                chunks = block.key_part * 2 // copy.CHUNK_BYTES
                for i in range(chunks):
                    chunk = block.first * 2 // copy.CHUNK_BYTES + t * chunks + i
                    column_block = tile + chunk // copy.CHUNKS_PER_ROW * (self.kernel.tile.m * copy.SWIZZLE_ROW_BYTES)
                    row = first_row + product * MMA_COLUMNS + g
                    words += copy.load_shared(copy.swizzled_chunk(column_block, row, chunk % copy.CHUNKS_PER_ROW), 4)
            if self.kernel.dtype is BFloat16:
                words = self._to_float16(words, product)
            for i, word in enumerate(words):
                self.q[i // 2 * (2 * self.products) + 2 * product + i % 2] = word

    def _to_float16(self, words: list, product: int) -> list:
        """Row g of a product, times a power of two of its own."""
        values = [half for word in words for half in copy.unpack_bf16_x2(word)]
        largest = Float32(0.0)
        for value in values:
            largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        factor, unit = power_of_two(cute.arch.warp_reduction_max(largest, threads_in_group=QUAD))
        for c in range(2):
            lane = (ColumnFragment.first_row() + c) * QUAD
            self.unit[2 * product + c] = cute.arch.shuffle_sync(unit, lane)
        return [copy.pack_x2(Float16, low * factor, high * factor) for low, high in _pairs(values)]

    def score(self, scores: ColumnFragment, eights: list[tuple]) -> None:
        """Compute S^T of some groups of 8 keys; ``eights`` has the stage of each, and its number there."""
        g, t = place_in_warp()
        scores.registers.fill(0.0)
        depth = 0
        for block in self.blocks:
            rows = [self.rows(self.k_tile, 0, *eight, block) for eight in eights]
            chunks = block.key_part // copy.CHUNK_BYTES
            for chunk in range(chunks):
                keys = [copy.load_shared(copy.swizzled_chunk(row, g, t * chunks + chunk), 4) for row in rows]
                for word in range(4):
                    b = _pairs([self.q[2 * self.products * depth + i] for i in range(2 * self.products)])
                    wide = [widened(self.kernel.config.kv_type, key[word]) for key in keys]
                    for i in range(0, len(wide), 2):
                        a = [wide[i + row][half] for half in range(2) for row in range(2)]
                        for product in range(self.products):
                            accumulate(scores.registers, i // 2 * self.products + product, a, b[product])
                    depth += 1
        if self.kernel.dtype is BFloat16:
            for r in range(scores.rows):
                for c in range(scores.columns):
                    scores.set(r, c, scores.get(r, c) * self.unit[r])

    def rows(self, tile, part: int, stage, eight, block: ColumnBlock):
        """Address of a column block of 8 keys of a stage of K (0) or V (1)."""
        n, columns = self.kernel.tile.n, self.kernel.config.columns[part]
        place = copy.block_row(eight * copy.GROUP_ROWS, block.index, n, columns, self.kernel.source.columns_first)
        return tile + stage * (n * columns * 2) + place * copy.SWIZZLE_ROW_BYTES


def _pairs(values: list) -> list:
    return list(zip(values[::2], values[1::2], strict=True))


@dsl_user_op
def power_of_two(largest, *, loc=None, ip=None) -> tuple:
    """A power of two that brings a positive number into [128, 256), and its inverse."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 e, f; mov.b32 e, {$r0}; shr.u32 e, e, 23; max.u32 e, e, 8; "
        "sub.u32 f, 261, e; shl.b32 f, f, 23; mov.b32 {$w0}, f; "
        "sub.u32 f, e, 7; shl.b32 f, f, 23; mov.b32 {$w1}, f; }",
        write_only_types=[Float32] * 2,
        read_only_args=[largest],
        loc=loc,
        ip=ip,
    )
