"""Decode configs of Blackwell (sm_100a, sm_103a) with tcgen05: leaves of keys, combined as on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType, Traits
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE, MOST_TREE_COLUMNS, ROWS
from hopwell.kernels.hardware import ARCHITECTURES
from hopwell.kernels.sm100.common.resources import TENSOR_MEMORY_COLUMNS, Columns

LEAST_COLUMNS = 32  # of an allocation, which is a power of two


@dataclass(frozen=True)
class Sm100DecodeConfig(DecodeConfig):
    """A decode kernel whose S and O are in tensor memory until they are complete. Leaves, tree and registers are as in
    Hopper's kernels with a tree. Keys and values of 8 and 4 bits are dequantized into tensor memory."""

    instruction_in_name: ClassVar[str] = "tcgen05"

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        most = max(cls.tiles_with_tree(traits.dims[0], traits.kv_type), default=0)
        if traits.rows > most:
            return f"there is no tcgen05 decode kernel for {arch} with {traits.rows} packed rows; most: {most}"
        return super().refusal(traits, arch)

    @classmethod
    def rows_for(cls, rows: int, head_dim: int, kv_type: KvType) -> int:
        return min((m for m in cls.tiles_with_tree(head_dim, kv_type) if m >= rows), default=ROWS)

    @classmethod
    def tiles_with_tree(cls, head_dim: int, kv_type: KvType, dtype: str = "bf16") -> tuple[int, ...]:
        """Return the rows of tiles. Beyond these head dims, tensor memory has no room for operand A of two CTAs."""
        return super().tiles_with_tree(head_dim, kv_type, dtype) if head_dim <= MOST_TREE_COLUMNS else ()

    @property
    def matrix_instruction(self) -> str:
        return ARCHITECTURES[self.arch].matrix_instruction

    @property
    def operand_columns(self) -> int:
        """Columns of tensor memory of a tile of K or V as operand A; a column has two 16-bit elements."""
        k_columns = -(-self.layout.tile_dims[0] // BLOCK_COLUMNS) * BLOCK_COLUMNS
        return max(k_columns, self.value_blocks * LEAF_TILE) // 2

    @property
    def operand_buffers(self) -> int:
        """Buffers of operand A of a warpgroup: one is multiplied while the next is dequantized, if there is room."""
        if self.kv_type is KvType.WIDE:
            return 0
        used = self.rows * (self.leaf_tiles + self.value_blocks)
        tile = self.operand_columns * self.consumer_warpgroups
        return 2 if used + 2 * tile <= TENSOR_MEMORY_COLUMNS // self.ctas_per_sm else 1

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory, for each row a score of each tile of a leaf, and O in parts of 64 columns of V.
        Buffers of operand A follow."""
        buffers = self.operand_buffers * self.consumer_warpgroups
        return Columns(
            dict(s=self.rows * self.leaf_tiles, o=self.rows * self.value_blocks, a=buffers * self.operand_columns)
        )

    @property
    def allocated_columns(self) -> int:
        """Columns to allocate: a power of two."""
        return max(1 << (self.columns.total - 1).bit_length(), LEAST_COLUMNS)

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        most = TENSOR_MEMORY_COLUMNS // self.ctas_per_sm
        reason = f"{self.ctas_per_sm} CTAs of an SM have {most} columns of tensor memory each, not {self.columns.total}"
        yield self.columns.total <= most, reason
