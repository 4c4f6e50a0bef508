"""Batches of the backend HOPWELL with vLLM's own metadata, caches in vLLM's layouts, and their float64 results."""

from __future__ import annotations

import types
from dataclasses import dataclass, field

import torch
from helpers.oracles import reference
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from hopwell.integrations.vllm.backend import HopwellBackend, HopwellMetadataBuilder
from hopwell.kernels.masks import MaskKind
from hopwell.kernels.problem import Mask, Score
from hopwell.layouts import dequantize_nvfp4, quantize_nvfp4

HEADS, KV_HEADS, HEAD_SIZE, BLOCK, BLOCKS = 4, 2, 64, 16, 14
CACHES = {"auto": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
Q_SCALE, K_SCALE, V_SCALE = 0.5, 0.25, 0.125
# (keys, new tokens) of each request. The decode entry takes up to 3 new tokens here.
DRAFT = 3
REQUESTS = {
    "mixed": [(23, 9), (40, 1), (5, 5)],
    "decode": [(23, 1), (40, 1), (5, 1)],
    "padded": [(23, 1), (40, 1), (0, 0), (0, 0)],
    "ragged": [(23, 3), (40, 1), (5, 2)],
}
PADDED_ROWS = 4  # of the batch "padded"; its real requests have 2


@dataclass
class Batch:
    """A batch of requests with random keys, and the features of a layer."""

    kind: str = "mixed"
    order: str = "HND"
    cache: str = "auto"
    window: int | None = None
    sinks: bool = False
    causal: bool | list[bool] = True
    soft_cap: float = 0.0
    alibi: bool = False
    dtype: torch.dtype = torch.bfloat16
    reads_new_tokens: bool = True  # from the cache; a mixed batch under DCP has them as they are
    requests: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = REQUESTS[self.kind]
        torch.manual_seed(len(self.kind) + len(self.cache))
        self.key, self.value = (
            [torch.randn(kv, KV_HEADS, HEAD_SIZE, dtype=self.dtype) for kv, _ in self.requests] for _ in "kv"
        )
        self.starts = torch.tensor([0, *[q for _, q in self.requests]]).cumsum(0).int()
        self.tokens = int(self.starts[-1])
        self.rows = PADDED_ROWS if self.kind == "padded" else self.tokens
        self.query = torch.randn(self.rows, HEADS, HEAD_SIZE, dtype=self.dtype)
        self.sink = torch.randn(HEADS) if self.sinks else None
        pages = iter(torch.randperm(BLOCKS - 1).int().tolist())
        self.table = torch.full((len(self.requests), 4), -1, dtype=torch.int32)
        for row, (kv, _) in zip(self.table, self.requests, strict=True):
            for place in range(-(-kv // BLOCK)):
                row[place] = next(pages)

    @property
    def is_nvfp4(self) -> bool:
        return self.cache == "nvfp4"

    def slots(self, request: int, first: int, last: int) -> torch.Tensor:
        """Return the slots of tokens first..last - 1 of a request."""
        token = torch.arange(first, last)
        return self.table[request, token // BLOCK].long() * BLOCK + token % BLOCK

    def spec(self) -> FullAttentionSpec:
        dtype = torch.uint8 if self.cache == "fp8" else CACHES[self.cache]
        spec = FullAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=KV_HEADS,
            head_size=HEAD_SIZE,
            head_size_v=HEAD_SIZE,
            dtype=dtype,
            kv_quant_mode=get_kv_quant_mode(self.cache),
        )
        return HopwellBackend.customize_spec(spec)

    def kv_cache(self) -> torch.Tensor:
        """Return the cache as vLLM gives it to a layer: [blocks, head slots, block_size, content] in ``order``."""
        spec = self.spec()
        width = spec.state_content_size_bytes // spec.dtype.itemsize
        slots = spec.num_head_slots or KV_HEADS
        inner = (slots, BLOCK) if self.order == "HND" else (BLOCK, slots)
        cache = torch.zeros(BLOCKS, *inner, width, dtype=spec.dtype)
        return cache if self.order == "HND" else cache.transpose(1, 2)

    def layer(self) -> types.SimpleNamespace:
        """Return what a layer of vLLM has for its implementation, and the implementation."""
        quantized = self.cache != "auto"
        scales = (Q_SCALE, K_SCALE, V_SCALE) if quantized else (1.0, 1.0, 1.0)
        layer = types.SimpleNamespace(num_heads=HEADS)
        layer._q_scale_float, layer._k_scale_float, layer._v_scale_float = scales
        layer._q_scale, layer._k_scale, layer._v_scale = map(torch.tensor, scales)
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            layer.impl = HopwellBackend.get_impl_cls()(
                HEADS,
                HEAD_SIZE,
                HEAD_SIZE**-0.5,
                KV_HEADS,
                reference.alibi_slopes(HEADS).tolist() if self.alibi else None,
                self.window,
                self.cache,
                self.soft_cap or None,
                sinks=self.sink,
            )
        finally:
            torch.set_default_dtype(default)
        layer.impl.process_weights_after_loading(self.dtype)
        return layer

    def common(self) -> CommonAttentionMetadata:
        lens = torch.tensor([kv for kv, _ in self.requests], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.starts,
            query_start_loc_cpu=self.starts,
            seq_lens=lens,
            num_reqs=len(self.requests),
            num_actual_tokens=self.rows,
            max_query_len=max(q for _, q in self.requests),
            max_seq_len=64,
            block_table_tensor=self.table,
            slot_mapping=self.new_slots(),
            causal=torch.tensor(self.causal) if isinstance(self.causal, list) else self.causal,
        )

    def new_slots(self) -> torch.Tensor:
        """Return the slots of the new tokens, and -1 for padding."""
        slots = [self.slots(index, kv - q, kv) for index, (kv, q) in enumerate(self.requests)]
        return torch.cat([*slots, torch.full((self.rows - self.tokens,), -1)])

    def new(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the keys or values of the new tokens, and NaN for padding."""
        rows = [one[kv - q :] for one, (kv, q) in zip(values, self.requests, strict=True)]
        padding = torch.full((self.rows - self.tokens, KV_HEADS, HEAD_SIZE), torch.nan, dtype=self.dtype)
        return torch.cat([*rows, padding])

    def fill(self, layer: types.SimpleNamespace, kv_cache: torch.Tensor) -> None:
        """Write the context of all requests, then the new tokens, as two steps of the engine."""
        for index, (kv, q) in enumerate(self.requests):
            if kv > q:
                old = self.key[index][: kv - q], self.value[index][: kv - q]
                layer.impl.do_kv_cache_update(layer, *old, kv_cache, self.slots(index, 0, kv - q))
        layer.impl.do_kv_cache_update(layer, self.new(self.key), self.new(self.value), kv_cache, self.new_slots())

    def layer_query(self, layer: types.SimpleNamespace) -> torch.Tensor:
        """Return the query as the layer hands it over: in e4m3 if the implementation asks for it."""
        if not layer.impl.supports_quant_query_input:
            return self.query
        return (self.query.float() / Q_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)

    def stored(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what the cache holds of keys or values."""
        if self.cache == "fp8":
            return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        if self.is_nvfp4:
            return dequantize_nvfp4(*quantize_nvfp4(values, scale)).double() * scale
        return values.double()

    def expected(self, layer: types.SimpleNamespace) -> torch.Tensor:
        """Return the output of the real tokens in float64."""
        query = self.layer_query(layer).double()
        if query.dtype != self.query.dtype and layer.impl.supports_quant_query_input:
            query = query * Q_SCALE
        results = []
        for index, (kv, q) in enumerate(self.requests):
            causal = self.causal[index] if isinstance(self.causal, list) else self.causal
            kind = MaskKind.SLIDING_WINDOW if self.window else MaskKind.CAUSAL if causal else MaskKind.FULL
            seen = reference.visible(q, kv, Mask(kind, (self.window or 0) - 1), torch.device("cpu"))
            rows = query[int(self.starts[index]) : int(self.starts[index + 1])]
            key, value = self.stored(self.key[index], K_SCALE), self.stored(self.value[index], V_SCALE)
            if not self.reads_new_tokens:
                key[kv - q :], value[kv - q :] = self.key[index][kv - q :], self.value[index][kv - q :]
            score = Score.capped(self.soft_cap, has_slopes=self.alibi)
            results.append(reference.attention(rows, key, value, HEAD_SIZE**-0.5, seen, self.sink, score=score)[0])
        return torch.cat(results)

    def builder(self, layer: types.SimpleNamespace) -> HopwellMetadataBuilder:
        return HopwellMetadataBuilder(self.spec(), ["layer"], config({"layer": layer}, self.dtype), torch.device("cpu"))


def config(layers: dict[str, types.SimpleNamespace], dtype: torch.dtype) -> types.SimpleNamespace:
    """Return the parts of a VllmConfig that builders read."""
    speculative = types.SimpleNamespace(num_speculative_tokens=DRAFT - 1, parallel_drafting=False)
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(cp_kv_cache_interleave_size=1),
        compilation_config=types.SimpleNamespace(static_forward_context=layers),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8),
        model_config=types.SimpleNamespace(dtype=dtype, max_model_len=128),
        speculative_config=speculative,
        use_v2_model_runner=True,
    )


def run(batch: Batch, out_dtype: torch.dtype | None = None, output_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Write a batch into a cache, compute its attention as vLLM's layer does, and return all rows."""
    layer, kv_cache = batch.layer(), batch.kv_cache()
    batch.fill(layer, kv_cache)
    meta = batch.builder(layer).build(0, batch.common())
    out = torch.full((batch.rows, HEADS, HEAD_SIZE), 7.0, dtype=batch.dtype).to(out_dtype or batch.dtype)
    query = batch.layer_query(layer)
    layer.impl.forward(layer, query, batch.new(batch.key), batch.new(batch.value), kv_cache, meta, out, output_scale)
    return out
