"""Counters from which persistent kernels draw tickets for work.

A launch needs a set of int32 that are zero when it starts, two for prefill; the kernel leaves them zero. Launches that
may run at the same time must not share a set, and a set must outlive every CUDA graph that has its address. hopwell
therefore keeps the sets in its own memory. Each stream has one. Each captured launch gets a new one, because a graph
may be replayed on any stream.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from hopwell.kernels.config.splitting import TICKETS

SLAB_SETS = 4096  # sets allocated at a time, if they fit into SLAB_BYTES
SLAB_BYTES = 4 << 20
LEGACY_STREAM = 0  # torch's default; CUDA refuses to capture it
PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, but a separate stream in each thread


class Tickets:
    """Sets of ``ints`` counters on one device."""

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
        """Keep enough free sets for later captures. Each plan calls this once."""
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
        # A thread's id cannot be the key: a new thread may reuse the id of a dead thread whose launch is still running.
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
            # There is no free set and none can be zeroed now. The graph zeroes a new set before each replay.
            fresh = torch.zeros(self.bytes // 4, dtype=torch.int32, device=self._device)
            self._captured.append(fresh)
            return fresh.data_ptr()

    def _grow(self) -> None:
        """Add a slab. A thread of its own allocates it. torch warms up its CUDA graph trees with the calling thread's
        allocations in the graphs' memory, and later gives that memory to other tensors.
        """
        with ThreadPoolExecutor(1) as other:
            slab = other.submit(self._zeros).result()
        self._slabs.append(slab)
        self._free.extend(slab.data_ptr() + i * self.bytes for i in range(self._at_once))

    def _zeros(self) -> torch.Tensor:
        slab = torch.zeros(self._at_once * self.bytes // 4, dtype=torch.int32, device=self._device)
        if self._has_streams:
            # The slab is zeroed on this stream, and used on any stream.
            torch.cuda.current_stream(self._device).synchronize()
        return slab


def _stream_of_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Building a Stream object takes 1 us of a call that should take 8 us. A wrapper function is avoided for the same
# reason.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_object)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


_sets: dict[tuple[torch.device, int], Tickets] = {}


def tickets(device: torch.device, ints: int = TICKETS) -> Tickets:
    """Return sets of at least ``ints`` counters of ``device``.

    The number is rounded up by less than an eighth. Decode needs another number for each length of a page table, and
    each number has a slab of its own.
    """
    step = 1 << max(ints.bit_length() - 4, 0)
    most = -(-ints // step) * step
    found = _sets.get((device, most))
    if found is None:
        found = _sets.setdefault((device, most), Tickets(device, most))
    return found
