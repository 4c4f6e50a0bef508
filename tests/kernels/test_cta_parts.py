"""MLA's partition of the keys of all requests into equal CTA parts: device code, on the host."""

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
from helpers.host.warps import SchedulingWarp, device_tuple, host

from hopwell.kernels.config.splitting import FRACTIONS, ROWS, SNAP_STEPS, LaunchSizes
from hopwell.kernels.config.splitting import cta_parts as parts_of_tiles
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.masks import WIDEST
from hopwell.kernels.parts.core import device
from hopwell.kernels.parts.core.device import Divisor
from hopwell.kernels.parts.partition import cta_parts as cta_parts
from hopwell.kernels.parts.partition import split_kv as split
from hopwell.kernels.parts.partition.cta_parts import CtaPartSchedule, CtaPartSpan, TopkCtaPartSchedule, cta_part_size
from hopwell.kernels.parts.partition.split_kv import ScheduleHooks, SplitTile, TopkTokens
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.problem import MaskKind
from tests.kernels.test_scheduler import Memory

pytestmark = pytest.mark.traced

STEP = 128  # keys


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr(split, "load_int", memory.load_int)
    monkeypatch.setattr(cutlass, "range", lambda *bounds, unroll: range(*map(host, bounds)))
    monkeypatch.setattr(device, "tied", lambda value, _: value)
    monkeypatch.setattr(split, "bit_length", lambda value: host(value).bit_length())
    for name in ("_request_of", "_topk_token"):
        monkeypatch.setattr(TopkTokens, name, getattr(TopkTokens, name).__wrapped__)
    monkeypatch.setattr(cta_parts, "cta_part_size", cta_part_size.__wrapped__)
    monkeypatch.setattr(CtaPartSpan, "begin", CtaPartSpan.begin.__wrapped__)
    for name in ("_cta_part_size", "_cta_part_span"):
        monkeypatch.setattr(CtaPartSchedule, name, getattr(CtaPartSchedule, name).__wrapped__)
    return memory


