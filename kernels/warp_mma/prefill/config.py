"""Prefill configs of sm_120a, and of sm_100a and sm_103a where no tensor-memory kernel serves a problem. Tiles and
resources are the ones of sm_120a on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from hopwell.kernels import support
from hopwell.kernels.config.base import KvType, Tile, rounded_up
from hopwell.kernels.config.layout import OperandLayout, PrefillLayout
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.hardware import WARP_MMA

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
# Most columns (of Q and K, of V) for which a warpgroup dequantizes 8-bit and 4-bit K and V. Up to these, 128 registers
# in each of 512 threads are enough for O, S and P. A step of 375 instructions spills up to 12 registers without a mask,
# and up to 5 with one, see ``WarpAttend.unmasked_steps``.
#
# If each warp dequantizes in its own registers, a step over NVFP4 has 1496 instructions. With 192 columns of Q and K it
# has 1764 instead of 394. With more columns O leaves too few registers, and 16-bit tiles leave too little shared
# memory. For 8-bit elements this is so at 192/128, which would take 100 KiB.
DEQUANTIZED_COLUMNS = {KvType.E4M3: (128, 128), KvType.NVFP4: (192, 128)}
_CONVERTING: dict[str, Any] = dict(producer_registers=40, consumer_registers=208, converting_registers=56)


def dequantizes_by_warpgroup(dims: tuple[int, int], kv_type: KvType) -> bool:
    """Whether a warpgroup dequantizes K and V of these head dims for 16-bit queries."""
    most = DEQUANTIZED_COLUMNS.get(kv_type, (0, 0))
    return all(dim <= columns for dim, columns in zip(dims, most, strict=True))


def _tile(m: int, n: int, kv_stages: int, splits_v: bool = False) -> Tile:
    return Tile(
        m,
        n,
        q_stages=1,
        kv_stages=kv_stages,
        producer_registers=PRODUCER_REGISTERS,
        consumer_registers=CONSUMER_REGISTERS,
        splits_v=splits_v,
    )


# On sm_120 a CTA has 99 KiB of shared memory: Q and some stages of K and V, with the output staged in Q's place. If O
# takes 128 registers of a thread, the warps for 128 rows do not have registers for the rest.
#
# ptxas gives the threads of sm_120 at most their registers at launch, 168 for 384 threads. Steps of 64 keys at 128
# columns spilled 30 registers in the loop. Steps of 32 keys spill up to 10 once a work tile. In a step with a mask they
# spill up to 4, or up to 6 with e4m3 operands. Two or three steps of a request have a mask.
#
# 8-bit or 4-bit K and V keep the keys of a step. If each warp dequantizes them, 160 and 192 columns spill 12 to 26
# registers in a step, 192/128 without a mask 11, 256 none. Such steps have 1400 to 2300 instructions, and smaller tiles
# would convert the same number of elements for fewer rows. With 512 columns two warps share 16 rows, each with half of
# O.
_OF_COLUMNS = {
    64: _tile(128, 64, 4),
    128: _tile(128, 32, 4),
    192: _tile(128, 32, 2),
    256: _tile(64, 32, 2),
    512: _tile(32, 32, 1, splits_v=True),
}

# 8-bit operands need half of the registers for Q and P, which leaves room for steps of 64 keys at 128 columns.
_BYTES_OF_COLUMNS = {
    128: _tile(128, 64, 4),
    192: _tile(128, 32, 4),
    256: _tile(64, 64, 2),
    512: _tile(32, 32, 2, splits_v=True),
}


def _of(dims: tuple[int, int]) -> Tile:
    return next(tile for columns, tile in _OF_COLUMNS.items() if max(dims) <= columns)


class WarpPrefillLayout(PrefillLayout):
    """Widths of prefill whose warps convert 8-bit and 4-bit K and V on the way to their products."""

    @property
    def operand_bits(self) -> int:
        """Bits of an element of K and V in the form that the attend warps take."""
        return 16 if self.config.dequantizes else self.config.kv_element.bits

    @property
    def operand_columns(self) -> tuple[int, int]:
        return self.columns if self.config.has_narrow_kv else super().operand_columns

    @property
    def depth(self) -> tuple[int, int]:
        """Columns that warps multiply, in whole ldmatrix reads: 32 bytes of a row of K and 16 bytes of a row of V."""
        if not self.config.has_narrow_kv:
            return super().depth
        bits = self.config.kv_element.bits
        value = rounded_up(self.config.head_dim_v, 16 * 8 // bits)
        return rounded_up(self.config.head_dim_qk, 32 * 8 // bits), value // self.config.v_splits

    @property
    def loaded_depth(self) -> tuple[int, int]:
        return self.kv_dims if self.config.has_narrow_kv else super().loaded_depth


@dataclass(frozen=True)
class Sm120PrefillConfig(PrefillConfig):
    """A prefill kernel with products of single warps (mma.sync)."""

    can_dequantize_q: ClassVar[bool] = False
    layout_type: ClassVar[type[OperandLayout]] = WarpPrefillLayout

    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = {
        dims: _of(dims) for dims in support.PREFILL_HEAD_DIMS if dims[0] % 64 == 0 == dims[1] % 64
    }
    other_tiles: ClassVar[Mapping[tuple[int, int], Tile]] = {
        dims: _of(dims) for dims in support.PREFILL_HEAD_DIMS if dims[0] % 64 or dims[1] % 64
    }

    @classmethod
    def fp8_tile(cls, dims: tuple[int, int], tile: Tile, short_steps: bool, promotes: bool) -> Tile:
        return next(tile for columns, tile in _BYTES_OF_COLUMNS.items() if max(dims) <= columns)

    @classmethod
    def dequantized_tile(cls, dims: tuple[int, int], tile: Tile, kv_type: KvType, by_two: bool) -> Tile:
        if tile.splits_v:  # half of the bytes of 16-bit K and V leave room for a second stage
            return replace(tile, kv_stages=2)
        if not dequantizes_by_warpgroup(dims, kv_type):
            return tile
        # The number of stages is limited by shared memory.
        stages = next(count for columns, count in {64: 2, 128: 4, 192: 1}.items() if max(dims) <= columns)
        return replace(tile, kv_stages=2, source_stages=(stages, stages), **_CONVERTING)

    @property
    def block_scaled(self) -> bool:
        """Whether 8-bit products use the block-scaled instruction, here with scales of 1. GeForce cards run it at twice
        the rate of the plain instruction. Other cards run both at the same rate, by published rates. Only sm_120 has
        it."""
        return self.uses_fp8_mma and self.target in support.FAMILY_BUILDS.values()

    @property
    def matrix_instruction(self) -> str:
        return WARP_MMA + " e4m3" * self.uses_fp8_mma + ", block-scaled" * self.block_scaled

    @property
    def has_narrow_kv(self) -> bool:
        """Whether the attend warps take K and V of fewer than 16 bits."""
        return self.layout.operand_bits < 16

    @property
    def dequantizes(self) -> bool:
        return not self.uses_fp8_mma and dequantizes_by_warpgroup((self.head_dim_qk, self.head_dim_v), self.kv_type)

    @property
    def dequantizes_in_place(self) -> bool:
        return False  # no warpgroup dequantizes in place

    @property
    def transposes_v(self) -> bool:
        return False  # attend warps transpose V
