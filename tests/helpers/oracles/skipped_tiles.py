"""The tiles that skip-softmax must leave out: float64 attention over tiles of keys in the kernels' order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from helpers.batches.prefill import Batch
from helpers.oracles import reference
from hopwell.kernels import execute, support
from hopwell.kernels.config.base import Traits
from hopwell.kernels.problem import Mask, Score
from hopwell.kernels.registry import prefill_type


class Rows(NamedTuple):
    """Query rows that decide together, and that visit the same tiles of keys."""

    deciding: int
    visiting: int


def rows_of(dims: tuple[int, int], arch: str) -> Rows:
    if arch == "sm_100a":
        return Rows(128, 256)
    rows = min(prefill_type(arch, Traits(dims)).tile_of(dims).m, 64)
    return Rows(rows, rows)


def arch_of(device: str) -> str:
    """Return the architecture of the kernels for tensors on ``device``."""
    return support.arch_of(torch.device(device))


def tile_n(dims: tuple[int, int], arch: str, score: Score = reference.PLAIN) -> int:
    return prefill_type(arch, Traits(dims)).tile_of(dims, score.kind, True).n


def with_count(data: Batch, page_size: int | None, **options: Any) -> tuple[torch.Tensor, int]:
    """Return the output, and the kernel's count of tiles left out."""
    count = torch.zeros(1, dtype=torch.int32, device=data.device)
    return execute(data.problem(page_size, skipped_tiles=count, **options)), int(count)


def attention_with_skips(
    data: Batch, factor: float, mask: Mask, score: Score, n_keys: int = 0
) -> tuple[torch.Tensor, int]:
    """Return the output, and the number of skipped pairs of a row group and a key tile.

    A row group has 64 rows, or fewer if fewer decide. Each row has to see a key. ``n_keys`` is the keys of a tile; 0
    selects the size of 16-bit kernels.
    """
    dims, arch = (data.head_dim, data.v_head_dim), arch_of(data.device)
    rows, n_keys = rows_of(dims, arch), n_keys or tile_n(dims, arch, score)
    outs, skipped = [], 0
    for q, k, v, seen in data.requests(mask):
        logits = reference.logits(q, k, data.scale, score).masked_fill(~seen, -math.inf)
        for first in range(0, len(q), rows.deciding):
            start = first // rows.visiting * rows.visiting
            visited = seen[start : start + rows.visiting].any(0).nonzero().flatten() // n_keys
            part = logits[:, first : first + rows.deciding]
            largest = torch.full_like(part[..., :1], -math.inf)
            for n in visited.unique().flip(0).tolist():
                tile = part[..., n * n_keys : (n + 1) * n_keys]
                tile_max = tile.amax(2, keepdim=True)
                needed = ((tile_max - largest).exp() >= factor / len(k)).any(1, keepdim=True) | (n == visited[-1])
                tile.masked_fill_(~needed, -math.inf)
                largest = torch.where(needed, torch.maximum(largest, tile_max), largest)
                skipped += int((~needed).sum()) * -(-part.shape[1] // 64)
        outs.append(reference.by_kv_head(logits.softmax(2), v.double().transpose(0, 1)).transpose(0, 1))
    return torch.cat(outs), skipped


def check_left_out(data: Batch, factor: float, page_size: int | None, mask: Mask, score: Score) -> None:
    """Check that the right tiles are left out.

    Of each 300 keys, 200 weigh little but not nothing: without them, the output is off by several percent.
    """
    for k in data.k:
        k[torch.arange(k.shape[0], device=data.device) % 300 >= 100] *= 0.02
    want, skipped = attention_with_skips(data, factor, mask, score)
    assert (skipped > 0) == (factor > 1)
    out, count = with_count(data, page_size, mask=mask, score=score, skip_softmax=factor)
    assert count == skipped
    assert (out.double() - want).norm() < 6e-3 * want.norm()