@dataclass
class Batch:
    """A batch as the host sees it, and the number of SMs that it runs on."""

    kv_lens: list[int]
    q_lens: list[int]
    group: int = 128
    ctas: int = 132
    topk: int = 0
    padding: int = 0  # tokens after the last request's tokens

    @property
    def row_tiles(self) -> int:
        return -(-self.group * (1 if self.topk else max(self.q_lens)) // ROWS)

    def schedule(self, memory: Memory) -> CtaPartSchedule:
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        a = device_tuple(Addresses, kv_lens=memory.put(self.kv_lens), q_offsets=memory.put(starts))
        sizes = dict(kv_heads=1, batch=len(self.kv_lens), group=self.group, capacity=2**31 - 1)
        sizes |= dict(tokens=sum(self.q_lens) + self.padding)
        sizes |= dict(q_len=max(self.q_lens), row_tiles=self.row_tiles, topk=self.topk, grid=self.ctas)
        sizes |= dict(cta_parts=parts_of_tiles(self.row_tiles, self.ctas))
        g = device_tuple(DecodeGeometry, **sizes)
        kind = TopkCtaPartSchedule if self.topk else CtaPartSchedule
        return kind(g, a, IntervalMask(MaskKind.FULL, Int32(WIDEST)), ROWS, STEP, ScheduleHooks())

    def tiles(self, index: int) -> int:
        """Return the row tiles of a request, or of a token with top-k indices."""
        return -(-self.group * (1 if self.topk else self.q_lens[index]) // ROWS)

    def items(self) -> Iterator[tuple[int, int]]:
        """Yield (index, keys) of every request with new tokens, or of every token with top-k indices, in order."""
        starts = list(itertools.accumulate(self.q_lens, initial=0))
        for request, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            if not self.topk:
                yield from [(request, kv_len)] * (q_len > 0)
            else:
                for token in range(q_len):
                    yield starts[request] + token, max(min(kv_len - q_len + token + 1, self.topk), 0)


class CtaPartWarp(SchedulingWarp):
    """A scheduling warp whose lanes also reduce, and search for set bits."""

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


def posted(schedule: CtaPartSchedule, cta: int, monkeypatch: pytest.MonkeyPatch) -> list[SplitTile]:
    """Return the work tiles of a CTA.

    The CTA then gets its partials again, without keys, in the same order.
    """
    warp = CtaPartWarp([])
    with monkeypatch.context() as patches:
        warp.use(patches, cta_parts)
        patches.setattr(cute.arch, "block_idx", lambda: (Int32(cta), 0, 0))
        warp.run(lambda: CtaPartSchedule.publish.__wrapped__(schedule, warp))
    work_tiles = [tile for tile in warp.posted if host(tile.is_work_tile)]
    combined = warp.posted[len(work_tiles) :]
    assert not any(host(tile.is_work_tile) for tile in combined)
    assert all(host(tile.exists) and host(tile.keys.begin) == host(tile.keys.end) for tile in combined)
    assert [part_of(tile) for tile in combined] == [
        part_of(work_tile) for work_tile in work_tiles if host(work_tile.chunks) > 1
    ]
    return work_tiles


def part_of(tile: SplitTile) -> list[int]:
    """Return the fields of a partial that the combine needs."""
    numbers = (tile.request.o_start, tile.request.q_len, tile.first_row, tile.chunk, tile.chunks, tile.first_partial)
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
    "topk_indices": Batch([900, 9000, 5, 3000], [2, 3, 1, 0], ctas=16, topk=640),
    "lists of many": Batch([70] * 40, [i % 3 for i in range(40)], ctas=16, topk=640, padding=5),
}


# Work tiles by their steps for requests and chunks of one length: halves, whole requests, single steps.
EVENLY_CUT = {"equal": {32: 32}, "whole": {4: 32}, "one": {1: 16}}
assert EVENLY_CUT.keys() <= BATCHES.keys()


@pytest.mark.parametrize("name", BATCHES)
def test_every_step_is_in_one_work_tile(name: str, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work tiles hold every step of every request once for each of its row tiles, in order.

    Partials have slots of their own. Requests of one length are split into chunks of one length, or not at all, if this
    gives CTAs little extra work.
    """
    batch = BATCHES[name]
    schedule = batch.schedule(memory)
    work_tiles = [work_tile for cta in range(batch.ctas) for work_tile in posted(schedule, cta, monkeypatch)]
    found: dict[tuple[int, int], list[SplitTile]] = {}
    for work_tile in work_tiles:
        found.setdefault((host(work_tile.request.index), host(work_tile.first_row) // ROWS), []).append(work_tile)
    numbered, of_chunk = [], batch.row_tiles
    for index, keys, row_tile in ((*item, tile) for item in batch.items() for tile in range(batch.tiles(item[0]))):
        chunks = sorted(found.pop((index, row_tile)), key=lambda work_tile: host(work_tile.chunk))
        assert [host(work_tile.chunk) for work_tile in chunks] == list(range(len(chunks)))
        assert {host(work_tile.chunks) for work_tile in chunks} == {len(chunks)}
        assert {host(work_tile.request.kv_len) for work_tile in chunks} == {keys}
        assert [n for work_tile in chunks for n in range(host(work_tile.keys.begin), host(work_tile.keys.end))] == [
            *range(-(-keys // STEP))
        ]
        if len(chunks) > 1:
            first = host(chunks[0].first_partial)
            assert [host(work_tile.partial_id) for work_tile in chunks] == [
                first + 2 * i * of_chunk for i in range(len(chunks))
            ]
            numbered += [host(work_tile.partial_id) for work_tile in chunks]
    assert not found
    if name in EVENLY_CUT:
        assert (
            Counter(host(work_tile.keys.end) - host(work_tile.keys.begin) for work_tile in work_tiles)
            == EVENLY_CUT[name]
        )
    assert len(set(numbered)) == len(numbered)
    assert not numbered or 0 <= min(numbered) <= max(numbered) < 2 * parts_of_tiles(of_chunk, batch.ctas) * of_chunk


def test_cta_parts_are_equal(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CTA exceeds an equal CTA part plus the shift of the cuts, for any mix of requests."""
    batch = ragged(1, 50, 6000)
    schedule, total = batch.schedule(memory), sum(max(-(-keys // STEP), 1) + 1 for keys in batch.kv_lens)
    limit = -(-total // (batch.ctas // batch.row_tiles)) * 17 / 16 + 2 * SNAP_STEPS + 1
    for cta in range(batch.ctas):
        work_tiles = posted(schedule, cta, monkeypatch)
        assert sum(host(work_tile.keys.end) - host(work_tile.keys.begin) for work_tile in work_tiles) <= limit


@pytest.mark.parametrize("ctas", [1, 4, 78, 132, 148])
def test_every_partial_has_a_slot(ctas: int) -> None:
    """No partial waits for a slot, and most CTAs have work, for any number of row tiles."""
    for row_tiles in range(1, 4 * ctas):
        places = parts_of_tiles(row_tiles, ctas) * row_tiles
        assert places == row_tiles or 2 * places <= LaunchSizes(row_tiles * ROWS, 1, 512, 1, ctas, True, True).slots
        assert places >= 0.49 * -(-places // ctas) * ctas


def test_size_of_a_cta_part(memory: Memory) -> None:
    def size(steps: int, longest: int, count: int) -> int:
        fractions = (Int32(steps * FRACTIONS), Int32(longest * FRACTIONS))
        return host(cta_part_size.__wrapped__(*fractions, Divisor.of(Int32(count))))

    assert size(100, 100, 10) == 10 * FRACTIONS
    assert size(97, 100, 10) == 10 * FRACTIONS, "a tenth of the longest"
    assert size(220, 30, 10) == 22 * FRACTIONS, "a whole one is much larger"
    assert size(60, 6, 10) == size(59, 6, 10) == 6 * FRACTIONS
    assert size(3, 3, 66) == FRACTIONS, "a step at least"
    assert size(72, 9, 66) == 72 * FRACTIONS // 32, "two steps at least where there is more than one for each"
    assert size(67, 67, 66) == -(-67 * FRACTIONS // 33)
