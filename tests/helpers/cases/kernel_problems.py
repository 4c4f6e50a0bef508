"""Attention problems without memory: kernel selection needs only shapes, strides and dtypes."""

from __future__ import annotations

from typing import Any

import torch

from hopwell.kernels.problem import (
    AttentionProblem,
    Mask,
    MaskKind,
    PageTable,
    Score,
    ScoreKind,
    TokenOffsets,
)

MASKS = {
    MaskKind.FULL: Mask(MaskKind.FULL),
    MaskKind.CAUSAL: Mask(MaskKind.CAUSAL),
    MaskKind.SLIDING_WINDOW: Mask(MaskKind.SLIDING_WINDOW, 127),
    MaskKind.CHUNKED: Mask(MaskKind.CHUNKED, chunk=64),
}
SCORES = {
    ScoreKind.SCALED: Score(),
    ScoreKind.SOFT_CAP: Score(ScoreKind.SOFT_CAP, 30.0),
    ScoreKind.LARGE_SOFT_CAP: Score(ScoreKind.LARGE_SOFT_CAP, 1e6),
    ScoreKind.ALIBI: Score(ScoreKind.ALIBI),
    ScoreKind.CAPPED_ALIBI: Score(ScoreKind.CAPPED_ALIBI, 30.0),
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache(
    form: str,
    page_size: int,
    dims: tuple[int, int],
    *,
    pages: int = 5,
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.Tensor]:
    """Return canonical views [pages, heads, page_size, dim] of K and V in a cache of ``form``.

    A stacked cache holds K and V of one width in one tensor, so a narrower V is a slice.
    """
    sizes = (heads, page_size) if "HND" in form else (page_size, heads)
    if form.startswith("stacked"):
        both = empty(pages, 2, *sizes, max(dims), dtype=dtype)
        views = [both[:, i, ..., :dim] for i, dim in enumerate(dims)]
    else:
        views = [empty(pages, *sizes, dim, dtype=dtype) for dim in dims]
    return views if "HND" in form else [view.transpose(1, 2) for view in views]


CACHES = ("stacked-HND", "stacked-NHD", "tuple-HND", "tuple-NHD")


def paged(key: torch.Tensor, value: torch.Tensor, **changes: Any) -> AttentionProblem:
    table = torch.zeros(3, 8, dtype=torch.int32, device="meta")
    return _problem(key, value, dict(page_table=PageTable(table, table)) | changes)


def contiguous(key: torch.Tensor, value: torch.Tensor, **changes: Any) -> AttentionProblem:
    starts = TokenOffsets(torch.zeros(4, dtype=torch.int32, device="meta"))
    return _problem(key, value, dict(k_offsets=starts) | changes)


def _problem(key: torch.Tensor, value: torch.Tensor, changes: dict[str, Any]) -> AttentionProblem:
    fields: dict[str, Any] = dict(
        query=empty(600, 2 * key.shape[1], key.shape[3], dtype=key.dtype),
        key=key,
        value=value,
        out=None,
        batch=3,
        max_q_len=200,
        max_kv_len=8 * key.shape[2],
        q_offsets=TokenOffsets(torch.zeros(4, dtype=torch.int32, device="meta")),
        kv_lens=torch.zeros(3, dtype=torch.int32, device="meta"),
        mask=MASKS[MaskKind.CAUSAL],
        softmax_scale=0.1,
    )
    return AttentionProblem(**(fields | changes))
