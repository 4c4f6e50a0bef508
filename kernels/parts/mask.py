"""Masks: which keys a query row sees, and from that which KV tiles a query tile visits.

Every mask here is an interval: the row at position ``p`` sees keys ``lo <= j < hi``. ``keys`` is the only function that
differs from mask to mask; tile ranges and the per-element predicate follow from it. ``lo`` and ``hi`` never decrease
with ``p``, so the first and the last row of a tile bound all others.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.parts.device import DeviceStruct
from hopwell.kernels.problem import MaskKind


@dataclass
class TileRange(DeviceStruct):
    """KV tiles of one query tile. Tiles in [full_begin, full_end) are visible to every row and need no predicate."""

    begin: Int32
    end: Int32
    full_begin: Int32
    full_end: Int32
    first_key: Int32  # no row of the tile sees a key before this one


@dataclass
class IntervalMask(DeviceStruct):
    kind: MaskKind
    window_left: Int32
    chunk: Int32  # a power of two

    @property
    def has_left_edge(self) -> bool:
        return self.kind in (MaskKind.SLIDING_WINDOW, MaskKind.CHUNKED)

    @property
    def has_diagonal(self) -> bool:
        return self.kind is not MaskKind.FULL

    def keys(self, position, kv_len):
        """The visible keys [lo, hi) of the row at ``position``; empty when hi <= lo."""
        lo, hi = Int32(0), kv_len
        if const_expr(self.kind is not MaskKind.FULL):
            hi = cutlass.min(kv_len, position + 1)
        if const_expr(self.kind is MaskKind.SLIDING_WINDOW):
            lo = cutlass.max(position - self.window_left, 0)
        if const_expr(self.kind is MaskKind.CHUNKED):
            lo = cutlass.max(position, 0) & -self.chunk
        return lo, hi

    def tiles(self, first_position, last_position, kv_len, tile_n: int) -> TileRange:
        """The KV tiles that rows ``first_position``..``last_position`` visit."""
        first_lo, first_hi = self.keys(first_position, kv_len)
        last_lo, last_hi = self.keys(last_position, kv_len)
        end = (cutlass.max(last_hi, 0) + (tile_n - 1)) // tile_n
        begin = cutlass.min(first_lo // tile_n, end)
        # The last tile is always processed with the predicate, so the full range stops before it.
        full_end = cutlass.max(cutlass.min(cutlass.max(first_hi, 0) // tile_n, end - 1), begin)
        full_begin = cutlass.min((last_lo + (tile_n - 1)) // tile_n, full_end)
        return TileRange(begin, end, full_begin, full_end, first_lo)

    @cute.jit
    def apply(self, scores, tile_start, first_row_position, kv_len):
        """Put -inf where a row of ``scores`` (a RowFragment) does not see a key of the tile."""
        for r in cutlass.range_constexpr(scores.rows):
            lo, hi = self.keys(first_row_position + scores.row_offset(r), kv_len)
            origin = tile_start + scores.first_column()
            hi -= origin
            lo -= origin
            for c in cutlass.range_constexpr(scores.columns):
                visible = scores.column_offset(c) < hi
                if const_expr(self.has_left_edge):
                    visible = visible and scores.column_offset(c) >= lo
                scores.set(r, c, scores.get(r, c) if visible else -Float32.inf)
