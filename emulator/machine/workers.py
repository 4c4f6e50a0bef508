"""Several processes share the clusters of one launch.

A fork in the middle of the launch gives each child a part of the clusters that have not started. Global memory that the
kernel may write first moves to shared mappings, and is copied back at the end. The region table translates addresses,
so the kernel's pointers stay valid. Counts return through a pipe. Atomics work across processes because the native core
uses the host's atomic instructions.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import errors
from .state import array_at

if TYPE_CHECKING:
    from .machine import Machine

# A child forked while another thread holds a pipe's write end would keep that pipe open, and its reader waiting.
_forking = threading.Lock()
SERIAL_SECONDS = 0.25  # launches shorter than this are not worth a fork


def default_workers() -> int:
    """Return the default number of workers: one per core, or 1 if other tools already use all cores."""
    if "PYTEST_XDIST_WORKER" in os.environ or not hasattr(os, "fork"):
        return 1
    return len(os.sched_getaffinity(0))


def allowed(m: Machine) -> int:
    """Return the number of processes for this launch."""
    o = m.options
    wanted = o.workers or default_workers()
    # The detectors' clocks, the seeded schedules and the queue of launch control exist in one process only.
    alone = m.tracked or o.strict or o.schedule != "eager" or not m.memory.registered
    if alone or any(i.parts[0] == "clusterlaunchcontrol" for i in m.kernel.instrs):
        return 1
    return min(wanted, m.n_clusters)


class SharedRegions:
    """Writable regions in shared mappings, while children run."""

    def __init__(self, m: Machine):
        self.m = m
        self.moved: list[tuple[int, mmap.mmap, np.ndarray, np.ndarray]] = []
        for k, region in enumerate(m.memory.regions):
            if region.role == "in":
                continue
            original = array_at(region.base, region.size, np.uint8)
            pages = mmap.mmap(-1, region.size if region.written is None else 2 * region.size)
            shared = np.frombuffer(pages, np.uint8)
            shared[: region.size] = original
            m.memory.table[k].host = shared.ctypes.data
            if region.written is not None:
                shared[region.size :] = region.written
                m.memory.table[k].written = shared.ctypes.data + region.size
            self.moved.append((k, pages, shared, original))

    def restore(self) -> None:
        for k, _, shared, original in self.moved:
            region = self.m.memory.regions[k]
            original[...] = shared[: region.size]
            table = self.m.memory.table[k]
            table.host = region.base
            if region.written is not None:
                region.written[...] = shared[region.size :]
                table.written = region.written.ctypes.data
        self.moved.clear()


class Workers:
    """The children of one launch."""

    def __init__(self, m: Machine, count: int):
        self.m = m
        self.regions = SharedRegions(m)
        pending = list(m.pending)
        self.children: list[tuple[int, int]] = []  # (process, read end of its pipe)
        for number in range(1, count):
            with _forking:
                read, write = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(read)
                    self.be_child(deque(pending[number::count]), number, write)
                os.close(write)
            self.children.append((pid, read))
        m.pending = deque(pending[::count])

    def be_child(self, pending: deque, number: int, pipe: int) -> None:
        """Run a part of the clusters, send the result, and leave without the parent's exit handlers."""
        m = self.m
        payload: tuple[str, Any]
        try:
            m.become_worker(pending, number)
            m.loop()
            payload = ("done", m.tally())
        except BaseException as e:
            payload = ("failed", (type(e).__name__, str(e)))
        try:
            with os.fdopen(pipe, "wb") as stream:
                pickle.dump(payload, stream)
        finally:
            os._exit(0)

    def collect(self) -> None:
        """Wait for the children, add up their counts, and raise their errors."""
        failures = []
        for pid, read in self.children:
            with os.fdopen(read, "rb") as stream:
                data = stream.read()
            os.waitpid(pid, 0)
            died: tuple[str, Any] = ("failed", ("EmulatorError", "a worker process died"))
            kind, value = pickle.loads(data) if data else died
            if kind == "done":
                self.m.add_tally(value)
            else:
                failures.append(value)
        self.children.clear()
        self.regions.restore()
        if failures:
            name, text = failures[0]
            raise getattr(errors, name, errors.EmulatorError)(text)

    def abandon(self) -> None:
        """End the children after an error in the parent."""
        for pid, read in self.children:
            os.kill(pid, signal.SIGKILL)
            os.close(read)
            os.waitpid(pid, 0)
        self.children.clear()
        self.regions.restore()
