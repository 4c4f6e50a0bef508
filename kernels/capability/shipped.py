"""Kernels that are compiled ahead: kernels of plain scores. The first call that needs another kernel compiles it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hopwell.kernels import registry, support
from hopwell.kernels.config.base import DTYPES, QUERY_DTYPES, KvFetch, KvType, Traits, paged_fetches
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.prefill import MASKS, PrefillConfig
from hopwell.kernels.problem import Family
from hopwell.kernels.registry import Buildable
from hopwell.kernels.support import TYPES_16BIT, TYPES_FP8, TYPES_FP8_KV


def kernels_to_ship(arch: str, prefill_types: tuple[str, ...] = (TYPES_16BIT,)) -> Iterator[Buildable]:
    """Yield the prefill kernels with operands of ``prefill_types``, and the kernels of the other families.

    The other families go with TYPES_16BIT, except the MLA kernels with fp8 MMA, which go with TYPES_FP8.
    """
    for config in itertools.chain.from_iterable(registry.shipped_configs(arch, family) for family in Family):
        has_fp8_mma = isinstance(config, MlaConfig) and config.uses_fp8_mma
        if (TYPES_FP8 if has_fp8_mma else TYPES_16BIT) in prefill_types:
            yield config
    if TYPES_FP8_KV in prefill_types:
        yield from _eight_bit_configs(arch, [(dtype, dtype) for dtype in DTYPES.values()], kv_type=KvType.E4M3)
    if TYPES_FP8 in prefill_types:
        yield from _eight_bit_configs(arch, [("e4m3", out) for out in QUERY_DTYPES.values()])


def _eight_bit_configs(arch: str, dtypes: list[tuple[str, str]], **types: Any) -> Iterator[PrefillConfig]:
    """Yield the prefill kernels that read 8-bit keys and values, for ``dtypes`` of (query, output)."""
    for (dtype, out), dims, mask in itertools.product(dtypes, support.SHIPPED_FP8_HEAD_DIMS, MASKS):
        kind = registry.prefill_type(arch, Traits(dims, **types))
        for choices in kind.all_choices(dims, mask):
            tile = kind.tile_of(dims, **choices, **types, uses_fp8_mma=dtype == "e4m3")
            for fetch, rows in [(KvFetch.CONTIGUOUS, 0), *paged_fetches(tile.n)]:
                yield kind(arch, dtype, out, dims[0], dims[1], mask, fetch, rows, **choices, **types)
