"""Chooses the tcgen05 decode kernels that tests compile and run."""

from __future__ import annotations

from typing import Any

from helpers.covering.configs import PAGES16, PAGES64, ROWS
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig

PAGES8, PAGES32 = (KvFetch.PAGE_BOXES, 8), (KvFetch.PAGE_BOXES, 32)
UNEVEN: dict[str, Any] = dict(uneven_pages=True)
SHORT: dict[str, Any] = dict(short_leaves=True)


def covering_sm100_decode_configs() -> list[Sm100DecodeConfig]:
    """Return tcgen05 decode kernels that stand for all.

    Rows and columns decide products, registers and the tree, so every number of rows has narrow, wide and padded
    columns. A mask changes the code of attend, a fetch the code of the loads; independent choices are not combined.
    """
    full, window, draft = MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT
    usual, blackwell_ultra = ("sm_100a", "bf16", "bf16"), ("sm_103a", "bf16", "bf16")
    fp16 = ("sm_100a", "fp16", "fp16")
    chosen: list[tuple[tuple[str, str, str], tuple[int, int], int, MaskKind, tuple[KvFetch, int], dict[str, Any]]] = [
        (usual, (128, 128), 8, full, PAGES16, {}),
        (usual, (128, 128), 8, draft, PAGES64, {}),
        (fp16, (128, 128), 8, window, ROWS, {}),
        (usual, (128, 128), 16, draft, PAGES16, {}),
        (("sm_100a", "fp16", "bf16"), (128, 128), 16, full, ROWS, {}),
        (usual, (128, 128), 32, full, PAGES32, {}),
        (usual, (128, 128), 32, draft, PAGES16, SHORT),
        (usual, (128, 128), 64, full, PAGES16, {}),
        (fp16, (128, 128), 64, draft, ROWS, {}),
        (blackwell_ultra, (64, 64), 8, full, PAGES64, {}),
        (usual, (64, 64), 16, window, PAGES8, {}),
        (usual, (64, 64), 32, draft, PAGES16, SHORT),
        (usual, (64, 64), 32, window, PAGES64, {}),
        (usual, (64, 64), 64, window, PAGES64, {}),
        (fp16, (256, 256), 8, full, PAGES16, {}),
        (blackwell_ultra, (256, 256), 16, draft, ROWS, {}),
        (usual, (256, 256), 16, window, PAGES32, {}),
        # Padded columns: boxes and rows each pad in a different way. The narrowest rows fill one instruction.
        (usual, (80, 80), 8, window, PAGES16, {}),
        (usual, (96, 96), 32, full, ROWS, {}),
        (usual, (80, 80), 64, draft, PAGES16, {}),
        (usual, (16, 16), 8, full, ROWS, {}),
        (usual, (48, 48), 64, full, PAGES16, {}),
        (usual, (208, 208), 16, full, PAGES16, {}),
        # V has fewer columns than K.
        (usual, (192, 128), 8, draft, PAGES16, {}),
        (blackwell_ultra, (192, 128), 16, window, ROWS, {}),
        # Page sizes that are no powers of two: 24, 1040 and 3 tokens.
        (usual, (128, 128), 8, full, PAGES8, UNEVEN),
        (usual, (64, 64), 8, draft, PAGES16, UNEVEN),
        (usual, (128, 128), 64, window, PAGES8, UNEVEN),
        (usual, (128, 128), 16, full, ROWS, UNEVEN),
    ]
    return [
        Sm100DecodeConfig(*kind, *dims, mask, *fetch, KvType.WIDE, rows, **options)
        for kind, dims, rows, mask, fetch, options in chosen
    ]


def page_size(config: Sm100DecodeConfig) -> int:
    """Return a page size whose pages are fetched as ``config`` says."""
    if config.uneven_pages:
        return {0: 3, 8: 24, 16: 1040}[config.box_rows]
    return config.box_rows or 4


COVERING_SM100_DECODE = covering_sm100_decode_configs()
