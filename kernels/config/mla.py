"""Which MLA decode kernel serves a problem, like ``config/prefill.py`` for prefill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hopwell.kernels import support
from hopwell.kernels.config.base import (
    BLOCK_COLUMNS,
    DTYPES,
    E4M3_DTYPES,
    QUERY_DTYPES,
    KvFetch,
    KvType,
    Tile,
    has_uneven_pages,
    kv_fetch,
    paged_fetches,
    require_dtypes,
    require_page_size,
    rounded_up,
)
from hopwell.kernels.config.decode import DecodeConfig, require_seen
from hopwell.kernels.config.splitting import (
    LATENT_LEAF_TILES,
    LATENT_LEAF_TOKENS,
    LATENT_REGISTER_LEVELS,
    LATENT_SWAP_AB_ROWS,
    LEAF_TILE,
    LEAST_TOKENS_SHARE,
    MOST_CTA_PART_KEYS,
    ROWS,
    TOPK_CHUNK_TOKENS,
    chunk_tokens,
    scratch_bytes,
)
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.jit import settings
from hopwell.kernels.problem import AttentionProblem, Family, MaskKind

# Two warpgroups share the value's columns. Q and two tiles of keys fill shared memory; a step takes both. In
# batch-invariant kernels warps of the producers combine partials, and the registers that attend can spare are loads
# that they have under way. With lists, and with keys of 8 bits, it can spare fewer.
_TILE = Tile(ROWS, 64, q_stages=1, kv_stages=2, producer_registers=88, consumer_registers=208, splits_v=True)
_TOPK_TILE = replace(_TILE, producer_registers=72, consumer_registers=216)
# Tiles of products of 8 bits, by columns of the value, whose stages are half as large.
_EIGHT_BIT_TILES = {256: replace(_TILE, kv_stages=4), 512: replace(_TOPK_TILE, kv_stages=4)}
# Tiles of few rows, by columns of the value: one warpgroup attends, and there are as many stages as fit.
_TREE_TILE = Tile(
    LATENT_SWAP_AB_ROWS,
    LEAF_TILE,
    q_stages=2,
    kv_stages=2,
    producer_registers=72,
    consumer_registers=192,
    combine_registers=240,
)
_TREE_TILES = {256: replace(_TREE_TILE, kv_stages=4), 512: _TREE_TILE}
_FP8_TREE_TILES = {
    256: replace(_TREE_TILE, kv_stages=8, producer_registers=88, consumer_registers=176),
    512: replace(_TREE_TILE, kv_stages=4),
}

# Elements of keys in memory by what tensors hold: rows of FP8_DS_MLA are bytes.
KV_TYPES = {torch.float8_e4m3fn: KvType.E4M3, torch.uint8: KvType.FP8_DS_MLA}
# What elements times scales are rounded to, and their rotary columns are, is bfloat16.
QUERIES = dict.fromkeys(KvType, DTYPES) | {KvType.FP8_DS_MLA: {torch.bfloat16: "bf16"}}


@dataclass(frozen=True)
class MlaConfig(DecodeConfig):
    """An MLA decode kernel. The first ``head_dim_v`` columns of a key are its value.

    Attributes:
        batch_invariant: whether requests are cut by their own lengths alone, where other kernels of as many rows cut
            the keys of all requests into equal CTA parts. Kernels of few rows have trees that are batch invariant.
            :func:`_has_cta_parts` says which of both a problem has.
    """

    batch_invariant: bool = False

    family: ClassVar[Family] = Family.MLA
    most_rows: ClassVar[int] = ROWS  # of a tile
    has_fp8_mma: ClassVar[bool] = (
        True  # whether products of e4m3 queries are of 8 bits; else these are dequantized before
    )

    @property
    def has_tree(self) -> bool:
        return self.rows == LATENT_SWAP_AB_ROWS

    @property
    def tile(self) -> Tile:
        if self.has_tree:
            return (_FP8_TREE_TILES if self.uses_fp8_mma else _TREE_TILES)[self.head_dim_v]
        if self.uses_fp8_mma:
            return _EIGHT_BIT_TILES[self.head_dim_v]
        return _TOPK_TILE if self.sparse or self.kv_type is not KvType.WIDE else _TILE

    @property
    def dequantizes_in_place(self) -> bool:
        """Tell whether a warpgroup does nothing but dequantize: never, as warps of the producers dequantize rows that
        they copy."""
        return False

    @property
    def dequantizes_in_registers(self) -> bool:
        """Tell whether warps that multiply dequantize what they read: never, as above."""
        return False

    @property
    def splitting_bytes(self) -> int:
        """Keys of 8 bits are split as if they were dequantized in memory, so that results have the same bits."""
        return HALFWORD_BYTES

    @property
    def has_cta_parts(self) -> bool:
        return not (self.has_tree or self.batch_invariant)

    @classmethod
    def scratch_bytes(cls, rows: int, kv_heads: int, columns: int, capacity: int, sms: int) -> int:
        # Kernels with CTA parts and batch-invariant ones need different amounts; the batch selects one of them.
        ways = (False,) if settings.BATCH_INVARIANT.is_on else (False, True)
        sizes = (rows, kv_heads, columns, capacity, sms, True, cls.tiled)
        return max(scratch_bytes(*sizes, by_cta_parts) for by_cta_parts in ways)

    @property
    def is_cooperative(self) -> bool:
        """CTAs that have CTA parts wait for each other's partials: were some kept from running by CTAs of another
        launch that wait as well, neither would end. It is faster, too: 32 x 8192 tokens 571 instead of 538 TFLOP/s, 64
        x 1024 515 instead of 498, 8 x 1024 138 instead of 143 (H200, 2026-11-25)."""
        return self.has_cta_parts

    @property
    def consumer_warpgroups(self) -> int:
        return self.v_splits

    @property
    def has_combine_role(self) -> bool:
        """A warpgroup combines beside the one that attends, whose nodes are large."""
        return self.has_tree

    @property
    def smem_levels(self) -> int:
        return LATENT_REGISTER_LEVELS

    @property
    def leaf_tiles(self) -> int:
        return LATENT_LEAF_TILES

    @property
    def chunk_tokens(self) -> int:
        if self.has_tree:
            return LATENT_LEAF_TOKENS
        return TOPK_CHUNK_TOKENS if self.sparse else chunk_tokens(self.head_dim_v, latent=True)

    @property
    def halves_chunks(self) -> bool:
        return False

    @property
    def combine_loads(self) -> tuple[tuple[int, int], ...]:
        """Say how many partials, and subtiles of each, a producer warp that combines has under way."""
        return ((4, 2), (8, 1)) if self.tile.producer_registers == _TILE.producer_registers else ((4, 1),)

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Return the widths of the left half of the value's columns and of all columns to the right of them, as they
        are multiplied, in halfwords."""
        left = self.head_dim_v // 2
        return left * self.q_bytes // HALFWORD_BYTES, (self.head_dim_qk - left) * self.q_bytes // HALFWORD_BYTES

    @property
    def columns(self) -> tuple[int, int]:
        """Where the rest of a key ends with the value, another column block makes room for P of tile A. P of few
        rows has memory of its own."""
        left, right = self.kv_dims
        if self.uses_fp8_mma:
            return left, rounded_up(right, BLOCK_COLUMNS)
        return left, right if self.has_tree else max(right, self.head_dim_v // 2 + BLOCK_COLUMNS)

    @property
    def depth(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_v // self.v_splits

    @property
    def sparse(self) -> bool:
        """Tell whether each query token has a list of the tokens that it attends to."""
        return self.kv_fetch is KvFetch.TOPK_ROWS

    @property
    def name(self) -> str:
        kind = [f"kv_{self.kv_type.value}"] if self.kv_type is not KvType.WIDE else []
        kind += [f"rows{self.rows}"] * (self.rows != ROWS) + ["invariant"] * self.batch_invariant
        return self._named(kind)


def resolve_mla(problem: AttentionProblem, arch: str, kind: type[MlaConfig] = MlaConfig) -> MlaConfig:
    """Choose the MLA decode kernel for ``problem`` on ``arch``, whose configs are of this ``kind``. ``max_q_len`` and
    the heads say whether rows are few.

    Raises:
        NotImplementedError: there is none; the message says what is supported.
    """
    dims = (problem.query.shape[2], problem.value.shape[3])
    known = support.MLA_HEAD_DIMS if problem.token_table is None else support.SPARSE_MLA_HEAD_DIMS
    if dims not in known:
        listed = ", ".join(f"{qk}/{v}" for qk, v in known)
        raise NotImplementedError(
            f"head dims (QK/V) {dims[0]}/{dims[1]} have no MLA kernel on {arch}; supported: {listed}"
        )
    in_bytes = kind.has_fp8_mma and problem.query.dtype in E4M3_DTYPES
    # What there is no output for is a product of 8 bits, whose results are of bfloat16.
    out_dtype = torch.bfloat16 if in_bytes else problem.query.dtype
    out_dtype = out_dtype if problem.out is None else problem.out.dtype
    kv_type = KvType.WIDE if in_bytes else KV_TYPES.get(problem.key.dtype, KvType.WIDE)
    require_dtypes(problem, out_dtype, arch, kv_type, queries=E4M3_DTYPES if in_bytes else QUERIES[kv_type])
    require_page_size(problem, arch)
    masks = (MaskKind.CAUSAL, MaskKind.CYCLIC) if problem.token_table is None else (MaskKind.CAUSAL,)
    require_seen(problem, "MLA decode kernel", masks, arch)
    if problem.token_table is not None:
        fetch = KvFetch.TOPK_ROWS, 0
    else:
        fetch = kv_fetch(problem, _TILE.n) if kv_type is KvType.WIDE else (KvFetch.PAGE_ROWS, 0)
    together = problem.query.shape[1] * (problem.max_q_len if problem.token_table is None else 1)
    common = (arch, QUERY_DTYPES[problem.query.dtype], DTYPES[out_dtype], *dims, problem.mask.kind, *fetch)
    rows = LATENT_SWAP_AB_ROWS if together <= LATENT_SWAP_AB_ROWS else kind.most_rows
    uneven, invariant = has_uneven_pages(problem), rows == ROWS and not _has_cta_parts(problem)
    return kind(*common, kv_type, rows, uneven_pages=uneven, batch_invariant=invariant)


def _has_cta_parts(problem: AttentionProblem) -> bool:
    """Tell whether the keys of all requests are cut into equal CTA parts: where results may depend on the batch, the
    keys can be counted, and row tiles have rows of most requests. A CTA part is for a row tile, and the first one has
    rows of all: of uneven numbers of new tokens, CTAs of the last one would have little to do."""
    if settings.BATCH_INVARIANT.is_on or most_keys(problem) > MOST_CTA_PART_KEYS:
        return False
    if problem.token_table is not None or problem.query.shape[1] * problem.max_q_len <= ROWS:
        return True
    return problem.query.shape[0] >= LEAST_TOKENS_SHARE * problem.batch * problem.max_q_len


def most_keys(problem: AttentionProblem) -> int:
    """Return the most keys that all requests can have together, each as often as it is listed where there are lists."""
    if problem.token_table is not None:
        return problem.token_table.numel()
    assert problem.page_table is not None
    return problem.page_table.key.numel() * problem.key.shape[2]


def shipped_mla_configs(arch: str = "sm_90a", kind: type[MlaConfig] = MlaConfig) -> Iterator[MlaConfig]:
    """Yield the MLA kernels that are compiled ahead: batch invariant ones where that is asked for."""
    kinds = [*itertools.product(support.MLA_HEAD_DIMS, paged_fetches(_TILE.n))]
    kinds += itertools.product(support.SPARSE_MLA_HEAD_DIMS, [(KvFetch.TOPK_ROWS, 0)])
    for rows, (dims, fetch) in itertools.product(sorted({kind.most_rows, LATENT_SWAP_AB_ROWS}, reverse=True), kinds):
        kv_types = [KvType.WIDE]
        if not fetch[1]:  # lanes copy rows of 8 bits
            kv_types += [
                t for t in KV_TYPES.values() if t is not KvType.FP8_DS_MLA or dims == support.FP8_DS_MLA_HEAD_DIMS
            ]
        operands = [("bf16", kv_type) for kv_type in kv_types] + [("e4m3", KvType.WIDE)] * kind.has_fp8_mma
        for dtype, kv_type in operands:
            config = kind(arch, dtype, "bf16", *dims, MaskKind.CAUSAL, *fetch, kv_type, rows)
            # Without the setting, new tokens in uneven numbers that have no lists take batch-invariant kernels as well.
            ways = {True} if settings.BATCH_INVARIANT.is_on else {False, not config.sparse}
            yield from (replace(config, batch_invariant=way) for way in (sorted(ways) if rows == ROWS else [False]))
