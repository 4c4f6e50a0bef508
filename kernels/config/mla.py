"""Selection of the MLA decode kernel for a problem, like ``config/prefill.py`` for prefill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from hopwell.kernels import support
from hopwell.kernels.config.base import (
    CTAS,
    DTYPES,
    E4M3_DTYPES,
    QUERY_DTYPES,
    KernelConfig,
    KvFetch,
    KvType,
    Tile,
    Traits,
    dims_names,
    has_uneven_pages,
    kv_fetch,
    paged_fetches,
    require_dtypes,
)
from hopwell.kernels.config.decode import PartitionedConfig, require_seen
from hopwell.kernels.config.layout import MlaLayout, OperandLayout
from hopwell.kernels.config.splitting import (
    LATENT_LEAF_TILES,
    LATENT_REGISTER_LEVELS,
    LATENT_SWAP_AB_ROWS,
    LEAF_TILE,
    LEAST_TOKENS_SHARE,
    MOST_CTA_PART_KEYS,
    ROWS,
    TOPK_CHUNK_TOKENS,
    LaunchSizes,
    chunk_tokens,
    scratch_bytes,
)
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.jit import settings
from hopwell.kernels.problem import AttentionProblem, Family, MaskKind

# Two warpgroups share the value's columns. Q and two tiles of keys fill shared memory; a step takes both tiles. In
# batch-invariant kernels producer warps combine partials: registers that attend can spare become loads in flight.
# Kernels with top-k indices or 8-bit keys can spare fewer.
_TILE = Tile(ROWS, 64, q_stages=1, kv_stages=2, producer_registers=88, consumer_registers=208, splits_v=True)
_TOPK_TILE = replace(_TILE, producer_registers=72, consumer_registers=216)
# Tiles of fp8 MMA, by columns of the value. Their stages are half as large.
_EIGHT_BIT_TILES = {256: replace(_TILE, kv_stages=4), 512: replace(_TOPK_TILE, kv_stages=4)}
# Swap-AB tiles for few rows, by columns of the value: one warpgroup attends, and the stages fill shared memory.
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

# Element types of keys in memory, by the dtype of the tensor: rows of FP8_DS_MLA are bytes.
KV_TYPES = {torch.float8_e4m3fn: KvType.E4M3, torch.uint8: KvType.FP8_DS_MLA}
# FP8_DS_MLA takes bfloat16 queries only: its rotary columns are bfloat16, and elements times scales are rounded to
# bfloat16.
QUERIES = dict.fromkeys(KvType, DTYPES) | {KvType.FP8_DS_MLA: {torch.bfloat16: "bf16"}}


@dataclass(frozen=True)
class MlaConfig(PartitionedConfig, KernelConfig):
    """Config of an MLA decode kernel. The first ``head_dim_v`` columns of a key are its value.

    Attributes:
        kv_type: element type of keys in memory.
        rows: packed rows of a tile.
        batch_invariant: whether each request is split by its own length only. Otherwise kernels with this tile height
            cut the keys of all requests into equal CTA parts. Kernels of few rows have trees, which are batch
            invariant. :func:`_has_cta_parts` chooses for a problem.
        shares_dequant: whether clusters of two CTAs, with neighbouring row tiles of the same keys, dequantize each key
            once for both.
    """

    kv_type: KvType = KvType.WIDE
    rows: int = ROWS
    batch_invariant: bool = False
    shares_dequant: bool = False

    k_head_scales: ClassVar[bool] = False  # there is one KV head
    v_head_scales: ClassVar[bool] = False
    family: ClassVar[Family] = Family.MLA
    layout_type: ClassVar[type[OperandLayout]] = MlaLayout
    most_rows: ClassVar[int] = ROWS  # of a tile
    has_fp8_mma: ClassVar[bool] = True  # products of e4m3 queries are fp8 MMA

    @classmethod
    def query_dtype(cls, query: torch.dtype, kv: torch.dtype) -> torch.dtype:
        """Return bfloat16, which holds all e4m3 values, for e4m3 queries if kernels lack fp8 MMA."""
        return torch.bfloat16 if query in E4M3_DTYPES and not cls.has_fp8_mma else query

    @classmethod
    def rows_for(cls, rows: int) -> int:
        """Return the rows of the kernel's tile for ``rows`` packed rows of a request."""
        return LATENT_SWAP_AB_ROWS if rows <= LATENT_SWAP_AB_ROWS else cls.most_rows

    @property
    def has_tree(self) -> bool:
        """Whether leaves of keys are combined as a binary tree (stream-K), see ``sm90/mla/swap_ab.py``."""
        return self.rows == LATENT_SWAP_AB_ROWS

    @property
    def row_unit(self) -> int:
        return LATENT_SWAP_AB_ROWS if self.has_tree else super().row_unit

    @property
    def tile(self) -> Tile:
        if self.has_tree:
            return (_FP8_TREE_TILES if self.uses_fp8_mma else _TREE_TILES)[self.head_dim_v]
        if self.uses_fp8_mma:
            return _EIGHT_BIT_TILES[self.head_dim_v]
        if self.shares_dequant:
            return _TILE
        return _TOPK_TILE if self.sparse or self.kv_type is not KvType.WIDE else _TILE

    @property
    def splitting_bytes(self) -> int:
        """Bytes by which keys are split: 8-bit keys are split like 16-bit keys, so that results have the same bits."""
        return HALFWORD_BYTES

    @property
    def has_cta_parts(self) -> bool:
        """Whether CTAs take equal parts of the keys of all requests, so that results depend on the batch."""
        return not (self.has_tree or self.batch_invariant)

    @classmethod
    def scratch_bytes(cls, sizes: LaunchSizes) -> int:
        """Return the bytes of scratch for any kernel of this class, see :func:`splitting.scratch_bytes`."""
        # Kernels with CTA parts and batch-invariant ones need different amounts; the batch selects one of them.
        ways = (False,) if settings.BATCH_INVARIANT.is_on else (False, True)
        return max(cls.scratch_of(replace(sizes, latent=True, by_cta_parts=way)) for way in ways)

    @classmethod
    def scratch_of(cls, sizes: LaunchSizes) -> int:
        """Return the bytes of scratch for kernels that all have, or all lack, CTA parts."""
        return scratch_bytes(sizes, cls.tiled)

    @property
    def is_cooperative(self) -> bool:
        """Whether the launch is cooperative: kernels with CTA parts are, because their CTAs wait for each other's
        partials.

        Without it, CTAs of two launches could each wait for CTAs that the other launch keeps from running, a deadlock.
        Cooperative launches are mostly faster, too: 32 x 8192 tokens 571 instead of 538 TFLOP/s, 64 x 1024 515 instead
        of 498, 8 x 1024 138 instead of 143 (H200, 2026-11-25).
        """
        return self.has_cta_parts

    @property
    def consumer_warpgroups(self) -> int:
        return self.v_splits

    @property
    def can_share_dequant(self) -> bool:
        """Whether a kernel with this config can share dequant, if heads fill an even number of row tiles. Other
        kernels over 8-bit keys keep their own dequant."""
        rows_of_656_bytes = self.kv_type is KvType.FP8_DS_MLA and self.sparse
        return rows_of_656_bytes and self.rows == ROWS and self.has_cta_parts

    @property
    def cluster_ctas(self) -> int:
        return CTAS if self.shares_dequant else 1

    @property
    def work_tile_ctas(self) -> int:
        """CTAs of a cluster that take each work tile together. CTAs that share dequant have a row tile each."""
        return 1 if self.shares_dequant else self.cluster_ctas

    @property
    def has_combine_role(self) -> bool:
        """Whether a separate warpgroup combines: with a tree, because the nodes of the tree are large."""
        return self.has_tree

    @property
    def smem_levels(self) -> int:
        """Number of levels of the tree that a CTA keeps: in registers."""
        return LATENT_REGISTER_LEVELS

    @property
    def leaf_tiles(self) -> int:
        return LATENT_LEAF_TILES

    @property
    def chunk_tokens(self) -> int:
        """Keys of a chunk, unless requests are very long, in batch-invariant kernels without a tree."""
        return TOPK_CHUNK_TOKENS if self.sparse else chunk_tokens(self.head_dim_v, latent=True)

    @property
    def registers(self) -> tuple[int, ...]:
        return (*super().registers, *[self.tile.combine_registers] * self.has_combine_role)

    @property
    def combine_loads(self) -> tuple[tuple[int, int], ...]:
        """Pairs (partials, subtiles of each partial) that a combining producer warp has in flight."""
        return ((4, 2), (8, 1)) if self.tile.producer_registers == _TILE.producer_registers else ((4, 1),)

    @property
    def sparse(self) -> bool:
        """Whether each query token has top-k indices (sparse MLA)."""
        return self.kv_fetch is KvFetch.TOPK_ROWS

    @property
    def name(self) -> str:
        kind = [f"kv_{self.kv_type.value}"] if self.kv_type is not KvType.WIDE else []
        kind += [f"rows{self.rows}"] * (self.rows != ROWS) + ["invariant"] * self.batch_invariant
        kind += ["cluster2"] * self.shares_dequant
        return self._named(kind)


