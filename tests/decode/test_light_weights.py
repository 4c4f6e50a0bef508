"""Decode over narrow caches with very different weights, against float64.

Kernels round weights to float16, whose range is smaller than bf16's or float32's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from helpers.batches.decode import NVFP4, DecodeBatch

from hopwell.kernels import execute
from hopwell.kernels.parts.rows.softmax import HalfSoftmax

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
UNIT = 6.0  # unit of keys and values, which all types can represent
# Relative error: half a unit in the last place of bf16 for the output, and the same for weights, as with a 16-bit
# cache.
BF16_ERROR = 2**-8

# The kernels that dequantize in registers, with each number of products side by side in a warp.
kernels = pytest.mark.parametrize(
    ("kv_dtype", "rows"),
    [(E4M3, 4), (E4M3, 12), (INT8, 12), (NVFP4, 4), (NVFP4, 12), (NVFP4, 36)],
    ids=["e4m3-4", "e4m3-12", "int8-12", "nvfp4-4", "nvfp4-12", "nvfp4-36"],
)


def check(powers: Sequence[torch.Tensor], step: float, kv_dtype: torch.dtype, rows: int, device: str) -> None:
    """Check requests whose keys weigh 2^(step * ``powers``), small integers.

    Values of the heaviest keys are zero, so the output consists of the other keys.
    """
    lengths = [len(one) for one in powers]
    data = DecodeBatch([1] * len(lengths), lengths, device=device, heads=2 * rows, head_dim=64, kv_dtype=kv_dtype)
    data.q = torch.zeros_like(data.q)
    data.q[..., 0] = 1.0
    wanted = []
    for i, one in enumerate(powers):
        light = (one < one.max()).double()
        weights = torch.exp2(step * (one - one.max()).double())
        wanted.append(UNIT * (weights * light).sum() / weights.sum())
        data.k[i] = torch.zeros_like(data.k[i])
        data.k[i][..., 0] = (UNIT * one).to(data.k[i])[:, None]
        data.v[i] = torch.zeros_like(data.v[i]) + (UNIT * light).to(data.v[i])[:, None, None]
    out = execute(data.decode(16, softmax_scale=step * math.log(2) / UNIT)).double()
    torch.testing.assert_close(out, torch.stack(wanted)[:, None, None].expand_as(out), rtol=BF16_ERROR, atol=0.0)


@kernels
@pytest.mark.parametrize("gap", [22.6, 25.9])
def test_light_keys_beside_a_heavy_one(gap: float, kv_dtype: torch.dtype, rows: int, device: str) -> None:
    """Light keys are equal, so that all of them err in the same direction."""
    last = torch.zeros(700, device=device)
    last[-1] = 1.0
    check([last, last.roll(350)], gap, kv_dtype, rows, device)


@kernels
def test_weights_as_large_as_they_can_be(kv_dtype: torch.dtype, rows: int, device: str) -> None:
    """Scores rise from step to step by the largest amount that keeps the reference, for each warp's keys."""
    key = torch.arange(700, device=device)
    check(
        [(5 - key // step).clamp(0).float() for step in (32, 128, 256)],
        HalfSoftmax.slack - 1e-5,
        kv_dtype,
        rows,
        device,
    )
