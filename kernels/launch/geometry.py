"""Run-time sizes and strides of a problem, in the form that each family's kernels take."""

from __future__ import annotations

import torch

from hopwell.kernels.config.base import TileShape, page_and_head_stride
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.prefill import PrefillConfig, packed_shape
from hopwell.kernels.config.splitting import ROWS, LaunchSizes, cta_parts, gmem_levels, most_new_tokens, slot_rows
from hopwell.kernels.launch.arguments import (
    SCALE_STRIDES,
    DecodeGeometry,
    Geometry,
    ScaledDecodeGeometry,
    ScaledGeometry,
    page_divisor,
)
from hopwell.kernels.problem import MAX_KEYS, AttentionProblem, LseLayout, PageTable, TokenOffsets

MAX_INT = 2**31 - 1  # largest size that kernels compare with lengths
# CTAs that read K and V of one head at the same time. With one CTA per head, every tile comes from memory: 1 x 4096
# tokens of 128 KV heads, head dims 192/128, took 12 % longer. In that case 2 are equally good, 8 and 16 slower (H200,
# 2026-11-22).
SHARING = 4
INDEX_BYTES = 4
EMULATED_SMS = 4  # SMs of the emulated device


def topk_page_table(problem: AttentionProblem) -> PageTable | None:
    """Return the top-k indices in the form of a page table."""
    return None if problem.token_table is None else PageTable(problem.token_table, problem.token_table)


