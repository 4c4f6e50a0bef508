"""Counters that persistent kernels take work from.

A launch needs two int32 that are zero when it starts; the kernel leaves them zero. Launches that may run at the same
time must not share a pair, and a pair must outlive a CUDA graph that has its address, so pairs live in memory of our
own: one pair for each stream, and a fresh one for each captured launch, since a graph may be replayed on any stream.
"""

from __future__ import annotations

import threading

import torch

PAIR_BYTES = 8
SLAB_PAIRS = 4096
LEGACY_STREAM = 0  # torch's default; CUDA refuses to capture it
PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, but a stream of its own in each thread


class Tickets:
    """The pairs of one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._has_streams, self._index = device.type == "cuda", device.index
        self._slabs: list[torch.Tensor] = []
        self._free: list[int] = []
        self._of_stream: dict[int, int] = {}
        self._of_thread = threading.local()
        self._captured: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def address(self) -> int:
        """Address of a pair for a launch on the current stream."""
        if not self._has_streams:
            return self._for_thread()
        stream = _current_stream(self._index)
        if stream != LEGACY_STREAM and _is_capturing():
            return self._for_capture()
        found = self._of_stream.get(stream)
        return self._for_stream(stream) if found is None else found

    def reserve(self) -> None:
        """Keep enough pairs in store for the captures that may follow. Called once for each plan."""
        if self._has_streams and _is_capturing():
            return
        with self._lock:
            if len(self._free) < SLAB_PAIRS // 2:
                self._grow()

    def _for_stream(self, stream: int) -> int:
        if stream == PER_THREAD_STREAM:
            return self._for_thread()
        with self._lock:
            if stream not in self._of_stream:
                self._of_stream[stream] = self._take()
            return self._of_stream[stream]

    def _for_thread(self) -> int:
        # Not by the thread's number: a new thread may have that of a dead one whose launch is still running.
        found = getattr(self._of_thread, "pair", None)
        if found is None:
            with self._lock:
                found = self._of_thread.pair = self._take()
        return found

    def _take(self) -> int:
        if not self._free:
            self._grow()
        return self._free.pop()

    def _for_capture(self) -> int:
        with self._lock:
            if self._free:
                return self._free.pop()
            # No pair is left and none can be zeroed now: let the graph zero one before each replay.
            pair = torch.zeros(2, dtype=torch.int32, device=self._device)
            self._captured.append(pair)
            return pair.data_ptr()

    def _grow(self) -> None:
        slab = torch.zeros(SLAB_PAIRS * PAIR_BYTES // 4, dtype=torch.int32, device=self._device)
        if self._has_streams:
            # Zeroed on this stream, used on any.
            torch.cuda.current_stream(self._device).synchronize()
        self._slabs.append(slab)
        self._free.extend(slab.data_ptr() + i * PAIR_BYTES for i in range(SLAB_PAIRS))


def _stream_of_object(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


# Without building a Stream object, which takes 1 us of a call that should cost 8, and without a function in between.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_object)
_is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


_devices: dict[torch.device, Tickets] = {}


def tickets(device: torch.device) -> Tickets:
    """The counters of ``device``."""
    found = _devices.get(device)
    if found is None:
        found = _devices.setdefault(device, Tickets(device))
    return found
