"""Selection of the decode kernel for a problem, like ``config/prefill.py`` for prefill."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from hopwell.kernels import support
from hopwell.kernels.config.base import (
    BLOCK_COLUMNS,
    DTYPES,
    E4M3_DTYPES,
    QUERY_DTYPES,
    KernelConfig,
    KvType,
    Tile,
    Traits,
    has_uneven_pages,
    head_scales,
    kv_fetch,
    paged_fetches,
    power_of_two_in,
    require_dtypes,
)
from hopwell.kernels.config.layout import DecodeLayout, OperandLayout
from hopwell.kernels.config.splitting import (
    ACCUMULATED_LEVELS,
    LEAF_TILE,
    ROWS,
    SWAP_AB_ROWS,
    LaunchSizes,
    chunk_tokens,
    counter_ints,
    ctas_per_sm,
    leaf_tiles,
    node_slots,
    scratch_bytes,
    shared_levels,
    tree_counter_ints,
    tree_rows,
    tree_warpgroups,
)
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import CACHE_LINE_BYTES, WARP_MMA
from hopwell.kernels.problem import AttentionProblem, Family, LseLayout, MaskKind, Score

EIGHT_BIT_TYPES = {torch.float8_e4m3fn: KvType.E4M3, torch.int8: KvType.INT8}
NARROW_TYPES = EIGHT_BIT_TYPES | {torch.uint8: KvType.NVFP4}
NARROW_HEAD_DIMS = {
    **dict.fromkeys(EIGHT_BIT_TYPES.values(), support.DECODE_HEAD_DIMS),
    KvType.NVFP4: support.DECODE_NVFP4_HEAD_DIMS,
}
KV_TYPES = (KvType.WIDE, *EIGHT_BIT_TYPES.values())  # of kernels that are compiled ahead
MASKS = (MaskKind.FULL, MaskKind.SLIDING_WINDOW, MaskKind.DRAFT)  # of kernels that are compiled ahead
# Masks under which requests may have several new tokens; under other masks all rows have one position.
DRAFT_MASKS = (MaskKind.FULL, MaskKind.DRAFT, MaskKind.CYCLIC)
HEAD_DIMS = support.DECODE_HEAD_DIMS
COMPILED_HEAD_DIMS = (64, 128, 256, 512)  # the others are compiled on demand only

# Tiles by columns in shared memory. The stages keep memory busy: 128 KiB of K and V are in flight or waiting.
_TILES = {
    64: Tile(ROWS, 128, q_stages=2, kv_stages=4, producer_registers=40, consumer_registers=232),
    128: Tile(ROWS, 64, q_stages=2, kv_stages=4, producer_registers=40, consumer_registers=232),
    192: Tile(ROWS, 64, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    256: Tile(ROWS, 64, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232),
    512: Tile(ROWS, 32, q_stages=1, kv_stages=2, producer_registers=40, consumer_registers=232, splits_v=True),
}
# The swap-AB tile fills shared memory with stages, and has registers for one warpgroup besides the producers.
_TREE_TILE = Tile(SWAP_AB_ROWS[0], LEAF_TILE, q_stages=2, kv_stages=4, producer_registers=104, consumer_registers=240)
# Over 8-bit caches the swap-AB tile has half of the registers. Q goes into registers, so one stage of Q is enough.
_EIGHT_BIT_TREE_TILE = replace(_TREE_TILE, q_stages=1, producer_registers=64, consumer_registers=192)
STAGE_BYTES = 65536  # of K, and of V, of all CTAs of an SM
# Stage bytes for rows shorter than a cache line of L2. CTAs whose heads share cache lines read them further apart in
# time with more loads in flight: 256 x 1024 tokens of 4 bits took 132 instead of 127 us. 32 x 8192 tokens whose heads
# lie apart took 113 instead of 108 us (H100, 2026-11-25).
_SHORT_ROW_STAGE_BYTES = 32768


def _with_larger_combine(tile: Tile) -> Tile:
    """Return the tile with 104 registers for the combine warpgroup, from both warpgroups that attend."""
    given = (104 - tile.combine_registers) // 2
    return replace(tile, consumer_registers=tile.consumer_registers - given, combine_registers=104)


# Over 8-bit caches eight warps have keys of their own. The combine warpgroup gets the registers that they leave. It
# needs a few more for widths that are not powers of two.
_EIGHT_BIT_TILE = Tile(ROWS, 128, q_stages=1, kv_stages=4, producer_registers=40, consumer_registers=192)
_WIDE_EIGHT_BIT_TILE = replace(_EIGHT_BIT_TILE, kv_stages=2)
# Loaders and combine need a few registers more for 256 columns, and for scales of each KV head. Otherwise they spill up
# to 30 (by machine code of drafts over e4m3, 2026-11-27).
_MORE_BESIDE_ATTEND: dict[str, Any] = dict(producer_registers=48, consumer_registers=184, combine_registers=96)
_EIGHT_BIT_TILES = {
    112: _with_larger_combine(_EIGHT_BIT_TILE),
    128: _EIGHT_BIT_TILE,
    240: _with_larger_combine(_WIDE_EIGHT_BIT_TILE),
    256: replace(_WIDE_EIGHT_BIT_TILE, **_MORE_BESIDE_ATTEND),
}
# Warps dequantize K and V in registers if each key is dequantized by few warps and registers are left. Every warp that
# has rows dequantizes a key: with more than 32 rows, three or four warps do. Beyond 256 columns, O and Q take too many
# registers. Otherwise a warpgroup dequantizes K and V in place, in shared memory, and tiles are the 16-bit tiles.
# Instructions per byte of K or V, counted for bfloat16 queries and 128 columns: 0.063 with 16 rows, 0.126 with 32 and
# 0.252 with 64 if dequantized in registers. Dequantization in place takes 0.153.
MOST_ROWS_IN_REGISTERS, MOST_COLUMNS_IN_REGISTERS = 32, 256
_DEQUANTIZED_TILES = {columns: replace(tile, converting_registers=88) for columns, tile in _TILES.items()}
# With float16 drafts over e4m3, attend keeps two values in memory and reads them once per chunk. Eight registers more
# for attend would make the warps that load or dequantize spill in every step.
_DEQUANTIZED_TILES[512] = replace(_DEQUANTIZED_TILES[512], consumer_registers=192)
# Loaders that also copy scales take more registers.
_NVFP4_TILES = {
    columns: replace(tile, producer_registers=56, consumer_registers=tile.consumer_registers - 8)
    for columns, tile in ({64: _EIGHT_BIT_TILE} | _EIGHT_BIT_TILES | {256: _WIDE_EIGHT_BIT_TILE}).items()
}


class PartitionedConfig:
    """Facts that decode and MLA configs share: their kernels partition the keys of requests among CTAs.

    Attributes:
        tiled: whether all numbers of rows are cut into tiles of few rows.
    """

    tiled: ClassVar[bool] = False

    @property
    def leaf_tokens(self: Any) -> int:
        """Keys of a leaf, in kernels with a tree."""
        return LEAF_TILE * self.leaf_tiles

    @property
    def accumulated_levels(self) -> int:
        """Levels of the tree, at most, whose leaves one CTA adds up in registers, one after the other."""
        return 0

    @property
    def reads_kv_once(self) -> bool:
        return True

    def slots(self: Any, sizes: LaunchSizes, row_tiles: int) -> int:
        """Return the slots for partials, or for nodes of the tree, of a launch of ``sizes``.

        Each KV head has ``row_tiles``.
        """
        if self.has_tree:
            return node_slots(self.rows, sizes.kv_heads * row_tiles, sizes.columns, sizes.sms, self.ctas_per_sm)
        return replace(sizes, latent=self.family is Family.MLA, by_cta_parts=self.has_cta_parts).slots

    def counter_ints(self: Any, slots: int) -> int:
        """Return the int32 counters of a launch with ``slots``. The kernel finds them zero and leaves them zero."""
        return tree_counter_ints(slots, self.consumer_warpgroups) if self.has_tree else counter_ints(slots)


@dataclass(frozen=True)
class DecodeConfig(PartitionedConfig, KernelConfig):
    """Config of a decode kernel.

    Attributes:
        kv_type: element type of K and V in memory.
        rows: packed rows of a tile.
        short_leaves: whether leaves have the length of the smallest row count's leaves, and none are added before the
            tree. Ragged drafts over 16-bit caches have short leaves up to 32 rows. There the bits of a request are
            independent of the caller's bound of new tokens.
        k_head_scales, v_head_scales: whether the softmax scale, or the output scale, has one value for each KV head.
    """

    family: ClassVar[Family] = Family.DECODE
    layout_type: ClassVar[type[OperandLayout]] = DecodeLayout

    head_dims: ClassVar[tuple[tuple[int, int], ...]] = HEAD_DIMS
    narrow_head_dims: ClassVar[Mapping[KvType, tuple[tuple[int, int], ...]]] = NARROW_HEAD_DIMS

    kv_type: KvType = KvType.WIDE
    rows: int = ROWS
    short_leaves: bool = field(default=False, kw_only=True)
    k_head_scales: bool = field(default=False, kw_only=True)
    v_head_scales: bool = field(default=False, kw_only=True)

    @classmethod
    def refusal(cls, traits: Traits, arch: str) -> str | None:
        served, cache = cls.head_dims, ""
        if traits.dims in served and traits.kv_type is not KvType.WIDE:
            served = cls.narrow_head_dims.get(traits.kv_type, ())
            cache = f" with a {next(dtype for dtype, kv in NARROW_TYPES.items() if kv is traits.kv_type)} cache"
        if traits.dims in served:
            return None
        return (
            f"head dims (QK/V) {_joined(traits.dims)} have no decode kernel on {arch}{cache}; supported: "
            f"{', '.join(map(_joined, served)) or 'none'}"
        )

    @classmethod
    def query_dtype(cls, query: torch.dtype, kv: torch.dtype) -> torch.dtype:
        """Return a 16-bit type for e4m3 queries over e4m3 or NVFP4 caches, because kernels multiply 16 bits.

        It is float16 for NVFP4 caches, whose kernels convert bfloat16 to float16.
        """
        if query not in E4M3_DTYPES or kv not in (query, torch.uint8):
            return query
        return torch.float16 if kv is torch.uint8 else torch.bfloat16

    @classmethod
    def rows_for(cls, rows: int, head_dim: int, kv_type: KvType) -> int:
        """Return the rows of the kernel's tile for ``rows`` packed rows of a request."""
        few = cls.tiles_with_tree(head_dim, kv_type)
        if kv_type in EIGHT_BIT_TYPES.values() and head_dim <= MOST_COLUMNS_IN_REGISTERS:
            few = *few, MOST_ROWS_IN_REGISTERS
        return min((m for m in few if m >= rows), default=ROWS)

    @classmethod
    def tiles_with_tree(cls, head_dim: int, kv_type: KvType, dtype: str = "bf16") -> tuple[int, ...]:
        """Return the rows of tiles whose kernels combine leaves as a tree."""
        return tree_rows(head_dim, kv_type.element(dtype).storage_bytes)

    @property
    def has_tree(self) -> bool:
        """Whether leaves of keys are combined as a binary tree (stream-K), see ``sm90/decode/swap_ab.py``."""
        return self.rows in self.tiles_with_tree(self.head_dim_qk, self.kv_type, self.dtype)

    @property
    def value_blocks(self) -> int:
        """Products of 64 columns of V."""
        return -(-self.head_dim_v // BLOCK_COLUMNS)

    @property
    def smem_levels(self) -> int:
        """Number of levels of the tree that are in shared memory."""
        return shared_levels(self.rows, self.head_dim_v, self.ctas_per_sm)

    @property
    def accumulated_levels(self) -> int:
        is_large = self.has_tree and self.consumer_warpgroups > 1 and not self.short_leaves
        return ACCUMULATED_LEVELS if is_large else 0

    @property
    def dequantizes_in_place(self) -> bool:
        return self.kv_type in EIGHT_BIT_TYPES.values() and self.rows == ROWS and not self.has_tree

    @property
    def dequantizes_in_registers(self) -> bool:
        """Whether the consumer warps read 8-bit or 4-bit K and V and dequantize them in registers."""
        return self.kv_element.dequantized and not self.dequantizes_in_place

    @property
    def row_unit(self) -> int:
        return SWAP_AB_ROWS[0] if self.has_tree or self.dequantizes_in_registers else super().row_unit

    @property
    def matrix_instruction(self) -> str:
        by_warps = self.dequantizes_in_registers and self.accumulated_levels == 0
        return WARP_MMA if by_warps else super().matrix_instruction

    @property
    def splitting_bytes(self) -> int:
        """Bytes of an element of K and V by which keys are split among CTAs.

        Keys that are dequantized in place are split like 16-bit keys, so that results have the same bits.
        """
        return self.kv_bytes if self.dequantizes_in_registers else self.q_bytes

    @property
    def is_cooperative(self) -> bool:
        """Whether a launch starts only when all of its CTAs can run at the same time (cooperative launch)."""
        return False

    @property
    def has_cta_parts(self) -> bool:
        """Whether CTAs take equal parts of the keys of all requests, so that results depend on the batch."""
        return False

    @property
    def ctas_per_sm(self) -> int:
        return ctas_per_sm(self.rows, self.head_dim_v, self.splitting_bytes) if self.has_tree else 1

    @property
    def leaf_tiles(self) -> int:
        rows = SWAP_AB_ROWS[0] if self.short_leaves else self.rows
        return leaf_tiles(rows, self.head_dim_v, self.splitting_bytes, self.tiled)

    @property
    def tile(self) -> Tile:
        if self.has_tree:
            tile = _TREE_TILE if self.ctas_per_sm == 1 else _EIGHT_BIT_TREE_TILE
            row_bytes = HALFWORD_BYTES * self.layout.columns[0]
            stage_bytes = _SHORT_ROW_STAGE_BYTES if row_bytes < CACHE_LINE_BYTES else STAGE_BYTES
            stages = stage_bytes // self.ctas_per_sm // (LEAF_TILE * row_bytes)
            if self.consumer_warpgroups > 1:
                tile = replace(tile, q_stages=1, producer_registers=40, consumer_registers=232)
            return replace(tile, m=self.rows, kv_stages=power_of_two_in(stages))
        eight_bit_tiles = _DEQUANTIZED_TILES if self.dequantizes_in_place else _EIGHT_BIT_TILES
        tiles = {KvType.WIDE: _TILES, KvType.NVFP4: _NVFP4_TILES}.get(self.kv_type, eight_bit_tiles)
        tile = tiles[min(columns for columns in tiles if columns >= self.head_dim_qk)]
        if self.dequantizes_in_registers and (self.k_head_scales or self.v_head_scales):
            tile = _with_larger_combine(tile) if self.copies_scales else replace(tile, **_MORE_BESIDE_ATTEND)
        return replace(tile, m=self.rows)

    @property
    def chunk_tokens(self) -> int:
        """Keys of a chunk, unless requests are very long, in kernels without a tree."""
        return chunk_tokens(self.head_dim_v, element_bytes=self.splitting_bytes)

    @classmethod
    def scratch_bytes(cls, sizes: LaunchSizes) -> int:
        """Return the bytes of scratch for any kernel of this class, see :func:`splitting.scratch_bytes`."""
        return scratch_bytes(sizes, cls.tiled)

    @property
    def has_combine_role(self) -> bool:
        """Whether a separate warpgroup combines partials. Two warpgroups that share V leave too few registers for
        it."""
        return not self.tile.splits_v and not self.has_tree

    @property
    def consumer_warpgroups(self) -> int:
        if self.has_tree:
            return 1 if self.tiled else tree_warpgroups(self.rows)
        return 2 if self.dequantizes_in_registers else super().consumer_warpgroups

    @property
    def copies_scales(self) -> bool:
        return bool(self.kv_element.block)

    @property
    def registers(self) -> tuple[int, ...]:
        return (*super().registers, *[self.tile.combine_registers] * self.has_combine_role)

    @property
    def name(self) -> str:
        kind = [f"kv_{self.kv_type.value}"] if self.kv_type is not KvType.WIDE else []
        kind += [f"rows{self.rows}"] * (self.rows != ROWS) + ["short_leaves"] * self.short_leaves
        kind += ["k_head_scales"] * self.k_head_scales + ["v_head_scales"] * self.v_head_scales
        return self._named(kind)


def resolve_decode(problem: AttentionProblem, arch: str, kind: type[DecodeConfig] = DecodeConfig) -> DecodeConfig:
    """Choose the decode kernel for ``problem`` on ``arch``, with a config of type ``kind``.

    Raises:
        NotImplementedError: there is no kernel; the message lists what is supported.
    """
    dims = problem.query.shape[2], problem.v_dim
    kv_type = NARROW_TYPES.get(problem.key.dtype, KvType.WIDE)
    packed_rows = problem.query.shape[1] // problem.key.shape[1] * problem.max_q_len
    kind.require(Traits(dims, kv_type, rows=packed_rows), arch)
    out_dtype = problem.query.dtype if problem.out is None else problem.out.dtype
    if kv_type is KvType.WIDE:
        require_dtypes(problem, out_dtype, arch)
    require_seen(problem, "decode kernel", (*MASKS, MaskKind.CYCLIC) if problem.max_q_len <= 1 else DRAFT_MASKS, arch)
    dtype = DTYPES[problem.query.dtype]
    common = (arch, dtype, QUERY_DTYPES[out_dtype], *dims, problem.mask.kind)
    rows = kind.rows_for(packed_rows, dims[0], kv_type)
    unfetched = kind(*common, *paged_fetches(1)[0], kv_type, rows)
    fetch = kv_fetch(problem, unfetched.tile.n)
    config = kind(*common, *fetch, kv_type, rows, uneven_pages=has_uneven_pages(problem))
    k_scales, v_scales = head_scales(problem)
    if (k_scales or v_scales) and kv_type is KvType.WIDE:
        raise NotImplementedError(f"scales of each KV head have no decode kernel on {arch} with a 16-bit cache")
    config = replace(config, k_head_scales=k_scales, v_head_scales=v_scales)
    has_short_leaves = config.has_tree and config.rows in SWAP_AB_ROWS and kv_type is KvType.WIDE
    short = replace(config, short_leaves=problem.q_offsets is not None and has_short_leaves)
    leaves, others = ((each.leaf_tiles, each.accumulated_levels) for each in (short, config))
    return short if leaves != others else config


def _joined(dims: tuple[int, int]) -> str:
    """Return head dims (QK, V) as messages name them."""
    return "/".join(map(str, dict.fromkeys(dims)))


def require_seen(problem: AttentionProblem, kernel: str, masks: Sequence[MaskKind], arch: str) -> None:
    """Refuse features that a decode or MLA decode ``kernel`` would ignore, and all masks except ``masks``."""
    p, lse = problem, problem.lse
    if p.mask.kind not in masks:
        raise NotImplementedError(
            f"the mask {p.mask.kind.value} has no {kernel} on {arch} for up to {p.max_q_len} new tokens; "
            f"supported: {', '.join(mask.value for mask in masks)}"
        )
    given = {
        "lengths from offsets": p.kv_lens is None,
        "offsets in elements": p.q_offsets is not None and p.q_offsets.token_elements != 1,
        "q_lens": p.q_lens is not None,
        "a DCP rank under another mask": (p.dcp_rank is None) == (p.mask.kind is MaskKind.CYCLIC),
        "o_offsets": p.o_offsets is not None,
        "contiguous keys": (p.page_table is None and p.token_table is None) or p.k_offsets is not None,
        f"{p.score.kind.value} scores": p.score != Score(),
        "statistics": p.statistics is not None,
        "skip_softmax": p.skip_softmax != 0 or p.skipped_tiles is not None,
        "a log-sum-exp that is not ragged": lse is not None and lse.layout is not LseLayout.RAGGED,
    }
    for what, is_given in given.items():
        if is_given:
            raise NotImplementedError(f"there is no {kernel} with {what} for {arch}")


def shipped_decode_configs(
    arch: str = "sm_90a",
    types: str = support.TYPES_16BIT,
    preferred: Sequence[type[KernelConfig]] = (),
    kind: type[DecodeConfig] = DecodeConfig,
) -> Iterator[DecodeConfig]:
    """Yield the decode kernels that are compiled ahead for operands of ``types``, where no kernel of ``preferred``
    types serves them.

    All multiply in 16 bits, so kernels over 8-bit caches go with these types, too.
    """
    if types != support.TYPES_16BIT:
        return
    for dtype, head_dim, mask, kv_type in itertools.product(DTYPES.values(), COMPILED_HEAD_DIMS, MASKS, KV_TYPES):
        dims = (head_dim, head_dim)
        common = (arch, dtype, dtype, *dims, mask)
        # The last request has more rows than any tile.
        requests = [Traits(dims, kv_type, rows=rows) for rows in (*SWAP_AB_ROWS, ROWS, ROWS + 1)]
        chosen = [traits.rows for traits in requests if kind.is_chosen(traits, arch, preferred)]
        for rows in sorted({kind.rows_for(rows, head_dim, kv_type) for rows in chosen}):
            tile = kind(*common, *paged_fetches(1)[0], kv_type, rows).tile
            for fetch, box_rows in paged_fetches(tile.n):
                yield kind(*common, fetch, box_rows, kv_type, rows)
