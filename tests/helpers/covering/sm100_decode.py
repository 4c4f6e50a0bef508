"""Chooses the tcgen05 decode kernels that tests compile and run."""

from __future__ import annotations

from typing import Any, NamedTuple

from helpers.covering.configs import PAGES16, PAGES64, ROWS
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig

PAGES8, PAGES32 = (KvFetch.PAGE_BOXES, 8), (KvFetch.PAGE_BOXES, 32)
UNEVEN: dict[str, Any] = dict(uneven_pages=True)
SHORT: dict[str, Any] = dict(short_leaves=True)


class Types(NamedTuple):
    """Architecture, and types of query and output."""

    arch: str = "sm_100a"
    dtype: str = "bf16"
    out_dtype: str = "bf16"


USUAL, FP16, ULTRA, TO_E4M3 = Types(), Types(dtype="fp16", out_dtype="fp16"), Types("sm_103a"), Types(out_dtype="e4m3")
FULL, WINDOW, DRAFT = MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT
Row = tuple[Types, int | tuple[int, int], int, MaskKind, tuple[KvFetch, int], KvType, dict[str, Any]]


def _wide() -> list[Row]:
    """Return kernels over 16-bit caches. Rows and columns decide products, registers and the tree, so every number of
    rows has narrow, wide and padded columns."""
    wide = KvType.WIDE
    return [
        (USUAL, 128, 8, FULL, PAGES16, wide, {}),
        (USUAL, 128, 8, DRAFT, PAGES64, wide, {}),
        (FP16, 128, 8, WINDOW, ROWS, wide, {}),
        (USUAL, 128, 16, DRAFT, PAGES16, wide, {}),
        (Types(dtype="fp16"), 128, 16, FULL, ROWS, wide, {}),
        (USUAL, 128, 32, FULL, PAGES32, wide, {}),
        (USUAL, 128, 32, DRAFT, PAGES16, wide, SHORT),
        (USUAL, 128, 64, FULL, PAGES16, wide, {}),
        (FP16, 128, 64, DRAFT, ROWS, wide, {}),
        (ULTRA, 64, 8, FULL, PAGES64, wide, {}),
        (USUAL, 64, 16, WINDOW, PAGES8, wide, {}),
        (USUAL, 64, 32, DRAFT, PAGES16, wide, SHORT),
        (USUAL, 64, 32, WINDOW, PAGES64, wide, {}),
        (USUAL, 64, 64, WINDOW, PAGES64, wide, {}),
        (FP16, 256, 8, FULL, PAGES16, wide, {}),
        (ULTRA, 256, 16, DRAFT, ROWS, wide, {}),
        (USUAL, 256, 16, WINDOW, PAGES32, wide, {}),
        # Padded columns: boxes and rows each pad in a different way. The narrowest rows fill one instruction.
        (USUAL, 80, 8, WINDOW, PAGES16, wide, {}),
        (USUAL, 96, 32, FULL, ROWS, wide, {}),
        (USUAL, 80, 64, DRAFT, PAGES16, wide, {}),
        (USUAL, 16, 8, FULL, ROWS, wide, {}),
        (USUAL, 48, 64, FULL, PAGES16, wide, {}),
        (USUAL, 208, 16, FULL, PAGES16, wide, {}),
        # V has fewer columns than K.
        (USUAL, (192, 128), 8, DRAFT, PAGES16, wide, {}),
        (ULTRA, (192, 128), 16, WINDOW, ROWS, wide, {}),
        # Page sizes that are no powers of two: 24, 1040 and 3 tokens.
        (USUAL, 128, 8, FULL, PAGES8, wide, UNEVEN),
        (USUAL, 64, 8, DRAFT, PAGES16, wide, UNEVEN),
        (USUAL, 128, 64, WINDOW, PAGES8, wide, UNEVEN),
        (USUAL, 128, 16, FULL, ROWS, wide, UNEVEN),
    ]


