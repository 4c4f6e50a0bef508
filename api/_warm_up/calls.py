"""The calls that a serving engine makes of the entry points for one layer of a model.

The tensors have the dtypes, head dims, page size and numbers of new tokens of real calls, and as few elements as
possible. Lengths, tables and scales are valid, so the calls also pass ``HOPWELL_CHECK=1``. The entry points themselves
choose the kernels, so no rule of that choice is repeated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import hopwell
from hopwell._warm_up.model import LatentLayer, Layer
from hopwell.decode import xqa_workspace_bytes
from hopwell.layouts import FP8_DS_MLA_BYTES, NVFP4_BLOCK
from hopwell.mla import mla_workspace_bytes

FP8 = torch.float8_e4m3fn
MASK_BITS = 32  # a row of a draft mask is a whole number of 32-bit words, seen as uint16
# New tokens of a prefill request. The kernel depends on whether a request's queries fill a tile, of at most 256 rows.
PREFILL_TOKENS = (*range(1, 257), 512, 1024)

Call = tuple[str, Callable[[], Any]]  # a description, and the call
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Serving:
    """How an engine serves a model.

    Attributes:
        query: dtype of the queries as attention gets them.
        dtype: 16-bit dtype of the model, in which new keys and values come.
        kv: dtype of the cache; uint8 is NVFP4, and fp8_ds_mla under MLA.
        out: dtype of outputs except MLA's; uint8 is NVFP4, which prefill alone has.
        skip_softmax: whether prefill calls have a threshold of skip-softmax.
        page_size: tokens of a page.
        drafts: most draft tokens of a decode request.
        ranks: ranks that share the keys of a request (decode context parallel).
        device: of the calls.
    """

    query: torch.dtype
    dtype: torch.dtype
    kv: torch.dtype
    out: torch.dtype
    skip_softmax: bool
    page_size: int
    drafts: int
    ranks: int
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor on the device with any content."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def ints(self, *values: int) -> torch.Tensor:
        """Return int32 values on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def q_lens(self) -> range:
        """Numbers of new tokens of a decode request: one, and one with each number of drafts."""
        return range(1, self.drafts + 2)

    @property
    def wide_out(self) -> torch.dtype:
        """Dtype of outputs of functions without NVFP4 outputs."""
        return self.dtype if self.out == torch.uint8 else self.out

    @property
    def table(self) -> torch.Tensor:
        """Page table of one request with one page."""
        return self.ints(0).view(1, 1)


def calls_of(layer: Layer | LatentLayer, serving: Serving) -> Iterator[Call]:
    """Yield the calls of a layer."""
    if isinstance(layer, LatentLayer):
        yield from _latent_decode(layer, serving)
        yield from _latent_prefill(layer, serving)
        return
    if layer.soft_cap or layer.chunk or layer.alibi:
        yield from _fmha_v2(layer, serving)
    else:
        yield from _context(layer, serving)
        yield from _decode(layer, serving)
    yield from _append(layer, serving)


def _cache(layer: Layer, serving: Serving) -> tuple[Pair, Pair | None]:
    """Return K and V of one page (HND), and their block scales if they are NVFP4."""
    of = 1, layer.kv_heads, serving.page_size

    def pair(columns: int, dtype: torch.dtype) -> Pair:
        """Return tensors for K and V in which ``columns`` elements of a row take one place."""
        dims = layer.head_dim // columns, layer.v_head_dim // columns
        key, value = (torch.zeros(*of, dim, dtype=dtype, device=serving.device) for dim in dims)
        return key, value

    if serving.kv == torch.uint8:
        return pair(2, serving.kv), pair(NVFP4_BLOCK, FP8)
    return pair(1, serving.kv), None


def _request(layer: Layer, serving: Serving, q_len: int) -> dict[str, Any]:
    """Return the arguments that describe a request with ``q_len`` new tokens and one page."""
    return dict(
        workspace_buffer=serving.empty(1, dtype=torch.uint8),
        block_tables=serving.table,
        seq_lens=serving.ints(1),
        max_q_len=q_len,
        max_kv_len=serving.page_size,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        batch_size=1,
        cum_seq_lens_q=serving.ints(0, q_len),
        cum_seq_lens_kv=serving.ints(0, 1),
        window_left=layer.window_left,
    )


