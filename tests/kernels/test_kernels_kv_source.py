"""Where the fetching warps find K and V: every token in its place, and no page id read that need not be valid.

Address arithmetic runs on the host here; that copies arrive is for the emulator and the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import pytest
from cutlass import Int32

from hopwell.kernels.config import TILES, KvFetch, PrefillConfig, shipped_configs
from hopwell.kernels.parts import copy, kv_source
from hopwell.kernels.parts.kv_source import BOX_COLUMNS, GROUP_ROWS, ContiguousBoxes, PageBoxes, PageRows
from hopwell.kernels.problem import MaskKind

KV_HEAD, HEADS = 1, 3
SHAPES = sorted({(tile.n, dim) for dims, tile in TILES.items() for dim in dims})
BOXES = sorted(
    {
        (config.tile.n, dim, config.box_rows)
        for config in shipped_configs()
        for dim in (config.head_dim_qk, config.head_dim_v)
        if config.kv_fetch is KvFetch.PAGE_BOXES
    }
)


class Table:
    """Page ids of a request, which may only be read at entries that hold tokens of interest."""

    def __init__(self, pages: int, valid: range):
        self.ids = [(7 * page + 3) % 64 for page in range(pages)]
        self.valid = valid

    def __getitem__(self, index: Any) -> Int32:
        assert int(index.value) in self.valid, f"entry {index.value} is read, valid are {self.valid}"
        return Int32(self.ids[index.value])


def common(tile_n: int, head_dim: int, first_key: int, end_key: int) -> dict[str, Any]:
    return dict(
        descriptor=None,
        shared=0,
        kv_head=Int32(KV_HEAD),
        first_key=Int32(first_key),
        end_key=Int32(end_key),
        tile_n=tile_n,
        head_dim=head_dim,
        zero_outside=True,
    )


@pytest.fixture
def on_lane(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def put(lane: int) -> None:
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: Int32(lane))

    return put


# First and last key of interest: whole requests, parts of pages and tiles, and what a window leaves.
RANGES = [(0, 1), (0, 7), (0, 8), (0, 129), (0, 300), (5, 6), (64, 300), (127, 129), (200, 300), (255, 300)]


@pytest.mark.parametrize(("tile_n", "head_dim", "box_rows"), BOXES)
def test_boxes_of_pages(
    tile_n: int,
    head_dim: int,
    box_rows: int,
    on_lane: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for page_size, (first, end) in itertools.product((box_rows, 2 * box_rows, 1024), RANGES):
        shift = page_size.bit_length() - 1
        table = Table(-(-end // page_size) + 2, range(first >> shift, ((end - 1) >> shift) + 1))
        monkeypatch.setattr(kv_source, "global_array", lambda dtype, address, table=table: table)
        source = PageBoxes(
            **common(tile_n, head_dim, first, end),
            table=0,
            page_shift=Int32(shift),
            slots_per_page=Int32(HEADS),
            box_rows=box_rows,
        )
        assert source.boxes <= 32
        for tile in range(first // tile_n, -(-end // tile_n)):
            for lane in range(32):  # lanes without a box look pages up as well
                on_lane(lane)
                slot, group = (int(value.value) for value in source.locate(Int32(tile)))
                box = range(tile * tile_n + lane * box_rows, tile * tile_n + (lane + 1) * box_rows)
                needed = [key for key in box if first <= key < end]
                if lane >= source.boxes or not needed:
                    continue
                for key in needed:
                    page, row = table.ids[key >> shift], key % page_size
                    assert slot == page * HEADS + KV_HEAD
                    assert group * GROUP_ROWS + (key - box.start) == row


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize(("tile_n", "head_dim"), SHAPES)
def test_rows_of_pages(
    tile_n: int,
    head_dim: int,
    page_size: int,
    on_lane: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PageRows, "_row_address", PageRows._row_address.__wrapped__)
    shift, head, page_bytes, row_bytes = page_size.bit_length() - 1, 4096, 1 << 20, 1 << 12
    for first, end in RANGES:
        table = Table(-(-end // page_size) + 2, range(first >> shift, ((end - 1) >> shift) + 1))
        monkeypatch.setattr(kv_source, "global_array", lambda dtype, address, table=table: table)
        source = PageRows(
            **common(tile_n, head_dim, first, end),
            table=0,
            page_shift=Int32(shift),
            head=head,
            page_bytes=page_bytes,
            row_bytes=row_bytes,
        )
        for tile in range(first // tile_n, -(-end // tile_n)):
            found = {}
            for lane in (0, 1, 15, 31):
                on_lane(lane)
                for i, address in enumerate(source.locate(Int32(tile))):
                    found[tile * tile_n + 32 * i + lane] = int(getattr(address, "value", address))
            assert len(found) == 4 * tile_n // 32, "every row of the tile has a lane"
            for key, address in found.items():
                wanted = first <= key < end
                page = table.ids[key >> shift] if wanted else 0
                assert address == (head + page * page_bytes + key % page_size * row_bytes if wanted else 0), key


def test_lanes_share_out_a_row() -> None:
    """16 bytes to a lane: the lanes of a row divide the warp and the row's chunks."""
    for tile_n, head_dim in SHAPES:
        source = PageRows(**common(tile_n, head_dim, 0, 1), table=0, page_shift=0, head=0, page_bytes=0, row_bytes=0)
        assert source._chunks * copy.CHUNK_BYTES == head_dim * 2
        assert 32 % source._lanes_per_row == source._chunks % source._lanes_per_row == 0


