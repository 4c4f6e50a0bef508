"""Small calls of the entry points, with inputs that are bitwise equal on every machine."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hopwell
from hopwell import layouts
from hopwell.layouts.mla_rows import LATENT

HEADS, KV_HEADS = 4, 2
Q_LENS, KV_LENS = (5, 0, 1, 131), (9, 3, 0, 261)  # up to two tiles of queries and three of keys
LONGEST = 1100  # keys of decode's longest request: several CTAs share it, and partials are combined
DIMS = (32, 40, 48, 64, 80, 96, 104, 128, 160, 192, (192, 128), 256, 512)
INT8_UNIT = 40  # the element of an int8 cache that represents 1
LIST = 64  # top-k of a sparse MLA query
WORKSPACE_BYTES = 128 << 20  # enough for the partials of any case
E4M3, NVFP4 = torch.float8_e4m3fn, torch.uint8


@dataclass(frozen=True)
class Case:
    """One call. ``layout``: fmha_v2's input layout, cudnn's "ragged", MLA's "dense" or "sparse", or else a KV layout.

    ``cache`` is the dtype of K and V if it differs from the queries' dtype. uint8 means NVFP4, or rows of 656 bytes for
    MLA. ``tokens`` are decode's new tokens of each request. ``arguments`` are further arguments of the entry point;
    tuples stand for float32 tensors. Contiguous layouts do not have a ``page_size``.
    """

    group: str
    entry: str  # context, fmha_v2, cudnn, xqa, mla
    layout: str
    dims: int | tuple[int, int] = 128
    page_size: int = 0
    dtype: torch.dtype = torch.bfloat16
    arguments: dict[str, Any] = field(default_factory=dict)
    cache: torch.dtype | None = None
    tokens: int = 1
    heads: int = HEADS

    @property
    def name(self) -> str:
        """Return the case's unique name in a recording."""
        dims = self.dims if isinstance(self.dims, int) else "-".join(map(str, self.dims))
        details = [f"page{self.page_size}"] if self.page_size else []
        details += [f"{self.cache} cache".removeprefix("torch.")] if self.cache else []
        if self.decodes:
            details.append(f"{self.tokens}x{self.heads}")
        more = [f"{key}={value}" for key, value in self.arguments.items()]
        return " ".join((self.entry, self.layout, f"d{dims}", str(self.dtype).removeprefix("torch."), *details, *more))

    @property
    def decodes(self) -> bool:
        return self.entry in ("xqa", "mla")

    @property
    def kv_heads(self) -> int:
        if self.entry == "mla":
            return 1
        return HEADS if self.layout == "PACKED_QKV" else KV_HEADS

    def run(self, device: str) -> tuple[dict[str, torch.Tensor], str]:
        """Return the results by name, and the digest of the inputs.

        The results are ``out`` and, for some calls, ``statistics``: fmha_v2's statistics or the log-sum-exp.
        """
        inputs = Inputs(self, device)
        return ENTRIES[self.entry](self, inputs), inputs.digest


