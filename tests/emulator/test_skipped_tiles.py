"""The count of tiles that skip-softmax leaves out."""

from __future__ import annotations

import pytest
import torch
from batches import CAUSAL, Batch

from hopwell.kernels import execute
from hopwell.kernels.config import TILES

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("head_dim", [128, 512])
def test_every_pair_of_rows_and_keys_counts_once(head_dim):
    """Zero keys in all but the last tile of each row: next to a logit of 64 they weigh nothing."""
    n = TILES[head_dim, head_dim].n
    data = Batch([64], [4 * n], heads=2, kv_heads=1, head_dim=head_dim, device="cpu")
    data.q.zero_()
    data.q[..., 0] = 8.0
    data.k[0].zero_()
    data.k[0][-64:, 0, 0] = 8.0
    count = torch.zeros(1, dtype=torch.int32)
    out = execute(data.problem(None, softmax_scale=1.0, skip_softmax=1.0, skipped_tiles=count))
    data.expected(CAUSAL, scale=1.0).check(out)
    tiles_with_weight = -(-64 // n)
    assert int(count) == 2 * (4 - tiles_with_weight)
