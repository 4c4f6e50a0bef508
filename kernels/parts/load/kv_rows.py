"""KV sources that copy K and V row by row with cp.async, for layouts in which no TMA box holds several tokens.

They fill the same tiles as the sources in ``kv_source.py``.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import load_index
from hopwell.kernels.parts.load.kv_source import KvOperand, KvSource, RequestPages


@dataclass
class PageRows(KvSource):
    """Paged KV source with row copies: eight lanes copy 128 adjacent bytes of a row.

    The same lanes then copy the row's other column blocks. The addresses of these blocks differ by constants, so each
    row's address is computed once.

    Unneeded rows, and vectors past the end of a row, are filled with zeros by the same copies.
    """

    pages: RequestPages
    topk: bool  # whether the table has the tokens of a top-k list, from any page; a negative entry names none
    head: Int64  # address of the head's elements in page 0
    page_bytes: Int64
    row_bytes: Int64
    vectors: int  # per row
    last_bytes: int  # of a row's last vector
    tile_vectors: int  # per row of the tile: whole column blocks
    first_row: Any  # first row of the tile that this warp copies
    rows: int  # a multiple of the warp's lanes

    @classmethod
    def create(cls, operand: KvOperand, tile, descriptor, shared, tile_n: int, box_rows: int, **more) -> "PageRows":
        """Return the rows of a work tile's request; ``more`` holds the additional fields of a subclass."""
        whole, rest = divmod(operand.head_dim * HALFWORD_BYTES, copy.VECTOR_BYTES)
        tile_vectors = -(-operand.depth // BLOCK_COLUMNS) * copy.VECTORS_PER_ROW
        return cls(
            **cls._common(operand, tile, descriptor, shared, tile_n),
            pages=RequestPages.of(operand, tile),
            topk=operand.topk,
            head=operand.address + HALFWORD_BYTES * operand.head * tile.kv_head,
            page_bytes=HALFWORD_BYTES * operand.page,
            row_bytes=HALFWORD_BYTES * operand.row,
            vectors=whole + (rest > 0),
            last_bytes=rest or copy.VECTOR_BYTES,
            tile_vectors=min(tile_vectors, operand.columns * HALFWORD_BYTES // copy.VECTOR_BYTES),
            first_row=0,
            rows=tile_n,
            **more,
        )

    def share(self, warp, warps: int) -> "PageRows":
        """Return the share of one of ``warps`` warps that copy each tile together."""
        rows = self.rows // warps
        assert rows % LANES == 0, f"{warps} warps cannot share {self.rows} rows: each looks up one a lane"
        return replace(self, first_row=warp * rows, rows=rows)

    @property
    def lanes_per_row(self) -> int:
        return math.gcd(copy.VECTORS_PER_ROW, self.tile_vectors)

    @cute.jit
    def load(self, first, end, ring, step, zeroing_barrier, zeroed):
        # The table is read one tile ahead: its entries arrive while the copies of the previous tile are issued.
        entries = self.read_table(end - 1)
        for n in cutlass.range(end - 1, first - 1, -1, unroll=1):
            addresses, pages = self.locate(n, entries), entries
            entries = self.read_table(n - 1)
            ring.wait_empty(step)
            if const_expr(self.scales is not None):
                self.scales.copy(pages, n, ring.stage(step))
            self.copy_rows(addresses, ring.stage(step), ring.full_barrier(step))
            step += 1
        return step, zeroed

    def _keys(self, tile) -> list:
        """Return row 32 * i + lane of this warp's rows, for each i."""
        first = self.first_token(tile) + self.first_row + cute.arch.lane_idx()
        return [first + i for i in range(0, self.rows, LANES)]

    def read_table(self, tile) -> list:
        """Read the table's entries for :meth:`_keys`; the entry of an unneeded row is -1."""
        return [self._entry(key) for key in self._keys(tile)]

    @cute.jit
    def _entry(self, key):
        entry = Int32(-1)
        if key >= self.first_key and key < self.end_key:
            entry = load_index(self.pages.address, self._index(key))
        if const_expr(self.drafts is not None):
            entry = Int32(-1) if self.drafts.hides(key) else entry
        return entry

    def _index(self, key):
        """Return the index of a token's table entry."""
        return key if self.topk else self.pages.size.split(key)[0]

    def locate(self, tile, entries) -> list:
        """Return the addresses of the rows of :meth:`_keys`; the address of an unneeded row is 0."""
        return [self._address(entry, key) for entry, key in zip(entries, self._keys(tile), strict=True)]

    @cute.jit
    def _address(self, entry, key):
        address = Int64(0)
        if entry >= 0:
            page, row = self._place(entry, key)
            address = self.head + page * self.page_bytes + row * self.row_bytes
        return address

    def _place(self, entry, key):
        """Return (page, row within it) of a token."""
        return self.pages.size.split(entry) if self.topk else (entry, self.pages.size.split(key)[1])

    @cute.jit
    def copy_rows(self, addresses, stage, barrier) -> None:
        """Fill a stage. Every lane arrives at ``barrier`` once its copies have completed."""
        rows_at_once = LANES // self.lanes_per_row
        lane_row, vector = cute.arch.lane_idx() // self.lanes_per_row, cute.arch.lane_idx() % self.lanes_per_row
        # The swizzle repeats after ATOM_ROWS, so rows that far apart have a constant address difference.
        first_row = self.first_row + lane_row
        targets = [self._target(stage, first + first_row, vector) for first in range(0, ATOM_ROWS, rows_at_once)]
        stride = len(targets) * rows_at_once
        for i in cutlass.range_constexpr(len(addresses)):
            for first in cutlass.range(0, LANES, stride, unroll=2):
                offset = self.vector_place(0, LANES * i + first, 0, 0)
                for k in cutlass.range_constexpr(len(targets)):
                    row = cute.arch.shuffle_sync(addresses[i], first + k * rows_at_once + lane_row)
                    self._copy_row(row, targets[k] + offset, vector)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    def _target(self, stage, row, vector):
        """Return the shared-memory address of a vector of a row's first column block."""
        return self.vector_address(stage, row, 0, copy.permuted(row, vector, self.shared_row))

    @cute.jit
    def _copy_row(self, row, target, vector) -> None:
        """Copy vectors ``vector``, ``vector + lanes_per_row``... of the row at address ``row``."""
        source = row + vector * copy.VECTOR_BYTES
        for c in cutlass.range_constexpr(0, self.tile_vectors, self.lanes_per_row):
            wanted, size, last = row != 0, copy.VECTOR_BYTES, self.vectors - 1 - c
            if const_expr(last < self.lanes_per_row - 1):
                wanted = wanted and vector <= last
            if const_expr(self.last_bytes < copy.VECTOR_BYTES and last < self.lanes_per_row):
                size = Int32(self.last_bytes) if vector == last else Int32(copy.VECTOR_BYTES)
            offset = self.vector_place(0, 0, c // copy.VECTORS_PER_ROW, c % copy.VECTORS_PER_ROW)
            copy.async_copy_or_zero(target + offset, source + c * copy.VECTOR_BYTES, wanted, size)
