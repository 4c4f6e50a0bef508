"""The split of requests' keys into work tiles, and the new tokens that drafts see: device code, on the host."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64
from helpers.host.warps import SchedulingWarp, device_tuple, host

from hopwell.kernels.config.splitting import (
    FAN_IN,
    LATENT_IN_FLIGHT,
    LATENT_WORK_TILES,
    LONG_TOKENS,
    MAX_CHUNKS,
    ROWS,
    TICKETS,
    LaunchSizes,
)
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.masks import WIDEST
from hopwell.kernels.parts.combine import partials as partial
from hopwell.kernels.parts.combine.partials import EPOCH, Combine, Slots
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.partition import split_kv as split
from hopwell.kernels.parts.partition.split_kv import (
    KeySchedule,
    RequestSpan,
    ScheduleHooks,
    SplitSchedule,
    SplitTile,
)
from hopwell.kernels.parts.rows import mask as mask_module
from hopwell.kernels.parts.rows.mask import DraftMask, DraftRow, mask_type
from hopwell.kernels.problem import MAX_KEYS, MaskKind
from tests.kernels.test_mask import Scores
from tests.kernels.test_scheduler import Memory

pytestmark = pytest.mark.traced

MASK_ADDRESS = 4096  # of the draft mask; 0 stands for none
# The DSL warns about values that do not fit their type and would wrap around on the device.
exact = pytest.mark.filterwarnings("error::cutlass.base_dsl.common.DSLWarning")

CHUNK = 512  # tokens
MASKS = (
    (MaskKind.FULL, WIDEST),
    *itertools.product((MaskKind.SLIDING_WINDOW, MaskKind.DRAFT), (0, 700, WIDEST)),
)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(split, "load_int", memory.load_int)
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    for kind, name in ((KeySchedule, "_cut"), (SplitSchedule, "_shift")):
        monkeypatch.setattr(kind, name, getattr(kind, name).__wrapped__)
    return memory


@dataclass
class Requests:
    """A batch as the host sees it."""

    q_lens: list[int]
    kv_lens: list[int]
    group: int = 1
    kv_heads: int = 1
    ragged: bool = False
    kind: MaskKind = MaskKind.FULL
    window: int = WIDEST
    tile_n: int = 64

    @property
    def row_tiles(self) -> int:
        return -(-self.group * max(self.q_lens) // ROWS)

    def tiles(self, index: int) -> int:
        """Return the tiles of a request's rows for each head."""
        q_len = self.q_lens[index] if self.ragged else max(self.q_lens)
        return -(-self.group * q_len // ROWS)

    def schedule(
        self,
        memory: Memory,
        halves: bool = False,
        latent: bool = False,
    ) -> SplitSchedule:
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        a = device_tuple(
            Addresses, kv_lens=memory.put(self.kv_lens), q_offsets=memory.put(starts) if self.ragged else Int64(0)
        )
        sizes = dict(kv_heads=self.kv_heads, batch=len(self.q_lens), group=self.group, capacity=2**31 - 1)
        sizes |= dict(q_len=max(self.q_lens), tokens=MAX_KEYS)
        g = device_tuple(DecodeGeometry, **sizes, row_tiles=self.row_tiles)
        mask = mask_type(self.kind)(self.kind, Int32(self.window))
        return SplitSchedule(g, a, mask, ROWS, self.tile_n, CHUNK, halves, latent, ScheduleHooks())

    def visible(self, request: int, row: int) -> range:
        """Return the keys that a packed row may see: all new tokens for drafts, regardless of their bits."""
        kv_len, token = self.kv_lens[request], row // self.group
        position = kv_len - self.q_lens[request] + token
        first = 0 if self.kind is MaskKind.FULL else max(position - self.window, 0)
        return range(first, position + 1 if self.kind is MaskKind.SLIDING_WINDOW else kv_len)


def span(schedule: SplitSchedule, index: int) -> RequestSpan:
    found = schedule._span(Int32(index))
    return RequestSpan(*(host(getattr(found, f.name)) for f in fields(RequestSpan)))


@exact
class TestSpan:
    @pytest.mark.parametrize(("kind", "window"), MASKS)
    def test_chunks(self, kind: MaskKind, window: int, memory: Memory) -> None:
        """Chunks have 512 tokens, doubled until their number fits the slots."""
        n = CHUNK
        lengths = [
            0,
            1,
            n - 1,
            n,
            n + 1,
            255 * n + 1,
            256 * n,
            256 * n + 1,
            10**6,
            2**24 + 5,
            2**30,
            2**31 - 1,
        ]
        requests = Requests([1] * len(lengths), lengths, kind=kind, window=window)
        schedule = requests.schedule(memory)
        for index, kv_len in enumerate(lengths):
            found = span(schedule, index)
            first = requests.visible(index, 0).start if kv_len else 0
            assert (found.index, found.q_len, found.kv_len) == (index, 1, kv_len)

            def chunks(tokens: int, kv_len: int = kv_len, first: int = first) -> int:
                return max(-(-kv_len // tokens) - first // tokens, 1)

            tokens = next(CHUNK << i for i in range(20) if chunks(CHUNK << i) <= MAX_CHUNKS)
            assert (found.chunk_tokens, found.chunks, found.first_chunk) == (tokens, chunks(tokens), first // tokens)

    def test_half_chunks(self, memory: Memory) -> None:
        """Requests of more than one chunk have half chunks, until they are long."""
        lengths = [0, CHUNK, CHUNK + 1, 3 * CHUNK, LONG_TOKENS - 1, LONG_TOKENS, 2**31 - 1]
        schedule = Requests([1] * len(lengths), lengths).schedule(memory, halves=True)
        found = [span(schedule, index) for index in range(len(lengths))]
        halves = [one.chunk_tokens * 2 == CHUNK for one in found]
        assert halves == [False, False, True, True, True, False, False]
        assert [one.chunks for one in found[:-1]] == [1, 1, 3, 6, LONG_TOKENS // CHUNK * 2, LONG_TOKENS // CHUNK]

    @pytest.mark.parametrize("group", [1, 16, 64, 128])
    def test_latent_chunks(self, group: int, memory: Memory) -> None:
        """Chunks double until all rows of a request fit one wave of CTAs as work tiles, or two chunks."""
        q_lens = [1, 1, 1, 2, 0, 7, 33, 300, 1]
        kv_lens = [0, CHUNK + 1, 64 * CHUNK, 64 * CHUNK, 5, 64 * CHUNK + 1, 10**6, 2**30, 2**31 - 1]
        requests = Requests(q_lens, kv_lens, group=group, ragged=True)
        schedule = requests.schedule(memory, latent=True)
        for index, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            most = max(LATENT_WORK_TILES // max(-(-q_len * group // ROWS), 1), 2)
            tokens = next(CHUNK << i for i in range(30) if -(-kv_len // (CHUNK << i)) <= most)
            found = span(schedule, index)
            assert (found.chunk_tokens, found.chunks) == (tokens, max(-(-kv_len // tokens), 1))
            slots = LaunchSizes(group * max(q_lens), 1, 512, max(kv_lens), 1, latent=True).slots
            assert found.chunks * requests.tiles(index) <= slots - LATENT_IN_FLIGHT

    def test_lanes_without_a_request_have_no_chunks(self, memory: Memory) -> None:
        schedule = Requests([1, 1], [5, 700]).schedule(memory)
        assert [span(schedule, index).chunks for index in (0, 1, 2, 31, 64)] == [1, 2, 0, 0, 0]

    def test_lengths_of_drafts(self, memory: Memory) -> None:
        """Offsets give the lengths, if present; without offsets, all lengths are equal."""
        for ragged, starts in ((True, [0, 3, 3]), (False, [0, 7, 14])):
            schedule = Requests([3, 0, 7], [10, 20, 30], ragged=ragged).schedule(memory)
            spans = [span(schedule, index) for index in range(3)]
            assert [s.q_start for s in spans] == starts
            assert [s.q_len for s in spans] == ([3, 0, 7] if ragged else [7, 7, 7])

    def test_other_requests_do_not_matter(self, memory: Memory) -> None:
        alone = span(Requests([1], [3000]).schedule(memory), 0)
        among = span(Requests([1, 1, 1], [9, 3000, 10**6]).schedule(memory), 1)
        assert (among.chunk_tokens, among.chunks) == (alone.chunk_tokens, alone.chunks)


def work_tiles_of(requests: Requests, schedule: SplitSchedule) -> Iterator[tuple[int, int, int, int]]:
    """Return (request, chunk, KV head, row tile) in the order of the list."""
    for index in range(len(requests.q_lens)):
        places = itertools.product(range(requests.kv_heads), range(requests.tiles(index)))
        yield from (
            (index, chunk, *place)
            for chunk, place in itertools.product(range(span(schedule, index).chunks), list(places))
        )


def use(warp: SchedulingWarp, patches: pytest.MonkeyPatch) -> None:
    warp.use(patches, split)
    patches.setattr(SplitSchedule, "_requests", SplitSchedule._requests.__wrapped__)


def published(schedule: SplitSchedule, tickets: list[int], monkeypatch: pytest.MonkeyPatch) -> list[SplitTile]:
    warp = SchedulingWarp(tickets)
    with monkeypatch.context() as patches:
        use(warp, patches)
        warp.run(lambda: SplitSchedule.publish.__wrapped__(schedule, warp))
    partials = counted_partials(schedule, monkeypatch)
    assert [event for event in warp.events if event[0] == "end"] == [("end", partials)] == warp.events[-1:]
    return warp.posted


def counted_partials(schedule: SplitSchedule, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of partials, as every lane counts them."""
    warp, counts = SchedulingWarp([]), []
    with monkeypatch.context() as patches:
        use(warp, patches)
        warp.run(lambda: counts.append(host(SplitSchedule.partials.__wrapped__(schedule))))
    (count,) = set(counts)
    return count


def place(tile: SplitTile) -> tuple[int, int, int, int]:
    return tuple(map(host, (tile.request.index, tile.chunk, tile.kv_head, tile.first_row // ROWS)))  # type: ignore[return-value]


BATCHES = [
    Requests([1], [0]),
    Requests([1], [9000], kv_heads=3, group=5),
    Requests([1] * 3, [0, 600, 512], kv_heads=2),
    # More requests than lanes, some in one chunk and some in more; the last lanes of a warp have none.
    Requests([1] * 70, [random.Random(i).choice((0, 5, 511, 513)) for i in range(70)], group=3),
    Requests(
        [7, 0, 33, 20] + [1] * 31, [1100, 40, 33, 9000] + [7, 600] * 15 + [0], 4, ragged=True, kind=MaskKind.DRAFT
    ),
    Requests([20] * 3, [3000, 100, 1500], group=8, kind=MaskKind.DRAFT, window=900),
]


@exact
@pytest.mark.parametrize("requests", BATCHES, ids=range(len(BATCHES)))
@pytest.mark.parametrize("ctas", [1, 3])
def test_work_tiles_and_partials(
    requests: Requests, ctas: int, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every work tile comes once, in the order of the list; partials have consecutive numbers in that order."""
    schedule = requests.schedule(memory)
    topk = list(work_tiles_of(requests, schedule))
    total = len(topk)
    drawn: list[list[int]] = [[] for _ in range(ctas)]
    for ticket in range(total + ctas):
        drawn[ticket % ctas].append(ticket)
    by_ticket = {}
    for tickets in drawn:
        tiles = published(schedule, tickets, monkeypatch)
        assert len(tiles) == len(tickets) - 1, "one ticket more than there is work for says so"
        by_ticket |= dict(zip(tickets, tiles, strict=False))
    assert [place(by_ticket[ticket]) for ticket in range(total)] == topk

    number = 0
    for ticket, (index, chunk, kv_head, row_tile) in enumerate(topk):
        of_chunk = requests.kv_heads * requests.tiles(index)
        tile, chunks = by_ticket[ticket], span(schedule, index).chunks
        assert (host(tile.chunks), host(tile.tiles_of_chunk)) == (chunks, of_chunk)
        assert host(tile.kind) >= 0, "a tile that seems to be the end"
        if chunks == 1:
            continue
        rows = kv_head * requests.tiles(index) + row_tile
        start = number - chunk * of_chunk - rows  # the request's first partial
        assert host(tile.partial_id) == number
        assert host(tile.first_partial) == start + rows
        assert host(tile.fan_in_partial) == start + rows + chunk // FAN_IN * FAN_IN * of_chunk
        number += 1
    assert counted_partials(schedule, monkeypatch) == number


@exact
@pytest.mark.parametrize(("kind", "window"), MASKS)
@pytest.mark.parametrize("tile_n", [32, 64, 128])
def test_chunks_share_out_the_keys(tile_n: int, kind: MaskKind, window: int, memory: Memory) -> None:
    """Each visible key of a row is in one chunk, and tiles without the predicate have no hidden key."""
    draw = random.Random(tile_n)
    q_lens, group = [1, 5, 37, 20, 0, 9], 4
    if kind is MaskKind.SLIDING_WINDOW:
        q_lens, group = [1] * 6, 80
    requests = Requests(
        q_lens, [0, 3, 513, 1029, 700, 4096], group, ragged=True, kind=kind, window=window, tile_n=tile_n
    )
    schedule = requests.schedule(memory)
    for index, row_tile in ((i, tile) for i in range(len(q_lens)) for tile in range(requests.tiles(i))):
        rows = range(row_tile * ROWS, min((row_tile + 1) * ROWS, q_lens[index] * group))
        seen = [set(requests.visible(index, row)) for row in draw.sample(rows, min(len(rows), 3))] + (
            [set(requests.visible(index, row)) for row in (rows[0], rows[-1])] if rows else []
        )
        found = span(schedule, index)
        tiles: list[int] = []
        for chunk in range(found.chunks):
            work_tile = chunk * requests.tiles(index) + row_tile
            tile = schedule._tile(RequestSpan(*map(Int32, vars(found).values())), Int32(work_tile), Int32(0))
            keys = {f.name: host(getattr(tile.keys, f.name)) for f in fields(tile.keys)}
            assert keys["begin"] <= keys["full_begin"] <= keys["full_end"] <= keys["end"]
            assert keys["begin"] == keys["end"] or keys["full_end"] < keys["end"], "the last tile has the predicate"
            begin = (found.first_chunk + chunk) * found.chunk_tokens
            mine = range(keys["begin"], keys["end"])
            assert all(begin <= n * tile_n < begin + found.chunk_tokens for n in mine), "not of this chunk"
            tiles += mine
            whole = range(keys["full_begin"] * tile_n, keys["full_end"] * tile_n)
            first_new = max(requests.kv_lens[index] - q_lens[index], 0)
            assert all(set(whole) <= one for one in seen)
            assert kind is not MaskKind.DRAFT or whole.stop <= max(first_new, whole.start), "drafts have bits"
            if seen and kind is not MaskKind.FULL and mine:
                assert keys["first_key"] <= min(min(one, default=2**31) for one in seen)
        assert len(set(tiles)) == len(tiles)
        assert {key // tile_n for one in seen for key in one} <= set(tiles)


class SlotTakenError(Exception):
    """A slot is not free; the host would poll forever."""


class TestSlots:
    """Partials that must be combined before a new one may be written.

    They are the partials in its own slot, and in the slots that count for its fan-in group or request. An earlier
    request may still count in those slots.
    """

    SLOTS, CHUNKS, OF_CHUNK = 50, 20, 2

    @pytest.fixture
    def epochs(self, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
        """Return the epochs of the slots."""
        found = dict.fromkeys(range(self.SLOTS), 2)
        first = 4 * (TICKETS + EPOCH * self.SLOTS)

        def load(address: Any) -> Int32:
            return Int32(found[(host(address) - first) // 4])

        def refuse(slots: Slots, partials: Any) -> None:
            if host(slots._missing(partials)):
                raise SlotTakenError

        monkeypatch.setattr(partial, "load_relaxed", load)
        monkeypatch.setattr(Slots, "wait_free", refuse)
        monkeypatch.setattr(cute.arch, "thread_idx", lambda: (Int32(128), 0, 0))
        monkeypatch.setattr(cute.arch, "sync_warp", lambda: None)
        return found

    def prepare(self, chunk: int, base: int = 2 * SLOTS, chunks: int = CHUNKS) -> None:
        """Prepare for the partial of the second row tile in a request whose partials begin at ``base``."""
        slots = Slots(Int64(0), Int64(0), Int32(self.SLOTS), Int32(8), 64, 4)
        first = base + 1
        fan_in_group = first + chunk // FAN_IN * FAN_IN * self.OF_CHUNK
        numbers = dict(
            partial_id=first + chunk * self.OF_CHUNK, first_partial=first, fan_in_partial=fan_in_group, chunks=chunks
        )
        tile = SimpleNamespace(**{name: Int32(number) for name, number in numbers.items()})
        Combine.prepare.__wrapped__(Combine(slots, 128, 128, 7), tile)

    @pytest.mark.parametrize("chunk", [0, 1, 15, 16, 19])
    def test_each_has_to_be_free(self, chunk: int, epochs: dict[int, int]) -> None:
        self.prepare(chunk)
        own, first, fan_in_group = 1 + chunk * self.OF_CHUNK, 1, 1 + chunk // FAN_IN * FAN_IN * self.OF_CHUNK
        for slot in epochs:
            epochs[slot] = 1
            if slot in (own, first, fan_in_group):
                with pytest.raises(SlotTakenError):
                    self.prepare(chunk)
            else:
                self.prepare(chunk)
            epochs[slot] = 2

    def test_the_first_epoch_is_free(self, epochs: dict[int, int]) -> None:
        epochs.clear()  # no epoch may be read
        self.prepare(3, base=0)

    def test_requests_in_one_chunk_have_no_partials(self, epochs: dict[int, int]) -> None:
        epochs.clear()
        self.prepare(0, chunks=1)


# Shifts drop bits by intent.
@pytest.mark.filterwarnings("ignore::cutlass.base_dsl.common.DSLWarning")
class TestDrafts:
    """The predicate of drafts against their bits, read one by one."""

    TILE_N = 64

    @pytest.fixture
    def lane(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        current = {"lane": 0}
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: Int32(current["lane"]))
        return current

    @pytest.mark.parametrize("window", [0, 3, 40, WIDEST])
    @pytest.mark.parametrize("q_len", [1, 2, 16, 31, 32, 33, 63, 64, 65, 100])
    def test_bits(self, q_len: int, window: int, lane: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
        draw = random.Random(q_len)
        words = -(-q_len // 32)
        # Bits at and past q_len are arbitrary.
        bits = [draw.getrandbits(32 * words) for _ in range(q_len)]
        halves = [value >> 16 * i & 0xFFFF for value in bits for i in range(2 * words)]
        monkeypatch.setattr(
            mask_module, "global_array", lambda dtype, address: Halves(dtype, halves, host(address) - MASK_ADDRESS)
        )
        device = DraftMask(MaskKind.DRAFT, Int32(window))
        monkeypatch.setattr(DraftRow, "word", DraftRow.word.__wrapped__)
        for kv_len in (q_len, q_len + 1, q_len + 31, q_len + 70, q_len + 1000, max(q_len - 3, 0)):
            first = kv_len - q_len
            tokens = [draw.randrange(q_len) for _ in range(2)]
            addresses = tuple(Int64(MASK_ADDRESS + 4 * words * token) for token in tokens)
            positions = tuple(Int32(first + token) for token in tokens)
            row = DraftRow(positions, Int32(kv_len), 0.0, Int32(first), Int32(q_len), addresses)
            for tile in range(max(first // self.TILE_N - 1, 0), -(-kv_len // self.TILE_N)):
                lane["lane"] = draw.randrange(32)
                scores = Scores(self.TILE_N // RowFragment.lanes_per_row)
                DraftMask.apply.__wrapped__(device, scores, Int32(tile * self.TILE_N), row)
                for (r, c), value in scores.values.items():
                    key = tile * self.TILE_N + host(RowFragment.first_column()) + RowFragment.column_offset(c)
                    shown = first + tokens[r] - window <= key < kv_len
                    if key >= first:
                        shown = shown and bool(bits[tokens[r]] >> (key - first) & 1)
                    assert (value == 1.0) == shown, (kv_len, tokens[r], key)

    @pytest.mark.parametrize("q_len", [1, 2, 33, 100])
    def test_without_bits_drafts_are_causal(
        self, q_len: int, lane: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(DraftRow, "word", DraftRow.word.__wrapped__)
        device = DraftMask(MaskKind.DRAFT, Int32(WIDEST))
        for kv_len, token in itertools.product((q_len, q_len + 70, max(q_len - 3, 0)), (0, q_len // 2, q_len - 1)):
            position = kv_len - q_len + token
            row = DraftRow((Int32(position),) * 2, Int32(kv_len), 0.0, Int32(kv_len - q_len), Int32(q_len), (0, 0))
            for tile in range(-(-kv_len // self.TILE_N)):
                scores = Scores(self.TILE_N // RowFragment.lanes_per_row)
                DraftMask.apply.__wrapped__(device, scores, Int32(tile * self.TILE_N), row)
                for (_, c), value in scores.values.items():
                    key = tile * self.TILE_N + host(RowFragment.first_column()) + RowFragment.column_offset(c)
                    assert (value == 1.0) == (key <= position), (kv_len, token, key)


@dataclass
class Halves:
    """16-bit elements at an address; no other element may be read."""

    dtype: Any
    values: list[int]
    address: int

    def __getitem__(self, index: Any) -> Any:
        place = self.address // 2 + host(index)
        assert self.address % 2 == 0
        assert 0 <= place < len(self.values), "a word of nobody is read"
        return self.dtype(self.values[place])
