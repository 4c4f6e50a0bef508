"""Threads that call all entries on their own streams get the same bits as a single thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.calls.mixed import bits, mixed_calls

pytestmark = pytest.mark.gpu
THREADS, CALLS = 8, 200


def test_entries_over_all_kinds_of_caches() -> None:
    calls = mixed_calls("cuda")
    alone = [bits(call()) for call in calls]
    torch.cuda.synchronize()
    begin = threading.Barrier(THREADS)

    def thread(number: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            begin.wait(60)
            places = [place % len(calls) for place in range(number, number + CALLS)]
            done = [(place, bits(calls[place]())) for place in places]
            torch.cuda.current_stream().synchronize()
            return all(torch.equal(out, alone[place]) for place, out in done)

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(thread, range(THREADS)))
