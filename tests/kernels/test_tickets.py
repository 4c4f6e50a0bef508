"""Work counters: each launch that needs one gets a set of its own. Real streams and captures are tested in
tests/prefill.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hopwell.kernels.config.splitting import TICKETS, LaunchSizes, counter_ints
from hopwell.kernels.launch import tickets as module
from hopwell.kernels.launch.tickets import SLAB_BYTES, SLAB_SETS, Tickets, tickets

CPU = torch.device("cpu")
INTS = 7


@pytest.fixture
def hurried() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(count: int, work: list[Tickets]) -> dict[int, list[int]]:
    """Return the addresses that ``count`` concurrent threads get; ``work`` gives each call's object."""
    together, got = threading.Barrier(count), {}

    def ask(number: int) -> None:
        together.wait()
        got[number] = [one.address() for one in work for _ in range(3)]
        together.wait()  # a finished thread would pass its identity to another

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == count
    return got


def test_page_tables_of_all_lengths_share_few_sets() -> None:
    """Each number of counters has a slab of memory, and engines give tables of another length in many steps."""
    needed = [counter_ints(LaunchSizes(128, 8, 128, 512 * chunks, 132).slots) for chunks in range(1, 257)]
    assert len(set(needed)) > 200
    sets = {number: tickets(CPU, number) for number in needed}
    assert len(set(sets.values())) <= 20
    assert all(4 * number <= found.bytes <= 4.5 * number for number, found in sets.items())


@pytest.mark.parametrize("ints", [TICKETS, INTS, 10**5, 10**7])
def test_a_set_is_zero_integers(ints: int) -> None:
    store = Tickets(CPU, ints)
    address = store.address()
    assert store.bytes == 4 * ints
    assert not any((ctypes.c_int32 * ints).from_address(address))
    assert sum(slab.numel() for slab in store._slabs) * 4 <= max(SLAB_BYTES, 4 * ints), "large sets come one by one"


def test_calls_of_a_thread_share_a_set() -> None:
    store = Tickets(CPU, INTS)
    assert len({store.address() for _ in range(10)}) == 1


def test_each_store_has_sets_of_its_own() -> None:
    first, second = Tickets(CPU, INTS), Tickets(CPU, INTS)
    assert first.address() != second.address()


@pytest.mark.usefixtures("hurried")
def test_threads_do_not_share_sets() -> None:
    for _ in range(20):
        store = Tickets(CPU, INTS)
        got = in_threads(16, [store])
        assert all(len(set(addresses)) == 1 for addresses in got.values())
        sets = sorted({addresses[0] for addresses in got.values()})
        assert len(sets) == 16
        assert all(b - a >= 4 * INTS for a, b in itertools.pairwise(sets))


@pytest.mark.usefixtures("hurried")
def test_sets_are_not_lost_to_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread takes one, and memory grows once for all of them."""
    monkeypatch.setattr(module, "SLAB_SETS", 16)
    for _ in range(20):
        store = Tickets(CPU, INTS)
        in_threads(16, [store])
        assert (len(store._free), len(store._slabs)) == (0, 1)


def test_memory_grows_when_it_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLAB_SETS", 4)
    store = Tickets(CPU, INTS)
    got = in_threads(10, [store])
    sets = {addresses[0] for addresses in got.values()}
    assert len(sets) == 10
    inside = {slab.data_ptr() + i * 4 * INTS for slab in store._slabs for i in range(4)}
    assert sets <= inside
    assert all(not any((ctypes.c_int32 * INTS).from_address(one)) for one in sets)


def test_reserve_keeps_half_a_slab_in_store() -> None:
    """A capture takes its sets from the store, because it cannot make zeroed memory itself."""
    store = Tickets(CPU, INTS)
    store.reserve()
    assert len(store._free) == SLAB_SETS
    store.reserve()
    assert len(store._slabs) == 1, "enough is there"
    taken = [store._free.pop() for _ in range(SLAB_SETS // 2 - 1)]
    store.reserve()
    assert len(store._slabs) == 1, "half is enough"
    taken.append(store._free.pop())
    store.reserve()
    assert len(store._free) > SLAB_SETS // 2
    assert len(store._slabs) == 2
    assert not set(taken) & set(store._free)
    assert len(set(store._free)) == len(store._free)


def test_slabs_are_allocated_in_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may use a graph's memory for the caller's thread. The caller may be in inference mode."""
    threads: list[int] = []
    zeros = torch.zeros

    def recorded(*args: Any, **keywords: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        return zeros(*args, **keywords)

    monkeypatch.setattr(torch, "zeros", recorded)
    store = Tickets(CPU, INTS)
    with torch.inference_mode():
        store.address()
    (thread,) = threads
    assert thread != threading.get_ident()
    assert not any(slab.is_inference() for slab in store._slabs)


@pytest.mark.usefixtures("hurried")
def test_one_store_for_each_device_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_sets", {})
    together, got = threading.Barrier(8), []

    def ask() -> None:
        together.wait()
        got.append((tickets(torch.device("cpu")), tickets(torch.device("cpu"), INTS)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == 8
    assert all(pair == (tickets(CPU), tickets(CPU, INTS)) for pair in got)
    assert [one.bytes for one in got[0]] == [4 * TICKETS, 4 * INTS]


class FakeStreams:
    """Stand-in for CUDA: the current stream's handle, and whether it is being captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.capturing, self.asked = 0, False, 0
        self.store = Tickets(CPU, INTS)
        self.store.reserve()
        self.store._has_streams, self.store._index = True, 0
        monkeypatch.setattr(module, "current_stream", lambda index: self.current)
        monkeypatch.setattr(module, "is_capturing", self.is_capturing)

    def is_capturing(self) -> bool:
        self.asked += 1
        return self.capturing

    def address(self, stream: int) -> int:
        self.current = stream
        return self.store.address()


def test_each_stream_has_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams(monkeypatch)
    first = [streams.address(handle) for handle in (0, 7, 2, 9)]
    assert len(set(first)) == 4
    assert [streams.address(handle) for handle in (0, 7, 2, 9)] == first
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.extend(streams.address(handle) for handle in (0, 2)))
    thread.start()
    thread.join()
    assert elsewhere[0] == first[0]
    assert elsewhere[1] not in first, "the stream of each thread is a stream of its own"


def test_each_captured_launch_has_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams(monkeypatch)
    eager = streams.address(7)
    streams.capturing = True
    captured = [streams.address(7) for _ in range(3)]
    streams.capturing = False
    assert len({eager, *captured}) == 4
    assert streams.address(7) == eager


def test_the_legacy_stream_is_not_asked_whether_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA refuses to capture this stream, and the query takes time."""
    streams = FakeStreams(monkeypatch)
    streams.address(module.LEGACY_STREAM)
    assert streams.asked == 0
