"""Masks against brute force: the keys of a row, the tiles of a query tile, and the predicate inside a tile.

The device code of a mask is arithmetic on Int32. The DSL evaluates it on the host too, so these tests run the same code
that is traced into the kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32
from helpers.cases.kernel_problems import cache, paged
from helpers.covering.configs import every_tile

from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.launch.geometry import prefill_geometry as geometry
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.load.sequence import Request
from hopwell.kernels.parts.rows.mask import DraftMask, IntervalMask, LogitRow, TileRange, create_mask
from hopwell.kernels.problem import Mask, MaskKind
from hopwell.kernels.registry import resolve

# The DSL warns about values that do not fit their type and would wrap around on the device.
pytestmark = [pytest.mark.traced, pytest.mark.filterwarnings("error::cutlass.base_dsl.common.DSLWarning")]

INT32_MAX = 2**31 - 1
WINDOWS = (0, 1, 3, 4, 5, 127, INT32_MAX)
CHUNKS = (
    1,
    2,
    4,
    8,
    32,
    64,
    128,
    1024,
    2**30,
    INT32_MAX,
)  # below, at and above the tested tile sizes
MASKS = [
    Mask(MaskKind.FULL),
    Mask(MaskKind.CAUSAL),
    *(Mask(MaskKind.SLIDING_WINDOW, left) for left in WINDOWS),
    *(Mask(MaskKind.CHUNKED, chunk=chunk) for chunk in CHUNKS),
    *(Mask(MaskKind.LOCAL, *sides) for sides in ((0, 0, 1), (4, 0, 127), (127, 0, 5), (-1, 0, 3), (5, 0, 2**30))),
]
SIZES = sorted({(tile.m, tile.n) for dims in TILES for tile in every_tile(dims)})


def name(mask: Mask) -> str:
    sizes = dict.fromkeys((MaskKind.SLIDING_WINDOW, MaskKind.LOCAL), mask.window_left)
    parameter = (sizes | {MaskKind.CHUNKED: mask.chunk}).get(mask.kind, "")
    right = f"_{mask.window_right}" if mask.kind is MaskKind.LOCAL else ""
    return f"{mask.kind.value}{parameter}{right}"


def visible(mask: Mask, position: int, kv_len: int) -> set[int]:
    """Apply the definition, key by key."""
    keys = range(kv_len)
    if mask.kind is MaskKind.FULL:
        return set(keys)
    if mask.kind is MaskKind.CHUNKED:
        return {key for key in keys if key // mask.chunk == position // mask.chunk and key <= position}
    if mask.kind is MaskKind.LOCAL:
        first = 0 if mask.window_left < 0 else position - mask.window_left
        return {key for key in keys if first <= key <= position + mask.window_right}
    left = position - mask.window_left if mask.kind is MaskKind.SLIDING_WINDOW else 0
    return {key for key in keys if left <= key <= position}


def traced(mask: Mask) -> IntervalMask:
    """Return the device code's mask, with the launch's size for ``mask``."""
    problem = paged(*cache("tuple-HND", 16, (128, 128)), mask=mask)
    passed = geometry(problem, resolve(problem, "sm_90a"))
    return create_mask(mask.kind, passed.mask_size)


def host(value: object) -> int:
    return int(value.value) if isinstance(value, Int32) else int(value)


def request_of(kv_len: int, q_len: int = 0) -> Request:
    return Request(*[Int32(0)] * 6, Int32(q_len), Int32(kv_len))


def tile_range(mask: IntervalMask, first: int, last: int, kv_len: int, tile_n: int) -> TileRange:
    keys = mask.tiles(Int32(first), Int32(last), request_of(kv_len), tile_n)
    return TileRange(*(host(getattr(keys, field)) for field in TileRange.__dataclass_fields__))


@pytest.mark.parametrize("mask", MASKS, ids=name)
def test_keys_of_a_row(mask: Mask) -> None:
    device = traced(mask)
    for q_len, kv_len in itertools.product((1, 2, 7, 12), (0, 1, 5, 12, 140)):
        for row in range(q_len):
            position = kv_len - q_len + row
            lo, hi = map(host, device.keys(Int32(position), Int32(kv_len)))
            assert lo >= 0
            assert hi <= kv_len
            assert set(range(lo, hi)) == visible(mask, position, kv_len), (position, kv_len)


def query_tiles(q_len: int, tile_m: int) -> Iterator[tuple[int, int]]:
    """Return the first and last row of each tile of a request."""
    for first in range(0, q_len, tile_m):
        yield first, min(first + tile_m, q_len) - 1


def check_tiles(mask: Mask, device: IntervalMask, q_len: int, kv_len: int, tile_m: int, tile_n: int) -> None:
    for first, last in query_tiles(q_len, tile_m):
        position = kv_len - q_len
        case = (name(mask), q_len, kv_len, first)
        keys = tile_range(device, position + first, position + last, kv_len, tile_n)
        rows = [visible(mask, position + row, kv_len) for row in range(first, last + 1)]
        seen = set().union(*rows)

        # Every visible key is in a visited tile, and both ends of the range hold at least one.
        assert 0 <= keys.begin <= keys.end, case
        assert {key // tile_n for key in seen} <= set(range(keys.begin, keys.end)), case
        if seen:
            assert (keys.begin, keys.end - 1) == (min(seen) // tile_n, max(seen) // tile_n), case
            assert keys.first_key == min(seen), case
        else:
            assert keys.begin == keys.end, case

        # Tiles that skip the predicate are whole, and every row sees all of them.
        assert keys.begin <= keys.full_begin <= keys.full_end <= keys.end, case
        unmasked = set(range(keys.full_begin * tile_n, keys.full_end * tile_n))
        assert all(unmasked <= row for row in rows), case

        # The consumers' loops: the last tile is masked, earlier tiles only at that edge of the mask.
        if keys.begin < keys.end:
            assert keys.full_end <= keys.end - 1, case
            if not device.has_diagonal:
                assert keys.full_end == keys.end - 1, case
            if not device.has_left_edge:
                assert keys.full_begin == keys.begin, case

        # No tile takes the predicate without need, except the last one and tiles that one row cuts.
        for tile in range(keys.begin, keys.end - 1):
            whole = set(range(tile * tile_n, (tile + 1) * tile_n))
            if all(whole <= row for row in rows):
                assert keys.full_begin <= tile < keys.full_end, case


@pytest.mark.parametrize("mask", MASKS, ids=name)
def test_tiles_of_small_requests(mask: Mask) -> None:
    """All lengths around a few tiles of 4 keys, with requests of fewer keys than queries among them."""
    device = traced(mask)
    for q_len, kv_len in itertools.product(range(1, 9), range(18)):
        check_tiles(mask, device, q_len, kv_len, 3, 4)


@pytest.mark.parametrize("mask", MASKS, ids=name)
@pytest.mark.parametrize(("tile_m", "tile_n"), SIZES)
def test_tiles_of_the_shipped_sizes(tile_m: int, tile_n: int, mask: Mask) -> None:
    device = traced(mask)
    for q_len, kv_len in (
        (1, 1),
        (1, tile_n),
        (1, 3 * tile_n + 1),
        (tile_m, tile_m),
        (tile_m + 1, 2 * tile_n - 1),
        (2 * tile_m - 1, 7 * tile_n),
        (3 * tile_m, tile_n + 1),
    ):
        check_tiles(mask, device, q_len, kv_len, tile_m, tile_n)


@pytest.mark.parametrize("left", [2**30, INT32_MAX - 1, INT32_MAX])
def test_a_window_wider_than_all_keys_is_causal(left: int) -> None:
    """Rows before the first key are included; their position minus the window does not fit 32 bits."""
    causal, window = traced(Mask(MaskKind.CAUSAL)), traced(Mask(MaskKind.SLIDING_WINDOW, left))
    for position, kv_len in ((-1000, 5), (-1, 5), (0, 5), (4, 5), (100_000, 131_072)):
        assert list(map(host, window.keys(Int32(position), Int32(kv_len)))) == [
            *map(host, causal.keys(Int32(position), Int32(kv_len)))
        ]
        got, want = (tile_range(mask, position, position + 1, kv_len, 64) for mask in (window, causal))
        assert (got.begin, got.end, got.first_key) == (want.begin, want.end, want.first_key)


@pytest.mark.parametrize("chunk", [1 << i for i in range(31)])
def test_chunks_up_to_the_last_position(chunk: int) -> None:
    """Rows near 2^31 and rows in front of the first key, whose chunk would begin at a negative key."""
    device = traced(Mask(MaskKind.CHUNKED, chunk=chunk))
    for position in (-(2**31), -(2**30), -chunk - 1, -chunk, -2, -1):
        lo, hi = map(host, device.keys(Int32(position), Int32(1000)))
        assert lo == 0
        assert hi <= 0
    for position in (0, chunk - 1, chunk, 3 * chunk // 2, 2**30 - 1, 2**30, INT32_MAX - 1):
        if position < INT32_MAX:
            lo, hi = map(host, device.keys(Int32(position), Int32(INT32_MAX)))
            assert (lo, hi) == (position - position % chunk, position + 1)


@pytest.mark.parametrize("tile_n", sorted({n for _, n in SIZES}))
def test_tiles_of_chunks_of_long_requests(tile_n: int) -> None:
    """Only tiles of the rows' own chunks are visited, for any number of earlier keys."""
    kv_len = 2**31 - 256
    for chunk in (1, 32, 64, 128, 256, 8192, 2**30):
        device = traced(Mask(MaskKind.CHUNKED, chunk=chunk))
        for first in (0, 2**20 + 77, 2**30 - 5, kv_len - 128):
            keys = tile_range(device, first, first + 127, kv_len, tile_n)
            assert keys.first_key == first - first % chunk
            assert (keys.begin, keys.end) == (keys.first_key // tile_n, (first + 127) // tile_n + 1)
            last_lo = (first + 127) // chunk * chunk
            whole = [tile for tile in (keys.full_begin, keys.full_end - 1) if keys.full_begin < keys.full_end]
            assert all(last_lo <= tile * tile_n and (tile + 1) * tile_n <= first + 1 for tile in whole)


def test_a_chunk_wider_than_all_keys_is_causal() -> None:
    causal, chunk = traced(Mask(MaskKind.CAUSAL)), traced(Mask(MaskKind.CHUNKED, chunk=2**30))
    for position, kv_len in ((-1000, 5), (-1, 5), (0, 5), (4, 5), (100_000, 131_072)):
        got, want = (
            [
                *map(host, mask.keys(Int32(position), Int32(kv_len))),
                tile_range(mask, position, position + 1, kv_len, 64),
            ]
            for mask in (chunk, causal)
        )
        assert got == want


class Scores:
    """A RowFragment on the host, with the elements that the predicate keeps."""

    rows = RowFragment.rows
    row_offset = staticmethod(RowFragment.row_offset)
    column_offset = staticmethod(RowFragment.column_offset)
    first_column = staticmethod(RowFragment.first_column)

    def __init__(self, columns: int):
        self.columns = columns
        self.values = {(r, c): 1.0 for r in range(self.rows) for c in range(columns)}

    def get(self, r: int, c: int) -> float:
        return self.values[r, c]

    def set(self, r: int, c: int, value: float) -> None:
        self.values[r, c] = value


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Run device code on the host: loops are unrolled by Python, and the lane is the one in the returned dict."""
    current = {"lane": 0}
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    monkeypatch.setattr(cute.arch, "lane_idx", lambda: current["lane"])
    return current


class HolesMask(IntervalMask):
    """A mask that hides keys inside its interval."""

    is_interval = False


@pytest.mark.parametrize("kind", [MaskKind.FULL, MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW])
def test_every_tile_of_a_mask_with_holes_takes_the_predicate(kind: MaskKind) -> None:
    """The range of tiles equals the interval's range."""
    plain, holes = IntervalMask(kind, Int32(70)), HolesMask(kind, Int32(70))
    for first, last, kv_len in ((0, 15, 16), (300, 331, 332), (300, 331, 900)):
        keys, want = tile_range(holes, first, last, kv_len, 16), tile_range(plain, first, last, kv_len, 16)
        assert (keys.begin, keys.end, keys.first_key) == (want.begin, want.end, want.first_key)
        assert keys.full_begin == keys.full_end == keys.begin
    assert holes.has_diagonal, "loops that apply the predicate must be there"


def test_draft_masks_have_no_holes_before_the_first_new_token() -> None:
    mask, request = DraftMask(MaskKind.DRAFT, Int32(1 << 30)), request_of(200, 10)
    keys = mask.tiles(Int32(190), Int32(199), request, 16)
    assert (host(keys.begin), host(keys.full_end), host(keys.end)) == (0, 190 // 16, 13)
    short = mask.tiles(Int32(-3), Int32(3), request_of(4, 7), 16)
    assert host(short.full_end) == 0


def test_lanes_share_out_a_tile(lane: dict[str, int]) -> None:
    """Each element of a warp's 16 rows and all columns belongs to one lane and one of its registers."""
    tile_n = 64
    columns = tile_n // RowFragment.lanes_per_row
    elements = []
    for lane["lane"] in range(32):
        for r, c in itertools.product(range(RowFragment.rows), range(columns)):
            row = RowFragment.first_row() + RowFragment.row_offset(r)
            elements.append((row, RowFragment.first_column() + RowFragment.column_offset(c)))
    assert sorted(elements) == list(itertools.product(range(16), range(tile_n)))
    registers = {RowFragment.index(r, c) for r, c in itertools.product(range(RowFragment.rows), range(columns))}
    assert registers == set(range(RowFragment.rows * columns))


@pytest.mark.parametrize("mask", MASKS, ids=name)
def test_predicate(mask: Mask, lane: dict[str, int]) -> None:
    """-inf goes to exactly the invisible elements of a tile."""
    device, tile_n, kv_len = traced(mask), 16, 37
    apply = IntervalMask.apply.__wrapped__
    for first_position, tile in ((-3, 0), (0, 0), (7, 0), (9, 1), (15, 1), (20, 2), (33, 2)):
        for lane["lane"] in (0, 1, 6, 31):
            scores = Scores(tile_n // RowFragment.lanes_per_row)
            first = first_position + RowFragment.first_row()
            positions = [first, first + 3]  # rows of a lane need not be neighbours
            row = LogitRow([Int32(position) for position in positions], Int32(kv_len), 0.0)
            apply(device, scores, Int32(tile * tile_n), row)
            for (r, c), value in scores.values.items():
                position = positions[r]
                key = tile * tile_n + RowFragment.first_column() + RowFragment.column_offset(c)
                shown = key in visible(mask, position, kv_len)
                assert value == (1.0 if shown else -math.inf), (position, key)
