"""Global memory: the host addresses that a kernel may access, and their names.

Device pointers are host pointers here. A launch registers the tensors of the kernel; without registration, every live
torch storage is accessible. Overlapping tensors (K and V of one cache) become one region that keeps all their names.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..native import core
from ..native.layout import REGION_FRESH, REGION_READONLY, REGION_TRACK, RegionState


@dataclass(frozen=True)
class Span:
    """One registered tensor: bytes [address, address + size).

    ``role`` "in" forbids writes; "out" starts undefined.
    """

    name: str
    address: int
    size: int
    role: str = "inout"
    element: int = 1  # bytes, for reports
    dtype: str = ""


def span_of(name: str, tensor, role: str = "inout") -> Span:
    """Return the span from a tensor's first element to its last."""
    size = tensor.element_size()
    if tensor.numel():
        size *= 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    else:
        size = 0
    return Span(name, tensor.data_ptr(), size, role, tensor.element_size(), str(tensor.dtype).removeprefix("torch."))


def live_storages() -> list[Span]:
    """List every CPU storage of a live torch tensor."""
    import torch

    spans: dict[int, int] = {}
    for obj in gc.get_objects():
        if issubclass(type(obj), torch.Tensor):
            try:
                storage = obj.untyped_storage()
                if obj.device.type == "cpu" and storage.nbytes():
                    spans[storage.data_ptr()] = max(spans.get(storage.data_ptr(), 0), storage.nbytes())
            except (RuntimeError, NotImplementedError):  # fake, meta and sparse tensors have no storage
                continue
    return [Span(f"storage at {a:#x}", a, n) for a, n in spans.items()]


@dataclass
class Region:
    base: int
    size: int
    spans: list[Span] = field(default_factory=list)
    written: np.ndarray | None = None

    @property
    def role(self) -> str:
        roles = {s.role for s in self.spans}
        return roles.pop() if len(roles) == 1 else "inout"


class GlobalMemory:
    """Sorted, disjoint regions and their native table."""

    def __init__(self, spans: Iterable[Span] | None, track: bool):
        self.registered = spans is not None
        spans = live_storages() if spans is None else spans
        self.regions: list[Region] = []
        for span in sorted((s for s in spans if s.size), key=lambda s: (s.address, -s.size)):
            last = self.regions[-1] if self.regions else None
            if last and span.address < last.base + last.size:
                last.size = max(last.size, span.address + span.size - last.base)
                last.spans.append(span)
            else:
                self.regions.append(Region(span.address, span.size, [span]))
        self.table = (RegionState * max(1, len(self.regions)))()
        for k, r in enumerate(self.regions):
            t = self.table[k]
            t.base, t.size, t.host, t.id = r.base, r.size, r.base, k
            if r.role == "in":
                t.flags |= REGION_READONLY
            if track and r.role == "out":
                r.written = np.zeros(r.size, np.uint8)
                t.flags |= REGION_TRACK | REGION_FRESH
                t.written = r.written.ctypes.data

    def free(self) -> None:
        for k in range(len(self.regions)):
            core().core_region_free(ctypes.addressof(self.table[k]))

    def describe(self, address: int) -> str:
        """Return the name and element offset of an address, or its distance from the nearest tensor."""
        best, distance = None, 1 << 62
        for r in self.regions:
            for s in r.spans:
                if s.address <= address < s.address + s.size:
                    return f"{s.name} + {address - s.address} bytes (element {(address - s.address) // s.element})"
                d = s.address - address if address < s.address else address - s.address - s.size + 1
                if d < distance:
                    best, distance = s, d
        if best is None:
            return f"{address:#x} (no tensor is registered)"
        side = "before the start" if address < best.address else "past the end"
        return f"{address:#x}, {distance} bytes {side} of {best.name} ({best.size} bytes at {best.address:#x})"

    def never_written(self) -> list[tuple[str, int, int]]:
        """Return (name, elements never written, first such element) of each "out" tensor, by bytes of its own span."""
        out = []
        for r in self.regions:
            if r.written is None:
                continue
            for s in r.spans:
                flags = r.written[s.address - r.base : s.address - r.base + s.size]
                is_written = flags[:: s.element] != 0  # a byte per element; indices of missing ones would take eight
                missing = is_written.size - int(np.count_nonzero(is_written))
                if missing:
                    out.append((s.name, missing, int(is_written.argmin())))
        return out
