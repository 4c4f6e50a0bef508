"""The count of tiles that skip-softmax leaves out, in pairs of 64 rows and a tile of keys."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.prefill import CAUSAL, Batch, chunked, window
from helpers.oracles import reference
from helpers.oracles.skipped_tiles import check_left_out, tile_n, with_count

from hopwell import emulator
from hopwell.kernels.problem import Mask, Score, ScoreKind

pytestmark = pytest.mark.emulator

TILES = 4  # of keys
DETECTORS = dict(race=True, proxy=True, strict=True)


def batch(arch: str, head_dim: int, rows: int) -> Batch:
    """Make keys without weight, except the last ``rows`` keys, which have a logit of 64.

    Each row sees at least one of them.
    """
    keys = TILES * tile_n((head_dim, head_dim), arch)
    data = Batch([rows], [keys], heads=2, kv_heads=1, head_dim=head_dim, device="cpu")
    data.q.zero_()
    data.q[..., 0] = 8.0
    data.k[0].zero_()
    data.k[0][-rows:, 0, 0] = 8.0
    return data


def skipped(arch: str, data: Batch, page_size: int | None) -> int:
    """Return the count of skipped tiles, after a check that the output does not change."""
    with emulator.use(arch, **DETECTORS):
        out, count = with_count(data, page_size, softmax_scale=1.0, skip_softmax=1.0)
    data.expected(CAUSAL, scale=1.0).check(out)
    return count


@pytest.mark.parametrize(
    ("arch", "head_dim", "page_size", "rows"),
    [
        ("sm_90a", 128, None, 64),
        ("sm_90a", 512, None, 64),
        ("sm_100a", 64, None, 128),
        ("sm_100a", 128, 16, 128),
        ("sm_100a", 128, 16, 256),
    ],
)
def test_every_pair_of_rows_and_keys_counts_once(arch: str, head_dim: int, page_size: int | None, rows: int) -> None:
    tiles_with_weight = -(-rows // tile_n((head_dim, head_dim), arch))
    data = batch(arch, head_dim, rows)
    assert skipped(arch, data, page_size) == data.heads * rows // 64 * (TILES - tiles_with_weight)


@pytest.mark.parametrize(("arch", "page_size", "without"), [("sm_90a", None, 1), ("sm_100a", 16, 2)])
def test_rows_that_decide_together(arch: str, page_size: int | None, without: int) -> None:
    """A tile that one row needs is computed for its 64 rows on Hopper, and for the 128 rows of its query tile on
    Blackwell.
    """
    data = batch(arch, 128, 128)
    data.q[100, :, 1] = 8.0
    data.k[0][5, 0, 1] = 8.0
    assert skipped(arch, data, page_size) == data.heads * (2 * (TILES - 1) - without)


@pytest.mark.parametrize(
    ("dims", "dtype", "page_size", "mask", "score"),
    [
        pytest.param((64, 64), torch.bfloat16, None, window(400), reference.PLAIN, id="window"),
        pytest.param((128, 128), torch.float16, 16, chunked(512), Score(ScoreKind.SOFT_CAP, 8.0), id="chunked"),
        pytest.param((192, 128), torch.bfloat16, 16, CAUSAL, Score(ScoreKind.ALIBI), id="causal"),
        pytest.param((256, 256), torch.bfloat16, 16, CAUSAL, reference.PLAIN, id="pair"),
    ],
)
def test_what_is_left_out_on_blackwell(
    dims: tuple[int, int], dtype: torch.dtype, page_size: int | None, mask: Mask, score: Score
) -> None:
    """A query tile without rows of the request does not count. Hopper's test is in test_skip_softmax.py."""
    data = Batch([256, 128], [1000, 500], 2, 1, *dims, dtype=dtype, magnitude=1.5, device="cpu")
    with emulator.use("sm_100a", **DETECTORS):
        check_left_out(data, 200.0, page_size, mask, score)
