"""The public signatures equal FlashInfer's, transcribed here as plain data from its documentation.

Parameters of newer versions follow as keywords.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

import hopwell

NONE = inspect.Parameter.empty
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY

CONTEXT = [
    ("query", NONE),
    ("kv_cache", NONE),
    ("workspace_buffer", NONE),
    ("block_tables", NONE),
    ("seq_lens", NONE),
    ("max_q_len", NONE),
    ("max_kv_len", NONE),
    ("bmm1_scale", NONE),
    ("bmm2_scale", NONE),
    ("batch_size", NONE),
    ("cum_seq_lens_q", NONE),
    ("cum_seq_lens_kv", NONE),
    ("window_left", -1),
    ("out", None),
    ("out_dtype", None),
    ("o_sf_scale", None),
    ("o_sf_vec_size", None),
    ("kv_layout", "HND"),
    ("enable_pdl", None),
    ("sinks", None),
    ("kv_block_scales", None),
    ("skip_softmax_threshold_scale_factor", None),
    ("uses_shared_paged_kv_idx", True),
    ("kv_cache_sf", None),
    ("v_scale_layout", "interleaved"),
    ("causal", True),
    ("window_right", -1),
    ("lse", None),
    ("return_lse", False),
    ("lse_base", "log2"),
    ("multi_ctas_kv_counter_buffer", None),
    ("backend", None),
    ("use_fp16_softmax", None),
    ("uses_spcompress", None),
]
XQA = [
    ("query", NONE),
    ("kv_cache", NONE),
    ("workspace_buffer", NONE),
    ("block_tables", NONE),
    ("seq_lens", NONE),
    ("max_seq_len", NONE),
    ("bmm1_scale", 1.0),
    ("bmm2_scale", 1.0),
    ("window_left", -1),
    ("out", None),
    ("sinks", None),
    ("kv_layout", "NHD"),
    ("enable_pdl", None),
    ("q_len_per_req", 1),
    ("o_scale", 1.0),
    ("mask", None),
    ("kv_cache_sf", None),
    ("q_cu_seq_lens", None),
    ("lse", None),
    ("return_lse", False),
    ("return_lse_base", None),
]
TRTLLM_DECODE = [
    *XQA[:10],
    ("out_dtype", None),
    ("o_sf_scale", None),
    ("o_sf_vec_size", None),
    ("sinks", None),
    ("kv_layout", "HND"),
    ("enable_pdl", None),
    ("backend", "auto"),
    ("q_len_per_req", 1),
    ("o_scale", 1.0),
    ("mask", None),
    ("max_q_len", None),
    ("cum_seq_lens_q", None),
    ("skip_softmax_threshold_scale_factor", None),
    ("kv_cache_sf", None),
    ("uses_shared_paged_kv_idx", True),
    ("lse", None),
    ("return_lse", False),
    ("bmm1_scale_log2", None),
    ("multi_ctas_kv_counter_buffer", None),
    ("enable_block_sparse_attention", False),
    ("cp_world", 1),
    ("cp_rank", 0),
    ("causal_seqlens_kv_global", None),
    ("bf16q_fp8kv_transform_mode", None),
    ("request_order", None),
    ("request_order_plan", None),
    ("return_lse_base", None),
]
FMHA_V2 = [
    ("qkv", NONE),
    ("input_layout", NONE),
    ("workspace_buffer", NONE),
    ("seq_lens", NONE),
    ("max_q_len", NONE),
    ("max_kv_len", NONE),
    ("bmm1_scale", NONE),
    ("bmm2_scale", NONE),
    ("batch_size", NONE),
    ("cum_seq_lens_q", NONE),
    ("cum_seq_lens_kv", NONE),
    ("block_tables", None),
    ("out", None),
    ("out_dtype", None),
    ("sinks", None),
    ("pos_encoding_mode", None),
    ("logits_soft_cap_scale", None),
    ("mask_mode", "causal"),
    ("window_left", -1),
    ("chunked_attention_size", 0),
    ("save_softmax_stats", False),
    ("skip_softmax_threshold_scale_factor", 0),
    ("window_right", -1),
]
CUDNN = [
    ("q", NONE),
    ("k_cache", NONE),
    ("v_cache", NONE),
    ("scale", NONE),
    ("workspace_buffer", NONE),
    ("max_token_per_sequence", NONE),
    ("max_sequence_kv", NONE),
    ("actual_seq_lens_q", NONE),
    ("actual_seq_lens_kv", NONE),
    ("block_tables", None),
    ("causal", NONE),
    ("return_lse", NONE),
    ("batch_offsets_q", None),
    ("batch_offsets_o", None),
    ("batch_offsets_k", None),
    ("batch_offsets_v", None),
    ("batch_offsets_stats", None),
    ("out", None),
    ("lse", None),
    ("is_cuda_graph_compatible", False),
    ("backend", None),
    ("q_scale", None),
    ("k_scale", None),
    ("v_scale", None),
    ("batch_offsets_units", "elements"),
    ("o_data_type", None),
    ("lse_base", "ln"),
    ("lse_layout", "NH"),
]
MLA = [
    ("query", NONE),
    ("kv_cache", NONE),
    ("workspace_buffer", NONE),
    ("qk_nope_head_dim", NONE),
    ("kv_lora_rank", NONE),
    ("qk_rope_head_dim", NONE),
    ("block_tables", NONE),
    ("seq_lens", NONE),
    ("max_seq_len", NONE),
    ("sparse_mla_top_k", 0),
    ("out", None),
    ("bmm1_scale", 1.0),
    ("bmm2_scale", 1.0),
    ("sinks", None),
    ("enable_pdl", None),
    ("backend", "auto"),
    ("skip_softmax_threshold_scale_factor", None),
    ("is_var_seq", True),
    ("uses_shared_paged_kv_idx", True),
    ("lse", None),
    ("return_lse", False),
    ("cute_dsl_impl", "auto"),
    ("kv_scale_format", "auto"),
    ("cum_seq_lens_q", None),
    ("max_q_len", None),
    ("multi_ctas_kv_counter_buffer", None),
    ("sparse_mla_top_k_lens", None),
    ("enable_dcp", False),
    ("cp_world", 1),
    ("cp_rank", 0),
    ("causal_seqlens_kv_global", None),
    ("use_fp16_softmax", None),
    ("return_lse_base", None),
]
APPEND = [
    ("append_key", NONE),
    ("append_value", NONE),
    ("batch_indices", NONE),
    ("positions", NONE),
    ("paged_kv_cache", NONE),
    ("kv_indices", None),
    ("kv_indptr", None),
    ("kv_last_page_len", None),
    ("kv_layout", "NHD"),
    ("k_scale", 1.0),
    ("v_scale", 1.0),
    ("kv_cache_sf", None),
    ("v_scale_layout", "linear"),
    ("block_tables", None),
    ("uses_shared_paged_kv_idx", True),
    ("enable_pdl", None),
]
NVFP4_APPEND = [
    *APPEND[:5],
    ("kv_cache_sf", NONE),
    *((name, NONE) for name in ("kv_indices", "kv_indptr", "kv_last_page_len", "k_scale", "v_scale")),
    ("kv_layout", "NHD"),
    ("v_scale_layout", "linear"),
    ("enable_pdl", None),
]
APPEND_SLOTS = [*APPEND[:2], ("slot_mapping", NONE), *(APPEND[i] for i in (4, 8, 9, 10, 11, 12, 15))]
NVFP4_APPEND_SLOTS = [
    *APPEND_SLOTS[:4],
    ("kv_cache_sf", NONE),
    ("k_scale", NONE),
    ("v_scale", NONE),
    *NVFP4_APPEND[-3:],
]

# module, name, parameters, number of positional ones
EXPECTED = [
    ("hopwell.page", "append_paged_kv_cache", APPEND, 9),
    (
        "hopwell.page",
        "get_batch_indices_positions",
        [("append_indptr", NONE), ("seq_lens", NONE), ("nnz", NONE)],
        3,
    ),
    (
        "hopwell.page",
        "get_seq_lens",
        [("kv_indptr", NONE), ("kv_last_page_len", NONE), ("page_size", NONE)],
        3,
    ),
    ("hopwell.page", "nvfp4_quantize_append_paged_kv_cache", NVFP4_APPEND, 12),
    ("hopwell.page", "append_paged_kv_cache_with_slot_mapping", APPEND_SLOTS, 5),
    ("hopwell.page", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", NVFP4_APPEND_SLOTS, 8),
    ("hopwell.prefill", "trtllm_batch_context_with_kv_cache", CONTEXT, 23),
    ("hopwell.decode", "xqa_batch_decode_with_kv_cache", XQA, 17),
    ("hopwell.decode", "trtllm_batch_decode_with_kv_cache", TRTLLM_DECODE, 30),
    ("hopwell.prefill", "trtllm_fmha_v2_prefill", FMHA_V2, 22),
    ("hopwell.cudnn", "cudnn_batch_prefill_with_kv_cache", CUDNN, 5),
    ("hopwell.mla", "trtllm_batch_decode_with_kv_cache_mla", MLA, 16),
]


@pytest.mark.parametrize(("module", "name", "parameters", "positional"), EXPECTED, ids=[row[1] for row in EXPECTED])
def test_signature(module: str, name: str, parameters: list[tuple[str, object]], positional: int) -> None:
    function = getattr(importlib.import_module(module), name)
    got = [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]
    want = [
        (parameter, default, POSITIONAL if index < positional else KEYWORD)
        for index, (parameter, default) in enumerate(parameters)
    ]
    assert got == want
    assert [type(default) for _, default, _ in got] == [type(default) for _, default, _ in want]


@pytest.mark.parametrize(("module", "name"), [row[:2] for row in EXPECTED])
def test_exported_at_top_level(module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    assert getattr(hopwell, name) is function
    assert name in hopwell.__all__
    assert function.__module__ == module


def test_names_in_several_modules() -> None:
    assert hopwell.prefill.cudnn_batch_prefill_with_kv_cache is hopwell.cudnn_batch_prefill_with_kv_cache


def test_top_level_names() -> None:
    assert hopwell.FP4Tensor is importlib.import_module("hopwell.utils").FP4Tensor
    assert isinstance(hopwell.__version__, str)
    assert all(hasattr(hopwell, name) for name in hopwell.__all__)


def test_latent_attention_is_found_beside_decode() -> None:
    """FlashInfer had it there at first, and engines still import it from there."""
    decode, mla = (importlib.import_module(f"hopwell.{name}") for name in ("decode", "mla"))
    assert decode.trtllm_batch_decode_with_kv_cache_mla is mla.trtllm_batch_decode_with_kv_cache_mla


@pytest.mark.parametrize(("module", "name", "parameters"), [row[:3] for row in EXPECTED])
def test_every_parameter_is_documented(module: str, name: str, parameters: list[tuple[str, object]]) -> None:
    text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    for parameter, _ in parameters:
        assert f"\n    {parameter}: " in text, parameter
    assert "Raises:" in text
    assert "Returns:" in text
