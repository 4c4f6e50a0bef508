"""The functions of ``hopwell.flash_attn``, and ``pack_mask``, in full graphs of ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hopwell.decode import pack_mask
from hopwell.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, KV_HEADS, DIM = 4, 2, 64


def compiled(function: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.emulator
def test_dense_and_ragged() -> None:
    q, kv = random(2, 8, HEADS, DIM), random(2, 8, KV_HEADS, DIM)
    starts = torch.tensor([0, 8, 16], dtype=torch.int32)

    def dense(q: torch.Tensor, kv: torch.Tensor) -> Any:
        return flash_attn_func(q, kv, kv, causal=True)

    def ragged(q: torch.Tensor, kv: torch.Tensor, starts: torch.Tensor) -> Any:
        return flash_attn_varlen_func(q, kv, kv, starts, starts, 8, 8, causal=True)

    tokens = q.flatten(0, 1), kv.flatten(0, 1), starts
    assert torch.equal(compiled(dense)(q, kv), dense(q, kv))
    assert torch.equal(compiled(ragged)(*tokens), ragged(*tokens))


@pytest.mark.emulator
def test_new_tokens_are_written_into_the_cache() -> None:
    """Few rows take the decode entry, whose op allocates its workspace."""
    q, new, lens = random(2, 1, HEADS, DIM), random(2, 1, KV_HEADS, DIM), torch.tensor([5, 40], dtype=torch.int32)

    def step(q: torch.Tensor, cache: torch.Tensor, new: torch.Tensor, lens: torch.Tensor) -> Any:
        return flash_attn_with_kvcache(q, cache[0], cache[1], new, new, cache_seqlens=lens, causal=True)

    caches = [random(2, 2, 64, KV_HEADS, DIM) for _ in range(2)]
    outs = [run(q, cache, new, lens) for run, cache in zip((step, compiled(step)), caches, strict=True)]
    assert torch.equal(*outs)
    assert torch.equal(*caches)
    assert torch.equal(caches[1][1, 1, 40], new[1, 0])


@pytest.mark.parametrize(
    "argument", [dict(mask=torch.ones(2, 3, 3).bool().tril()), dict(parents=torch.tensor([-1, 0]))]
)
def test_masks_of_drafts(argument: dict[str, torch.Tensor]) -> None:
    (name, value) = next(iter(argument.items()))
    assert torch.equal(compiled(lambda one: pack_mask(**{name: one}))(value), pack_mask(**argument))
