"""Chooses the kernels that tests compile, because all shipped ones would take an hour."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hopwell.kernels import support
from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import KernelConfig, KvFetch, KvType, Tile
from hopwell.kernels.config.decode import MOST_ROWS_IN_REGISTERS, DecodeConfig, shipped_decode_configs
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.prefill import TILES, PrefillConfig
from hopwell.kernels.config.splitting import SWAP_AB_ROWS
from hopwell.kernels.problem import Family, MaskKind, ScoreKind
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.kernels.support import BLACKWELL
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig

# Common head dims of models, and the most different kernels. These have three consumer warpgroups with few registers
# each, two warpgroups, different widths of K and V, and the widest output of a warpgroup.
MAIN_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
CONTIGUOUS, ROWS = (KvFetch.CONTIGUOUS, 0), (KvFetch.PAGE_ROWS, 0)
PAGES16, PAGES64 = (KvFetch.PAGE_BOXES, 16), (KvFetch.PAGE_BOXES, 64)
TOPK = (KvFetch.TOPK_ROWS, 0)
# Head dims, page sizes and masks compiled only on demand.
RARER = [
    PrefillConfig("sm_90a", "bf16", "bf16", 72, 72, MaskKind.CAUSAL, KvFetch.CONTIGUOUS, 0),
    PrefillConfig("sm_90a", "bf16", "bf16", 248, 248, MaskKind.CAUSAL, *PAGES16),
    PrefillConfig("sm_90a", "bf16", "bf16", 64, 64, MaskKind.CAUSAL, *ROWS, uneven_pages=True),
    PrefillConfig("sm_90a", "bf16", "bf16", 128, 128, MaskKind.LOCAL, *PAGES16),
    PrefillConfig("sm_90a", "bf16", "bf16", 128, 128, MaskKind.CAUSAL, KvFetch.PAGE_BOXES, 8, uneven_pages=True),
    Sm120PrefillConfig("sm_120a", "bf16", "bf16", 128, 128, MaskKind.LOCAL, *PAGES16),
]


def shipped_of(dims: tuple[int, int]) -> list[PrefillConfig]:
    return [config for config in shipped_configs() if (config.head_dim_qk, config.head_dim_v) == dims]


def fetches(dims: tuple[int, int]) -> list[tuple[KvFetch, int]]:
    """Return every KV source (fetch and box rows) of shipped kernels of ``dims``."""
    return list(dict.fromkeys((config.kv_fetch, config.box_rows) for config in shipped_of(dims)))


def every_tile(dims: tuple[int, int]) -> list[Tile]:
    """Return the tiles of all kernels of ``dims``."""
    return list(dict.fromkeys(config.tile for plain in shipped_of(dims) for config in with_features(plain)))


def with_features(config: PrefillConfig) -> list[PrefillConfig]:
    """Return ``config`` with every score that its boxes and choices allow, each with and without skip-softmax if
    allowed.
    """
    dims = (config.head_dim_qk, config.head_dim_v)
    found = []
    for score, skip in itertools.product(ScoreKind, (False, True)):
        tile = PrefillConfig.tile_of(dims, score, skip, config.short_steps, config.packs_heads)
        refused = (skip and (config.short_steps or config.packs_heads)) or (config.packs_heads and score.has_slopes)
        if not refused and (not config.box_rows or tile.n % config.box_rows == 0):
            found.append(replace(config, score=score, skip_softmax=skip))
    return found


def stands_for_masks(dims: tuple[int, int], mask: MaskKind, fetch: tuple[KvFetch, int]) -> bool:
    """Whether a mask is tested with a KV source: boxes of unusual sizes have every mask for two head dims only."""
    return mask is MaskKind.CAUSAL or dims in ((64, 64), (128, 128)) or fetch in (CONTIGUOUS, ROWS, PAGES16, PAGES64)


def covering_configs() -> list[PrefillConfig]:
    """Return shipped and on-demand kernels that stand for all others.

    Each line covers one choice that changes the code. Independent choices of two lines are not combined.
    """
    found: dict[PrefillConfig, None] = {}

    def add(
        dims: tuple[int, int],
        mask: MaskKind,
        fetch: tuple[KvFetch, int],
        *,
        dtype: str = "bf16",
        score: ScoreKind = ScoreKind.SCALED,
        **options: bool,
    ) -> None:
        found[PrefillConfig("sm_90a", dtype, dtype, *dims, mask, *fetch, score, **options)] = None

    for dims in MAIN_DIMS:
        for fetch in fetches(dims):
            # The mask selects the consumers' loops, and the fetch selects the producers' code. The assembler allocates
            # registers for both at once.
            for mask in (MaskKind.FULL, MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW):
                if stands_for_masks(dims, mask, fetch):
                    add(dims, mask, fetch)
        # The dtype affects the matrix instructions, the TMA descriptors and the rounding, but no mask and no page.
        for fetch in (CONTIGUOUS, PAGES16):
            add(dims, MaskKind.CAUSAL, fetch, dtype="fp16")
        # A chunk has the loops of a window and a different left edge, in the consumers only.
        for fetch in (CONTIGUOUS, PAGES16):
            add(dims, MaskKind.CHUNKED, fetch)
        # Scores are mapped between Q K^T and the mask, so the fetch has no effect there.
        for score in (ScoreKind.SOFT_CAP, ScoreKind.LARGE_SOFT_CAP, ScoreKind.ALIBI, ScoreKind.CAPPED_ALIBI):
            add(dims, MaskKind.CAUSAL, PAGES16, score=score)
        # Skip-softmax gives consumers another step and a branch around the softmax, where registers are scarce.
        add(dims, MaskKind.CAUSAL, CONTIGUOUS, skip_softmax=True)
        # Packed heads change the load of Q and the store of results. Masks and fetches do not depend on them.
        add(dims, MaskKind.CAUSAL, PAGES16, packs_heads=True)
        if dims in ((64, 64), (128, 128)):
            add(dims, MaskKind.FULL, CONTIGUOUS, packs_heads=True)
            add(dims, MaskKind.SLIDING_WINDOW, ROWS, packs_heads=True)
            for fetch in (CONTIGUOUS, PAGES16):
                add(dims, MaskKind.SLIDING_WINDOW, fetch, short_steps=True)
            add(dims, MaskKind.SLIDING_WINDOW, PAGES64, short_steps=True, packs_heads=True)
    add((192, 128), MaskKind.SLIDING_WINDOW, PAGES16, short_steps=True)
    add((64, 64), MaskKind.CAUSAL, PAGES16, score=ScoreKind.SOFT_CAP, packs_heads=True)  # another tile
    add((512, 512), MaskKind.CAUSAL, PAGES16, packs_heads=True)  # warpgroups that share rows
    # Padded columns: boxes, pages and rows each pad in a different way. All other differences are in sizes, or in the
    # columns of each warpgroup, which any mask covers.
    for dims in TILES:
        if dims not in MAIN_DIMS:
            for fetch in (CONTIGUOUS, ROWS, PAGES16):
                add(dims, MaskKind.CAUSAL, fetch)
    return list(found)


def covering_fp8_configs() -> list[PrefillConfig]:
    """Return prefill kernels with 8-bit operands: each head dim, fetch, mask, score and choice once.

    If head dims leave the choice, the kernel with the highest register use is taken. Outputs differ only in the
    epilogue.
    """
    middle, widest = (128, 128), (256, 256)
    causal, window = MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW
    chosen: list[tuple[tuple[int, int], MaskKind, tuple[KvFetch, int], str, dict[str, Any]]] = [
        (middle, causal, PAGES16, "bf16", {}),
        (middle, causal, CONTIGUOUS, "e4m3", dict(skip_softmax=True)),
        (middle, window, (KvFetch.PAGE_BOXES, 32), "fp16", dict(packs_heads=True)),
        ((192, 128), MaskKind.FULL, PAGES64, "bf16", dict(score=ScoreKind.ALIBI)),
        ((192, 192), window, PAGES16, "bf16", dict(packs_heads=True)),
        (widest, causal, PAGES16, "bf16", {}),
        ((160, 160), causal, ROWS, "e4m3", {}),
        ((96, 96), MaskKind.CHUNKED, CONTIGUOUS, "bf16", dict(score=ScoreKind.SOFT_CAP)),
        ((80, 80), causal, ROWS, "bf16", {}),
        ((64, 64), window, PAGES16, "bf16", dict(short_steps=True)),
        *(((dim, dim), causal, PAGES16, "e4m3", {}) for dim in (32, 48)),
        ((512, 512), causal, PAGES16, "bf16", {}),  # warpgroups that share rows
        ((40, 40), causal, ROWS, "bf16", {}),  # rows that end within a vector
    ]
    return [
        PrefillConfig("sm_90a", "e4m3", out, *dims, mask, *fetch, **choices)
        for dims, mask, fetch, out, choices in chosen
    ]


def covering_blackwell_configs(arch: str = "sm_100a") -> list[Sm100PrefillConfig]:
    """Return Blackwell prefill kernels that stand for all, by the reasons of :func:`covering_configs`."""
    found: dict[Sm100PrefillConfig, None] = {}

    def add(dims: tuple[int, int], mask: MaskKind, fetch: tuple[KvFetch, int], dtype: str = "bf16", **kind) -> None:
        found[Sm100PrefillConfig(arch, dtype, dtype, *dims, mask, *fetch, **kind)] = None

    narrow, middle, uneven = (64, 64), (128, 128), (192, 128)
    for fetch in (CONTIGUOUS, ROWS, PAGES16, PAGES64):
        add(middle, MaskKind.CAUSAL, fetch)
    # Head dim 64 is left out because it spills 128 bytes: large caps are rare, and their purpose is precision.
    add(middle, MaskKind.CAUSAL, PAGES16, score=ScoreKind.LARGE_SOFT_CAP)
    for dims, fetch in ((narrow, PAGES16), (middle, CONTIGUOUS), (uneven, PAGES16)):
        add(dims, MaskKind.SLIDING_WINDOW, fetch)
    for dims, fetch in ((narrow, CONTIGUOUS), (middle, PAGES16)):
        add(dims, MaskKind.FULL, fetch)
        add(dims, MaskKind.CHUNKED, fetch)
        for score in (ScoreKind.ALIBI, ScoreKind.SOFT_CAP, ScoreKind.CAPPED_ALIBI):
            add(dims, MaskKind.CAUSAL, fetch, score=score)
        add(dims, MaskKind.CAUSAL, fetch, skip_softmax=True)
    for fetch in (CONTIGUOUS, ROWS):
        add(uneven, MaskKind.CAUSAL, fetch)
    add(narrow, MaskKind.CAUSAL, ROWS)
    add(middle, MaskKind.CAUSAL, PAGES16, "fp16")
    # Padded columns: boxes, pages and rows each pad in a different way.
    for dim, fetch in ((80, PAGES16), (40, ROWS), (96, CONTIGUOUS)):
        add((dim, dim), MaskKind.CAUSAL, fetch)
    # Pairs of CTAs: every head dim, fetch, mask and score.
    widest, causal = (256, 256), MaskKind.CAUSAL
    for fetch in (CONTIGUOUS, ROWS, PAGES16, PAGES64):
        add(widest, causal, fetch)
    for mask in (MaskKind.SLIDING_WINDOW, MaskKind.CHUNKED, MaskKind.FULL):
        add(widest, mask, PAGES16)
    for score in (ScoreKind.ALIBI, ScoreKind.SOFT_CAP, ScoreKind.CAPPED_ALIBI):
        add(widest, causal, PAGES16, score=score)
    add(widest, causal, CONTIGUOUS, skip_softmax=True)
    add(widest, causal, PAGES16, "fp16")
    for dim, fetch in ((160, ROWS), (192, PAGES16), (224, CONTIGUOUS)):
        add((dim, dim), causal, fetch)
    return list(found)


def covering_blackwell_fp8_configs(arch: str = "sm_100a") -> list[Sm100PrefillConfig]:
    """Return Blackwell prefill kernels with e4m3 operands, and kernels with 8-bit and 4-bit outputs."""
    causal, window, middle = MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW, (128, 128)
    chosen: list[tuple[str, str, tuple[int, int], MaskKind, tuple[KvFetch, int], dict[str, Any]]] = [
        ("e4m3", "bf16", middle, causal, PAGES16, {}),
        ("e4m3", "fp16", middle, window, PAGES64, {}),
        ("e4m3", "e4m3", (64, 64), window, PAGES16, {}),
        ("e4m3", "nvfp4", (192, 128), MaskKind.CHUNKED, CONTIGUOUS, {}),
        ("e4m3", "nvfp4", middle, MaskKind.FULL, ROWS, {}),
        ("e4m3", "bf16", middle, causal, PAGES16, dict(skip_softmax=True)),
        ("e4m3", "bf16", middle, causal, PAGES16, dict(score=ScoreKind.ALIBI)),
        ("e4m3", "bf16", (64, 64), causal, CONTIGUOUS, dict(score=ScoreKind.SOFT_CAP)),
        ("bf16", "nvfp4", middle, causal, CONTIGUOUS, {}),
        ("bf16", "e4m3", (64, 64), causal, CONTIGUOUS, {}),
        ("e4m3", "bf16", (80, 80), causal, PAGES16, {}),  # padded columns
        ("e4m3", "bf16", (256, 256), causal, PAGES16, {}),  # pairs of CTAs
        ("e4m3", "e4m3", (192, 192), window, ROWS, {}),
        ("e4m3", "nvfp4", (192, 192), causal, CONTIGUOUS, {}),
    ]
    return [
        Sm100PrefillConfig(arch, dtype, out, *dims, mask, *fetch, **choices)
        for dtype, out, dims, mask, fetch, choices in chosen
    ]


def covering_blackwell_narrow_configs(arch: str = "sm_100a") -> list[Sm100PrefillConfig]:
    """Return Blackwell prefill kernels over e4m3 and NVFP4 caches.

    With each cache they have every tile, fetch, mask, score, output and kind of scales.
    """
    full, causal, window, chunked = MaskKind.FULL, MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW, MaskKind.CHUNKED
    narrow, middle, unequal, uneven = (64, 64), (128, 128), (192, 128), dict(uneven_pages=True)
    of_heads, linear = dict(k_head_scales=True, v_head_scales=True), dict(linear_v_scales=True)
    e4m3: list[tuple[str, str, tuple[int, int], MaskKind, tuple[KvFetch, int], dict[str, Any]]] = [
        ("bf16", "bf16", middle, causal, PAGES16, {}),
        ("fp16", "fp16", middle, full, CONTIGUOUS, {}),
        ("bf16", "bf16", middle, window, ROWS, uneven),
        ("bf16", "bf16", middle, causal, CONTIGUOUS, dict(score=ScoreKind.SOFT_CAP)),
        ("fp16", "fp16", narrow, causal, PAGES64, dict(skip_softmax=True)),
        ("bf16", "e4m3", narrow, full, ROWS, {}),
        ("bf16", "nvfp4", middle, causal, PAGES16, of_heads),
        ("bf16", "bf16", unequal, chunked, PAGES16, {}),
        ("bf16", "bf16", (80, 80), causal, PAGES16, dict(score=ScoreKind.ALIBI)),  # padded columns
    ]
    nvfp4: list[tuple[str, str, tuple[int, int], MaskKind, tuple[KvFetch, int], dict[str, Any]]] = [
        ("bf16", "bf16", middle, causal, PAGES16, {}),
        ("fp16", "fp16", middle, window, ROWS, {}),
        ("bf16", "bf16", middle, causal, PAGES64, dict(skip_softmax=True)),
        ("fp16", "bf16", narrow, full, PAGES64, {}),  # queries that were e4m3
        ("fp16", "e4m3", narrow, causal, PAGES16, linear),
        ("bf16", "bf16", narrow, causal, ROWS, linear | uneven | dict(score=ScoreKind.SOFT_CAP)),
        ("bf16", "nvfp4", middle, causal, ROWS, of_heads),
        ("fp16", "fp16", unequal, chunked, PAGES16, {}),
        ("bf16", "bf16", unequal, causal, PAGES16, dict(score=ScoreKind.ALIBI)),
    ]
    return [
        Sm100PrefillConfig(arch, dtype, out, *dims, mask, *fetch, kv_type=kv_type, **choices)
        for kv_type, chosen in ((KvType.E4M3, e4m3), (KvType.NVFP4, nvfp4))
        for dtype, out, dims, mask, fetch, choices in chosen
    ]


def tcgen05_configs() -> list[KernelConfig]:
    """Return every registered kernel with tcgen05, and the covering ones that are compiled on demand."""
    shipped = [c for arch in BLACKWELL for family in Family for c in shipped_configs(arch, family)]
    shipped += [c for arch in BLACKWELL for c in shipped_configs(arch, Family.MLA, support.TYPES_FP8)]
    found = dict.fromkeys(c for c in shipped if c.matrix_instruction.startswith("tcgen05"))
    kinds = (covering_blackwell_configs, covering_blackwell_fp8_configs, covering_blackwell_narrow_configs)
    return [*(found | dict.fromkeys(c for arch in BLACKWELL for kind in kinds for c in kind(arch)))]


def _dims(dim: int | tuple[int, int]) -> tuple[int, int]:
    """Return head dims (QK, V) from one head dim or from both."""
    return dim if isinstance(dim, tuple) else (dim, dim)


def covering_decode_configs() -> list[DecodeConfig]:
    """Return decode kernels that stand for all: a mask changes the consumers' code, a fetch the producers' code."""

    def stands_for_others(c: DecodeConfig) -> bool:
        plain = c.mask is MaskKind.DRAFT, (c.kv_fetch, c.box_rows) == PAGES16
        # Both types decide how values are dequantized; masks and fetches depend on the width alone.
        stands = any(plain) if c.dtype == "bf16" and c.kv_type is not KvType.INT8 else all(plain)
        if c.dequantizes_in_place and c.head_dim_qk < 512:
            # Loads, masks and products equal the ones of other kernels; dequantization depends on the sizes.
            return c.dtype == "bf16" and c.kv_type is KvType.E4M3 and all(plain)
        if not c.has_tree:
            return stands
        # Rows and columns affect the whole combine of nodes; masks, fetches and dtypes only affect the code before it.
        every_size = c.dtype == "bf16" and c.mask is MaskKind.FULL and plain[1]
        if c.head_dim_qk == 64 and c.rows == splitting.ROWS:
            return stands and plain[1]
        return every_size or (c.head_dim_qk == 128 and stands and (c.rows == SWAP_AB_ROWS[0] or plain[1]))

    # Padded columns occur in both fetches: boxes, and rows that are padded. One output has 8 bits.
    padded = ("sm_90a", "bf16", "bf16", 80, 80, MaskKind.SLIDING_WINDOW)
    rows = {KvType.WIDE: splitting.ROWS, KvType.E4M3: MOST_ROWS_IN_REGISTERS}
    kinds = [(KvType.E4M3, 16), *((kind, m) for kind, most in rows.items() for m in (most, SWAP_AB_ROWS[0]))]
    narrow = ("sm_90a", "bf16", "e4m3")
    # These kernels are compiled only on demand: every head dim with swap-AB and without, boxes and rows, and each
    # mask.
    nvfp4: list[tuple[Any, MaskKind, tuple[KvFetch, int], int, tuple[str, str]]] = [
        (64, MaskKind.DRAFT, ROWS, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (64, MaskKind.FULL, ROWS, splitting.ROWS, ("bf16", "bf16")),
        (64, MaskKind.SLIDING_WINDOW, PAGES16, SWAP_AB_ROWS[1], ("fp16", "fp16")),
        (64, MaskKind.DRAFT, PAGES64, MOST_ROWS_IN_REGISTERS, ("fp16", "fp16")),
        (64, MaskKind.DRAFT, PAGES16, splitting.ROWS, ("bf16", "bf16")),
        (128, MaskKind.FULL, PAGES16, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (128, MaskKind.DRAFT, PAGES16, SWAP_AB_ROWS[1], ("bf16", "bf16")),
        (128, MaskKind.DRAFT, ROWS, MOST_ROWS_IN_REGISTERS, ("bf16", "bf16")),
        (128, MaskKind.FULL, PAGES16, MOST_ROWS_IN_REGISTERS, ("bf16", "e4m3")),
        (128, MaskKind.SLIDING_WINDOW, ROWS, splitting.ROWS, ("bf16", "bf16")),
        (128, MaskKind.DRAFT, PAGES16, splitting.ROWS, ("bf16", "bf16")),
        (128, MaskKind.FULL, ROWS, splitting.ROWS, ("fp16", "e4m3")),
        (256, MaskKind.SLIDING_WINDOW, PAGES16, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (256, MaskKind.DRAFT, PAGES16, splitting.ROWS, ("bf16", "bf16")),
        (256, MaskKind.FULL, (KvFetch.PAGE_BOXES, 8), splitting.ROWS, ("fp16", "e4m3")),
        # Rows that lanes cannot share equally.
        (80, MaskKind.DRAFT, ROWS, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (160, MaskKind.FULL, PAGES16, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (96, MaskKind.FULL, ROWS, SWAP_AB_ROWS[1], ("bf16", "bf16")),
        (96, MaskKind.DRAFT, PAGES16, MOST_ROWS_IN_REGISTERS, ("bf16", "bf16")),
        (80, MaskKind.SLIDING_WINDOW, ROWS, MOST_ROWS_IN_REGISTERS, ("bf16", "bf16")),
        (96, MaskKind.SLIDING_WINDOW, PAGES16, splitting.ROWS, ("bf16", "bf16")),
        (96, MaskKind.DRAFT, ROWS, splitting.ROWS, ("bf16", "bf16")),
        (160, MaskKind.DRAFT, ROWS, splitting.ROWS, ("bf16", "bf16")),
        (96, MaskKind.FULL, ROWS, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (192, MaskKind.DRAFT, ROWS, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        (192, MaskKind.SLIDING_WINDOW, PAGES16, splitting.ROWS, ("bf16", "bf16")),
        ((192, 128), MaskKind.DRAFT, PAGES16, SWAP_AB_ROWS[0], ("bf16", "bf16")),
        ((192, 128), MaskKind.FULL, PAGES16, splitting.ROWS, ("bf16", "bf16")),
    ]
    # V has fewer columns than K: every kernel, both fetches and each mask.
    unequal = [
        (MaskKind.SLIDING_WINDOW, ROWS, KvType.WIDE, SWAP_AB_ROWS[1]),
        (MaskKind.DRAFT, PAGES16, KvType.WIDE, splitting.ROWS),
        (MaskKind.FULL, PAGES16, KvType.E4M3, SWAP_AB_ROWS[0]),
        (MaskKind.DRAFT, ROWS, KvType.E4M3, MOST_ROWS_IN_REGISTERS),
        (MaskKind.DRAFT, PAGES16, KvType.E4M3, splitting.ROWS),
    ]
    return [
        *filter(stands_for_others, shipped_decode_configs()),
        *(DecodeConfig("sm_90a", "bf16", "bf16", 192, 128, mask, *fetch, *kind) for mask, fetch, *kind in unequal),
        *(DecodeConfig(*padded, *fetch, *kind) for fetch in (PAGES16, ROWS) for kind in kinds),
        *(
            DecodeConfig(*narrow, dim, dim, MaskKind.FULL, *PAGES16, KvType.E4M3, rows)
            for dim, rows in itertools.product((64, 128, 256), (MOST_ROWS_IN_REGISTERS, SWAP_AB_ROWS[0]))
        ),
        *(
            DecodeConfig("sm_90a", "bf16", "bf16", 512, 512, MaskKind.DRAFT, *fetch, kv_type, SWAP_AB_ROWS[0])
            for fetch, kv_type in ((ROWS, KvType.E4M3), (PAGES16, KvType.INT8))
        ),
        *(
            DecodeConfig("sm_90a", *types, *_dims(dim), mask, *fetch, KvType.NVFP4, rows)
            for dim, mask, fetch, rows, types in nvfp4
        ),
    ]


def covering_mla_configs() -> list[MlaConfig]:
    """Return MLA kernels that stand for all: full-tile boxes, smaller boxes, rows and top-k; all widths; swap-AB."""
    wide, narrow = support.MLA_HEAD_DIMS
    *_, unrotated = support.SPARSE_MLA_HEAD_DIMS
    chosen = [
        *((wide, fetch, 64) for fetch in (PAGES64, PAGES16, ROWS, TOPK)),
        *((narrow, fetch, 64) for fetch in (PAGES64, TOPK)),
        (unrotated, TOPK, 64),
        *((wide, fetch, 16) for fetch in (PAGES64, ROWS, TOPK)),
        (unrotated, TOPK, 16),
        (narrow, PAGES64, 16),
    ]
    # fp8 MMA: fetches equal the 16-bit ones, and depend on the width alone.
    fp8_chosen = [
        *((wide, fetch, rows) for fetch in (PAGES16, TOPK) for rows in (64, 16)),
        (wide, ROWS, 64),
        (narrow, PAGES64, 64),
        (narrow, (KvFetch.PAGE_BOXES, 8), 16),
        (unrotated, TOPK, 64),
        (unrotated, TOPK, 16),
    ]
    configs = [
        MlaConfig("sm_90a", dtype, "bf16", *dims, MaskKind.CAUSAL, *fetch, rows=rows)
        for dtype, kinds in (("bf16", chosen), ("e4m3", fp8_chosen))
        for dims, fetch, rows in kinds
    ]
    by_cluster = (MaskKind.CAUSAL, *TOPK, KvType.FP8_DS_MLA, 64)
    configs.append(MlaConfig("sm_90a", "bf16", "bf16", *wide, *by_cluster, shares_dequant=True))
    # Requests are split by their own lengths. TMA, lane copies, and lane copies with dequantization leave one or two
    # warps for the combine.
    by_length = [("bf16", PAGES64, KvType.WIDE), ("bf16", ROWS, KvType.E4M3), ("e4m3", PAGES16, KvType.WIDE)]
    return configs + [
        MlaConfig("sm_90a", dtype, "bf16", *wide, MaskKind.CAUSAL, *fetch, kv_type, 64, batch_invariant=True)
        for dtype, fetch, kv_type in by_length
    ]


def covering_sm120_decode_configs() -> list[DecodeConfig | MlaConfig]:
    """Return decode and MLA decode kernels of sm_120 that stand for all.

    They are the kernels of each size with the highest register use, every mask, every fetch, and all on-demand kernels.
    """
    full, window, draft = MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT
    chosen = [
        ("bf16", 128, full, PAGES16, KvType.WIDE, 8),
        ("bf16", 128, draft, PAGES16, KvType.WIDE, 32),
        ("fp16", 64, window, ROWS, KvType.WIDE, 32),
        ("bf16", 256, draft, PAGES64, KvType.WIDE, 16),
        ("bf16", 80, full, PAGES16, KvType.WIDE, 16),
        ("bf16", 128, draft, PAGES16, KvType.E4M3, 8),
        ("bf16", 256, window, ROWS, KvType.INT8, 8),
        ("bf16", 512, full, PAGES16, KvType.WIDE, 8),
        ("fp16", 512, draft, ROWS, KvType.WIDE, 8),
        ("bf16", 512, full, PAGES16, KvType.E4M3, 8),
        ("bf16", 64, full, ROWS, KvType.NVFP4, 8),
        ("fp16", 128, window, PAGES16, KvType.NVFP4, 8),
        ("bf16", 256, draft, PAGES64, KvType.NVFP4, 8),
        ("bf16", 80, draft, ROWS, KvType.NVFP4, 8),
        ("bf16", 160, window, PAGES16, KvType.NVFP4, 8),
        ("bf16", 96, full, PAGES16, KvType.NVFP4, 8),
        ("bf16", 192, draft, ROWS, KvType.NVFP4, 8),
        ("bf16", (192, 128), draft, PAGES16, KvType.NVFP4, 8),
        ("bf16", (192, 128), window, ROWS, KvType.WIDE, 16),
        ("bf16", (192, 128), draft, PAGES16, KvType.E4M3, 8),
    ]
    latent = [((576, 512), PAGES64), ((576, 512), TOPK), ((320, 256), ROWS), ((512, 512), TOPK)]
    return [
        *(
            Sm120DecodeConfig("sm_120a", dtype, dtype, *_dims(dim), mask, *fetch, kv_type, rows)
            for dtype, dim, mask, fetch, kv_type, rows in chosen
        ),
        *(
            Sm120MlaConfig(
                "sm_120a", "bf16", "bf16", *dims, MaskKind.CAUSAL, *fetch, rows=splitting.LATENT_SWAP_AB_ROWS
            )
            for dims, fetch in latent
        ),
    ]


def covering_pair_mla_configs() -> list[Sm100MlaConfig]:
    """Return MLA kernels of Blackwell's CTA pairs that stand for all: types, widths, fetches, one box and several."""
    wide, narrow = support.MLA_HEAD_DIMS
    *_, unrotated = support.SPARSE_MLA_HEAD_DIMS
    rows = Sm100MlaConfig.most_rows
    # Requests are split by their own lengths: with four warps that combine, and with one beside dequantization.
    by_length = [
        ("sm_100a", "bf16", wide, PAGES64, KvType.WIDE),
        ("sm_100a", "e4m3", wide, PAGES16, KvType.WIDE),
        ("sm_103a", "bf16", narrow, TOPK, KvType.WIDE),
        ("sm_100a", "bf16", wide, ROWS, KvType.E4M3),
    ]
    return [
        Sm100MlaConfig(arch, dtype, "bf16", *dims, MaskKind.CAUSAL, *fetch, kv_type, rows, batch_invariant=True)
        for arch, dtype, dims, fetch, kv_type in by_length
    ] + [
        Sm100MlaConfig(arch, dtype, "bf16", *dims, MaskKind.CAUSAL, *fetch, rows=rows, kv_type=kv_type)
        for arch, dtype, dims, fetch, kv_type in (
            ("sm_100a", "bf16", wide, PAGES64, KvType.WIDE),
            ("sm_100a", "bf16", wide, (KvFetch.PAGE_BOXES, 8), KvType.WIDE),
            ("sm_103a", "bf16", narrow, PAGES16, KvType.WIDE),
            ("sm_103a", "e4m3", wide, PAGES64, KvType.WIDE),
            ("sm_100a", "e4m3", narrow, (KvFetch.PAGE_BOXES, 8), KvType.WIDE),
            ("sm_100a", "bf16", wide, ROWS, KvType.WIDE),
            ("sm_103a", "bf16", wide, TOPK, KvType.WIDE),
            ("sm_100a", "e4m3", unrotated, TOPK, KvType.WIDE),
            ("sm_100a", "e4m3", wide, ROWS, KvType.WIDE),
            ("sm_100a", "bf16", wide, ROWS, KvType.E4M3),
            ("sm_103a", "bf16", narrow, TOPK, KvType.E4M3),
            ("sm_103a", "bf16", wide, ROWS, KvType.FP8_DS_MLA),
            ("sm_100a", "bf16", wide, TOPK, KvType.FP8_DS_MLA),
        )
    ]


