"""Decode with scales of each KV head of a cache, on the GPU and in the emulator, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.decode import NVFP4, DecodeBatch
from helpers.calls.entries import xqa
from helpers.cases.decode import draft_bits

from hopwell.kernels.problem import Mask, MaskKind
from tests.decode.test_entry import KV_LENS

FP8 = torch.float8_e4m3fn
KV_HEADS = 3
# Logits from nearly equal to far apart, and outputs of both signs and of very different sizes.
K_SCALES, V_SCALES = (0.03, 1.0, 11.0), (-3.0, 0.001, 190.0)
MASK = Mask(MaskKind.DRAFT, 200)


def batch(device: str, rows: int, **options: Any) -> DecodeBatch:
    """Return a batch with two new tokens of each request and this number of rows."""
    bits = [draft_bits("tree", 2, seed) for seed in range(len(KV_LENS))]
    sizes = dict(heads=rows // 2 * KV_HEADS, kv_heads=KV_HEADS)
    return DecodeBatch([2] * len(KV_LENS), KV_LENS, device=device, drafts=bits, **sizes, **options)


def of_heads(data: DecodeBatch, scales: tuple[float, ...]) -> torch.Tensor:
    """Return the scale of each query head as [heads, 1]."""
    group = data.heads // KV_HEADS
    return torch.tensor(scales, device=data.device).double().repeat_interleave(group)[:, None]


def check(out: torch.Tensor, data: DecodeBatch, sinks: torch.Tensor, k_scales: Any, v_scales: Any) -> None:
    """Check each head relative to its own output scale."""
    scaled = replace(data)
    scaled.q, scaled.k, scaled.v = data.q.double() * of_heads(data, k_scales), data.k, data.v
    found = (out.double() / of_heads(data, v_scales)).to(data.dtype)
    scaled.expected_decode(MASK, sinks=sinks, out_dtype=data.dtype).check(found)


def run(data: DecodeBatch, sinks: torch.Tensor, **scales: Any) -> torch.Tensor:
    options: dict[str, Any] = dict(window_left=200, sinks=sinks)
    return xqa(data, data.decode(16, MASK), 2, **options, **scales).flatten(0, 1)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "rows", "head_dim"),
    [
        (FP8, torch.bfloat16, 4, 128),
        (FP8, torch.float16, 8, 64),
        (FP8, torch.bfloat16, 20, 128),
        (FP8, torch.bfloat16, 40, 128),
        (torch.int8, torch.float16, 20, 80),
        (NVFP4, torch.bfloat16, 4, 128),
        (NVFP4, torch.float16, 12, 64),
        (FP8, torch.bfloat16, 16, 128),
        (FP8, torch.bfloat16, 4, 512),
        (NVFP4, torch.bfloat16, 32, 128),
        (NVFP4, torch.bfloat16, 64, 128),
        (NVFP4, torch.float16, 40, 64),
    ],
    ids=str,
)
def test_scales_of_each_head(kv_dtype: torch.dtype, dtype: torch.dtype, rows: int, head_dim: int, device: str) -> None:
    data = batch(device, rows, kv_dtype=kv_dtype, dtype=dtype, head_dim=head_dim)
    sinks = torch.linspace(-20.0, 20.0, data.heads, device=device)
    k_scales, v_scales = (torch.tensor(scales, device=device) for scales in (K_SCALES, V_SCALES))
    out = run(data, sinks, bmm1_scale=k_scales * data.scale, bmm2_scale=v_scales)
    check(out, data, sinks, K_SCALES, V_SCALES)


@pytest.mark.parametrize("rows", [4, 40])
def test_scales_of_each_head_beside_others(rows: int, device: str) -> None:
    """Only one of both scales differs between heads; the other one is a float or a tensor."""
    data = batch(device, rows, kv_dtype=FP8)
    sinks, one = torch.linspace(-20.0, 20.0, data.heads, device=device), torch.ones(1, device=device)
    scales = torch.tensor(K_SCALES, device=device)
    out = run(data, sinks, bmm1_scale=scales * data.scale, bmm2_scale=2.0, o_scale=one)
    check(out, data, sinks, K_SCALES, (2.0,) * KV_HEADS)
    assert torch.equal(out, run(data, sinks, bmm1_scale=scales * data.scale, bmm2_scale=2 * one))
    out = run(data, sinks, bmm1_scale=data.scale, bmm2_scale=scales)
    check(out, data, sinks, (1.0,) * KV_HEADS, K_SCALES)
    plain = run(data, sinks, bmm1_scale=data.scale)
    assert torch.equal(plain, run(data, sinks, bmm1_scale=data.scale, bmm2_scale=one.expand(KV_HEADS).contiguous()))


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("scale", [-0.1, math.nan])
def test_a_negative_scale_and_nan_give_nan_in_their_head(scale: float, rows: int, device: str) -> None:
    data = batch(device, rows, kv_dtype=FP8)
    sinks = torch.zeros(data.heads, device=device)
    scales = torch.tensor((0.1, scale, 0.1), device=device)
    found = run(data, sinks, bmm1_scale=scales).isnan().unflatten(1, (KV_HEADS, -1))
    assert found[:, 1].all()
    assert not found[:, ::2].any()
