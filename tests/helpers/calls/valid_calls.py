"""Valid calls of all five entry points in every input form, for tests to use or to break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.kernels.problem import TokenOffsets
from hopwell.layouts import FP8_DS_MLA_BYTES
from hopwell.mla import mla_workspace_bytes

BF16, FP16, F32, FP8, U8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8
HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 16, 11
Q_LENS, KV_LENS = (3, 0, 5), (20, 1, 37)
BATCH, TOKENS, KV_TOKENS = 3, 8, 58
TABLE = ((7, 2, -1, -1), (0, -1, -1, -1), (5, 9, 3, -1))


@dataclass(frozen=True)
class Form:
    """One input form of one entry point: ``build()`` returns fresh arguments of a valid call."""

    name: str
    function: Callable[..., Any]
    build: Callable[[], dict[str, Any]]
    runs: bool = True  # False: well formed, but without a kernel
    copies: bool = False  # the query is copied before the launch

    def __str__(self) -> str:
        return f"{self.function.__name__}-{self.name}"


def data(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def cumulative(lengths: tuple[int, ...], factor: int = 1) -> torch.Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return ints(*total) * factor


def page_shape(layout: str, width: int = DIM) -> tuple[int, int, int]:
    return (KV_HEADS, PAGE, width) if layout == "HND" else (PAGE, KV_HEADS, width)


def prefill_batch() -> dict[str, Any]:
    """Return the arguments shared by the context and FMHAv2 entries, in order: lengths and scales of the batch."""
    return {
        "seq_lens": ints(*KV_LENS),
        "max_q_len": 5,
        "max_kv_len": 37,
        "bmm1_scale": 0.125,
        "bmm2_scale": 1.0,
        "batch_size": BATCH,
        "cum_seq_lens_q": cumulative(Q_LENS),
        "cum_seq_lens_kv": cumulative(KV_LENS),
    }


def context(kv_cache: Any, layout: str, query: torch.Tensor | None = None, **more: Any) -> dict[str, Any]:
    return {
        "query": data(TOKENS, HEADS, DIM) if query is None else query,
        "kv_cache": kv_cache,
        "workspace_buffer": torch.empty(16, dtype=torch.uint8),
        "block_tables": ints(*TABLE),
        **prefill_batch(),
        "kv_layout": layout,
        **more,
    }


def stacked(layout: str, dtype: torch.dtype = BF16, width: int = DIM) -> torch.Tensor:
    return data(PAGES, 2, *page_shape(layout, width), dtype=dtype)


def context_separate_ids(layout: str) -> dict[str, Any]:
    """Return arguments with K and V pages that alternate in one pool, passed as both."""
    pool = data(2 * PAGES, *page_shape(layout))
    key = ints(*TABLE)
    tables = torch.stack((2 * key, 2 * key + 1), dim=1)
    return context((pool, pool), layout, block_tables=tables, uses_shared_paged_kv_idx=False)


def context_nvfp4(layout: str, dtype: torch.dtype = BF16) -> dict[str, Any]:
    query = data(TOKENS, HEADS, DIM, dtype=dtype)
    return context(stacked(layout, U8, DIM // 2), layout, query, kv_block_scales=nvfp4_scales(layout))


def nvfp4_scales(layout: str) -> torch.Tensor:
    return data(PAGES, 2, *page_shape(layout, DIM // 16), dtype=FP8)


def fmha_v2(qkv: Any, layout: str, **more: Any) -> dict[str, Any]:
    return {
        "qkv": qkv,
        "input_layout": layout,
        "workspace_buffer": torch.empty(16, dtype=torch.uint8),
        **prefill_batch(),
        **more,
    }


def fmha_v2_pair(layout: str) -> dict[str, Any]:
    pool = data(2, PAGES, *page_shape(layout))
    table = ints(*TABLE)
    tables = torch.stack((table, torch.where(table < 0, table, table + PAGES)), dim=1)
    return fmha_v2((data(TOKENS, HEADS, DIM), (pool[0], pool[1])), f"Q_PAGED_KV_{layout}", block_tables=tables)


def cudnn(k_cache: torch.Tensor, v_cache: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        "q": data(TOKENS, HEADS, k_cache.shape[-1]),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "scale": 0.125,
        "workspace_buffer": torch.empty(16, dtype=torch.uint8),
        "max_token_per_sequence": 5,
        "max_sequence_kv": 37,
        "actual_seq_lens_q": ints(*Q_LENS),
        "actual_seq_lens_kv": ints(*KV_LENS),
        "causal": True,
        "return_lse": True,
        "batch_offsets_q": cumulative(Q_LENS, HEADS * k_cache.shape[-1]),
        "batch_offsets_o": cumulative(Q_LENS, HEADS * v_cache.shape[-1]),
        **more,
    }


def cudnn_ragged(qk_dim: int = 192, v_dim: int = 128) -> dict[str, Any]:
    return cudnn(
        data(KV_TOKENS, KV_HEADS, qk_dim),
        data(KV_TOKENS, KV_HEADS, v_dim),
        batch_offsets_k=cumulative(KV_LENS, KV_HEADS * qk_dim),
        batch_offsets_v=cumulative(KV_LENS, KV_HEADS * v_dim),
    )


def cudnn_paged() -> dict[str, Any]:
    pool = data(PAGES, 2, PAGE, KV_HEADS, 128).transpose(2, 3)
    return cudnn(pool[:, 0], pool[:, 1], block_tables=ints(*TABLE))


def xqa(kv_cache: Any, layout: str, q_len: int = 1, **more: Any) -> dict[str, Any]:
    needed = xqa_workspace_bytes(HEADS, KV_HEADS, DIM, len(TABLE[0]) * PAGE, q_len, device="cpu")
    return {
        "query": data(BATCH * q_len, HEADS, DIM),
        "kv_cache": kv_cache,
        "workspace_buffer": torch.empty(needed, dtype=torch.uint8),
        "block_tables": ints(*TABLE),
        "seq_lens": ints(*KV_LENS),
        "max_seq_len": 37,
        "kv_layout": layout,
        "q_len_per_req": q_len,
        **more,
    }


def mla(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, q_len: int = 1, rank: int = 512, **more: Any
) -> dict[str, Any]:
    needed = mla_workspace_bytes(HEADS, block_tables.shape[-1] * kv_cache.shape[-2], q_len, rank, device="cpu")
    return {
        "query": data(BATCH, q_len, HEADS, rank + 64, dtype=kv_cache.dtype),
        "kv_cache": kv_cache,
        "workspace_buffer": torch.empty(needed, dtype=torch.uint8),
        "qk_nope_head_dim": 128,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": 64,
        "block_tables": block_tables,
        "seq_lens": ints(*KV_LENS),
        "max_seq_len": 37,
        **more,
    }


CONTEXT_FORMS: dict[str, Callable[[str], dict[str, Any]]] = {
    "stacked": lambda layout: context(stacked(layout), layout),
    "pair": lambda layout: context((stacked(layout)[:, 0], data(PAGES, *page_shape(layout))), layout),
    "same": lambda layout: context(stacked(layout)[:, :1], layout),
    "separate-ids": context_separate_ids,
    "strided-query": lambda layout: context(stacked(layout), layout, data(TOKENS, HEADS, 2 * DIM)[..., :DIM]),
    "fp8": lambda layout: context(stacked(layout, FP8), layout, data(TOKENS, HEADS, DIM, dtype=FP8)),
    "nvfp4": context_nvfp4,
    "nvfp4-fp8": partial(context_nvfp4, dtype=FP8),
}


def _wide_heads() -> dict[str, Any]:
    """Return a call that no kernel serves: head dims end at 256, except 512."""
    return context(stacked("HND", width=264), "HND", data(TOKENS, HEADS, 264))


def _context_forms() -> list[Form]:
    function = hopwell.trtllm_batch_context_with_kv_cache
    return [
        Form(f"{name}-{layout}", function, partial(build, layout))
        for name, build in CONTEXT_FORMS.items()
        for layout in ("HND", "NHD")
    ] + [Form("without-a-kernel", function, _wide_heads, runs=False)]


def _fmha_v2_forms() -> list[Form]:
    function = hopwell.trtllm_fmha_v2_prefill

    def packed() -> dict[str, Any]:
        lengths = cumulative(Q_LENS)
        return fmha_v2(data(TOKENS, 3, HEADS, DIM), "PACKED_QKV", cum_seq_lens_kv=lengths, seq_lens=ints(*Q_LENS))

    def contiguous() -> dict[str, Any]:
        return fmha_v2((data(TOKENS, HEADS, DIM), data(KV_TOKENS, 2, KV_HEADS, DIM)), "CONTIGUOUS_Q_KV")

    def separate() -> dict[str, Any]:
        qkv = data(TOKENS, HEADS, 192), data(KV_TOKENS, KV_HEADS, 192), data(KV_TOKENS, KV_HEADS, 128)
        return fmha_v2(qkv, "SEPARATE_Q_K_V")

    def paged(layout: str) -> dict[str, Any]:
        qkv = data(TOKENS, HEADS, DIM), stacked(layout)
        return fmha_v2(qkv, f"Q_PAGED_KV_{layout}", block_tables=ints(*TABLE))

    return [
        Form("packed", function, packed),
        Form("contiguous", function, contiguous),
        Form("separate", function, separate),
        Form("paged-NHD", function, lambda: paged("NHD")),
        Form("paged-HND", function, lambda: paged("HND")),
        Form("pair-NHD", function, lambda: fmha_v2_pair("NHD")),
        Form("pair-HND", function, lambda: fmha_v2_pair("HND")),
    ]


def _cudnn_forms() -> list[Form]:
    function = hopwell.cudnn_batch_prefill_with_kv_cache
    return [
        Form("ragged", function, cudnn_ragged),
        Form("paged", function, cudnn_paged),
    ]


def _xqa_forms() -> list[Form]:
    function = hopwell.xqa_batch_decode_with_kv_cache

    def nvfp4() -> dict[str, Any]:
        cache = stacked("NHD", U8, DIM // 2)
        return xqa(cache, "NHD", kv_cache_sf=nvfp4_scales("NHD"))

    def drafts() -> dict[str, Any]:
        cache = data(PAGES, *page_shape("HND")), data(PAGES, *page_shape("HND"))
        return xqa(cache, "HND", q_len=3, mask=torch.zeros(BATCH, 3, 2, dtype=torch.uint16))

    def ragged() -> dict[str, Any]:
        more = dict(
            query=data(TOKENS, HEADS, DIM),
            q_cu_seq_lens=cumulative(Q_LENS),
            mask=torch.zeros(TOKENS, 2, dtype=torch.uint16),
        )
        return xqa(stacked("NHD"), "NHD", q_len=5, lse=data(TOKENS, HEADS, dtype=torch.float32), **more)

    return [
        Form("stacked-NHD", function, lambda: xqa(stacked("NHD"), "NHD")),
        Form("fp8-HND", function, lambda: xqa(stacked("HND", FP8), "HND")),
        Form("nvfp4", function, nvfp4),
        Form("drafts", function, drafts),
        Form("ragged", function, ragged),
    ]


def packed_rows() -> torch.Tensor:
    """Make a latent cache of 656-byte rows."""
    return torch.zeros(PAGES, PAGE, FP8_DS_MLA_BYTES, dtype=torch.uint8)


def _mla_forms() -> list[Form]:
    function = hopwell.trtllm_batch_decode_with_kv_cache_mla

    def sparse() -> dict[str, Any]:
        tokens = torch.full((BATCH, 2, 8), -1, dtype=torch.int32)
        return mla(data(PAGES, PAGE, 576), tokens, q_len=2, sparse_mla_top_k=8)

    def several_tokens() -> dict[str, Any]:
        return mla(data(PAGES, 1, PAGE, 320), ints(*TABLE), q_len=3, rank=256, bmm1_scale=0.125)

    def ragged() -> dict[str, Any]:
        arguments = mla(data(PAGES, PAGE, 576), ints(*TABLE), q_len=5)
        more = dict(cum_seq_lens_q=cumulative(Q_LENS), max_q_len=5, return_lse_base="basee")
        lse = data(TOKENS, HEADS, dtype=torch.float32)
        return {**arguments, **more, "query": data(TOKENS, HEADS, 576), "lse": lse}

    def ranks() -> dict[str, Any]:
        more = dict(cp_world=2, cp_rank=1, causal_seqlens_kv_global=ints(*(2 * length for length in KV_LENS)))
        arguments = mla(data(PAGES, PAGE, 576), ints(*TABLE))
        return {**arguments, **more, "enable_dcp": True, "return_lse": True, "lse": data(BATCH, HEADS, dtype=F32)}

    def counted() -> dict[str, Any]:
        return {**sparse(), "sparse_mla_top_k_lens": torch.ones(BATCH, 2, dtype=torch.int32)}

    return [
        Form("dense", function, lambda: mla(data(PAGES, PAGE, 576), ints(*TABLE))),
        Form("several-tokens", function, several_tokens),
        Form("fp8", function, lambda: mla(data(PAGES, 1, PAGE, 576, dtype=FP8), ints(*TABLE)), copies=True),
        Form("packed", function, lambda: {**mla(data(PAGES, PAGE, 576), ints(*TABLE)), "kv_cache": packed_rows()}),
        Form("sparse", function, sparse),
        Form("ragged", function, ragged),
        Form("counted", function, counted),
        Form("ranks", function, ranks),
    ]


def _trtllm_decode_forms() -> list[Form]:
    function = hopwell.trtllm_batch_decode_with_kv_cache

    def causal() -> dict[str, Any]:
        return xqa(stacked("HND"), "HND", q_len=3, lse=data(BATCH * 3, HEADS, dtype=torch.float32))

    def separate_ids() -> dict[str, Any]:
        tables = ints(*TABLE)[:, None].expand(-1, 2, -1).contiguous()
        cache = data(PAGES, *page_shape("HND")), data(PAGES, *page_shape("HND"))
        return {**xqa(cache, "HND"), "block_tables": tables, "uses_shared_paged_kv_idx": False}

    def ranks() -> dict[str, Any]:
        more = dict(cp_world=2, cp_rank=1, causal_seqlens_kv_global=ints(*(2 * length for length in KV_LENS)))
        lse = data(BATCH, HEADS, dtype=F32)
        return xqa(stacked("HND"), "HND", return_lse=True, lse=lse, **more)

    def nvfp4() -> dict[str, Any]:
        cache = data(PAGES, *page_shape("HND", DIM // 2), dtype=U8), data(PAGES, *page_shape("HND", DIM // 2), dtype=U8)
        scales = tuple(data(PAGES, *page_shape("HND", DIM // 16), dtype=FP8) for _ in range(2))
        more = dict(query=data(TOKENS, HEADS, DIM), cum_seq_lens_q=cumulative(Q_LENS), max_q_len=5, kv_cache_sf=scales)
        return xqa(cache, "HND", **more)

    return [
        Form("ranks", function, ranks),
        Form("nvfp4", function, nvfp4),
        Form("causal", function, causal),
        Form("fp8-out", function, lambda: xqa(stacked("HND", FP8), "HND", out_dtype=FP8)),
        Form("separate-ids", function, separate_ids),
    ]


FORMS = [*_context_forms(), *_fmha_v2_forms(), *_cudnn_forms(), *_xqa_forms(), *_mla_forms(), *_trtllm_decode_forms()]


IN_PLACE = [form for form in FORMS if form.runs and not form.copies]


def form(entry: str, name: str) -> dict[str, Any]:
    """Return fresh arguments of the form called ``name`` of the entry whose function name starts with ``entry``."""
    return next(f for f in FORMS if f.function.__name__.startswith(entry) and f.name == name).build()


NAMES = ("trtllm_batch_context", "trtllm_fmha", "cudnn", "xqa", "trtllm_batch_decode")
DEFAULT = dict(zip(NAMES, ("stacked-HND", "contiguous", "ragged", "stacked-NHD", "dense"), strict=True))
FUNCTIONS = {name: next(f.function for f in FORMS if f.function.__name__.startswith(name)) for name in NAMES}
CONTEXT, FMHA, CUDNN, XQA, MLA = NAMES


def refused(entry: str, error: type[Exception], text: str, form_name: str | None = None, **changes: Any) -> None:
    arguments = form(entry, form_name or DEFAULT[entry])
    with pytest.raises(error, match=text) as caught:
        FUNCTIONS[entry](**{**arguments, **changes})
    assert type(caught.value) is error


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape that starts one element past a 16-byte boundary."""
    return (
        torch.zeros(tensor.numel() + 64, dtype=torch.float32)
        .view(tensor.dtype)[1 : 1 + tensor.numel()]
        .view(tensor.shape)
    )


def batched(value: torch.Tensor) -> torch.Tensor:
    """Return the batched tensor that torch.vmap makes of a tensor."""
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        return torch._C._functorch._add_batch_dim(torch.stack([value, value]), 0, level)
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def odd_stride(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a tensor with rows of a multiple of 4 bytes that is not a multiple of 16."""
    return data(*shape[:-1], shape[-1] + 2, dtype=dtype)[..., : shape[-1]]


def call_cudnn(name: str = "ragged", **changes: Any) -> Any:
    """Call the cuDNN entry with the arguments of a form and changes."""
    return hopwell.cudnn_batch_prefill_with_kv_cache(**{**form("cudnn", name), **changes})


def starts(offsets: TokenOffsets | None) -> list[int]:
    """Return the start of each request in tokens."""
    return (
        [0] * BATCH if offsets is None else [int(value) // offsets.token_elements for value in offsets.tensor[:BATCH]]
    )
