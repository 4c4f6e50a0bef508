"""Concurrent calls of several threads: each behaves as if it were alone.

By hand, ``--threads 16 --rounds 7`` makes more than 50 calls in each thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.calls import entries as entry_calls
from helpers.calls.mixed import bits, mixed_calls
from helpers.device.ptx import empty, run_ptx

from hopwell import emulator
from hopwell.kernels.launch import plan

pytestmark = pytest.mark.emulator

# Clusters that pass a value from one to the next: the race detector has a clock of each for every other.
RELAY = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %tid, 0; @!%p1 bra DONE;
    SPIN: ld.acquire.gpu.global.b32 %r2, [%a1]; setp.ne.u32 %p2, %r2, %r1; @%p2 bra SPIN;
    ld.global.b32 %r3, [%a0]; add.u32 %r3, %r3, %r1; st.global.b32 [%a0], %r3;
    add.u32 %r2, %r2, 1; st.release.gpu.global.b32 [%a1], %r2;
    DONE:
"""


def together(*work: Callable[[], torch.Tensor], threads: int = 4, rounds: int = 6) -> list[list[torch.Tensor]]:
    """Return results of threads that each do all the work ``rounds`` times, from different starts."""
    begin = threading.Barrier(threads)

    def thread(number: int) -> list[torch.Tensor]:
        begin.wait(60)
        places = [(number + step) % len(work) for step in range(rounds * len(work))]
        done = [(place, work[place]()) for place in places]
        return [torch.stack([result for place, result in done if place == k]) for k in range(len(work))]

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(thread, range(threads)))


def test_results_are_those_of_one_thread_to_the_bit(pytestconfig: pytest.Config) -> None:
    calls = mixed_calls("cpu")
    alone = [call() for call in calls]
    threads, rounds = (pytestconfig.getoption(name) for name in ("--threads", "--rounds"))
    for results in together(*calls, threads=threads, rounds=rounds):
        for result, want in zip(results, alone, strict=True):
            assert torch.equal(bits(result), bits(want).expand_as(bits(result)))


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
    monkeypatch.setattr(plan, "_check_device_data", lambda problem, name: None)  # let the kernel reach the bad value
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