COVERING_FP8 = covering_fp8_configs()
COVERING_DECODE = covering_decode_configs()
COVERING_MLA = covering_mla_configs()
COVERING_SM120_DECODE = covering_sm120_decode_configs()
COVERING_PAIR_MLA = covering_pair_mla_configs()


def head_scale_configs() -> list[PrefillConfig]:
    """Return prefill kernels with scales of each KV head: every class of operands that takes them, with packed heads
    and without."""
    scales: dict[str, Any] = dict(k_head_scales=True, v_head_scales=True)
    return [
        kind(arch, dtype, "bf16", *dims, MaskKind.CAUSAL, *PAGES16, **choices, **scales)
        for kind, arch, dtype, dims, choices in (
            (PrefillConfig, "sm_90a", "bf16", (128, 128), dict(kv_type=KvType.E4M3)),
            (PrefillConfig, "sm_90a", "bf16", (128, 128), dict(kv_type=KvType.E4M3, packs_heads=True)),
            (PrefillConfig, "sm_90a", "bf16", (256, 256), dict(kv_type=KvType.E4M3)),
            (PrefillConfig, "sm_90a", "bf16", (192, 128), dict(kv_type=KvType.NVFP4)),
            (PrefillConfig, "sm_90a", "e4m3", (128, 128), {}),
            (PrefillConfig, "sm_90a", "e4m3", (64, 64), dict(packs_heads=True)),
            (Sm120PrefillConfig, "sm_120a", "bf16", (128, 128), dict(kv_type=KvType.E4M3)),
            (Sm120PrefillConfig, "sm_120a", "e4m3", (128, 128), {}),
            (Sm100PrefillConfig, "sm_100a", "e4m3", (128, 128), {}),
        )
    ]
