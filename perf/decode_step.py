"""A decode step of a whole model: projections, append to a paged cache, attention and MLP of each layer.

The models have random weights, no rotary embeddings and no sampling, which cost the same with every attention. Each
request appends one token and attends to its cache. A step repeats with the same lengths.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.functional import linear, rms_norm, silu

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.mla import mla_workspace_bytes
from hopwell.perf.paging import in_pages
from hopwell.perf.peers import flash_mla
from hopwell.perf.quantized import BF16, CACHES, E4M3, MAX_BYTE_ERROR, MAX_ERROR, NVFP4, Stored, stored
from hopwell.perf.results import Row, first_line

PAGE = 64
ROTARY, NOPE = 64, 128  # head dims of MLA
GRAPH, EAGER, COMPILED = "CUDA graph", "eager", "torch.compile, reduce-overhead"
WARM_UPS, STEPS, ROUNDS = 3, 5, 15

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A decoder. ``windows`` has the keys that a token sees, or 0 for all, for layers in turns; ``rank`` is MLA's."""

    title: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...] = (0,)
    sinks: bool = False
    rank: int = 0

    @property
    def scale(self) -> float:
        return float((NOPE + ROTARY if self.rank else self.head_dim) ** -0.5)


LLAMA_1B = Shape("Llama 3.2 1B", 2048, 8192, 16, 32, 8, 64)
LLAMA_8B = Shape("8 layers of Llama 3.1 8B", 4096, 14336, 8, 32, 8, 128)
GPT_OSS = Shape("12 layers of gpt-oss 20B, dense MLP", 2880, 2880, 12, 64, 8, 64, windows=(128, 0), sinks=True)
DEEPSEEK = Shape("13 layers of DeepSeek V2 Lite, dense MLP", 2048, 2816, 13, 16, 1, 576, rank=512)


