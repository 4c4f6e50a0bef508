"""Counters that persistent kernels take work from.

A launch needs some int32 that are zero when it starts, two for prefill; the kernel leaves them zero. Launches that may
run at the same time must not share a set, and a set must outlive a CUDA graph that has its address, so sets live in
memory of our own: one for each stream, and a fresh one for each captured launch, since a graph may be replayed on any
stream.
"""

from __future__ import annotations

import threading

import torch

from hopwell.kernels.config.splitting import TICKETS

SLAB_SETS = 4096  # sets made at a time, as long as they fit into SLAB_BYTES
SLAB_BYTES = 4 << 20
LEGACY_STREAM = 0  # torch's default; CUDA refuses to capture it
PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, but a stream of its own in each thread


class Tickets:
    """The sets of ``ints`` counters of one device."""

    def __init__(self, device: torch.device, ints: int):
        self.bytes = 4 * ints
        self._device = device
        self._has_streams, self._index = device.type == "cuda", device.index
        self._at_once = max(min(SLAB_SETS, SLAB_BYTES // self.bytes), 1)
        self._slabs: list[torch.Tensor] = []
        self._free: list[int] = []
        self._of_stream: dict[int, int] = {}
        self._of_thread = threading.local()
        self._captured: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def address(self) -> int:
        """Return the address of a set for a launch on the current stream."""
        if not self._has_streams:
            return self._for_thread()
        stream = current_stream(self._index)
        if stream != LEGACY_STREAM and is_capturing():
            return self._for_capture()
        found = self._of_stream.get(stream)
        return self._for_stream(stream) if found is None else found

    def reserve(self) -> None:
        """Keep enough sets in store for the captures that may follow. Called once for each plan."""
        if self._has_streams and is_capturing():
            return
        with self._lock:
            if len(self._free) < self._at_once // 2 + 1:
                self._grow()

    def _for_stream(self, stream: int) -> int:
        if stream == PER_THREAD_STREAM:
            return self._for_thread()
        with self._lock:
            if stream not in self._of_stream:
                self._of_stream[stream] = self._take()
            return self._of_stream[stream]

    def _for_thread(self) -> int:
        # A thread's number is no key: a new thread may have that of a dead one whose launch is still running.
        found = getattr(self._of_thread, "counters", None)
        if found is None:
            with self._lock:
                found = self._of_thread.counters = self._take()
        return found

    def _take(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _for_capture(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop()
            # No set is left and none can be zeroed now: let the graph zero one before each replay.
            fresh = torch.zeros(self.bytes // 4, dtype=torch.int32, device=self._device)
            self._captured.append(fresh)
            return fresh.data_ptr()

    def _grow(self) -> None:
        slab = torch.zeros(self._at_once * self.bytes // 4, dtype=torch.int32, device=self._device)
        if self._has_streams:
            # The slab is zeroed on this stream, and used on any.
            torch.cuda.current_stream(self._device).synchronize()
        self._slabs.append(slab)
        self._free.extend(slab.data_ptr() + i * self.bytes for i in range(self._at_once))


def _stream_of_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# A Stream object takes 1 us to build, of a call that should cost 8; a function in between is left out as well.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_object)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


_sets: dict[tuple[torch.device, int], Tickets] = {}


def tickets(device: torch.device, ints: int = TICKETS) -> Tickets:
    """Return the sets of ``ints`` counters of ``device``."""
    found = _sets.get((device, ints))
    if found is None:
        found = _sets.setdefault((device, ints), Tickets(device, ints))
    return found