class Inputs:
    """Queries, keys and values of a case on a device, drawn as integers: float generators differ between CPUs."""

    def __init__(self, case: Case, device: str) -> None:
        self.device, self._hash = device, hashlib.sha256()
        self.more: dict[str, Any] = {
            key: torch.tensor(value, device=device) if isinstance(value, tuple) else value
            for key, value in case.arguments.items()
        }
        self._random = np.random.default_rng(list(case.name.encode()))
        self.dim, self.v_dim = (case.dims, case.dims) if isinstance(case.dims, int) else case.dims
        self.q_lens: tuple[int, ...] = KV_LENS if case.layout == "PACKED_QKV" else Q_LENS
        self.kv_lens: tuple[int, ...] = KV_LENS
        if case.decodes:
            self.q_lens, self.kv_lens = (case.tokens,) * len(KV_LENS), (*KV_LENS[:-1], LONGEST)
        self.q = self._given(self._draw(sum(self.q_lens), case.heads, self.dim).to(case.dtype))
        places: tuple[int, ...] = (sum(self.kv_lens), case.kv_heads)
        if case.page_size:
            counts = [-(-n // case.page_size) for n in self.kv_lens]
            pages = self._random.permutation(sum(counts)).tolist()
            rows = [[pages.pop() if i < n else -1 for i in range(max(counts))] for n in counts]
            self.table = torch.tensor(rows, dtype=torch.int32, device=device)
            places = (sum(counts), case.kv_heads, case.page_size)
        cached = case.cache or case.dtype
        self.k, self.k_scales = self._cached(self._draw(*places, self.dim), cached, case.entry == "mla")
        if case.entry != "mla":
            self.v, self.v_scales = self._cached(self._draw(*places, self.v_dim), cached)

    def _draw(self, *shape: int) -> torch.Tensor:
        """Draw float32 numbers that are about normally distributed, and exact."""
        return torch.from_numpy(self._random.integers(-128, 128, (4, *shape)).sum(0).astype(np.float32) / 128)

    def _given(self, values: torch.Tensor) -> torch.Tensor:
        """Move a call's inputs to the device and add them to the digest."""
        self._hash.update(values.contiguous().view(torch.uint8).numpy().tobytes())
        return values.to(self.device)

    def _cached(self, values: torch.Tensor, dtype: torch.dtype, latent: bool = False) -> tuple[torch.Tensor, Any]:
        """Return values in the cache's dtype, and block scales for NVFP4."""
        if dtype is torch.uint8 and latent:
            return self._given(layouts.quantize_fp8_ds_mla(values[..., :LATENT], values[..., LATENT:])), None
        if dtype is NVFP4:
            blocks = layouts.quantize_nvfp4(values, 1.0)
            return self._given(blocks.data), self._given(blocks.scales)
        if dtype is torch.int8:
            values = (values * INT8_UNIT).round().clamp(-127, 127)
        return self._given(values.to(dtype)), None

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def words(self) -> torch.Tensor:
        """Return a draft mask: each new token sees itself, and a random set of others."""
        tokens = self.q_lens[0]
        bits = self._random.integers(0, 2, (len(self.q_lens), tokens, tokens)) | np.eye(tokens, dtype=np.int64)
        words = np.zeros((len(self.q_lens), tokens, 2), np.uint16)
        words[..., 0] = (bits << np.arange(tokens)).sum(-1)
        return self._given(torch.from_numpy(words))

    def lists(self, page_size: int) -> torch.Tensor:
        """Return the top-k indices of sparse queries in any order, with -1 for none."""
        found = []
        for request, tokens in enumerate(self.q_lens):
            for token in range(tokens):
                sees = self.kv_lens[request] - tokens + token + 1
                chosen = self._random.permutation(max(sees, 0))[:LIST]
                chosen = np.concatenate([chosen, np.full(LIST - len(chosen), -1)]).astype(np.int64)
                pages = self.table[request].cpu().numpy()[chosen // page_size]
                found.append(np.where(chosen < 0, -1, pages * page_size + chosen % page_size))
        places = torch.from_numpy(np.concatenate(found)).to(torch.int32)
        return self._given(places).view(len(self.q_lens), -1, LIST)

    def ints(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def starts(self, lengths: tuple[int, ...], unit: int = 1) -> torch.Tensor:
        return self.ints([unit * n for n in itertools.accumulate(lengths, initial=0)])

    def workspace(self) -> torch.Tensor:
        return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def pools(self, layout: str) -> dict[str, Any]:
        """Return the cache in a KV layout, with its block scales."""

        def laid(*pools: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return pools if layout == "HND" else tuple(pool.transpose(1, 2).contiguous() for pool in pools)

        found: dict[str, Any] = dict(kv_cache=laid(self.k, self.v), kv_layout=layout, block_tables=self.table)
        if self.k_scales is not None:
            found["kv_cache_sf"] = laid(self.k_scales, self.v_scales)
        return found

    def common(self) -> dict[str, Any]:
        """Return the arguments shared by context and fmha_v2."""
        return dict(
            workspace_buffer=self.workspace(),
            seq_lens=self.ints(self.kv_lens),
            max_q_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens),
            bmm1_scale=1 / math.sqrt(self.dim),
            bmm2_scale=1.0,
            batch_size=len(self.q_lens),
            cum_seq_lens_q=self.starts(self.q_lens),
            cum_seq_lens_kv=self.starts(self.kv_lens),
        )


def context(case: Case, x: Inputs) -> dict[str, Any]:
    arguments = x.common() | x.pools(case.layout) | dict(query=x.q)
    return {"out": hopwell.trtllm_batch_context_with_kv_cache(**(arguments | x.more))}


def fmha_v2(case: Case, x: Inputs) -> dict[str, Any]:
    arguments = x.common() | dict(input_layout=case.layout, save_softmax_stats=not case.page_size)
    if case.layout == "PACKED_QKV":
        arguments["qkv"] = torch.stack([x.q, x.k, x.v], 1)
    elif case.layout == "CONTIGUOUS_Q_KV":
        arguments["qkv"] = (x.q, torch.stack([x.k, x.v], 1))
    elif case.layout == "SEPARATE_Q_K_V":
        arguments["qkv"] = (x.q, x.k, x.v)
    else:
        pool = torch.stack([x.k, x.v], 1)
        arguments["qkv"] = (x.q, pool if case.layout.endswith("HND") else pool.transpose(2, 3).contiguous())
        arguments["block_tables"] = x.table
    result = hopwell.trtllm_fmha_v2_prefill(**(arguments | x.more))
    return {"out": result} if case.page_size else {"out": result[0], "statistics": result[1]}


def cudnn(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    rows = dict(q=HEADS * x.dim, o=HEADS * x.v_dim)
    places: dict[str, Any] = {f"batch_offsets_{key}": x.starts(Q_LENS, unit) for key, unit in rows.items()}
    if case.page_size:
        places["block_tables"] = x.table
    else:
        columns = dict(k=KV_HEADS * x.dim, v=KV_HEADS * x.v_dim)
        places |= {f"batch_offsets_{key}": x.starts(KV_LENS, unit) for key, unit in columns.items()}
    out, lse = hopwell.cudnn_batch_prefill_with_kv_cache(
        x.q,
        x.k,
        x.v,
        1 / math.sqrt(x.dim),
        x.workspace(),
        max_token_per_sequence=max(Q_LENS),
        max_sequence_kv=max(KV_LENS),
        actual_seq_lens_q=x.ints(Q_LENS),
        actual_seq_lens_kv=x.ints(KV_LENS),
        return_lse=True,
        lse=torch.zeros(len(Q_LENS), max(Q_LENS), HEADS, device=x.device),
        **places,
        **x.more,
    )
    assert lse is not None
    return {"out": out, "statistics": lse}


def xqa(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    unit = INT8_UNIT if case.cache is torch.int8 else 1
    out, lse = hopwell.xqa_batch_decode_with_kv_cache(
        x.q,
        workspace_buffer=x.workspace(),
        seq_lens=x.ints(x.kv_lens),
        max_seq_len=max(x.kv_lens),
        bmm1_scale=1 / math.sqrt(x.dim) / unit,
        bmm2_scale=1 / unit,
        q_len_per_req=case.tokens,
        mask=x.words() if case.tokens > 1 else None,
        return_lse=True,
        **x.pools(case.layout),
        **x.more,
    )
    return {"out": out, "statistics": lse}


def mla(case: Case, x: Inputs) -> dict[str, torch.Tensor]:
    lists: dict[str, Any] = dict(block_tables=x.table)
    if case.layout == "sparse":
        lists = dict(block_tables=x.lists(case.page_size), sparse_mla_top_k=LIST)
    out, lse = hopwell.trtllm_batch_decode_with_kv_cache_mla(
        x.q.view(len(x.q_lens), case.tokens, case.heads, x.dim),
        x.k,
        x.workspace(),
        qk_nope_head_dim=128,
        kv_lora_rank=x.v_dim,
        qk_rope_head_dim=x.dim - x.v_dim,
        seq_lens=x.ints(x.kv_lens),
        max_seq_len=max(x.kv_lens),
        bmm1_scale=192**-0.5,
        return_lse=True,
        **lists,
        **x.more,
    )
    return {"out": out, "statistics": lse}


ENTRIES = {"context": context, "fmha_v2": fmha_v2, "cudnn": cudnn, "xqa": xqa, "mla": mla}
MASKS: dict[str, dict[str, Any]] = {
    "full": {"mask_mode": "padding"},
    "causal": {},
    "sliding window": {"window_left": 70},
    "chunked": {"chunked_attention_size": 64},
}
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"logits_soft_cap_scale": 2.0},
    "ALiBi": {"pos_encoding_mode": "alibi"},
    "skipped tiles": {"skip_softmax_threshold_scale_factor": 1000.0, "bmm1_scale": 0.3},
}
SINKS = {"sinks": (-1.0, 0.0, 0.5, 2.0)}


def cases() -> Iterator[Case]:
    """Yield cases of every head dim, mask, KV source, score and dtype, and of every entry point and layout."""
    yield from prefill_cases()
    yield from decode_cases()
    yield from mla_cases()


def prefill_cases() -> Iterator[Case]:
    """Yield cases of the three entry points of prefill."""
    for dims in DIMS:
        yield Case("head dims", "fmha_v2", "SEPARATE_Q_K_V", dims)
    for dims in (64, 128, (192, 128), 256):
        yield Case("head dims", "context", "HND", dims, 64)
        yield Case("float16", "context", "HND", dims, 16, torch.float16)
        yield Case("float16", "fmha_v2", "SEPARATE_Q_K_V", dims, 0, torch.float16, MASKS["sliding window"])
    for mask, arguments in MASKS.items():
        for layout, page_size in (("CONTIGUOUS_Q_KV", 0), ("Q_PAGED_KV_HND", 16), ("Q_PAGED_KV_HND", 2)):
            yield Case(f"mask: {mask}", "fmha_v2", layout, page_size=page_size, arguments=arguments)
    for page_size in (1, 8, 16, 32, 128):
        yield Case("pages", "context", "NHD", page_size=page_size)
    for score, arguments in SCORES.items():
        for layout, dims, page_size in (("CONTIGUOUS_Q_KV", 64, 0), ("Q_PAGED_KV_NHD", 128, 16)):
            yield Case(f"score: {score}", "fmha_v2", layout, dims, page_size, arguments=arguments)
    yield Case("layouts", "fmha_v2", "PACKED_QKV")
    yield Case("layouts", "context", "HND", page_size=16, arguments=SINKS)
    for layout, page_size in (("ragged", 0), ("HND", 16)):
        for causal in (False, True):
            yield Case("cuDNN", "cudnn", layout, page_size=page_size, arguments={"causal": causal})
    for dims in (64, 128, 192, 256):
        to_bf16 = {"out_dtype": torch.bfloat16}
        yield Case("e4m3", "context", "HND", dims, 16, E4M3, to_bf16)
        yield Case("caches of e4m3 under prefill", "context", "NHD", dims, 64, cache=E4M3)
        yield Case("caches of NVFP4 under prefill", "context", "HND", dims, 16, cache=NVFP4)
    yield Case("e4m3", "context", "HND", 128, 64, E4M3, {"out_dtype": E4M3} | SINKS)


def decode_cases() -> Iterator[Case]:
    """Yield decode cases: head dims, few and many rows of a KV head, masks, pages and caches."""
    for dims in (64, 80, 128, 256, 512):
        yield Case("decode: head dims", "xqa", "HND", dims, 16)
        yield Case("decode: head dims", "xqa", "NHD", dims, 64, torch.float16, tokens=4)
    for page_size in (1, 8, 32, 128):
        yield Case("decode: pages", "xqa", "NHD", 128, page_size, heads=16)
    yield Case("decode: masks", "xqa", "HND", 128, 16, arguments={"window_left": 70} | SINKS)
    yield Case("decode: masks", "xqa", "HND", 128, 16, arguments={"window_left": 700}, tokens=4, heads=16)
    for cache in (E4M3, torch.int8, NVFP4):
        name = {E4M3: "e4m3", NVFP4: "NVFP4"}.get(cache, "int8")
        for dims, tokens in ((64, 1), (128, 1), (128, 4), (256, 1)):
            yield Case(f"decode: caches of {name}", "xqa", "HND", dims, 16, cache=cache, tokens=tokens)
        yield Case(f"decode: caches of {name}", "xqa", "NHD", 128, 64, torch.float16, cache=cache, heads=16)


def mla_cases() -> Iterator[Case]:
    """Yield MLA cases: widths, pages and top-k indices, few heads and many, and caches."""
    wide, narrow, unrotated = (576, 512), (320, 256), (512, 512)
    for heads, tokens in ((16, 1), (16, 4), (128, 1)):
        yield Case("MLA: dense", "mla", "dense", wide, 64, heads=heads, tokens=tokens)
        yield Case("MLA: dense", "mla", "dense", wide, 1, torch.float16, heads=heads, tokens=tokens)
        yield Case("MLA: lists", "mla", "sparse", wide, 64, heads=heads, tokens=tokens)
        for cache in (E4M3, NVFP4):
            name = "e4m3" if cache is E4M3 else "656 bytes"
            yield Case(f"MLA: rows of {name}", "mla", "dense", wide, 16, cache=cache, heads=heads, tokens=tokens)
    for dims, layout in ((narrow, "dense"), (narrow, "sparse"), (unrotated, "sparse")):
        yield Case("MLA: widths", "mla", layout, dims, 16, heads=16)
