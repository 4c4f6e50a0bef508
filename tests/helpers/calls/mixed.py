"""Calls of all entries over all kinds of caches, for concurrent threads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from helpers.batches.decode import NVFP4, DecodeBatch
from helpers.batches.mla import MlaBatch, PackedBatch
from helpers.batches.prefill import Batch
from helpers.calls.entries import context, mla, xqa

FP8 = torch.float8_e4m3fn
Call = Callable[[], torch.Tensor]


def prefill(data: Batch, dtype: torch.dtype) -> Call:
    key, value, table = data.pages(16)
    data.q = data.q.to(dtype)
    return lambda: context(data, (key.to(dtype), value.to(dtype)), table)


def decode(data: DecodeBatch) -> Call:
    problem = data.decode(16)
    return lambda: xqa(data, problem)


def latent(data: MlaBatch) -> Call:
    problem = data.decode(64)
    return lambda: mla(data, problem)


def fp8_ds_mla_rows(device: str) -> Call:
    data = PackedBatch([1, 1], [70, 3], heads=8, device=device)
    problem, cache = data.decode(16), data.packed(16)
    return lambda: mla(data, problem, kv_cache=cache)


def mixed_calls(device: str) -> list[Call]:
    """Return calls that each take a workspace of their own."""
    return [
        prefill(Batch([3, 40], [40, 90], heads=2, kv_heads=1, device=device), torch.bfloat16),
        prefill(Batch([9], [150], heads=2, kv_heads=1, device=device, seed=1), torch.bfloat16),
        prefill(Batch([3, 40], [40, 90], heads=2, kv_heads=1, device=device), FP8),
        decode(DecodeBatch([1, 1], [70, 17], device=device)),
        decode(DecodeBatch([1, 1], [70, 17], device=device, kv_dtype=FP8)),
        decode(DecodeBatch([1, 1], [70, 17], device=device, kv_dtype=NVFP4)),
        latent(MlaBatch([1, 1], [70, 3], heads=8, device=device)),
        fp8_ds_mla_rows(device),
    ]


def bits(result: torch.Tensor) -> torch.Tensor:
    """Return a result in a form that compares NaN as equal."""
    return result.view(torch.uint8)
