"""Which prefill kernel serves a problem on sm_120a: tiles and resources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from hopwell.kernels.config import Tile
from hopwell.kernels.prefill_config import PrefillConfig
from hopwell.kernels.support import SM120_HEAD_DIMS

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


def _tile(m: int, n: int, kv_stages: int) -> Tile:
    return Tile(
        m,
        n,
        q_stages=1,
        kv_stages=kv_stages,
        producer_registers=PRODUCER_REGISTERS,
        consumer_registers=CONSUMER_REGISTERS,
    )


# A CTA has 99 KiB: that is Q and some stages of K and V, with the output staged in Q's place. Where O takes 128
# registers of a thread, the warps that 128 rows need have no room for the rest. ptxas gives the threads of sm_120 no
# more than they have at launch, 168 of 384 threads: steps of 64 keys at 128 columns spilled 30 registers in the loop,
# steps of 32 spill up to 10 once a work tile, outside of it.
_OF_COLUMNS = {64: _tile(128, 64, 4), 128: _tile(128, 32, 4), 192: _tile(128, 32, 2), 256: _tile(64, 32, 2)}


def _of(dims: tuple[int, int]) -> Tile:
    return next(tile for columns, tile in _OF_COLUMNS.items() if max(dims) <= columns)


@dataclass(frozen=True)
class Sm120PrefillConfig(PrefillConfig):
    """A prefill kernel whose products are those of single warps."""

    tiles: ClassVar[Mapping[tuple[int, int], Tile]] = {
        dims: _of(dims) for dims in SM120_HEAD_DIMS if dims[0] % 64 == 0 == dims[1] % 64
    }
    other_tiles: ClassVar[Mapping[tuple[int, int], Tile]] = {
        dims: _of(dims) for dims in SM120_HEAD_DIMS if dims[0] % 64 or dims[1] % 64
    }
