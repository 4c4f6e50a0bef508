"""Calls of several threads at once: each is as if it were alone, whatever the others run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import entry_calls
import pytest
import torch
from batches import Batch
from decode_batches import DecodeBatch
from ptx_harness import empty, run_ptx

import hopwell
from hopwell import emulator
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels import plan

pytestmark = pytest.mark.emulator

THREADS, ROUNDS = 4, 6
# Clusters that hand a value on, one after the other: the race detector has a clock of each for every other.
RELAY = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %tid, 0; @!%p1 bra DONE;
    SPIN: ld.acquire.gpu.global.b32 %r2, [%a1]; setp.ne.u32 %p2, %r2, %r1; @%p2 bra SPIN;
    ld.global.b32 %r3, [%a0]; add.u32 %r3, %r3, %r1; st.global.b32 [%a0], %r3;
    add.u32 %r2, %r2, 1; st.release.gpu.global.b32 [%a1], %r2;
    DONE:
"""


def together(*work: Callable[[], torch.Tensor]) -> list[list[torch.Tensor]]:
    """Results of THREADS threads, each of which does all the work ROUNDS times, beginning at another place."""
    begin = threading.Barrier(THREADS)

    def thread(number: int) -> list[torch.Tensor]:
        begin.wait(60)
        places = [(number + step) % len(work) for step in range(ROUNDS * len(work))]
        done = [(place, work[place]()) for place in places]
        return [torch.stack([result for place, result in done if place == k]) for k in range(len(work))]

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(thread, range(THREADS)))


def prefill(data: Batch) -> Callable[[], torch.Tensor]:
    key, value, table = data.pages(16)
    return lambda: entry_calls.context(data, (key, value), table)


def decode(data: DecodeBatch) -> Callable[[], torch.Tensor]:
    problem = data.decode(16)
    size = xqa_workspace_bytes(data.heads, data.kv_heads, data.head_dim, problem.max_kv_len, device="cpu")

    def call() -> torch.Tensor:
        workspace = torch.zeros(size, dtype=torch.uint8)
        return hopwell.xqa_batch_decode_with_kv_cache(
            data.q,
            (problem.key, problem.value),
            workspace,
            problem.page_table.key,
            problem.kv_lens,
            problem.max_kv_len,
            bmm1_scale=data.scale,
            kv_layout="HND",
        )

    return call


def test_results_are_those_of_one_thread_to_the_bit():
    calls = (
        prefill(Batch([3, 40], [40, 90], heads=2, kv_heads=1, device="cpu")),
        prefill(Batch([9], [150], heads=2, kv_heads=1, device="cpu", seed=1)),
        decode(DecodeBatch([1, 1], [70, 17], device="cpu")),
    )
    alone = [call() for call in calls]
    for results in together(*calls):
        for result, want in zip(results, alone, strict=True):
            assert torch.equal(result.view(torch.int16), want.view(torch.int16).expand_as(result))


def test_a_race_detector_in_each_thread():
    def relay(count: int) -> torch.Tensor:
        total, turn = empty(1), empty(1)
        report = run_ptx(RELAY, total, turn, grid=count, race=True, resident=count)
        assert not report.hazards
        return total

    counts = (3, 5, 8)
    for results in together(*(lambda n=n: relay(n) for n in counts)):
        assert [set(one.flatten().tolist()) for one in results] == [{n * (n - 1) // 2} for n in counts]


def test_each_thread_gets_its_own_error(monkeypatch):
    monkeypatch.setattr(plan, "_check_device_data", lambda problem: None)  # let the kernel come to it
    data = Batch([3], [40], heads=2, kv_heads=1, device="cpu")
    key, value, table = data.pages(4)
    wrong = table.clone()
    wrong[0, 1] = 10**6
    alone = entry_calls.context(data, (key, value), table)

    def fails() -> torch.Tensor:
        with pytest.raises(emulator.MemoryFault, match="outside of every tensor"):
            entry_calls.context(data, (key, value), wrong)
        return alone

    for results in together(fails, lambda: entry_calls.context(data, (key, value), table)):
        assert all(torch.equal(result, alone.expand_as(result)) for result in results)
