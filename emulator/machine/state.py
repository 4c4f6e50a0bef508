"""Python's view of the native core's clusters, CTAs and warps."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ..errors import EmulatorError
from ..native import core
from ..native.layout import (
    FULL,
    OFFSET_MASK,
    RANK_SHIFT,
    ClusterState,
    CtaState,
    MBarrierState,
    WarpState,
)

LANES = np.arange(32)
BLOCK = object()  # a handler's answer: the fragment waits
AGAIN = object()  # a handler's answer: execute the instruction once more


def array_at(address: int, count: int, dtype: Any) -> np.ndarray:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype)


def lanes_of(mask: int) -> list[int]:
    return [k for k in range(32) if mask >> k & 1]


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


class Warp:
    """Registers by row offset: ``u32[row >> 2 : (row >> 2) + 32]`` and so on."""

    def __init__(self, cta: Cta, state: WarpState, file_bytes: int, n_preds: int, n_slots: int):
        self.cta, self.state = cta, state
        self.address = ctypes.addressof(state)
        self.id = state.id
        raw = array_at(state.file, file_bytes, np.uint8)
        self.raw = raw
        self.file = state.file
        self.u32, self.u64, self.u16 = raw.view(np.uint32), raw.view(np.uint64), raw.view(np.uint16)
        self.pred = array_at(state.pred, n_preds, np.uint32) if n_preds else np.zeros(0, np.uint32)
        self.busy = array_at(state.busy, n_slots, np.uint8)
        self.touched = array_at(state.touched, n_slots, np.uint8)
        self.written = array_at(state.written, n_slots, np.uint32)
        self.vc_address = state.vc or 0
        self.waits: dict[int, Any] = {}  # program counter -> predicate of a fragment that waits in Python
        self.bulk: dict[int, Any] = {}  # lane -> bulk groups
        self.cp_async: list = []
        self.cp_groups: list = []
        self.tmem_loads: list = []
        self.tmem_stores: list = []

    def __repr__(self) -> str:
        return f"cta {self.cta.id} warp {self.id}"

    # -- operands
    def row32(self, row: int) -> np.ndarray:
        return self.u32[row >> 2 : (row >> 2) + 32]

    def get32(self, row: int, lane: int) -> int:
        return int(self.u32[(row >> 2) + lane])

    def get64(self, row: int, lane: int) -> int:
        return int(self.u64[(row >> 3) + lane])

    def get16(self, row: int, lane: int) -> int:
        return int(self.u16[(row >> 1) + lane])

    def put32(self, row: int, mask: int, values: Any) -> None:
        dst = self.row32(row)
        if mask == FULL:
            dst[...] = values
        else:
            np.copyto(dst, np.broadcast_to(np.asarray(values, np.uint32), 32), where=(mask >> LANES & 1).astype(bool))

    def put_pred(self, number: int, mask: int, value: int) -> None:
        self.pred[number] = (int(self.pred[number]) & ~mask | value & mask) & FULL


class Cta:
    def __init__(self, cluster: Cluster, state: CtaState, program: Any):
        self.cluster, self.state = cluster, state
        self.address = ctypes.addressof(state)
        self.rank = state.rank
        self.id = tuple(state.id)
        self.smem_size = state.smem_size
        self.smem = array_at(state.smem, -(-state.smem_size // 16) * 16, np.uint8)
        self.smem_address = state.smem
        self.init = array_at(state.init, state.smem_size, np.uint8) if state.init else None
        warps = (WarpState * state.n_warps).from_address(state.warps)
        slots, preds = program.file_bytes // 64, program.file.predicates
        self.warps = [Warp(self, warps[k], program.file_bytes, preds, slots) for k in range(state.n_warps)]
        for number in program.true_predicates():
            for w in self.warps:
                w.pred[number] = FULL
        self.poll = np.zeros(state.n_warps, np.uint8)
        self.engine: dict[Any, Any] = {}  # engine state of a CTA: tensor memory, warpgroups

    @property
    def exited(self) -> bool:
        return bool(self.state.exited)

    def mbarriers(self) -> list[MBarrierState]:
        table = (MBarrierState * max(1, self.state.n_mbars)).from_address(self.state.mbars)
        return [table[k] for k in range(self.state.n_mbars)]


class Cluster:
    def __init__(self, machine_address: int, origin: tuple[int, int, int], index: int, program: Any):
        self.address = core().core_cluster_new(machine_address, *origin, index)
        self.machine_address = machine_address
        self.state = ClusterState.from_address(self.address)
        self.index, self.origin = index, origin
        self.ctas = [Cta(self, CtaState.from_address(self.state.ctas[r]), program) for r in range(self.state.n_ctas)]
        self.engine: dict[Any, Any] = {}
        self.agent_names: dict[int, str] = {}
        self.agent_ids: dict[Any, int] = {}
        for cta in self.ctas:
            for w in cta.warps:
                of_rank = f" of rank {cta.rank}" if len(self.ctas) > 1 else ""
                self.agent_names[w.state.agent] = f"warp {w.id}{of_rank}"
                self.agent_names[w.state.solo] = f"one lane of warp {w.id}{of_rank}"

    @property
    def live(self) -> bool:
        return self.state.live_warps > 0

    def resolve(self, address: int) -> tuple[Cta, int]:
        """Return the CTA and the offset of a shared::cluster address."""
        rank = address >> RANK_SHIFT & 0xFF
        if rank >= len(self.ctas):
            raise EmulatorError(f"shared-memory address {address:#x}: the cluster has no CTA of rank {rank}")
        return self.ctas[rank], address & OFFSET_MASK

    def agent(self, machine_address: int, key: tuple, name: str) -> int:
        """Return the number of an asynchronous stream's logical clock."""
        found = self.agent_ids.get(key)
        if found is None:
            found = core().core_new_agent(machine_address, self.address)
            if found < 0:
                raise EmulatorError("the race detector ran out of agents")
            self.agent_ids[key] = found
            self.agent_names[found] = name
        return found

    def free(self) -> None:
        core().core_cluster_free(self.machine_address, self.address)
