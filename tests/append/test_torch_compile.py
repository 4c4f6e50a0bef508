"""A decode step with append in one graph: results, and caches that are written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import hopwell

pytestmark = pytest.mark.emulator
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


def step(
    hidden: torch.Tensor,
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    scale: torch.Tensor,
) -> torch.Tensor:
    query, key, value = hidden.unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    hopwell.append_paged_kv_cache(key, value, batch_indices, positions, cache, block_tables=block_tables)
    workspace = torch.empty(0, dtype=torch.uint8)
    return hopwell.xqa_batch_decode_with_kv_cache(query, cache, workspace, block_tables, seq_lens, 32, scale)


def inputs(stacked: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(6, 2, PAGE, KV_HEADS, DIM, generator=generator).bfloat16()
    return dict(
        hidden=torch.randn(2, (HEADS + 2 * KV_HEADS) * DIM, generator=generator).bfloat16(),
        cache=cache if stacked else (cache[:, 0], cache[:, 1]),
        block_tables=torch.tensor([[5, 2], [3, 1]], dtype=torch.int32),
        seq_lens=torch.tensor([20, 7], dtype=torch.int32),
        batch_indices=torch.arange(2, dtype=torch.int32),
        positions=torch.tensor([19, 6], dtype=torch.int32),
        scale=torch.tensor([0.125]),
    )


def storage(cache: Any) -> torch.Tensor:
    return torch.stack(cache, 1) if isinstance(cache, tuple) else cache


@pytest.mark.parametrize("stacked", [True, False])
def test_a_decode_step_is_a_graph_without_copies_of_the_cache(stacked: bool) -> None:
    arguments = inputs(stacked)
    want, written = step(**arguments), storage(arguments["cache"])
    assert not torch.equal(written, storage(inputs(stacked)["cache"]))
    for keywords in (dict(backend="eager"), dict(backend="aot_eager"), {}, dict(mode="reduce-overhead")):
        torch._dynamo.reset()
        arguments = inputs(stacked)
        compiled = torch.compile(step, fullgraph=True, **keywords)
        got, code = run_and_get_code(compiled, **arguments)
        assert torch.equal(got, want)
        assert torch.equal(storage(arguments["cache"]), written)
        assert bool(code) == ("backend" not in keywords)
        for text in code:
            assert "torch.ops.hopwell.append_paged_kv_cache" in text
            assert not [line for line in text.splitlines() if "clone" in line or "copy_" in line]
