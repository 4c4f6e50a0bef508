"""The schedule warp of Blackwell prefill, which also loads Q."""

from dataclasses import dataclass
from typing import Any

from hopwell.kernels.parts.partition.tiles import QueryTile, TileSchedule


@dataclass
class LoadingSchedule(TileSchedule):
    """Schedule of the warp that also loads the query tiles of each work tile it publishes: no other warp is left for
    that."""

    kernel: Any  # the PrefillSm100: configuration only
    descriptor: Any
    tiles: Any
    ring: Any

    def published(self, tile: QueryTile, step) -> None:
        row = tile.request.q_start + tile.first_row
        q_tiles = self.kernel.config.q_tiles
        for index in range(q_tiles):
            first = row + self.kernel.first_row(index)
            self.kernel.fetch_q(self.descriptor, self.tiles, self.ring, q_tiles * step + index, first, tile.head)
