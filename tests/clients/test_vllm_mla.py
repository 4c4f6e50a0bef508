"""The backends HOPWELL_MLA and HOPWELL for MLA prefill, beside float64. Environments: vllm-0.32, vllm-newest."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

import torch
from helpers.oracles import reference
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from hopwell.integrations.vllm import mla_sparse
from hopwell.integrations.vllm.mla import HopwellMLAImpl, HopwellMLAMetadataBuilder
from hopwell.integrations.vllm.mla_prefill import HopwellMLAPrefillBackend
from hopwell.kernels.masks import MaskKind
from hopwell.kernels.problem import Mask
from hopwell.layouts.mla_rows import dequantize_fp8_ds_mla, quantize_fp8_ds_mla

pytestmark = pytest.mark.clients

HEADS, LATENT, ROTARY, BLOCK, BLOCKS = 4, 512, 64, 16, 8
SCALE, Q_SCALE, K_SCALE = 192**-0.5, 0.5, 0.25
REQUESTS = {"decode": [(23, 1), (40, 1), (5, 1)], "ragged": [(23, 3), (40, 1), (5, 2)]}
CPU = torch.device("cpu")


def impl(
    cache: str, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, rank: int = 0, kind: type = HopwellMLAImpl
) -> Any:
    config = types.SimpleNamespace(parallel_config=types.SimpleNamespace(decode_context_parallel_size=ranks))
    sizes: dict[str, Any] = dict(kv_lora_rank=LATENT, qk_nope_head_dim=128, qk_rope_head_dim=ROTARY, qk_head_dim=192)
    others: dict[str, Any] = dict(q_lora_rank=None, v_head_dim=128, kv_b_proj=None)
    with monkeypatch.context() as patch:
        patch.setattr(mla_attention, "get_current_vllm_config", lambda: config)
        patch.setattr("vllm.distributed.parallel_state.get_dcp_world_size_and_rank", lambda *_: (ranks, rank))
        patch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
        patch.setattr(sparse_mla_attention, "get_tensor_model_parallel_world_size", lambda: 1)
        return kind(HEADS, LATENT + ROTARY, SCALE, 1, None, None, cache, None, "decoder", None, **sizes, **others)


def stored(rows: torch.Tensor, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as a cache holds them, and their values in float64."""
    if cache == "fp8":
        eight = (rows.float() / K_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        return eight, eight.double() * K_SCALE
    if cache == "fp8_ds_mla":
        packed = quantize_fp8_ds_mla(rows[..., :LATENT], rows[..., LATENT:])
        return packed, dequantize_fp8_ds_mla(packed).double()
    return rows, rows.double()


def decode(
    layer: HopwellMLAImpl, query: torch.Tensor, cache: torch.Tensor, table: Any, lens: Any, starts: Any, total: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    builder = types.SimpleNamespace(workspace=torch.empty(0, dtype=torch.uint8))
    longest = int((starts[1:] - starts[:-1]).max())
    metadata = HopwellMLAMetadataBuilder._build_decode(
        builder, table, lens, 64, starts, starts, query.shape[0], longest, total
    )
    scales = types.SimpleNamespace(_q_scale_float=Q_SCALE, _k_scale_float=K_SCALE)
    given: Any = query
    if layer.supports_quant_query_input:
        given = (query.float() / Q_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
    elif layer.dcp_world_size == 1:
        given = query[..., :LATENT], query[..., LATENT:]
    return layer.forward_mqa(given, cache, types.SimpleNamespace(decode=metadata), scales)


class Latent:
    """Requests with random latent keys."""

    def __init__(self, kind: str, cache: str) -> None:
        torch.manual_seed(len(kind))
        self.requests = REQUESTS[kind]
        self.starts = torch.tensor([0, *[q for _, q in self.requests]]).cumsum(0).int()
        self.query = torch.randn(int(self.starts[-1]), HEADS, LATENT + ROTARY, dtype=torch.bfloat16)
        self.keys = [stored(torch.randn(kv, LATENT + ROTARY, dtype=torch.bfloat16), cache) for kv, _ in self.requests]
        self.lens = torch.tensor([kv for kv, _ in self.requests], dtype=torch.int32)

    def cache(self, first: int = 0, step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a cache with every ``step``-th key of each request, and its block table."""
        rows = self.keys[0][0]
        pool = torch.zeros(BLOCKS, BLOCK, rows.shape[-1], dtype=rows.dtype)
        table, pages = torch.full((len(self.keys), 4), -1, dtype=torch.int32), iter((5, 2, 7, 0, 3, 6, 1))
        for request, (rows, _) in enumerate(self.keys):
            for place, start in enumerate(range(0, len(rows[first::step]), BLOCK)):
                table[request, place] = page = next(pages)
                block = rows[first::step][start : start + BLOCK]
                pool[page, : len(block)] = block
        return pool, table

    def expected(self, eight_bit_query: bool) -> tuple[torch.Tensor, torch.Tensor]:
        query = self.query.double()
        if eight_bit_query:
            query = (self.query.float() / Q_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn).double() * Q_SCALE
        results = []
        for index, (kv, q) in enumerate(self.requests):
            key = self.keys[index][1][:, None]
            seen = reference.visible(q, kv, Mask(MaskKind.CAUSAL), CPU)
            rows = query[int(self.starts[index]) : int(self.starts[index + 1])]
            results.append(reference.attention(rows, key, key[..., :LATENT], SCALE, seen))
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("kind", REQUESTS)
def test_decodes(kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, layer = Latent(kind, cache), impl(cache, monkeypatch)
    out, lse = decode(layer, batch.query, *batch.cache(), batch.lens, batch.starts, None)
    assert lse is None
    tolerance = 0.05 if cache == "fp8" else 0.01
    expected, _ = batch.expected(layer.supports_quant_query_input)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def global_rows(requests: Any, table: Any, chosen: Any, BLOCK_SIZE: int, NUM_TOPK_TOKENS: int) -> Any:  # noqa: N803
    """Do the work of vLLM's Triton kernel: find the rows of the cache of each token's chosen keys."""
    pages = table[requests.long()].gather(1, (chosen.clamp(min=0) // BLOCK_SIZE).long())
    return torch.where(chosen < 0, -1, pages * BLOCK_SIZE + chosen % BLOCK_SIZE).int()


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_sparse_layers_see_the_chosen_keys(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, layer = Latent("ragged", cache), impl(cache, monkeypatch, kind=mla_sparse.HopwellMLASparseImpl)
    monkeypatch.setattr(mla_sparse, "triton_convert_req_index_to_global_index", global_rows)
    pool, table = batch.cache()
    owner = torch.tensor([0, 0, 0, 1, 2, 2], dtype=torch.int32)
    layer.topk_indices_buffer = torch.full((8, 8), -1, dtype=torch.int32)
    expected = []
    for token, request in enumerate(owner.tolist()):
        keys = batch.keys[request][1]
        seen = torch.randperm(len(keys))[: 3 + token % 3]
        layer.topk_indices_buffer[token, 1 : 1 + len(seen)] = seen.int()
        row, everything = keys[seen][:, None], torch.ones(1, len(seen), dtype=torch.bool)
        query = batch.query[token : token + 1].double()
        expected.append(reference.attention(query, row, row[..., :LATENT], SCALE, everything)[0])
    metadata = types.SimpleNamespace(req_id_per_token=owner, block_table=table, block_size=BLOCK)
    out, lse = layer.forward_mqa((batch.query[..., :LATENT], batch.query[..., LATENT:]), pool, metadata, None)
    assert lse is None
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("kind", REQUESTS)
def test_two_dcp_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, parts = Latent(kind, "auto"), []
    for rank in (0, 1):
        layer = impl("auto", monkeypatch, 2, rank)
        lens = get_dcp_local_seq_lens(batch.lens, 2, rank, 1)
        parts.append(decode(layer, batch.query, *batch.cache(rank, 2), lens, batch.starts, batch.lens))
    lses = torch.stack([lse.double() for _, lse in parts])
    total = torch.logsumexp(lses, 0)
    merged = sum(torch.exp(lse - total)[..., None] * out.double() for lse, (out, _) in zip(lses, parts, strict=True))
    expected, expected_lse = batch.expected(False)
    torch.testing.assert_close(merged, expected, atol=0.01, rtol=0.01)
    torch.testing.assert_close(total, expected_lse, atol=0.01, rtol=0.01)


def test_prefill_of_new_tokens_and_of_context() -> None:
    backend = HopwellMLAPrefillBackend(HEADS, SCALE, LATENT, 128, ROTARY, 128, None)
    starts = torch.tensor([0, 9, 14], dtype=torch.int32)
    context = torch.tensor([0, 20, 20], dtype=torch.int32)
    torch.manual_seed(1)
    query, key = (torch.randn(n, HEADS, 192, dtype=torch.bfloat16) for n in (14, 20))
    new = torch.randn(14, HEADS, 192, dtype=torch.bfloat16)
    # V is a slice of what one projection returns.
    new_value, value = (torch.randn(n, HEADS, 256, dtype=torch.bfloat16)[..., 128:] for n in (14, 20))
    backend.prepare_metadata(types.SimpleNamespace(query_start_loc=starts, max_query_len=9))
    out = torch.zeros(14, HEADS, 128, dtype=torch.bfloat16)
    assert backend.run_prefill_new_tokens(query, new, new_value, False, out=out) is out
    for first, last in ((0, 9), (9, 14)):
        part = slice(first, last)
        seen = reference.visible(last - first, last - first, Mask(MaskKind.CAUSAL), CPU)
        expected, _ = reference.attention(query[part], new[part], new_value[part], SCALE, seen)
        torch.testing.assert_close(out[part].double(), expected, atol=0.01, rtol=0.01)
    chunk = types.SimpleNamespace(query_start_loc=starts, max_query_len=9, cu_seq_lens=context, max_seq_len=20)
    out, lse = backend.run_prefill_context_chunk(chunk, query, key, value)
    seen = torch.ones(9, 20, dtype=torch.bool)
    expected, expected_lse = reference.attention(query[:9], key, value, SCALE, seen)
    torch.testing.assert_close(out[:9].double(), expected, atol=0.01, rtol=0.01)
    torch.testing.assert_close(lse[:, :9].double(), expected_lse.t(), atol=0.01, rtol=0.01)
    assert not out[9:].any()
    assert lse.shape == (HEADS, 14)
    assert lse.is_contiguous()
    assert (lse[:, 9:] == -torch.inf).all()
