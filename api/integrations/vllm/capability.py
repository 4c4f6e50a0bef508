"""Questions of vLLM about supported configurations, answered from hopwell's support matrix."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform

from hopwell.integrations.capability import (
    DTYPES,
    FP8,
    NVFP4,
    has_append,
    has_biased_scores,
    has_decode,
    has_mla_decode,
    has_prefill,
    has_ragged_prefill,
    unaligned_rows,
)
from hopwell.kernels import hardware, support

__all__ = [
    "CACHE_DTYPES",
    "DTYPES",
    "FP8",
    "MLA_CACHE_DTYPES",
    "NVFP4",
    "NVFP4_TOKENS",
    "arch_of",
    "cache_dtype",
    "has_append",
    "has_biased_scores",
    "has_decode",
    "has_mla_decode",
    "has_prefill",
    "has_ragged_prefill",
    "query_dtype",
    "unaligned_rows",
]

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
NVFP4_TOKENS = 4  # blocks are multiples of it: V's data, behind K's scales, begin at a multiple of 16 bytes


def arch_of(capability: Any = None) -> str | None:
    """Return hopwell's name of a device with this compute capability, or None if hopwell has no kernels for it.

    Without a capability it is the device of this process; on the CPU, the emulated device.
    """
    capability = capability or current_platform.get_device_capability()
    if capability is not None:
        return hardware.of_capability(capability.major, capability.minor)
    return support.arch_of(torch.device("cpu")) if current_platform.is_cpu() else None


def cache_dtype(name: str | None, dtype: torch.dtype, names: dict[str, torch.dtype | None] = CACHE_DTYPES) -> Any:
    """Return the dtype of a cache that vLLM calls ``name``, for a model of ``dtype``."""
    return names["auto" if name is None else name] or dtype


def query_dtype(dtype: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """Return the dtype of queries: vLLM's layer quantizes queries over an e4m3 cache."""
    return FP8 if kv is FP8 else dtype
