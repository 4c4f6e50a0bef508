"""Values on the device that no check sees before a launch have a defined outcome."""

from __future__ import annotations

import entry_calls
import pytest
import torch
from batches import CAUSAL, Batch
from decode_batches import DecodeBatch

from hopwell import emulator
from hopwell.kernels import execute

pytestmark = pytest.mark.emulator
NEGATIVE = (-1, -(2**31))  # as uint32 they are huge


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("length", NEGATIVE)
def test_a_request_of_prefill_with_a_negative_length_sees_nothing(arch: str, length: int) -> None:
    data = Batch([3, 5, 9], [40, 20, 33], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    with emulator.use(arch):
        want = entry_calls.context(data, (key, value), table)
        for dtype in (torch.int32, torch.uint32):
            lengths = data.ints(data.kv_lens)
            lengths[1] = length
            out = entry_calls.context(data, (key, value), table, seq_lens=lengths.view(dtype))
            assert (out[3:8] == 0).all()
            assert torch.equal(out[:3], want[:3])
            assert torch.equal(out[8:], want[8:])


@pytest.mark.parametrize("length", NEGATIVE)
def test_a_request_of_decode_with_a_negative_length_sees_nothing(length: int) -> None:
    data = DecodeBatch([1, 1], [70, 17], device="cpu")
    problem = data.decode(16)
    want = execute(problem)
    problem.kv_lens[0] = length
    out = execute(problem)
    assert (out[0] == 0).all()
    assert torch.equal(out[1], want[1])


@pytest.mark.parametrize("scale", [-0.1, -torch.inf])
def test_a_negative_scale_of_scores_gives_no_number(scale: float) -> None:
    data = Batch([3], [40], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    for arch in ("sm_90a", "sm_100a"):
        with emulator.use(arch):
            assert entry_calls.context(data, (key, value), table, bmm1_scale=torch.tensor([scale])).isnan().all()
    decode = DecodeBatch([1, 1], [70, 17], device="cpu")
    assert execute(decode.decode(16, softmax_scale=torch.tensor([scale]))).isnan().all()


def test_a_bound_of_no_queries_leaves_nothing_unwritten() -> None:
    data = Batch([3, 5], [40, 20], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    out = torch.full_like(data.q, torch.nan)
    data.expected(CAUSAL).check(entry_calls.context(data, (key, value), table, max_q_len=0, out=out))
