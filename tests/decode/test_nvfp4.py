"""Decode entries over NVFP4 caches: every form of cache and scales, and changes that must not affect a bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.decode import NVFP4, DecodeBatch, nvfp4
from helpers.calls.entries import cache_forms, xqa
from helpers.cases.decode import draft_bits

from hopwell.kernels.problem import Mask, MaskKind
from tests.decode.test_entry import KV_LENS

FP8, U8 = torch.float8_e4m3fn, torch.uint8
BF16, FP16 = torch.bfloat16, torch.float16


def batch(device: str, q_len: int = 1, **options: Any) -> DecodeBatch:
    bits = [draft_bits("tree", q_len, seed) for seed in range(len(KV_LENS))]
    return DecodeBatch([q_len] * len(KV_LENS), KV_LENS, device=device, drafts=bits, kv_dtype=NVFP4, **options)


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "dtype"),
    [(128, 8, 16, BF16), (64, 1, 64, FP16), (64, 12, 16, BF16), (128, 24, 16, BF16), (64, 33, 7, FP16)],
)
def test_forms_of_the_cache(head_dim: int, group: int, page_size: int, dtype: torch.dtype, device: str) -> None:
    """Every layout of codes and scales, and every place of pages, gives the same bits."""
    data = batch(device, heads=2 * group, head_dim=head_dim, dtype=dtype)
    problem = data.decode(page_size)
    assert problem.kv_scales is not None
    k_scales, v_scales = (part.view(U8) for part in (problem.kv_scales.key, problem.kv_scales.value))
    forms = zip(cache_forms(problem.key, problem.value), cache_forms(k_scales, v_scales), strict=True)
    outs = [xqa(data, problem, kv_cache=cache, kv_cache_sf=sf, kv_layout=layout) for (cache, layout), (sf, _) in forms]
    data.expected_decode().check(outs[0])
    # Scales with strides unrelated to the codes' strides, and pages in another order.
    wide = torch.nn.functional.pad(v_scales, (0, 4), value=0x7F)[..., :-4]
    outs.append(xqa(data, problem, kv_cache_sf=(problem.kv_scales.key, wide.view(FP8))))
    outs.append(xqa(data, data.decode(page_size, order=7)))
    outs.append(xqa(data, problem, entry="trtllm"))
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize(
    ("dims", "group", "page_size"),
    [
        ((80, 80), 3, 4),
        ((80, 80), 20, 16),
        ((96, 96), 20, 64),
        ((160, 160), 3, 16),
        ((192, 192), 9, 7),
        ((192, 128), 3, 16),
    ],
    ids=str,
)
def test_rows_of_other_sizes(dims: tuple[int, int], group: int, page_size: int, device: str) -> None:
    """Lanes cannot share such rows equally in whole blocks: tiles have wider rows. NaN lies between the rows."""
    q_len, mask = 2, Mask(MaskKind.DRAFT, 200)
    data = batch(device, q_len, heads=2 * group, head_dim=dims[0], v_head_dim=dims[1])
    sinks = torch.linspace(-20.0, 20.0, data.heads, device=device)
    out = xqa(data, data.decode(page_size, mask), q_len, window_left=200, sinks=sinks)
    data.expected_decode(mask, sinks=sinks).check(out.flatten(0, 1))


@pytest.mark.parametrize("group", [2, 3, 7, 12, 20])
def test_drafts_with_a_window_and_sinks(group: int, device: str) -> None:
    """The output is e4m3; a request gives the same bits alone and in the batch."""
    q_len, mask = 4, Mask(MaskKind.DRAFT, 30)
    data = batch(device, q_len, heads=2 * group)
    sinks = torch.linspace(-1.0, 2.0, data.heads, device=device)
    out = torch.empty(data.size, q_len, data.heads, data.head_dim, dtype=FP8, device=device)
    options: dict[str, Any] = dict(window_left=30, sinks=sinks)
    assert xqa(data, data.decode(16, mask), q_len, out=out, **options) is out
    data.expected_decode(mask, sinks=sinks, out_dtype=FP8).check(out.flatten(0, 1))
    one, alone = data.request(3), torch.empty_like(out[:1])
    xqa(one, one.decode(16, mask), q_len, out=alone, **options)
    assert torch.equal(alone.view(U8), out[3:4].view(U8))


@pytest.mark.parametrize(("head_dim", "group"), [(128, 3), (128, 12), (64, 32), (96, 40), (192, 20)])
def test_bits_are_those_of_e4m3(head_dim: int, group: int, device: str) -> None:
    """The caches hold the same numbers. Scores are exact in any order of their sums; values are added in the same
    order.
    """
    data = batch(device, heads=2 * group, head_dim=head_dim)
    data.q.copy_((8 * data.q).round() / 8)
    generator = torch.Generator().manual_seed(0)
    for part in (data.k, data.v):
        for tokens in part:
            tokens.copy_(torch.randint(-4, 5, tokens.shape, generator=generator))
            tokens[..., ::16] = 6.0  # so that the block's scale is 1
    out = xqa(data, data.decode(16))
    data.expected_decode().check(out)
    data.kv_dtype = FP8
    assert torch.equal(out, xqa(data, data.decode(16)))


@pytest.mark.parametrize("scale", [2.0**-9, 448.0], ids=["least", "largest"])
def test_scales_at_their_ends(scale: float, device: str) -> None:
    """Every code times the smallest and the largest scale is as exact as any other."""
    data = batch(device, heads=6)
    codes, generator = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]), torch.Generator().manual_seed(0)
    for tokens in data.v:
        drawn = codes[torch.randint(0, 8, tokens.shape, generator=generator)]
        drawn[..., ::16] = 6.0
        tokens.copy_(scale * drawn)
        assert (nvfp4(tokens).scales.float() == scale).all()
    data.expected_decode().check(xqa(data, data.decode(16)))
