"""Values on the device have a defined outcome even without a check before the launch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches.decode import DecodeBatch
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import CAUSAL, Batch
from helpers.calls import entries as entry_calls

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.launch import plan
from hopwell.kernels.problem import PageTable, TokenOffsets

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


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the device check before launches, as on a GPU: a kernel's access outside the operands is a fault."""
    monkeypatch.setattr(plan, "_check_device_data", lambda problem, name: None)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.usefixtures("unchecked")
def test_requests_of_prefill_end_with_the_table(arch: str) -> None:
    """Longer requests have the keys that the table has room for; no entry after the end of a row is read."""
    data = Batch([3, 9, 5], [48, 33, 48], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    table = table[:, :3].contiguous()
    with emulator.use(arch):
        want = entry_calls.context(data, (key, value), table)
        for length in (49, 2**31 - 1):
            lengths = data.ints([length, 33, length])
            assert torch.equal(entry_calls.context(data, (key, value), table, seq_lens=lengths), want)


@pytest.mark.parametrize("heads", [4, 128], ids=["few-rows", "rows"])
@pytest.mark.parametrize("kind", [DecodeBatch, MlaBatch])
@pytest.mark.usefixtures("unchecked")
def test_requests_of_decode_end_with_the_table(kind: type[DecodeBatch], heads: int) -> None:
    """Requests of prefill end with the table too. The table also bounds the scratch."""
    data = kind([1] * 3, [48, 33, 48], heads=heads, kv_heads=1, device="cpu")
    problem = data.decode(16)
    table = problem.page_table.key[:, :3].contiguous()
    problem = replace(problem, page_table=PageTable(table, table), max_kv_len=48)
    want = execute(problem).clone()
    for length in (49, 2**31 - 1):
        problem.kv_lens[0] = problem.kv_lens[2] = length
        assert torch.equal(execute(problem), want)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.usefixtures("unchecked")
def test_requests_of_prefill_end_with_the_queries(arch: str) -> None:
    """No write goes past the output, for any offsets."""
    data = Batch([3, 9, 5], [48, 33, 48], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    with emulator.use(arch):
        want = entry_calls.context(data, (key, value), table, max_q_len=1, max_kv_len=1)
        data.expected(CAUSAL).check(want)
        for end in (18, 2**31 - 1):
            places = data.ints([0, 3, 12, end])
            assert torch.equal(entry_calls.context(data, (key, value), table, cum_seq_lens_q=places), want)


@pytest.mark.parametrize("heads", [4, 40], ids=["few-rows", "rows"])
@pytest.mark.parametrize("kind", [DecodeBatch, MlaBatch])
@pytest.mark.usefixtures("unchecked")
def test_requests_of_decode_end_with_their_bound(kind: type[DecodeBatch], heads: int) -> None:
    """A request with more new tokens than the bound, or than queries, counts as having the smaller number."""
    data = kind([1, 1, 1], [700, 33, 600], heads=heads, kv_heads=1, device="cpu")
    problem = data.decode(16, ragged=True)
    want = execute(problem).clone()
    for start, end in ((2, 10), (2, 2**31 - 1)):
        places = data.ints([0, 1, start, end])
        assert torch.equal(execute(replace(problem, q_offsets=TokenOffsets(places))), want)
    # Requests have three tokens, and only the first ones are written.
    query, out = (torch.full((9, *rows.shape[1:]), 7.0, dtype=data.dtype) for rows in (problem.query, want))
    query[::3] = problem.query
    longer = replace(problem, query=query, out=out, q_offsets=TokenOffsets(data.ints([0, 3, 6, 9])))
    assert torch.equal(execute(longer)[::3], want)
    assert (out.view(3, 3, heads, -1)[:, 1:] == 7).all()


@pytest.mark.parametrize("scale", [-0.1, -torch.inf, torch.nan])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_a_negative_scale_of_scores_and_nan_give_no_number(arch: str, scale: float) -> None:
    data = Batch([3], [40], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    decode = DecodeBatch([1, 1], [70, 17], heads=2, kv_heads=1, device="cpu")
    wide = MlaBatch([1, 1], [70, 17], heads=80, device="cpu")
    scales = torch.tensor([scale])
    with emulator.use(arch):
        assert entry_calls.context(data, (key, value), table, bmm1_scale=scales).isnan().all()
        for batch in (decode, wide):
            assert execute(batch.decode(16, softmax_scale=scales)).isnan().all()


def test_a_bound_of_no_queries_leaves_nothing_unwritten() -> None:
    data = Batch([3, 5], [40, 20], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(16)
    out = torch.full_like(data.q, torch.nan)
    data.expected(CAUSAL).check(entry_calls.context(data, (key, value), table, max_q_len=0, out=out))
