"""Rows of a prefill query tile: the query token and head of each row.

Packed GQA stacks the heads of a KV head in one tile: row r is token r % tokens of head r // tokens. ``tokens`` is a
multiple of 8. Each group of 8 rows therefore belongs to one head. It is a box of Q, an atom of the swizzle, and a
warp's share of row r of a fragment. Leftover rows count as further tokens of the last head. These tokens belong to the
next tile, which stores them, so the Q in these rows does not matter.
"""

from typing import Any

import cutlass

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct


def request_shape(shape: TileShape, q_len) -> TileShape:
    """Return the shape of a request's tiles.

    A request with fewer tokens than the tile has room for packs its heads closely if heads share tiles. Some warpgroups
    may then have no rows: 4 heads with one token each take 32 of 128 rows.
    """
    if isinstance(shape.heads, int):
        return shape
    needed = (q_len + (ATOM_ROWS - 1)) // ATOM_ROWS * ATOM_ROWS
    return TileShape(shape.heads, cutlass.max(cutlass.min(shape.tokens, needed), ATOM_ROWS))


@device_struct(frozen=True)
class QueryRows:
    """A warp's rows of a tile, in core matrices."""

    first: Any  # first row within the tile
    shape: TileShape

    @property
    def of_one_head(self) -> bool:
        """Whether all rows of the tile belong to one head, as known at compile time."""
        return isinstance(self.shape.heads, int) and self.shape.heads == 1

    def head(self, core_matrix: int):
        """Return the head of a core matrix's rows, relative to the tile's first head."""
        if self.of_one_head:
            return 0
        return cutlass.min((self.first + core_matrix * ATOM_ROWS) // self.shape.tokens, self.shape.heads - 1)

    def token(self, row, core_matrix: int):
        """Return the token of the warp's row ``row`` in ``core_matrix``, relative to the tile's first token."""
        token = self.first + row
        return token if self.of_one_head else token - self.head(core_matrix) * self.shape.tokens
