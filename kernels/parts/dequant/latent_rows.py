"""Rows of latent keys of 8 bits that become rows of 16-bit elements where they lie in shared memory.

A lane copies 16 bytes of a row, which are two vectors of 16-bit elements, to where the first of these will be. Another
lane, which waits for the copies as consumers do elsewhere, reads them into registers and writes both vectors. So bytes
on their way take no memory of their own, and as many of them can be under way as stages are free.
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
from hopwell.kernels.parts.load.kv_rows import PageRows, TopkRows
from hopwell.kernels.parts.load.kv_source import KvOperand

LANES_PER_ROW = BLOCK_COLUMNS // copy.VECTOR_BYTES  # of which each copies 16 bytes of a column block


@dataclass(frozen=True)
class LatentRowFormat:
    """What a part of a latent key is made of: ``byte_blocks`` column blocks of 8-bit elements, and then ``wide_blocks``
    of 16-bit ones. Distances are in bytes from the part's first element."""

    kind: KvType
    dtype: Any  # that elements are dequantized to
    byte_blocks: int
    wide_blocks: int = 0
    to_wide: int = 0  # distance of the first of the wide blocks
    to_scales: int | None = None  # distance of the row's scales, four float32; None where there are none
    first_scale: int = 0  # the one of the part's first columns

    @staticmethod
    def of_halves(
        kind: KvType, dtype: Any, dims: tuple[int, int], latent: int
    ) -> "tuple[LatentRowFormat, LatentRowFormat]":
        """Return the left and the right part of rows with ``latent`` columns that are values as well, of ``dims``
        columns in all."""
        left, right = dims
        if kind is not KvType.FP8_DS_MLA:
            return tuple(LatentRowFormat(kind, dtype, columns // BLOCK_COLUMNS) for columns in dims)
        scales, wide = latent, latent + 4 * (latent // SCALE_COLUMNS)
        rotary = (left + right - latent) // BLOCK_COLUMNS
        return (
            LatentRowFormat(kind, dtype, left // BLOCK_COLUMNS, to_scales=scales),
            LatentRowFormat(
                kind,
                dtype,
                right // BLOCK_COLUMNS - rotary,
                rotary,
                to_wide=wide - left,
                to_scales=scales - left,
                first_scale=left // SCALE_COLUMNS,
            ),
        )


@dataclass
class DequantizedOperand(KvOperand):
    """A part of the latent keys in global memory, with what its rows are made of."""

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
        """Return where the first vector of what a vector of bytes becomes goes. The second one differs in the lowest
        bit of its place, whatever the swizzle."""
        return super()._target(stage, row, 2 * vector)

    def _block(self, block: int):
        """Return the distance of a column block of the tile from the first one."""
        return self.vector_place(0, 0, block, 0)

    @cute.jit
    def _copy_row(self, row, target, vector) -> None:
        form, wanted = self.row_format, row != 0
        source = row + vector * copy.VECTOR_BYTES
        for block in cutlass.range_constexpr(form.byte_blocks):
            copy.async_copy_or_zero(target + self._block(block), source + block * BLOCK_COLUMNS, wanted)
        if const_expr(form.to_scales is not None):
            # Each lane has a place for them: where the second vector of its first column block will be.
            copy.async_copy_or_zero(target ^ copy.VECTOR_BYTES, row + form.to_scales, wanted)
        for block in cutlass.range_constexpr(form.wide_blocks):
            wide = row + form.to_wide + block * copy.SWIZZLE_ROW_BYTES + vector * (2 * copy.VECTOR_BYTES)
            place = target + self._block(form.byte_blocks + block)
            copy.async_copy_or_zero(place, wide, wanted)
            copy.async_copy_or_zero(place ^ copy.VECTOR_BYTES, wide + copy.VECTOR_BYTES, wanted)

    @cute.jit
    def dequantize(self, stage) -> None:
        """Dequantize this warp's rows of a stage, whose bytes are there."""
        form = self.row_format
        row, vector = cute.arch.lane_idx() // LANES_PER_ROW, cute.arch.lane_idx() % LANES_PER_ROW
        target = self._target(stage, self.first_row + row, vector)
        for first in cutlass.range(0, self.rows, ATOM_ROWS, unroll=1):
            place = target + self.vector_place(0, first, 0, 0)
            loaded = [copy.load_shared(place + self._block(block), 4) for block in range(form.byte_blocks)]
            scales = None
            if const_expr(form.to_scales is not None):
                scales = copy.load_shared(place ^ copy.VECTOR_BYTES, 4, Float32)
            for block in cutlass.range_constexpr(form.byte_blocks):
                scale = None
                if const_expr(form.to_scales is not None):
                    scale = scales[form.first_scale + block * BLOCK_COLUMNS // SCALE_COLUMNS]
                wide = [w for word in loaded[block] for w in dequantized_words(form.kind, form.dtype, word, scale)]
                at = place + self._block(block)
                copy.store_shared(at, wide[:4])
                copy.store_shared(at ^ copy.VECTOR_BYTES, wide[4:])


@dataclass
class DequantizedTopkRows(DequantizedPageRows, TopkRows):
    """The table holds tokens instead of pages, as that of :class:`TopkRows`."""


DEQUANTIZED = {PageRows: DequantizedPageRows, TopkRows: DequantizedTopkRows}
