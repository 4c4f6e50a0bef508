"""Rules of the FMHA v2 and cuDNN entries: the error's class, and a message that names the argument."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BF16,
    CUDNN,
    DIM,
    FMHA,
    FP8,
    HEADS,
    KV_HEADS,
    KV_LENS,
    KV_TOKENS,
    TABLE,
    TOKENS,
    cudnn_paged,
    cumulative,
    data,
    form,
    ints,
    misaligned,
    odd_stride,
    refused,
)


def test_fmha_v2_inputs() -> None:
    q, kv = form(FMHA, "contiguous")["qkv"]
    k = v = data(KV_TOKENS, KV_HEADS, DIM)
    refused(FMHA, TypeError, "^qkv must be a tuple", qkv=q)
    refused(FMHA, TypeError, "^qkv must be a tuple", qkv=None)
    refused(FMHA, ValueError, "^qkv must be a tuple", qkv=(q, k, v))
    refused(FMHA, TypeError, r"^qkv\[1\] must be a torch.Tensor", qkv=(q, None))
    refused(FMHA, TypeError, r"^qkv\[0\] must be a torch.Tensor", qkv=(None, kv))
    refused(FMHA, ValueError, r"^qkv\[0\] must be torch.bfloat16", qkv=(q.float(), kv.float()))
    refused(FMHA, ValueError, r"^qkv\[1\] must have the dtype of qkv\[0\]", qkv=(q, kv.half()))
    refused(FMHA, ValueError, r"^qkv\[1\] must be on cpu", qkv=(q, kv.to("meta")))
    refused(FMHA, ValueError, "must be a tensor without data as qkv", qkv=(q.to("meta"), kv.to("meta")))
    refused(FMHA, ValueError, r"^qkv\[1\] must be", qkv=(q, kv[:, :1]))
    refused(FMHA, ValueError, "head dimension", qkv=(q, kv[..., :32]))
    refused(FMHA, ValueError, r"^qkv\[0\] starts at address", qkv=(misaligned(q), kv))
    refused(FMHA, ValueError, r"^qkv\[1\] has stride", qkv=(q, odd_stride(*kv.shape)))
    refused(FMHA, ValueError, "KV heads of qkv", qkv=(q, data(KV_TOKENS, 2, 3, DIM)))
    refused(FMHA, ValueError, "^input_layout must be one of", input_layout="contiguous_q_kv")
    refused(FMHA, ValueError, "block_tables", block_tables=ints(*TABLE))
    refused(FMHA, ValueError, "number of tokens", "separate", qkv=(q, k, v[:-1]))
    packed = form(FMHA, "packed")["qkv"]
    refused(FMHA, ValueError, r"^qkv must be \[tokens, 3", "packed", qkv=packed[:, :2])
    refused(FMHA, TypeError, "^qkv must be a torch.Tensor", "packed", qkv=(packed,))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_fmha_v2_pages(layout: str) -> None:
    name = f"paged-{layout}"
    q, pool = form(FMHA, name)["qkv"]
    refused(FMHA, ValueError, "requires block_tables", name, block_tables=None)
    refused(FMHA, TypeError, "^block_tables must be a torch.Tensor", name, block_tables=[1])
    refused(FMHA, ValueError, "^block_tables must be torch.int32", name, block_tables=ints(*TABLE).short())
    refused(FMHA, ValueError, "^block_tables must be on cpu", name, block_tables=ints(*TABLE).to("meta"))
    refused(
        FMHA, ValueError, "^block_tables must be 2-D", name, block_tables=form(FMHA, f"pair-{layout}")["block_tables"]
    )
    none = pool[:, :, :0] if layout == "NHD" else pool[:, :, :, :0]
    refused(FMHA, ValueError, "page size of at least 1", name, qkv=(q, none))
    refused(FMHA, ValueError, r"^qkv\[1\]", name, qkv=(q, pool[:, :1]))

    name = f"pair-{layout}"
    q, (k, v) = form(FMHA, name)["qkv"]
    refused(FMHA, ValueError, "^block_tables must be 3-D", name, block_tables=ints(*TABLE))
    refused(FMHA, ValueError, "same storage", name, qkv=(q, (k, v.clone())))
    refused(FMHA, ValueError, "behind", name, qkv=(q, (v, k)))
    refused(FMHA, ValueError, "contiguous", name, qkv=(q, (k[..., :32], v[..., :32])))
    refused(FMHA, ValueError, r"^qkv\[1\]", name, qkv=(q, (k,)))


def test_fmha_v2_masks() -> None:
    refused(FMHA, ValueError, "^window_left and chunked_attention_size", window_left=4, chunked_attention_size=64)
    refused(FMHA, ValueError, "^chunked_attention_size must be a power of two, got 48", chunked_attention_size=48)
    refused(FMHA, ValueError, "^window_right must be -1 for mask_mode 'chunked'", mask_mode="chunked", window_right=0)
    chunk = {"mask_mode": "PADDING", "chunked_attention_size": 64}
    refused(FMHA, ValueError, "^chunked_attention_size must be 0 for mask_mode 'padding'", **chunk)
    refused(FMHA, ValueError, "^mask_mode must be one of", mask_mode="custom")


def test_fmha_v2_strings() -> None:
    refused(FMHA, ValueError, "^pos_encoding_mode must be one of", pos_encoding_mode="ROPE_LLAMA")
    refused(FMHA, TypeError, "^pos_encoding_mode must be one of", pos_encoding_mode=3)
    refused(FMHA, ValueError, "^out_dtype must be a torch.dtype or the name", out_dtype="bf16")
    refused(FMHA, ValueError, "^out_dtype must be a torch.dtype or the name", out_dtype="nvfp4")
    refused(FMHA, ValueError, "^out_dtype must be torch.bfloat16 or", out_dtype="float32")
    wide = (
        "must be torch.bfloat16 or torch.float16 or torch.float8_e4m3fn for qkv of torch.bfloat16, got torch.float32$"
    )
    refused(FMHA, ValueError, f"^out_dtype {wide}", out_dtype="float32")
    refused(FMHA, ValueError, f"^out {wide}", out=data(TOKENS, HEADS, DIM, dtype=torch.float32))
    refused(FMHA, TypeError, "^out_dtype must be a torch.dtype or the name", out_dtype=16)
    out = data(TOKENS, HEADS, DIM)
    refused(FMHA, ValueError, "^out_dtype must be the dtype of out", out=out, out_dtype="float16")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qkv": (data(8, 4, 264), data(58, 2, 2, 264))}, "head_dim=264"),
        ({"qkv": (data(8, 4, 272, dtype=FP8), data(58, 2, 2, 272, dtype=FP8))}, "head_dim=272"),
    ],
)
def test_fmha_v2_without_kernel(changes: dict[str, Any], text: str) -> None:
    refused(
        FMHA, NotImplementedError, f"^trtllm_fmha_v2_prefill on sm_90a supports .*; got .*{re.escape(text)}", **changes
    )


def test_cudnn_kv() -> None:
    k, v = data(KV_TOKENS, KV_HEADS, 192), data(KV_TOKENS, KV_HEADS, 128)
    refused(CUDNN, ValueError, "^k_cache must have the dtype of q", k_cache=k.half())
    refused(CUDNN, ValueError, "^v_cache must have the dtype of q", v_cache=v.half())
    refused(CUDNN, ValueError, "^v_cache must be on cpu", v_cache=v.to("meta"))
    refused(CUDNN, ValueError, "^k_cache must be 3-D", k_cache=k[None])
    refused(CUDNN, ValueError, "k_cache and v_cache", v_cache=v[:, :1])
    refused(CUDNN, ValueError, "^k_cache must have the head_dim of q", k_cache=k[..., :128])
    refused(
        CUDNN, ValueError, "KV heads of k_cache", k_cache=k[:, :1].repeat(1, 3, 1), v_cache=v[:, :1].repeat(1, 3, 1)
    )
    refused(CUDNN, ValueError, "^v_cache has stride", v_cache=odd_stride(KV_TOKENS, KV_HEADS, 128))
    refused(CUDNN, ValueError, "^k_cache starts at address", k_cache=misaligned(k))
    pages = cudnn_paged()["k_cache"]
    refused(CUDNN, ValueError, "^k_cache must be 4-D", "paged", k_cache=k[..., :128])
    refused(CUDNN, ValueError, "number of pages", "paged", k_cache=pages[:3])
    refused(CUDNN, ValueError, "page size", "paged", k_cache=pages[:, :, :8])
    none = pages[:, :, :0]
    refused(CUDNN, ValueError, "k_cache must have a page size of at least 1", "paged", k_cache=none, v_cache=none)


def test_cudnn_offsets() -> None:
    both = "batch_offsets_q and batch_offsets_o"
    refused(CUDNN, ValueError, both, batch_offsets_q=None)
    refused(CUDNN, ValueError, both, "paged", batch_offsets_o=None)
    refused(CUDNN, ValueError, both, batch_offsets_q=None, batch_offsets_o=None)
    refused(CUDNN, ValueError, "batch_offsets_k and batch_offsets_v", batch_offsets_k=None)
    refused(CUDNN, ValueError, "batch_offsets_k and batch_offsets_v", batch_offsets_k=None, batch_offsets_v=None)
    offsets = cumulative(KV_LENS)
    refused(CUDNN, ValueError, "^batch_offsets_k and .* together", "paged", batch_offsets_k=offsets)
    refused(
        CUDNN,
        ValueError,
        "^batch_offsets_k must be None with block_tables",
        "paged",
        batch_offsets_k=offsets,
        batch_offsets_v=offsets,
    )
    refused(CUDNN, ValueError, "batch_offsets_stats must have", batch_offsets_stats=offsets[:2])
    one = {
        "actual_seq_lens_q": ints(8),
        "actual_seq_lens_kv": ints(58),
        "batch_offsets_k": None,
        "batch_offsets_v": None,
    }
    refused(CUDNN, ValueError, "together", **one, batch_offsets_q=ints(0, 1), batch_offsets_o=None)


def test_cudnn_lengths_must_agree() -> None:
    refused(CUDNN, ValueError, "actual_seq_lens_kv must have 3 elements", actual_seq_lens_kv=ints(1, 2))
    refused(CUDNN, ValueError, "actual_seq_lens_kv must have 2 elements", actual_seq_lens_q=ints(1, 2))


@pytest.mark.parametrize("return_lse", [True, False])
def test_cudnn_lse(return_lse: bool) -> None:
    def bad(error: type[Exception], text: str, lse: Any) -> None:
        refused(CUDNN, error, text, lse=lse, return_lse=return_lse)

    bad(TypeError, "^lse must be a torch.Tensor", 3)
    bad(ValueError, r"^lse must have shape \[batch=3, max_token_per_sequence=5, num_heads=4\]", torch.zeros(3, 4, 4))
    bad(ValueError, "^lse must have shape", torch.zeros(TOKENS, HEADS))
    bad(ValueError, "^lse must be torch.float32", torch.zeros(3, 5, 4, dtype=BF16))
    bad(ValueError, "^lse must be on cpu", torch.zeros(3, 5, 4, device="meta"))
    bad(ValueError, "^lse must be contiguous", torch.zeros(3, 4, 5).transpose(1, 2))


def test_cudnn_other_rules() -> None:
    refused(CUDNN, TypeError, "^backend must be a str", backend=3)
    q, k, v = (data(n, h, 272, dtype=FP8) for n, h in ((TOKENS, HEADS), (KV_TOKENS, KV_HEADS), (KV_TOKENS, KV_HEADS)))
    refused(CUDNN, NotImplementedError, "head_dim=272", q=q, k_cache=k, v_cache=v)
    k, v = data(KV_TOKENS, KV_HEADS, 264), data(KV_TOKENS, KV_HEADS, 264)
    refused(CUDNN, NotImplementedError, "head_dim=264", q=data(TOKENS, HEADS, 264), k_cache=k, v_cache=v)
