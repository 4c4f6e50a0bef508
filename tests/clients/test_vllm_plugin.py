"""Registration of hopwell's backends in vLLM, and their answers to vLLM. Environments: vllm-0.32, vllm-newest."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("vllm", reason="runs in the environments vllm-0.32 and vllm-newest of environments.toml")

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import hopwell
from hopwell.integrations import vllm as plugin
from hopwell.integrations.vllm import caches, capability
from hopwell.integrations.vllm.backend import HopwellBackend, HopwellMetadataBuilder
from hopwell.integrations.vllm.mla import HopwellMLABackend
from hopwell.integrations.vllm.mla_prefill import HopwellMLAPrefillBackend
from hopwell.integrations.vllm.mla_sparse import HopwellMLASparseBackend
from tests.clients.vllm_batches import HEADS, KV_HEADS

pytestmark = pytest.mark.clients

ARCHS = ("sm_90a", "sm_100a", "sm_120a")
FIXED: dict[str, Any] = dict(use_mm_prefix=False, use_per_head_quant_scales=False)


def reasons(backend: Any = HopwellBackend, **given: Any) -> list[str]:
    """Return vLLM's reasons not to choose a backend."""
    usual: dict[str, Any] = dict(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=backend.is_mla(),
        has_sink=False,
        use_sparse=False,
        device_capability=None,
        attn_type="decoder",
    )
    return backend.validate_configuration(**(usual | FIXED | given))


def test_the_entry_point_registers_the_backends_and_may_run_again() -> None:
    (entry,) = [one for one in metadata.entry_points(group="vllm.general_plugins") if one.name == "hopwell"]
    register = entry.load()
    register()
    register()
    for name in plugin.BACKENDS:
        backend = AttentionBackendEnum[name].get_class()
        assert backend.get_name() == name
        assert backend.get_impl_cls()
        assert backend.get_builder_cls()


@pytest.mark.parametrize(("version", "registers"), [("0.31.2", False), ("0.99.0", True)])
def test_a_vllm_outside_the_range_gets_a_warning(
    version: str, registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    monkeypatch.setattr(plugin.metadata, "version", lambda name: version)
    monkeypatch.setattr(plugin, "BACKENDS", {"ANOTHER_HOPWELL": "a.b"})
    monkeypatch.setattr("vllm.v1.attention.backends.registry.register_backend", lambda name, path: added.append(name))
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("vllm.hopwell").addHandler(handler)
    plugin.register()
    logging.getLogger("vllm.hopwell").removeHandler(handler)
    assert added == (["ANOTHER_HOPWELL"] if registers else [])
    (warning,) = [record.getMessage() for record in records]
    assert "tested with vLLM 0.32 to 0.33" in warning
    assert f"this is vLLM {version}" in warning


def calls_are_served(head_size: int, cache: str, page_size: int, sinks: torch.Tensor | None) -> bool:
    """Return whether hopwell takes a layer's two calls. Without tokens, it checks them and launches nothing."""
    dtype = capability.cache_dtype(cache, torch.bfloat16)
    query = torch.empty(0, HEADS, head_size, dtype=capability.query_dtype(torch.bfloat16, dtype))
    new = torch.empty(0, KV_HEADS, head_size, dtype=torch.bfloat16)
    lens, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    width, slots = 2 * head_size, KV_HEADS
    if dtype is torch.uint8:
        data, scales = caches.nvfp4_bytes(head_size)
        width, slots = data + scales, 2 * KV_HEADS
    kv_cache = torch.zeros(3, slots, page_size, width, dtype=dtype)
    try:
        views = caches.cache_of(kv_cache, dtype, head_size, KV_HEADS)
        caches.write(views, new, new, torch.zeros(0, dtype=torch.int64), 1.0, 1.0)
        hopwell.trtllm_batch_context_with_kv_cache(
            query,
            views.data,
            query,
            table,
            lens,
            1,
            1,
            1.0,
            1.0,
            1,
            starts,
            starts,
            out=torch.empty(0, HEADS, head_size, dtype=torch.bfloat16),
            sinks=sinks,
            kv_block_scales=views.scales,
            v_scale_layout="interleaved" if views.scales is None else "linear",
        )
    except (ValueError, NotImplementedError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("cache", ["auto", "fp8", "nvfp4"])
def test_configurations_agree_with_the_calls(cache: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE", arch)
    for head_size in (12, 32, 40, 64, 72, 80, 96, 128, 192, 256, 264, 512):
        for page_size in (6, 16, 24, 1056):
            for sinks in (None, torch.zeros(HEADS)):
                given: dict[str, Any] = dict(head_size=head_size, block_size=page_size, has_sink=sinks is not None)
                found = reasons(kv_cache_dtype=cache, **given)
                served = calls_are_served(head_size, cache, page_size, sinks)
                if cache == "nvfp4" and page_size % 4:
                    served = False  # only some numbers of KV heads align V's data
                assert (not found) == served, (given, found)


def test_devices() -> None:
    for major, minor, served in ((8, 0, False), (9, 0, True), (10, 0, True), (10, 3, True), (12, 0, True)):
        found = reasons(device_capability=DeviceCapability(major, minor))
        assert ("compute capability not supported" in found) != served, found


def test_features() -> None:
    on = dict(has_sliding_window=True, use_batch_invariant=True, has_sink=True, use_kv_connector=True)
    assert reasons(**on) == []
    assert reasons(use_non_causal=True) == []
    assert reasons(use_dcp=True) == []
    assert reasons(use_non_causal=True, has_sliding_window=True)
    assert reasons(use_dcp=True, has_sliding_window=True)
    assert reasons(use_dcp=True, has_sink=True)
    assert reasons(use_mla=True) == ["MLA not supported"]
    assert reasons(kv_cache_dtype="fp8_e5m2") == ["kv_cache_dtype not supported"]
    assert reasons(dtype=torch.float32) == ["dtype not supported"]
    assert HopwellMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize("arch", ARCHS)
def test_mla_configurations(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE", arch)
    for cache in ("auto", "fp8", "fp8_ds_mla"):
        on = dict(use_batch_invariant=True, use_dcp=True, block_size=64)
        assert reasons(HopwellMLABackend, head_size=576, kv_cache_dtype=cache, **on) == []
        assert reasons(HopwellMLASparseBackend, head_size=576, kv_cache_dtype=cache, use_sparse=True) == []
    assert reasons(HopwellMLASparseBackend, head_size=512, use_sparse=True) == []
    assert reasons(HopwellMLASparseBackend, head_size=576) == ["non-sparse not supported"]
    assert reasons(HopwellMLABackend, head_size=320) == []
    assert reasons(HopwellMLABackend, head_size=320, kv_cache_dtype="fp8_ds_mla")
    assert reasons(HopwellMLABackend, head_size=128)
    assert reasons(HopwellMLABackend, head_size=576, kv_cache_dtype="nvfp4")
    assert reasons(HopwellMLABackend, head_size=576, dtype=torch.float16, kv_cache_dtype="fp8_ds_mla")
    dims = [
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=v)
        for nope, v in ((128, 128), (192, 256), (128, 256))
    ]
    assert [HopwellMLAPrefillBackend.supports_mla_dimensions(one) for one in dims] == [True, True, False]
