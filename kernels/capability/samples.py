"""Sample problems of the support matrix: a feature is supported if a kernel serves its sample problems.

A sample has shapes, strides and dtypes, which are enough to choose a kernel, and no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hopwell.kernels.append.config import AppendProblem, CacheType
from hopwell.kernels.elements import ELEMENTS
from hopwell.kernels.problem import (
    AttentionProblem,
    BlockScales,
    DcpRank,
    Family,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    OutputScales,
    PageTable,
    Score,
)

BF16, FP8, INT8, UINT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8
HEADS, KV_HEADS, PAGES, PAGE_SIZE, BATCH = 8, 2, 4, 16, 2
BLOCK = ELEMENTS["nvfp4"].block


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


SINKS = _empty(HEADS)


def _ints(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _cache(dims: tuple[int, int], kv: torch.dtype, page_size: int, *, interleaves_v: bool = False) -> dict[str, Any]:
    """Return K and V, with block scales if they are NVFP4 (two elements in a byte)."""
    packing = 2 if kv is UINT8 else 1
    key, value = (_empty(PAGES, KV_HEADS, page_size, dim // packing, dtype=kv) for dim in dims)
    scales = [_empty(PAGES, KV_HEADS, page_size, dim // BLOCK, dtype=FP8) for dim in dims]
    return dict(
        key=key, value=value, kv_scales=BlockScales(scales[0], scales[1], interleaves_v) if kv is UINT8 else None
    )


def _problem(
    query: torch.Tensor,
    q_len: int,
    mask: Mask,
    *,
    tensor_scales: bool = False,
    head_scales: bool = False,
    **fields: Any,
) -> AttentionProblem:
    """Return a problem of ``fields``, with a softmax scale or both scales as tensors."""
    table, scales = _ints(BATCH, 3), KV_HEADS if head_scales else 1
    common: dict[str, Any] = dict(
        query=query,
        out=None,
        batch=BATCH,
        max_q_len=q_len,
        max_kv_len=64,
        q_offsets=None,
        kv_lens=_ints(BATCH),
        mask=mask,
        softmax_scale=_empty(scales) if tensor_scales or head_scales else 1.0,
        output_scale=_empty(scales) if head_scales else 1.0,
        page_table=PageTable(table, table),
    )
    return AttentionProblem(**(common | fields))


def _dcp_rank_of(mask: Mask) -> DcpRank | None:
    return DcpRank(_ints(BATCH), 2, 0) if mask.kind is MaskKind.CYCLIC else None


def prefill(
    *,
    dims: tuple[int, int] = (128, 128),
    query: torch.dtype = BF16,
    kv: torch.dtype | None = None,
    out: torch.dtype | None = None,
    page_size: int = PAGE_SIZE,
    mask: MaskKind = MaskKind.CAUSAL,
    alibi: bool = False,
    soft_cap: float = 0.0,
    lse: bool = False,
    statistics: bool = False,
    **fields: Any,
) -> AttentionProblem:
    """Return a prefill problem. K, V and the output have the query's dtype by default."""
    q_len = 32
    tokens = BATCH * q_len
    scales = OutputScales(_empty(128, HEADS * dims[1] // BLOCK, dtype=FP8), 0, 1.0)
    stored = None if out is None else _empty(tokens, HEADS, dims[1] // (2 if out is UINT8 else 1), dtype=out)
    return _problem(
        _empty(tokens, HEADS, dims[0], dtype=query),
        q_len,
        Mask(mask, window_left=64, chunk=64, window_right=64),
        out=stored,
        out_scales=scales if out is UINT8 else None,
        score=Score.capped(soft_cap, has_slopes=alibi),
        lse=LogSumExp(_empty(tokens, HEADS), LseLayout.RAGGED, natural=True) if lse else None,
        statistics=_empty(tokens, HEADS, 2) if statistics else None,
        **_cache(dims, kv or query, page_size, interleaves_v=True),
        **fields,
    )


def prefill_with_linear_v_scales(**given: Any) -> AttentionProblem:
    """Return a prefill problem over an NVFP4 cache whose block scales are all linear."""
    problem = prefill(kv=UINT8, **given)
    assert problem.kv_scales is not None
    return replace(problem, kv_scales=replace(problem.kv_scales, interleaves_v=False))


def decode(
    *,
    dims: tuple[int, int] = (128, 128),
    query: torch.dtype = BF16,
    kv: torch.dtype = BF16,
    out: torch.dtype | None = None,
    page_size: int = PAGE_SIZE,
    q_len: int = 1,
    mask: MaskKind = MaskKind.FULL,
    **fields: Any,
) -> AttentionProblem:
    """Return a decode problem with ``q_len`` new tokens of each request."""
    tokens = BATCH * q_len
    return _problem(
        _empty(tokens, HEADS, dims[0], dtype=query),
        q_len,
        Mask(mask),
        out=None if out is None else _empty(tokens, HEADS, dims[1], dtype=out),
        dcp_rank=_dcp_rank_of(Mask(mask)),
        scratch=_empty(1, dtype=UINT8),
        family=Family.DECODE,
        **_cache(dims, kv, page_size),
        **fields,
    )


def mla(
    *,
    dims: tuple[int, int] = (576, 512),
    query: torch.dtype = BF16,
    kv: torch.dtype = BF16,
    row: int | None = None,
    page_size: int = PAGE_SIZE,
    q_len: int = 1,
    mask: MaskKind = MaskKind.CAUSAL,
    sparse: bool = False,
    **fields: Any,
) -> AttentionProblem:
    """Return an MLA decode problem over rows of ``row`` elements, whose value is the first ``dims[1]`` columns."""
    key = _empty(PAGES, 1, page_size, row or dims[0], dtype=kv)
    tokens = BATCH * q_len
    topk_lists: dict[str, Any] = dict(page_table=None, token_table=_ints(tokens, 64)) if sparse else {}
    return _problem(
        _empty(tokens, HEADS, dims[0], dtype=query),
        q_len,
        Mask(mask),
        key=key,
        value=key[..., : dims[1]],
        dcp_rank=_dcp_rank_of(Mask(mask)),
        scratch=_empty(1, dtype=UINT8),
        family=Family.MLA,
        **topk_lists,
        **fields,
    )


def append(
    *,
    kind: CacheType = CacheType.WIDE,
    page_size: int = PAGE_SIZE,
    tensor_scales: bool = False,
    head_scales: bool = False,
) -> AppendProblem:
    """Return an append problem: new bfloat16 tokens into a cache of this ``kind``."""
    tokens, dim, kv = 8, 128, {CacheType.WIDE: BF16, CacheType.E4M3: FP8}.get(kind, UINT8)
    cache, table = _cache((dim, dim), kv, page_size), _ints(BATCH, 3)
    scales = cache["kv_scales"]
    key, value = (_empty(tokens, KV_HEADS, dim, dtype=BF16) for _ in "kv")
    scale = _empty(KV_HEADS if head_scales else 1) if tensor_scales or head_scales else 1.0
    return AppendProblem(
        key=key,
        value=value,
        key_cache=cache["key"],
        value_cache=cache["value"],
        key_scales=None if scales is None else scales.key,
        value_scales=None if scales is None else scales.value,
        batch_indices=_ints(tokens),
        positions=_ints(tokens),
        page_table=PageTable(table, table),
        page_starts=None,
        batch=BATCH,
        k_scale=scale,
        v_scale=scale,
        kind=kind,
        programmatic_launch=False,
    )


def _out_dtype(problem: AttentionProblem) -> torch.dtype:
    return problem.query.dtype if problem.out is None else problem.out.dtype


def _tensor_scales(problem: Any) -> list[torch.Tensor]:
    names = ("softmax_scale", "output_scale", "output_factor", "k_scale", "v_scale")
    found = (getattr(problem, name, None) for name in names)
    return [scale for scale in found if isinstance(scale, torch.Tensor)]


# For each argument of a sample problem: whether a problem has the feature that a value of the argument selects.
_HAS: dict[str, Callable[[Any, Any], bool]] = dict(
    query=lambda problem, dtype: problem.query.dtype == dtype,
    kv=lambda problem, dtype: problem.key.dtype == dtype,
    out=lambda problem, dtype: _out_dtype(problem) == dtype,
    row=lambda problem, elements: problem.key.shape[-1] == elements,
    dims=lambda problem, dims: (problem.query.shape[-1], problem.v_dim) == dims,
    paged=lambda problem, yes: problem.page_table is not None or problem.token_table is not None,
    page_size=lambda problem, size: True,  # a row has samples of all sizes
    mask=lambda problem, kind: problem.mask.kind is kind,
    q_len=lambda problem, several: problem.max_q_len > 1,
    alibi=lambda problem, yes: problem.score.kind.has_slopes,
    soft_cap=lambda problem, cap: problem.score.kind.caps,
    skip_softmax=lambda problem, factor: problem.skip_softmax > 0,
    tensor_scales=lambda problem, yes: bool(_tensor_scales(problem)),
    head_scales=lambda problem, yes: any(scale.numel() > 1 for scale in _tensor_scales(problem)),
    sinks=lambda problem, sinks: problem.sinks is not None,
    lse=lambda problem, yes: problem.lse is not None,
    statistics=lambda problem, yes: problem.statistics is not None,
    sparse=lambda problem, yes: problem.token_table is not None,
    linear_v_scales=lambda problem, yes: problem.kv_scales is not None and not problem.kv_scales.interleaves_v,
    kind=lambda problem, kind: problem.kind is kind,
)


def has(problem: Any, case: dict[str, Any]) -> bool:
    """Return whether a problem has everything that the arguments of a case ask for."""
    return all(_HAS[name](problem, value) for name, value in case.items())
