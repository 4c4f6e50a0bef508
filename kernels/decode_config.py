"""Which decode kernel serves a problem, like ``config.py`` for prefill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hopwell.kernels import support
from hopwell.kernels.config import (
    ARCHS,
    DTYPES,
    KernelConfig,
    Tile,
    kv_fetch,
    paged_fetches,
    require_dtypes,
    require_page_size,
)
from hopwell.kernels.problem import AttentionProblem, MaskKind
from hopwell.kernels.splitting import ROWS

MASKS = (MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT)
HEAD_DIMS = support.DECODE_HEAD_DIMS
COMPILED_HEAD_DIMS = (64, 128, 256, 512)  # the others are compiled on demand only

# Stages are what keeps memory busy: 128 KiB of K and V under way or waiting.
_NARROW = Tile(m=ROWS, n=128, q_stages=2, kv_stages=4, producer_registers=40, consumer_registers=232)
_MIDDLE = Tile(m=ROWS, n=64, q_stages=2, kv_stages=4, producer_registers=40, consumer_registers=232)
_WIDE = Tile(m=ROWS, n=64, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232)
_WIDEST = Tile(ROWS, 32, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232, splits_v=True)
MERGE_REGISTERS = 168  # all loads of a merge under way at a time


@dataclass(frozen=True)
class DecodeConfig(KernelConfig):
    """A decode kernel."""

    @property
    def tile(self) -> Tile:
        columns = self.columns[0]
        if columns > 256:
            return _WIDEST
        return _NARROW if columns <= 64 else _MIDDLE if columns <= 128 else _WIDE

    @property
    def streams_kv(self) -> bool:
        return True

    @property
    def has_merge_role(self) -> bool:
        """Whether a warpgroup of its own merges. Beside two attending ones, ptxas could give none of them registers
        enough."""
        return not self.tile.splits_v

    @property
    def registers(self) -> tuple[int, ...]:
        return (*super().registers, *[MERGE_REGISTERS] * self.has_merge_role)

    @property
    def name(self) -> str:
        return self._named("decode", [])

    def build(self) -> tuple[Any, tuple[Any, ...]]:
        from hopwell.kernels.sm90.decode import build

        return build(self)


def resolve_decode(problem: AttentionProblem, arch: str) -> DecodeConfig:
    """The decode kernel for ``problem`` on ``arch``.

    Raises:
        NotImplementedError: there is none; the message says what is supported.
    """
    head_dim = problem.query.shape[2]
    if arch not in ARCHS:
        raise NotImplementedError(f"there is no decode kernel for {arch}; supported: {', '.join(ARCHS)}")
    if head_dim not in HEAD_DIMS or problem.value.shape[3] != head_dim:
        raise NotImplementedError(
            f"head dims (QK/V) {head_dim}/{problem.value.shape[3]} have no decode kernel on {arch}; supported: equal "
            f"ones, multiples of 16 up to {HEAD_DIMS[-2]}, and {HEAD_DIMS[-1]}"
        )
    out_dtype = problem.query.dtype if problem.out is None else problem.out.dtype
    require_dtypes(problem, out_dtype, arch)
    require_page_size(problem, arch)
    dtype = DTYPES[problem.query.dtype]
    common = (arch, dtype, DTYPES[out_dtype], head_dim, head_dim, problem.mask.kind)
    unfetched = DecodeConfig(*common, *paged_fetches(1)[0])
    return DecodeConfig(*common, *kv_fetch(problem, unfetched.tile.n))


def shipped_decode_configs(arch: str = "sm_90a") -> Iterator[DecodeConfig]:
    """The decode kernels that are compiled ahead."""
    if arch not in ARCHS:
        return
    for dtype, head_dim, mask in itertools.product(DTYPES.values(), COMPILED_HEAD_DIMS, MASKS):
        common = (arch, dtype, dtype, head_dim, head_dim, mask)
        tile = DecodeConfig(*common, *paged_fetches(1)[0]).tile
        for fetch, rows in paged_fetches(tile.n):
            yield DecodeConfig(*common, fetch, rows)
