"""Block scales of paged K and V, in the layouts of ``hopwell.layouts.scales``."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Int64, Uint8, Uint16, Uint32, const_expr

from hopwell.kernels.hardware import LANES
from hopwell.kernels.launch.arguments import Addresses
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, global_array, load_index, prmt, shared_address
from hopwell.kernels.parts.core.warp_mma import QUAD
from hopwell.kernels.parts.dequant import e2m1
from hopwell.kernels.parts.load.page_size import page_size
from hopwell.kernels.parts.load.sequence import DraftRows, hidden_drafts

TOKENS = 4  # scales in a word; with interleaved scales, tokens whose scales of a block are adjacent
# prmt selectors for two words. INTERLEAVED: bytes of the lower halves alternate, then bytes of the upper halves.
# HALVES: both lower halves, then both upper halves.
LOWEST_BYTES = 0x4040  # of two words, twice
INTERLEAVED, HALVES = (0x5140, 0x7362), (0x5410, 0x7632)


@device_struct
class ScaleRows:
    """The block scales of K or of V. Strides are in bytes."""

    address: Int64
    page: Int64
    head: Int64
    row: Int64
    table: Int64
    table_row: Int64
    pages: Any  # the page size, see page_size.py
    blocks: int  # per row
    interleaves: bool
    draft_rows: DraftRows | None  # of V: scales of keys that no row sees must read as zeros

    @staticmethod
    def key(config, a: Addresses, g) -> "ScaleRows":
        places = (a.key_scales, g.k_scale_page, g.k_scale_head, g.k_scale_row, a.key_table, g.key_table_row)
        pages = page_size(g.page_divisor, g.k_rows, config.uneven_pages)
        return ScaleRows(*places, pages, config.kv_element.scales_of(config.head_dim_qk), False, None)

    @staticmethod
    def value(config, a: Addresses, g, *, interleaves: bool) -> "ScaleRows":
        places = (a.value_scales, g.v_scale_page, g.v_scale_head, g.v_scale_row, a.value_table, g.value_table_row)
        pages = page_size(g.page_divisor, g.v_rows, config.uneven_pages)
        blocks = config.kv_element.scales_of(config.head_dim_v)
        return ScaleRows(*places, pages, blocks, interleaves, DraftRows.of(config, a, g))

    @cute.jit
    def look_up(self, tile, key, n):
        """Return the page of a key of tile ``n``, or -1 if the key is not needed."""
        entry, request = Int32(-1), tile.request
        if n >= tile.keys.begin and key >= tile.keys.first_key and key < request.kv_len:
            entry = load_index(self.table + 4 * self.table_row * request.index, self.pages.split(key)[0])
        drafts = hidden_drafts(self.draft_rows, request)
        if const_expr(drafts is not None):
            entry = Int32(-1) if drafts.hides(key) else entry
        return entry

    def read(self, tile, key, page, part, parts: int, *, apart: bool = False) -> list:
        """Read the scales of an equal part of a row, four per word, or 0 if ``page`` is negative.

        With ``apart``, interleaved scales stay in one word each, because packing them would wait for the loads.
        """
        head = self.address + page * self.page + tile.kv_head * self.head
        row = self.pages.split(key)[1]
        count = self.blocks // parts
        apart = apart and self.interleaves
        words = [Uint32(0) for _ in range(count if apart else -(-count // TOKENS))]
        return self._read(head, row, page, part * count, count, apart, words)

    @cute.jit
    def _read(self, head, row, page, first, count: cutlass.Constexpr[int], apart: cutlass.Constexpr, words):
        if page >= 0:
            if const_expr(self.interleaves):
                # Four tokens share four rows. Each of the rows holds a quarter of the blocks.
                quarter = self.blocks // TOKENS
                for i in cutlass.range_constexpr(count):
                    block = first + i
                    place = head + (row // TOKENS * TOKENS + block // quarter) * self.row
                    place += block % quarter * TOKENS + row % TOKENS
                    scale = global_array(Uint8, place)[0].to(Uint32)
                    words[i if apart else i // TOKENS] |= scale << (0 if apart else 8 * (i % TOKENS))
            elif const_expr(count % TOKENS == 0):
                for i in cutlass.range_constexpr(len(words)):
                    words[i] = global_array(Uint32, head + row * self.row + first)[i]
            else:  # a part of a row of 4 or 12 blocks begins in the middle of a word
                for i in cutlass.range_constexpr(count // 2):
                    pair = global_array(Uint16, head + row * self.row + first)[i].to(Uint32)
                    words[i // 2] = words[i // 2] | (pair << (16 * (i % 2)))
        return words

    def factors(self, words: list, pair: int, dtype, *, apart: bool):
        """Return the scales of blocks 2 ``pair`` and 2 ``pair`` + 1 as numbers of ``dtype``.

        ``words`` is the result of :meth:`read`.
        """
        if apart and self.interleaves:
            return e2m1.dequantized_half(prmt(words[2 * pair], words[2 * pair + 1], LOWEST_BYTES), 0, dtype)
        return e2m1.dequantized_half(words[pair // 2], pair % 2, dtype)


@device_struct
class SharedScales:
    """Block scales beside the stages of K or V in shared memory: one row of scales for each token of a tile."""

    address: Int32  # of stage 0
    blocks: int  # per row, with padding
    tile_n: int

    @staticmethod
    def of(kernel, tiles, part: int) -> "SharedScales":
        """Return the scales of K (0) or V (1)."""
        return SharedScales(shared_address(tiles.scales[part]), kernel.layout.scale_blocks[part], kernel.tile.n)

    def row(self, stage, row):
        """Return the address of a row's scales."""
        return self.address + (stage * self.tile_n + row) * self.blocks

    def of_part(self, stage, row, part, parts: int) -> list:
        """Return the scales of an equal part of a row, at most four blocks, as pairs of float16.

        A single scale is in the lower half.
        """
        count = self.blocks // parts
        word = copy.load_bytes(self.row(stage, row) + part * count, count)
        return [e2m1.dequantized_half(word, half, Float16) for half in range(-(-count // 2))]

    def of_two_rows(self, stage, row, block):
        """Return the scales of a block of this row and of the next row, as a pair of float16."""
        first = self.row(stage, row) + block // TOKENS * TOKENS
        words = [copy.load_shared(first + self.blocks * i, 1)[0] for i in range(2)]
        return e2m1.scales_of_two(*words, block % TOKENS)

    def arrange(self, stage) -> None:
        """Transpose a stage from rows by blocks to blocks by keys, as :meth:`of_core_matrices` reads it.

        Called by a whole warp.

        A lane has two neighbouring keys of each eight. For each block, its scales of all core matrices become adjacent.
        """
        first, words, lane = self.row(stage, 0), self.blocks // TOKENS, cute.arch.lane_idx()
        count = self.tile_n // TOKENS * words  # groups of four keys by four blocks
        loaded = []
        for i in range(0, count, LANES):
            index = (lane + i) % count
            keys, word = index // words, index % words
            t, pair = keys % QUAD, keys // QUAD
            key = 2 * copy.ATOM_ROWS * pair + 2 * t
            rows = [first + (key + more) * self.blocks for more in (0, 1, copy.ATOM_ROWS, copy.ATOM_ROWS + 1)]
            four = [copy.load_shared(row + word * TOKENS, 1)[0] for row in rows]
            loaded.append((self._place(first, word * TOKENS, t) + pair * TOKENS, four))
        cute.arch.sync_warp()
        for place, (a, b, c, d) in loaded:
            pairs = [(prmt(a, b, select), prmt(c, d, select)) for select in INTERLEAVED]
            for block in range(TOKENS):
                copy.store_shared(place + block * self.tile_n, [prmt(*pairs[block // 2], HALVES[block % 2])])

    def _place(self, first, block, t):
        """Return the address of the scales of a block for one lane's keys, in the transposed order."""
        return first + block * self.tile_n + t * (self.tile_n // QUAD)

    def of_core_matrices(self, stage, core_matrix, t, block) -> list:
        """Return the scales of a block for a lane's two keys in four core matrices, as pairs of float16.

        The stage must be transposed by :meth:`arrange`.
        """
        words = copy.load_shared(self._place(self.row(stage, 0), block, t) + 2 * core_matrix, 2)
        return [e2m1.dequantized_half(word, half, Float16) for word in words for half in range(2)]


@device_struct
class ScaleCopies:
    """Copies of block scales to shared memory beside the tiles of a request. Called by a whole warp.

    Scales of unneeded tokens become zeros: they may be NaN in memory, and 0 times NaN is NaN.
    """

    target: SharedScales
    blocks: int  # per row in global memory
    head: Int64  # address of the head's scales in page 0
    page: Int64
    row: Int64
    table: Int64  # address of the request's page ids
    pages: Any  # the page size, see page_size.py
    first_key: Int32
    end_key: Int32

    @staticmethod
    def create(rows: ScaleRows | None, tile, shared: SharedScales | None) -> "ScaleCopies | None":
        """Return the copies of ``rows`` to ``shared``, if there are any, for a work tile's head and request."""
        if rows is None:
            return None
        return ScaleCopies(
            shared,
            rows.blocks,
            rows.address + tile.kv_head * rows.head,
            rows.page,
            rows.row,
            rows.table + 4 * rows.table_row * tile.request.index,
            rows.pages,
            tile.keys.first_key,
            tile.request.kv_len,
        )

    def locate(self, tile) -> list:
        """Return the pages of tokens 32 i + lane of a tile; the page of an unneeded token is -1."""
        first = tile * self.target.tile_n + cute.arch.lane_idx()
        return [self._page(first + i) for i in range(0, self.target.tile_n, LANES)]

    @cute.jit
    def _page(self, key):
        page = Int32(-1)
        if key >= self.first_key and key < self.end_key:
            page = load_index(self.table, self.pages.split(key)[0])
        return page

    def _bytes(self, lane_word):
        """Return the bytes of a lane's word of a row that the row has in global memory."""
        if self.blocks == self.target.blocks:
            return TOKENS
        return cutlass.max(cutlass.min(self.blocks - lane_word, TOKENS), 0)

    @cute.jit
    def copy(self, pages, tile, stage) -> None:
        """Issue the copies of a tile into a stage. Neighbouring lanes copy neighbouring words."""
        words = self.target.blocks // TOKENS
        lane_row, lane_word = cute.arch.lane_idx() // words, cute.arch.lane_idx() % words * TOKENS
        place, size = self.target.row(stage, lane_row) + lane_word, self._bytes(lane_word)
        for i in cutlass.range_constexpr(len(pages)):
            address = self._address(pages[i], tile * self.target.tile_n + LANES * i + cute.arch.lane_idx())
            for first in cutlass.range(0, LANES, LANES // words, unroll=2):
                source = cute.arch.shuffle_sync(address, first + lane_row)
                to_row = place + (LANES * i + first) * self.target.blocks
                copy.async_word_or_zero(to_row, source + lane_word, source != 0, size)

    def of_box(self, page, row):
        """Return the address of the scales of a token of a page."""
        return self.head + page * self.page + row * self.row

    @cute.jit
    def copy_boxes(
        self, boxes, first, box_rows: cutlass.Constexpr[int], tile, stage, zeroes: cutlass.Constexpr[bool], hidden
    ):
        """Issue the scale copies of a tile made of boxes of ``box_rows`` tokens.

        Lane ``first`` and the lanes after it hold the address of the scales of each box's first token. With ``zeroes``,
        scales of unneeded tokens and of tokens whose bits are set in ``hidden`` become zeros. Without it, the results
        of these scales are never read.

        A lane copies the same words of every box, so an address takes two shuffles and an addition. With a page lookup
        and an address for each token, a tile took 110 instructions, in warps that share schedulers with the multiplying
        warps.
        """
        words, tile_n = self.target.blocks // TOKENS, self.target.tile_n
        at_once = LANES // words
        lane_row, lane_word = cute.arch.lane_idx() // words, cute.arch.lane_idx() % words * TOKENS
        own = (lane_row % box_rows if at_once > box_rows else lane_row) * self.row + lane_word
        place, size = self.target.row(stage, lane_row) + lane_word, self._bytes(lane_word)
        box = Int64(0)
        for row in cutlass.range_constexpr(0, tile_n, at_once):
            if const_expr(row % box_rows == 0 or at_once > box_rows):
                box = cute.arch.shuffle_sync(boxes, first + (row + (lane_row if at_once > box_rows else 0)) // box_rows)
                box += own
            wanted = True
            if const_expr(zeroes):
                key = tile * tile_n + row + lane_row
                wanted = (key >= self.first_key) & (key < self.end_key)
                if const_expr(len(hidden) > 0):
                    bit = (row % LANES + lane_row).to(Uint32)
                    wanted = wanted & ((hidden[row // LANES] >> bit) & Uint32(1) == Uint32(0))
            copy.async_word_or_zero(place + row * self.target.blocks, box, wanted, size)
            box += at_once * self.row

    @cute.jit
    def _address(self, page, key):
        """Return the address of a token's scales, or 0 if the token is not needed."""
        address = Int64(0)
        if page >= 0:
            address = self.head + page * self.page + self.pages.split(key)[1] * self.row
        return address
