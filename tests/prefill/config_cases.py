"""A batch through the kernel of a given config, checked against float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from batches import Batch

from hopwell.kernels import execute
from hopwell.kernels.config import DTYPES, PrefillConfig, resolve
from hopwell.kernels.problem import Mask, MaskKind, Score, ScoreKind

MAIN_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
WINDOW = 70  # keys to the left: less than a tile, so that tiles are skipped
CHUNK = 64
SOFT_CAP = 2.0
SKIP_SOFTMAX = 1e-30  # so little that nothing is left out

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def check_config(
    config: PrefillConfig,
    lengths: tuple[Sequence[int], Sequence[int]],
    page_size: int | None,
    sinks: Sequence[float],
    kv_heads: int = 1,
    device: str = "cuda",
) -> None:
    """Requests of (query, KV) ``lengths`` with one of ``sinks`` for each query head: output and log-sum-exp match."""
    data = Batch(
        *lengths,
        heads=len(sinks),
        kv_heads=kv_heads,
        head_dim=config.head_dim_qk,
        v_head_dim=config.head_dim_v,
        dtype=_TORCH_DTYPES[config.dtype],
        device=device,
    )
    mask = {
        MaskKind.SLIDING_WINDOW: Mask(MaskKind.SLIDING_WINDOW, WINDOW),
        MaskKind.CHUNKED: Mask(MaskKind.CHUNKED, chunk=CHUNK),
    }.get(config.mask, Mask(config.mask))
    score = Score(config.score, SOFT_CAP if config.score is ScoreKind.SOFT_CAP else 0.0)
    logits = torch.tensor(sinks, device=device)
    skip_softmax = SKIP_SOFTMAX if config.skip_softmax else 0.0
    lse = data.ragged_lse()
    problem = data.problem(page_size, mask, lse=lse, sinks=logits, score=score, skip_softmax=skip_softmax)
    assert resolve(problem, config.arch) == config
    out = execute(problem)
    expected = data.expected(mask, sinks=logits, score=score)
    expected.check(out)
    expected.check_lse(lse.tensor)