def _context(layer: Layer, serving: Serving) -> Iterator[Call]:
    cache, scales = _cache(layer, serving)
    orders: dict[str, str] = {"": "interleaved"} | ({} if scales is None else {" with linear scales": "linear"})
    for q_len, (order, v_scale_layout) in itertools.product(PREFILL_TOKENS, orders.items()):
        yield (
            f"prefill of {q_len} tokens{order}",
            partial(
                hopwell.trtllm_batch_context_with_kv_cache,
                query=serving.empty(q_len, layer.heads, layer.head_dim, dtype=serving.query),
                kv_cache=cache,
                **_request(layer, serving, q_len),
                out_dtype="nvfp4" if serving.out == torch.uint8 else serving.out,
                o_sf_scale=1.0 if serving.out == torch.uint8 else None,
                skip_softmax_threshold_scale_factor=1.0 if serving.skip_softmax else None,
                kv_layout="HND",
                kv_cache_sf=scales,
                v_scale_layout=v_scale_layout,
            ),
        )


def _fmha_v2(layer: Layer, serving: Serving) -> Iterator[Call]:
    """Yield prefill and decode calls of layers whose soft caps, chunks or slopes only this entry has."""
    cache: Any = _cache(layer, serving)[0]
    if layer.head_dim == layer.v_head_dim:
        cache = torch.stack(cache, 1)
    for q_len in PREFILL_TOKENS:
        yield (
            f"prefill or decode of {q_len} tokens",
            partial(
                hopwell.trtllm_fmha_v2_prefill,
                qkv=(
                    serving.empty(q_len, layer.heads, layer.head_dim, dtype=serving.query),
                    cache,
                ),
                input_layout="Q_PAGED_KV_HND",
                **_request(layer, serving, q_len),
                out_dtype=serving.wide_out,
                skip_softmax_threshold_scale_factor=float(serving.skip_softmax),
                pos_encoding_mode="alibi" if layer.alibi else None,
                logits_soft_cap_scale=layer.soft_cap or None,
                mask_mode="causal",
                chunked_attention_size=layer.chunk,
            ),
        )


