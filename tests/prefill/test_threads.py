"""Threads that launch on their own streams get the same bits as a single thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.calls import entries as entry_calls

import hopwell

pytestmark = pytest.mark.gpu
THREADS, CALLS = 8, 200


def test_threads_on_streams_of_their_own() -> None:
    calls = []
    for seed in range(4):
        data = Batch([3, 130, 9], [40, 300, 250 + seed], heads=4, kv_heads=2, seed=seed)
        key, value, table = data.pages(16)
        calls.append(entry_calls.context_arguments(data, (key, value), table, window_left=seed - 1))
    entry = hopwell.trtllm_batch_context_with_kv_cache
    alone = [entry(**arguments) for arguments in calls]
    torch.cuda.synchronize()
    begin = threading.Barrier(THREADS)

    def thread(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            begin.wait(60)
            done = [(place % 4, entry(**calls[place % 4])) for place in range(number, number + CALLS)]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(out.view(torch.int16), alone[place].view(torch.int16)) for place, out in done)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(thread, range(THREADS)))
