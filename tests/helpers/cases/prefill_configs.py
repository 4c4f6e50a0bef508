"""A batch through the kernel of a given config, checked against float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helpers.batches.prefill import Batch, check_statistics
from hopwell.kernels import execute
from hopwell.kernels.config.base import DTYPES, KvFetch
from hopwell.kernels.config.prefill import SHORT_WINDOW, PrefillConfig
from hopwell.kernels.problem import Mask, MaskKind, Score, ScoreKind
from hopwell.kernels.registry import resolve

MAIN_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
WINDOW = 70  # keys to the left
CHUNK = 64
CAPS = {ScoreKind.SOFT_CAP: 2.0, ScoreKind.LARGE_SOFT_CAP: 3e5}
SCALE = 1.25  # times 1 / sqrt(head_dim): statistics of plain scores have exactly this factor
SKIP_SOFTMAX = 1e-30  # small enough that no tile is left out

_CONTIGUOUS, _ROWS = (KvFetch.CONTIGUOUS, 0), (KvFetch.PAGE_ROWS, 0)
_PAGES16, _PAGES64 = (KvFetch.PAGE_BOXES, 16), (KvFetch.PAGE_BOXES, 64)
# Chunks and scores in fp16. The dtype affects matrix instructions and roundings, and neither depends on chunks or
# scores, so a few kernels stand for all.
FP16_FEATURES = tuple(
    PrefillConfig("sm_90a", "fp16", "fp16", *dims, mask, *fetch, score)
    for dims, mask, fetch, score in (
        ((64, 64), MaskKind.CHUNKED, _CONTIGUOUS, ScoreKind.SCALED),
        ((64, 64), MaskKind.FULL, _PAGES16, ScoreKind.SOFT_CAP),
        ((128, 128), MaskKind.CHUNKED, _ROWS, ScoreKind.SCALED),
        ((128, 128), MaskKind.SLIDING_WINDOW, _PAGES16, ScoreKind.ALIBI),
        ((192, 128), MaskKind.CHUNKED, _PAGES16, ScoreKind.SCALED),
        ((192, 128), MaskKind.CAUSAL, _CONTIGUOUS, ScoreKind.SOFT_CAP),
        ((256, 256), MaskKind.CHUNKED, _PAGES64, ScoreKind.SCALED),
    )
)

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def mask_of(config: PrefillConfig) -> Mask:
    """Return a mask that selects ``config``, with the shortest window that does."""
    dims = config.head_dim_qk, config.head_dim_v
    if config.mask is MaskKind.SLIDING_WINDOW:
        is_long = config.has_short_steps(dims, config.mask) and not config.short_steps
        return Mask(config.mask, SHORT_WINDOW if is_long else WINDOW)
    return Mask(config.mask, chunk=CHUNK) if config.mask is MaskKind.CHUNKED else Mask(config.mask)


def check_config(
    config: PrefillConfig,
    lengths: tuple[Sequence[int], Sequence[int]],
    page_size: int | None,
    sinks: Sequence[float],
    kv_heads: int = 1,
    device: str = "cuda",
) -> None:
    """Check a config with requests of (query, KV) ``lengths``, and one of ``sinks`` for each query head.

    Output, log-sum-exp and statistics must match.
    """
    data = Batch(
        *lengths,
        heads=len(sinks),
        kv_heads=kv_heads,
        head_dim=config.head_dim_qk,
        v_head_dim=config.head_dim_v,
        dtype=_TORCH_DTYPES[config.dtype],
        device=device,
    )
    mask = mask_of(config)
    score = Score(config.score, CAPS.get(config.score, 0.0))
    logits = torch.tensor(sinks, device=device)
    skip_softmax = SKIP_SOFTMAX if config.skip_softmax else 0.0
    lse, statistics = data.ragged_lse(), data.statistics()
    scale = SCALE * data.scale
    options = dict(softmax_scale=scale, score=score, sinks=logits, skip_softmax=skip_softmax)
    problem = data.problem(page_size, mask, lse=lse, statistics=statistics, **options)
    assert resolve(problem, config.arch) == config
    out = execute(problem)
    expected = data.expected(mask, scale=scale, sinks=logits, score=score)
    expected.check(out)
    expected.check_lse(lse.tensor)
    check_statistics(statistics, data.expected_statistics(mask, scale=scale, score=score))