def _narrow() -> list[Row]:
    """Return kernels over 8-bit and 4-bit caches. The type of the cache and of the query decide the dequantization,
    columns and rows its registers and its buffers in tensor memory."""
    e4m3, int8, nvfp4 = KvType.E4M3, KvType.INT8, KvType.NVFP4
    return [
        (USUAL, 128, 8, FULL, PAGES16, e4m3, {}),
        (USUAL, 128, 8, DRAFT, ROWS, int8, {}),
        (FP16, 64, 8, WINDOW, PAGES64, e4m3, {}),
        (USUAL, 256, 8, DRAFT, PAGES16, e4m3, {}),
        (TO_E4M3, 256, 8, FULL, ROWS, int8, {}),
        (USUAL, 80, 8, WINDOW, ROWS, e4m3, {}),
        (USUAL, 208, 8, WINDOW, PAGES8, int8, {}),
        (USUAL, (192, 128), 8, DRAFT, PAGES16, e4m3, {}),
        (USUAL, 128, 8, FULL, PAGES8, e4m3, UNEVEN),
        (TO_E4M3, 128, 32, FULL, PAGES16, e4m3, {}),
        (USUAL, 128, 32, DRAFT, ROWS, e4m3, {}),
        (FP16, 64, 32, WINDOW, PAGES32, int8, {}),
        (USUAL, 128, 64, DRAFT, PAGES16, e4m3, {}),
        (USUAL, 64, 64, FULL, ROWS, e4m3, {}),
        (ULTRA, 128, 64, WINDOW, PAGES64, int8, {}),
        (USUAL, 80, 64, FULL, PAGES16, e4m3, {}),
        (ULTRA, 128, 8, FULL, PAGES16, nvfp4, {}),
        (USUAL, 64, 8, DRAFT, ROWS, nvfp4, {}),
        (USUAL, 256, 8, WINDOW, PAGES16, nvfp4, {}),
        (Types(dtype="fp16", out_dtype="e4m3"), 128, 8, FULL, PAGES8, nvfp4, {}),
        (USUAL, 80, 8, DRAFT, ROWS, nvfp4, {}),
        (USUAL, 96, 8, WINDOW, PAGES16, nvfp4, {}),
        (USUAL, 160, 8, FULL, PAGES16, nvfp4, {}),
        (USUAL, (192, 128), 8, DRAFT, PAGES16, nvfp4, {}),
        (TO_E4M3, 128, 32, FULL, PAGES16, nvfp4, {}),
        (FP16, 64, 32, WINDOW, ROWS, nvfp4, {}),
        (USUAL, 128, 64, DRAFT, PAGES16, nvfp4, {}),
        (ULTRA, 80, 64, FULL, PAGES8, nvfp4, {}),
        # A warpgroup with 16 rows.
        (USUAL, 128, 16, DRAFT, PAGES16, e4m3, {}),
        (FP16, 64, 16, WINDOW, ROWS, e4m3, {}),
        (ULTRA, 128, 16, FULL, PAGES64, int8, {}),
        (USUAL, 80, 16, DRAFT, ROWS, int8, {}),
        (USUAL, 128, 16, FULL, PAGES8, nvfp4, {}),
        (TO_E4M3, 64, 16, DRAFT, ROWS, nvfp4, {}),
        (USUAL, 96, 16, WINDOW, PAGES16, nvfp4, {}),
    ]


def covering_sm100_decode_configs() -> list[Sm100DecodeConfig]:
    """Return tcgen05 decode kernels that stand for all. A mask changes the code of attend, a fetch the code of the
    loads. Independent choices are not combined."""
    return [
        Sm100DecodeConfig(*types, *(dim if isinstance(dim, tuple) else (dim, dim)), mask, *fetch, kv_type, rows, **more)
        for types, dim, rows, mask, fetch, kv_type, more in (*_wide(), *_narrow())
    ]


def page_size(config: Sm100DecodeConfig) -> int:
    """Return a page size whose pages are fetched as ``config`` says."""
    if config.uneven_pages:
        return {0: 3, 8: 24, 16: 1040}[config.box_rows]
    return config.box_rows or 4


COVERING_SM100_DECODE = covering_sm100_decode_configs()
