"""The stores of a warp: every element of its valid rows once and nothing else, for any output width."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Float8E4M3FN
from helpers.host import arithmetic
from helpers.host.arithmetic import number
from helpers.host.warps import Lanes

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.fragment import LaneRow, RowFragment, SplitRowFragment
from hopwell.kernels.parts.rows import epilogue
from hopwell.kernels.parts.rows.epilogue import (
    STAGING_BYTES,
    ConvertedRows,
    E4m3Rows,
    LseRows,
    OutputRows,
    RowResults,
    StatisticsRows,
)
from hopwell.kernels.parts.rows.query_rows import QueryRows
from hopwell.kernels.registry import shipped_configs

pytestmark = pytest.mark.traced

# The output columns that a warp writes, and the columns that it holds at a time.
WIDTHS = sorted({(c.head_dim_v // c.v_splits, c.layout.depth[1]) for c in shipped_configs()})
CASES = [(RowFragment, *width) for width in WIDTHS]
# Rows that are staged as float32: whole passes of 32 columns, and the half of one.
FLOAT_WIDTHS = [16, 80, 128]
FLOAT_CASES = list(itertools.product((ConvertedRows, E4m3Rows), (RowFragment, SplitRowFragment), FLOAT_WIDTHS))
STAGING = 5 * STAGING_BYTES  # the warp's own, among other warps' staging


@pytest.mark.parametrize(
    "fragment", [RowFragment(None, 8), SplitRowFragment(None, 8), SplitRowFragment(None, 8, 4)], ids=["rows", "2", "4"]
)
def test_the_lanes_of_a_quad_hold_each_column_once(fragment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = []
    for lane in range(4):
        monkeypatch.setattr(cute.arch, "lane_idx", lambda lane=lane: lane)
        columns += [fragment.first_column() + fragment.column_offset(c) for c in range(8)]
    assert sorted(columns) == list(range(32))


def test_pairs_of_split_rows_cannot_be_staged() -> None:
    """stmatrix would put such pairs into the columns of other rows' fragments."""
    assert not hasattr(SplitRowFragment, "stage")


