"""How the keys of all requests are cut into equal portions for the CTAs of MLA: device code, on the host."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32
from helpers.lane_threads import SchedulingWarp, device_tuple, host

from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.masks import WIDEST
from hopwell.kernels.parts import device, portions, split
from hopwell.kernels.parts.device import Divisor
from hopwell.kernels.parts.mask import IntervalMask
from hopwell.kernels.parts.portions import ListPortionSchedule, PortionSchedule, PortionSpan, portion_size
from hopwell.kernels.parts.split import SplitTile, TokenLists, UnitKeeper
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.splitting import FRACTIONS, ROWS, SNAP_STEPS, slot_count
from hopwell.kernels.splitting import portions as count_portions
from tests.kernels.test_kernels_scheduler import Memory

pytestmark = pytest.mark.traced

STEP = 128  # keys


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(split, "load_int", memory.load_int)
    monkeypatch.setattr(cutlass, "range", lambda *bounds, unroll: range(*map(host, bounds)))
    monkeypatch.setattr(device, "tied", lambda value, _: value)
    monkeypatch.setattr(split, "bit_length", lambda value: host(value).bit_length())
    for name in ("_request_of", "_listed_token"):
        monkeypatch.setattr(TokenLists, name, getattr(TokenLists, name).__wrapped__)
    monkeypatch.setattr(portions, "portion_size", portion_size.__wrapped__)
    monkeypatch.setattr(PortionSpan, "begin", PortionSpan.begin.__wrapped__)
    for name in ("_portion_size", "_portion_span"):
        monkeypatch.setattr(PortionSchedule, name, getattr(PortionSchedule, name).__wrapped__)
    return memory


@dataclass
class Batch:
    """A batch as the host sees it, and the multiprocessors that it runs on."""

    kv_lens: list[int]
    q_lens: list[int]
    group: int = 128
    ctas: int = 132
    listed: int = 0
    padding: int = 0  # tokens behind those of the last request

    @property
    def row_tiles(self) -> int:
        return -(-self.group * (1 if self.listed else max(self.q_lens)) // ROWS)

    def schedule(self, memory: Memory) -> PortionSchedule:
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        a = device_tuple(Addresses, kv_lens=memory.put(self.kv_lens), q_offsets=memory.put(starts))
        sizes = dict(kv_heads=1, batch=len(self.kv_lens), group=self.group, capacity=2**31 - 1)
        sizes |= dict(tokens=sum(self.q_lens) + self.padding)
        sizes |= dict(q_len=max(self.q_lens), row_tiles=self.row_tiles, listed=self.listed, grid=self.ctas)
        sizes |= dict(portions=count_portions(self.row_tiles, self.ctas))
        g = device_tuple(DecodeGeometry, **sizes)
        kind = ListPortionSchedule if self.listed else PortionSchedule
        return kind(g, a, IntervalMask(MaskKind.FULL, Int32(WIDEST)), ROWS, STEP, 0, False, UnitKeeper())

    def tiles(self, index: int) -> int:
        """Count the row tiles of a request, or of a token with a list."""
        return -(-self.group * (1 if self.listed else self.q_lens[index]) // ROWS)

    def items(self) -> Iterator[tuple[int, int]]:
        """Return (index, keys) of every request with new tokens, or of every token with a list, in order."""
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        for request, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            if not self.listed:
                yield from [(request, kv_len)] * (q_len > 0)
            else:
                for token in range(q_len):
                    yield starts[request] + token, max(min(kv_len - q_len + token + 1, self.listed), 0)


class PortionWarp(SchedulingWarp):
    """A scheduling warp whose lanes also reduce, and look for set bits."""

    def use(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        monkeypatch.setattr(module, "draw_ticket", None, raising=False)
        super().use(monkeypatch, module)

        for name, function in (
            ("warp_reduction_sum", lambda value: Int32(sum(map(host, self.exchange(value))))),
            ("warp_reduction_max", lambda value: Int32(max(map(host, self.exchange(value))))),
            ("popc", lambda bits: Int32((host(bits) & 0xFFFFFFFF).bit_count())),
        ):
            monkeypatch.setattr(cute.arch, name, function)
        monkeypatch.setattr(module, "trailing_zeros", lambda v: Int32((host(v) & -host(v)).bit_length() - 1))


def posted(schedule: PortionSchedule, cta: int, monkeypatch: pytest.MonkeyPatch) -> list[SplitTile]:
    """Return the units of a CTA, after which it gets those that are pieces again, without keys, in the same order."""
    warp = PortionWarp([])
    with monkeypatch.context() as patches:
        warp.use(patches, portions)
        patches.setattr(cute.arch, "block_idx", lambda: (Int32(cta), 0, 0))
        warp.run(lambda: PortionSchedule.publish.__wrapped__(schedule, warp))
    units = [tile for tile in warp.posted if host(tile.is_unit)]
    merged = warp.posted[len(units) :]
    assert not any(host(tile.is_unit) for tile in merged)
    assert all(host(tile.exists) and host(tile.keys.begin) == host(tile.keys.end) for tile in merged)
    assert [part_of(tile) for tile in merged] == [part_of(unit) for unit in units if host(unit.chunks) > 1]
    return units


def part_of(tile: SplitTile) -> list[int]:
    """Return what merging has to know of a piece."""
    numbers = (tile.request.o_start, tile.request.q_len, tile.first_row, tile.chunk, tile.chunks, tile.first_piece)
    return [host(number) for number in numbers]


def ragged(seed: int, batch: int, most: int) -> Batch:
    draw = random.Random(seed)
    return Batch(
        [draw.choice((0, 1, 127, 128, 129, draw.randint(1, most))) for _ in range(batch)], [1] * batch, ctas=12
    )


BATCHES = {
    "one": Batch([1024], [1], ctas=20),
    "empty": Batch([0, 0], [1, 0], ctas=8),
    "equal": Batch([8192] * 8, [1] * 8, ctas=34),
    "whole": Batch([512] * 16, [1] * 16, ctas=34),
    "ragged": ragged(0, 37, 3000),
    "long among short": Batch([100_000, *[200] * 6], [1] * 7, ctas=26),
    "new tokens": Batch([900, 3000, 7, 0, 640], [3, 1, 0, 2, 4], ctas=35),
    "few CTAs": Batch([900, 3000], [5, 1], ctas=4),
    "lists": Batch([900, 9000, 5, 3000], [2, 3, 1, 0], ctas=16, listed=640),
    "lists of many": Batch([70] * 40, [i % 3 for i in range(40)], ctas=16, listed=640, padding=5),
}


# Units by their steps where all requests are of one length, and chunks too: halves, whole requests, single steps.
EVENLY_CUT = {"equal": {32: 32}, "whole": {4: 32}, "one": {1: 16}}
assert EVENLY_CUT.keys() <= BATCHES.keys()


@pytest.mark.parametrize("name", BATCHES)
def test_every_step_is_in_one_unit(name: str, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units hold every step of every request once for each tile of its own rows, in order; pieces have slots of their
    own. Requests of one length are cut into chunks of one length, or not at all, where CTAs get little more by that."""
    batch = BATCHES[name]
    schedule = batch.schedule(memory)
    units = [unit for cta in range(batch.ctas) for unit in posted(schedule, cta, monkeypatch)]
    found: dict[tuple[int, int], list[SplitTile]] = {}
    for unit in units:
        found.setdefault((host(unit.request.index), host(unit.first_row) // ROWS), []).append(unit)
    numbered, of_chunk = [], batch.row_tiles
    for index, keys, row_tile in ((*item, tile) for item in batch.items() for tile in range(batch.tiles(item[0]))):
        chunks = sorted(found.pop((index, row_tile)), key=lambda unit: host(unit.chunk))
        assert [host(unit.chunk) for unit in chunks] == list(range(len(chunks)))
        assert {host(unit.chunks) for unit in chunks} == {len(chunks)}
        assert {host(unit.request.kv_len) for unit in chunks} == {keys}
        assert [n for unit in chunks for n in range(host(unit.keys.begin), host(unit.keys.end))] == [
            *range(-(-keys // STEP))
        ]
        if len(chunks) > 1:
            first = host(chunks[0].first_piece)
            assert [host(unit.piece) for unit in chunks] == [first + 2 * i * of_chunk for i in range(len(chunks))]
            numbered += [host(unit.piece) for unit in chunks]
    assert not found
    if name in EVENLY_CUT:
        assert Counter(host(unit.keys.end) - host(unit.keys.begin) for unit in units) == EVENLY_CUT[name]
    assert len(set(numbered)) == len(numbered)
    assert not numbered or 0 <= min(numbered) <= max(numbered) < 2 * count_portions(of_chunk, batch.ctas) * of_chunk


def test_portions_are_equal(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CTA has more than a portion and what cuts are moved by, however requests differ."""
    batch = ragged(1, 50, 6000)
    schedule, total = batch.schedule(memory), sum(max(-(-keys // STEP), 1) + 1 for keys in batch.kv_lens)
    limit = -(-total // (batch.ctas // batch.row_tiles)) * 17 / 16 + 2 * SNAP_STEPS + 1
    for cta in range(batch.ctas):
        units = posted(schedule, cta, monkeypatch)
        assert sum(host(unit.keys.end) - host(unit.keys.begin) for unit in units) <= limit


@pytest.mark.parametrize("ctas", [1, 4, 78, 132, 148])
def test_every_piece_has_a_slot(ctas: int) -> None:
    """Nobody waits for a slot, and most CTAs have work, however many row tiles there are."""
    for row_tiles in range(1, 4 * ctas):
        places = count_portions(row_tiles, ctas) * row_tiles
        assert places == row_tiles or 2 * places <= slot_count(row_tiles * ROWS, 1, 512, 1, ctas, True, True)
        assert places >= 0.49 * -(-places // ctas) * ctas


def test_size_of_a_portion(memory: Memory) -> None:
    def size(steps: int, longest: int, count: int) -> int:
        fractions = (Int32(steps * FRACTIONS), Int32(longest * FRACTIONS))
        return host(portion_size.__wrapped__(*fractions, Divisor.of(Int32(count))))

    assert size(100, 100, 10) == 10 * FRACTIONS
    assert size(97, 100, 10) == 10 * FRACTIONS, "a tenth of the longest"
    assert size(220, 30, 10) == 22 * FRACTIONS, "a whole one is much larger"
    assert size(60, 6, 10) == size(59, 6, 10) == 6 * FRACTIONS
    assert size(3, 3, 66) == FRACTIONS, "a step at least"
    assert size(72, 9, 66) == 72 * FRACTIONS // 32, "two steps at least where there is more than one for each"
    assert size(67, 67, 66) == -(-67 * FRACTIONS // 33)
