"""Skip-softmax under every mask and score: its skipped tiles, and no loss for any row that needs a tile."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, chunked, window
from helpers.oracles import reference
from helpers.oracles.skipped_tiles import arch_of, check_left_out, rows_of, tile_n, with_count

from hopwell.kernels.problem import Mask, Score, ScoreKind

BF16, FP16 = torch.bfloat16, torch.float16
PLAIN, SOFT_CAP, ALIBI = reference.PLAIN, Score(ScoreKind.SOFT_CAP, 8.0), Score(ScoreKind.ALIBI)


@pytest.mark.parametrize("factor", [1e-30, 50.0, 200.0])
@pytest.mark.parametrize(
    ("dims", "dtype", "page_size", "mask", "score"),
    [
        pytest.param((128, 128), BF16, None, CAUSAL, PLAIN, id="contiguous"),
        pytest.param((128, 128), BF16, 16, CAUSAL, PLAIN, id="pages"),
        pytest.param((128, 128), BF16, None, FULL, PLAIN, id="full"),
        pytest.param((128, 128), BF16, 16, window(400), PLAIN, id="window"),
        pytest.param((192, 128), BF16, None, chunked(512), PLAIN, id="chunked"),
        pytest.param((64, 64), FP16, None, CAUSAL, SOFT_CAP, id="soft_cap"),
        pytest.param((128, 128), FP16, None, CAUSAL, ALIBI, id="alibi"),
        pytest.param((128, 128), BF16, 16, window(400), SOFT_CAP, id="soft_cap-window"),
    ],
)
def test_what_is_left_out(
    dims: tuple[int, int],
    dtype: torch.dtype,
    page_size: int | None,
    mask: Mask,
    score: Score,
    factor: float,
    device: str,
) -> None:
    data = Batch([192, 64], [1000, 500], 2, 1, *dims, dtype=dtype, magnitude=1.5, device=device)
    check_left_out(data, factor, page_size, mask, score)


@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_a_row_that_alone_needs_a_tile(head_dim: int, device: str) -> None:
    """Each tile except two is needed by exactly one of the rows that decide together.

    The row belongs to another lane and warp each time.
    """
    rows, dims, arch = [0, 9, 31, 63, 64, 77, 111, 127], (head_dim, head_dim), arch_of(device)
    tiles, n = len(rows) + 2, tile_n(dims, arch)
    data = Batch([128], [tiles * n], 1, 1, head_dim, device=device)
    data.q.zero_()
    data.k[0].zero_()
    data.q[..., 0] = 8.0
    data.k[0][-1, :, 0] = 8.0
    for tile, row in enumerate(rows):
        data.q[row, :, 1 + tile] = 16.0
        data.k[0][tile * n + 5, :, 1 + tile] = 8.0
    out, count = with_count(data, None, mask=FULL, softmax_scale=1.0, skip_softmax=100.0)
    data.expected(FULL, scale=1.0).check(out)
    assert count == 128 // rows_of(dims, arch).deciding * (tiles - 1) - len(rows)


def test_other_requests_change_no_decision(device: str) -> None:
    """The queries of the next request lie in the rest of a request's last query tile. They need every tile of keys."""
    data = Batch([40, 30], [700, 600], 1, 1, 128, magnitude=2.0, device=device)
    data.k[0][torch.arange(700, device=device) % 300 >= 100] *= 0.02
    data.q[40:] *= 8.0
    options = dict(mask=CAUSAL, skip_softmax=100.0)
    together, _ = with_count(data, 16, **options)
    alone, count = with_count(data.request(0), 16, **options)
    assert count > 0
    assert torch.equal(together[:40], alone)
