"""A call of the context entry is one op in a graph, with the same result as without ``torch.compile``."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.calls import entries as entry_calls

import hopwell

pytestmark = pytest.mark.emulator


def test_a_call_is_one_op_of_a_full_graph() -> None:
    data = Batch([3], [40], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    arguments = entry_calls.context_arguments(data, (key, value), table)

    def doubled(one: torch.Tensor) -> torch.Tensor:
        return hopwell.trtllm_batch_context_with_kv_cache(**arguments) * 2 + one

    want = doubled(torch.ones(()))
    torch._dynamo.reset()
    got = torch.compile(doubled, backend="aot_eager", fullgraph=True)(torch.ones(()))
    assert torch.equal(got, want)
