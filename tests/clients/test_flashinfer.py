"""hopwell installed over FlashInfer: FlashInfer's functions compute on CPU tensors, and keep their signatures.

Environments: flashinfer-oldest, flashinfer-newest.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from helpers.oracles.examples import check_attention

import hopwell
from hopwell.integrations.flashinfer import MODULES

pytestmark = pytest.mark.clients

HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 128, 16
KV_LENS = [37, 20]


@pytest.fixture(scope="module")
def signatures() -> dict[str, inspect.Signature]:
    """Return the signatures of the functions that this version has."""
    found = {name: getattr(importlib.import_module(f"flashinfer.{home}"), name, None) for name, home in MODULES.items()}
    return {name: inspect.signature(function) for name, function in found.items() if function is not None}


@pytest.fixture
def flashinfer(signatures: dict[str, inspect.Signature]) -> Iterator[ModuleType]:
    hopwell.install()
    yield importlib.import_module("flashinfer")
    hopwell.uninstall()


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def cache() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(8, 2, KV_HEADS, PAGE_SIZE, DIM).bfloat16()  # HND


TABLE = torch.tensor([[5, 2, 0], [7, 1, -1]], dtype=torch.int32)


def test_signatures_stay(flashinfer: ModuleType, signatures: dict[str, inspect.Signature]) -> None:
    for name, signature in signatures.items():
        home = importlib.import_module(f"flashinfer.{MODULES[name]}")
        assert inspect.signature(getattr(home, name)) == signature
    assert len(signatures) >= 6


def test_all_names_of_a_function_are_replaced(flashinfer: ModuleType) -> None:
    same = [
        (flashinfer.append_paged_kv_cache, flashinfer.page.append_paged_kv_cache),
        (flashinfer.prefill.cudnn_batch_prefill_with_kv_cache, flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache),
        (
            flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla,
            flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla,
        ),
    ]
    assert all(first is second for first, second in same)


def test_prefill(flashinfer: ModuleType, cache: torch.Tensor) -> None:
    q_lens = [30, 20]
    query = torch.randn(sum(q_lens), HEADS, DIM).bfloat16()
    out = flashinfer.prefill.trtllm_batch_context_with_kv_cache(
        query,
        cache,
        torch.empty(1 << 20, dtype=torch.uint8),
        TABLE,
        ints(*KV_LENS),
        max(q_lens),
        48,
        DIM**-0.5,
        1.0,
        2,
        ints(0, 30, 50),
        ints(0, 37, 57),
    )
    check_attention(query, out, cache, TABLE, q_lens, KV_LENS)


def test_decode(flashinfer: ModuleType, cache: torch.Tensor) -> None:
    query = torch.randn(2, HEADS, DIM).bfloat16()
    common = (query, (cache[:, 0], cache[:, 1]), torch.empty(1 << 24, dtype=torch.uint8), TABLE, ints(*KV_LENS), 48)
    for entry in ("trtllm_batch_decode_with_kv_cache", "xqa_batch_decode_with_kv_cache"):
        out = getattr(flashinfer.decode, entry)(*common, DIM**-0.5, 1.0, kv_layout="HND")
        check_attention(query, out, cache, TABLE, [1, 1], KV_LENS)


def test_append(flashinfer: ModuleType, cache: torch.Tensor) -> None:
    key, value = (torch.randn(2, KV_HEADS, DIM).bfloat16() for _ in "kv")
    want = cache.clone()
    want[0, :, :, 4], want[1, :, :, 3] = torch.stack((key[0], value[0])), torch.stack((key[1], value[1]))
    flashinfer.append_paged_kv_cache(
        key, value, ints(0, 1), ints(36, 19), cache, ints(5, 2, 0, 7, 1), ints(0, 3, 5), ints(5, 4), "HND"
    )
    assert torch.equal(cache, want)


def test_mla(flashinfer: ModuleType) -> None:
    torch.manual_seed(0)
    query, kv = torch.randn(1, 1, 4, 576).bfloat16(), torch.randn(3, PAGE_SIZE, 576).bfloat16()
    out = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        query,
        kv.unsqueeze(1),
        torch.empty(1 << 26, dtype=torch.uint8),
        128,
        512,
        64,
        ints(2, 0, 1)[None],
        ints(40),
        48,
        bmm1_scale=0.05,
        bmm2_scale=1.0,
    )
    keys = kv[[2, 0, 1]].flatten(0, 1)[:40].double()
    want = (query[0, 0].double() @ keys.T * 0.05).softmax(-1) @ keys[:, :512]
    assert (out.view(4, 512).double() - want).norm() < 5e-3 * want.norm()


def test_the_original_gets_refused_calls(
    flashinfer: ModuleType, cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """FlashInfer has no kernels for CPU tensors, so it raises an error of its own."""
    query = torch.randn(2, HEADS, DIM).bfloat16()
    with pytest.raises(Exception, match=r"(?s).*") as caught:
        flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query, cache, torch.empty(1 << 20, dtype=torch.uint8), TABLE, ints(*KV_LENS), 48, kv_layout="NDH"
        )
    assert any("site-packages/flashinfer" in str(entry.path) for entry in caught.traceback)
    assert (
        "FlashInfer's xqa_batch_decode_with_kv_cache runs calls that hopwell refuses: kv_layout must be" in caplog.text
    )


def test_uninstall(signatures: dict[str, inspect.Signature]) -> None:
    page = importlib.import_module("flashinfer.page")
    before = page.append_paged_kv_cache
    hopwell.install()
    assert page.append_paged_kv_cache is not before
    hopwell.uninstall()
    assert page.append_paged_kv_cache is before
