"""Shipped kernels are exactly the kernels of calls with plain scores, each once."""

from __future__ import annotations

import itertools

import pytest
import torch

from hopwell.kernels.capability.shipped import kernels_to_ship
from hopwell.kernels.config.base import DTYPES
from hopwell.kernels.config.prefill import MASKS
from hopwell.kernels.problem import AttentionProblem, Family, Mask, PageTable, TokenOffsets
from hopwell.kernels.registry import prefill_type, resolve, shipped_configs
from hopwell.kernels.sm100.prefill.config import PAIR_DIMS, TILES, Sm100PrefillConfig
from hopwell.kernels.support import (
    PREFILL_TYPES,
    SHIPPED_FP8_HEAD_DIMS,
    SPARSE_MLA_HEAD_DIMS,
    TYPES_16BIT,
    TYPES_FP8,
    TYPES_FP8_KV,
)

FP8 = torch.float8_e4m3fn
FP8_MLA = "mla_sm_90a_e4m3_"
DIMS = [(64, 64), (192, 128), (80, 80), (256, 256)]
OPERANDS = {
    TYPES_16BIT: [(dtype, dtype, dtype) for dtype in DTYPES],
    TYPES_FP8_KV: [(dtype, FP8, dtype) for dtype in DTYPES],
    TYPES_FP8: [(FP8, FP8, out) for out in (*DTYPES, FP8)],
}


def problem(
    dims: tuple[int, int], dtypes: tuple[torch.dtype, ...], page_size: int | None, mask: Mask, q_len: int
) -> AttentionProblem:
    """Make a problem of four query heads with one KV head. Only shapes and types count."""
    query, cache, out = dtypes
    rows = page_size or 1000
    key, value = (torch.empty(2, 1, rows, dim, device="meta", dtype=cache) for dim in dims)
    table, lengths = (torch.empty(1, n, dtype=torch.int32, device="meta") for n in (100, 2))
    return AttentionProblem(
        query=torch.empty(q_len, 4, dims[0], device="meta", dtype=query),
        key=key,
        value=value,
        out=torch.empty(q_len, 4, dims[1], device="meta", dtype=out),
        batch=1,
        max_q_len=q_len,
        max_kv_len=1000,
        q_offsets=TokenOffsets(lengths[0]),
        kv_lens=lengths[0, :1],
        page_table=PageTable(table, table) if page_size else None,
        mask=mask,
        softmax_scale=1.0,
    )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("types", PREFILL_TYPES)
def test_calls_find_their_kernels(types: str, arch: str) -> None:
    shipped = {config.name for config in kernels_to_ship(arch, (types,)) if config.family is Family.PREFILL}
    head_dims = (
        prefill_type(arch).tiles if types == TYPES_16BIT else SHIPPED_FP8_HEAD_DIMS
    )  # all others are compiled on demand
    masks = [Mask(kind, window_left=left, chunk=64) for kind in MASKS for left in (100, 1000)]
    for dims, dtypes, page_size, mask, q_len in itertools.product(
        [dims for dims in DIMS if dims in head_dims], OPERANDS[types], (None, 1, 8, 16, 128), masks, (4, 300)
    ):
        assert resolve(problem(dims, dtypes, page_size, mask, q_len), arch).name in shipped


def test_every_kernel_once() -> None:
    shipped = list(kernels_to_ship("sm_90a", PREFILL_TYPES))
    assert len({config.name for config in shipped}) == len(shipped)
    fp8_mma = [c for c in shipped if c.family in (Family.PREFILL, Family.MLA) and c.uses_fp8_mma]
    assert fp8_mma == list(kernels_to_ship("sm_90a", (TYPES_FP8,)))
    dims = {family: {(c.head_dim_qk, c.head_dim_v) for c in fp8_mma if c.family is family} for family in Family}
    assert dims[Family.PREFILL] == set(SHIPPED_FP8_HEAD_DIMS)
    assert dims[Family.MLA] == set(SPARSE_MLA_HEAD_DIMS)


def test_types_are_asked_for() -> None:
    """The default types are one 16-bit dtype and all other families, except MLA of bytes."""
    for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_120a"):
        every = [config for family in Family for config in shipped_configs(arch, family)]
        assert list(kernels_to_ship(arch)) == every
        assert not any(c.dtype == "e4m3" for c in every)
    assert sum(config.name.startswith(FP8_MLA) for config in kernels_to_ship("sm_90a", (TYPES_FP8,))) > 0
    blackwell, there = (
        {types: [*kernels_to_ship(arch, (types,))] for types in (TYPES_FP8_KV, TYPES_FP8)}
        for arch in ("sm_100a", "sm_120a")
    )
    for types in (TYPES_FP8_KV, TYPES_FP8):
        own = [config for config in blackwell[types] if isinstance(config, Sm100PrefillConfig)]
        served = set(TILES) - (set(PAIR_DIMS) if types == TYPES_FP8_KV else set())
        assert {(c.head_dim_qk, c.head_dim_v) for c in own} == served & set(SHIPPED_FP8_HEAD_DIMS)
        rest = {c.name.replace(c.arch, "") for c in blackwell[types] if c not in own and c.family is Family.PREFILL}
        assert rest < {c.name.replace(c.arch, "") for c in there[types]}, "kernels of sm_120 serve the rest"