class Cache:
    """Keys and values of all layers in pages, ``lengths`` tokens of each request."""

    def __init__(self, shape: Shape, lengths: list[int], dtype: torch.dtype, device: str):
        self.dtype, self.lengths = dtype, lengths
        make = torch.Generator(device).manual_seed(1)
        self.layers: list[Any] = []
        for _ in range(shape.layers):
            sizes = sum(lengths), shape.kv_heads, shape.head_dim
            key, value = (_random(sizes, dtype, device, make) for _ in "kv")
            self.layers.append((key, None if shape.rank else value))
        pages = [in_pages(key.data, value and value.data, lengths, PAGE) for key, value in self.layers]
        self.table = pages[0].table
        self.data: list[Pair] = [(each.key, each.value) for each in pages]
        self.scales: list[Pair | None] = [None] * shape.layers
        if dtype is NVFP4:
            scales = [in_pages(key.scales, value.scales, lengths, PAGE) for key, value in self.layers]
            self.scales = [(each.key, each.value) for each in scales]
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=device)
        last = self.lens.long() - 1
        self.slots = self.table.gather(1, (last // PAGE)[:, None])[:, 0].long() * PAGE + last % PAGE


def _random(sizes: tuple[int, ...], dtype: torch.dtype, device: str, make: torch.Generator) -> Stored:
    return stored(torch.randn(sizes, generator=make, device=device, dtype=BF16).float(), dtype)


class Decoder:
    """A decoder with random weights. ``attention`` appends and attends, see :data:`ATTENTION`."""

    def __init__(self, shape: Shape, device: str):
        self.shape = shape
        make = torch.Generator(device).manual_seed(0)

        def weight(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=make, device=device, dtype=BF16) * sizes[-1] ** -0.5

        s = shape
        out_dim = s.heads * (NOPE if s.rank else s.head_dim)
        in_dim = s.heads * (NOPE + ROTARY) if s.rank else s.heads * s.head_dim
        keys = s.head_dim if s.rank else 2 * s.kv_heads * s.head_dim
        self.layers: list[dict[str, Any]] = [
            dict(
                qkv=weight(in_dim + keys, s.hidden),
                output=weight(s.hidden, out_dim),
                gate_up=weight(2 * s.intermediate, s.hidden),
                down=weight(s.hidden, s.intermediate),
                absorb_k=weight(s.heads, NOPE, s.rank) if s.rank else None,
                absorb_v=weight(s.heads, s.rank, NOPE) if s.rank else None,
            )
            for _ in range(s.layers)
        ]
        self.sinks = torch.randn(s.heads, generator=make, device=device, dtype=BF16) if s.sinks else None
        self._splits = in_dim, keys

    def step(self, hidden: torch.Tensor, attention: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Compute the next hidden states [batch, hidden]."""
        s = self.shape
        for index, w in enumerate(self.layers):
            query, keys = linear(rms_norm(hidden, (s.hidden,)), w["qkv"]).split(self._splits, -1)
            query, keys = query.unflatten(-1, (s.heads, -1)), keys.unflatten(-1, (-1, s.head_dim))
            if s.rank:
                latent = torch.bmm(query[..., :NOPE].transpose(0, 1), w["absorb_k"]).transpose(0, 1)
                query = torch.cat((latent, query[..., NOPE:]), -1)
            window = s.windows[index % len(s.windows)]
            out = attention(index, query, keys[:, : s.kv_heads], keys[:, s.kv_heads :], window, self.sinks)
            if s.rank:
                out = torch.bmm(out.transpose(0, 1), w["absorb_v"]).transpose(0, 1)
            hidden = hidden + linear(out.flatten(1), w["output"])
            gate, up = linear(rms_norm(hidden, (s.hidden,)), w["gate_up"]).chunk(2, -1)
            hidden = hidden + linear(silu(gate) * up, w["down"])
        return hidden


def hopwell_attention(shape: Shape, cache: Cache) -> Callable[..., torch.Tensor]:
    capacity, device = cache.table.shape[1] * PAGE, cache.lens.device
    sizes = (shape.heads, shape.kv_heads, shape.head_dim, capacity)
    workspace = torch.empty(xqa_workspace_bytes(*sizes, device=device), dtype=torch.uint8, device=device)

    def attend(index: int, query: Any, key: Any, value: Any, window: int, sinks: Any) -> torch.Tensor:
        data, scales = cache.data[index], cache.scales[index]
        hopwell.append_paged_kv_cache_with_slot_mapping(
            key, value, cache.slots, data, "NHD", kv_cache_sf=scales, v_scale_layout="linear"
        )
        out: Any = hopwell.trtllm_batch_decode_with_kv_cache(
            query,
            data,
            workspace,
            cache.table,
            cache.lens,
            capacity,
            bmm1_scale=shape.scale,
            window_left=window - 1,
            sinks=sinks,
            kv_layout="NHD",
            kv_cache_sf=scales,
        )
        return out

    return attend


def hopwell_mla(shape: Shape, cache: Cache) -> Callable[..., torch.Tensor]:
    capacity, device = cache.table.shape[1] * PAGE, cache.lens.device
    size = mla_workspace_bytes(shape.heads, capacity, 1, shape.rank, device)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def attend(index: int, query: Any, key: Any, value: Any, window: int, sinks: Any) -> torch.Tensor:
        rows = _write_latent(cache, index, key)
        out: Any = hopwell.trtllm_batch_decode_with_kv_cache_mla(
            query[:, None],
            rows,
            workspace,
            NOPE,
            shape.rank,
            ROTARY,
            cache.table,
            cache.lens,
            capacity,
            bmm1_scale=shape.scale,
        )
        return out[:, 0]

    return attend


def _write_latent(cache: Cache, index: int, key: torch.Tensor) -> torch.Tensor:
    """Write latent keys into their slots, and return the cache [pages, page, head_dim]."""
    rows = cache.data[index][0][:, :, 0]
    flat = rows.flatten(0, 1).view(torch.uint8)  # index_copy_ has no float8
    flat.index_copy_(0, cache.slots, key[:, 0].to(rows.dtype).view(torch.uint8))
    return rows


def flash_attention_3(shape: Shape, cache: Cache) -> Callable[..., torch.Tensor]:
    """FlashAttention 3 appends and attends in one call. Over an e4m3 cache its queries are e4m3 too."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    if cache.dtype is NVFP4:
        raise NotImplementedError("no NVFP4 cache")
    before = cache.lens - 1

    def attend(index: int, query: Any, key: Any, value: Any, window: int, sinks: Any) -> torch.Tensor:
        key_cache, value_cache = cache.data[index]
        q, k, v = (part[:, None].to(cache.dtype) for part in (query, key, value))
        return flash_attn_with_kvcache(
            q,
            key_cache,
            value_cache,
            k,
            v,
            cache_seqlens=before,
            page_table=cache.table,
            softmax_scale=shape.scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            sinks=sinks,
        )[:, 0]

    return attend


def flash_mla_attention(shape: Shape, cache: Cache) -> Callable[..., torch.Tensor]:
    peer = flash_mla()
    if cache.dtype is not BF16:
        raise NotImplementedError("a cache of the query's dtype only")
    schedule, splits = peer.get_mla_metadata(cache.lens, shape.heads, 1)

    def attend(index: int, query: Any, key: Any, value: Any, window: int, sinks: Any) -> torch.Tensor:
        rows = _write_latent(cache, index, key)[:, :, None]
        arguments = query[:, None], rows, cache.table, cache.lens, shape.rank, schedule, splits
        return peer.flash_mla_with_kvcache(*arguments, softmax_scale=shape.scale, causal=False)[0][:, 0]

    return attend


def exact_attention(shape: Shape, cache: Cache) -> Callable[..., torch.Tensor]:
    """Attention in float64 over the values that the cache represents. The cache is not written."""

    def attend(index: int, query: Any, key: Any, value: Any, window: int, sinks: Any) -> torch.Tensor:
        group = shape.heads // shape.kv_heads
        caches = [None if part is None else part.values.split(cache.lengths) for part in cache.layers[index]]
        outs = []
        for request, length in enumerate(cache.lengths):
            first = max(0, length - window) if window else 0

            def values(part: Any, new: torch.Tensor, request: int = request, first: int = first) -> torch.Tensor:
                last = stored(new[request : request + 1].float(), cache.dtype).values
                return torch.cat((part[request][first:-1], last)).double().repeat_interleave(group, 1)

            keys = values(caches[0], key)
            held = keys[..., : shape.rank] if shape.rank else values(caches[1], value)
            logits = torch.einsum("hd,nhd->hn", query[request].double(), keys) * shape.scale
            if sinks is not None:
                logits = torch.cat((logits, sinks[:, None].double()), 1)
            outs.append(torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : len(keys)], held))
        return torch.stack(outs)

    return attend


ATTENTION = {"hopwell": hopwell_attention, "FlashAttention 3": flash_attention_3}
LATENT = {"hopwell": hopwell_mla, "FlashMLA": flash_mla_attention}


@dataclass(frozen=True)
class StepCase:
    """A decode step of ``batch`` requests with up to ``context`` tokens each."""

    name: str
    shape: Shape
    batch: int
    context: int
    kv: torch.dtype = BF16
    mode: str = GRAPH

    @property
    def title(self) -> str:
        requests = f"{self.batch} requests, {self.context // 2} to {self.context} tokens"
        return f"{self.name}: decode step, {self.shape.title}, {requests}{CACHES[self.kv]}, {self.mode}"

    @property
    def candidates(self) -> dict[str, Callable[..., Any]]:
        return LATENT if self.shape.rank else ATTENTION

    def measure(self, titles: Sequence[str], advance: Callable[[str], None]) -> list[Row]:
        """Time a step of each candidate in turns, after a comparison with attention in float64."""
        rows: dict[str, Row] = {}
        calls: dict[str, Callable[[], torch.Tensor]] = {}
        model, cache, hidden = self.tensors("cuda")
        for title in titles:
            rows[title] = row = Row(self.title, title)
            try:
                attention = self.candidates[title](self.shape, cache)
                row.error = attention_error(self.shape, cache, attention)
                if row.error < (MAX_ERROR if self.kv is BF16 else MAX_BYTE_ERROR):
                    calls[title] = prepared(model, attention, hidden, self.mode, cache)
                else:
                    row.failure = "wrong result"
            except Exception as failure:  # a peer may fail in any way; the others are still worth measuring
                row.failure = first_line(type(failure).__name__, failure)
            advance(f"{self.name}: {title}")
        for title, milliseconds in in_turns(calls).items():
            rows[title].milliseconds, rows[title].rate = milliseconds, self.batch / milliseconds * 1e3
        return list(rows.values())

    def tensors(self, device: str) -> tuple[Decoder, Cache, torch.Tensor]:
        """Return the model, its cache and hidden states [batch, hidden]."""
        lengths = [self.context - i * (self.context // 2) // max(self.batch - 1, 1) for i in range(self.batch)]
        make = torch.Generator(device).manual_seed(2)
        hidden = torch.randn(self.batch, self.shape.hidden, generator=make, device=device, dtype=BF16)
        return Decoder(self.shape, device), Cache(self.shape, lengths, self.kv, device), hidden


def attention_error(shape: Shape, cache: Cache, attention: Callable[..., torch.Tensor]) -> float:
    """Return the largest relative error of the first layers, one of each window, for random new tokens."""
    on, make = cache.lens.device, torch.Generator(cache.lens.device).manual_seed(3)

    def tokens(heads: int) -> torch.Tensor:
        return torch.randn(len(cache.lengths), heads, shape.head_dim, generator=make, device=on, dtype=BF16)

    errors = []
    for index, window in enumerate(shape.windows):
        sinks = torch.randn(shape.heads, generator=make, device=on, dtype=BF16) if shape.sinks else None
        arguments = index, tokens(shape.heads), tokens(shape.kv_heads), tokens(shape.kv_heads), window, sinks
        want = exact_attention(shape, cache)(*arguments)
        errors.append(float((attention(*arguments).double() - want).norm() / want.norm()))
    return max(errors)


def prepared(
    model: Decoder, attention: Callable[..., torch.Tensor], hidden: torch.Tensor, mode: str, cache: Cache
) -> Callable[[], torch.Tensor]:
    """Return the call of a step in a mode, warmed up."""
    step: Callable[..., torch.Tensor] = model.step
    if mode == COMPILED:
        weights = (part for layer in model.layers for part in layer.values())
        for part in (*weights, *(part for pair in (*cache.data, *cache.scales) for part in pair or ())):
            if part is not None:
                torch._dynamo.mark_static_address(part)  # graphs neither copy such inputs nor refuse to write them
        step = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    call = torch.no_grad()(partial(step, hidden, attention))
    for _ in range(WARM_UPS):
        call()
    if mode == COMPILED and counters["inductor"]["cudagraph_skips"]:
        raise RuntimeError("PyTorch made no CUDA graph")
    if mode != GRAPH:
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def in_turns(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median milliseconds of each call. Calls wait for the host, so they are not captured in graphs."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    for _ in range(ROUNDS):
        for name in shuffle.sample(list(calls), len(calls)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                calls[name]()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / STEPS)
    return {name: statistics.median(values) for name, values in times.items()}


STEP_CASES = (
    StepCase("step-1b", LLAMA_1B, 64, 4096),
    StepCase("step-1b-eager", LLAMA_1B, 64, 4096, mode=EAGER),
    StepCase("step-1b-compiled", LLAMA_1B, 64, 4096, mode=COMPILED),
    StepCase("step-8b", LLAMA_8B, 64, 4096),
    StepCase("step-gpt-oss", GPT_OSS, 64, 4096),
    StepCase("step-deepseek", DEEPSEEK, 64, 4096),
    StepCase("step-1b-fp8-cache", LLAMA_1B, 64, 4096, E4M3),
    StepCase("step-8b-fp8-cache", LLAMA_8B, 64, 4096, E4M3),
    StepCase("step-gpt-oss-fp8-cache", GPT_OSS, 64, 4096, E4M3),
    StepCase("step-deepseek-fp8-cache", DEEPSEEK, 64, 4096, E4M3),
    StepCase("step-1b-nvfp4-cache", LLAMA_1B, 64, 4096, NVFP4),
    StepCase("step-8b-nvfp4-cache", LLAMA_8B, 64, 4096, NVFP4),
    StepCase("step-gpt-oss-nvfp4-cache", GPT_OSS, 64, 4096, NVFP4),
)
