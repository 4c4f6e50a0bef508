"""Private scratch: launches that share it, and memory that is never freed once a graph has its address."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from hopwell.kernels.launch import scratch
from hopwell.kernels.launch.tickets import LEGACY_STREAM


class Streams:
    """The current stream of a device, which is set by hand; its memory is the CPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.capturing = 7, False
        empty = torch.empty
        monkeypatch.setattr(scratch, "current_stream", lambda index: self.current)
        monkeypatch.setattr(scratch, "is_capturing", self._is_capturing)
        monkeypatch.setattr(torch, "empty", lambda *sizes, device, **more: empty(*sizes, **more))

    def _is_capturing(self) -> bool:
        assert self.current != LEGACY_STREAM, "CUDA refuses to be asked about it"
        return self.capturing


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    return Streams(monkeypatch)


@pytest.fixture
def memory() -> Any:
    return scratch.OwnScratch(torch.device("cuda", 0))


def address(memory: scratch.OwnScratch, size: int) -> int:
    """Return the memory that a launch finds: first calls ask for the tensor, repeated calls for the address."""
    first = memory.tensor(size, "workspace_bytes").data_ptr()
    assert memory.address(size) == first
    return first


def test_streams_have_memory_of_their_own(streams: Streams, memory: Any) -> None:
    found = {}
    for streams.current in (LEGACY_STREAM, 7, 8):
        found[streams.current] = address(memory, 100)
        assert address(memory, 50) == found[streams.current]
    assert len(set(found.values())) == 3


def test_captured_launches_have_other_memory_than_eager_ones(streams: Streams, memory: Any) -> None:
    """A graph may be replayed on any stream, beside eager launches on the capture stream."""
    eager = address(memory, 100)
    streams.capturing = True
    captured = address(memory, 100)
    assert captured != eager
    assert address(memory, 100) == captured
    streams.capturing = False
    assert address(memory, 100) == eager


def test_what_a_graph_was_captured_with_outlives_larger_launches(streams: Streams, memory: Any) -> None:
    streams.capturing = True
    captured = weakref.ref(memory.tensor(100, "workspace_bytes"))
    assert memory.tensor(1000, "workspace_bytes").numel() >= 1000
    assert captured() is not None


def test_one_line_for_each_allocation(streams: Streams, memory: Any, caplog: pytest.LogCaptureFixture) -> None:
    for size in (100, 100, 50, 200, 200):
        address(memory, size)
    assert [record.args[0] for record in caplog.records] == ["100", "200"]


def test_longer_page_tables_allocate_few_times(streams: Streams, memory: Any) -> None:
    """The size grows with the table of each step, and memory of smaller sizes stays."""
    sizes = range(1000, 100_000, 100)
    for size in sizes:
        assert memory.tensor(size, "workspace_bytes").numel() >= size
    assert sum(kept.numel() for kept in memory._kept) < 4 * max(sizes)
