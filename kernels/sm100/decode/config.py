"""Decode configs of Blackwell (sm_100a, sm_103a) with tcgen05: leaves of keys, combined as on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType, Traits
from hopwell.kernels.config.decode import DecodeConfig, tiles_with_tree
from hopwell.kernels.sm100.common.resources import Columns


@dataclass(frozen=True)
class Sm100DecodeConfig(DecodeConfig):
    """A decode kernel whose S and O are in tensor memory until they are complete. Leaves, tree and registers are those
    of Hopper's kernels, so results have the same bits."""

    instruction_in_name: ClassVar[str] = "tcgen05"

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        most = max(tiles_with_tree(traits.dims[0], traits.kv_type), default=0)
        if traits.kv_type is not KvType.WIDE:
            return f"there is no tcgen05 decode kernel for {arch} with a cache of {traits.kv_type.value}"
        if traits.rows > most:
            return f"there is no tcgen05 decode kernel for {arch} with {traits.rows} packed rows; most: {most}"
        return super().refusal(traits, arch)

    @property
    def columns(self) -> Columns:
        """Columns of tensor memory: scores of the tiles of a leaf, and O in parts of 64 columns of V, for each row."""
        parts = self.layout.columns[1] // BLOCK_COLUMNS
        return Columns(dict(s=self.rows * self.leaf_tiles, o=self.rows * parts))

    @property
    def allocated_columns(self) -> int:
        """Columns to allocate: a power of two from 32 on."""
        return max(1 << (self.columns.total - 1).bit_length(), 32)

    def constraints(self) -> Iterator[tuple[bool, str]]:
        yield from super().constraints()
        yield self.columns.constraint
