"""What a warp writes: every element of its valid rows once and nothing else, whatever the output's width."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest

from hopwell.kernels.config import shipped_configs
from hopwell.kernels.parts import copy, epilogue
from hopwell.kernels.parts.epilogue import STAGING_BYTES, WARP_ROWS, LseRows, OutputRows, StatisticsRows
from hopwell.kernels.parts.fragment import RowFragment

pytestmark = pytest.mark.traced

# Columns of the output that a warp writes, and those that it holds.
WIDTHS = sorted({(c.head_dim_v // c.v_parts, c.depth[1]) for c in shipped_configs()})
STAGING = 5 * STAGING_BYTES  # the warp's own, among those of others


class Warp:
    """The 32 lanes of a warp as threads, which meet where the warp synchronises, and its staging.

    Between two meetings no lane may read what another one writes; a plain dict would hide such a race most of the time,
    so each word remembers the phase in which it was written or read last.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._own = threading.local()
        self._sent: list[Any] = [None] * 32
        self._meet = threading.Barrier(32, timeout=60)
        self._words: dict[int, Any] = {}
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._loads: list[list[int]] = [[] for _ in range(32)]
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: self._own.lane)
        monkeypatch.setattr(cute.arch, "sync_warp", self._sync)
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(copy, "store_matrix_x4", self._store_matrices)
        monkeypatch.setattr(copy, "load_shared_x4", self._load)

    def _sync(self) -> None:
        self._own.phase += 1
        self._meet.wait()

    def _store_matrices(self, address: int, words: list[Any]) -> None:
        """A lane's i-th word belongs to row lane // 4 of the i-th matrix, whose row addresses lanes 8 i ... give."""
        assert address % copy.CHUNK_BYTES == 0
        lane = self._own.lane
        self._sent[lane] = address
        self._meet.wait()
        for i, word in enumerate(words):
            of_matrix = self._sent[8 * i : 8 * i + 8]
            assert_no_bank_conflict(of_matrix)
            place = of_matrix[lane // 4] + 4 * (lane % 4)
            assert STAGING <= place < STAGING + STAGING_BYTES
            assert self._read.get(place) != self._own.phase, "overwritten while it is read"
            self._words[place], self._written[place] = word, self._own.phase
        self._meet.wait()

    def _load(self, address: int) -> list[Any]:
        assert address % copy.CHUNK_BYTES == 0
        assert STAGING <= address < STAGING + STAGING_BYTES
        self._loads[self._own.lane].append(address)
        places = [address + 4 * i for i in range(4)]
        for place in places:
            assert self._written.get(place) != self._own.phase, "read while it is written"
            self._read[place] = self._own.phase
        return [self._words[place] for place in places]

    def run(self, work: Callable[[], None]) -> None:
        """``work`` in every lane."""
        errors: list[BaseException] = []

        def of_lane(lane: int) -> None:
            self._own.lane, self._own.phase = lane, 0
            try:
                work()
            except BaseException as error:
                errors.append(error)
                self._meet.abort()

        threads = [threading.Thread(target=of_lane, args=(lane,)) for lane in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A lane that fails takes the others along; its own error says why.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        # 16-byte accesses are served eight lanes at a time.
        for addresses in zip(*self._loads, strict=True):
            for first in range(0, 32, 8):
                assert_no_bank_conflict(addresses[first : first + 8])


def assert_no_bank_conflict(addresses: Sequence[int]) -> None:
    """Of eight lanes' chunks of 16 bytes those that differ lie in different ones of the 32 banks."""
    assert len(addresses) == 8
    assert len({address % 128 for address in addresses}) == len(set(addresses))


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    return Warp(monkeypatch)


@pytest.mark.parametrize("count", [1, 9, 16, 100])
@pytest.mark.parametrize(("columns", "held"), WIDTHS)
def test_rows_are_written_once(
    columns: int, held: int, count: int, warp: Warp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements are numbered; a row's factor depends on the row. 16 bytes go out at a time, aligned."""
    stored: list[tuple[int, list[tuple[float, float]]]] = []
    monkeypatch.setattr(copy, "pack_x2", lambda dtype, low, high: (low, high))
    monkeypatch.setattr(copy, "store_global_x4", lambda address, words: stored.append((address, words)))
    first_row, row_bytes = (0 if count < 100 else 48), 2 * (columns + 24)
    bases = (1 << 20, 2 << 20)  # of two tiles, one after the other through the same staging

    def value(row: int, column: int) -> float:
        return 1000.0 * row + column

    def work() -> None:
        per_row = held // RowFragment.lanes_per_row
        registers = [math.nan] * (RowFragment.rows * per_row)
        rows = [RowFragment.first_row() + RowFragment.row_offset(r) for r in range(RowFragment.rows)]
        for r, c in itertools.product(range(RowFragment.rows), range(per_row)):
            column = RowFragment.first_column() + RowFragment.column_offset(c)
            registers[RowFragment.index(r, c)] = value(rows[r], column)
        fragment = RowFragment(registers, per_row)
        for tile in bases:
            rows_out = OutputRows(tile, row_bytes, count, columns)
            OutputRows.store.__wrapped__(rows_out, fragment, [2.0**row for row in rows], STAGING, first_row, "dtype")

    warp.run(work)
    found = {}
    for address, words in stored:
        assert address % copy.CHUNK_BYTES == 0
        for i, element in enumerate(itertools.chain(*words)):
            assert address + 2 * i not in found, "written twice"
            found[address + 2 * i] = element
    valid = [row for row in range(WARP_ROWS) if first_row + row < count]
    assert found == {
        base + (first_row + row) * row_bytes + 2 * column: value(row, column) * 2.0**row
        for base, row, column in itertools.product(bases, valid, range(columns))
    }


class Memory(dict[int, float]):
    """Float32 elements by their number."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, Memory]:
    """Arrays by address."""
    arrays: dict[int, Memory] = {}
    monkeypatch.setattr(epilogue, "global_array", lambda dtype, address: arrays.setdefault(address, Memory()))
    return arrays


def test_statistics(memory: dict[int, Memory]) -> None:
    """A pair for each row and head; rows past the request's end belong to another one."""
    rows = StatisticsRows(address=4096, first=30, row=6, count=3)
    for row in range(5):
        StatisticsRows.store.__wrapped__(rows, row, 10.0 + row, 20.0 + row)
    assert memory == {4096: {60: 10.0, 61: 20.0, 72: 11.0, 73: 21.0, 84: 12.0, 85: 22.0}}


@pytest.mark.parametrize("natural", [0, 1])
def test_log_sum_exp(natural: int, memory: dict[int, Memory]) -> None:
    rows = LseRows(address=4096, offset=7, row=4, natural=natural, count=2)
    for row in range(4):
        LseRows.store.__wrapped__(rows, row, 1.0 + row)
    assert memory[4096] == pytest.approx(
        {7: math.log(2) if natural else 1.0, 11: 2 * (math.log(2) if natural else 1.0)}
    )
    assert list(memory) == [4096]


def test_nothing_is_written_without_a_tensor(memory: dict[int, Memory]) -> None:
    StatisticsRows.store.__wrapped__(StatisticsRows(address=0, first=0, row=1, count=9), 0, 1.0, 1.0)
    LseRows.store.__wrapped__(LseRows(address=0, offset=0, row=1, natural=1, count=9), 0, 1.0)
    assert not memory
