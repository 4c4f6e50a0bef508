"""Rules for outputs, and refusals of what has no kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from api_calls import (
    BATCH,
    CONTEXT,
    CUDNN,
    DIM,
    FMHA,
    FORMS,
    FP8,
    FP16,
    HEADS,
    KV_HEADS,
    KV_TOKENS,
    PAGES,
    TOKENS,
    U8,
    Form,
    data,
    misaligned,
    odd_stride,
    refused,
    stacked,
)

import hopwell

FP4_ARGUMENTS = {"query": data(TOKENS, HEADS, DIM, dtype=FP8), "kv_cache": stacked("HND", FP8)}


@pytest.mark.parametrize(("entry", "dim"), [(CONTEXT, DIM), (FMHA, DIM), (CUDNN, 128)])
def test_out(entry: str, dim: int) -> None:
    out = data(TOKENS, HEADS, dim)
    refused(entry, TypeError, "^out must be a torch.Tensor", out=3)
    refused(entry, ValueError, "^out must be ", out=out.float())
    refused(entry, ValueError, "^out must be on cpu", out=out.to("meta"))
    for wrong in (out[:-1], out[:, :-1], out[..., :32], out[None], out.flatten(1)):
        refused(entry, ValueError, r"^out must have shape \[tokens=8, heads=4, head_dim=", out=wrong)
    refused(entry, ValueError, "^out has stride 2 in its last", out=out.repeat_interleave(2, -1)[..., ::2])
    refused(entry, ValueError, "^out starts at address", out=misaligned(out))
    refused(entry, ValueError, "^out has stride", out=odd_stride(TOKENS, HEADS, dim))
    refused(entry, ValueError, "^out must not overlap itself", out=data(1, HEADS, dim).expand(TOKENS, HEADS, dim))
    refused(entry, ValueError, "^out must not overlap itself", out=data(TOKENS, 1, dim).expand(TOKENS, HEADS, dim))
    half = data(TOKENS * HEADS * dim).as_strided((TOKENS, HEADS, dim), (HEADS * dim, dim // 2, 1))
    refused(entry, ValueError, "^out must not overlap itself", out=half)


def test_out_must_not_share_memory_with_inputs() -> None:
    query = data(TOKENS, HEADS, DIM)
    refused(CONTEXT, ValueError, "^out must not share memory with query", query=query, out=query)
    buffer = data(2 * TOKENS, HEADS, DIM)
    shifted = {"query": buffer[:TOKENS], "out": buffer[TOKENS - 1 : -1]}
    refused(CONTEXT, ValueError, "^out must not share memory with query", **shifted)
    buffer = data(TOKENS, HEADS, 2 * DIM)
    columns = {"query": buffer[..., :DIM], "out": buffer[..., DIM - 8 : -8]}
    refused(CONTEXT, ValueError, "^out must not share memory with query", **columns)
    cache = stacked("HND")
    rows = cache.view(-1, HEADS, DIM)[:TOKENS]
    refused(CONTEXT, ValueError, "^out must not share memory with kv_cache", kv_cache=cache, out=rows)
    kv = data(KV_TOKENS, 2, KV_HEADS, DIM)
    inside = kv.view(-1, HEADS, DIM)[-TOKENS:]
    refused(FMHA, ValueError, "^out must not share memory with qkv", qkv=(query, kv), out=inside)
    packed = data(TOKENS, 3, HEADS, DIM)
    refused(FMHA, ValueError, "^out must not share memory with qkv", "packed", qkv=packed, out=packed[:, 2])
    lse = torch.zeros(BATCH, 5, HEADS)
    table = {"lse": lse, "actual_seq_lens_q": lse.view(torch.int32).view(-1)[:BATCH]}
    refused(CUDNN, ValueError, "^lse must not share memory with actual_seq_lens_q", **table)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"out_dtype": "bfloat16"}, ValueError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        ({"out_dtype": 3}, TypeError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        ({"out_dtype": torch.tensor(3)}, TypeError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        ({"out_dtype": FP8}, ValueError, "^out_dtype must be torch.bfloat16 or torch.float16"),
        ({"out_dtype": torch.float32}, ValueError, "^out_dtype must be"),
        ({"out": data(TOKENS, HEADS, DIM), "out_dtype": FP16}, ValueError, "^out must be torch.float16"),
        ({"o_sf_scale": 1.0}, ValueError, "^o_sf_scale must be None unless"),
        ({"o_sf_vec_size": 16}, ValueError, "^o_sf_vec_size must be None unless"),
        ({"out_dtype": "nvfp4", "o_sf_scale": 1.0}, ValueError, "^query must be torch.float8_e4m3fn"),
        ({"query": FP4_ARGUMENTS["query"]}, ValueError, "kv_cache"),
    ],
)
def test_context_out_dtype(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refused(CONTEXT, error, text, **changes)


def fp4(rows: int = 128, columns: int = HEADS * DIM // 16, start: int = 0, tokens: int = TOKENS) -> hopwell.FP4Tensor:
    scale = torch.zeros(rows, columns, dtype=FP8)
    return hopwell.FP4Tensor(data(tokens, HEADS, DIM // 2, dtype=U8), scale, start)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({}, NotImplementedError, "NVFP4 output .out_dtype='nvfp4'"),
        ({"out": fp4()}, NotImplementedError, "NVFP4 output"),
        ({"out": fp4(256, start=200), "out_dtype": None}, NotImplementedError, "NVFP4 output"),
        ({"o_sf_vec_size": 16}, NotImplementedError, "NVFP4 output"),
        ({"o_sf_vec_size": 32}, ValueError, "^o_sf_vec_size must be"),
        ({"o_sf_vec_size": 16.0}, TypeError, "^o_sf_vec_size must be"),
        ({"o_sf_scale": None}, ValueError, "^o_sf_scale must be a float"),
        ({"o_sf_scale": 0.0}, ValueError, "^o_sf_scale must be positive"),
        ({"o_sf_scale": "1"}, TypeError, "^o_sf_scale must be a float"),
        ({"o_sf_scale": torch.tensor(1.0)}, TypeError, "^o_sf_scale must be a float"),
        ({"out": data(TOKENS, HEADS, DIM // 2, dtype=U8)}, ValueError, "^out must be an FP4Tensor"),
        ({"out": 3}, TypeError, "^out must be an FP4Tensor"),
        ({"out": fp4(tokens=7)}, ValueError, r"^out\.data must have shape"),
        ({"out": fp4(columns=20)}, ValueError, r"^out\.scale must have shape"),
        ({"out": fp4(), "out_dtype": torch.bfloat16, "o_sf_scale": None}, ValueError, "^out must be a torch.Tensor"),
    ],
)
def test_context_nvfp4_output(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refused(CONTEXT, error, text, **{**FP4_ARGUMENTS, "out_dtype": "nvfp4", "o_sf_scale": 1.0, **changes})


def test_context_nvfp4_output_changed_after_construction() -> None:
    arguments = {**FP4_ARGUMENTS, "out_dtype": "nvfp4", "o_sf_scale": 1.0}
    for attribute, value, error in (
        ("scale_start_index", 125, ValueError),
        ("scale_start_index", -1, ValueError),
        ("scale_start_index", None, TypeError),
        ("scale", None, TypeError),
        ("scale", torch.zeros(100, 16, dtype=FP8), ValueError),
        ("scale", torch.zeros(16, 128, dtype=FP8).t(), ValueError),
        ("data", None, TypeError),
        ("data", data(TOKENS, HEADS, DIM // 2), ValueError),
    ):
        out = fp4()
        setattr(out, attribute, value)
        refused(CONTEXT, error, rf"^out\.{attribute} ", **arguments, out=out)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": data(8, 4, 264), "kv_cache": data(PAGES, 2, 2, 16, 264)}, "head_dim=264"),
        ({"kv_cache": data(PAGES, 2, 2, 2048, DIM)}, "page_size=2048"),
        ({"query": data(8, 4, 112), "kv_cache": data(PAGES, 2, 2, 16, 112, dtype=FP8)}, "head_dim=112"),
    ],
)
def test_context_without_kernel(changes: dict[str, Any], text: str) -> None:
    pattern = f"^trtllm_batch_context_with_kv_cache: .*{re.escape(text)}.* sm_90a.*supported on"
    refused(CONTEXT, NotImplementedError, pattern, **changes)


@pytest.mark.parametrize("case", [form for form in FORMS if not form.runs], ids=str)
def test_arguments_are_checked_before_a_missing_kernel_is_named(case: Form) -> None:
    arguments = case.build()
    name = "max_seq_len" if "max_seq_len" in arguments else "max_kv_len"
    with pytest.raises(TypeError, match=f"^{name} must be an int"):
        case.function(**{**arguments, name: None})
    with pytest.raises(NotImplementedError, match=case.function.__name__):
        case.function(**arguments)
