"""Selection of the prefill kernel for a problem, and the tiles of Hopper's prefill kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from hopwell.kernels import support
from hopwell.kernels.config.base import (
    BLOCK_COLUMNS,
    DTYPES,
    E4M3_DTYPES,
    MIN_BOX_ROWS,
    MOST,
    OUT_DTYPES,
    QUERY_DTYPES,
    KernelConfig,
    KvFetch,
    KvType,
    Tile,
    TileShape,
    Traits,
    dims_names,
    dtype_names,
    has_uneven_pages,
    head_scales,
    kv_fetch,
    paged_fetches,
    require_dtypes,
)
from hopwell.kernels.config.layout import OperandLayout, PrefillLayout
from hopwell.kernels.masks import MaskEnum, MaskKind
from hopwell.kernels.problem import AttentionProblem, Family, ScoreKind
from hopwell.kernels.support import RARE_HEAD_DIMS, TYPES_16BIT, TYPES_FP8, TYPES_FP8_KV

MASKS = tuple(kind for kind in MaskKind if kind.rule.prefill and kind.rule.ahead)  # of kernels compiled ahead

# Registers: ptxas gives every thread 65536 / threads (rounded down to 8) at launch. setmaxnreg can only redistribute
# the total: 168 * 384 for two consumer warpgroups, 128 * 512 for three. A kernel that asks for more hangs. Producers
# need 40 registers, or 32 with three warpgroups, to avoid spills.
#
# Three consumer warpgroups: O has few columns, so there are registers for more rows per load of K and V. 128 keys: 488
# TFLOP/s at 2 x 8192 tokens, 478 with 96, 403 with two warpgroups and four stages (H200, 2026-11-21).
_SMALL_DIMS = Tile(m=192, n=128, q_stages=2, kv_stages=2, producer_registers=32, consumer_registers=160)
# Two Q stages let the next tile's Q load early: 450 instead of 410 TFLOP/s at 16 x 1024 tokens (H200, 2026-11-21). A
# third K/V stage in place of the second Q stage gained nothing at 8192 and 16384 tokens. Steps of 96 to 176 keys gained
# nothing either.
_MIDDLE_DIMS = Tile(m=128, n=128, q_stages=2, kv_stages=2, producer_registers=40, consumer_registers=232)
_LARGE_DIMS = Tile(m=128, n=96, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232)
TILES = {
    (32, 32): _SMALL_DIMS,
    (40, 40): _SMALL_DIMS,
    (48, 48): _SMALL_DIMS,
    (64, 64): _SMALL_DIMS,
    (80, 80): _MIDDLE_DIMS,
    (96, 96): _MIDDLE_DIMS,
    (104, 104): _MIDDLE_DIMS,
    (128, 128): _MIDDLE_DIMS,
    (160, 160): _LARGE_DIMS,
    (192, 192): _LARGE_DIMS,
    # Shared memory is full with one Q stage; 80 keys and two Q stages give 460 instead of 490 TFLOP/s.
    (192, 128): Tile(m=128, n=128, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    (256, 256): Tile(m=128, n=64, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    # 64 x 512 of O need more registers than a warpgroup has. Both warpgroups of a pair compute the same S: half as much
    # work again, but no exchange.
    (512, 512): Tile(64, 32, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232, splits_v=True),
}

# Head dims with equal numbers of column blocks differ only in the zeros that TMA fills in and in the depth of products.
OTHER_TILES = {(d, d): next(tile for (qk, v), tile in TILES.items() if qk == v and qk >= d) for d, _ in RARE_HEAD_DIMS}


# Windows of up to SHORT_WINDOW keys have steps of 64 keys at head dims whose steps are 128 otherwise. With a window of
# 128 the 64 rows of a warpgroup then see 3 steps of 64 keys instead of 2 of 128. For 8 x 512 queries of 8192 keys with
# windows of 128, 256, 384, 512, 768 and 1024, time falls by 21, 16, 12, 9, 4 and 1 % at head dim 64, and by 8, 5, 4, 0,
# -1 and -2 % at 128. Without a window head dim 64 takes 14 % more (H200, 2026-11-24).
SHORT_WINDOW, SHORT_STEP = 512, 64
# A kernel that converts K and V has one more warpgroup, for which the others leave registers. It has stages for loaded
# tiles and stages for multiplied tiles. If it dequantizes beyond head dim 128, shared memory has room for one stage of
# each kind.
_CONVERTING: dict[str, Any] = dict(q_stages=1, producer_registers=32, consumer_registers=208, converting_registers=64)
# e4m3 to bfloat16 takes more than twice the instructions of e4m3 to float16, so K and V then have one warpgroup each.
# Five warpgroups share 480 registers. NVFP4 would spill with 32; consumers would spill with fewer than 192. With 192,
# consumers of skip-softmax and of capped scores with slopes would spill. Few queries and short windows do not wait for
# conversions; with two converting warpgroups they would take 1 to 3 % more time (H100, 2026-11-25).
_CONVERTED_BY_TWO: dict[str, Any] = dict(consumer_registers=192, converting_registers=32, converting_warpgroups=2)
# Kernels that transpose V need fewer registers for loaders and the converting warpgroup; 8 more for the consumers
# gained 1 to 2 %. N_SLICE_STEP_KEYS is for kernels that add products of n slices to O. At head dim 128, 160 keys give
# 778 and 700 TFLOP/s at 1 x 16384 and 4 x 4096 tokens, 128 keys 742 and 670, 96 keys 729 and 654 (H200, 2026-11-24).
# PROMOTION_STEP_KEYS is for kernels whose products accumulate O (promotion), which leaves registers for 192 keys: 1.01
# to 1.02 times as fast as 160 at both sizes (H100, 2026-11-25).
_TRANSPOSING: dict[str, Any] = dict(producer_registers=32, consumer_registers=216, converting_registers=48)
# Beyond 128 columns, loaders of page boxes would spill up to 8 registers, and load up to five of them for a tile. The
# converting warpgroup has no more instructions with 40 registers than with 48 (machine code, 2026-11-26).
_MORE_FOR_LOADERS: dict[str, Any] = dict(producer_registers=40, converting_registers=40)
PROMOTION_STEP_KEYS = 192
N_SLICE_STEP_KEYS = 160
DEQUANTIZED_PAIRS_TO = 128
DEQUANTIZED_APART_TO = 192  # K and V of larger head dims are dequantized in place
PAIRED_MARGIN = 40  # registers needed besides S, O and two P
# Packed GQA: heads are packed if a request's queries fill at most this share of a packed tile's rows. The query heads
# of a KV head then share its keys and steps. 32 x 16 queries of 8192 keys take 252 instead of 586 us, 16 x 64 230
# instead of 299. Packing costs time if tiles are full anyway: 8 x 512 queries of 16384 keys take 12 % more time, 64 x
# 256 9 %, 64 x 128 18 % (H200, 2026-11-24).
PACKED_SHARE = 0.5


@dataclass(frozen=True)
class PrefillConfig(KernelConfig):
    """Config of a prefill kernel; a Hopper kernel, except in subclasses of other architectures.

    ``k_head_scales`` and ``v_head_scales``: whether the softmax scale, or the output scale, has one value for each KV
    head.
    """

    score: ScoreKind = ScoreKind.SCALED
    skip_softmax: bool = False
    short_steps: bool = False
    packs_heads: bool = False  # packed GQA: query heads of a KV head share query tiles
    kv_type: KvType = KvType.WIDE
    dequantizes_q: bool = False  # queries are e4m3 and are dequantized to float16 in place
    linear_v_scales: bool = False  # V's block scales are linear, not interleaved by four tokens
    k_head_scales: bool = field(default=False, kw_only=True)
    v_head_scales: bool = field(default=False, kw_only=True)

    family: ClassVar[Family] = Family.PREFILL
    layout_type: ClassVar[type[OperandLayout]] = PrefillLayout
    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = TILES
    other_tiles: ClassVar[Mapping[tuple[int, int], Tile]] = OTHER_TILES  # of kernels that are compiled on demand only
    kv_types: ClassVar[frozenset[KvType]] = frozenset({KvType.WIDE, KvType.E4M3, KvType.NVFP4})
    can_dequantize_q: ClassVar[bool] = True  # NVFP4 K and V take e4m3 queries

    @classmethod
    def all_tiles(cls) -> Mapping[tuple[int, int], Tile]:
        """Return the tiles of all head dims (QK, V) that have kernels."""
        return {**cls.tiles, **cls.other_tiles}

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        dims, kv_type = traits.dims, traits.kv_type
        given = f"head dims (QK/V) {dims_names([dims])}"
        if dims not in cls.all_tiles():
            return f"{given} have no kernel on {arch}; supported: {dims_names(cls.all_tiles())}"
        if kv_type is KvType.NVFP4 and dims not in support.NVFP4_HEAD_DIMS:
            supported = dims_names(support.NVFP4_HEAD_DIMS)
            return f"{given} have no prefill kernel on {arch} with NVFP4 K and V; supported: {supported}"
        if kv_type not in cls.kv_types:
            return f"dequantized {kv_type.value} K and V have no kernel on {arch}"
        return None

    @classmethod
    def query_dtype(cls, query: torch.dtype, kv: torch.dtype) -> torch.dtype:
        """Return float16 for e4m3 queries over NVFP4 K and V, unless kernels dequantize them.

        float16 holds all e4m3 values. The products need it, because e4m3 does not hold NVFP4 elements times their
        scales.
        """
        casts = query in E4M3_DTYPES and kv is torch.uint8 and not cls.can_dequantize_q
        return torch.float16 if casts else query

    @classmethod
    def tile_of(
        cls,
        dims: tuple[int, int],
        score: ScoreKind = ScoreKind.SCALED,
        skip_softmax: bool = False,
        short_steps: bool = False,
        packs_heads: bool = False,
        kv_type: KvType = KvType.WIDE,
        uses_fp8_mma: bool = False,
        dtype: str = "bf16",
    ) -> Tile:
        """Return the tile of head dims (QK, V).

        Packed heads and the type of K and V do not change the keys of a step. An 8-bit cache thus gives the bits of a
        16-bit cache with the same values. ``dtype`` is the type that such a cache is dequantized to.
        """
        tile = cls.all_tiles()[dims]
        if tile is _SMALL_DIMS and (score.caps or skip_softmax):
            tile = replace(tile, n=96)  # three warpgroups would spill with 128 keys
        if short_steps:
            tile = replace(tile, n=SHORT_STEP, kv_stages=2 * tile.kv_stages)
        if packs_heads and tile.m > _MIDDLE_DIMS.m:
            # Packed tiles keep a head and a token per row, for which three warpgroups lack registers. Queries are few.
            registers = _MIDDLE_DIMS.producer_registers, _MIDDLE_DIMS.consumer_registers
            tile = replace(tile, m=_MIDDLE_DIMS.m, producer_registers=registers[0], consumer_registers=registers[1])
        if uses_fp8_mma:
            return cls.fp8_tile(dims, tile, short_steps, cls.promotes(dims, skip_softmax, short_steps))
        needs_more = skip_softmax or (score.caps and score.has_slopes)
        gains = not (packs_heads or short_steps)
        by_two = kv_type is KvType.E4M3 and dtype == "bf16" and gains and not needs_more
        return tile if kv_type is KvType.WIDE else cls.dequantized_tile(dims, tile, kv_type, by_two)

    @classmethod
    def promotes(cls, dims: tuple[int, int], skip_softmax: bool, short_steps: bool) -> bool:
        """Return whether fp8 MMA accumulates O over several steps, see ``sm90/prefill/fp8_promotion.py``.

        Promotion adds O to a float32 sum from time to time. The sum needs shared memory besides the stages.
        """
        return dims == (128, 128) and not skip_softmax and not short_steps

    @classmethod
    def fp8_tile(cls, dims: tuple[int, int], tile: Tile, short_steps: bool, promotes: bool) -> Tile:
        """Return the tile for 8-bit queries, keys and values, given the ``tile`` of the same head dims in 16 bits."""
        step = min(tile.n, _MIDDLE_DIMS.n)
        if dims == (128, 128) and not short_steps:
            step = PROMOTION_STEP_KEYS if promotes else N_SLICE_STEP_KEYS
        m, stages = min(tile.m, _MIDDLE_DIMS.m), 2
        if tile.splits_v:  # one stage of transposed V takes 64 KiB
            step, stages = SHORT_STEP, 1
        registers = _CONVERTING | _TRANSPOSING | (_MORE_FOR_LOADERS if max(dims) > 128 else {})
        return replace(tile, m=m, n=step, kv_stages=stages, source_stages=(2, 1), **registers)

    @classmethod
    def dequantized_tile(cls, dims: tuple[int, int], tile: Tile, kv_type: KvType, by_two: bool) -> Tile:
        """Return the tile for dequantized K and V, given the ``tile`` of K and V in the queries' type.

        With ``by_two``, K and V have one converting warpgroup each if shared memory has the stages for it.
        """
        m = min(tile.m, _MIDDLE_DIMS.m)
        if max(dims) > DEQUANTIZED_APART_TO:
            return replace(tile, m=m, **_CONVERTING)
        has_pairs = max(dims) <= DEQUANTIZED_PAIRS_TO
        return replace(
            tile,
            m=m,
            kv_stages=tile.kv_stages if has_pairs else tile.kv_stages // 2,
            source_stages=(2, 1) if has_pairs else (1, 1),
            **_CONVERTING | (_CONVERTED_BY_TWO if by_two and has_pairs else {}),
        )

    @classmethod
    def has_short_steps(cls, dims: tuple[int, int], mask: MaskEnum) -> bool:
        """Return whether kernels with short steps exist besides the kernels without.

        A short step has half of the keys, so the same memory holds twice the stages.
        """
        return mask is MaskKind.SLIDING_WINDOW and cls.all_tiles()[dims].n == 2 * SHORT_STEP

    @classmethod
    def choices(cls, problem: AttentionProblem, dims: tuple[int, int]) -> dict[str, Any]:
        """Return the features of a kernel for the problem that only affect speed."""
        if problem.skip_softmax > 0:  # it skips tiles of keys, each for 64 queries
            return {}
        short_steps = cls.has_short_steps(dims, problem.mask.kind) and problem.mask.window_left < SHORT_WINDOW
        tile = cls.tile_of(dims, problem.score.kind, short_steps=short_steps, packs_heads=True)
        few_queries = problem.mean_q_len <= PACKED_SHARE * tile.m
        has_slopes = problem.score.kind.has_slopes  # all rows of a tile share one slope
        packs_heads = few_queries and not has_slopes and packed_shape(problem, tile.m).heads > 1
        return dict(short_steps=short_steps, packs_heads=packs_heads)

    @classmethod
    def all_choices(cls, dims: tuple[int, int], mask: MaskEnum) -> list[dict[str, Any]]:
        """Return every combination of these choices for kernels of plain scores."""
        steps = (False, True) if cls.has_short_steps(dims, mask) else (False,)
        return [dict(short_steps=short, packs_heads=packs) for short in steps for packs in (False, True)]

    @property
    def tile(self) -> Tile:
        dims = self.head_dim_qk, self.head_dim_v
        choices = self.score, self.skip_softmax, self.short_steps, self.packs_heads
        types: dict[str, Any] = dict(kv_type=self.kv_type, uses_fp8_mma=self.uses_fp8_mma, dtype=self.dtype)
        return self.tile_of(dims, *choices, **types)

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        columns = self.layout.depth[1]
        yield columns <= MOST, f"a warpgroup has {columns} columns of V, at most {MOST} fit an instruction"

    @property
    def pairs_steps(self) -> bool:
        """Whether unmasked steps are processed in pairs, each with its own P.

        Pairs need registers for S, O and two P. Kernels without a mask do not use them: two P gained nothing over one P
        (1 x 8192 tokens, H100, 2026-11-25). Skip-softmax decides after each tile whether its P is computed.
        """
        tile = self.tile
        held = tile.n // 2 + tile.n // 2 + self.layout.depth[1] // 2
        # Above 128, head dims that are not whole column blocks take more registers: kernels of 160 and 248 spilled.
        dims = self.head_dim_qk, self.head_dim_v
        whole = max(dims) <= 128 or all(dim % BLOCK_COLUMNS == 0 for dim in dims)
        fits = whole and held + PAIRED_MARGIN <= tile.consumer_registers
        return self.mask is not MaskKind.FULL and not self.uses_fp8_mma and not self.skip_softmax and fits

    @property
    def promotes_output(self) -> bool:
        dims = self.head_dim_qk, self.head_dim_v
        return self.transposes_v and self.promotes(dims, self.skip_softmax, self.short_steps)

    @property
    def reads_kv_once(self) -> bool:
        """Whether the keys of some requests are read only once, see ``QueryTile.kv_policy``."""
        return self.packs_heads

    @property
    def dequantizes(self) -> bool:
        return self.kv_type is not KvType.WIDE and not self.dequantizes_in_place

    @property
    def dequantizes_in_place(self) -> bool:
        return self.kv_type is not KvType.WIDE and max(self.head_dim_qk, self.head_dim_v) > DEQUANTIZED_APART_TO

    @property
    def transposes_v(self) -> bool:
        return self.uses_fp8_mma

    @property
    def name(self) -> str:
        details = [f"kv_{self.kv_type.value}"] if self.kv_type is not KvType.WIDE else []
        details += ["linear_v_scales"] * self.linear_v_scales + ["q_e4m3"] * self.dequantizes_q
        details += [self.score.value] if self.score is not ScoreKind.SCALED else []
        details += ["k_head_scales"] * self.k_head_scales + ["v_head_scales"] * self.v_head_scales
        choices = ["short_steps"] * self.short_steps + ["packed"] * self.packs_heads
        return self._named(details + ["skip_softmax"] * self.skip_softmax + choices)


def packed_shape(problem: AttentionProblem, tile_m: int) -> TileShape:
    """Choose the packed-GQA shape of tiles of ``tile_m`` rows that needs the fewest tiles for a request of mean
    length."""
    group = problem.query.shape[1] // problem.key.shape[1]
    divisors = [heads for heads in range(1, group + 1) if group % heads == 0 and heads * MIN_BOX_ROWS <= tile_m]
    shapes = [TileShape.of(heads, tile_m) for heads in reversed(divisors)]
    return min(shapes, key=lambda shape: -(-problem.mean_q_len // shape.tokens) / shape.heads)


def resolve_prefill(problem: AttentionProblem, arch: str, kind: type[PrefillConfig]) -> PrefillConfig:
    """Choose the prefill kernel for ``problem`` on ``arch``, with a config of type ``kind``.

    Raises:
        NotImplementedError: there is no kernel; the message lists what is supported.
    """
    dims = (problem.query.shape[2], problem.v_dim)
    out_dtype = problem.query.dtype if problem.out is None else problem.out.dtype
    kv_type = prefill_kv_type(problem)
    kind.require(Traits(dims, kv_type), arch)
    dequantizes_q = kv_type is KvType.NVFP4 and problem.query.dtype not in DTYPES
    queries = QUERY_DTYPES if kind.can_dequantize_q else DTYPES
    if kv_type is KvType.NVFP4 and problem.query.dtype not in queries:
        raise NotImplementedError(
            f"query dtype {problem.query.dtype} has no kernel on {arch} with NVFP4 K and V; "
            f"supported: {dtype_names(queries)}"
        )
    require_dtypes(problem, out_dtype, arch, kv_type, queries=QUERY_DTYPES, outputs=_output_dtypes(problem))
    features = kind.choices(problem, dims) | dict(score=problem.score.kind, skip_softmax=problem.skip_softmax > 0)
    if kv_type is not KvType.WIDE:
        features |= dict(kv_type=kv_type, dequantizes_q=dequantizes_q)
    if problem.kv_scales is not None:
        features["linear_v_scales"] = not problem.kv_scales.interleaves_v
    features |= dict(zip(("k_head_scales", "v_head_scales"), _head_scales(problem, arch), strict=True))
    config = kind(
        arch=arch,
        dtype=DTYPES[torch.float16] if dequantizes_q else QUERY_DTYPES[problem.query.dtype],
        out_dtype=OUT_DTYPES[out_dtype],
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        mask=problem.mask.kind,
        kv_fetch=KvFetch.CONTIGUOUS,
        box_rows=0,
        uneven_pages=has_uneven_pages(problem),
        **features,
    )
    fetch, box_rows = kv_fetch(problem, config.tile.n)
    return replace(config, kv_fetch=fetch, box_rows=box_rows)


def _head_scales(problem: AttentionProblem, arch: str) -> tuple[bool, bool]:
    """Return whether each KV head has its own softmax scale, and its own output scale.

    Raises:
        NotImplementedError: the cache has 16 bits, and no kernel takes such scales with it.
    """
    found = head_scales(problem)
    if any(found) and problem.key.dtype in DTYPES:
        raise NotImplementedError(f"scales of each KV head have no prefill kernel on {arch} with a 16-bit cache")
    return found


def _output_dtypes(problem: AttentionProblem) -> Mapping[torch.dtype, str]:
    """Return the output dtypes. An NVFP4 output has block scales."""
    return QUERY_DTYPES if problem.out_scales is None else OUT_DTYPES


def prefill_kv_type(problem: AttentionProblem) -> KvType:
    """Return the type of K and V; WIDE if they are not converted."""
    if problem.kv_scales is not None:
        return KvType.NVFP4
    fp8 = torch.float8_e4m3fn
    is_narrow = problem.query.dtype != fp8 and problem.key.dtype == problem.value.dtype == fp8
    return KvType.E4M3 if is_narrow else KvType.WIDE


def shipped_prefill_configs(
    arch: str, types: str, preferred: Sequence[type[KernelConfig]] = (), *, kind: type[PrefillConfig]
) -> Iterator[PrefillConfig]:
    """Yield the kernels that are compiled ahead for operands of ``types``, where no kernel of ``preferred`` types
    serves them: kernels of plain scores.

    Other kernels are compiled at the first call that needs them.
    """
    kv_type = KvType.E4M3 if types == TYPES_FP8_KV else KvType.WIDE
    dtypes = [("e4m3", out) for out in QUERY_DTYPES.values()]  # of (query, output)
    if types != TYPES_FP8:
        dtypes = [(dtype, dtype) for dtype in DTYPES.values()]
    head_dims = kind.tiles if types == TYPES_16BIT else support.SHIPPED_FP8_HEAD_DIMS
    chosen = [dims for dims in head_dims if kind.is_chosen(Traits(dims, kv_type), arch, preferred)]
    for (dtype, out), dims, mask in itertools.product(dtypes, chosen, MASKS):
        for choices in kind.all_choices(dims, mask):
            tile = kind.tile_of(dims, **choices, kv_type=kv_type, uses_fp8_mma=dtype == "e4m3")
            for fetch, rows in [(KvFetch.CONTIGUOUS, 0), *paged_fetches(tile.n)]:
                yield kind(arch, dtype, out, *dims, mask, fetch, rows, **choices, kv_type=kv_type)
