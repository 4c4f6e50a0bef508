"""Questions of vLLM about supported configurations, answered from hopwell's support matrix."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.platforms import current_platform

from hopwell.kernels import hardware, support
from hopwell.kernels.append.config import CacheType
from hopwell.kernels.capability import features, samples
from hopwell.kernels.masks import MaskKind

FP8, NVFP4 = torch.float8_e4m3fn, torch.uint8
DTYPES = (torch.bfloat16, torch.float16)
# vLLM's names of cache dtypes. None is the dtype of the model.
CACHE_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "nvfp4": NVFP4,
}
MLA_CACHE_DTYPES: dict[str, torch.dtype | None] = {
    **{name: dtype for name, dtype in CACHE_DTYPES.items() if dtype is not NVFP4},
    "fp8_ds_mla": torch.uint8,
}
DS_MLA_ROW = 656  # bytes of a row of fp8_ds_mla
_APPEND_KINDS = {FP8: CacheType.E4M3, NVFP4: CacheType.NVFP4_INTERLEAVED}
NVFP4_TOKENS = 4  # V's scales are in groups of this many tokens, and blocks are multiples of it


def arch_of(capability: Any = None) -> str | None:
    """Return hopwell's name of a device with this compute capability, or None if hopwell has no kernels for it.

    Without a capability it is the device of this process; on the CPU, the emulated device.
    """
    capability = capability or current_platform.get_device_capability()
    if capability is not None:
        return hardware.of_capability(capability.major, capability.minor)
    return support.arch_of(torch.device("cpu")) if current_platform.is_cpu() else None


def _has(entry: str, problem: Any, arch: str) -> bool:
    return features.lacking(entry, problem, arch) is None and features.refuse(problem, arch) is None


def cache_dtype(name: str | None, dtype: torch.dtype, names: dict[str, torch.dtype | None] = CACHE_DTYPES) -> Any:
    """Return the dtype of a cache that vLLM calls ``name``, for a model of ``dtype``."""
    return names["auto" if name is None else name] or dtype


def query_dtype(dtype: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """Return the dtype of queries: vLLM's layer quantizes queries over an e4m3 cache."""
    return FP8 if kv is FP8 else dtype


@functools.lru_cache(maxsize=256)
def has_prefill(
    arch: str,
    head_size: int,
    query: torch.dtype,
    kv: torch.dtype,
    *,
    mask: MaskKind = MaskKind.CAUSAL,
    sinks: bool = False,
) -> bool:
    """Return whether the context entry has kernels for these calls. They serve batches of every kind."""
    given: dict[str, Any] = dict(sinks=samples.SINKS) if sinks else {}
    dims = (head_size, head_size)
    return _has(support.CONTEXT, samples.prefill(dims=dims, query=query, kv=kv, mask=mask, **given), arch)


@functools.lru_cache(maxsize=256)
def has_decode(arch: str, head_size: int, query: torch.dtype, kv: torch.dtype, *, q_len: int = 1) -> bool:
    """Return whether the decode entry has kernels for these calls. Without them the context entry decodes."""
    mask = MaskKind.DRAFT if q_len > 1 else MaskKind.FULL
    problem = samples.decode(dim=head_size, query=query, kv=kv, q_len=q_len, mask=mask)
    return _has(support.TRTLLM_DECODE, problem, arch) if head_size % 16 == 0 else False


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
