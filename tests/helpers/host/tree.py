"""The reduction tree of swap-AB decode on the host: nodes are expressions, and lanes are threads."""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from helpers.host.warps import host
from hopwell.kernels.parts.combine.tree import FanInGroup, Tree


class HostTree(Tree):
    """A tree whose nodes are expressions.

    Lanes are threads. A lane does not see values that others have just stored; each lane has its own elements in every
    node.
    """

    state: Any = None

    @property
    def thread(self) -> int:
        return self.state.lanes.own.lane

    def _load(self, address: int, outputs: range | None = None) -> Any:
        return self.state.stored[self.thread].get(host(address), self.state.memory.get(host(address)))

    def _load_shared(self, address: int) -> Any:
        return self._load(address)

    def _store(self, address: int, value: Any, store: Any) -> None:
        self.state.stored[self.thread][host(address)] = value

    def _gmem_level(self, level: Any) -> Any:
        assert host(level) - self.smem_levels < host(self.geometry.gmem_levels)
        return super()._gmem_level(level)

    def _fill(self, fan_in_group: FanInGroup, subtree: Any, slots: Any) -> Any:
        with self.state.lock:
            return Tree._fill.__wrapped__(self, fan_in_group, subtree, slots)


class HostNode:
    """Leaves and pairs of nodes."""

    value: Any = None

    def clear(self) -> None:
        self.value = None

    def vectors(self) -> Any:
        return self.value

    def assign(self, value: Any) -> None:
        self.value = value

    def add_left(self, value: Any) -> None:
        self.value = (value, self.value)


class SharedInts:
    """Int32 in shared or global memory, from a base address."""

    def __init__(self, values: dict[int, int], address: int):
        self.values, self.address = values, address

    def __getitem__(self, index: Any) -> Int32:
        return Int32(self.values.get(self.address + 4 * host(index), 0))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self.address + 4 * host(index)] = host(value)
