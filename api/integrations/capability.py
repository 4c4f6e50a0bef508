"""Questions of engines about supported configurations, answered from hopwell's support matrix."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hopwell.kernels import support
from hopwell.kernels.append.config import CacheType
from hopwell.kernels.capability import features, samples
from hopwell.kernels.masks import MaskKind

FP8, NVFP4 = torch.float8_e4m3fn, torch.uint8
DTYPES = (torch.bfloat16, torch.float16)
DS_MLA_ROW = 656  # bytes of a row of vLLM's fp8_ds_mla
_APPEND_KINDS = {FP8: CacheType.E4M3, NVFP4: CacheType.NVFP4}


def _has(entry: str, problem: Any, arch: str) -> bool:
    return features.lacking(entry, problem, arch) is None and features.refuse(problem, arch) is None


@functools.lru_cache(maxsize=256)
def has_prefill(
    arch: str,
    head_size: int,
    query: torch.dtype,
    kv: torch.dtype,
    *,
    mask: MaskKind = MaskKind.CAUSAL,
    sinks: bool = False,
    v_head_size: int | None = None,
    head_scales: bool = False,
) -> bool:
    """Return whether the context entry has kernels for these calls. They serve batches of every kind.

    V's block scales in an NVFP4 cache are linear. ``v_head_size`` is the head dimension of V; None means ``head_size``.
    ``head_scales``: whether each KV head has scales of its own.
    """
    given: dict[str, Any] = dict(sinks=samples.SINKS) if sinks else {}
    given["head_scales"] = head_scales
    given |= dict(dims=(head_size, head_size if v_head_size is None else v_head_size), query=query, mask=mask)
    is_nvfp4 = kv is NVFP4
    problem = samples.prefill_with_linear_v_scales(**given) if is_nvfp4 else samples.prefill(kv=kv, **given)
    return _has(support.CONTEXT, problem, arch)


@functools.lru_cache(maxsize=256)
def has_decode(
    arch: str,
    head_size: int,
    query: torch.dtype,
    kv: torch.dtype,
    *,
    q_len: int = 1,
    v_head_size: int | None = None,
) -> bool:
    """Return whether the decode entry has kernels for these calls. Without them the context entry decodes.

    ``v_head_size`` is the head dimension of V; None means ``head_size``.
    """
    dims = (head_size, head_size if v_head_size is None else v_head_size)
    if any(dim % 16 for dim in dims):
        return False
    mask = MaskKind.DRAFT if q_len > 1 else MaskKind.FULL
    return _has(support.TRTLLM_DECODE, samples.decode(dims=dims, query=query, kv=kv, q_len=q_len, mask=mask), arch)


@functools.lru_cache(maxsize=256)
def has_biased_scores(
    arch: str, head_size: int, query: torch.dtype, kv: torch.dtype, *, alibi: bool, soft_cap: bool
) -> bool:
    """Return whether the fmha_v2 entry, which has ALiBi and soft caps, has kernels for these calls."""
    score: dict[str, Any] = dict(alibi=alibi, soft_cap=30.0 if soft_cap else 0.0)
    if query != kv:
        return False
    return _has(support.FMHA_V2, samples.prefill(dims=(head_size, head_size), query=query, **score), arch)


@functools.lru_cache(maxsize=64)
def has_append(arch: str, kv: torch.dtype) -> bool:
    """Return whether new tokens can be written into a cache of this dtype."""
    return _has(support.APPEND_SLOTS, samples.append(kind=_APPEND_KINDS.get(kv, CacheType.WIDE)), arch)


@functools.lru_cache(maxsize=64)
def has_mla_decode(
    arch: str, head_size: int, query: torch.dtype, kv: torch.dtype, *, ds_mla: bool = False, sparse: bool = False
) -> bool:
    """Return whether the MLA entry has kernels for a latent row of ``head_size``, rotary part included."""
    known = support.SPARSE_MLA_HEAD_DIMS if sparse else support.MLA_HEAD_DIMS
    dims = next((dims for dims in known if dims[0] == head_size), None)
    # Rows of fp8_ds_mla have their rotary part in bfloat16.
    if dims is None or (ds_mla and (dims != support.FP8_DS_MLA_HEAD_DIMS or query is not torch.bfloat16)):
        return False
    row: dict[str, Any] = dict(row=DS_MLA_ROW) if ds_mla else {}
    return _has(support.MLA, samples.mla(dims=dims, query=query, kv=kv, sparse=sparse, **row), arch)


@functools.lru_cache(maxsize=64)
def has_ragged_prefill(arch: str, qk_dim: int, v_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the cuDNN entry has kernels for ragged K and V of these head dims."""
    return _has(support.CUDNN, samples.prefill(dims=(qk_dim, v_dim), query=dtype, lse=True), arch)


def unaligned_rows(head_size: int, kv: torch.dtype) -> str | None:
    """Return why kernels do not read heads of this size that lie one behind the other, or None if they do.

    Kernels read rows from multiples of 16 bytes on. A row of an NVFP4 cache has head_size / 2 bytes.
    """
    if kv is NVFP4 or head_size * kv.itemsize % 16 == 0:
        return None
    return f"head sizes must be multiples of {16 // kv.itemsize} with a cache of {kv}, got {head_size}"
