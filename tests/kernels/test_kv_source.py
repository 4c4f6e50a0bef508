"""The KV source of fetching warps: every token in its place, and no read of a page id that may be invalid.

Address arithmetic and the order of instructions run on the host here, one lane at a time. Tests in the emulator and on
the GPU cover the arrival of copies.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cutlass import Int32
from helpers.host.kv_sources import (
    ADDRESSES,
    CASES,
    HEADS,
    K_START,
    KV_HEAD,
    REQUEST,
    SHARED,
    STRIDES,
    V_START,
    Case,
    Ring,
    Warp,
    cases,
    geometry,
    host,
    host_warp,
    one_for_each,
    put_table,
)

from hopwell.kernels.config.base import BLOCK_COLUMNS, MAX_BOX_ROWS, KvFetch, KvType
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.mla import shipped_mla_configs
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.load import kv_rows
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import ATOM_ROWS, ContiguousBoxes, KvOperand, PageBoxes, PageColumnBoxes
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.support import DECODE_HEAD_DIMS

pytestmark = pytest.mark.traced


@pytest.fixture
def warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    return host_warp(monkeypatch)


# First and last key of interest: whole requests, parts of pages and tiles, and the keys inside a window.
RANGES = [(0, 1), (0, 7), (0, 8), (0, 129), (0, 300), (5, 6), (64, 300), (127, 129), (200, 300), (255, 300)]


class TestLocate:
    @pytest.mark.parametrize("case", one_for_each(PageBoxes), ids=str)
    def test_boxes_of_pages(self, case: Case, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        tile_n, box_rows = case.tile_n, case.box_rows
        for page_size, (first, end) in itertools.product((box_rows, 2 * box_rows, 1024), RANGES):
            table = put_table(monkeypatch, page_size, first, end)
            source = case.source(first, end, page_size, device=True)
            assert source.boxes * box_rows == tile_n
            assert source.boxes <= 32
            for tile in range(first // tile_n, -(-end // tile_n)):
                for lane in {*range(source.boxes), source.boxes % 32, 31}:  # lanes without a box look pages up as well
                    warp.lane = Int32(lane)
                    slot, core_matrix = map(host, source.locate(Int32(tile))[:2])
                    box = range(tile * tile_n + lane * box_rows, tile * tile_n + (lane + 1) * box_rows)
                    needed = [key for key in box if first <= key < end]
                    if lane >= source.boxes or not needed:
                        continue
                    for key in needed:
                        page, row = table.ids[key // page_size], key % page_size
                        assert slot == page * HEADS + KV_HEAD
                        assert core_matrix * ATOM_ROWS + (key - box.start) == row

    @pytest.mark.parametrize("page_size", [1, 2, 4, 16])
    @pytest.mark.parametrize("case", one_for_each(PageRows), ids=str)
    def test_rows_of_pages(self, case: Case, page_size: int, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        tile_n, which = case.tile_n, "v" if case.is_value else "k"
        head = host(case.operand().address) + 2 * STRIDES[f"{which}_head"] * KV_HEAD
        page_bytes, row_bytes = 2 * STRIDES[f"{which}_page"], 2 * STRIDES[f"{which}_row"]
        for first, end in RANGES:
            table = put_table(monkeypatch, page_size, first, end)
            source = case.source(first, end, page_size)
            for tile in range(first // tile_n, -(-end // tile_n)):
                found = {}
                for warp.lane in range(32):
                    for i, address in enumerate(source.locate(tile, source.read_table(tile))):
                        found[tile * tile_n + 32 * i + warp.lane] = host(address)
                keys = range(tile * tile_n, (tile + 1) * tile_n)
                assert set(keys) <= set(found), "every row of the tile has a lane"
                for key in keys:
                    wanted = first <= key < end
                    page = table.ids[key // page_size] if wanted else 0
                    place = head + page * page_bytes + key % page_size * row_bytes
                    assert found[key] == (place if wanted else 0), key

    @pytest.mark.parametrize("page_size", [1, 16])
    def test_rows_of_topk_indices(self, page_size: int, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens come in the order of the top-k indices, from any page; negative indices and the end of the list give
        none.
        """
        config = next(config for config in shipped_mla_configs() if config.sparse)
        operand = one_for_each(PageRows)[0].operand(page_size)
        request = SimpleNamespace(index=REQUEST, kv_len=70)
        tile = SimpleNamespace(kv_head=0, keys=SimpleNamespace(first_key=0), request=request, kv_policy=lambda: None)
        source = PageRows.create(replace(operand, topk=True), tile, None, SHARED, config.tile.n, 0)
        tokens = [-1 if i % 7 == 3 else 97 * i % 200 for i in range(70)]
        monkeypatch.setattr(kv_rows, "load_index", lambda address, index: tokens[index])
        found = {}
        for n, warp.lane in itertools.product(range(2), range(32)):
            for i, address in enumerate(source.locate(n, source.read_table(n))):
                found[n * config.tile.n + 32 * i + warp.lane] = host(address)
        for key, address in found.items():
            token = tokens[key] if key < 70 else -1
            place = token // page_size * source.page_bytes + token % page_size * source.row_bytes
            assert address == (source.head + place if token >= 0 else 0), key

    @pytest.mark.parametrize(("kv_type", "head_dim"), [(KvType.NVFP4, 128), (KvType.E4M3, 64), (KvType.E4M3, 128)])
    @pytest.mark.parametrize("interleaves", [True, False])
    def test_rows_that_share_a_line_with_other_heads_stay(
        self, kv_type: KvType, head_dim: int, *, interleaves: bool
    ) -> None:
        config = DecodeConfig(
            "sm_90a", "bf16", "bf16", head_dim, head_dim, MaskKind.FULL, KvFetch.PAGE_BOXES, 16, kv_type, 8
        )
        width = config.layout.kv_dims[0]
        row, head = (8 * width, width) if interleaves else (width, 16 * width)
        sizes = dict(zip(("columns", "depth", "is_value", "read_once"), (width, width, False, True), strict=True))
        operand = KvOperand(0, 128 * width, Int32(head), Int32(row), 0, 0, None, head_dim=width, **sizes)
        found = host(operand.cache_policy(SimpleNamespace(kv_policy=lambda: Int32(copy.EVICT_FIRST))))
        stays = interleaves and 2 * width < 128
        assert found == (copy.EVICT_NORMAL if stays else copy.EVICT_FIRST)

    @pytest.mark.parametrize("case", one_for_each(ContiguousBoxes), ids=str)
    def test_contiguous_rows(self, case: Case) -> None:
        start = V_START if case.is_value else K_START
        assert case.source().locate(3) == start + 3 * case.tile_n


