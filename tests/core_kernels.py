"""The kernels of the core set, each with the reason for its row.

A cell is a family, an architecture, and the element types of queries and of K and V. Each cell that tests name has at
least one row. Tests that compile a kernel alone and tests that run one on the emulator take the rows that they have.
"""

from __future__ import annotations

KERNELS = {
    # sm_90a, prefill
    "prefill_sm_90a_bf16_d128_causal_pages16": "the usual prefill: bf16, head dim 128, causal, pages of 16 by TMA",
    "prefill_sm_90a_fp16_d128_causal_pages16": "the usual prefill in fp16; compiled only",
    "prefill_sm_90a_fp16_d64_causal_rows": "fp16 on the emulator, with K and V copied by lanes",
    "prefill_sm_90a_bf16_d128_causal_kv_e4m3_pages16": "an e4m3 cache, converted to 16 bits on its way to wgmma",
    "prefill_sm_90a_fp16_d64_causal_kv_e4m3_rows": "an e4m3 cache under fp16 queries, copied by lanes",
    "prefill_sm_90a_bf16_d128_causal_kv_nvfp4_pages16": "an NVFP4 cache, with block scales",
    "prefill_sm_90a_fp16_to_e4m3_d192_causal_kv_nvfp4_rows": "an NVFP4 cache at head dim 192, with an e4m3 output",
    "prefill_sm_90a_e4m3_to_nvfp4_d128_causal_pages16": "e4m3 products, and an NVFP4 output with block scales",
    "prefill_sm_90a_e4m3_to_bf16_d96_chunked_soft_cap_contiguous": "e4m3 products in n slices; compiled only",
    # sm_90a, decode
    "decode_sm_90a_bf16_d128_full_rows8_pages16": "the usual decode: bf16, head dim 128, 8 rows, stream-K",
    "decode_sm_90a_bf16_d128_full_kv_e4m3_rows8_pages16": "an e4m3 cache, dequantized in registers",
    "decode_sm_90a_bf16_d128_full_kv_int8_rows8_pages16": "an int8 cache, dequantized in registers",
    "decode_sm_90a_bf16_d64_draft_kv_nvfp4_rows8_rows": "an NVFP4 cache with a draft mask, copied by lanes",
    "decode_sm_90a_fp16_d128_draft_rows8_pages16": "fp16, and several tokens for each request under a mask",
    "decode_sm_90a_fp16_d64_draft_kv_e4m3_pages16": "an e4m3 cache under 64 rows of fp16, in two warpgroups",
    "decode_sm_90a_fp16_d128_draft_kv_int8_rows32_pages16": "an int8 cache under 32 rows; compiled only",
    "decode_sm_90a_fp16_to_e4m3_d256_full_kv_nvfp4_pages8": "more than 32 rows over NVFP4, split-KV; compiled only",
    # sm_90a, MLA decode
    "mla_sm_90a_bf16_d576_512_causal_pages64": "MLA of DeepSeek with all its heads",
    "mla_sm_90a_e4m3_to_bf16_d576_512_causal_pages16": "e4m3 products of MLA",
    "mla_sm_90a_bf16_d576_512_causal_kv_e4m3_invariant_rows": "an e4m3 cache, and bits that do not depend on the batch",
    # sm_100a and sm_103a
    "prefill_sm_100a_tcgen05_bf16_d128_causal_pages16": "the usual prefill, with S and O in tensor memory",
    "prefill_sm_100a_tcgen05_fp16_d128_causal_pages16": "the usual prefill in fp16",
    "prefill_sm_100a_tcgen05_e4m3_to_bf16_d128_causal_pages16": "e4m3 products with tcgen05",
    "prefill_sm_100a_bf16_d128_full_kv_e4m3_pages16": "an e4m3 cache, by a kernel of sm_120; compiled only",
    "prefill_sm_100a_bf16_d192_sliding_window_kv_nvfp4_packed_rows": "an NVFP4 cache, likewise; compiled only",
    "prefill_sm_100a_bf16_d256_chunked_pages16": "head dim 256, which has no tensor-memory kernel; compiled only",
    "prefill_sm_103a_tcgen05_bf16_d128_causal_pages16": "the usual prefill for sm_103a; compiled only",
    "prefill_sm_103a_tcgen05_e4m3_to_bf16_d128_causal_pages16": "e4m3 products for sm_103a; compiled only",
    "decode_sm_100a_tcgen05_bf16_d128_full_rows8_pages16": "the usual decode, with S and O in tensor memory",
    "decode_sm_100a_tcgen05_bf16_d128_full_pages16": "64 rows in two warpgroups, which add leaves in registers",
    "decode_sm_100a_tcgen05_fp16_d128_sliding_window_rows8_rows": "fp16 and a window, copied by lanes",
    "decode_sm_103a_tcgen05_bf16_d64_full_rows8_pages64": "the usual decode for sm_103a",
    "decode_sm_100a_tcgen05_bf16_d128_full_kv_e4m3_rows8_pages16": "an e4m3 cache, dequantized into tensor memory",
    "decode_sm_100a_tcgen05_fp16_d64_sliding_window_kv_e4m3_rows8_pages64": "an e4m3 cache under fp16",
    "decode_sm_100a_tcgen05_bf16_d128_draft_kv_int8_rows8_rows": "an int8 cache with a draft mask, copied by lanes",
    "decode_sm_100a_tcgen05_fp16_d64_sliding_window_kv_int8_rows32_pages32": "an int8 cache under 32 rows of fp16",
    "decode_sm_103a_tcgen05_bf16_d128_sliding_window_kv_int8_pages64": "an int8 cache under 64 rows, for sm_103a",
    "decode_sm_100a_tcgen05_bf16_d64_draft_kv_nvfp4_rows8_rows": "an NVFP4 cache, with block scales",
    "decode_sm_100a_tcgen05_fp16_to_e4m3_d128_full_kv_nvfp4_rows8_pages8": "an NVFP4 cache and an e4m3 output",
    "decode_sm_103a_tcgen05_bf16_d128_full_kv_nvfp4_rows8_pages16": "an NVFP4 cache for sm_103a",
    "decode_sm_100a_bf16_d128_draft_rows32_pages16": "decode of more rows on Blackwell with mma.sync; compiled only",
    "mla_sm_100a_bf16_d576_512_causal_rows16_pages64": "MLA on Blackwell with mma.sync; compiled only",
    "mla_sm_100a_tcgen05_e4m3_to_bf16_d576_512_causal_rows128_rows": "e4m3 MLA by pairs of CTAs; compiled only",
    "mla_sm_100a_tcgen05_bf16_d576_512_causal_kv_e4m3_rows128_rows": "an e4m3 cache, dequantized; compiled only",
    "mla_sm_103a_tcgen05_bf16_d320_256_causal_kv_e4m3_rows128_topk": "the same for sm_103a; compiled only",
    "mla_sm_100a_tcgen05_bf16_d576_512_causal_kv_fp8_ds_mla_rows128_topk": "rows of 656 bytes; compiled only",
    "mla_sm_103a_tcgen05_bf16_d576_512_causal_kv_fp8_ds_mla_rows128_rows": "the same for sm_103a; compiled only",
    "mla_sm_100a_tcgen05_bf16_d576_512_causal_rows128_invariant_pages64": "batch-invariant MLA by pairs",
    "mla_sm_103a_tcgen05_bf16_d576_512_causal_rows128_topk": "MLA by pairs of CTAs with top-k indices; compiled only",
    "mla_sm_103a_tcgen05_e4m3_to_bf16_d576_512_causal_rows128_pages64": "e4m3 MLA by pairs for sm_103a; compiled only",
    # sm_120a
    "prefill_sm_120a_bf16_d128_causal_contiguous": "the usual prefill with mma.sync; compiled only",
    "prefill_sm_120a_fp16_d128_sliding_window_packed_rows": "fp16, a window and packed heads; compiled only",
    "prefill_sm_120a_e4m3_to_bf16_d128_causal_pages16": "e4m3 products with mma.sync; compiled only",
    "prefill_sm_120a_bf16_d128_causal_kv_e4m3_pages16": "an e4m3 cache; compiled only",
    "prefill_sm_120a_bf16_d128_sliding_window_kv_nvfp4_packed_rows": "an NVFP4 cache and packed heads; compiled only",
    "decode_sm_120a_bf16_d128_full_rows8_pages16": "the usual decode with mma.sync",
    "decode_sm_120a_fp16_d64_sliding_window_rows32_rows": "fp16, 32 rows and a window, copied by lanes",
    "decode_sm_120a_bf16_d128_draft_kv_e4m3_rows8_pages16": "an e4m3 cache with a draft mask",
    "decode_sm_120a_bf16_d256_sliding_window_kv_int8_rows8_rows": "an int8 cache at head dim 256",
    "decode_sm_120a_bf16_d64_full_kv_nvfp4_rows8_rows": "an NVFP4 cache",
    "decode_sm_120a_fp16_d128_sliding_window_kv_nvfp4_rows8_pages16": "an NVFP4 cache under fp16 and a window",
    "mla_sm_120a_bf16_d576_512_causal_rows16_pages64": "MLA with mma.sync",
}
