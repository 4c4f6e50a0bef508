"""KV sources: the transfer of K and V tiles from global to shared memory.

A source is one operand (K or V) of one request and KV head, cut into tiles of ``tile_n`` tokens. It has two parts: the
location of the tokens (addresses) and the instructions that fetch them:

    ContiguousBoxes   one run of tokens        TMA boxes of tile_n tokens x 64 columns
    PageBoxes         pages of 8 tokens up     TMA boxes of whole pages, or of 64 tokens or fewer of one page
    PageRows          any other pages          16-byte cp.async by all lanes of the warp, see kv_rows.py
    TopkRows          a list of tokens         16-byte cp.async, like PageRows

8-bit elements are fetched in pairs, as 16-bit elements of half the number of columns.

Paged sources look up page ids, one box or row per lane, before they wait for a free stage. This hides the latency of
the table. If a tile has fewer boxes than a warp has lanes, one lookup serves several tiles. Loads complete on the full
barrier by themselves, so every stage can have a tile in flight. Consumers only wait for the full barrier, which means
that the tile is there.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, MAX_BOX_ROWS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import CACHE_LINE_BYTES, LANES
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct, load_index
from hopwell.kernels.parts.load.block_scales import ScaleCopies, ScaleRows, SharedScales
from hopwell.kernels.parts.load.page_size import EvenPages, page_size
from hopwell.kernels.parts.load.sequence import DraftRows, HiddenDrafts, hidden_drafts

BOXES_AT_ONCE = 8  # boxes whose coordinates a lane holds before they are fetched


@device_struct
class OperandHalf:
    """The half of each tile of K or V that a CTA of a pair loads."""

    step_keys: int  # keys of a step, where the next tile begins
    first_key: Any  # of this CTA in a step
    first_column: Any  # of this CTA, in halfwords


@device_struct
class KvOperand:
    """K or V in global memory: addresses in bytes, strides and columns in halfwords."""

    address: Int64
    page: Int64
    head: Int64
    row: Int64
    table: Int64
    table_row: Int64
    pages: Any  # the page size, see page_size.py
    head_dim: int
    columns: int  # in shared memory
    depth: int  # columns of them in use
    is_value: bool
    read_once: bool  # whether work tiles choose its L2 eviction policy
    scales: ScaleRows | None = None  # block scales that are copied beside the tiles
    shared_scales: SharedScales | None = None  # the places of these scales
    stage_columns: int | None = None  # columns of space in a stage; None: ``columns``
    page_slots: Any = None  # page stride / head stride; None: boxes divide by themselves
    draft_rows: DraftRows | None = None  # the draft mask, if the kernel has one
    topk: bool = False  # whether the table has the tokens of top-k lists instead of pages
    half: OperandHalf | None = None  # the half of each tile that this CTA of a pair loads; None: all of it

    def cache_policy(self, tile):
        """Return the L2 eviction policy of a work tile's rows.

        A row shorter than a cache line shares the line with neighbouring heads, if the heads are adjacent. Memory
        transfers whole cache lines, so an early eviction would take the neighbours' rows along before they are read. 32
        x 8192 tokens of 4 bits took 160 instead of 124 us (H100, 2026-11-25).
        """
        policy = tile.kv_policy()
        if HALFWORD_BYTES * self.head_dim < CACHE_LINE_BYTES:
            policy -= (self.head < self.row).to(Int32) * (policy - copy.EVICT_NORMAL)
        return policy

    def slots_of_page(self):
        """Return the number of head strides in a page stride, including everything between the heads."""
        return Int32(self.page // self.head)

    @staticmethod
    def key(a: Addresses, g: Geometry, config) -> "KvOperand":
        strides = config.layout.kv_strides(g.k_page, g.k_head, g.k_row)
        table = (a.key_table, g.key_table_row, page_size(g.page_divisor, g.k_rows, config.uneven_pages))
        scales = ScaleRows.key(config, a, g) if config.copies_scales else None
        return KvOperand._of(0, config, (a.key, *strides, *table), scales, DraftRows.of(config, a, g))

    @staticmethod
    def value(a: Addresses, g: Geometry, config) -> "KvOperand":
        strides = config.layout.kv_strides(g.v_page, g.v_head, g.v_row)
        table = (a.value_table, g.value_table_row, page_size(g.page_divisor, g.v_rows, config.uneven_pages))
        scales = ScaleRows.value(config, a, g, interleaves=False) if config.copies_scales else None
        return KvOperand._of(1, config, (a.value, *strides, *table), scales, DraftRows.of(config, a, g))

    @staticmethod
    def _of(part: int, config, places: tuple, scales: ScaleRows | None, drafts: DraftRows | None) -> "KvOperand":
        sizes = (config.layout.kv_dims[part], config.layout.columns[part], config.layout.loaded_depth[part])
        kind = dict(is_value=part == 1, read_once=config.reads_kv_once, draft_rows=drafts)
        return KvOperand(*places, *sizes, **kind, scales=scales, stage_columns=config.layout.stage_columns[part])


@device_struct
class KvSource:
    descriptor: Any  # TMA descriptor; None for PageRows
    shared: Int32  # address of stage 0
    kv_head: Int32
    first_key: Int32  # tokens before this one are not needed
    end_key: Int32  # the request's length
    tile_n: int
    columns: int
    stage_columns: int  # columns that a stage has room for
    # Whether rows outside [first_key, end_key) must read as zeros. V needs this, because 0 times arbitrary memory may
    # be NaN. K does not, because its scores are masked.
    zero_outside: bool
    drafts: HiddenDrafts | None  # rows in between that must read as zeros as well
    policy: Any  # of the L2 cache, see copy.tma_load
    scales: ScaleCopies | None  # block scales beside the tiles
    half: OperandHalf | None  # as in KvOperand

    columns_first = False  # see copy.swizzled_layout
    one_loop = False  # whether one loop serves all tiles

    @staticmethod
    def _common(operand: KvOperand, tile, descriptor, shared, tile_n: int) -> dict[str, Any]:
        return dict(
            descriptor=descriptor,
            shared=shared,
            kv_head=tile.kv_head,
            first_key=tile.keys.first_key,
            end_key=tile.request.kv_len,
            tile_n=tile_n,
            columns=operand.columns,
            stage_columns=operand.stage_columns or operand.columns,
            zero_outside=operand.is_value,
            drafts=hidden_drafts(operand.draft_rows if operand.is_value else None, tile.request),
            policy=operand.cache_policy(tile) if operand.read_once else None,
            scales=ScaleCopies.create(operand.scales, tile, operand.shared_scales),
            half=operand.half,
        )

    def first_token(self, tile):
        """Return the first token of a tile, counted from the request's first one."""
        return tile * self.tile_n if self.half is None else tile * self.half.step_keys + self.half.first_key

    def column_of(self, block: int):
        """Return the first column of a column block in global memory, in halfwords."""
        column = block * BLOCK_COLUMNS
        return column if self.half is None else self.half.first_column + column

    @property
    def tile_bytes(self) -> int:
        return self.tile_n * self.columns * HALFWORD_BYTES

    @property
    def shared_row(self) -> int:
        """Bytes of a row of a column block in shared memory."""
        return copy.row_bytes(self.columns)

    def stage_address(self, stage):
        return self.shared + stage * (self.tile_n * self.stage_columns * HALFWORD_BYTES)

    def vector_address(self, stage, row, block, vector):
        """Return the address of vector ``vector`` (as stored) of column block ``block`` in a row of a stage."""
        return self.vector_place(self.stage_address(stage), row, block, vector)

    def vector_place(self, base, row, block, vector):
        """Return the address that :meth:`vector_address` describes, in the stage that begins at ``base``."""
        row_address = copy.block_row(row, block, self.tile_n, self.columns, self.columns_first)
        return base + row_address * self.shared_row + vector * copy.VECTOR_BYTES

    @cute.jit
    def load(self, first, end, ring, step, zeroing_barrier, zeroed):
        """Fill stages with tiles [first, end), from right to left. Called by a whole warp.

        ``step`` counts all tiles, and ``zeroed`` tiles with zeroed rows. Both are returned with their new values.
        """
        return self.fill_down(self.locate, end - 1, first - 1, ring, step, zeroing_barrier, zeroed)

    @cute.jit
    def fill_down(self, locate: cutlass.Constexpr, tile, stop, ring, step, zeroing_barrier, zeroed):
        """Fill stages with tiles from ``tile`` down to ``stop`` + 1; ``locate`` finds each tile.

        Tiles that need no zeros have their own loop. In a common loop, each tile takes 17 more instructions.
        """
        if const_expr(self.one_loop or self.scales is not None):
            pages = self.scale_pages(tile)
            for n in cutlass.range(tile, stop, -1, unroll=1):
                location = self.claim(locate, n, ring, step)
                zeroed = self.fill(location, n, ring, step, zeroing_barrier, zeroed, pages)
                pages = self.scale_pages(n - 1)  # while the next stage is not free
                step += 1
        else:
            while tile > stop:
                last = stop
                if self._needs_zeros(tile):
                    location = self.claim(locate, tile, ring, step)
                    zeroed = self.fill(location, tile, ring, step, zeroing_barrier, zeroed)
                    step += 1
                    last = tile - 1
                else:
                    if const_expr(self.zero_outside):
                        last = cutlass.max(stop, (self.first_key + (self.tile_n - 1)) // self.tile_n - 1)
                    for n in cutlass.range(tile, last, -1, unroll=1):
                        location = self.claim(locate, n, ring, step)
                        self._expect(ring.full_barrier(step))
                        self.fetch(location, ring.stage(step), ring.full_barrier(step))
                        ring.fill_rest(step)
                        step += 1
                tile = last
        return step, zeroed

    def claim(self, locate, tile, ring, step):
        """Return the location of a tile, once its stage is free."""
        location = locate(tile)
        ring.wait_empty(step)
        return location

    def scale_pages(self, tile) -> list:
        """Return the pages of a tile's block scales, or an empty list without scales."""
        return [] if self.scales is None else self.scales.locate(tile)

    def copy_scales(self, location, pages, tile, stage, hidden) -> None:
        """Issue the copies of a tile's scales from ``pages``. ``hidden`` is the result of :meth:`hidden_rows`."""
        self.scales.copy(pages, tile, stage)

    def _needs_zeros(self, tile):
        """Whether some rows of ``tile`` have to be zeroed."""
        begin = tile * self.tile_n
        at_ends = self.zero_outside and (begin < self.first_key) | (begin + self.tile_n > self.end_key)
        return at_ends if self.drafts is None else at_ends | self.drafts.overlap(begin + self.tile_n)

    @cute.jit
    def _copy_tile_scales(self, location, pages, tile, stage) -> None:
        """Issue the copies of a tile's scales, with zeros for hidden new tokens.

        Tiles before the new tokens take a path of their own. A test for each word made NVFP4 decode with 4 new tokens 4
        % slower (H200 and H100, 2026-11-26).
        """
        if const_expr(self.drafts is None):
            self.copy_scales(location, pages, tile, stage, [])
        else:
            if self.drafts.overlap((tile + 1) * self.tile_n):
                self.copy_scales(location, pages, tile, stage, self.hidden_rows(tile))
            else:
                self.copy_scales(location, pages, tile, stage, [])

    def hidden_rows(self, tile) -> list:
        """Return the words of :meth:`HiddenDrafts.of_tile`, or an empty list without a draft mask."""
        return [] if self.drafts is None else self.drafts.of_tile(tile * self.tile_n, self.tile_n)

    @cute.jit
    def fill(self, location, tile, ring, step, zeroing_barrier, zeroed, pages=()):
        """Fill the ring's stage with ``tile`` and its scales from ``pages``, and return the new count of zeroed tiles.

        A tile with rows that must be zeroed first completes on a separate barrier. TMA must have written the rows
        before some are overwritten with zeros, and consumers must not see the tile before that.
        """
        barrier, needs_zeros = ring.full_barrier(step), self._needs_zeros(tile)
        if needs_zeros:
            barrier = zeroing_barrier
        self._expect(barrier)
        self.fetch(location, ring.stage(step), barrier)
        if const_expr(self.scales is not None):
            self._copy_tile_scales(location, pages, tile, ring.stage(step))
            cute.arch.cp_async_mbarrier_arrive_noinc(ring.full_barrier(step))
        if needs_zeros:
            hidden = self.hidden_rows(tile)  # while the tile is in flight
            cute.arch.mbarrier_wait(zeroing_barrier, zeroed & 1)
            zeroed += 1
            # A row range is empty if the first or the last needed key is in another tile.
            begin = tile * self.tile_n
            self.zero_hidden(ring.stage(step), hidden)
            self.zero_rows(ring.stage(step), 0, cutlass.min(self.first_key - begin, self.tile_n))
            self.zero_rows(ring.stage(step), cutlass.max(self.end_key - begin, 0), self.tile_n)
            if cute.arch.lane_idx() < ring.producer_lanes:
                cute.arch.mbarrier_arrive(ring.full_barrier(step))
        else:
            ring.fill_rest(step)
        return zeroed

    def _expect(self, barrier) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tile_bytes)

    @cute.jit
    def zero_rows(self, stage, begin, end):
        """Zero rows [begin, end) of a stage, visibly to the tensor cores. Called by a whole warp."""
        vectors = self.shared_row // copy.VECTOR_BYTES
        for i in cutlass.range(begin * vectors + cute.arch.lane_idx(), end * vectors, LANES, unroll=1):
            self._zero_vectors(stage, i // vectors, i % vectors)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def _zero_vectors(self, stage, row, vector) -> None:
        for block in range(copy.column_blocks(self.columns)):
            copy.store_shared_zero(self.vector_address(stage, row, block, vector))

    @cute.jit
    def zero_hidden(self, stage, hidden):
        """Zero the rows whose bits are set in ``hidden``. The fence of :meth:`zero_rows` must follow."""
        vectors, lane = self.shared_row // copy.VECTOR_BYTES, cute.arch.lane_idx()
        for i in cutlass.range_constexpr(len(hidden)):
            if (hidden[i] >> lane.to(Uint32)) & Uint32(1) != Uint32(0):
                for vector in cutlass.range(vectors, unroll=1):
                    self._zero_vectors(stage, LANES * i + lane, vector)


@dataclass
class ContiguousBoxes(KvSource):
    row_start: Int32  # the request's first token in the tensor

    @classmethod
    def create(cls, operand: KvOperand, tile, descriptor, shared, tile_n: int, box_rows: int) -> "ContiguousBoxes":
        start = tile.request.v_start if operand.is_value else tile.request.k_start
        return cls(**cls._common(operand, tile, descriptor, shared, tile_n), row_start=start)

    def locate(self, tile):
        return self.row_start + self.first_token(tile)

    @cute.jit
    def fetch(self, row, stage, barrier):
        with cute.arch.elect_one():
            for block in cutlass.range_constexpr(self.columns // BLOCK_COLUMNS):
                destination = self.stage_address(stage) + block * (self.tile_n * copy.SWIZZLE_ROW_BYTES)
                coordinates = (self.column_of(block), row, self.kv_head)
                copy.tma_load(self.descriptor, destination, barrier, coordinates, self.policy)


@device_struct
class RequestPages:
    """The page table of a request."""

    address: Int64  # of the request's page ids
    size: Any  # the page size, see page_size.py

    @staticmethod
    def of(operand: KvOperand, tile) -> "RequestPages":
        return RequestPages(operand.table + 4 * operand.table_row * tile.request.index, operand.pages)

    def lookup(self, key):
        """Return (page, row within the page) of a token."""
        page, row = self.size.split(key)
        return load_index(self.address, page), row


@dataclass
class PageBoxes(KvSource):
    """Paged KV source with TMA boxes of ``box_rows`` tokens and all columns.

    A page of 16 x 128 takes one instruction for 4 KiB.

    The tensor map has the dimensions [slots, core matrices of rows, column blocks, 8 rows, 64 columns]. It omits the
    column blocks if there is only one. A slot is one head of one page, and slots are one head stride apart. The page
    stride must therefore be a multiple of the head stride.
    """

    pages: RequestPages
    slots_per_page: Int32  # page stride / head stride
    box_rows: int

    columns_first = True

    @classmethod
    def create(cls, operand: KvOperand, tile, descriptor, shared, tile_n: int, box_rows: int) -> "PageBoxes":
        return cls(
            **cls._common(operand, tile, descriptor, shared, tile_n),
            pages=RequestPages.of(operand, tile),
            slots_per_page=operand.slots_of_page() if operand.page_slots is None else operand.page_slots,
            box_rows=box_rows,
        )

    @property
    def boxes(self) -> int:
        return self.tile_n // self.box_rows

    @cute.jit
    def load(self, first, end, ring, step, zeroing_barrier, zeroed):
        # One lookup serves all tiles for which the warp has enough lanes. Loaders share schedulers with the softmax
        # warps: 96 fewer instructions per tile made steps 1 % shorter (H200, 2026-11-22).
        tiles = LANES // self.boxes
        for last in cutlass.range(end - 1, first - 1, -tiles, unroll=1):
            slots, core_matrices, scales = self.locate(last - (tiles - 1))

            def locate(n, last=last, slots=slots, core_matrices=core_matrices, scales=scales):
                first = (n - last + (tiles - 1)) * self.boxes
                lane = cute.arch.lane_idx() + first
                return cute.arch.shuffle_sync(slots, lane), cute.arch.shuffle_sync(core_matrices, lane), scales, first

            stop = cutlass.max(last - tiles, first - 1)
            step, zeroed = self.fill_down(locate, last, stop, ring, step, zeroing_barrier, zeroed)
        return step, zeroed

    def locate(self, tile):
        """Return (slot, core matrix of rows, address of the scales) of box i in lane i.

        Boxes are counted from the tile's first box.

        Lanes past the tile's last box hold boxes of the next tile. A box without needed tokens fetches a needed page
        again. Every tile then has the same number of bytes, and no other table entry is read.
        """
        lane = cute.arch.lane_idx()
        if const_expr(self.half is None):
            key = self.first_token(tile) + lane * self.box_rows
        else:
            key = self.first_token(tile + lane // self.boxes) + lane % self.boxes * self.box_rows
        first_box = self.first_key // self.box_rows * self.box_rows
        page, row = self.pages.lookup(cutlass.max(cutlass.min(key, self.end_key - 1), first_box))
        scales = None
        if const_expr(self.scales is not None):
            scales = self.scales.of_box(page, row // self.box_rows * self.box_rows)
        return page * self.slots_per_page + self.kv_head, row // ATOM_ROWS, scales

    def scale_pages(self, tile) -> list:
        return []

    def copy_scales(self, location, pages, tile, stage, hidden) -> None:
        *_, boxes, first = location
        self.scales.copy_boxes(boxes, first, self.box_rows, tile, stage, self.zero_outside, hidden)

    @property
    def box_bytes(self) -> int:
        """Distance between consecutive boxes in shared memory, in bytes."""
        return self.box_rows * self.columns * HALFWORD_BYTES

    @cute.jit
    def fetch(self, location, stage, barrier):
        slots, core_matrices, *_ = location
        base = self.stage_address(stage)
        for first in cutlass.range_constexpr(0, self.boxes, BOXES_AT_ONCE):
            boxes = range(first, min(first + BOXES_AT_ONCE, self.boxes))
            corners = [(cute.arch.shuffle_sync(slots, i), self._core_matrix(core_matrices, i)) for i in boxes]
            with cute.arch.elect_one():
                for i, corner in zip(boxes, corners, strict=True):
                    self.load_box(base + i * self.box_bytes, *corner, barrier)

    def _core_matrix(self, core_matrices, box: int):
        return Int32(0) if self.whole_pages else cute.arch.shuffle_sync(core_matrices, box)

    @property
    def whole_pages(self) -> bool:
        """Whether a box must be a whole page.

        For page sizes that are powers of two, a box below the maximum height for tiles is as tall as the page.
        """
        return isinstance(self.pages.size, EvenPages) and self.box_rows < min(self.tile_n & -self.tile_n, MAX_BOX_ROWS)

    def load_box(self, box, slot, core_matrix, barrier) -> None:
        corner = (0, 0) if self.columns <= BLOCK_COLUMNS else (0, 0, 0)  # all 8 rows of a core matrix, all columns
        copy.tma_load(self.descriptor, box, barrier, (*corner, core_matrix, slot), self.policy)


@dataclass
class PageColumnBoxes(PageBoxes):
    """TMA boxes of one column block each, for head dims that do not fill the last block; TMA fills it with zeros."""

    columns_first = False
    one_loop = True  # a second copy of this many boxes spills

    @property
    def box_bytes(self) -> int:
        return self.box_rows * copy.row_bytes(self.columns)

    def load_box(self, box, slot, core_matrix, barrier) -> None:
        for block in range(copy.column_blocks(self.columns)):
            destination = box + block * (self.tile_n * copy.SWIZZLE_ROW_BYTES)
            coordinates = (self.column_of(block), core_matrix * ATOM_ROWS, slot)
            copy.tma_load(self.descriptor, destination, barrier, coordinates, self.policy)
