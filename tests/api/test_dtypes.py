"""Every combination of query, cache and output dtypes is launched, or refused with the name of the wrong argument."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    BF16,
    CONTEXT,
    CUDNN,
    DIM,
    FP8,
    FP16,
    FUNCTIONS,
    HEADS,
    KV_HEADS,
    MLA,
    PAGE,
    PAGES,
    TOKENS,
    U8,
    context,
    cudnn_paged,
    data,
    form,
    xqa,
)

import hopwell

F32, I8 = torch.float32, torch.int8
QUERIES, CACHES, OUTPUTS = (BF16, FP16, FP8), (BF16, FP16, FP8, I8, U8), (None, BF16, FP16, FP8, F32)


def cache_of(dtype: torch.dtype) -> dict[str, Any]:
    """Return a stacked HND cache, with scales for NVFP4."""
    width = DIM // 2 if dtype == U8 else DIM
    scales = data(PAGES, 2, KV_HEADS, PAGE, DIM // 16, dtype=FP8) if dtype == U8 else None
    return dict(kv_cache=torch.zeros(PAGES, 2, KV_HEADS, PAGE, width, dtype=dtype), kv_cache_sf=scales)


def decode_caches(query: torch.dtype) -> tuple[torch.dtype, ...]:
    return (FP8, U8) if query == FP8 else (query, FP8, I8, U8)


def decode_outputs(query: torch.dtype, cache: torch.dtype) -> tuple[torch.dtype, ...]:
    wide = (BF16, FP16) if query == FP8 else (query,)
    return (*wide, FP8) if cache in (FP8, U8) else wide


def listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return re.escape(" or ".join(f"{one} (NVFP4)" if one == U8 else str(one) for one in dtypes))


@pytest.mark.parametrize("given", ["out_dtype", "out"])
@pytest.mark.parametrize(("query", "cache", "out"), [*itertools.product(QUERIES, CACHES, OUTPUTS)], ids=str)
def test_decode(query: torch.dtype, cache: torch.dtype, out: torch.dtype | None, given: str, launched: Any) -> None:
    arguments = xqa(None, "HND") | cache_of(cache)
    arguments["query"] = arguments["query"].to(query)
    asked = out if given == "out_dtype" or out is None else torch.zeros(arguments["query"].shape, dtype=out)

    def call() -> torch.Tensor:
        return hopwell.trtllm_batch_decode_with_kv_cache(**arguments | {given: asked})

    outputs = decode_outputs(query, cache)
    if cache not in decode_caches(query):
        text = f"^kv_cache must be {listed(decode_caches(query))} for a query of {query}, got {cache}$"
    elif out is None or out in outputs:
        assert call().dtype == (out or query)
        return
    else:
        text = f"^{given} must be {listed(outputs)} for a query of {query} and a kv_cache of {cache}, got {out}$"
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("given", ["out_dtype", "out"])
@pytest.mark.parametrize(("query", "cache", "out"), [*itertools.product(QUERIES, CACHES, OUTPUTS)], ids=str)
def test_context(query: torch.dtype, cache: torch.dtype, out: torch.dtype | None, given: str, launched: Any) -> None:
    arguments = context(None, "HND", data(TOKENS, HEADS, DIM).to(query)) | cache_of(cache)
    asked = out if given == "out_dtype" or out is None else torch.zeros(arguments["query"].shape, dtype=out)

    def call() -> Any:
        return FUNCTIONS[CONTEXT](**arguments | {given: asked})

    caches = tuple(dict.fromkeys((query, FP8, U8)))
    outputs = (BF16, FP16, FP8)
    if cache not in caches:
        text = f"^kv_cache must be {listed(caches)} for a query of {query}, got {cache}$"
    elif out is None or out in outputs:
        assert call().dtype == (out or query)
        return
    else:
        text = f"^{given} must be {listed(outputs)} for a query of {query}, got {out}$"
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("given", ["o_data_type", "out"])
@pytest.mark.parametrize(("query", "out"), [*itertools.product(QUERIES, OUTPUTS)], ids=str)
def test_cudnn(query: torch.dtype, out: torch.dtype | None, given: str, launched: Any) -> None:
    arguments = {
        name: value.to(query) if name in ("q", "k_cache", "v_cache") else value for name, value in cudnn_paged().items()
    }
    shape = (*arguments["q"].shape[:2], arguments["v_cache"].shape[3])
    asked = out if given == "o_data_type" or out is None else torch.zeros(shape, dtype=out)
    outputs = (BF16, FP16, FP8)
    if out is None or out in outputs:
        assert FUNCTIONS[CUDNN](**arguments | {given: asked})[0].dtype == (out or query)
        return
    with pytest.raises(ValueError, match=f"^{given} must be {listed(outputs)} for q of {query}, got {out}$"):
        FUNCTIONS[CUDNN](**arguments | {given: asked})


@pytest.mark.parametrize(("query", "cache"), [*itertools.product(QUERIES, CACHES)], ids=str)
def test_mla(query: torch.dtype, cache: torch.dtype, launched: Any) -> None:
    arguments = form(MLA, "packed" if cache == U8 else "dense")
    arguments |= dict(query=arguments["query"].to(query), kv_cache=arguments["kv_cache"].to(cache))
    allowed = [query, *([FP8] if query != FP8 else []), *([U8] if query == BF16 else [])]
    if cache in allowed:
        assert FUNCTIONS[MLA](**arguments).dtype == (BF16 if query == FP8 else query)
        return
    names = " or ".join(f"{one} (rows of 656 bytes)" if one == U8 else str(one) for one in allowed)
    with pytest.raises(ValueError, match=f"^kv_cache must be {re.escape(names)} for a query of {query}, got {cache}$"):
        FUNCTIONS[MLA](**arguments)


def test_a_refusal_has_the_dtype_of_the_query_that_was_given() -> None:
    """The message has the caller's dtype, although the query is dequantized before the feature table is read."""
    query, cache = data(BATCH, HEADS, 320, dtype=FP8), data(PAGES, 2, KV_HEADS, PAGE, 320, dtype=FP8)
    with pytest.raises(NotImplementedError, match=r"head_dim=320 .*query\.dtype=torch\.float8_e4m3fn, KV"):
        hopwell.trtllm_batch_decode_with_kv_cache(**xqa(cache, "HND", query=query))
