"""Decode configs of Blackwell (sm_100a, sm_103a) with tcgen05: leaves of keys, combined as on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType, Tile, Traits, power_of_two_in
from hopwell.kernels.config.decode import STAGE_BYTES, DecodeConfig
from hopwell.kernels.config.splitting import (
    LEAF_TILE,
    MOST_TREE_COLUMNS,
    ROWS,
    SWAP_AB_ROWS,
    LaunchSizes,
    scratch_bytes,
)
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import ARCHITECTURES
from hopwell.kernels.sm100.common.resources import TENSOR_MEMORY_COLUMNS, Columns, allocated

PAIR = 2  # tiles, or blocks of 64 columns of V, whose dequantized elements are the 128 rows of operand A
MOST_CTAS = 3  # of an SM


@dataclass(frozen=True)
class Sm100DecodeConfig(DecodeConfig):
    """A decode kernel whose S and O are in tensor memory until they are complete. Leaves, tree and registers are as in
    Hopper's kernels with a tree. Keys and values of 8 and 4 bits are dequantized into tensor memory."""

    instruction_in_name: ClassVar[str] = "tcgen05"

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        if traits.dims[0] > MOST_TREE_COLUMNS:
            return (
                f"there is no tcgen05 decode kernel for {arch} at head dim {traits.dims[0]}; most: {MOST_TREE_COLUMNS}"
            )
        return super().refusal(traits, arch)

    @classmethod
    def rows_for(cls, rows: int, head_dim: int, kv_type: KvType) -> int:
        """Return the rows of a tile. More packed rows take several of the largest tiles, which read the keys each."""
        tiles = cls.tiles_with_tree(head_dim, kv_type)
        return min((m for m in tiles if m >= rows), default=max(tiles, default=ROWS))

    @classmethod
    def tiles_with_tree(cls, head_dim: int, kv_type: KvType, dtype: str = "bf16") -> tuple[int, ...]:
        """Return the rows of tiles. Warp-MMA kernels serve wider head dims."""
        return super().tiles_with_tree(head_dim, kv_type, dtype) if head_dim <= MOST_TREE_COLUMNS else ()

    @classmethod
    def scratch_bytes(cls, sizes: LaunchSizes) -> int:
        return scratch_bytes(sizes, cls.tiled, MOST_CTAS)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM. NVFP4 keys take the most time to dequantize; other CTAs hide the latencies of that chain."""
        has_room = self.rows == SWAP_AB_ROWS[0] and max(self.layout.tile_dims) <= PAIR * BLOCK_COLUMNS
        return MOST_CTAS if self.kv_type is KvType.NVFP4 and has_room else super().ctas_per_sm

    @property
    def tile(self) -> Tile:
        # With 136 registers up to 8 instructions of a leaf spill. Two CTAs of an SM with 192 would take 1934 cycles for
        # a leaf, and three take 1482 (B200, by the model, 2026-11-27).
        if self.ctas_per_sm < MOST_CTAS:
            return super().tile
        stages = power_of_two_in(STAGE_BYTES // MOST_CTAS // (LEAF_TILE * HALFWORD_BYTES * self.layout.columns[0]))
        return replace(super().tile, kv_stages=stages, producer_registers=24, consumer_registers=136)

    @property
    def matrix_instruction(self) -> str:
        return ARCHITECTURES[self.arch].matrix_instruction

    @property
    def products_of_blocks(self) -> tuple[int, int]:
        """Products of S and of O of a leaf. With dequantized operands they have two blocks of 64 keys, or of 64
        columns of V."""
        share = 1 if self.kv_type is KvType.WIDE else PAIR
        return -(-self.leaf_tiles // share), -(-self.value_blocks // share)

    @property
    def operand_columns(self) -> int:
        """Columns of tensor memory of a pair of tiles of K or V as operand A; a column has two 16-bit elements."""
        k_columns = -(-self.layout.tile_dims[0] // BLOCK_COLUMNS) * BLOCK_COLUMNS
        return max(k_columns, PAIR * self.products_of_blocks[1] * LEAF_TILE) // 2

    @property
    def operand_buffers(self) -> int:
        """Buffers of operand A of a warpgroup, for a pair of tiles each. If there is room for two, one is multiplied
        while the next is dequantized."""
        if self.kv_type is KvType.WIDE:
            return 0
        used = self.rows * sum(self.products_of_blocks)
        pair = self.operand_columns * self.consumer_warpgroups
        return 2 if used + 2 * pair <= TENSOR_MEMORY_COLUMNS // self.ctas_per_sm else 1

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory: a column for each row and product of S and O, then buffers of operand A."""
        buffers = self.operand_buffers * self.consumer_warpgroups
        s, o = (self.rows * products for products in self.products_of_blocks)
        return Columns(dict(s=s, o=o, a=buffers * self.operand_columns))

    @property
    def allocations(self) -> tuple[int, ...]:
        """Columns to allocate, each a power of two: for everything, or for S and O, and for operand A."""
        columns, most = self.columns, TENSOR_MEMORY_COLUMNS // self.ctas_per_sm
        if (whole := allocated(columns.total)) <= most or not self.operand_buffers:
            return (whole,)
        return allocated(columns.first("a")), allocated(columns.widths["a"])

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        most, taken = TENSOR_MEMORY_COLUMNS // self.ctas_per_sm, sum(self.allocations)
        reason = f"{self.ctas_per_sm} CTAs of an SM have {most} columns of tensor memory each, not {taken}"
        yield taken <= most, reason
        # Two warps issue S and O, and each waits for its own turns of a buffer. With one buffer it could take an old
        # phase of the other warpgroup's buffer for its own turn.
        yield self.consumer_warpgroups == 1 or self.operand_buffers != 1, "two warpgroups need two buffers of operand A"
