"""hopwell as SGLang's attention. Environments: sglang-oldest, sglang-newest."""

from __future__ import annotations

import json
import logging
import os
import pathlib
import subprocess
import sys
import types
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip(
    "tests.clients.sglang_engine",
    reason="runs in the environments sglang-oldest and sglang-newest of environments.toml",
)

import torch
from helpers.oracles import reference

import hopwell
from hopwell.integrations import sglang as plugin
from hopwell.integrations.sglang.gqa import HopwellAttnBackend
from hopwell.integrations.sglang.mla import HopwellMLABackend
from hopwell.kernels.masks import MaskKind
from hopwell.kernels.problem import Mask
from tests.clients import sglang_batches, sglang_engine
from tests.clients.sglang_batches import FP8, HEAD_DIM, HEADS, Batch, Pool, WindowPool
from tests.clients.tiny_models import GQA, MLA, TIE, first_difference, save

pytestmark = pytest.mark.clients

DEEPSEEK = dict(
    MLA,
    moe_layer_freq=1,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=2.0,
        original_max_position_embeddings=64,
        mscale=1.0,
        mscale_all_dim=1.0,
        beta_fast=32,
        beta_slow=1,
    ),
)
# Model, sizes, backend, and the tokens of each prompt that are a batch of their own, or "engine".
MODELS: dict[str, tuple[str, dict[str, Any], str, int | str]] = {
    "Llama": ("Llama", GQA, "hopwell", 0),
    "Llama with a cached prefix": ("Llama", GQA, "hopwell", 4),
    "DeepSeek V2": ("DeepseekV2", DEEPSEEK, "hopwell", 0),
    "Llama in an Engine": ("Llama", GQA, "hopwell", "engine"),
    "DeepSeek V2 in an Engine": ("DeepseekV2", DEEPSEEK, "hopwell", "engine"),
}


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_model_s(name: str, tmp_path: pathlib.Path) -> None:
    kind, sizes, backend, first = MODELS[name]
    model = save(tmp_path, kind, **sizes)
    command = [sys.executable, sglang_engine.__file__, str(tmp_path), backend, str(first)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = json.loads(done.stdout.splitlines()[-1])
    assert all(len(one) == sglang_engine.NEW_TOKENS for one in tokens)
    prompts = sglang_engine.PROMPTS * (1 + (first == "engine"))
    differences = [first_difference(model, prompt, one) for prompt, one in zip(prompts, tokens, strict=True)]
    assert all(steps is None or steps <= TIE for steps in differences), differences


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window, e4m3 cache, sinks": dict(window=7, cache=FP8, sinks=True),
    "soft cap": dict(cap=5.0),
    "192/128": dict(dims=(192, 128)),
}
CASES = [
    (kind, feature)
    for kind in sglang_batches.REQUESTS
    for feature in FEATURES
    if kind not in sglang_batches.VERIFIES or feature == "plain"
]


