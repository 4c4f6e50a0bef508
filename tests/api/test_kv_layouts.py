"""A cache in the wrong layout is refused, and the message names the layout that fits its shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BF16,
    CONTEXT,
    CUDNN,
    FMHA,
    FP8,
    U8,
    XQA,
    data,
    form,
    ints,
    nvfp4_scales,
    refused,
    xqa,
)

import hopwell

PAGES, KV_HEADS, PAGE, DIM = 11, 2, 16, 64
LAYOUTS = [("HND", "NHD"), ("NHD", "HND")]
HEADS_TEXT = "^the query heads must be a positive multiple of the KV heads of {}, got 4 query heads and 16 KV heads"


def pages(layout: str, *lead: int, dtype: torch.dtype = BF16, width: int = DIM) -> torch.Tensor:
    inner = (KV_HEADS, PAGE) if layout == "HND" else (PAGE, KV_HEADS)
    return data(PAGES, *lead, *inner, width, dtype=dtype)


@pytest.mark.parametrize(("read", "actual"), LAYOUTS)
@pytest.mark.parametrize("form", ["stacked", "pair", "fp8", "nvfp4"])
def test_kv_layout(form: str, read: str, actual: str) -> None:
    dtype, width = {"fp8": (FP8, DIM), "nvfp4": (U8, DIM // 2)}.get(form, (BF16, DIM))
    cache: Any = pages(actual, 2, dtype=dtype, width=width)
    if form == "pair":
        cache = (cache[:, 0], cache[:, 1])
    text = HEADS_TEXT.format("kv_cache") + f"; the shape fits kv_layout='{actual}'$"
    refused(CONTEXT, ValueError, text, kv_cache=cache, kv_layout=read)
    refused(XQA, ValueError, text, kv_cache=cache, kv_layout=read)
    with pytest.raises(ValueError, match=text):
        hopwell.trtllm_batch_decode_with_kv_cache(**xqa(cache, read))


@pytest.mark.parametrize(("read", "actual"), LAYOUTS)
def test_input_layout(read: str, actual: str) -> None:
    arguments = form(FMHA, f"paged-{read}")
    text = HEADS_TEXT.format("qkv") + f"; the shape fits input_layout='Q_PAGED_KV_{actual}'$"
    refused(FMHA, ValueError, text, f"paged-{read}", qkv=(arguments["qkv"][0], pages(actual, 2)))
    pool = data(2, *pages(actual).shape)
    refused(FMHA, ValueError, text, f"pair-{read}", qkv=(arguments["qkv"][0], (pool[0], pool[1])))


def test_cudnn_pages() -> None:
    arguments = form(CUDNN, "paged")
    nhd = {name: arguments[name].transpose(1, 2).contiguous() for name in ("k_cache", "v_cache")}
    text = HEADS_TEXT.format("k_cache") + "; the shape fits NHD, which k_cache.transpose"
    refused(CUDNN, ValueError, text, "paged", **nhd)


def test_nvfp4_page_sizes() -> None:
    """A page of two tokens is refused; with four KV heads the shape fits the other layout."""
    cache = data(PAGES, 2, 4, 2, DIM // 2, dtype=U8)
    text = "page size that is a multiple of 4, got 2"
    refused(CONTEXT, ValueError, f"{text}; the shape fits kv_layout='NHD'$", kv_cache=cache, kv_layout="HND")
    refused(CONTEXT, ValueError, f"{text}$", kv_cache=cache[:, :, :2], kv_layout="HND")


@pytest.mark.parametrize(("layout", "scales_layout"), LAYOUTS)
def test_block_scales(layout: str, scales_layout: str) -> None:
    scales = nvfp4_scales(scales_layout)
    text = r"^kv_block_scales \(key\) must be .*, which is the other kv_layout$"
    refused(CONTEXT, ValueError, text, f"nvfp4-{layout}", kv_block_scales=scales)


def test_a_shape_that_fits_neither_layout_has_no_hint() -> None:
    text = HEADS_TEXT.replace("16", "3").format("kv_cache") + "$"
    refused(CONTEXT, ValueError, text, kv_cache=data(PAGES, 2, 3, 5, DIM), kv_layout="HND")
    refused(CONTEXT, ValueError, text, kv_cache=data(PAGES, 2, 3, 0, DIM), kv_layout="HND")


def test_lengths_beyond_the_table_tell_how_pages_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 query heads the shape fits both layouts, and lengths in device memory tell them apart."""
    monkeypatch.setenv("HOPWELL_CHECK", "1")
    text = r"seq_lens\[0\] must be at most 8, .*pages are read as 2 tokens of 16 heads\), got 20$"
    with pytest.raises(ValueError, match=text):
        hopwell.xqa_batch_decode_with_kv_cache(
            **xqa(pages("NHD", 2), "HND") | dict(query=data(3, 16, DIM), seq_lens=ints(20, 1, 37))
        )