def _decode(layer: Layer, serving: Serving) -> Iterator[Call]:
    cache, scales = _cache(layer, serving)
    sizes = layer.heads, layer.kv_heads, layer.v_head_dim, serving.page_size, serving.q_lens[-1]
    decode = partial(
        _with_workspace,
        serving,
        partial(xqa_workspace_bytes, *sizes),
        hopwell.trtllm_batch_decode_with_kv_cache,
        kv_cache=cache,
        block_tables=serving.table,
        max_seq_len=serving.page_size,
        window_left=layer.window_left,
        out_dtype=serving.wide_out,
        kv_layout="HND",
        kv_cache_sf=scales,
    )
    for q_len in serving.q_lens:
        query = serving.empty(q_len, layer.heads, layer.head_dim, dtype=serving.query)
        words = 2 * -(-q_len // MASK_BITS)
        lengths = serving.ints(min(q_len, serving.page_size))
        call = partial(decode, query=query, seq_lens=lengths, q_len_per_req=q_len)
        yield f"decode of {q_len} tokens", call
        if q_len > 1:
            mask = torch.zeros(1, q_len, words, dtype=torch.uint16, device=serving.device)
            yield f"decode of {q_len} tokens with a draft mask", partial(call, mask=mask)
            ragged = dict(max_q_len=q_len, cum_seq_lens_q=serving.ints(0, q_len))
            yield f"decode of up to {q_len} tokens", partial(call, **ragged)
        if serving.ranks > 1:
            yield f"decode of {q_len} tokens on {serving.ranks} ranks", partial(call, **_rank(serving, lengths))


def _with_workspace(serving: Serving, size: Callable[..., int], entry: Callable[..., Any], **arguments: Any) -> None:
    """Call an entry with a workspace that is large enough, so that it allocates none that stays."""
    workspace = serving.empty(size(device=serving.device), dtype=torch.uint8)
    entry(workspace_buffer=workspace, **arguments)


def _rank(serving: Serving, lengths: torch.Tensor) -> dict[str, Any]:
    return dict(cp_world=serving.ranks, cp_rank=0, causal_seqlens_kv_global=lengths * serving.ranks, return_lse=True)


def _append(layer: Layer, serving: Serving) -> Iterator[Call]:
    cache, scales = _cache(layer, serving)
    append = partial(
        hopwell.append_paged_kv_cache,
        append_key=serving.empty(1, layer.kv_heads, layer.head_dim, dtype=serving.dtype),
        append_value=serving.empty(1, layer.kv_heads, layer.v_head_dim, dtype=serving.dtype),
        batch_indices=serving.ints(0),
        positions=serving.ints(0),
        paged_kv_cache=cache,
        kv_indices=None,
        kv_indptr=None,
        kv_last_page_len=None,
        kv_layout="HND",
        block_tables=serving.table,
    )
    if scales is None:
        yield "append", append
        return
    for layout in ("linear", "interleaved"):
        yield f"append with {layout} scales", partial(append, kv_cache_sf=scales, v_scale_layout=layout)


def _latent_decode(layer: LatentLayer, serving: Serving) -> Iterator[Call]:
    width = layer.kv_lora_rank + layer.qk_rope_head_dim
    row = FP8_DS_MLA_BYTES if serving.kv == torch.uint8 else width
    most, top_k = serving.q_lens[-1], layer.top_k
    decode = partial(
        _with_workspace,
        serving,
        partial(mla_workspace_bytes, layer.heads, max(serving.page_size, top_k), most, layer.kv_lora_rank),
        hopwell.trtllm_batch_decode_with_kv_cache_mla,
        kv_cache=serving.empty(1, serving.page_size, row, dtype=serving.kv),
        qk_nope_head_dim=layer.qk_nope_head_dim,
        kv_lora_rank=layer.kv_lora_rank,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        max_seq_len=serving.page_size,
        sparse_mla_top_k=top_k,
    )
    for q_len in serving.q_lens:
        query = serving.empty(1, q_len, layer.heads, width, dtype=serving.query)
        lengths = serving.ints(min(q_len, serving.page_size))
        indices = torch.zeros(1, q_len, top_k, dtype=torch.int32, device=serving.device)
        call = partial(decode, query=query, seq_lens=lengths, block_tables=indices if top_k else serving.table)
        yield f"decode of {q_len} tokens", call
        if q_len > 1 and not top_k:
            # Requests with fewer new tokens than the bound: the kernel depends on the mean number.
            for tokens in (q_len, 1):
                ragged = dict(query=query[0, :tokens], max_q_len=q_len, cum_seq_lens_q=serving.ints(0, tokens))
                yield f"decode of up to {q_len} tokens", partial(call, **ragged)
        if serving.ranks > 1:
            rank = dict(enable_dcp=True, **_rank(serving, lengths))
            yield f"decode of {q_len} tokens on {serving.ranks} ranks", partial(call, **rank)


def _latent_prefill(layer: LatentLayer, serving: Serving) -> Iterator[Call]:
    """Yield prefill calls of K and V before absorption: new tokens among themselves, and over a chunk of older keys."""
    dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    for q_len in PREFILL_TOKENS:
        query, key = (serving.empty(q_len, layer.heads, dim, dtype=serving.dtype) for _ in "qk")
        value = serving.empty(q_len, layer.heads, layer.v_head_dim, dtype=serving.dtype)
        for causal in (True, False):
            yield (
                f"prefill of {q_len} tokens",
                partial(
                    hopwell.cudnn_batch_prefill_with_kv_cache,
                    query,
                    key,
                    value,
                    1.0,
                    serving.empty(1, dtype=torch.uint8),
                    max_token_per_sequence=q_len,
                    max_sequence_kv=q_len,
                    actual_seq_lens_q=None,
                    actual_seq_lens_kv=None,
                    causal=causal,
                    return_lse=True,
                    batch_offsets_q=serving.ints(0, q_len),
                    batch_offsets_k=serving.ints(0, q_len),
                    batch_offsets_units="tokens",
                ),
            )
