"""Memory layouts of the entry points' arguments, as views, and helpers that fill low-precision caches.

The package has two audiences. The entry points convert every accepted form of an argument to the one form that kernels
take. They copy nothing and read no value on the host:

* ``kv_cache``: stacked, paired, HND, NHD, ragged and MLA caches as views [pages, kv_heads, page_size, head_dim].
* ``paging``: 2-D and 3-D page tables.
* ``ragged``: lengths, cumulative lengths and element offsets.
* ``fmha_v2``: the five input layouts of ``trtllm_fmha_v2_prefill``.
* ``tma``: the rules for tensors that TMA addresses.

Users fill quantized caches, and read quantized outputs:

* ``fp8``: float8_e4m3fn data with one scale.
* ``mla_rows``: latent keys in rows of 656 bytes.
* ``e2m1``: 4-bit codes and their packing.
* ``nvfp4``: quantization of tensors, caches and outputs.
* ``scales``: block scales of NVFP4 caches, linear and interleaved.
* ``swizzle``: the 128x4 order of output scales.

Wrong Python types and dtypes raise TypeError; all other errors are ValueError.
"""

from hopwell.layouts.e2m1 import E2M1_MAGNITUDES, E2M1_MAX, decode_e2m1, encode_e2m1, pack_e2m1, unpack_e2m1
from hopwell.layouts.fmha_v2 import FmhaV2Inputs, FmhaV2Layout, block_offset, block_offset_views, fmha_v2_inputs
from hopwell.layouts.fp8 import E4M3_MAX, dequantize_fp8, fp8_scale, quantize_fp8
from hopwell.layouts.kv_cache import (
    KVLayout,
    KVViews,
    canonical_view,
    mla_kv_views,
    paged_kv_views,
    ragged_kv_views,
    ragged_view,
    separate_kv_views,
)
from hopwell.layouts.mla_rows import (
    FP8_DS_MLA_BYTES,
    dequantize_fp8_ds_mla,
    fill_fp8_ds_mla_cache,
    quantize_fp8_ds_mla,
)
from hopwell.layouts.nvfp4 import (
    NVFP4Blocks,
    NVFP4KVCache,
    dequantize_nvfp4,
    dequantize_nvfp4_kv_cache,
    dequantize_nvfp4_output,
    nvfp4_global_scale,
    quantize_nvfp4,
    quantize_nvfp4_kv_cache,
    quantize_nvfp4_output,
)
from hopwell.layouts.paging import shared_page_table, split_page_table
from hopwell.layouts.ragged import cumulative_lengths, element_offsets, sequence_lengths, token_offsets
from hopwell.layouts.scales import (
    NVFP4_BLOCK,
    VScaleLayout,
    block_scale_views,
    deinterleave_v_scales,
    interleave_v_scales,
    interleaved_v_scale_position,
    interleaved_v_scale_view,
)
from hopwell.layouts.swizzle import (
    store_swizzled_128x4,
    swizzle_128x4,
    swizzled_128x4_offset,
    swizzled_128x4_shape,
    swizzled_128x4_view,
    unswizzle_128x4,
)
from hopwell.layouts.tma import TMA_ALIGNMENT, TMA_STRIDE_LIMIT, tma_violation

__all__ = [
    "E2M1_MAGNITUDES",
    "E2M1_MAX",
    "E4M3_MAX",
    "FP8_DS_MLA_BYTES",
    "NVFP4_BLOCK",
    "TMA_ALIGNMENT",
    "TMA_STRIDE_LIMIT",
    "FmhaV2Inputs",
    "FmhaV2Layout",
    "KVLayout",
    "KVViews",
    "NVFP4Blocks",
    "NVFP4KVCache",
    "VScaleLayout",
    "block_offset",
    "block_offset_views",
    "block_scale_views",
    "canonical_view",
    "cumulative_lengths",
    "decode_e2m1",
    "deinterleave_v_scales",
    "dequantize_fp8",
    "dequantize_fp8_ds_mla",
    "dequantize_nvfp4",
    "dequantize_nvfp4_kv_cache",
    "dequantize_nvfp4_output",
    "element_offsets",
    "encode_e2m1",
    "fill_fp8_ds_mla_cache",
    "fmha_v2_inputs",
    "fp8_scale",
    "interleave_v_scales",
    "interleaved_v_scale_position",
    "interleaved_v_scale_view",
    "mla_kv_views",
    "nvfp4_global_scale",
    "pack_e2m1",
    "paged_kv_views",
    "quantize_fp8",
    "quantize_fp8_ds_mla",
    "quantize_nvfp4",
    "quantize_nvfp4_kv_cache",
    "quantize_nvfp4_output",
    "ragged_kv_views",
    "ragged_view",
    "separate_kv_views",
    "sequence_lengths",
    "shared_page_table",
    "split_page_table",
    "store_swizzled_128x4",
    "swizzle_128x4",
    "swizzled_128x4_offset",
    "swizzled_128x4_shape",
    "swizzled_128x4_view",
    "tma_violation",
    "token_offsets",
    "unpack_e2m1",
    "unswizzle_128x4",
]
