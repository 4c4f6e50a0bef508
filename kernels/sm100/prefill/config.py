"""Prefill configs of Blackwell (sm_100a, sm_103a): tiles and resources of the kernel that serves a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hopwell.kernels.config.base import BLOCK_COLUMNS, CTAS, MOST, KvType, Tile, Traits, dims_names, rounded_up
from hopwell.kernels.config.layout import OperandLayout, PrefillLayout
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.hardware import WARPS
from hopwell.kernels.masks import MaskEnum
from hopwell.kernels.problem import AttentionProblem, ScoreKind
from hopwell.kernels.sm100.common.resources import Columns, Role, RoleTable
from hopwell.kernels.support import COMMON_HEAD_DIMS, RARE_HEAD_DIMS, REGISTER_HEAD_DIMS

Q_TILES = 2  # of a work tile: in one CTA, where softmax of one overlaps the products of the other, or one in each CTA
Q_TILE_ROWS = 128  # lanes of tensor memory

S_STAGES = 2  # of the scores of a CTA
HALVES = 2  # of a step's keys: two softmax threads share a row
SOFTMAX_REGISTERS, OTHER_REGISTERS = 104, 32


def _roles(softmax: int, others: int = OTHER_REGISTERS, q_tiles: int = Q_TILES, **more: Role) -> RoleTable:
    """Return the roles of a CTA with ``q_tiles`` query tiles. A thread has ``softmax`` or ``others`` registers."""
    warps = dict(correction=4, mma=1, load_k=1, load_v=1, load_q=1)
    rest = {name: Role(count, others) for name, count in warps.items()}
    return RoleTable(dict(softmax=Role(WARPS * q_tiles * HALVES, softmax)) | rest | more)


# Four warpgroups compute softmax: each thread has half of a row of scores. One warpgroup corrects and stores O, 16
# columns at a time. The last has the warps that load, schedule and issue products. The sum equals the registers of 768
# threads at launch. A step has 0 to 11 instructions for spills, up to 26 with slopes, and up to 31 with slopes, a cap
# and skip-softmax. With 96 registers for softmax and more for the others it had twice to four times as many
# (2026-11-27). It pays: with one thread for each row, which has 200 registers, a step's softmax takes 1900 instead of
# 1070 cycles (``python -m hopwell.perf model``, 2026-11-26).
ROLES = _roles(SOFTMAX_REGISTERS)
# Over 8-bit and 4-bit caches four more warps dequantize, and the sum equals the registers of 896 threads. Other shares
# spill more, also with more registers for correction or dequantization. With 88, 48, 40 and 64 registers, a step's
# dequantization of NVFP4 has 33 instructions for spills, and with these 2 (2026-11-27).
DEQUANT_ROLES = _roles(96, dequantize=Role(4, 56))
# A CTA of a pair has one query tile. The sum equals the registers of 512 threads at launch.
PAIR_ROLES = _roles(176, 80, q_tiles=1)


def _tile(n: int, kv_stages: int, q_stages: int = Q_TILES) -> Tile:
    rows = Q_TILES * Q_TILE_ROWS
    return Tile(rows, n, q_stages, kv_stages, producer_registers=OTHER_REGISTERS, consumer_registers=SOFTMAX_REGISTERS)


# S takes a column per key and O one per column of V, for each of the two query tiles. More than 128 columns of V exceed
# tensor memory, and pairs of CTAs then have one query tile in each CTA. With 128 keys of 16 bits at 192/128, shared
# memory has no second stage of V.
_TILES = {(64, 64): _tile(128, 4), (128, 128): _tile(128, 2), (192, 128): _tile(96, 2)}
# 8-bit rows of 64 columns fill half of a swizzled row, so head dim 64 has the tiles of 128.
_FP8_TILES = {(64, 64): _tile(128, 4), (128, 128): _tile(128, 4), (192, 128): _tile(128, 2)}
# Pairs have two stages in 16 bits, which fill shared memory at head dim 256.
_PAIR_TILE, _FP8_PAIR_TILE = _tile(128, 2, q_stages=1), _tile(128, 4, q_stages=1)
# Columns of V that a CTA of a pair has are whole vectors of 16 bytes, in 8 bits too.
PAIR_DIMS = tuple((d, d) for d in range(160, MOST + 1, 32))


def _padded_to(dims: tuple[int, int]) -> tuple[int, int]:
    """Return the head dims whose tile has room for ``dims``: loads fill the columns beyond them with zeros."""
    return dims if dims in _TILES else (64, 64) if max(dims) <= 64 else (128, 128)


def _tile_of(dims: tuple[int, int], uses_fp8_mma: bool = False) -> Tile:
    if dims in PAIR_DIMS:
        return _FP8_PAIR_TILE if uses_fp8_mma else _PAIR_TILE
    return (_FP8_TILES if uses_fp8_mma else _TILES)[_padded_to(dims)]


def _tiles_of(head_dims: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tile]:
    return {dims: _tile_of(dims) for dims in head_dims if dims in (*_TILES, *PAIR_DIMS) or max(dims) <= 128}


TILES = _tiles_of((*COMMON_HEAD_DIMS, *REGISTER_HEAD_DIMS))
OTHER_TILES = _tiles_of(RARE_HEAD_DIMS)


class Sm100PrefillLayout(PrefillLayout):
    """Widths of prefill on tcgen05. A CTA of a pair has half of V's columns."""

    @property
    def columns(self) -> tuple[int, int]:
        key, value = super().columns
        if self.config.is_pair:
            value = rounded_up(self.kv_dims[1] // CTAS, BLOCK_COLUMNS)
        return key, value

    @property
    def operand_columns(self) -> tuple[int, int]:
        return self.columns if self.config.is_pair else super().operand_columns


@dataclass(frozen=True)
class Sm100PrefillConfig(PrefillConfig):
    """A prefill kernel with scores and output in tensor memory, of single CTAs or of pairs."""

    instruction_in_name: ClassVar[str] = "tcgen05"
    layout_type: ClassVar[type[OperandLayout]] = Sm100PrefillLayout
    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = TILES
    other_tiles: ClassVar[Mapping[tuple[int, int], Tile]] = OTHER_TILES
    can_dequantize_q: ClassVar[bool] = False
    transposes_v: ClassVar[bool] = False  # type: ignore[assignment]  # V may be stored with its columns innermost

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        if traits.dims in PAIR_DIMS and traits.kv_type is not KvType.WIDE:
            return f"dequantized K and V have no kernel of CTA pairs on {arch}: head dims {dims_names([traits.dims])}"
        return super().refusal(traits, arch)

    @classmethod
    def tile_of(cls, dims: tuple[int, int], *features: Any, uses_fp8_mma: bool = False, **more_features: Any) -> Tile:
        return _tile_of(dims, uses_fp8_mma)

    @classmethod
    def choices(cls, problem: AttentionProblem, dims: tuple[int, int]) -> dict[str, Any]:
        return {}

    @classmethod
    def all_choices(cls, dims: tuple[int, int], mask: MaskEnum) -> list[dict[str, Any]]:
        return [{}]

    @property
    def is_pair(self) -> bool:
        """Whether a pair of CTAs takes each work tile, with one of its query tiles in each CTA."""
        return (self.head_dim_qk, self.head_dim_v) in PAIR_DIMS

    @property
    def cluster_ctas(self) -> int:
        return CTAS if self.is_pair else 1

    @property
    def q_tiles(self) -> int:
        """Query tiles of a CTA."""
        return Q_TILES // self.cluster_ctas

    @property
    def roles(self) -> RoleTable:
        if self.is_pair:
            return PAIR_ROLES
        return DEQUANT_ROLES if self.dequantizes_in_place else ROLES

    @property
    def registers(self) -> tuple[int, ...]:
        return self.roles.registers

    @property
    def dequantizes_in_place(self) -> bool:
        """8-bit and 4-bit K and V are dequantized in place at all head dims: there is no room for more stages."""
        return self.kv_type is not KvType.WIDE

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory: scores of both query tiles, which P replaces in place, and output of both. With one
        query tile, its scores have two places, which steps use in turn."""
        return Columns(dict(s=S_STAGES * self.tile.n, o=self.q_tiles * self.output_columns))

    @property
    def output_columns(self) -> int:
        """Columns of O of a query tile: of V, rounded up to columns that a matrix instruction takes."""
        return self.head_dim_v if self.is_pair else self.layout.depth[1]

    @property
    def half_keys(self) -> int:
        """Keys of a step whose scores a softmax thread has."""
        return self.tile.n // HALVES

    @property
    def early_keys(self) -> int:
        """Keys of each half whose P is multiplied before the rest is ready."""
        return 32

    @property
    def polynomial_eighths(self) -> int:
        """Eighths of the exponentials evaluated as polynomials; the MUFU evaluates the rest. On sm_100a it evaluates 16
        a cycle, and with more, polynomials take longer than they save (``python -m hopwell.perf model``). On sm_103a it
        evaluates 32."""
        return 0 if self.target == "sm_103a" else 2

    @property
    def loads_maximum(self) -> bool:
        """Whether the load of unmasked scores also returns the largest one, which sm_103a can. Capped scores and scores
        with slopes differ from the loaded ones."""
        return self.target == "sm_103a" and self.score is ScoreKind.SCALED

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        yield self.columns.constraint
