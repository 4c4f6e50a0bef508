"""Layers of the backend HOPWELL with other features, beside float64. Environments: vllm-0.32, vllm-newest."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

import torch
import vllm.envs
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from hopwell.integrations.vllm import backend, dcp
from tests.clients import vllm_batches
from tests.clients.vllm_batches import BLOCK, HEAD_SIZE, HEADS, KV_HEADS, Batch, run

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("given", [dict(soft_cap=5.0), dict(alibi=True), dict(soft_cap=5.0, window=7)])
def test_biased_scores(given: dict[str, Any], kind: str) -> None:
    batch = Batch(kind, **given)
    out = run(batch)
    torch.testing.assert_close(out.double(), batch.expected(batch.layer()), atol=0.01, rtol=0.01)


@pytest.mark.parametrize("kind", ["mixed", "ragged"])
def test_an_e4m3_output_is_scaled(kind: str) -> None:
    batch, scale = Batch(kind, cache="fp8"), torch.tensor([0.02])
    assert batch.layer().impl.fused_output_quant_supported(kFp8StaticTensorSym)
    assert not batch.layer().impl.fused_output_quant_supported(kNvfp4Dynamic)
    assert not Batch(kind).layer().impl.fused_output_quant_supported(kFp8StaticTensorSym)
    out = run(batch, torch.float8_e4m3fn, scale).double() * scale.double()
    torch.testing.assert_close(out, batch.expected(batch.layer()), atol=0.06, rtol=0.13)


@pytest.mark.parametrize("kind", ["mixed", "decode", "ragged"])
def test_scales_of_each_kv_head(kind: str) -> None:
    """A KV head has the bits of a layer with its scales for all heads."""
    assert backend.HopwellBackend.supports_per_head_quant_scales()
    scales = dict(q=(0.5, 0.03), k=(0.25, 0.01), v=(0.125, 2.0))

    def outputs(chosen: dict[str, Any]) -> torch.Tensor:
        batch = Batch(kind, cache="fp8")
        layer = batch.layer()
        for name, scale in chosen.items():
            setattr(layer, f"_{name}_scale", torch.tensor(scale))
            setattr(layer, f"_{name}_scale_float", max(scale) if isinstance(scale, tuple) else scale)
        batch.layer = lambda: layer  # type: ignore[method-assign]
        return run(batch)[: batch.tokens].unflatten(1, (KV_HEADS, -1))

    found = outputs(scales)
    for head in range(KV_HEADS):
        one = outputs({name: scale[head] for name, scale in scales.items()})
        assert torch.equal(found[:, head], one[:, head])


def test_biased_layers_refuse_scales_of_each_kv_head() -> None:
    batch = Batch("mixed", soft_cap=5.0)
    layer = batch.layer()
    layer.impl._scales = torch.ones(KV_HEADS), torch.ones(KV_HEADS)
    batch.layer = lambda: layer  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="scales of each KV head with ALiBi or a soft cap"):
        run(batch)


def test_float16_models() -> None:
    batch = Batch("mixed", dtype=torch.float16)
    torch.testing.assert_close(run(batch).double(), batch.expected(batch.layer()), atol=0.002, rtol=0.002)


@pytest.mark.parametrize("kind", ["mixed", "ragged"])
def test_causal_masks_by_request(kind: str) -> None:
    batch = Batch(kind, causal=[True, False, False])
    torch.testing.assert_close(run(batch).double(), batch.expected(batch.layer()), atol=0.01, rtol=0.01)


def test_a_request_has_the_same_bits_in_every_batch_if_vllm_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(alone: bool) -> torch.Tensor:
        batch = Batch("mixed")
        if alone:
            batch.key, batch.value, batch.requests = batch.key[1:2], batch.value[1:2], batch.requests[1:2]
            batch.query, batch.table = batch.query[9:10], batch.table[1:2]
            batch.starts, batch.tokens, batch.rows = torch.tensor([0, 1], dtype=torch.int32), 1, 1
        return run(batch)[0 if alone else 9]

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    assert torch.equal(decoded(alone=True), decoded(alone=False))


def test_a_profiling_run_gets_zeros() -> None:
    layer, out = Batch().layer(), torch.full((3, HEADS, HEAD_SIZE), 7.0)
    layer.impl.forward(layer, out, None, None, torch.tensor([]), None, out)
    assert not out.any()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.bfloat16)
    with pytest.raises(NotImplementedError, match="ALiBi slopes"):
        make_impl(alibi_slopes=[0.5] * HEADS)
    with pytest.raises(NotImplementedError, match="hopwell on sm_90a has no kernel for head_size=260"):
        make_impl(head_size=260)
    with pytest.raises(NotImplementedError, match=r"head sizes must be multiples of 16 with a cache of .*, got 40"):
        make_impl(head_size=40, kv_cache_dtype="fp8")
    with pytest.raises(NotImplementedError, match="logits_soft_cap=5"):
        make_impl(logits_soft_cap=5.0, kv_cache_dtype="nvfp4")
    with pytest.raises(NotImplementedError, match="decoder layers, got attn_type=encoder"):
        make_impl(attn_type="encoder")
    batch = Batch("mixed", causal=False, window=7)
    with pytest.raises(NotImplementedError, match="non-causal attention with a sliding window"):
        run(batch)
    with pytest.raises(NotImplementedError, match="causal masks by request with ALiBi or a soft cap"):
        run(Batch("mixed", causal=[True, False, True], soft_cap=5.0))


def make_impl(head_size: int = HEAD_SIZE, **given: Any) -> Any:
    """Make the implementation of a layer."""
    return backend.HopwellBackend.get_impl_cls()(HEADS, head_size, 1.0, HEADS, **given)


class Ranks:
    """Two DCP ranks in one process: rank r has heads 2r and 2r + 1, and every second key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queries: torch.Tensor) -> None:
        self.rank, self.parts = 0, {}
        group = types.SimpleNamespace(all_gather=lambda query, dim: queries)
        monkeypatch.setattr(dcp, "get_dcp_group", lambda: group)
        monkeypatch.setattr(dcp, "cp_lse_ag_out_rs", self.combine)
        for module in ("vllm.distributed.parallel_state", backend.__name__):
            monkeypatch.setattr(f"{module}.get_dcp_world_size_and_rank", lambda *_: (2, self.rank))

    def combine(
        self, out: torch.Tensor, lse: torch.Tensor, group: Any, return_lse: bool, is_lse_base_on_e: bool
    ) -> Any:
        assert is_lse_base_on_e
        self.parts[self.rank] = out.double(), lse.double()
        parts = list(self.parts.values())
        lses = torch.stack([lse for _, lse in parts])
        total = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - total.clamp(min=-1e30))
        heads = slice(2 * self.rank, 2 * self.rank + 2)
        merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts, strict=True))[:, heads].to(out.dtype)
        return (merged, total[:, heads].float()) if return_lse else merged


