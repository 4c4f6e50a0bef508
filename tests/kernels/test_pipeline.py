"""Pipeline edges: their refusals, their barriers, and the edges of every shipped kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32
from helpers.covering.configs import every_tile, with_features

from hopwell.kernels.config.base import WORK_STAGES, KvFetch
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.hardware import ARCHITECTURES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.kernel import SOURCES, work_queue_stride
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Ring, Roles, barrier_count, create_rings, describe
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import ContiguousBoxes, PageBoxes, PageColumnBoxes
from hopwell.kernels.parts.partition.tiles import WorkTile
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.sm90.prefill.kernel import PrefillSm90

SHARED_BYTES = ARCHITECTURES["sm_90a"].shared_bytes

pytestmark = pytest.mark.traced

EDGE = Edge("k", "load", "attend", 2, 1, 8, 32768)
SHIPPED = list(shipped_configs())


class TestEdge:
    @pytest.mark.parametrize(
        ("name", "least"), [("stages", 1), ("producer_warps", 1), ("consumer_warps", 1), ("stage_bytes", 0)]
    )
    def test_less_than_there_must_be_is_refused(self, name: str, least: int) -> None:
        for value in (least - 1, -5):
            with pytest.raises(ValueError, match=rf"edge k: {name} must be at least {least}, got {value}"):
                replace(EDGE, **{name: value})

    def test_an_edge_may_be_a_signal_alone(self) -> None:
        assert replace(EDGE, stage_bytes=0).barriers == EDGE.barriers

    @pytest.mark.parametrize("stages", [1, 2, 3, 8, 22])
    def test_barriers(self, stages: int) -> None:
        """Each stage has a full and an empty one."""
        assert replace(EDGE, stages=stages).barriers == 2 * stages

    def test_barrier_count(self) -> None:
        assert barrier_count([]) == 0
        assert barrier_count([EDGE, replace(EDGE, stages=1), replace(EDGE, stages=4)]) == 4 + 2 + 8


class TestRoles:
    ROLES = Roles({"load": 1, "attend": 8})

    def test_arrive_counts_are_the_warps_of_the_roles(self) -> None:
        assert self.ROLES.edge("k", "load", "attend", 2, 32768) == EDGE
        assert self.ROLES.edge("p", "attend", "load", 1) == Edge("p", "attend", "load", 1, 8, 1, 0)

    @pytest.mark.parametrize("roles", [("load", "store"), ("store", "attend")])
    def test_unknown_role(self, roles: tuple[str, str]) -> None:
        with pytest.raises(ValueError, match=r"edge k: no warps play the role 'store'; roles are \['attend', 'load'\]"):
            self.ROLES.edge("k", *roles, 1)


class TestReader:
    """Arrivals of an edge of K or V: (producer lanes, consumer lanes, copying lanes, whether the consumer fences)."""

    @pytest.mark.parametrize(
        ("reader", "rows", "zeros", "scales", "expected"),
        [
            # TMA arrives once, and so does a warp that issues products.
            (Reader.TENSOR_CORES, False, True, False, (1, 1, 0, False)),
            # cp.async arrives for every lane, and only the consumer can fence its writes.
            (Reader.TENSOR_CORES, True, True, False, (32, 1, 0, True)),
            (Reader.BOTH, True, True, False, (32, 32, 0, True)),
            (Reader.BOTH, False, True, False, (32, 32, 0, False)),
            # Lanes see the zeros of other lanes without a fence if every lane arrives.
            (Reader.LANES, False, True, False, (32, 32, 0, False)),
            (Reader.LANES, False, False, False, (1, 32, 0, False)),
            (Reader.SYNCED_LANES, False, False, False, (1, 1, 0, False)),
            (Reader.SYNCED_LANES, False, True, False, (32, 32, 0, False)),
            # Scales are copied by lanes beside TMA; copies of rows bring them along.
            (Reader.SYNCED_LANES, False, False, True, (1, 32, 32, False)),
            (Reader.SYNCED_LANES, True, False, True, (32, 32, 0, False)),
        ],
    )
    def test_arrivals(
        self, reader: Reader, rows: bool, zeros: bool, scales: bool, expected: tuple[int, int, int, bool]
    ) -> None:
        found = reader.arrivals(copies_rows=rows, writes_zeros=zeros, copies_scales=scales)
        names = ("producer_lanes", "consumer_lanes", "copying_lanes", "consumer_fences")
        assert tuple(found[name] for name in names) == expected


def test_description() -> None:
    work = Edge("work", "schedule", "others", 1, 2, 11, 64)
    assert describe([EDGE, work]).splitlines() == [
        "k: load (1 warp) -> attend (8 warps), 2 stages of 32768 bytes",
        "work: schedule (2 warps) -> others (11 warps), 1 stage of 64 bytes",
    ]


@dataclass
class Barriers:
    """mbarriers by number, on the host: arrive counts, and the number of completed phases."""

    counts: dict[int, int] = field(default_factory=dict)
    completed: dict[int, int] = field(default_factory=dict)

    def init(self, barrier: int, count: int) -> None:
        assert barrier not in self.counts, "initialised twice"
        self.counts[barrier] = count

    def passes(self, barrier: Any, parity: Any) -> bool:
        """Whether the phase of this parity has completed, as mbarrier.try_wait.parity (PTX ISA)."""
        return (self.completed.get(int(barrier), 0) - 1) & 1 == int(parity)


class TestRing:
    @pytest.mark.parametrize("stages", [1, 2, 3, 4, 22])
    def test_waits_for_the_right_use_of_a_stage(self, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
        barriers, passed = Barriers(), []
        monkeypatch.setattr(
            cute.arch, "mbarrier_wait", lambda barrier, parity: passed.append(barriers.passes(barrier, parity))
        )
        ring = Ring(0, stages, stages)

        def waits(wait: Any, step: int) -> bool:
            wait(step)
            return not passed.pop()

        for step in range(6 * stages):
            stage = step % stages
            full, empty = stage, stages + stage
            assert ring.stage(step) == stage
            assert ring.full_barrier(step) == full
            # Producer: the first round fills fresh stages, later ones wait for the release of the round before.
            if step >= stages:
                assert waits(ring.wait_empty, step)
                barriers.completed[empty] = step // stages
            assert not waits(ring.wait_empty, step)
            # Consumer: waits until this very step is there.
            assert waits(ring.wait_full, step)
            barriers.completed[full] = step // stages + 1
            assert not waits(ring.wait_full, step)
            # The role that gets the stage back waits for the release of this very step, including the first steps.
            assert waits(ring.wait_released, step)
            barriers.completed[empty] = step // stages + 1
            assert not waits(ring.wait_released, step)
            barriers.completed[empty] = step // stages

    @pytest.mark.parametrize("fences", [False, True])
    def test_a_consumer_that_fences_does_so_behind_its_wait(
        self, fences: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[tuple[Any, ...]] = []
        monkeypatch.setattr(cute.arch, "mbarrier_wait", lambda barrier, parity: events.append(("wait", barrier)))
        monkeypatch.setattr(cute.arch, "fence_proxy", lambda kind, space: events.append((kind, space)))
        ring = Ring(0, 2, 2, consumer_fences=fences)
        ring.wait_empty(1)
        ring.wait_full(1)
        assert events == [("wait", 3), ("wait", 1), *[("async.shared", "cta")] * fences]

    def test_created_barriers_are_those_that_were_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        barriers, fences = Barriers(), []
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(cute.arch, "thread_idx", lambda: (0, 0, 0))
        monkeypatch.setattr(cute.arch, "mbarrier_init", barriers.init)
        monkeypatch.setattr(cute.arch, "mbarrier_init_fence", lambda: fences.append(len(barriers.counts)))
        by_lanes = replace(EDGE, name="v", stages=4, producer_lanes=32, consumer_lanes=2, consumer_fences=True)
        edges = [replace(EDGE, name="q"), EDGE, Edge("work", "schedule", "others", 1, 2, 11, 64), by_lanes]
        rings = create_rings.__wrapped__(0, edges)
        assert set(barriers.counts) == set(range(barrier_count(edges)))
        assert fences == [barrier_count(edges)], "the fence comes after all of them"
        assert rings.converted_v is None
        for edge in edges:
            ring = getattr(rings, edge.name)
            assert ring.stages == edge.stages
            assert ring.consumer_fences == edge.consumer_fences
            assert (ring.producer_lanes, ring.consumer_lanes) == (edge.producer_lanes, edge.consumer_lanes)
            for stage in range(edge.stages):
                assert barriers.counts[ring.full + stage] == edge.producer_warps * edge.producer_lanes
                assert barriers.counts[ring.empty + stage] == edge.consumer_warps * edge.consumer_lanes

    def test_other_threads_leave_barriers_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        barriers = Barriers()
        monkeypatch.setattr(cute.arch, "thread_idx", lambda: (1, 0, 0))
        monkeypatch.setattr(cute.arch, "mbarrier_init", barriers.init)
        create_rings.__wrapped__(0, [replace(EDGE, name=name) for name in ("q", "k", "v", "work")])
        assert not barriers.counts

    def test_steps_may_be_device_integers(self) -> None:
        ring = Ring(Int32(0), Int32(4), 4)
        assert [ring.stage(Int32(step)).value for step in range(6)] == [0, 1, 2, 3, 0, 1]


def kernels(dims: tuple[int, int]) -> list[PrefillSm90]:
    """Return all shipped kernels of ``dims``, and those with other scores and with skip-softmax."""
    shipped = [config for config in SHIPPED if (config.head_dim_qk, config.head_dim_v) == dims]
    return [PrefillSm90(config) for plain in shipped for config in with_features(plain)]


class TestPrefill:
    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_edges(self, dims: tuple[int, int]) -> None:
        """Stages hold whole tiles of whole column blocks, and every warp of the CTA except the producer
        waits for work.
        """
        width_qk, width_v = (64 * math.ceil(dim / 64) for dim in dims)
        for kernel in kernels(dims):
            tile = kernel.tile
            consumers = 4 * tile.m // 64 * (2 if tile.splits_v else 1)
            edges = {edge.name: edge for edge in kernel.edges}
            assert list(edges) == ["q", "k", "v", "work"]
            assert {name: edge.stages for name, edge in edges.items()} == dict(
                q=tile.q_stages, k=tile.kv_stages, v=tile.kv_stages, work=WORK_STAGES
            )
            assert edges["q"].stage_bytes == tile.m * width_qk * 2
            assert edges["k"].stage_bytes == tile.n * width_qk * 2
            assert edges["v"].stage_bytes == tile.n * width_v * 2
            assert edges["work"].stage_bytes == work_queue_stride(WorkTile.INTS) * 4
            assert all(edge.producer_warps == 1 for edge in kernel.edges)
            assert all(edges[name].consumer_warps == consumers for name in "qkv")
            # Copies of rows arrive for every lane, and only the consumer can fence them.
            rows = kernel.config.kv_fetch is KvFetch.PAGE_ROWS
            assert all((edges[name].producer_lanes, edges[name].consumer_fences) == (32, True) for name in "kv" if rows)
            assert all(e.producer_lanes == 1 and not e.consumer_fences for e in kernel.edges if not rows)
            assert edges["work"].consumer_warps == consumers + 3

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_shared_memory(self, dims: tuple[int, int]) -> None:
        width_qk, width_v = (64 * math.ceil(dim / 64) for dim in dims)
        for kernel in kernels(dims):
            tile = kernel.tile
            q = tile.q_stages * tile.m * width_qk * 2
            kv = tile.kv_stages * tile.n * (width_qk + width_v) * 2
            # Every warp stages its own output rows, including warpgroups that share rows.
            staging = tile.m * (2 if tile.splits_v else 1) * copy.SWIZZLE_ROW_BYTES
            # A full and an empty one for each stage, and one for each loader's tiles with zeroed rows.
            barriers = 8 * (2 * (tile.q_stages + 2 * tile.kv_stages + WORK_STAGES) + 2)
            assert (
                kernel.shared_bytes == q + kv + staging + WORK_STAGES * work_queue_stride(WorkTile.INTS) * 4 + barriers
            )
            assert kernel.shared_bytes <= SHARED_BYTES == 227 * 1024

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_sources(self, dims: tuple[int, int]) -> None:
        """A box over all columns leaves no room for padding, so pages with padded columns come one block at a time."""
        boxes = PageBoxes if all(dim % 64 == 0 for dim in dims) else PageColumnBoxes
        want = {KvFetch.CONTIGUOUS: ContiguousBoxes, KvFetch.PAGE_ROWS: PageRows, KvFetch.PAGE_BOXES: boxes}
        found = kernels(dims)
        assert {kernel.config.kv_fetch for kernel in found} == set(want) == set(SOURCES) - {KvFetch.TOPK_ROWS}
        for kernel in found:
            assert kernel.source is want[kernel.config.kv_fetch], kernel.config.name

    @pytest.mark.parametrize("dims", TILES, ids=str)
    def test_stages_stay_aligned(self, dims: tuple[int, int]) -> None:
        """The 128-byte swizzle permutes by address: every stage and column block starts at a multiple of 1024."""
        for rows in (rows for tile in every_tile(dims) for rows in (tile.m, tile.n)):
            assert rows * copy.SWIZZLE_ROW_BYTES % copy.SWIZZLE_ATOM_BYTES == 0

    def test_slots_of_the_work_queue_start_on_16_bytes(self) -> None:
        """A vector load of one slot then never touches the next."""
        for ints in range(1, 40):
            assert work_queue_stride(ints) * 4 % 16 == 0
            assert ints <= work_queue_stride(ints) < ints + 4

    def test_too_much_shared_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(TILES, (128, 128), replace(TILES[128, 128], kv_stages=4))
        config = next(c for c in SHIPPED if c.head_dim_qk == 128)
        with pytest.raises(ValueError, match=rf"{config.name} needs \d+ bytes of shared memory, {SHARED_BYTES} are"):
            PrefillSm90(config)

    def test_description_is_in_the_docstring(self) -> None:
        """The class docstring draws every edge of a kernel."""
        for edge in PrefillSm90(SHIPPED[0]).edges:
            assert f"\n        {edge.name} " in (PrefillSm90.__doc__ or "")
            assert f"{edge.producer} -> " in (PrefillSm90.__doc__ or "")
