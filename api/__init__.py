"""hopwell: attention kernels for NVIDIA Hopper and Blackwell, drop-in for FlashInfer's entry points.

Importing hopwell imports no module: each is imported at the first use of one of its names. The command line thus starts
without PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hopwell._checks.toolchain import check_toolchain

# The check precedes every import that may need the toolchain, so that a wrong toolchain gives only this message.
check_toolchain()

from hopwell.version import __version__  # noqa: E402

if TYPE_CHECKING:
    from hopwell._calls.switches import batch_invariant
    from hopwell._checks.device_data import check_device_data
    from hopwell._warm_up.warm import warm_up
    from hopwell.cascade import merge_states
    from hopwell.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
    from hopwell.integrations.flashinfer import install, uninstall
    from hopwell.mla import trtllm_batch_decode_with_kv_cache_mla
    from hopwell.page import (
        append_paged_kv_cache,
        append_paged_kv_cache_with_slot_mapping,
        get_batch_indices_positions,
        get_seq_lens,
        nvfp4_quantize_append_paged_kv_cache,
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    )
    from hopwell.prefill import (
        cudnn_batch_prefill_with_kv_cache,
        trtllm_batch_context_with_kv_cache,
        trtllm_fmha_v2_prefill,
    )
    from hopwell.utils import FP4Tensor

__all__ = [
    "FP4Tensor",
    "__version__",
    "append_paged_kv_cache",
    "append_paged_kv_cache_with_slot_mapping",
    "batch_invariant",
    "check_device_data",
    "cudnn_batch_prefill_with_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "install",
    "merge_states",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "uninstall",
    "warm_up",
    "xqa_batch_decode_with_kv_cache",
]
_HOMES = {
    "_checks.device_data": ("check_device_data",),
    "_calls.switches": ("batch_invariant",),
    "_warm_up.warm": ("warm_up",),
    "cascade": ("merge_states",),
    "decode": ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"),
    "integrations.flashinfer": ("install", "uninstall"),
    "mla": ("trtllm_batch_decode_with_kv_cache_mla",),
    "page": (
        "append_paged_kv_cache",
        "append_paged_kv_cache_with_slot_mapping",
        "get_batch_indices_positions",
        "get_seq_lens",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "prefill": (
        "cudnn_batch_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
        "trtllm_fmha_v2_prefill",
    ),
    "utils": ("FP4Tensor",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}
_SUBMODULES = (
    "cascade",
    "cudnn",
    "decode",
    "emulator",
    "flash_attn",
    "kernels",
    "layouts",
    "mla",
    "page",
    "prefill",
    "torch_ops",
    "utils",
)


def __getattr__(name: str) -> Any:
    """Import a function, a class or a module at its first use; later uses are ordinary look-ups."""
    if name in _SUBMODULES:
        return importlib.import_module(f"hopwell.{name}")
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(f"hopwell.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found
    raise AttributeError(f"module 'hopwell' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