def resolve_mla(problem: AttentionProblem, arch: str, kind: type[MlaConfig] = MlaConfig) -> MlaConfig:
    """Choose the MLA decode kernel for ``problem`` on ``arch``, with a config of type ``kind``.

    ``max_q_len`` and the number of heads decide whether the kernel is one for few rows.

    Raises:
        NotImplementedError: there is no kernel; the message lists what is supported.
    """
    dims = (problem.query.shape[2], problem.value.shape[3])
    # Tokens with top-k indices have keys of their own, so a tile has rows of one token.
    packed_rows = problem.query.shape[1] * (problem.max_q_len if problem.token_table is None else 1)
    kind.require(Traits(dims, rows=packed_rows), arch)
    known = support.MLA_HEAD_DIMS if problem.token_table is None else support.SPARSE_MLA_HEAD_DIMS
    if dims not in known:
        raise NotImplementedError(
            f"head dims (QK/V) {dims_names([dims])} have no MLA kernel on {arch}; supported: {dims_names(known)}"
        )
    in_bytes = kind.has_fp8_mma and problem.query.dtype in E4M3_DTYPES
    # The output of fp8 MMA is bfloat16 unless the caller gives an output.
    out_dtype = torch.bfloat16 if in_bytes else problem.query.dtype
    out_dtype = out_dtype if problem.out is None else problem.out.dtype
    kv_type = KvType.WIDE if in_bytes else KV_TYPES.get(problem.key.dtype, KvType.WIDE)
    require_dtypes(problem, out_dtype, arch, kv_type, queries=E4M3_DTYPES if in_bytes else QUERIES[kv_type])
    masks = (MaskKind.CAUSAL, MaskKind.CYCLIC) if problem.token_table is None else (MaskKind.CAUSAL,)
    require_seen(problem, "MLA decode kernel", masks, arch)
    if problem.token_table is not None:
        fetch = KvFetch.TOPK_ROWS, 0
    else:
        fetch = kv_fetch(problem, _TILE.n) if kv_type is KvType.WIDE else (KvFetch.PAGE_ROWS, 0)
    common = (arch, QUERY_DTYPES[problem.query.dtype], DTYPES[out_dtype], *dims, problem.mask.kind, *fetch)
    rows = kind.rows_for(packed_rows)
    uneven, invariant = has_uneven_pages(problem), rows >= ROWS and not _has_cta_parts(problem)
    config = kind(*common, kv_type, rows, uneven_pages=uneven, batch_invariant=invariant)
    return replace(config, shares_dequant=config.can_share_dequant and problem.query.shape[1] % (2 * ROWS) == 0)