def places(source: Any, stage: int) -> dict[tuple[int, int, int], int]:
    rows, blocks, vectors = range(source.tile_n), range(source.columns // BLOCK_COLUMNS), range(copy.VECTORS_PER_ROW)
    return {place: source.vector_address(stage, *place) for place in itertools.product(rows, blocks, vectors)}


class TestStages:
    @cases(ContiguousBoxes, PageBoxes, PageColumnBoxes, PageRows)
    def test_vectors_fill_a_stage(self, case: Case) -> None:
        """Every 16 bytes of a stage belong to one vector of one row, padded columns included; 128 bytes of a row are
        together.
        """
        source = case.source()
        assert case.columns % BLOCK_COLUMNS == 0
        assert case.head_dim <= case.depth <= case.columns < case.head_dim + BLOCK_COLUMNS
        stage_bytes = case.tile_n * case.columns * 2
        assert source.tile_bytes == stage_bytes
        for stage in (0, 1):
            found = places(source, stage)
            begin = SHARED + stage * stage_bytes
            assert sorted(found.values()) == list(range(begin, begin + stage_bytes, copy.VECTOR_BYTES))
            for (row, block, vector), address in found.items():
                assert address == found[row, block, 0] + vector * copy.VECTOR_BYTES
                # The swizzle permutes by address bits 7 to 9, so a row must be at its number modulo 8.
                assert address // copy.SWIZZLE_ROW_BYTES % ATOM_ROWS == row % ATOM_ROWS

    @cases(PageBoxes)
    def test_a_box_of_a_page_is_contiguous_in_a_stage(self, case: Case) -> None:
        """Box i fills rows [i * box_rows, (i + 1) * box_rows)."""
        for (row, _, _), address in places(case.source(), 0).items():
            assert (address - SHARED) // (case.box_rows * case.columns * 2) == row // case.box_rows

    @cases(ContiguousBoxes, PageColumnBoxes, PageRows)
    def test_a_column_block_is_contiguous_in_a_stage(self, case: Case) -> None:
        for (_, block, _), address in places(case.source(), 0).items():
            assert (address - SHARED) // (case.tile_n * copy.SWIZZLE_ROW_BYTES) == block


class Line(NamedTuple):
    """64 columns of a token as a TMA box delivers them."""

    column: int
    row: int  # in the tensor, or in the page
    outer: int  # head, or slot


def lines(case: Case, coordinates: tuple[int, ...]) -> list[Line]:
    """Return the contents of a box, in runs of 128 bytes."""
    if case.kind is PageBoxes:
        *corner, core_matrix, slot = coordinates
        blocks = case.columns // BLOCK_COLUMNS
        assert corner == [0] * (3 if blocks > 1 else 2), "all columns, from the first of 8 rows on"
        core_matrices = range(core_matrix, core_matrix + case.box_rows // ATOM_ROWS)
        order = itertools.product(core_matrices, range(blocks), range(ATOM_ROWS))
        return [Line(block * BLOCK_COLUMNS, g * ATOM_ROWS + row, slot) for g, block, row in order]
    column, first, outer = coordinates
    return [Line(column, first + row, outer) for row in range(case.box_rows or case.tile_n)]


def largest_page(case: Case) -> int:
    """Return the largest page whose tokens these boxes can fetch."""
    fitting = [size for size in (16, 32, 64, 1024) if min(math.gcd(size, case.tile_n), MAX_BOX_ROWS) == case.box_rows]
    return fitting[-1] if fitting else case.box_rows or 16


class TestBoxes:
    @cases(ContiguousBoxes, PageBoxes, PageColumnBoxes)
    def test_boxes_cover_a_stage(self, case: Case, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every row and column block comes once, at the consumers' place, and the bytes equal the expected bytes."""
        page_size, tile, stage = largest_page(case), 2, 1
        end = (tile + 1) * case.tile_n
        table = put_table(monkeypatch, page_size, 0, end)
        source = case.source(0, end, page_size)
        of_lanes = []
        for warp.lane in range(32):
            of_lanes.append(source.locate(tile))
        location = of_lanes[0]
        if case.box_rows:
            location = tuple([host(value) for value in values] for values in list(zip(*of_lanes, strict=True))[:2])
        source.fetch(location, stage, "barrier")

        found = {}
        for descriptor, destination, barrier, coordinates, policy in warp.named("box"):
            assert (descriptor, barrier) == ("descriptor", "barrier")
            assert policy == ("policy" if isinstance(case.config, DecodeConfig) else None), "read once, or by many"
            assert destination % copy.SWIZZLE_ATOM_BYTES == 0, "the swizzle goes by addresses"
            for i, line in enumerate(lines(case, tuple(map(host, coordinates)))):
                address = destination + i * copy.SWIZZLE_ROW_BYTES
                assert address not in found, "written twice"
                found[address] = line
        assert len(found) * copy.SWIZZLE_ROW_BYTES == source.tile_bytes
        for row, block in itertools.product(range(case.tile_n), range(case.columns // BLOCK_COLUMNS)):
            key = tile * case.tile_n + row
            want = Line(block * BLOCK_COLUMNS, (V_START if case.is_value else K_START) + key, KV_HEAD)
            if case.box_rows:
                slot = table.ids[key // page_size] * HEADS + KV_HEAD
                want = Line(block * BLOCK_COLUMNS, key % page_size, slot)
            assert found[source.vector_address(stage, row, block, 0)] == want
            assert want.column < case.head_dim, "a box must not lie outside the tensor altogether"

    @cases(ContiguousBoxes, PageBoxes, PageColumnBoxes)
    @pytest.mark.parametrize("lanes", [1, 32])
    def test_rows_that_are_not_needed_become_zeros(
        self, case: Case, lanes: int, warp: Warp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only V has zeroed rows, in this order: boxes arrive, zeros are written, consumers may read.

        The number of arriving lanes equals the edge's count.
        """
        tile_n, step = case.tile_n, 3
        value = case._replace(is_value=True)
        after = ((tile_n - 1, 2 * tile_n), (tile_n + 5, 2 * tile_n))
        for first, end in ((0, tile_n), (0, 1), (0, tile_n - 1), (3, tile_n), (9, 10), *after):
            put_table(monkeypatch, case.box_rows or 16, 0, 2 * tile_n)
            whole, zeroed = (first, end) == (0, tile_n), []
            for warp.lane in range(32):
                warp.events.clear()
                source = value.source(first, end, case.box_rows or 16)
                location = ([0] * 32, [0] * 32) if case.box_rows else 0
                assert source.fill(location, 0, Ring(lanes), step, "partial", 5) == (5 if whole else 6)
                barrier = "full 1" if whole else "partial"
                assert warp.named("expect") == [(barrier, source.tile_bytes)]
                assert {event[2] for event in warp.named("box")} == {barrier}
                assert warp.named("wait") == ([] if whole else [("partial", 5 & 1)])
                # The lane that expects the bytes of whole tiles arrives with that instruction, and for all other lanes.
                arrivals = lanes - 1 if whole else int(warp.lane < lanes)
                assert warp.named("arrive") == [("full 1",)] * arrivals
                if not whole:
                    order = [name for name in warp.order if name not in ("zero", "sync", "fence", "arrive")]
                    assert order == ["expect", "box", "wait"]
                    # Zeros come after the wait and before a fence and the arrival.
                    assert "zero" not in warp.order[: warp.order.index("wait")]
                    assert warp.order[-3:] == ["fence", "sync", "arrive"] or not arrivals
                zeroed += [address for (address,) in warp.named("zero")]
            expected = [place for (row, _, _), place in places(source, 1).items() if not first <= row < end]
            assert sorted(zeroed) == sorted(expected), (first, end)

    @cases(ContiguousBoxes)
    def test_tiles_come_once_from_right_to_left(self, case: Case, warp: Warp) -> None:
        """Partial tiles, at either end and past the last key, use a barrier of their own."""
        n = case.tile_n
        for first, end in (
            (0, 5 * n),
            (0, 4 * n + 1),
            (n + 1, 5 * n),
            (n - 1, 4 * n - 1),
            (2 * n + 3, 2 * n + 5),
            (0, n),
        ):
            for begin, stop in ((first // n, -(-end // n)), (first // n, -(-end // n) + 2), (first // n + 1, end // n)):
                warp.events.clear()
                tiles, ring = [*range(begin, stop)][::-1], Ring()
                partial = [case.is_value and not first <= tile * n <= (tile + 1) * n <= end for tile in tiles]
                found = case.source(first, end).load(begin, stop, ring, 7, "partial", 3)
                assert found == (7 + len(tiles), 3 + sum(partial))
                assert ring.waits == [7 + i for i in range(len(tiles))]
                barriers = ["partial" if p else f"full {(7 + i) % 2}" for i, p in enumerate(partial)]
                assert [barrier for barrier, _ in warp.named("expect")] == barriers
                start = V_START if case.is_value else K_START
                rows = [(host(coordinates[1]) - start) // n for _, _, _, coordinates, _ in warp.named("box")]
                assert [tile for tile, _ in itertools.groupby(rows)] == tiles

    @cases(ContiguousBoxes, PageBoxes, PageColumnBoxes)
    def test_keys_are_left_alone(self, case: Case, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scores of invisible keys are masked, so any data there may be multiplied."""
        put_table(monkeypatch, case.box_rows or 16, 0, case.tile_n)
        source = case._replace(is_value=False).source(3, 9, case.box_rows or 16)
        location = ([0] * 32, [0] * 32) if case.box_rows else 0
        assert source.fill(location, 0, Ring(), 0, "partial", 5) == 5
        assert warp.named("expect") == [("full 0", source.tile_bytes)]
        assert warp.order == ["expect", "box"]


def copies(source: Any, rows: list[int], stage: int, warp: Warp) -> dict[int, int | None]:
    """Return a warp's copies to each 16 bytes of a stage, None for zeros; row i is at address ``rows[i]``."""
    of_groups = [rows[i : i + 32] for i in range(0, len(rows), 32)]
    for warp.lane in range(32):
        before = len(warp.events)
        source.copy_rows(of_groups, stage, "full")
        order = [name for name, _ in itertools.groupby(event[0] for event in warp.events[before:])]
        assert order == ["copy", "arrive when copied"]
    assert warp.named("arrive when copied") == [("full",)] * 32
    written: dict[int, int | None] = {}
    for destination, address, wanted, *size in warp.named("copy"):
        assert size in ([], [16])
        assert destination not in written, "written twice"
        written[destination] = address if wanted else None
    return written


def row_addresses(tile_n: int) -> list[int]:
    """Return addresses of rows, some of them not needed."""
    return [0 if row % 5 == 2 else (1 << 40) + 4096 * row for row in range(tile_n)]


@pytest.mark.parametrize("dims", DECODE_HEAD_DIMS)
def test_elements_of_8_bits_are_fetched_two_by_two(dims: tuple[int, int]) -> None:
    """The fetch treats them as 16-bit elements with half the columns and half the strides."""
    of = ("sm_90a", "bf16", "bf16", *dims, MaskKind.FULL, KvFetch.PAGE_ROWS, 0)
    g = geometry(16)
    for make, head_dim in zip((KvOperand.key, KvOperand.value), dims, strict=True):
        wide, narrow = (make(ADDRESSES, g, DecodeConfig(*of, kind)) for kind in (KvType.WIDE, KvType.E4M3))
        strides = [[int(s) for s in (operand.page, operand.head, operand.row)] for operand in (wide, narrow)]
        assert strides[1] == [stride // 2 for stride in strides[0]]
        assert narrow.head_dim == head_dim // 2 == narrow.depth
        assert narrow.columns == -(-head_dim // 128) * 64


class TestRows:
    @cases(PageRows)
    def test_every_vector_is_copied_or_zeroed_once(self, case: Case, warp: Warp) -> None:
        """A row's own vectors come from the row; the rest of its column blocks, and unneeded rows, become zeros."""
        stage, rows, source = 1, row_addresses(case.tile_n), case.source()
        written = copies(source, rows, stage, warp)
        assert set(written) == set(places(source, stage).values())
        for (row, block, stored), address in places(source, stage).items():
            vector = block * copy.VECTORS_PER_ROW + (stored ^ row % ATOM_ROWS)
            has_vector = rows[row] != 0 and vector * copy.VECTOR_BYTES < case.head_dim * 2
            want = rows[row] + vector * copy.VECTOR_BYTES if has_vector else None
            assert written[address] == want, (row, vector)

    def test_the_table_is_read_a_tile_ahead(self, warp: Warp, monkeypatch: pytest.MonkeyPatch) -> None:
        """The copies of the tile before hide the read's latency; stages are filled from the last tile on."""
        case = one_for_each(PageRows)[0]
        source, ring, events = case.source(end_key=3 * case.tile_n), Ring(), []
        monkeypatch.setattr(PageRows, "read_table", lambda self, tile: events.append(("read", tile)) or tile)
        monkeypatch.setattr(PageRows, "locate", lambda self, tile, entries: (tile, entries))
        monkeypatch.setattr(PageRows, "copy_rows", lambda self, *what: events.append(("fill", *what)))
        assert source.load(0, 3, ring, 5, "partial", 9) == (8, 9)
        assert ring.waits == [5, 6, 7]
        assert events == [
            ("read", 2),
            ("read", 1),
            ("fill", (2, 2), 1, "full 1"),
            ("read", 0),
            ("fill", (1, 1), 0, "full 0"),
            ("read", -1),
            ("fill", (0, 0), 1, "full 1"),
        ]


class TestOperands:
    @pytest.mark.parametrize("dims", [(192, 128), (80, 80)], ids=str)
    def test_key_and_value_have_their_own(self, dims: tuple[int, int]) -> None:
        config = next(c for c in shipped_configs() if (c.head_dim_qk, c.head_dim_v) == dims)
        g = geometry(16)
        key, value = (make(ADDRESSES, g, config) for make in (KvOperand.key, KvOperand.value))
        assert (key.address, value.address) == (ADDRESSES.key, ADDRESSES.value)
        assert (key.table, value.table) == (ADDRESSES.key_table, ADDRESSES.value_table)
        assert (key.table_row, value.table_row) == (g.key_table_row, g.value_table_row)
        assert (key.page, key.head, key.row) == (g.k_page, g.k_head, g.k_row)
        assert (value.page, value.head, value.row) == (g.v_page, g.v_head, g.v_row)
        assert (key.head_dim, value.head_dim) == dims
        assert (key.columns, value.columns) == config.layout.columns
        assert (key.depth, value.depth) == {(192, 128): (192, 128), (80, 80): (80, 128)}[dims]
        assert (key.is_value, value.is_value) == (False, True)
        assert key.pages.shift == value.pages.shift == 4

    def test_each_request_has_its_row_of_the_table(self) -> None:
        for case in (next(case for case in CASES if case.kind is kind) for kind in (PageBoxes, PageRows)):
            operand = case.operand()
            assert case.source().pages.address == operand.table + 4 * operand.table_row * REQUEST
