"""Decode of head dims 192/128, where V has fewer columns than K: entries, on the GPU and in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.decode import DecodeBatch
from helpers.calls.entries import xqa
from helpers.cases.decode import draft_bits

from hopwell.kernels.problem import Mask, MaskKind
from tests.decode.test_entry import KV_LENS

FP8 = torch.float8_e4m3fn
WINDOW = Mask(MaskKind.SLIDING_WINDOW, 100)


def batch(device: str, q_len: int = 1, **options: Any) -> DecodeBatch:
    bits = [draft_bits("tree", q_len, seed) for seed in range(len(KV_LENS))]
    dims = dict(head_dim=192, v_head_dim=128)
    return DecodeBatch([q_len] * len(KV_LENS), KV_LENS, device=device, drafts=bits, **dims, **options)


def sinks_of(data: DecodeBatch) -> torch.Tensor:
    """Return sinks far below, near and far above the logits."""
    return torch.linspace(-20.0, 20.0, data.heads, device=data.device)


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["wide", "e4m3"])
def test_forms_of_the_cache(kv_dtype: torch.dtype | None, device: str) -> None:
    """Separate tensors, and views of rows that hold K and V side by side, in both layouts, give the same bits."""
    data = batch(device, kv_dtype=kv_dtype, heads=32, kv_heads=4)
    problem, options = data.decode(16, WINDOW), dict(window_left=100, sinks=sinks_of(data))
    out = xqa(data, problem, **options)
    assert out.shape == (data.tokens, data.heads, 128)
    data.expected_decode(WINDOW, sinks=options["sinks"]).check(out)
    side_by_side = torch.cat((problem.key, problem.value), -1)
    views = [part.split((192, 128), -1) for part in (side_by_side, side_by_side.transpose(1, 2).contiguous())]
    for layout, cache in zip(("HND", "NHD"), views, strict=True):
        assert torch.equal(out, xqa(data, problem, kv_cache=cache, kv_layout=layout, **options))
    assert torch.equal(out, xqa(data, problem, entry="trtllm", **options))


@pytest.mark.parametrize(
    ("heads", "kv_dtype"), [(6, None), (6, FP8), (18, FP8), (36, None), (36, FP8)], ids=lambda value: str(value)
)
def test_drafts(heads: int, kv_dtype: torch.dtype | None, device: str) -> None:
    """Every number of rows has a kernel; a given output has rows of 128 columns with gaps between them."""
    data, q_len, mask = batch(device, 4, kv_dtype=kv_dtype, heads=heads), 4, Mask(MaskKind.DRAFT, 40)
    problem, sinks = data.decode(16, mask), sinks_of(data)
    room = torch.full((data.tokens, heads, 192), 7.0, dtype=data.dtype, device=device)
    xqa(data, problem, q_len, window_left=40, sinks=sinks, out=room[..., :128])
    data.expected_decode(mask, sinks=sinks).check(room[..., :128])
    assert (room[..., 128:] == 7).all()
    out = xqa(data, problem, q_len, window_left=40, sinks=sinks)
    assert torch.equal(out, room[..., :128].unflatten(0, (data.size, q_len)))