def _has_cta_parts(problem: AttentionProblem) -> bool:
    """Whether the keys of all requests are cut into equal CTA parts.

    CTA parts need three things: results may depend on the batch, the keys can be counted, and each row tile has rows of
    most requests. A CTA part belongs to one row tile. The first row tile has rows of all requests. The last row tile
    has few if the numbers of new tokens are uneven, and its CTAs would have little to do.
    """
    if settings.BATCH_INVARIANT.is_on or most_keys(problem) > MOST_CTA_PART_KEYS:
        return False
    if problem.token_table is not None or problem.query.shape[1] * problem.max_q_len <= ROWS:
        return True
    return problem.query.shape[0] >= LEAST_TOKENS_SHARE * problem.batch * problem.max_q_len


def most_keys(problem: AttentionProblem) -> int:
    """Return the most keys that all requests can have together; with top-k indices, each key counts once per index."""
    if problem.token_table is not None:
        return problem.token_table.numel()
    assert problem.page_table is not None
    return problem.page_table.key.numel() * problem.key.shape[2]


def shipped_mla_configs(
    arch: str = "sm_90a",
    types: str = support.TYPES_16BIT,
    preferred: Sequence[type[KernelConfig]] = (),
    kind: type[MlaConfig] = MlaConfig,
) -> Iterator[MlaConfig]:
    """Yield the MLA kernels that are compiled ahead for operands of ``types``, where no kernel of ``preferred`` types
    serves them.

    Kernels that dequantize keys multiply in 16 bits and go with these types. All are batch-invariant if the setting
    asks for that.
    """
    kinds = [*itertools.product(support.MLA_HEAD_DIMS, paged_fetches(_TILE.n))]
    kinds += itertools.product(support.SPARSE_MLA_HEAD_DIMS, [(KvFetch.TOPK_ROWS, 0)])
    requests = (LATENT_SWAP_AB_ROWS, ROWS, ROWS + 1)  # the last has more rows than Hopper's tiles
    chosen = {kind.rows_for(n) for n in requests if kind.is_chosen(Traits(kinds[0][0], rows=n), arch, preferred)}
    for rows, (dims, fetch) in itertools.product(sorted(chosen, reverse=True), kinds):
        kv_types = [KvType.WIDE]
        if not fetch[1]:  # 8-bit rows are copied by lanes, not in TMA boxes
            kv_types += [
                t for t in KV_TYPES.values() if t is not KvType.FP8_DS_MLA or dims == support.FP8_DS_MLA_HEAD_DIMS
            ]
        in_types = {
            support.TYPES_16BIT: [("bf16", kv_type) for kv_type in kv_types],
            support.TYPES_FP8: [("e4m3", KvType.WIDE)] * kind.has_fp8_mma,
        }
        for dtype, kv_type in in_types.get(types, []):
            config = kind(arch, dtype, "bf16", *dims, MaskKind.CAUSAL, *fetch, kv_type, rows)
            # Uneven numbers of new tokens without top-k indices take batch-invariant kernels even without the setting.
            ways = {True} if settings.BATCH_INVARIANT.is_on else {False, not config.sparse}
            for way in sorted(ways) if rows >= ROWS else [False]:
                config = replace(config, batch_invariant=way)
                yield from (
                    replace(config, shares_dequant=shares) for shares in sorted({False, config.can_share_dequant})
                )
