"""hopwell: attention kernels for NVIDIA Hopper and Blackwell, drop-in for FlashInfer's entry points."""

from hopwell._toolchain import check_toolchain

# This comes before anything that may need the toolchain, so that a wrong one gives this message and no other.
check_toolchain()

from hopwell._device_data import check_device_data  # noqa: E402
from hopwell._switches import batch_invariant  # noqa: E402
from hopwell.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache  # noqa: E402
from hopwell.mla import trtllm_batch_decode_with_kv_cache_mla  # noqa: E402
from hopwell.page import (  # noqa: E402
    append_paged_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
    nvfp4_quantize_append_paged_kv_cache,
)
from hopwell.prefill import (  # noqa: E402
    cudnn_batch_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
)
from hopwell.utils import FP4Tensor  # noqa: E402
from hopwell.version import __version__  # noqa: E402

__all__ = [
    "FP4Tensor",
    "__version__",
    "append_paged_kv_cache",
    "batch_invariant",
    "check_device_data",
    "cudnn_batch_prefill_with_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_fmha_v2_prefill",
    "xqa_batch_decode_with_kv_cache",
]
