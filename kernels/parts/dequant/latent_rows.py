"""Rows of 8-bit latent keys that are dequantized in place in shared memory.

A lane copies 16 bytes of a row to the place of the first of their two result vectors of 16-bit elements. Another lane
waits for the copies, as consumers do elsewhere. It reads the bytes into registers and writes both vectors. Bytes in
flight therefore take no memory of their own, and every free stage can have copies in flight.
"""

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.elements import SCALE_COLUMNS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.dequant.eight_bit import dequantized_words
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import KvOperand

LANES_PER_ROW = BLOCK_COLUMNS // copy.VECTOR_BYTES  # lanes per row; each copies 16 bytes of a column block


@dataclass(frozen=True)
class LatentRowFormat:
    """The format of a part of a latent key.

    The part has ``eight_bit_blocks`` column blocks of 8-bit elements, then ``wide_blocks`` of 16-bit elements.

    Distances are in bytes from the part's first element.
    """

    kind: KvType
    dtype: Any  # result type of the dequantized elements
    eight_bit_blocks: int
    wide_blocks: int = 0
    to_wide: int = 0  # distance to the first of the wide blocks
    to_scales: int | None = None  # distance to the row's scales, four float32; None without scales
    first_scale: int = 0  # index of the scale of the part's first columns

    @staticmethod
    def of_halves(
        kind: KvType, dtype: Any, dims: tuple[int, int], latent: int
    ) -> "tuple[LatentRowFormat, LatentRowFormat]":
        """Return the formats of the left and the right part of a row.

        The parts have ``dims`` columns. The first ``latent`` columns of the row are values as well.
        """
        left, right = dims
        rest = (left + right, latent)
        return LatentRowFormat.of(kind, dtype, 0, left, latent), LatentRowFormat.of(kind, dtype, left, *rest)

    @staticmethod
    def of(kind: KvType, dtype: Any, first: int, end: int, latent: int) -> "LatentRowFormat":
        """Return the format of the columns from ``first`` to ``end`` of a row whose first ``latent`` columns are values
        as well."""
        if kind is not KvType.FP8_DS_MLA:
            return LatentRowFormat(kind, dtype, (end - first) // BLOCK_COLUMNS)
        return LatentRowFormat(
            kind,
            dtype,
            (min(end, latent) - first) // BLOCK_COLUMNS,
            max(end - latent, 0) // BLOCK_COLUMNS,
            to_wide=latent + 4 * (latent // SCALE_COLUMNS) - first,
            to_scales=latent - first,
            first_scale=first // SCALE_COLUMNS,
        )

    def store(self, place, words: list, scale) -> None:
        """Dequantize 16 bytes and store their two result vectors, which differ in the lowest bit of a vector index."""
        wide = [w for word in words for w in dequantized_words(self.kind, self.dtype, word, scale)]
        copy.store_shared(place, wide[:4])
        copy.store_shared(place ^ copy.VECTOR_BYTES, wide[4:])


@dataclass
class DequantizedOperand(KvOperand):
    """A part of the latent keys in global memory, with the format of its rows."""

    row_format: LatentRowFormat = field(kw_only=True)


@dataclass
class DequantizedPageRows(PageRows):
    row_format: LatentRowFormat = field(kw_only=True)

    @classmethod
    def create(cls, operand: DequantizedOperand, tile, descriptor, shared, tile_n: int, box_rows: int):
        form = operand.row_format
        return super().create(operand, tile, descriptor, shared, tile_n, box_rows, row_format=form)

    @property
    def lanes_per_row(self) -> int:
        return LANES_PER_ROW

    def _target(self, stage, row, vector):
        """Return the address of the first result vector of a vector of bytes.

        The address of the second result vector differs in the lowest bit of its vector index, for any swizzle.
        """
        return super()._target(stage, row, 2 * vector)

    def _block(self, block: int):
        """Return the distance of a column block of the tile from the first one."""
        return self.vector_place(0, 0, block, 0)

    @cute.jit
    def _copy_row(self, row, target, vector) -> None:
        form, wanted = self.row_format, row != 0
        source = row + vector * copy.VECTOR_BYTES
        for block in cutlass.range_constexpr(form.eight_bit_blocks):
            copy.async_copy_or_zero(target + self._block(block), source + block * BLOCK_COLUMNS, wanted)
        if const_expr(form.to_scales is not None):
            # Each lane stores the scales in the place of the second result vector of its first column block.
            copy.async_copy_or_zero(target ^ copy.VECTOR_BYTES, row + form.to_scales, wanted)
        for block in cutlass.range_constexpr(form.wide_blocks):
            wide = row + form.to_wide + block * copy.SWIZZLE_ROW_BYTES + vector * (2 * copy.VECTOR_BYTES)
            place = target + self._block(form.eight_bit_blocks + block)
            copy.async_copy_or_zero(place, wide, wanted)
            copy.async_copy_or_zero(place ^ copy.VECTOR_BYTES, wide + copy.VECTOR_BYTES, wanted)

    @cute.jit
    def dequantize(self, stage) -> None:
        """Dequantize this warp's rows of a stage. The bytes must have arrived."""
        form = self.row_format
        row, vector = cute.arch.lane_idx() // LANES_PER_ROW, cute.arch.lane_idx() % LANES_PER_ROW
        target = self._target(stage, self.first_row + row, vector)
        for first in cutlass.range(0, self.rows, ATOM_ROWS, unroll=1):
            place = target + self.vector_place(0, first, 0, 0)
            loaded = [copy.load_shared(place + self._block(block), 4) for block in range(form.eight_bit_blocks)]
            scales = None
            if const_expr(form.to_scales is not None):
                scales = copy.load_shared(place ^ copy.VECTOR_BYTES, 4, Float32)
            for block in cutlass.range_constexpr(form.eight_bit_blocks):
                scale = None
                if const_expr(form.to_scales is not None):
                    scale = scales[form.first_scale + block * BLOCK_COLUMNS // SCALE_COLUMNS]
                form.store(place + self._block(block), loaded[block], scale)
