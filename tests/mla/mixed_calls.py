"""Calls of all entries over all kinds of caches, for threads to make at once."""

from __future__ import annotations

from collections.abc import Callable

import test_decode_nvfp4
import test_mla_bytes
import torch
from helpers import entry_calls
from helpers.batches import Batch
from helpers.decode_batches import NVFP4, DecodeBatch
from helpers.mla_batches import MlaBatch
from test_decode_entry import xqa
from test_mla_entry import mla

FP8 = torch.float8_e4m3fn
Call = Callable[[], torch.Tensor]


def prefill(data: Batch, dtype: torch.dtype) -> Call:
    key, value, table = data.pages(16)
    data.q = data.q.to(dtype)
    return lambda: entry_calls.context(data, (key.to(dtype), value.to(dtype)), table)


def decode(data: DecodeBatch) -> Call:
    problem = data.decode(16)
    return lambda: xqa(data, problem)


def nvfp4(device: str) -> Call:
    data = DecodeBatch([1, 1], [70, 17], device=device, kv_dtype=NVFP4)
    problem = data.decode(16)
    return lambda: test_decode_nvfp4.call(data, problem)


def latent(data: MlaBatch) -> Call:
    problem = data.decode(64)
    return lambda: mla(data, problem)


def rows_of_bytes(device: str) -> Call:
    data = test_mla_bytes.batch(test_mla_bytes.PackedBatch, device, heads=8, kv_lens=[70, 3])
    problem, cache = data.decode(16), data.packed(16)
    return lambda: mla(data, problem, kv_cache=cache)


def mixed_calls(device: str) -> list[Call]:
    """Each takes a workspace of its own."""
    return [
        prefill(Batch([3, 40], [40, 90], heads=2, kv_heads=1, device=device), torch.bfloat16),
        prefill(Batch([9], [150], heads=2, kv_heads=1, device=device, seed=1), torch.bfloat16),
        prefill(Batch([3, 40], [40, 90], heads=2, kv_heads=1, device=device), FP8),
        decode(DecodeBatch([1, 1], [70, 17], device=device)),
        decode(DecodeBatch([1, 1], [70, 17], device=device, kv_dtype=FP8)),
        nvfp4(device),
        latent(test_mla_bytes.batch(MlaBatch, device, heads=8, kv_lens=[70, 3])),
        rows_of_bytes(device),
    ]


def bits(result: torch.Tensor) -> torch.Tensor:
    """Return a result to compare, also where it is NaN."""
    return result.view(torch.uint8)
