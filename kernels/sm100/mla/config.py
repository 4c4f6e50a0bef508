"""MLA decode configs of Blackwell (sm_100a, sm_103a): tiles and resources of the kernel for many rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from hopwell.kernels.config.base import BLOCK_COLUMNS, CTAS, KvType, Tile, Traits
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import ALIGNMENT, LATENT_SWAP_AB_ROWS, LaunchSizes, cta_part_slots
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.sm100.common.resources import (
    BOX_TENSOR_COLUMNS,
    TENSOR_MEMORY_COLUMNS,
    Columns,
    Role,
    RoleTable,
    allocated,
)

CTA_ROWS = 64  # of the tile, in each CTA
# Packed rows of a request. The kernel of few rows serves fewer. With up to 64 rows, the second CTA has padding only. A
# step then takes as long as with 128 rows, and the keys of 64 bf16 rows still arrive at 4.9 TB/s (``python -m
# hopwell.perf model``, 2026-11-27).
LEAST_ROWS = LATENT_SWAP_AB_ROWS + 1
KEYS = 128  # of a step
# Columns of the value in one matrix instruction, of which each CTA loads half.
PRODUCT_COLUMNS = 256

# The sum equals the registers of 384 threads at launch. A thread of softmax holds 64 scores of a row; a warp of
# correction holds 16 half rows of the output when it stores them.
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, PRODUCER_REGISTERS = 128, 224, 152
ROLES = RoleTable(
    dict(
        softmax=Role(4, SOFTMAX_REGISTERS),
        correction=Role(4, CORRECTION_REGISTERS),
        mma=Role(1, PRODUCER_REGISTERS),
        load_k=Role(1, PRODUCER_REGISTERS),
        load_v=Role(1, PRODUCER_REGISTERS),
        schedule=Role(1, PRODUCER_REGISTERS),
    )
)


def _larger_table(**last: int) -> RoleTable:
    """Return the roles of kernels with four more warps, of the roles ``last``. The sum equals the registers of 512
    threads at launch."""
    registers = dict.fromkeys(ROLES.roles, 104) | dict(softmax=112, correction=192)
    roles = {name: Role(role.warps, registers[name]) for name, role in ROLES.roles.items()}
    return RoleTable(roles | {name: Role(warps, 104) for name, warps in last.items()})


# With 8-bit keys, more warps dequantize them. Batch-invariant kernels have warps that combine beside the work tiles.
# Roles by (whether keys have 8 bits, whether the kernel is batch-invariant).
ALL_ROLES = {
    (False, False): ROLES,
    (True, False): _larger_table(dequantize=4),
    (False, True): _larger_table(combine=4),
    (True, True): _larger_table(dequantize=3, combine=1),
}
_TILE = Tile(
    CTAS * CTA_ROWS,
    KEYS // CTAS,
    q_stages=1,
    kv_stages=1,
    producer_registers=PRODUCER_REGISTERS,
    consumer_registers=SOFTMAX_REGISTERS,
    splits_v=True,
)


@dataclass(frozen=True)
class Sm100MlaConfig(MlaConfig):
    """An MLA decode kernel of pairs of CTAs, with scores and output in tensor memory."""

    instruction_in_name: ClassVar[str] = "tcgen05"
    most_rows: ClassVar[int] = CTAS * CTA_ROWS

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        if traits.rows < LEAST_ROWS:
            what = f"{traits.rows} packed rows, fewer than {LEAST_ROWS}"
            return f"there is no MLA decode kernel of CTA pairs for {arch} with {what}"
        return super().refusal(traits, arch)

    @property
    def tile(self) -> Tile:
        return _TILE

    @property
    def roles(self) -> RoleTable:
        return ALL_ROLES[self.kv_type is not KvType.WIDE, self.batch_invariant]

    def warps_of(self, role: str) -> int:
        """Return the warps of a role, 0 if the kernel does not have it."""
        return self.roles.roles[role].warps if role in self.roles.roles else 0

    @property
    def cluster_ctas(self) -> int:
        return CTAS

    @property
    def is_cooperative(self) -> bool:
        """All kernels of pairs are: pairs wait for partials of others, and do not take their work tiles by tickets."""
        return True

    @property
    def combine_loads(self) -> tuple[tuple[int, int], ...]:
        return ((4, 1),)

    @property
    def registers(self) -> tuple[int, ...]:
        return self.roles.registers

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory. A row of a CTA has two lanes, each with half of its scores and of its output, and
        both with the boxes of Q."""
        q = self.q_boxes_in_tmem * BOX_TENSOR_COLUMNS
        return Columns(dict(s=KEYS // CTAS, o=self.head_dim_v // CTAS, q=q))

    @property
    def rescaled_columns(self) -> int:
        """Columns of O that a thread of correction rescales at once. In e4m3 nearly every step rescales O, and waits
        for fewer loads with 64. In 16 bits few steps do, and 64 would spill 8 bytes in most kernels (2026-11-27)."""
        return 64 if self.uses_fp8_mma else 32

    @property
    def q_boxes_in_tmem(self) -> int:
        """Boxes of Q, the first ones, that products read from tensor memory. Shared memory limits the kernel, and in
        each step products would read all of Q from it."""
        used = KEYS // CTAS + self.head_dim_v // CTAS
        return min((TENSOR_MEMORY_COLUMNS - used) // BOX_TENSOR_COLUMNS, self.k_boxes)

    @property
    def k_boxes(self) -> int:
        """Boxes of 128 bytes of the rows of a CTA's keys. TMA fills the last one with zeros past the row."""
        return self.layout.q_columns // BLOCK_COLUMNS

    @property
    def dequantized_boxes(self) -> int:
        """Boxes of the rows of a CTA's keys that have 8-bit elements in memory."""
        wide = {KvType.WIDE: self.k_boxes, KvType.FP8_DS_MLA: self.k_boxes - self.head_dim_v // BLOCK_COLUMNS}
        return self.k_boxes - wide.get(self.kv_type, 0)

    @property
    def products(self) -> int:
        """Matrix instructions that the columns of the value take."""
        return self.head_dim_v // PRODUCT_COLUMNS

    @property
    def stage_keys(self) -> int:
        """Keys of a stage of V, which has two boxes: 64 keys with two boxes side by side, or 128 keys of 8 bits."""
        return KEYS // CTAS * HALFWORD_BYTES // self.q_bytes

    @property
    def v_stages(self) -> int:
        """Stages of V in a step."""
        return KEYS // self.stage_keys * self.products

    @property
    def steps_ahead(self) -> int:
        """Steps whose keys and values fit shared memory beside Q."""
        return 1 if self.head_dim_v * self.q_bytes > PRODUCT_COLUMNS * HALFWORD_BYTES else 2

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        yield self.columns.constraint

    def slots(self, sizes: LaunchSizes, row_tiles: int) -> int:
        pairs = sizes.sms // CTAS
        if self.has_cta_parts:
            return cta_part_slots(sizes.kv_heads * row_tiles, pairs)
        return replace(sizes, sms=pairs, latent=True, tile_rows=self.most_rows).slots

    @classmethod
    def scratch_of(cls, sizes: LaunchSizes) -> int:
        of_pairs = replace(sizes, sms=sizes.sms // CTAS, tile_rows=cls.most_rows)
        return of_pairs.partial_bytes(cls.most_rows) + ALIGNMENT


@dataclass(frozen=True)
class Sm100SwapABMlaConfig(MlaConfig):
    """An MLA decode kernel of few rows: the leaves of Hopper's kernel, with S and O of a tile in tensor memory."""

    instruction_in_name: ClassVar[str] = "tcgen05"
    most_rows: ClassVar[int] = LATENT_SWAP_AB_ROWS
    operand_buffers: ClassVar[int] = 0  # of operand A in tensor memory: keys are dequantized in shared memory

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        if (reason := super().refusal(traits, arch)) is not None:
            return reason
        if traits.rows > cls.most_rows:
            what = f"{traits.rows} packed rows, more than {cls.most_rows}"
            return f"there is no tcgen05 MLA kernel of few rows for {arch} with {what}"
        return None

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory, for each row a score and O in parts of 64 columns."""
        return Columns(dict(s=self.rows, o=self.rows * (self.head_dim_v // BLOCK_COLUMNS)))

    @property
    def allocations(self) -> tuple[int, ...]:
        """Columns to allocate: a power of two."""
        return (allocated(self.columns.total),)
