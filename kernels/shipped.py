"""Which kernels are compiled ahead: those of plain scores. Others are compiled when they are first called for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hopwell.kernels import families, support
from hopwell.kernels.config import DTYPES, QUERY_DTYPES, KvFetch, KvType, paged_fetches
from hopwell.kernels.families import Buildable
from hopwell.kernels.mla_config import MlaConfig
from hopwell.kernels.prefill_config import MASKS, PrefillConfig
from hopwell.kernels.problem import Family

# What prefill multiplies, as the rows of the support matrix have it: inputs and output of one 16-bit dtype, 16-bit
# queries over e4m3 caches with an output like the queries, or e4m3 queries and caches with an output of 16 or 8 bits.
TYPES_16BIT, TYPES_FP8_KV, TYPES_FP8 = "16bit", "fp8_kv", "fp8"
PREFILL_TYPES = (TYPES_16BIT, TYPES_FP8_KV, TYPES_FP8)


def kernels_to_ship(arch: str, prefill_types: tuple[str, ...] = (TYPES_16BIT,)) -> Iterator[Buildable]:
    """Yield the prefill kernels whose operands are of ``prefill_types``; with TYPES_16BIT among them all other families
    too, but for MLA kernels that multiply bytes, which go with TYPES_FP8."""
    for config in itertools.chain.from_iterable(families.shipped_configs(arch, family) for family in Family):
        takes_bytes = isinstance(config, MlaConfig) and config.multiplies_bytes
        if (TYPES_FP8 if takes_bytes else TYPES_16BIT) in prefill_types:
            yield config
    if TYPES_FP8_KV in prefill_types:
        yield from _byte_configs(arch, [(dtype, dtype) for dtype in DTYPES.values()], kv_type=KvType.E4M3)
    if TYPES_FP8 in prefill_types:
        yield from _byte_configs(arch, [("e4m3", out) for out in QUERY_DTYPES.values()])


def command_for(kernel: Buildable) -> str | None:
    """Return the command line that compiles ``kernel`` ahead, or None where none does."""
    for types in PREFILL_TYPES:
        if any(config.name == kernel.name for config in kernels_to_ship(kernel.arch, (types,))):
            return f"python -m hopwell compile --arch {kernel.arch} --prefill-types {types}"
    return None


def _byte_configs(arch: str, dtypes: list[tuple[str, str]], **types: Any) -> Iterator[PrefillConfig]:
    """Yield the prefill kernels that read 8-bit keys and values, for ``dtypes`` of (query, output)."""
    kind = families.prefill_type(arch)
    for (dtype, out), dims, mask in itertools.product(dtypes, support.BYTE_HEAD_DIMS, MASKS):
        for choices in kind.all_choices(dims, mask):
            tile = kind.tile_of(dims, **choices, **types, multiplies_bytes=dtype == "e4m3")
            for fetch, rows in [(KvFetch.CONTIGUOUS, 0), *paged_fetches(tile.n)]:
                yield kind(arch, dtype, out, dims[0], dims[1], mask, fetch, rows, **choices, **types)
