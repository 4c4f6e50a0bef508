"""Rows of a prefill query tile: which query token and which head each of them is.

Heads of a KV head that share a tile are one below the other: row r is token r % tokens of head r // tokens of the tile,
where ``tokens`` is a multiple of 8. So 8 rows, which are a box of Q, an atom of the swizzle, and what a warp has in row
r of a fragment, belong to one head. Rows that are left over count as further tokens of the last head, which
are the next tile's to store; what Q they hold is of no account.
"""

from dataclasses import dataclass
from typing import Any

import cutlass

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import DeviceStruct


def request_shape(shape: TileShape, q_len) -> TileShape:
    """Return the shape of a request's tiles. Where it has fewer tokens than there is room for, and heads share tiles,
    they lie close together, so that warpgroups may have no rows at all: 4 heads with a token each take 32 rows of 128.
    """
    if isinstance(shape.heads, int):
        return shape
    needed = (q_len + (ATOM_ROWS - 1)) // ATOM_ROWS * ATOM_ROWS
    return TileShape(shape.heads, cutlass.max(cutlass.min(shape.tokens, needed), ATOM_ROWS))


@dataclass(frozen=True)
class QueryRows(DeviceStruct):
    """A warp's rows of a tile, in core matrices."""

    first: Any  # row of the tile
    shape: TileShape

    @property
    def of_one_head(self) -> bool:
        """Tell whether all rows of the tile are of one head, as far as is known when the kernel is compiled."""
        return isinstance(self.shape.heads, int) and self.shape.heads == 1

    def head(self, core_matrix: int):
        """Return the head of a core matrix's rows, counted from the tile's first one."""
        if self.of_one_head:
            return 0
        return cutlass.min((self.first + core_matrix * ATOM_ROWS) // self.shape.tokens, self.shape.heads - 1)

    def token(self, row, core_matrix: int):
        """Return the token of the warp's row ``row``, which is in ``eight``, counted from the tile's first one."""
        token = self.first + row
        return token if self.of_one_head else token - self.head(core_matrix) * self.shape.tokens