@pytest.mark.parametrize(("kind", "feature"), CASES)
def test_batches(kind: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = FEATURES[feature]
    cache, window = given.get("cache", torch.bfloat16), given.get("window", -1)
    dims = given.get("dims", (HEAD_DIM, HEAD_DIM))
    layer = sglang_batches.layer(
        window, given.get("cap", 0.0), scales=cache is FP8, head_dim=dims[0], v_head_dim=dims[1]
    )
    pool = (Pool if window < 0 else WindowPool)(cache, dims)
    runner = sglang_batches.runner(monkeypatch, pool, layer, cache, topk=1 + (kind == "tree"))
    batch = Batch(kind, runner.req_to_token_pool.req_to_token, dims=dims)
    sinks = torch.linspace(-1, 2, HEADS) if given.get("sinks") else None
    backend = HopwellAttnBackend(runner)
    assert backend.decodes
    out = run(backend, batch, layer, pool, sinks)
    torch.testing.assert_close(out.double(), batch.expected(layer, pool, sinks), atol=0.01, rtol=0.01)


def run(backend: Any, batch: Batch, layer: Any, pool: Any, sinks: Any = None, graph: bool = False) -> torch.Tensor:
    """Store the cached tokens, and return what the backend computes for the new ones."""
    cached = batch.tokens(batch.slots, new=False)
    if isinstance(pool, WindowPool):
        cached = pool.translate_loc_from_full_to_swa(cached)
    pool.store(cached, batch.tokens(batch.key, False), batch.tokens(batch.value, False), layer.k_scale, layer.v_scale)
    forward_batch = batch.forward_batch()
    if graph:
        backend.init_forward_metadata_out_graph(forward_batch)
        backend.init_forward_metadata_in_graph(forward_batch)
    else:
        backend.init_forward_metadata(forward_batch)
    keys, values = batch.tokens(batch.key, True), batch.tokens(batch.value, True)
    padding = 0 if batch.kind != "mixed" else 2
    query = torch.cat([batch.query, torch.ones(padding, HEADS, batch.dims[0]).bfloat16()]).flatten(1)
    more = {} if sinks is None else dict(sinks=sinks)
    out = backend.forward(query, keys, values, layer, forward_batch, **more)
    assert not out[len(batch.query) :].any()
    return out[: len(batch.query)]


@pytest.mark.parametrize("kind", ["decode", "verify", "tree"])
def test_metadata_of_a_graph_replays_other_lengths(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pool = sglang_batches.layer(), Pool(torch.bfloat16)
    runner = sglang_batches.runner(monkeypatch, pool, layer, torch.bfloat16, topk=1 + (kind == "tree"))
    backend = HopwellAttnBackend(runner)
    backend.init_cuda_graph_state(4, 16)
    table = runner.req_to_token_pool.req_to_token
    captured = Batch(kind, table).forward_batch()
    captured.seq_lens = torch.full_like(captured.seq_lens, backend.get_cuda_graph_seq_len_fill_value())
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    addresses = [backend.forward_metadata.seq_lens.data_ptr(), backend.forward_metadata.block_table.data_ptr()]
    batch = Batch(kind, table, seed=1)
    mask = backend.verify_mask
    assert (mask.fits(4), mask.fits(5), mask.is_read) == (True, False, kind == "tree")
    assert mask.mode is sglang_batches.backend.TreeMaskMode.QLEN_ONLY
    if kind == "tree":  # as SGLang's draft worker does
        backend.verify_mask.buffer[: sglang_batches.TREES.numel()] = sglang_batches.TREES.flatten()
    out = run(backend, batch, layer, pool, graph=True)
    metadata = backend.forward_metadata
    assert addresses == [metadata.seq_lens.data_ptr(), metadata.block_table.data_ptr()]
    torch.testing.assert_close(out.double(), batch.expected(layer, pool), atol=0.01, rtol=0.01)


def test_a_tree_that_is_ready_after_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, pool = sglang_batches.layer(), Pool(torch.bfloat16)
    runner = sglang_batches.runner(monkeypatch, pool, layer, torch.bfloat16, topk=2)
    backend = HopwellAttnBackend(runner)
    assert not backend.verify_mask.fits(1)
    assert backend.max_context_len == sglang_batches.CONTEXT  # SGLang's bound of a mask that it allocates
    forward_batch = Batch("tree", runner.req_to_token_pool.req_to_token).forward_batch()
    ready = forward_batch.spec_info.custom_mask
    forward_batch.spec_info.custom_mask = torch.zeros_like(ready)
    backend.init_forward_metadata(forward_batch)
    forward_batch.spec_info.custom_mask = ready
    backend.update_verify_buffers_to_fill_after_draft(forward_batch.spec_info, None)
    assert torch.equal(backend.forward_metadata.draft_mask, hopwell.decode.pack_mask(sglang_batches.TREES))
    # A step without drafts verifies one token, which needs no mask.
    forward_batch.spec_info.draft_token_num = 1
    backend.init_forward_metadata(forward_batch)
    assert backend.forward_metadata.draft_mask is None


def test_trees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for match, layer, given in (
        ("trees of drafts .* of NGRAM", {}, dict(algorithm="NGRAM")),
        ("with deterministic inference", {}, dict(deterministic=True)),
        ("with sliding windows", dict(window=7), {}),
        ("with logit_cap", dict(cap=5.0), {}),
        ("with head dims without decode kernels", dict(head_dim=72), {}),
    ):
        one = sglang_batches.layer(**layer)
        runner = sglang_batches.runner(monkeypatch, Pool(torch.bfloat16), one, torch.bfloat16, topk=2, **given)
        with pytest.raises(NotImplementedError, match=match):
            HopwellAttnBackend(runner)
    with pytest.raises(NotImplementedError, match=r"trees of drafts .* with MLA"):
        mla(monkeypatch, Pool(torch.bfloat16), topk=2)


LATENT, ROPE, NOPE, V_DIM = 512, 64, 128, 128


def mla(monkeypatch: pytest.MonkeyPatch, pool: Any, **given: Any) -> tuple[HopwellMLABackend, Any, Any]:
    """Return the MLA backend, its absorbed layer and its ragged layer."""
    absorbed = sglang_batches.layer(num_kv_heads=1, head_dim=LATENT + ROPE, v_head_dim=LATENT)
    ragged = sglang_batches.layer(num_kv_heads=HEADS, head_dim=NOPE + ROPE, v_head_dim=V_DIM)
    dims = dict(qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, kv_lora_rank=LATENT, v_head_dim=V_DIM)
    runner = sglang_batches.runner(monkeypatch, pool, absorbed, torch.bfloat16, **dims, **given)
    return HopwellMLABackend(runner), absorbed, ragged


def test_absorbed_attention_behind_a_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.full((sglang_batches.PAGES * sglang_batches.PAGE, 1, LATENT + ROPE), float("nan")).bfloat16()
    pool = types.SimpleNamespace(
        get_key_buffer=lambda layer_id: rows,
        set_mla_kv_buffer=lambda layer, where, k, k_rope: rows.index_put_((where.loc,), torch.cat([k, k_rope], -1)),
    )
    backend, layer, _ = mla(monkeypatch, pool)
    batch = Batch("mixed", sglang_batches.table())
    latent = [torch.randn(n, 1, LATENT + ROPE).bfloat16() for n, _ in batch.requests]
    rows[batch.tokens(batch.slots, new=False)] = batch.tokens(latent, new=False)
    query = torch.randn(sum(batch.new), HEADS, LATENT + ROPE).bfloat16()
    forward_batch, new = batch.forward_batch(), batch.tokens(latent, new=True)
    backend.init_forward_metadata(forward_batch)
    parts: dict[str, Any] = dict(q_rope=query[..., LATENT:], k_rope=new[..., LATENT:])
    q, k = query[..., :LATENT].contiguous(), new[..., :LATENT]
    out = backend.forward(q, k, k, layer, forward_batch, **parts)
    expected = [
        reference.attention(
            rows_of.double(), keys.double(), keys[..., :LATENT].double(), layer.scaling, seen(count, len(keys)), None
        )[0]
        for rows_of, keys, count in zip(query.split(batch.new), latent, batch.new, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat(expected).flatten(1), atol=0.01, rtol=0.01)


def test_ragged_attention_with_a_prefix_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, layer = mla(monkeypatch, Pool(torch.bfloat16))
    batch = Batch("mixed", sglang_batches.table())
    query = torch.randn(sum(batch.new), HEADS, NOPE + ROPE).bfloat16()
    keys, values = ([torch.randn(n, HEADS, dim).bfloat16() for n, _ in batch.requests] for dim in (NOPE + ROPE, V_DIM))
    forward_batch = batch.forward_batch()
    backend.init_forward_metadata(forward_batch)
    forward_batch.mha_return_lse, forward_batch.attn_attend_prefix_cache = True, False
    own = backend.forward(
        query, batch.tokens(keys, True), batch.tokens(values, True), layer, forward_batch, save_kv_cache=False
    )
    cached = torch.tensor(forward_batch.extend_prefix_lens_cpu)
    forward_batch.attn_attend_prefix_cache, forward_batch.prefix_chunk_idx = True, 0
    forward_batch.prefix_chunk_cu_seq_lens = torch.nn.functional.pad(cached.cumsum(0), (1, 0)).int()[None]
    forward_batch.prefix_chunk_max_seq_lens = [int(cached.max())]
    prefix = backend.forward(
        query, batch.tokens(keys, False), batch.tokens(values, False), layer, forward_batch, save_kv_cache=False
    )
    weights = torch.softmax(torch.stack([own[1], prefix[1]]).double(), 0)[..., None]
    out = weights[0] * own[0].double() + weights[1] * prefix[0].double()
    expected = [
        reference.attention(q.double(), k.double(), v.double(), layer.scaling, seen(n, len(k)), None)[0]
        for q, k, v, n in zip(query.split(batch.new), keys, values, batch.new, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(expected), atol=0.01, rtol=0.01)


def seen(new: int, keys: int) -> Any:
    """Return which keys each new token sees under a causal mask."""
    return reference.visible(new, keys, Mask(MaskKind.CAUSAL, 0), torch.device("cpu"))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(torch.bfloat16)

    def refused(match: str, layer: Any = None, kv_dtype: Any = torch.bfloat16, **given: Any) -> None:
        runner = sglang_batches.runner(monkeypatch, pool, layer or sglang_batches.layer(), kv_dtype, **given)
        with pytest.raises(NotImplementedError, match=match):
            HopwellAttnBackend(runner)

    refused("kv_cache_dtype=torch.float8_e5m2", kv_dtype=torch.float8_e5m2)
    refused("encoder-decoder models", is_encoder_decoder=True)
    refused("attn_type=", sglang_batches.layer(attn_type=sglang_batches.backend.AttentionType.ENCODER_ONLY))
    refused("use_irope", sglang_batches.layer(use_irope=True))
    refused("no kernel on sm_90a for layer 0 with head_dim=260", sglang_batches.layer(head_dim=260))
    refused("multiples of 16 with a cache of .*, got 72 in", sglang_batches.layer(head_dim=72), kv_dtype=FP8)
    refused("logit_cap=5", sglang_batches.layer(cap=5.0), kv_dtype=FP8)
    runner = sglang_batches.runner(monkeypatch, pool, sglang_batches.layer(), torch.bfloat16)
    backend = HopwellAttnBackend(runner)
    batch = Batch("decode", runner.req_to_token_pool.req_to_token).forward_batch()
    backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="keywords idx_q"):
        backend.forward_decode(None, None, None, sglang_batches.layer(), batch, idx_q=1)


def test_the_entry_point_registers_the_backend_and_may_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setattr("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS", dict(ATTENTION_BACKENDS))
    (entry,) = [one for one in metadata.entry_points(group="sglang.srt.plugins") if one.name == "hopwell"]
    register = entry.load()
    register()
    register()
    for names in (choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES):
        assert names.count(plugin.NAME) == 1
    monkeypatch.setenv("HOPWELL_SGLANG_REPLACE", "trtllm_mha, trtllm_mla")
    register()
    from sglang.srt.layers.attention import attention_registry

    factories = [attention_registry.ATTENTION_BACKENDS[name] for name in plugin.REPLACEABLE]
    assert {factory.__module__ for factory in factories} == {plugin.__name__}
    monkeypatch.setenv("HOPWELL_SGLANG_REPLACE", "fa3")
    with pytest.raises(ValueError, match=r"HOPWELL_SGLANG_REPLACE must be none or .* got 'fa3'"):
        register()


@pytest.mark.parametrize(("version", "registers"), [("0.5.21", False), ("0.6.0", True)])
def test_an_sglang_outside_the_range_gets_a_warning(
    version: str, registers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backends: dict[str, Any] = {}
    monkeypatch.setattr("sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS", backends)
    monkeypatch.setattr(plugin.metadata, "version", lambda name: version)
    with caplog.at_level(logging.WARNING, plugin.__name__):
        plugin.register()
    assert list(backends) == ([plugin.NAME] if registers else [])
    (warning,) = caplog.messages
    assert "tested with SGLang 0.5.22 to 0.5.23" in warning
    assert version in warning
