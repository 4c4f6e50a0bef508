"""64-bit lengths, offsets and page ids, and bfloat16 sinks: the same bits as with 32-bit ones and float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.prefill import Batch, starts
from helpers.calls.entries import context, cudnn, fmha_v2

BF16 = torch.bfloat16


def batch(device: str) -> Batch:
    return Batch([3, 0, 20, 1], [70, 5, 20, 0], device=device)


def sinks(data: Batch) -> torch.Tensor:
    return torch.randn(data.heads, generator=torch.Generator().manual_seed(1)).to(BF16).to(data.device)


def wide(arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return indices with 64 bits."""
    return {name: value.long() for name, value in arguments.items()}


@pytest.mark.parametrize("page_size", [2, 16], ids=["rows", "boxes"])
def test_context(page_size: int, device: str) -> None:
    data = batch(device)
    key, value, table = data.pages(page_size)
    more = dict(seq_lens=data.ints(data.kv_lens), cum_seq_lens_q=data.ints(starts(data.q_lens)))
    narrow = context(data, (key, value), table, sinks=sinks(data).float(), **more)
    data.expected(sinks=sinks(data).float()).check(narrow)
    assert torch.equal(narrow, context(data, (key, value), table.long(), sinks=sinks(data), **wide(more)))
    # Each kind of index has a width of its own.
    assert torch.equal(narrow, context(data, (key, value), table.long(), sinks=sinks(data), **more))


def test_element_offsets_of_ragged_keys(device: str) -> None:
    data = batch(device)
    key, value, begins = data.ragged(gap=2)
    lengths: dict[str, Any] = dict(actual_seq_lens_q=data.ints(data.q_lens), actual_seq_lens_kv=data.ints(data.kv_lens))
    row = data.heads * data.head_dim
    kv_row = key[0].numel()
    offsets = dict(
        batch_offsets_q=data.ints([n * row for n in starts(data.q_lens)]),
        batch_offsets_o=data.ints([n * row for n in starts(data.q_lens)]),
        batch_offsets_k=data.ints([n * kv_row for n in begins]),
        batch_offsets_v=data.ints([n * kv_row for n in begins]),
    )
    narrow = cudnn(data, key, value, **lengths, **offsets)
    assert torch.equal(narrow[0], cudnn(data, key, value, **wide(lengths | offsets))[0])


def test_lengths_from_offsets(device: str) -> None:
    data = batch(device)
    key, value, _ = data.ragged()
    more = dict(cum_seq_lens_q=data.ints(starts(data.q_lens)), cum_seq_lens_kv=data.ints(starts(data.kv_lens)))
    qkv = (data.q, key, value)
    narrow = fmha_v2(data, qkv, "SEPARATE_Q_K_V", sinks=[sinks(data).float()], **more)
    assert torch.equal(narrow, fmha_v2(data, qkv, "SEPARATE_Q_K_V", sinks=[sinks(data)], **wide(more)))