def prefill_geometry(problem: AttentionProblem, config: PrefillConfig) -> tuple[int, ...]:
    """Return the run-time sizes and strides of a prefill problem."""
    query, heads, kv_heads = problem.query, problem.query.shape[1], problem.key.shape[1]
    tile_m = config.tile.m
    tile = packed_shape(problem, tile_m) if config.packs_heads else TileShape.of(1, tile_m)
    q_tiles = -(-problem.max_q_len // tile.tokens)
    clusters = max(multiprocessors(query.device) // config.cluster_ctas, 1)
    sizes = Geometry(
        tokens=query.shape[0],
        heads=heads,
        batch=problem.batch,
        grid=min(problem.batch * heads // tile.heads * q_tiles, clusters),
        **_strides(problem),
        q_token_elements=_token_elements(problem.q_offsets),
        o_token_elements=_token_elements(problem.o_offsets),
        k_token_elements=_token_elements(problem.k_offsets),
        v_token_elements=_token_elements(problem.v_offsets),
        mask_size=problem.mask.packed_size,
        head_swizzle=head_swizzle_heads(heads, kv_heads, clusters) // tile.heads,
        **_lse_geometry(problem),
        tile_heads=tile.heads,
        capacity=_capacity(problem),
    )
    if not config.has_block_scales:
        return sizes
    out = problem.out_scales
    return ScaledGeometry(
        **sizes._asdict(),
        **_scale_strides(problem),
        out_scale_row=0 if out is None else out.first_row,
        out_scale_columns=0 if out is None else out.tensor.shape[1],
    )


def _scale_strides(problem: AttentionProblem) -> dict[str, int]:
    """Return the strides named by ``launch.SCALE_STRIDES``."""
    scales = problem.kv_scales
    if scales is None:
        return dict.fromkeys(SCALE_STRIDES, 0)
    k_page, k_head, k_row, _ = scales.key.stride()
    v_page, v_head, v_row, _ = scales.value.stride()
    return dict(
        k_scale_page=k_page,
        k_scale_head=k_head,
        k_scale_row=k_row,
        v_scale_page=v_page,
        v_scale_head=v_head,
        v_scale_row=v_row,
    )


def head_swizzle_heads(heads: int, kv_heads: int, ctas: int) -> int:
    """Return the query heads of a head-swizzle group on ``ctas`` SMs, see ``parts/partition/tiles.py``.

    All groups have the same size: a short last group would have long tiles without other tiles beside them.
    """
    most = max(ctas // SHARING, 1)
    together = max(count for count in range(1, most + 1) if kv_heads % count == 0)
    return together * (heads // kv_heads)


def decode_geometry(problem: AttentionProblem, config: DecodeConfig | MlaConfig) -> tuple[int, ...]:
    """Return the run-time sizes and strides of a decode problem with at least ``splitting.scratch_bytes`` of
    scratch."""
    query, lse = problem.query, problem.lse
    group = query.shape[1] // problem.key.shape[1]
    rows = group * most_new_tokens(problem.max_q_len, query.shape[0], group)
    # With top-k indices, rows of different tokens have different keys.
    row_tiles = -(-(rows if problem.token_table is None else group) // config.tile.m)
    sms = multiprocessors(query.device)
    clusters = max(sms * config.ctas_per_sm // config.cluster_ctas, 1)
    grid = clusters * (config.cluster_ctas // config.work_tile_ctas)
    capacity = problem.max_kv_len
    launched = LaunchSizes(rows, problem.key.shape[1], config.head_dim_v, capacity, sms)
    sizes = DecodeGeometry(
        tokens=query.shape[0],
        batch=problem.batch,
        group=group,
        q_len=problem.max_q_len,
        row_tiles=row_tiles,
        grid=grid,
        **_strides(problem),
        mask_size=problem.mask.packed_size,
        draft_words=0 if problem.draft_mask is None else problem.draft_mask.shape[-1] // 2,
        topk=0 if problem.token_table is None else problem.token_table.shape[1],
        lse_row=0 if lse is None else lse.tensor.stride(0),
        lse_head=0 if lse is None else lse.tensor.stride(1),
        lse_natural=int(lse is not None and lse.natural),
        slots=config.slots(launched, row_tiles),
        slot_rows=slot_rows(rows, problem.is_latent, max(config.rows, ROWS)),
        cta_parts=cta_parts(max(row_tiles, 1), grid),
        gmem_levels=gmem_levels(config.leaf_tokens, capacity, config.smem_levels) if config.has_tree else 0,
        dcp_world=1 if problem.dcp_rank is None else problem.dcp_rank.world,
        dcp_rank=0 if problem.dcp_rank is None else problem.dcp_rank.rank,
        capacity=_capacity(problem),
    )
    if not config.has_block_scales:
        return sizes
    return ScaledDecodeGeometry(**sizes._asdict(), **_scale_strides(problem))


def _capacity(problem: AttentionProblem) -> int:
    """Return the most keys of a request: kernels do not read tables past their ends."""
    if problem.token_table is not None:
        return MAX_KEYS  # top-k indices have their own limit, and a request may have more keys
    rows = problem.key.shape[2]
    return min(rows if problem.page_table is None else problem.page_table.key.shape[1] * rows, MAX_INT)


def multiprocessors(device: torch.device) -> int:
    """Return the number of SMs of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return EMULATED_SMS


def _strides(problem: AttentionProblem) -> dict[str, int]:
    """Return the common fields of the prefill and decode geometries."""
    query, key, value, table = (
        problem.query,
        problem.key,
        problem.value,
        problem.page_table or topk_page_table(problem),
    )
    (k_page, k_head), (v_page, v_head) = page_and_head_stride(key), page_and_head_stride(value)
    q_token, q_head = _row_strides(query)
    o_token, o_head = _row_strides(problem.out) if problem.out is not None else _packed(query.shape[1], problem.v_dim)
    return dict(
        kv_heads=key.shape[1],
        q_token=q_token,
        q_head=q_head,
        o_token=o_token,
        o_head=o_head,
        k_pages=key.shape[0],
        v_pages=value.shape[0],
        k_rows=key.shape[2],
        v_rows=value.shape[2],
        page_divisor=page_divisor(key.shape[2]),
        k_page=k_page,
        k_head=k_head,
        k_row=_row_stride(key),
        v_page=v_page,
        v_head=v_head,
        v_row=_row_stride(value),
        key_table_row=0 if table is None else _row_words(table.key),
        value_table_row=0 if table is None else _row_words(table.value),
    )


def _row_words(table: torch.Tensor) -> int:
    """Return the distance between the rows of a table in 32-bit words; an int64 has two."""
    return table.stride(0) * table.element_size() // INDEX_BYTES


def _lse_geometry(problem: AttentionProblem) -> dict[str, int]:
    lse = problem.lse
    if lse is None:
        return dict(lse_token_elements=1, lse_request=0, lse_rows=0, lse_row=0, lse_head=0, lse_natural=0)
    request, row, head = lse.tensor.stride() if lse.layout is LseLayout.PADDED else (0, *lse.tensor.stride())
    return dict(
        lse_token_elements=_token_elements(lse.offsets),
        lse_request=-1 if lse.layout is LseLayout.RAGGED else request // max(row, 1),
        lse_rows=lse.tensor.shape[-2],
        lse_row=row,
        lse_head=head,
        lse_natural=int(lse.natural),
    )


def _token_elements(offsets: TokenOffsets | None) -> int:
    return 1 if offsets is None else max(offsets.token_elements, 1)


def _packed(heads: int, dim: int) -> tuple[int, int]:
    return heads * dim, dim


def _row_strides(view: torch.Tensor) -> tuple[int, int]:
    """Return the token and head strides of a [tokens, heads, dim] view.

    A dimension of size 1 gets the packed stride, which fits TMA.
    """
    tokens, heads, dim = view.shape
    packed = _packed(heads, dim)
    return (
        view.stride(0) if tokens > 1 else packed[0],
        view.stride(1) if heads > 1 else packed[1],
    )


def _row_stride(view: torch.Tensor) -> int:
    """Return the stride between the rows of a [pages, heads, rows, dim] view."""
    return view.stride(2) if view.shape[2] > 1 else view.shape[3]


def host_value(scale: float | torch.Tensor) -> float:
    """Return a scale as a kernel argument: 1 for a scale that the kernel reads from memory."""
    return 1.0 if isinstance(scale, torch.Tensor) else scale