@pytest.mark.parametrize("cache", ["auto", "fp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["mixed", "decode", "ragged"])
def test_two_dcp_ranks(kind: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_batches, "KV_HEADS", 1)
    whole = Batch(kind, cache=cache, reads_new_tokens=kind != "mixed")
    ranks = Ranks(monkeypatch, whole.query)
    for rank in (0, 1, 0):  # the first call of rank 0 has only its own part
        ranks.rank = rank
        monkeypatch.setattr(vllm_batches, "HEADS", 2)
        layer, kv_cache = whole.layer(), whole.kv_cache()
        layer.num_heads = 2
        key, value = whole.new(whole.key), whole.new(whole.value)
        for index, (kv, _) in enumerate(whole.requests):
            mine = torch.arange(rank, kv, 2)
            slots = whole.table[index, mine // 2 // BLOCK].long() * BLOCK + mine // 2 % BLOCK
            layer.impl.do_kv_cache_update(layer, whole.key[index][mine], whole.value[index][mine], kv_cache, slots)
        common = whole.common()
        common.dcp_local_seq_lens = get_dcp_local_seq_lens(common.seq_lens, 2, rank, 1)
        meta = whole.builder(layer).build(0, common)
        assert meta.decodes == (kind != "mixed")
        heads = slice(2 * rank, 2 * rank + 2)
        out = torch.zeros(whole.rows, 2, HEAD_SIZE, dtype=torch.bfloat16)
        layer.impl.forward(layer, whole.query[:, heads], key, value, kv_cache, meta, out)
    expected = whole.expected(layer)[:, heads]
    torch.testing.assert_close(out.double(), expected, atol=0.015, rtol=0.015)


@pytest.mark.parametrize(("head_size", "cache", "longest"), [(96, "fp8", 3), (128, "nvfp4", 3), (72, "auto", 0)])
def test_the_decode_entry_serves_decodes_of_its_head_sizes(
    head_size: int, cache: str, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_batches, "HEAD_SIZE", head_size)
    batch = Batch("ragged", cache=cache)
    builder = batch.builder(batch.layer())
    assert builder.decode_len == longest
    assert builder.build(0, batch.common()).decodes == (longest > 0)
    assert not builder.build(0, Batch("mixed", cache=cache).common()).decodes
