"""Rules shared by arguments of one kind in all entries: the error's class, and a message that names the argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.calls.valid_calls import (
    CONTEXT,
    CUDNN,
    DEFAULT,
    FMHA,
    HEADS,
    KV_HEADS,
    MLA,
    XQA,
    form,
    refused,
)

TENSORS = {
    CONTEXT: ("query", "workspace_buffer", "block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"),
    FMHA: ("workspace_buffer", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"),
    CUDNN: ("q", "k_cache", "v_cache", "workspace_buffer", "actual_seq_lens_q", "actual_seq_lens_kv"),
    XQA: ("query", "workspace_buffer", "block_tables", "seq_lens"),
    MLA: ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens"),
}
INDICES = {
    CONTEXT: ("block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"),
    FMHA: ("seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"),
    CUDNN: ("actual_seq_lens_q", "actual_seq_lens_kv", "batch_offsets_q", "batch_offsets_o", "batch_offsets_k"),
    XQA: ("block_tables", "seq_lens"),
    MLA: ("block_tables", "seq_lens"),
}
INTEGERS = {
    CONTEXT: ("max_q_len", "max_kv_len", "batch_size", "window_left"),
    FMHA: ("max_q_len", "max_kv_len", "batch_size", "window_left", "chunked_attention_size"),
    CUDNN: ("max_token_per_sequence", "max_sequence_kv"),
    XQA: ("max_seq_len", "window_left", "q_len_per_req"),
    MLA: ("qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim", "max_seq_len", "sparse_mla_top_k"),
}
FLOATS = {
    CONTEXT: ("bmm1_scale", "bmm2_scale", "skip_softmax_threshold_scale_factor"),
    FMHA: ("bmm1_scale", "bmm2_scale", "logits_soft_cap_scale", "skip_softmax_threshold_scale_factor"),
    CUDNN: ("scale",),
    XQA: ("bmm1_scale", "bmm2_scale", "o_scale"),
    MLA: ("bmm1_scale", "bmm2_scale"),
}
FLAGS = {
    CONTEXT: ("enable_pdl", "uses_shared_paged_kv_idx"),
    FMHA: ("save_softmax_stats",),
    CUDNN: ("causal", "return_lse", "is_cuda_graph_compatible"),
    XQA: ("enable_pdl",),
    MLA: ("enable_pdl",),
}
INPUTS = ("q", "k_cache", "v_cache")
STRINGS = {
    CONTEXT: ("kv_layout",),
    FMHA: ("input_layout", "mask_mode"),
    XQA: ("kv_layout",),
    MLA: ("backend",),
}
NOT_NEGATIVE = {
    CONTEXT: ("max_q_len", "max_kv_len", "batch_size", "bmm1_scale", "skip_softmax_threshold_scale_factor"),
    FMHA: ("max_q_len", "max_kv_len", "batch_size", "chunked_attention_size", "bmm1_scale", "logits_soft_cap_scale"),
    CUDNN: ("max_token_per_sequence", "max_sequence_kv", "scale"),
    XQA: ("max_seq_len", "bmm1_scale", "q_len_per_req"),
    MLA: ("max_seq_len", "sparse_mla_top_k", "bmm1_scale", "qk_nope_head_dim"),
}


def each(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(entry, name) for entry, names in table.items() for name in names]


@pytest.mark.parametrize(("entry", "name"), each(TENSORS))
def test_tensor_types(entry: str, name: str) -> None:
    for value in (None, 3, [1, 2], np.zeros(3)):
        refused(entry, TypeError, f"^{name} must be a torch.Tensor", **{name: value})
    if name != "workspace_buffer" or entry in (XQA, MLA):  # elsewhere the argument has no effect
        refused(entry, ValueError, f"^{name} must be a strided tensor", **{name: torch.zeros(3, 3, 3).to_sparse()})


@pytest.mark.parametrize(("entry", "name"), each(INDICES))
def test_index_tensors(entry: str, name: str) -> None:
    tensor = form(entry, DEFAULT[entry])[name]
    for dtype in (torch.uint64, torch.int16, torch.float32, torch.bool):
        refused(
            entry, ValueError, f"^{name} must be torch.int32 or torch.uint32 or torch.int64", **{name: tensor.to(dtype)}
        )
    refused(entry, ValueError, f"^{name} must be on cpu", **{name: tensor.to("meta")})
    if name != "cum_seq_lens_kv" or entry == FMHA:
        refused(entry, ValueError, f"{name}|actual_seq_lens_kv", **{name: torch.cat((tensor, tensor))})
    if name == "block_tables":
        refused(entry, ValueError, name, **{name: tensor.repeat_interleave(2, 1)[:, ::2]})
        refused(entry, ValueError, name, **{name: tensor[0]})
        refused(entry, ValueError, name, **{name: tensor[None, None]})
    elif name != "cum_seq_lens_kv" or entry == FMHA:
        refused(entry, ValueError, f"^{name} must be contiguous", **{name: tensor.repeat_interleave(2)[::2]})


@pytest.mark.parametrize(("entry", "name"), each(INTEGERS))
def test_integers(entry: str, name: str) -> None:
    for value in (True, 1.0, "1", [1], torch.tensor(1)):
        refused(entry, TypeError, f"^{name} must be an int", **{name: value})
    for value in (2**31, -(2**31), -2):
        refused(entry, ValueError, rf"^{name} must be in .*{value}", **{name: value})


@pytest.mark.parametrize(("entry", "name"), each(NOT_NEGATIVE))
def test_not_negative(entry: str, name: str) -> None:
    refused(entry, ValueError, f"^{name} must be .*-1", **{name: -1})


@pytest.mark.parametrize(("entry", "name"), each(FLOATS))
def test_floats(entry: str, name: str) -> None:
    for value in (True, "1", [1.0], 1j):
        refused(entry, TypeError, f"^{name} must be a float", **{name: value})
    for value in (math.nan, math.inf, -math.inf, 1e39, 10**400):
        refused(entry, ValueError, f"^{name} must be finite", **{name: value})


@pytest.mark.parametrize(("entry", "name"), each(FLAGS))
def test_flags(entry: str, name: str) -> None:
    for value in (1, "True", np.True_, torch.tensor(True)):
        refused(entry, TypeError, f"^{name} must be True(,| or) False", **{name: value})


@pytest.mark.parametrize(("entry", "name"), each(STRINGS))
def test_strings(entry: str, name: str) -> None:
    refused(entry, ValueError, f"^{name} must be one of", **{name: "other"})
    for value in (None, 3, b"HND"):
        refused(entry, TypeError, f"^{name} must be one of", **{name: value})


@pytest.mark.parametrize("entry", [CONTEXT, XQA, MLA])
@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
def test_tensor_scales(entry: str, name: str) -> None:
    refused(entry, TypeError, f"^{name} as a tensor must be torch.float32", **{name: torch.tensor(1.0).half()})
    refused(entry, ValueError, f"^{name} as a tensor must have one element", **{name: torch.ones(2)})
    refused(entry, ValueError, f"^{name} must be on cpu", **{name: torch.ones(1, device="meta")})


@pytest.mark.parametrize("cache", ["fp8-HND", "nvfp4-NHD"])
@pytest.mark.parametrize("name", ["bmm1_scale", "bmm2_scale"])
def test_scales_of_each_head(name: str, cache: str) -> None:
    """A tensor has one element, or one for each KV head of a cache of 8 or 4 bits."""
    text = rf"^{name} as a tensor must have one element, or the shape \(num_kv_heads,\) = \({KV_HEADS},\), got"
    for scale in (torch.ones(KV_HEADS + 1), torch.ones(1, KV_HEADS), torch.ones(HEADS), torch.ones(0)):
        refused(CONTEXT, ValueError, text, cache, **{name: scale})
    refused(CONTEXT, ValueError, f"^{name} must be contiguous", cache, **{name: torch.ones(2 * KV_HEADS)[::2]})
    refused(CONTEXT, ValueError, f"^{name} must be on cpu", cache, **{name: torch.ones(KV_HEADS, device="meta")})
    refused(CONTEXT, TypeError, "must be torch.float32", cache, **{name: torch.ones(KV_HEADS).half()})
    refused(CONTEXT, ValueError, f"^{name} as a tensor must have one element, got", **{name: torch.ones(KV_HEADS)})


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_scales_of_each_head_of_8_bit_inputs(name: str) -> None:
    inputs = {part: value.to(torch.float8_e4m3fn) for part, value in form(CUDNN, "paged").items() if part in INPUTS}
    for scale in (torch.ones(KV_HEADS + 1), torch.ones(1, 1, 1, KV_HEADS)):
        refused(CUDNN, ValueError, rf"^{name} .* or the shape \(num_kv_heads,\)", "paged", **inputs, **{name: scale})
    refused(CUDNN, ValueError, f"^{name} must be None for q of", "paged", **{name: torch.ones(KV_HEADS)})


@pytest.mark.parametrize(("entry", "name"), [(FMHA, "bmm1_scale"), (FMHA, "bmm2_scale"), (CUDNN, "scale")])
def test_float_scales_take_no_tensor(entry: str, name: str) -> None:
    refused(entry, TypeError, f"^{name} must be a float", **{name: torch.tensor(1.0)})


@pytest.mark.parametrize("entry", [CONTEXT, FMHA, XQA, MLA])
def test_sinks(entry: str) -> None:
    sinks = torch.zeros(HEADS)
    refused(entry, TypeError, "^sinks must be a torch.Tensor", sinks=1.0)
    refused(entry, TypeError, "^sinks must be a torch.Tensor", sinks=[None])
    refused(entry, ValueError, "^sinks as a list must hold exactly one", sinks=[sinks, sinks])
    refused(entry, ValueError, "^sinks as a tuple must hold exactly one", sinks=())
    refused(entry, ValueError, "^sinks must be torch.float32", sinks=sinks.to(torch.float16))
    refused(entry, ValueError, r"^sinks must have shape \[num_heads=4\]", sinks=torch.zeros(HEADS + 1))
    refused(entry, ValueError, "^sinks must have shape", sinks=sinks[None])
    refused(entry, ValueError, "^sinks must have stride 1", sinks=torch.zeros(2 * HEADS)[::2])
    refused(entry, ValueError, "^sinks must be on cpu", sinks=sinks.to("meta"))
