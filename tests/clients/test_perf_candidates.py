"""Candidates of FlashInfer for B200 and B300: its functions take the arguments that measurements give them.

Environments: flashinfer-newest.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hopwell.perf import decode_candidates, mla_candidates, prefill_candidates
from hopwell.perf.decode_workloads import Decode, DecodeTensors
from hopwell.perf.mla_workloads import Mla, MlaTensors
from hopwell.perf.prefill_workloads import Prefill, Tensors
from hopwell.perf.quantized import E4M3, NVFP4

pytestmark = pytest.mark.clients

PREFILL = Prefill("small", "two requests", (20, 20), (20, 20), 4, 2, 128, 128)
DECODE = Decode("small", "two requests", (70, 33), heads=8, kv_heads=1)
MLA = Mla("small", "two requests", (128, 128))
PAGED = ("FlashInfer trtllm-gen, pages of 64", "FlashInfer cute-dsl, pages of 64")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer with functions and wrappers that check their arguments and compute nothing."""
    homes = {
        "prefill": (
            "trtllm_batch_context_with_kv_cache",
            "trtllm_ragged_attention_deepseek",
            "BatchPrefillWithRaggedKVCacheWrapper",
            "BatchPrefillWithPagedKVCacheWrapper",
        ),
        "decode": ("trtllm_batch_decode_with_kv_cache", "BatchDecodeWithPagedKVCacheWrapper"),
        "mla": ("trtllm_batch_decode_with_kv_cache_mla",),
    }
    found: dict[str, Any] = {}
    for home, names in homes.items():
        module = importlib.import_module(f"flashinfer.{home}")
        specs = {name: mock.create_autospec(getattr(module, name)) for name in names}
        found |= {home: SimpleNamespace(**specs), **specs}
    peer = SimpleNamespace(**found)
    for module in (prefill_candidates, decode_candidates, mla_candidates):
        monkeypatch.setattr(module, "flashinfer", lambda: peer)
        monkeypatch.setattr(module, "peer_workspace", lambda: torch.zeros(16, dtype=torch.uint8))
    return peer


@pytest.mark.parametrize(
    "case",
    [
        PREFILL,
        replace(PREFILL, window_left=7, sinks=True),
        replace(PREFILL, q_dtype=E4M3, kv_dtype=E4M3),
        replace(PREFILL, kv_dtype=NVFP4),
    ],
    ids=lambda case: case.title,
)
@pytest.mark.parametrize("title", [title for title in prefill_candidates.PREFILL if "trtllm-gen" in title])
def test_trtllm_gen_prefill(flashinfer: Any, case: Prefill, title: str) -> None:
    tensors = Tensors(case, "cpu")
    if case.kv_dtype is NVFP4 and "pages" not in title:
        with pytest.raises(NotImplementedError):
            prefill_candidates.PREFILL[title](tensors)
        return
    call = prefill_candidates.PREFILL[title](tensors)
    call()
    function = flashinfer.prefill.trtllm_ragged_attention_deepseek
    if "pages" in title:
        function = flashinfer.prefill.trtllm_batch_context_with_kv_cache
        options = function.call_args.kwargs
        assert ("kv_cache_sf" in options) == (case.kv_dtype is NVFP4)
        key, _ = function.call_args.args[1]
        assert key.shape[1] == case.kv_heads, "heads before tokens, the function's default"
        assert key.is_contiguous()
    assert function.call_count == 1


@pytest.mark.parametrize("title", ["FlashInfer cute-dsl", PAGED[1], "FlashInfer cutlass"])
def test_planned_prefill(flashinfer: Any, title: str) -> None:
    prefill_candidates.PREFILL[title](Tensors(PREFILL, "cpu"))()
    kind = "Paged" if "pages" in title else "Ragged"
    wrapper = getattr(flashinfer, f"BatchPrefillWith{kind}KVCacheWrapper")
    assert wrapper.call_args.kwargs["backend"] == title.split()[1].rstrip(",")
    assert wrapper.return_value.plan.call_count == wrapper.return_value.run.call_count == 1


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("title", PAGED)
def test_decode(flashinfer: Any, title: str, kv_dtype: torch.dtype, q_len: int) -> None:
    decode_candidates.DECODE[title](DecodeTensors(replace(DECODE, kv_dtype=kv_dtype, q_len=q_len), "cpu"))()
    if "trtllm-gen" in title:
        assert flashinfer.decode.trtllm_batch_decode_with_kv_cache.call_args.kwargs["q_len_per_req"] == q_len
    else:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
        assert wrapper.call_args.kwargs["backend"] == "cute-dsl"
        assert wrapper.return_value.run.call_count == 1


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("title", PAGED)
def test_mla(flashinfer: Any, title: str, kv_dtype: torch.dtype, top_k: int) -> None:
    mla_candidates.MLA[title](MlaTensors(replace(MLA, kv_dtype=kv_dtype, top_k=top_k), "cpu"))()
    options = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla.call_args.kwargs
    assert (options["backend"], options["sparse_mla_top_k"]) == (title.split()[1].rstrip(","), top_k)
