"""``torch.compile`` leaves calls alone: one break in the graph, and the same result as without it."""

from __future__ import annotations

import pytest
import torch
from helpers import entry_calls
from helpers.batches import Batch

import hopwell

pytestmark = pytest.mark.emulator


def test_a_call_is_one_graph_break() -> None:
    data = Batch([3], [40], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    arguments = entry_calls.context_arguments(data, (key, value), table)

    def doubled(one: torch.Tensor) -> torch.Tensor:
        return hopwell.trtllm_batch_context_with_kv_cache(**arguments) * 2 + one

    want = doubled(torch.ones(()))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # other tests of this process compile as well
    assert torch.equal(torch.compile(doubled, backend="eager")(torch.ones(())), want)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert sum(breaks.values()) == 1
