"""Prefill over 8-bit keys and values: bitwise equal to the same values in 16 bits, for the same order of columns.

Products of sm_120 have another order of columns beyond 128 columns.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches.fp8 import round_keys_and_values, with_fp8_cache
from helpers.batches.low_precision import check_bits_of_16_bits
from helpers.batches.prefill import Batch, starts
from helpers.cases.prefill import FP8_CACHE_CASES, FP8_CACHE_EMULATED

from hopwell.kernels import execute, support
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import Mask
from hopwell.kernels.registry import resolve
from hopwell.prefill import trtllm_batch_context_with_kv_cache

FP8 = torch.float8_e4m3fn


def batch(dims: tuple[int, int], device: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Batch:
    """Make requests around the edges of tiles, without queries, without keys, and with fewer keys than queries.

    e4m3 can represent K and V.
    """
    lengths = dict(q_lens=[130, 0, 5, 7], kv_lens=[265, 3, 0, 4]) | changes
    data = Batch(heads=4, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], device=device, dtype=dtype, **lengths)
    round_keys_and_values(data)
    return data


def check(dims: tuple[int, int], page_size: int | None, mask: Mask, device: str, dtype: torch.dtype) -> None:
    data = batch(dims, device, dtype)
    wide = data.problem(page_size, mask)
    narrow = replace(with_fp8_cache(wide), out=data.output())
    config = resolve(narrow, support.arch_of(narrow.query.device))
    assert isinstance(config, PrefillConfig)
    assert config.kv_type is KvType.E4M3
    out = execute(narrow)
    data.expected(mask).check(out)
    check_bits_of_16_bits(out, execute(wide), dims[0], KvType.E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", FP8_CACHE_CASES, ids=str)
def test_bits_are_those_of_16_bits(case: tuple, dtype: torch.dtype) -> None:
    check(*case, device="cuda", dtype=dtype)


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "case"), FP8_CACHE_EMULATED, ids=str)
def test_bits_are_those_of_16_bits_emulated(arch: str, case: tuple) -> None:
    from hopwell import emulator

    dtype = torch.float16 if case[0] == (64, 64) else torch.bfloat16
    with emulator.use(arch, race=True, proxy=True, strict=True, schedule="random", seed=3):
        check(*case, device="cpu", dtype=dtype)


@pytest.mark.parametrize("few", [False, True], ids=["plain", "packed"])
def test_context_entry(device: str, few: bool) -> None:
    """The call has every element value, sinks, and separate page strides; few queries give packed heads."""
    changes = dict(q_lens=[3, 1, 2], kv_lens=[300, 1, 70]) if few else {}
    data = batch((128, 128), device, **changes)
    values = torch.arange(256, dtype=torch.uint8, device=device).view(FP8).to(data.dtype)
    values = values[values.isfinite()]
    data.k[0].view(-1)[: values.numel()] = (values / 64).to(FP8).to(data.dtype)
    data.v[0].view(-1)[: values.numel()] = values
    key, value, table = data.pages(16)
    sinks = torch.linspace(-2.0, 2.0, data.heads, device=device)

    def call(cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return trtllm_batch_context_with_kv_cache(
            data.q,
            cache,
            torch.empty(0, dtype=torch.uint8, device=device),
            table,
            data.ints(data.kv_lens),
            max(data.q_lens),
            max(data.kv_lens),
            data.scale,
            1.0,
            data.size,
            data.ints(starts(data.q_lens)),
            data.ints(starts(data.kv_lens)),
            sinks=sinks,
        )

    narrow = (key.to(FP8), value.to(FP8))
    stacked = torch.stack([cache.view(torch.uint8) for cache in narrow], 1).view(FP8)
    out = call(narrow)
    check_bits_of_16_bits(out, call((key, value)), key.shape[-1], KvType.E4M3)
    assert torch.equal(out, call(stacked))
