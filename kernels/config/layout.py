"""Widths of Q, K and V on their way from global memory to the matrix products of a kernel.

Operands pass through up to three places: memory, the stages that the load warps fill, and the tiles that are
multiplied. Each place may have another width. Widths in halfwords (16 bits) fit TMA, which moves 8-bit elements in
pairs.
"""

from __future__ import annotations

from typing import Any

from hopwell.kernels.config.base import (
    BLOCK_COLUMNS,
    MMA_DEPTH,
    REGISTERS_BESIDE_SUMS,
    KvType,
    rounded_up,
)
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP


class OperandLayout:
    """Widths of the operands of a kernel with the config ``config``."""

    def __init__(self, config: Any):
        self.config = config  # a KernelConfig of the family

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Widths in halfwords of the rows of K and of V that the two loading warps fetch."""
        per_word = 16 // self.config.kv_element.bits
        return self.config.head_dim_qk // per_word, self.config.head_dim_v // per_word

    def kv_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Convert strides of K or V, in units of ``kv_bytes``, to strides in halfwords."""
        return _in_halfwords(self.config.kv_bytes, strides)

    def q_strides(self, *strides: Any) -> tuple[Any, ...]:
        """Convert strides of Q, given in elements, to strides in halfwords."""
        return _in_halfwords(self._loaded_q_bytes, strides)

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the tiles that the two loading warps fill: whole column blocks of the swizzle."""
        first, second = self.kv_dims
        return rounded_up(first, BLOCK_COLUMNS), rounded_up(second, BLOCK_COLUMNS)

    @property
    def operand_columns(self) -> tuple[int, int]:
        """Columns in halfwords of the tiles of K and V that are multiplied."""
        return self.columns

    @property
    def stage_columns(self) -> tuple[int, int]:
        """Columns of the stages that the two loading warps fill: the operand's columns if dequantized in place, else
        the loaded columns."""
        return self.operand_columns if self.config.dequantizes_in_place else self.columns

    @property
    def loaded_depth(self) -> tuple[int, int]:
        """Columns of the loaded tiles of K and V that some warp reads."""
        return self.depth[0], self.depth[1] * self.config.v_splits

    @property
    def q_dim(self) -> int:
        """Width of a row of Q in memory, in halfwords."""
        return self.config.head_dim_qk * self._loaded_q_bytes // HALFWORD_BYTES

    @property
    def _loaded_q_bytes(self) -> int:
        return 1 if self.config.dequantizes_q else self.config.q_bytes

    @property
    def q_columns(self) -> int:
        """Columns of the Q tile in shared memory, in halfwords."""
        return rounded_up(self.config.head_dim_qk * self.config.q_bytes // HALFWORD_BYTES, BLOCK_COLUMNS)

    @property
    def loaded_q_columns(self) -> int:
        """Columns of the Q tile that are loaded, in halfwords: its last columns."""
        return rounded_up(self.q_dim, BLOCK_COLUMNS)

    @property
    def first_loaded_q_block(self) -> int:
        return (self.q_columns - self.loaded_q_columns) // BLOCK_COLUMNS

    @property
    def depth(self) -> tuple[int, int]:
        """Columns of Q and K, and of V, that a warpgroup multiplies, rounded up to what matrix instructions take.

        A product with V is one instruction over all columns. It takes whole column blocks if there is more than one.
        """
        columns = self.operand_columns[1]
        whole_blocks = columns > BLOCK_COLUMNS and not self.config.uses_fp8_mma
        value = columns if whole_blocks else rounded_up(self.config.head_dim_v, MMA_DEPTH)
        return rounded_up(self.config.head_dim_qk, self.config.mma_depth), value // self.config.v_splits

    @property
    def product_columns(self) -> int:
        """Columns of V that a matrix instruction multiplies at a time.

        An instruction takes all columns of a warpgroup if a thread has enough registers at launch for all of their
        sums. ptxas refuses a larger instruction, so half of the columns are multiplied at a time then.
        """
        columns = self.depth[1]
        fits = columns * 64 // WARPGROUP + REGISTERS_BESIDE_SUMS <= self.config.launch_registers
        return columns if fits else columns // 2


class PrefillLayout(OperandLayout):
    """Widths of prefill, whose K and V may be converted in shared memory."""

    @property
    def operand_columns(self) -> tuple[int, int]:
        if self.config.uses_fp8_mma:
            return self.columns
        return rounded_up(self.config.head_dim_qk, BLOCK_COLUMNS), rounded_up(self.config.head_dim_v, BLOCK_COLUMNS)

    @property
    def transposed_columns(self) -> int:
        """Elements of a row of a transposed V tile: its keys, rounded up to whole rows of the swizzle."""
        return rounded_up(self.config.tile.n, HALFWORD_BYTES * BLOCK_COLUMNS)

    @property
    def transposed_rows(self) -> int:
        """Rows of a transposed V tile: the columns that all warpgroups multiply."""
        return self.depth[1] * self.config.v_splits

    @property
    def converted_bytes(self) -> dict[str, int]:
        """Bytes of a tile of K and of V as multiplied, if they are converted."""
        if self.config.transposes_v:
            return {"v": self.transposed_rows * self.transposed_columns}
        if self.config.dequantizes_in_place:
            return {}
        key, value = (self.config.tile.n * columns * HALFWORD_BYTES for columns in self.operand_columns)
        return {"k": key, "v": value}

    @property
    def loaded_depth(self) -> tuple[int, int]:
        return self.kv_dims if self.config.converts else super().loaded_depth


class DecodeLayout(OperandLayout):
    """Widths of decode, whose K and V may be converted in registers or in place."""

    @property
    def tile_dims(self) -> tuple[int, int]:
        """Head dims (QK, V) of tiles, in elements.

        Each lane has an equal part of a row of NVFP4, and the part consists of whole blocks. Rows of other sizes are
        padded to the next power of two. Scales of the padding are zeros.
        """
        dims = self.config.head_dim_qk, self.config.head_dim_v
        if self.config.kv_type is not KvType.NVFP4:
            return dims
        first, second = (max(1 << (dim - 1).bit_length(), BLOCK_COLUMNS) for dim in dims)
        return first, second

    @property
    def scale_blocks(self) -> tuple[int, int]:
        """Block scales of a row of K and of V in shared memory."""
        first, second = (self.config.kv_element.scales_of(dim) for dim in self.tile_dims)
        return first, second

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of K and V tiles. Rows of 4-bit codes are not padded to 128 bytes.

        Padding would keep unread bytes in flight and take memory from further stages.
        """
        if self.config.dequantizes_in_registers and self.config.kv_type is KvType.NVFP4:
            per_word = 16 // self.config.kv_element.bits
            return self.tile_dims[0] // per_word, self.tile_dims[1] // per_word
        return super().columns

    @property
    def q_columns(self) -> int:
        return rounded_up(self.tile_dims[0] * self.config.q_bytes // HALFWORD_BYTES, BLOCK_COLUMNS)

    @property
    def depth(self) -> tuple[int, int]:
        return self.kv_dims if self.config.dequantizes_in_registers else super().depth

    @property
    def loaded_depth(self) -> tuple[int, int]:
        return self.kv_dims if self.config.dequantizes_in_place else super().loaded_depth

    @property
    def operand_columns(self) -> tuple[int, int]:
        if not self.config.dequantizes_in_place:
            return self.columns
        return rounded_up(self.config.head_dim_qk, BLOCK_COLUMNS), rounded_up(self.config.head_dim_v, BLOCK_COLUMNS)


class MlaLayout(DecodeLayout):
    """Widths of MLA, whose K and V are the left and right halves of a latent key."""

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Widths in halfwords, as multiplied, of the left half of the value's columns and of all columns to its
        right."""
        left = self.config.head_dim_v // 2
        return left * self.config.q_bytes // HALFWORD_BYTES, (
            self.config.head_dim_qk - left
        ) * self.config.q_bytes // HALFWORD_BYTES

    @property
    def columns(self) -> tuple[int, int]:
        """Columns of the two halves of a key tile.

        If the right half of a key ends with the value, one more column block makes room for P of tile A. P of few rows
        has separate memory.
        """
        left, right = self.kv_dims
        if self.config.uses_fp8_mma:
            return left, rounded_up(right, BLOCK_COLUMNS)
        return left, right if self.config.has_tree else max(right, self.config.head_dim_v // 2 + BLOCK_COLUMNS)

    @property
    def depth(self) -> tuple[int, int]:
        return self.config.head_dim_qk, self.config.head_dim_v // self.config.v_splits


def _in_halfwords(element_bytes: int, strides: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert strides in elements to strides in halfwords."""
    if element_bytes == HALFWORD_BYTES:
        return strides
    return tuple(stride * element_bytes // HALFWORD_BYTES for stride in strides)
