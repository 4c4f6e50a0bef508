"""The list of query tiles, the requests behind them, and the hand-over of a tile: device arithmetic, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64, Uint32
from helpers.host.warps import SchedulingWarp, host

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core.copy import EVICT_FIRST, EVICT_NORMAL
from hopwell.kernels.parts.load import sequence
from hopwell.kernels.parts.load.sequence import Request, load_request
from hopwell.kernels.parts.partition import tiles as scheduler
from hopwell.kernels.parts.partition.tiles import AlternatingSchedule, QueryTile, TileSchedule, WorkQueue
from hopwell.kernels.parts.rows.mask import create_mask
from hopwell.kernels.parts.rows.query_rows import request_shape
from hopwell.kernels.problem import MAX_KEYS, MaskKind

pytestmark = [pytest.mark.traced, pytest.mark.filterwarnings("error::cutlass.base_dsl.common.DSLWarning")]

GEOMETRY = Geometry(*[Int64(0)] * len(Geometry._fields))._replace(
    q_token_elements=Int64(1),
    o_token_elements=Int64(1),
    k_token_elements=Int64(1),
    v_token_elements=Int64(1),
    lse_token_elements=Int64(1),
    capacity=Int64(MAX_KEYS),
    tokens=Int64(MAX_KEYS),
)
GRID = 3  # CTAs, whose first places are taken without a ticket
ADDRESSES = Addresses(*[Int64(0)] * len(Addresses._fields))


class Memory:
    """Arrays of 32-bit integers at made-up addresses."""

    def __init__(self) -> None:
        self.arrays: dict[int, list[int]] = {}

    def put(self, values: list[int]) -> Int64:
        """Return the address of ``values``, which the device reads as signed, for any host type."""
        address = 4096 * (len(self.arrays) + 1)
        self.arrays[address] = [(value + 2**31) % 2**32 - 2**31 for value in values]
        return Int64(address)

    def load_int(self, address: Any, index: Any, default: Any) -> Int32:
        array = self.arrays.get(host(address))
        return Int32(host(default)) if array is None else Int32(array[host(index)])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(sequence, "load_int", memory.load_int)
    return memory


def request(index: int, addresses: Addresses, geometry: Geometry = GEOMETRY) -> Request:
    found = load_request(Int32(index), addresses, geometry)
    return Request(*(host(getattr(found, field.name)) for field in fields(Request)))


class TestRequest:
    def test_lengths_from_cumulative_counts(self, memory: Memory) -> None:
        a = ADDRESSES._replace(q_offsets=memory.put([0, 5, 5, 9]), k_offsets=memory.put([0, 7, 20, 20]))
        got = [request(i, a) for i in range(3)]
        assert [(r.q_start, r.q_len) for r in got] == [(0, 5), (5, 0), (5, 4)]
        assert [(r.k_start, r.v_start, r.kv_len) for r in got] == [(0, 0, 7), (7, 7, 13), (20, 20, 0)]
        assert [r.o_start for r in got] == [0, 5, 5]
        assert [r.first_position for r in got] == [2, 13, -4]
        assert [r.index for r in got] == [0, 1, 2]

    def test_given_lengths_come_first(self, memory: Memory) -> None:
        """Offset arrays then have one entry per request, and no entry after the last is read."""
        a = ADDRESSES._replace(
            q_offsets=memory.put([0, 10]),
            k_offsets=memory.put([3, 50]),
            q_lens=memory.put([4, 2]),
            kv_lens=memory.put([40, 6]),
        )
        got = [request(i, a) for i in range(2)]
        assert [(r.q_start, r.q_len, r.k_start, r.kv_len) for r in got] == [(0, 4, 3, 40), (10, 2, 50, 6)]

    def test_element_offsets(self, memory: Memory) -> None:
        """Each tensor has a width of its own."""
        a = ADDRESSES._replace(
            q_offsets=memory.put([0, 6 * 512]),
            o_offsets=memory.put([2 * 256, 9 * 256]),
            k_offsets=memory.put([0, 11 * 128]),
            v_offsets=memory.put([5 * 64, 17 * 64]),
            lse_offsets=memory.put([0, 8 * 4]),
            q_lens=memory.put([6, 3]),
            kv_lens=memory.put([11, 3]),
        )
        sizes = dict(q=512, o=256, k=128, v=64, lse=4)
        g = GEOMETRY._replace(**{f"{name}_token_elements": Int64(size) for name, size in sizes.items()})
        got = [request(i, a, g) for i in range(2)]
        assert [(r.q_start, r.o_start, r.k_start, r.v_start, r.lse_start) for r in got] == [
            (0, 2, 0, 5, 0),
            (6, 9, 11, 17, 8),
        ]

    @pytest.mark.parametrize("tokens", [2**31 // 512 - 1, 2**31 // 512, 2**32 // 512 - 1])
    def test_offsets_of_all_32_bits(self, tokens: int, memory: Memory) -> None:
        a = ADDRESSES._replace(q_offsets=memory.put([tokens * 512]), q_lens=memory.put([1]), kv_lens=memory.put([1]))
        assert request(0, a, GEOMETRY._replace(q_token_elements=Int64(512))).q_start == tokens

    def test_keys_end_with_the_table(self, memory: Memory) -> None:
        a = ADDRESSES._replace(q_offsets=memory.put([0, 1, 2, 3]), kv_lens=memory.put([64, 65, 2**31 - 1]))
        g = GEOMETRY._replace(capacity=Int64(64))
        assert [request(i, a, g).kv_len for i in range(3)] == [64, 64, 64]

    @pytest.mark.parametrize("unit", [1, 512])
    def test_output_lies_as_the_query_unless_told(self, unit: int, memory: Memory) -> None:
        a = ADDRESSES._replace(q_offsets=memory.put([0, 7 * 512, 9 * 512]), kv_lens=memory.put([9, 9]))
        g = GEOMETRY._replace(q_token_elements=Int64(512), o_token_elements=Int64(unit))
        assert [request(i, a, g).o_start for i in range(2)] == [0, 7]

    def test_places_of_the_log_sum_exp(self, memory: Memory) -> None:
        a = ADDRESSES._replace(q_offsets=memory.put([0, 5, 9]), kv_lens=memory.put([9, 9]))
        ragged, padded = GEOMETRY._replace(lse_request=Int64(-1)), GEOMETRY._replace(lse_request=Int64(300))
        assert [request(i, a, ragged).lse_start for i in range(2)] == [0, 5]
        assert [request(i, a, padded).lse_start for i in range(2)] == [0, 300]

    def test_tokens_are_unsigned(self) -> None:
        assert host(sequence._tokens(Int32(-1), Int64(1 << 16))) == 2**16 - 1
        assert isinstance(Int32(-1).to(Uint32), Uint32)


@dataclass
class Requests:
    """A batch as the host sees it, for kernels with 128 query rows and 64 keys."""

    q_lens: list[int]
    kv_lens: list[int]
    heads: int = 1
    kv_heads: int = 1
    head_swizzle: int = 0  # 0: all heads
    kind: MaskKind = MaskKind.CAUSAL
    tile_heads: int = 1

    @property
    def tile_tokens(self) -> int:
        return 128 // self.tile_heads // 8 * 8

    def schedule(self, memory: Memory) -> TileSchedule:
        sizes = dict(batch=len(self.q_lens), heads=self.heads, kv_heads=self.kv_heads, grid=GRID)
        sizes["head_swizzle"] = (self.head_swizzle or self.heads) // self.tile_heads
        g = GEOMETRY._replace(**{name: Int64(size) for name, size in sizes.items()})
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        a = ADDRESSES._replace(q_offsets=memory.put(starts), kv_lens=memory.put(self.kv_lens))
        shape = TileShape(self.tile_heads, self.tile_tokens)
        return TileSchedule(g, a, create_mask(self.kind, Int64(32 if self.kind is MaskKind.CHUNKED else 0)), 64, shape)

    def listed(self) -> list[tuple[int, int, int]]:
        """Return (request, first head, first row) of every tile in order.

        Requests come one after the other, and so do the sections of a request's heads. Later tiles, which see more
        keys, come first. The heads of a section run side by side.
        """
        head_swizzle = self.head_swizzle or self.heads
        return [
            (index, first + head, row)
            for index, q_len in enumerate(self.q_lens)
            for first in range(0, self.heads, head_swizzle)
            for row in range(0, q_len, self.tile_tokens)[::-1]
            for head in range(0, head_swizzle, self.tile_heads)
        ]


def place(tile: QueryTile) -> tuple[int, int, int]:
    return host(tile.request.index), host(tile.head), host(tile.first_row)


def published(
    requests: Requests,
    places: list[int],
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[TileSchedule] = TileSchedule,
) -> list[tuple[Any, ...]]:
    """Return the tiles published by a CTA's scheduler warp with these places in the list: its own number,
    then tickets.
    """
    warp, first = SchedulingWarp([place - GRID for place in places[1:]]), Int32(places[0])

    class Told(kind):  # type: ignore[misc, valid-type]
        _requests, _count = TileSchedule._requests.__wrapped__, TileSchedule._count.__wrapped__

        def published(self, tile: QueryTile, step: Any) -> None:
            warp.note("published", tile, host(step))

    with monkeypatch.context() as patches:
        warp.use(patches, scheduler)
        patches.setattr(cute.arch, "block_idx", lambda: (first, 0, 0))
        patches.setattr(cutlass, "range", lambda *bounds, unroll: range(*map(host, bounds)))
        patches.setattr(scheduler, "hand_back_tickets", lambda addresses, ctas: warp.note("done", host(ctas)))
        told = Told(**vars(requests.schedule(memory)))
        warp.run(lambda: TileSchedule.publish.__wrapped__(told, warp))
    return warp.events


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize(
    "requests",
    [
        Requests([1], [9]),
        Requests([0], [0], heads=2),
        Requests([513, 300], [600, 300], heads=8, kv_heads=2),
        Requests([129, 0, 257], [500, 9, 257], heads=6, kv_heads=6, head_swizzle=2),
        # More requests than lanes, and a warp's worth of them without any query.
        Requests([5] * 20 + [0] * 44 + [130, 1], [200] * 66, heads=2),
        # Packed heads: all heads of a KV head, and half of them.
        Requests([33, 0, 1], [600, 300, 1], heads=8, kv_heads=2, tile_heads=4),
        Requests([65, 64], [65, 300], heads=8, kv_heads=2, head_swizzle=4, tile_heads=2),
        Requests([40, 41, 7], [65, 300, 1], heads=6, kv_heads=2, tile_heads=3),
    ],
    ids=range(8),
)
def test_the_list_of_tiles(requests: Requests, ctas: int, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile comes once, in the order of the list."""
    listed = requests.listed()
    found = {}
    for cta in range(ctas):
        places = [*range(cta, len(listed) + ctas, ctas)]
        events = published(requests, places, memory, monkeypatch)
        tiles = [event[1] for event in events if event[0] == "posted"]
        found |= dict(zip(places, map(place, tiles), strict=False))
    assert found == dict(enumerate(listed)), "a tile for each place of the list and for no other"


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize(
    "requests",
    [
        Requests([1], [9], heads=4, tile_heads=4),
        Requests([300, 1, 1], [600, 300, 1], heads=8, kv_heads=2, tile_heads=4),
        Requests([130] + [1] * 40, [200] * 41, heads=2, tile_heads=2),
    ],
    ids=range(3),
)
def test_halves_of_the_list_by_turns(
    requests: Requests, ctas: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile comes once; tickets alternate between the first and the second half of the list."""
    listed, found = requests.listed(), {}
    for cta in range(ctas):
        tickets = [*range(cta, len(listed) + ctas, ctas)]
        events = published(requests, tickets, memory, monkeypatch, AlternatingSchedule)
        tiles = [event[1] for event in events if event[0] == "posted"]
        found |= dict(zip(tickets, map(place, tiles), strict=False))
    half = (len(listed) + 1) // 2
    wanted = [pair[turn] for pair in itertools.zip_longest(listed[:half], listed[half:]) for turn in range(2)]
    assert found == dict(enumerate(tile for tile in wanted if tile is not None))


def test_heads_of_few_tokens_lie_close_together() -> None:
    shape = TileShape(Int32(4), Int32(32))
    assert [host(request_shape(shape, Int32(q_len)).tokens) for q_len in (0, 1, 8, 9, 31, 32, 500)] == [
        *(8, 8, 8, 16, 32, 32, 32)
    ]
    whole = TileShape(1, 128)
    assert request_shape(whole, Int32(1)) is whole, "a tile of one head has its rows in their places"


def test_keys_of_few_tokens_leave_the_cache_first(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests([1, 8, 9, 100], [300] * 4, heads=4, tile_heads=4)
    events = published(requests, [*range(len(requests.listed()) + 1)], memory, monkeypatch)
    tiles = [event[1] for event in events if event[0] == "posted"]
    found = {host(tile.request.q_len): host(tile.kv_policy()) for tile in tiles}
    assert found == {1: EVICT_FIRST, 8: EVICT_FIRST, 9: EVICT_NORMAL, 100: EVICT_NORMAL}


@pytest.mark.parametrize("tile_heads", [1, 6])
@pytest.mark.parametrize("kind", MaskKind)
def test_tiles_cover_every_row_of_every_head(
    kind: MaskKind, tile_heads: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests([1, 0, 128, 129, 300], [7, 9, 0, 500, 300], 12, 2, kind=kind, tile_heads=tile_heads)
    tokens = requests.tile_tokens
    mask, rows = requests.schedule(memory).mask, []
    events = published(requests, [*range(len(requests.listed()) + 1)], memory, monkeypatch)
    for tile in [event[1] for event in events if event[0] == "posted"]:
        index, head, first = place(tile)
        q_len, kv_len = requests.q_lens[index], requests.kv_lens[index]
        assert host(tile.exists)
        assert host(tile.kv_head) == head * requests.kv_heads // requests.heads
        last, offset = min(first + tokens, q_len) - 1, kv_len - q_len
        want = mask.tiles(Int32(offset + first), Int32(offset + last), tile.request, 64)
        for field in fields(want):
            assert host(getattr(tile.keys, field.name)) == host(getattr(want, field.name))
        rows += [(index, head + i, row) for i in range(tile_heads) for row in range(first, last + 1)]
    heads = range(requests.heads)
    assert sorted(rows) == [(i, h, row) for i, q in enumerate(requests.q_lens) for h in heads for row in range(q)]


def test_every_tile_is_published_in_turn(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a tile is posted, its publisher may do more work for it. The next tile then needs room before
    it is taken.
    """
    requests = Requests([200, 0, 5], [200, 0, 5], heads=2)
    events = published(requests, [*range(7)], memory, monkeypatch)
    told = [(name, place(rest[0])) if name in ("posted", "published") else (name,) for name, *rest in events]
    want = [
        event for tile in requests.listed() for event in (("posted", tile), ("published", tile), ("room",), ("ticket",))
    ]
    assert told == [*want, ("end",), ("done",)]
    assert [rest[-1] for name, *rest in events if name == "published"] == [*range(6)]
    assert [rest[-1] for name, *rest in events if name == "room"] == [*range(1, 7)]
    assert events[-1] == ("done", GRID)


def leaves(kind: type) -> Iterator[str]:
    """Yield names of the integers in a tile, in the order of the DSL's flattening."""
    for field in fields(kind):
        inner = field.type if is_dataclass(field.type) else None
        yield from leaves(inner) if inner else (f"{kind.__name__}.{field.name}",)  # type: ignore[arg-type]


class TestWorkQueue:
    def test_a_slot_holds_a_tile(self) -> None:
        names = list(leaves(QueryTile))
        assert len(names) == QueryTile.INTS
        assert [name.split(".")[1] for name in names] == [
            *(field.name for field in fields(Request)),
            "head",
            "kv_head",
            "first_row",
            *(field.name for field in fields(scheduler.TileRange)),
        ]

    def test_reading_puts_a_tile_together_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []

        class Ring:
            def wait_full(self, step: int) -> None:
                calls.append(("wait", step))

            def stage(self, step: int) -> int:
                return step % 2

            def release(self, step: int) -> None:
                calls.append(("release", step))

        class Slots:
            def __getitem__(self, place: tuple[None, int]) -> list[int]:
                calls.append(("read", place[1]))
                return [100 * place[1] + i for i in range(QueryTile.INTS)]

        monkeypatch.setattr(cute.arch, "sync_warp", lambda: calls.append(("sync", 0)))
        tile = WorkQueue(Slots(), Ring(), QueryTile).read(3)
        flat = [getattr(tile.request, field.name) for field in fields(Request)]
        flat += [tile.head, tile.kv_head, tile.first_row]
        flat += [getattr(tile.keys, field.name) for field in fields(tile.keys)]
        assert flat == [100 + i for i in range(QueryTile.INTS)]
        # The slot is released when all lanes have read it.
        assert calls == [("wait", 3), ("read", 1), ("sync", 0), ("release", 3)]
