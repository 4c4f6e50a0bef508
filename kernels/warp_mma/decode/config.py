"""Decode configs of sm_120a, and of sm_100a and sm_103a, which have more shared memory; MLA decode configs of sm_120a.

A request with any number of rows is cut into tiles of few rows. Each tile reads the keys again, from the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from hopwell.kernels.config.base import KvType, Tile, power_of_two_in
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import LATENT_SWAP_AB_ROWS, LEAF_TILE, SWAP_AB_ROWS, node_bytes, tree_rows
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARP_MMA

# 256 threads, each with the most registers that an instruction can name. Roles trade registers only in kernels compiled
# for other architectures than sm_120.
#
# With large nodes ptxas uses all of them in the combine, and spills up to 26 longer-lived registers: addresses and
# counters. Up to 13 of these are read again in a leaf. A leaf takes microseconds of memory time.
_TILE = Tile(SWAP_AB_ROWS[0], LEAF_TILE, q_stages=1, kv_stages=1, producer_registers=104, consumer_registers=240)
_MOST_STAGES = 16  # of K, and of V; more, which the narrowest tiles could have, would not keep memory busier
_MOST_LEVELS = 24  # of a tree: 2^31 keys have fewer than 2^24 leaves of 128
_OTHER_BYTES = 2 << 10  # of shared memory: values exchanged between warps, the work queue, barriers


@dataclass(frozen=True)
class Sm120DecodeConfig(DecodeConfig):
    """A decode kernel with products of single warps (mma.sync)."""

    tiled: ClassVar[bool] = True
    matrix_instruction: ClassVar[str] = WARP_MMA

    @property
    def has_tree(self) -> bool:
        return True

    @property
    def dequantizes_in_place(self) -> bool:
        return False

    @classmethod
    def rows_for(cls, rows: int, head_dim: int, kv_type: KvType) -> int:
        *fewer, most = tree_rows(head_dim, kv_type.element("bf16").storage_bytes, cls.tiled)
        return min((m for m in fewer if m >= rows), default=most)

    @property
    def ctas_per_sm(self) -> int:
        return 1

    @property
    def tile(self) -> Tile:
        # K and V each get the largest power of two that is at most a third of shared memory. If that is less than a
        # tile, the tile is loaded by halves of its keys.
        row_bytes = HALFWORD_BYTES * self.layout.columns[0]
        stage_bytes = power_of_two_in(self.most_shared_bytes // 3)
        keys = min(LEAF_TILE, stage_bytes // row_bytes)
        stages = min(power_of_two_in(stage_bytes // (keys * row_bytes)), _MOST_STAGES)
        return replace(_TILE, m=self.rows, n=keys, kv_stages=stages)

    @property
    def smem_levels(self) -> int:
        """Tree levels in shared memory: the levels that fit beside K, V, their scales, Q and P. The longest possible
        output tile limits them, too."""
        key = HALFWORD_BYTES * sum(self.layout.columns) + sum(self.layout.scale_blocks)
        used = self.tile.kv_stages * self.tile.n * key + _OTHER_BYTES
        used += HALFWORD_BYTES * self.rows * (self.layout.q_columns + LEAF_TILE * self.leaf_tiles)
        return min((self.most_shared_bytes - used) // node_bytes(self.rows, self.head_dim_v), _MOST_LEVELS)


@dataclass(frozen=True)
class Sm120MlaConfig(MlaConfig):
    """An MLA decode kernel with products of single warps (mma.sync). One tile of keys with 576 columns, Q and P fill
    shared memory. The attend warps combine, and hold the first level of the tree in registers."""

    tiled: ClassVar[bool] = True
    most_rows: ClassVar[int] = LATENT_SWAP_AB_ROWS
    has_fp8_mma: ClassVar[bool] = False
    matrix_instruction: ClassVar[str] = WARP_MMA

    @property
    def has_combine_role(self) -> bool:
        return False

    @property
    def tile(self) -> Tile:
        used = HALFWORD_BYTES * LATENT_SWAP_AB_ROWS * (self.layout.q_columns + LEAF_TILE) + _OTHER_BYTES
        stages = (self.most_shared_bytes - used) // (HALFWORD_BYTES * LEAF_TILE * sum(self.layout.operand_columns))
        return replace(_TILE, m=LATENT_SWAP_AB_ROWS, kv_stages=power_of_two_in(stages))
