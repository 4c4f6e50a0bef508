"""Rules for queries, KV caches, tables, masks and modes: the error's class, and a message that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    CONTEXT,
    CUDNN,
    DEFAULT,
    DIM,
    FMHA,
    FP8,
    FP16,
    FUNCTIONS,
    HEADS,
    KV_HEADS,
    MLA,
    PAGE,
    PAGES,
    TABLE,
    TOKENS,
    U8,
    XQA,
    data,
    form,
    ints,
    misaligned,
    odd_stride,
    page_shape,
    refused,
    stacked,
)

import hopwell
from hopwell._checks import arguments as checks

QUERIES = {CONTEXT: "query", CUDNN: "q", XQA: "query", MLA: "query"}


@pytest.mark.parametrize(("entry", "name"), QUERIES.items())
def test_query(entry: str, name: str) -> None:
    query = form(entry, DEFAULT[entry])[name]
    refused(entry, ValueError, f"^{name} must be torch.bfloat16", **{name: query.float()})
    refused(entry, ValueError, f"^{name} must have shape", **{name: query[0]})
    refused(entry, ValueError, f"^{name} must have shape", **{name: query[None]})
    refused(entry, ValueError, f"must be a tensor without data as {name} is", **{name: query.to("meta")})
    refused(entry, ValueError, f"^{name} has stride 2 in its last", **{name: query.repeat_interleave(2, -1)[..., ::2]})
    refused(entry, ValueError, f"^{name} starts at address", **{name: misaligned(query)})
    refused(entry, ValueError, f"^{name} has stride .* in dimension", **{name: odd_stride(*query.shape)})


@pytest.mark.parametrize("entry", [CONTEXT, XQA])
def test_kv_cache(entry: str) -> None:
    layout = "HND" if entry == CONTEXT else "NHD"
    cache = stacked(layout)
    part = data(PAGES, *page_shape(layout))
    refused(entry, TypeError, "^kv_cache must be a torch.Tensor or a pair", kv_cache=None)
    refused(entry, TypeError, r"^kv_cache\[1\] must be a torch.Tensor", kv_cache=(part, None))
    refused(entry, ValueError, "^kv_cache as a tuple must be a pair", kv_cache=(part,))
    refused(entry, ValueError, "^kv_cache must be torch", kv_cache=cache.float())
    refused(entry, ValueError, "kv_cache", kv_cache=cache.to(FP16))
    refused(entry, ValueError, r"^kv_cache\[1\] must have the dtype", kv_cache=(part, part.to(FP8)))
    refused(entry, ValueError, "^kv_cache must be on cpu", kv_cache=cache.to("meta"))
    refused(entry, ValueError, r"^kv_cache\[1\] must be on cpu", kv_cache=(part, part.to("meta")))
    refused(entry, ValueError, "^kv_cache must be 5-D", kv_cache=cache[0])
    refused(entry, ValueError, r"^kv_cache\[0\] must be 4-D", kv_cache=(part[0], part[0]))
    refused(entry, ValueError, "^kv_cache must have 1 or 2", kv_cache=data(PAGES, 3, *page_shape(layout)))
    refused(entry, ValueError, "number of pages", kv_cache=(part, part[:3]))
    refused(entry, ValueError, "head_dim of query", kv_cache=cache[..., :32])
    refused(entry, ValueError, "last stride", kv_cache=cache.repeat_interleave(2, -1)[..., ::2])
    refused(entry, ValueError, "^kv_cache starts at address", kv_cache=misaligned(cache))
    refused(entry, ValueError, r"^kv_cache\[1\] has stride", kv_cache=(part, odd_stride(*part.shape)))
    three = data(PAGES, 2, 3, 3, DIM)
    refused(entry, ValueError, "query heads must be a positive multiple of the KV heads of kv_cache", kv_cache=three)
    none = cache[:, :, :0] if layout == "NHD" else cache[:, :, :, :0]
    refused(entry, ValueError, "kv_cache must have a page size of at least 1, got 0", kv_cache=none)


def test_context_pages_may_differ_with_separate_ids() -> None:
    arguments = form(CONTEXT, "separate-ids-HND")
    pool, _ = arguments["kv_cache"]
    hopwell.trtllm_batch_context_with_kv_cache(**{**arguments, "kv_cache": (pool, pool[:-1])})


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_context_page_table_rank(layout: str) -> None:
    refused(CONTEXT, ValueError, "block_tables must be 3-D", f"stacked-{layout}", uses_shared_paged_kv_idx=False)
    refused(CONTEXT, ValueError, "block_tables must be 2-D", f"separate-ids-{layout}", uses_shared_paged_kv_idx=True)
    triple = ints(*TABLE)[:, None].repeat(1, 3, 1)
    refused(CONTEXT, ValueError, "block_tables must have 2", f"separate-ids-{layout}", block_tables=triple)


@pytest.mark.parametrize("entry", [CONTEXT, FMHA])
def test_batch_size(entry: str) -> None:
    refused(entry, ValueError, "block_tables|seq_lens", batch_size=BATCH + 1)


def test_context_nvfp4_cache() -> None:
    arguments = form(CONTEXT, "nvfp4-HND")
    scales = arguments["kv_block_scales"]

    def bad(error: type[Exception], text: str, **changes: Any) -> None:
        refused(CONTEXT, error, text, "nvfp4-HND", **changes)

    bad(ValueError, "^kv_block_scales must be provided", kv_block_scales=None)
    bad(TypeError, "^kv_block_scales must be a torch.Tensor or a pair", kv_block_scales=1.0)
    bad(ValueError, "^kv_block_scales must be torch.float8_e4m3fn", kv_block_scales=scales.to(torch.float32))
    bad(ValueError, "^kv_block_scales must be on cpu", kv_block_scales=scales.to("meta"))
    bad(ValueError, "kv_block_scales", kv_block_scales=scales[:, :1])
    bad(ValueError, "kv_block_scales", kv_block_scales=scales[..., :2])
    bad(ValueError, "kv_block_scales", kv_block_scales=scales[:-1])
    bad(ValueError, "kv_block_scales", kv_block_scales=scales.transpose(2, 3))
    bad(ValueError, "kv_block_scales", kv_block_scales=(scales[:, 0],))
    strided = data(PAGES, 2, KV_HEADS, PAGE, 6, dtype=FP8)[..., :4]
    bad(
        ValueError,
        r"^kv_block_scales must begin at a multiple of 4 bytes.* strides \(.*, 6, 1\)",
        kv_block_scales=strided,
    )
    bad(ValueError, "page size that is a multiple of 4", kv_cache=data(PAGES, 2, KV_HEADS, 2, DIM // 2, dtype=U8))
    narrow = data(PAGES, 2, KV_HEADS, PAGE, 16, dtype=U8)
    bad(ValueError, "K head_dim that is a multiple of 64", kv_cache=narrow, query=data(TOKENS, HEADS, 32, dtype=FP8))
    refused(CONTEXT, ValueError, "^kv_block_scales must be None unless", kv_block_scales=scales)
    hnd_pair = (scales[:, 0].clone(), scales[:, 1].clone())
    FUNCTIONS[CONTEXT](**arguments | {"kv_block_scales": hnd_pair})
    narrow_gaps = data(PAGES, 2, KV_HEADS, PAGE, 8, dtype=FP8)[..., :4]
    FUNCTIONS[CONTEXT](**arguments | {"kv_block_scales": narrow_gaps})


PAGED = {CONTEXT: DEFAULT[CONTEXT], FMHA: "paged-HND", CUDNN: "paged", XQA: DEFAULT[XQA], MLA: DEFAULT[MLA]}


@pytest.mark.parametrize(("entry", "paged"), PAGED.items())
def test_room_for_tokens(entry: str, paged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer requests than positions can count would be wrong."""
    room = len(TABLE[0]) * PAGE
    monkeypatch.setattr(checks, "MAX_KEYS", room - 1)
    refused(entry, ValueError, f"^block_tables may have room for {room - 1} tokens .* which are {room}$", paged)
    monkeypatch.setattr(checks, "MAX_KEYS", room)
    FUNCTIONS[entry](**form(entry, paged))