def places(source: Any, stage: int) -> dict[tuple[int, int, int], int]:
    rows, blocks, chunks = range(source.tile_n), range(source.head_dim // BOX_COLUMNS), range(copy.CHUNKS_PER_ROW)
    return {place: source.chunk_address(stage, *place) for place in itertools.product(rows, blocks, chunks)}


@pytest.mark.parametrize(("tile_n", "head_dim"), SHAPES)
@pytest.mark.parametrize("kind", [ContiguousBoxes, PageRows, PageBoxes])
def test_chunks_fill_a_stage(kind: type, tile_n: int, head_dim: int) -> None:
    """Every 16 bytes of a stage belong to one chunk of one row, 128 bytes of which lie together."""
    rest = {field: 0 for field in kind.__dataclass_fields__ if field not in common(1, 1, 0, 0)}
    source = kind(**common(tile_n, head_dim, 0, 1), **rest)
    stage_bytes = tile_n * head_dim * 2
    assert source.tile_bytes == stage_bytes
    for stage in (0, 1):
        found = places(source, stage)
        assert sorted(found.values()) == list(range(stage * stage_bytes, (stage + 1) * stage_bytes, copy.CHUNK_BYTES))
        for (row, block, chunk), address in found.items():
            assert address == found[row, block, 0] + chunk * copy.CHUNK_BYTES
            # The swizzle permutes by address bits 7 to 9, so a row must be at its number modulo 8.
            assert address // copy.SWIZZLE_ROW_BYTES % GROUP_ROWS == row % GROUP_ROWS


@pytest.mark.parametrize(("tile_n", "head_dim", "box_rows"), BOXES)
def test_a_box_of_a_page_is_one_piece_of_a_stage(tile_n: int, head_dim: int, box_rows: int) -> None:
    """Box i lands where rows [i * box_rows, (i + 1) * box_rows) are."""
    source = PageBoxes(**common(tile_n, head_dim, 0, 1), table=0, page_shift=0, slots_per_page=0, box_rows=box_rows)
    box_bytes = box_rows * head_dim * 2
    for (row, _, _), address in places(source, 0).items():
        assert address // box_bytes == row // box_rows


def test_a_column_block_of_contiguous_rows_is_one_piece_of_a_stage() -> None:
    for tile_n, head_dim in SHAPES:
        source = ContiguousBoxes(**common(tile_n, head_dim, 0, 1), row_start=Int32(1000))
        for (_, block, _), address in places(source, 0).items():
            assert address // (tile_n * copy.SWIZZLE_ROW_BYTES) == block
        assert source.locate(Int32(3)).value == 1000 + 3 * tile_n


def test_each_way_to_fetch_has_a_source() -> None:
    from hopwell.kernels.sm90.prefill import SOURCES, PrefillSm90

    assert set(SOURCES) == set(KvFetch)
    config = PrefillConfig("sm_90a", "bf16", "bf16", 128, 128, MaskKind.CAUSAL, KvFetch.PAGE_ROWS, 0)
    assert PrefillSm90(config).source is PageRows