class Warp(Lanes):
    """Lanes that meet at warp synchronisations, and their staging.

    Between two meetings, no lane may read another lane's writes. A plain dict would hide such a race most of the time,
    so each word records the phase of its last write or read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        self._words: dict[int, Any] = {}
        self._written: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._accesses: list[list[tuple[int, int]]] = [[] for _ in range(32)]
        self.most_in_a_bank = 1
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: self.own.lane)
        monkeypatch.setattr(cute.arch, "sync_warp", self._sync)
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(copy, "store_matrix_x4", self._store_matrices)
        monkeypatch.setattr(copy, "store_shared", self._store)
        monkeypatch.setattr(copy, "load_shared", self._load)

    def _sync(self) -> None:
        self.own.phase += 1
        self.meet()

    def _store_matrices(self, address: int, words: list[Any]) -> None:
        """Store matrices: a lane's i-th word belongs to row lane // 4 of the i-th matrix; lanes 8 i ... give its row
        addresses.
        """
        assert address % copy.VECTOR_BYTES == 0
        lane, sent = self.own.lane, self.exchange(address)
        for i, word in enumerate(words):
            of_matrix = sent[8 * i : 8 * i + 8]
            assert_no_bank_conflict(of_matrix)
            self._write(of_matrix[lane // 4] + 4 * (lane % 4), word)
        self.meet()

    def _write(self, place: int, word: Any) -> None:
        assert STAGING <= place < STAGING + STAGING_BYTES
        assert self._read.get(place) != self.own.phase, "overwritten while it is read"
        self._words[place], self._written[place] = word, self.own.phase

    def _words_at(self, address: int, count: int) -> list[int]:
        """Return the places of this lane's words at an address."""
        assert address % (4 * count) == 0
        assert STAGING <= address < STAGING + STAGING_BYTES
        self._accesses[self.own.lane].append((address, 4 * count))
        return [address + 4 * i for i in range(count)]

    def _store(self, address: int, words: list[Any]) -> None:
        for place, word in zip(self._words_at(address, len(words)), words, strict=True):
            self._write(place, word)

    def _load(self, address: int, count: int, dtype: Any = None) -> list[Any]:
        assert count * 4 == copy.VECTOR_BYTES
        places = self._words_at(address, count)
        for place in places:
            assert self._written.get(place) != self.own.phase, "read while it is written"
            self._read[place] = self.own.phase
        return [self._words[place] for place in places]

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` in every lane."""

        def of_lane() -> None:
            self.own.phase = 0
            work()

        super().run(of_lane)
        # This number of lanes, served together, accesses 128 bytes.
        for accesses in zip(*self._accesses, strict=True):
            ((size, count),) = Counter(size for _, size in accesses).items()
            assert count == 32
            lanes = 128 // size
            for first in range(0, 32, lanes):
                assert_no_bank_conflict([a for a, _ in accesses[first : first + lanes]], self.most_in_a_bank)


def assert_no_bank_conflict(addresses: Sequence[int], most: int = 1) -> None:
    """Check the banks of lanes that together access 128 bytes.

    Different words are in different ones of the 32 banks, or up to ``most`` of them in the same bank.
    """
    assert 128 % len(addresses) == 0
    assert max(Counter(address % 128 for address in set(addresses)).values()) <= most


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    return Warp(monkeypatch)


SHAPES = [TileShape.of(heads, 128) for heads in (1, 2, 5, 7, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_query_rows(shape: TileShape) -> None:
    """A tile's warps have each token of each head once. Rows left over have no token of the tile."""
    found = []
    for first_row in range(0, 128, RowFragment.warp_rows):
        rows = QueryRows(first_row, shape)
        for row in range(RowFragment.warp_rows):
            head, token = rows.head(row // 8), rows.token(row, row // 8)
            if token < shape.tokens:
                assert head * shape.tokens + token == first_row + row
                found.append((head, token))
    assert sorted(found) == list(itertools.product(range(shape.heads), range(shape.tokens)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_several_heads_are_written_once(shape: TileShape, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a tile's tokens is past the end of the request."""
    stored: list[int] = []
    monkeypatch.setattr(copy, "pack_x2", lambda dtype, low, high: (low, high))
    monkeypatch.setattr(copy, "store_global", lambda address, words: stored.append(address))
    out = OutputRows(0, 1 << 12, 1 << 20, shape.tokens - 1, 64)
    fragment = RowFragment([0.0] * (RowFragment.rows * 16), 16)
    tile_rows = (0, 16, 112)  # the first ones of warps

    def work() -> None:
        for first_row in tile_rows:
            rows = QueryRows(first_row, shape)
            OutputRows.store.__wrapped__(out, fragment, [1.0] * fragment.rows, STAGING, rows, "dtype")

    warp.run(work)
    places = [divmod(first + i, shape.tokens) for first in tile_rows for i in range(RowFragment.warp_rows)]
    valid = [(head, token) for head, token in places if head < shape.heads and token < out.count]
    vectors = range(0, 2 * out.columns, copy.VECTOR_BYTES)
    rows = [head * (1 << 20) + token * (1 << 12) for head, token in sorted(valid)]
    assert sorted(stored) == [row + vector for row in rows for vector in vectors]


@pytest.mark.parametrize("count", [1, 9, 16, 100])
@pytest.mark.parametrize(("kind", "columns", "held"), CASES)
def test_rows_are_written_once(
    kind: Any, columns: int, held: int, count: int, warp: Warp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements are numbered; a row's factor depends on the row. Stores take 16 bytes at a time, aligned."""
    stored: list[tuple[int, list[tuple[float, float]]]] = []
    monkeypatch.setattr(copy, "pack_x2", lambda dtype, low, high: (low, high))
    monkeypatch.setattr(copy, "store_global", lambda address, words: stored.append((address, words)))
    first_row, row_bytes = (0 if count < 100 else 96 - kind.warp_rows), 2 * (columns + 24)
    bases = (1 << 20, 2 << 20)  # of two tiles, one after the other through the same staging

    def value(row: int, column: int) -> float:
        return 1000.0 * row + column

    def work() -> None:
        per_row = held // kind.lanes_per_row
        rows = [kind.first_row() + kind.row_offset(r) for r in range(kind.rows)]
        for tile, first_column in itertools.product(bases, range(0, columns, held)):
            fragment = kind([math.nan] * (kind.rows * per_row), per_row)
            for r, c in itertools.product(range(kind.rows), range(per_row)):
                column = first_column + kind.first_column() + kind.column_offset(c)
                fragment.set(r, c, value(rows[r], column))
            rows_out = OutputRows(tile, row_bytes, 0, count, columns)
            factors = [2.0**row for row in rows]
            own = QueryRows(first_row, TileShape.of(1, 128))
            OutputRows.store.__wrapped__(rows_out, fragment, factors, STAGING, own, "dtype", first_column)

    warp.run(work)
    found = {}
    for address, words in stored:
        assert address % copy.VECTOR_BYTES == 0
        for i, element in enumerate(itertools.chain(*words)):
            assert address + 2 * i not in found, "written twice"
            found[address + 2 * i] = element
    valid = [row for row in range(kind.warp_rows) if first_row + row < count]
    assert found == {
        base + (first_row + row) * row_bytes + 2 * column: value(row, column) * 2.0**row
        for base, row, column in itertools.product(bases, valid, range(columns))
    }


@pytest.mark.parametrize(("rows_out", "kind", "columns"), FLOAT_CASES)
def test_rows_staged_as_floats_are_written_once(
    rows_out: Any, kind: Any, columns: int, warp: Warp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The property above also holds for fragments whose neighbours are not a lane's pairs, and for 8-bit output.

    8-bit output is stored 8 bytes at a time. Two rows' stores may share banks.
    """
    warp.most_in_a_bank = 2
    stored: list[tuple[int, list[tuple[float, ...]]]] = []
    monkeypatch.setattr(copy, "pack_x2", lambda dtype, low, high: (low, high))
    monkeypatch.setattr(copy, "pack_e4m3_x4", tuple)
    monkeypatch.setattr(copy, "store_global", lambda address, words: stored.append((address, words)))
    size, count, base = rows_out.bytes_of(1), 9, 1 << 20
    row_bytes = size * (columns + 16)

    def column(lane_column: int) -> int:
        if kind is RowFragment:
            return kind.first_column() + kind.column_offset(lane_column)
        block, place = divmod(lane_column, 4)
        return 16 * block + 4 * (warp.own.lane % 4) + (0, 2, 1, 3)[place]

    def work() -> None:
        per_row = columns // kind.lanes_per_row
        rows = [kind.first_row() + kind.row_offset(r) for r in range(kind.rows)]
        fragment = kind([math.nan] * (kind.rows * per_row), per_row)
        for r, c in itertools.product(range(kind.rows), range(per_row)):
            fragment.set(r, c, 1000.0 * rows[r] + column(c))
        out = rows_out(base, row_bytes, 0, count, columns)
        own = QueryRows(0, TileShape.of(1, 128))
        OutputRows.store.__wrapped__(out, fragment, [2.0**row for row in rows], STAGING, own, "dtype")

    warp.run(work)
    found = {}
    for address, words in stored:
        assert address % (8 * size) == 0
        assert len(words) == 2 * size
        for i, element in enumerate(itertools.chain(*words)):
            assert address + size * i not in found, "written twice"
            found[address + size * i] = element
    assert found == {
        base + row * row_bytes + size * c: (1000.0 * row + c) * 2.0**row
        for row, c in itertools.product(range(count), range(columns))
    }


class TestLaneRow:
    def test_a_part_is_the_row_itself(self) -> None:
        row = LaneRow([float(c) for c in range(64)], 64)
        part = row.part(8, 32).part(4, 16)
        assert [part.get(0, c) for c in range(part.columns)] == [12.0 + c for c in range(16)]

    def test_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A word has two columns of 16 bits, the left one in the lower half, or four of 8 bits."""
        monkeypatch.setattr(copy, "pack_x2", lambda dtype, low, high: (dtype, low, high))
        monkeypatch.setattr(copy, "pack_e4m3_x4", tuple)
        row = LaneRow([float(c) for c in range(4)], 4)
        assert row.words("bf16") == [("bf16", 0.0, 1.0), ("bf16", 2.0, 3.0)]
        assert row.words(Float8E4M3FN) == [(0.0, 1.0, 2.0, 3.0)]

    @pytest.mark.parametrize(("kind", "at_once"), [(ConvertedRows, 8), (E4m3Rows, 16)])
    def test_a_lane_writes_its_own_row(self, kind: Any, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A store has 16 bytes, aligned."""
        stored: dict[int, list[Any]] = {}
        monkeypatch.setattr(copy, "store_global", lambda address, words: stored.update({address: words}))
        monkeypatch.setattr(kind, "converted", lambda self, values, dtype: values)
        out, values = kind(1 << 20, 1 << 10, 0, 5, 64), [float(c) for c in range(16)]
        out.write_row(3, values, "dtype", 32)
        first = (1 << 20) + 3 * (1 << 10) + 32 * kind.element_bits // 8
        assert stored == {first + 16 * i: values[at_once * i :][:at_once] for i in range(16 // at_once)}


class Memory(dict[int, float]):
    """Float32 elements by their number."""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, Memory]:
    """Return arrays by address."""
    arrays: dict[int, Memory] = {}
    monkeypatch.setattr(epilogue, "global_array", lambda dtype, address: arrays.setdefault(address, Memory()))
    monkeypatch.setattr(epilogue, "log_sum_exp", epilogue.log_sum_exp.__wrapped__)
    return arrays


def test_statistics(memory: dict[int, Memory]) -> None:
    """Each row and head gets a pair; rows past the request's end belong to another request."""
    rows = StatisticsRows(address=4096, first=30, row=6, count=3)
    for row in range(5):
        StatisticsRows.store.__wrapped__(rows, row, 10.0 + row, 20.0 + row)
    assert memory == {4096: {60: 10.0, 61: 20.0, 72: 11.0, 73: 21.0, 84: 12.0, 85: 22.0}}


@pytest.mark.parametrize("natural", [0, 1])
def test_log_sum_exp(natural: int, memory: dict[int, Memory]) -> None:
    rows = LseRows(address=4096, offset=7, row=4, natural=natural, count=2)
    for row in range(4):
        LseRows.store.__wrapped__(rows, row, 1.0 + row, -math.inf)
    assert memory[4096] == pytest.approx(
        {7: math.log(2) if natural else 1.0, 11: 2 * (math.log(2) if natural else 1.0)}
    )
    assert list(memory) == [4096]


def test_nothing_is_written_without_a_tensor(memory: dict[int, Memory]) -> None:
    StatisticsRows.store.__wrapped__(StatisticsRows(address=0, first=0, row=1, count=9), 0, 1.0, 1.0)
    LseRows.store.__wrapped__(LseRows(address=0, offset=0, row=1, natural=1, count=9), 0, 1.0, 0.0)
    assert not memory


class TestRowResults:
    """The end of a row, with slope 0.5 and position 100 + row, so a shift of half of that."""

    def results(self) -> RowResults:
        score = SimpleNamespace(
            shift=lambda slope, position: slope * position, largest_logit=lambda largest, shift: largest + shift
        )
        lse = LseRows(address=4096, offset=0, row=1, natural=0, count=9)
        statistics = StatisticsRows(address=8192, first=0, row=1, count=9)
        return RowResults(
            score, sink=3.0, slope=0.5, first_position=100, head_dim=64, lse_rows=lse, statistics=statistics
        )

    @pytest.mark.parametrize(("lane", "lanes_per_row", "writes"), [(0, 4, 1), (3, 4, 0), (8, 4, 1), (3, 1, 1)])
    def test_finish(
        self, lane: int, lanes_per_row: int, writes: int, memory: dict[int, Memory], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One lane of a row writes; all lanes get the factor. Logits are relative to the row's shift,
        the sink is not.
        """
        arithmetic.use(monkeypatch, RowResults, LseRows, StatisticsRows)
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: lane)
        asked: list[tuple[Any, ...]] = []

        def finish(r: int, sink: float, lanes: int) -> tuple[float, float]:
            asked.append((r, sink, lanes))
            return 0.25, 10.0

        softmax = SimpleNamespace(finish=finish, sum_of_largest=lambda r, lanes: 5.0, largest=[7.0, 8.0])
        row, shift = 6, 53.0
        assert self.results().finish(softmax, 1, row, lanes_per_row) == 0.25
        assert asked == [(1, 3.0 - shift, lanes_per_row)]
        lse, statistics = {row: 10.0 + shift / math.log(2)}, {2 * row: (8.0 + shift) / 8, 2 * row + 1: 5.0}
        assert memory == ({4096: pytest.approx(lse), 8192: statistics} if writes else {})

    def test_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tile begins at row 256 of its request, and belongs to head 2 of 6."""
        monkeypatch.setattr(epilogue, "load_sink", lambda address, head: (address, head))
        request = SimpleNamespace(index=2, lse_start=1000, o_start=2000, first_position=-3)
        tile = SimpleNamespace(request=request, first_row=256, head=2)
        score = SimpleNamespace(slope=lambda head: 0.1 * head)
        a = Addresses(*[0] * len(Addresses._fields))._replace(lse=4096, statistics=8192, sinks=77)
        g = Geometry(*[0] * len(Geometry._fields))._replace(heads=6, lse_row=6, lse_head=1, lse_natural=1)
        g = g._replace(lse_request=500, lse_rows=263)  # this request has room for 7 rows of the tile
        found = RowResults.create(tile, 9, score, 64, a, g)
        assert (number(found.lse_rows.offset), found.lse_rows.row) == (1256 * 6 + 2, 6)
        assert (number(found.statistics.first), found.statistics.row) == (2256 * 6 + 2, 6)
        assert (found.lse_rows.address, found.statistics.address) == (4096, 8192)
        assert (number(found.lse_rows.count), found.statistics.count) == (7, 9)
        flat = RowResults.create(tile, 9, score, 64, a, g._replace(lse_request=0, lse_rows=1260))
        assert number(flat.lse_rows.count) == 4
        assert number(found.lse_rows.natural) == 1
        assert found.sink == (77, 2)
        assert (found.slope, found.first_position) == (0.2, 253)
