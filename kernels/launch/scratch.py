"""Scratch for calls whose workspace is too small.

FlashInfer asks for less memory than hopwell's decode kernels need in some shapes, so callers may bring too little. Two
rules follow from launches and graphs:

* Launches that may run at the same time must not share scratch, so every stream has its own.
* A CUDA graph keeps the address that it was captured with. Captured launches have other memory than the eager launches
  of their stream, and no scratch is ever freed. Scratch that has to grow therefore doubles.

An allocation during a capture comes from the graph's memory and adds no cost to replays. While the tensor is kept,
torch gives that memory to no other tensor, even after the graph is gone. Graphs captured on one stream share scratch,
so they must not be replayed at the same time.
"""

from __future__ import annotations

import functools
import logging
import threading

import torch

from hopwell.kernels.launch.tickets import LEGACY_STREAM, PER_THREAD_STREAM, current_stream, is_capturing

_log = logging.getLogger("hopwell")


class OwnScratch:
    """The scratch of one device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._of_stream: dict[tuple[int, bool], torch.Tensor] = {}
        self._of_thread = threading.local()
        self._kept: list[torch.Tensor] = []
        self._sized_by: dict[int, str] = {}
        self._lock = threading.Lock()

    def tensor(self, size: int, sized_by: str) -> torch.Tensor:
        """Return at least ``size`` bytes for a launch on the current stream.

        ``sized_by`` names the function that returns a sufficient size of workspace_buffer.
        """
        self._sized_by[size] = sized_by
        stream = current_stream(self._device.index) if self._device.type == "cuda" else PER_THREAD_STREAM
        key = (stream, stream != LEGACY_STREAM and self._device.type == "cuda" and is_capturing())
        known = self._known_to_thread() if stream == PER_THREAD_STREAM else self._of_stream
        found = known.get(key)
        if found is None or found.numel() < size:
            least = 0 if found is None else 2 * found.numel()
            found = known[key] = self._allocated(size, sized_by, least)
        return found

    def address(self, size: int) -> int:
        """Return the device address of scratch of a size that :meth:`tensor` has returned before."""
        return self.tensor(size, self._sized_by[size]).data_ptr()

    def _known_to_thread(self) -> dict[tuple[int, bool], torch.Tensor]:
        # The per-thread default stream and the emulator's launches have one handle, but an order in each thread.
        if not hasattr(self._of_thread, "known"):
            self._of_thread.known = {}
        return self._of_thread.known

    def _allocated(self, size: int, sized_by: str, least: int) -> torch.Tensor:
        _log.warning(
            "workspace_buffer is too small for decode scratch (%s bytes, see %s); allocated a private buffer for this "
            "stream of %s",
            f"{size:,}",
            sized_by,
            self._device,
        )
        fresh = torch.empty(max(size, least), dtype=torch.uint8, device=self._device)
        with self._lock:
            self._kept.append(fresh)
        return fresh


@functools.cache
def own_scratch(device: torch.device) -> OwnScratch:
    """Return the scratch of ``device``."""
    return OwnScratch(device)
