"""Windows on both sides of a row's own key, without a causal mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import Fp8Batch
from helpers.batches.prefill import Batch, local
from helpers.calls.entries import context, fmha_v2

from hopwell.kernels import execute

# (left, right): one key, the row's own tile, edges within a tile and tiles apart, and all keys on one side.
SIDES = [(0, 1), (70, 3), (5, 130), (-1, 64), (200, 200)]


def batch(device: str = "cpu", kind: type[Batch] = Batch, **changes: Any) -> Any:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries."""
    lengths = dict(q_lens=[150, 0, 5, 7], kv_lens=[265, 3, 0, 4]) | changes
    return kind(heads=4, kv_heads=2, head_dim=64, device=device, **lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("sides", SIDES, ids=str)
@pytest.mark.parametrize("page_size", [None, 16])
def test_float64(sides: tuple[int, int], page_size: int | None) -> None:
    data, mask = batch("cuda"), local(*sides)
    data.expected(mask).check(execute(data.problem(page_size, mask)))


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("arch", "sides"), [("sm_90a", s) for s in SIDES] + [("sm_100a", SIDES[1]), ("sm_120a", SIDES[2])]
)
def test_float64_emulated(arch: str, sides: tuple[int, int]) -> None:
    """Keys that no row sees are NaN."""
    from hopwell import emulator

    data, mask = batch(), local(*sides)
    if sides == SIDES[1]:
        data.k[0][:40], data.v[0][:40] = math.nan, math.nan  # the first row is at 115 and sees 70 keys to its left
    with emulator.use(arch, race=True, strict=True):
        out = execute(data.problem(None, mask))
    if sides == SIDES[1]:
        data.k[0][:40], data.v[0][:40] = 0.0, 0.0
    data.expected(mask).check(out)


def test_entries(device: str) -> None:
    """The context entry over pages with sinks, and ragged keys with a soft cap of the FMHAv2 entry."""
    data, mask = batch(device), local(70, 3)
    key, value, table = data.pages(16)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device)
    out = context(data, (key, value), table, causal=False, window_left=70, window_right=3, sinks=sinks)
    data.expected(mask, sinks=sinks).check(out)
    key, value, _ = data.ragged()
    out = fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", mask_mode="padding", window_right=3)
    data.expected(local(-1, 3)).check(out)


def test_e4m3(device: str) -> None:
    data, mask = batch(device, Fp8Batch), local(5, 130)
    data.check_fp8(execute(data.in_fp8(16, mask, torch.bfloat16)), mask)
