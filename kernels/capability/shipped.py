"""Kernels that are compiled ahead: kernels of plain scores. The first call that needs another kernel compiles it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hopwell.kernels import registry
from hopwell.kernels.problem import Family
from hopwell.kernels.registry import Buildable
from hopwell.kernels.support import TYPES_16BIT


def kernels_to_ship(arch: str, prefill_types: tuple[str, ...] = (TYPES_16BIT,)) -> Iterator[Buildable]:
    """Yield the kernels of all families whose operands have one of ``prefill_types``.

    Only prefill, and MLA with fp8 MMA, have kernels of other types than TYPES_16BIT.
    """
    for types, family in itertools.product(prefill_types, Family):
        yield from registry.shipped_configs(arch, family, types)
