"""MLA of 16-bit queries over 8-bit caches, against float64 and the 16-bit kernels.

The caches are e4m3, or rows of 656 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import E4M3
from helpers.batches.mla import MlaBatch, PackedBatch, with_topk
from helpers.batches.prefill import starts
from helpers.calls.entries import mla, mla_arguments
from helpers.cases.mla import FEW_HEADS, MANY_HEADS, TOP_K

import hopwell
from hopwell.kernels.config.mla import resolve_mla
from hopwell.layouts import FP8_DS_MLA_BYTES, dequantize_fp8_ds_mla, fill_fp8_ds_mla_cache, quantize_fp8_ds_mla
from tests.mla.test_entry import KINDS, refused

KV_LENS = [70, 0, 3, 150]


def batch(kind: type[MlaBatch], device: str, top_k: int = 0, q_len: int = 1, **options: Any) -> Any:
    kv_lens = options.pop("kv_lens", KV_LENS)
    return with_topk(kind, [q_len] * len(kv_lens), kv_lens, top_k, device=device, **options)


@pytest.mark.parametrize(
    ("dtype", "heads", "top_k"),
    [(torch.bfloat16, FEW_HEADS, TOP_K), (torch.float16, MANY_HEADS, 0)],
    ids=["bf16 rows16 sparse", "fp16 rows64 dense"],
)
def test_e4m3_caches(dtype: torch.dtype, heads: int, top_k: int, device: str) -> None:
    """Bits equal the 16-bit kernel's over a cache of the same values."""
    data = batch(MlaBatch, device, top_k, heads=heads, dtype=dtype, kv_dtype=E4M3)
    problem = data.decode(64)
    out = mla(data, problem)
    assert out.dtype == dtype
    data.expected_mla().check(out.flatten(0, 1))
    assert torch.equal(out, mla(data, replace(problem, key=problem.key.to(dtype))))


@pytest.mark.parametrize(("page_size", "heads"), [(1, FEW_HEADS), (24, MANY_HEADS)])
def test_pages_and_strides(page_size: int, heads: int, device: str) -> None:
    data = batch(MlaBatch, device, q_len=2, heads=heads, kv_dtype=E4M3)
    out = mla(data, data.decode(64))
    problem = data.decode(page_size, order=1)
    assert torch.equal(mla(data, problem), out)
    pages, _, rows, width = problem.key.shape
    within = torch.full((pages, rows + 1, 2 * width), float("nan"), device=device).to(E4M3)
    within[:, :rows, :width] = problem.key[:, 0]
    assert torch.equal(mla(data, problem, kv_cache=within[:, :rows, :width]), out)


@pytest.mark.parametrize("heads", [FEW_HEADS, MANY_HEADS])
def test_narrow_latents(heads: int, device: str) -> None:
    data = batch(MlaBatch, device, heads=heads, kv_dtype=E4M3, head_dim=320, v_head_dim=256)
    problem = data.decode(16)
    out = mla(data, problem)
    data.expected_mla().check(out.flatten(0, 1))
    assert torch.equal(out, mla(data, replace(problem, key=problem.key.to(data.dtype))))


@pytest.mark.parametrize(
    ("power_of_two", "heads", "top_k"),
    [
        (False, FEW_HEADS, 0),
        (True, FEW_HEADS, TOP_K),
        (False, MANY_HEADS, TOP_K),
        (False, 128, TOP_K),
        (True, MANY_HEADS, 0),
    ],
    ids=["rows16 dense", "rows16 sparse", "rows64 sparse", "clusters sparse", "rows64 dense"],
)
def test_rows_of_656_bytes(power_of_two: bool, heads: int, top_k: int, device: str) -> None:
    data = batch(PackedBatch, device, top_k, heads=heads, power_of_two=power_of_two)
    problem, scales = data.decode(16), "pow2_fp32" if power_of_two else "arbitrary_fp32"
    out = mla(data, problem, kv_cache=data.packed(16), kv_scale_format=scales)
    data.expected_mla().check(out.flatten(0, 1))
    assert torch.equal(out, mla(data, problem))


@pytest.mark.parametrize(
    ("heads", "top_k", "shares"), [(64, TOP_K, False), (128, TOP_K, True), (192, TOP_K, False), (128, 0, False)]
)
def test_clusters_need_an_even_number_of_row_tiles(heads: int, top_k: int, shares: bool) -> None:
    data = batch(PackedBatch, "cpu", top_k, heads=heads)
    config = resolve_mla(data.over_fp8_ds_mla(data.decode(16)), "sm_90a")
    assert (config.shares_dequant, config.cluster_ctas) == (shares, 1 + shares)


@pytest.mark.usefixtures("batch_invariant")
def test_batch_invariant_kernels_have_no_clusters() -> None:
    data = batch(PackedBatch, "cpu", TOP_K, heads=128)
    assert not resolve_mla(data.over_fp8_ds_mla(data.decode(16)), "sm_90a").shares_dequant


@pytest.mark.gpu
@pytest.mark.usefixtures("batch_invariant")
@KINDS
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_long_requests(heads: int, top_k: int) -> None:
    """Requests have many chunks and leaves; each gives the same bits alone and in the batch."""
    data = batch(MlaBatch, "cuda", 16 * TOP_K if top_k else 0, 2, kv_lens=[9000, 5, 40_000], heads=heads, kv_dtype=E4M3)
    problem = data.decode(64)
    out = mla(data, problem)
    assert torch.equal(out, mla(data, replace(problem, key=problem.key.to(data.dtype))))
    begins = starts(data.q_lens)
    for index in range(data.size):
        one = data.request(index)
        alone = mla(one, one.decode(64)).flatten(0, 1)
        assert torch.equal(out.flatten(0, 1)[begins[index] : begins[index + 1]], alone)


@pytest.mark.parametrize(("heads", "top_k"), [(MANY_HEADS, 0), (MANY_HEADS, TOP_K), (FEW_HEADS, 0)])
def test_batch_invariance(heads: int, top_k: int, batch_invariant: None, device: str) -> None:
    """With the setting, a request gives the same bits alone and in a batch; without it, bits may differ."""
    data = batch(MlaBatch, device, top_k, 2, kv_lens=[1100, 5, 900], heads=heads)
    out = mla(data, data.decode(64)).flatten(0, 1)
    data.expected_mla().check(out)
    begins = starts(data.q_lens)
    for index in range(data.size):
        one = data.request(index)
        assert torch.equal(out[begins[index] : begins[index + 1]], mla(one, one.decode(64)).flatten(0, 1))


def test_filling_a_cache_of_rows() -> None:
    latent, rotary = torch.randn(5, 512, dtype=torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    latent[2] = 0
    cache = torch.zeros(4, 8, FP8_DS_MLA_BYTES, dtype=torch.uint8)
    slots = torch.tensor([0, 9, 31, 17, 16])
    fill_fp8_ds_mla_cache(cache, latent, rotary, slots)
    read = dequantize_fp8_ds_mla(cache, torch.float32).flatten(0, 1)
    assert torch.equal(read[slots, 512:], rotary.float())
    torch.testing.assert_close(read[slots, :512], latent.float(), rtol=2**-4, atol=1e-2)
    others = torch.ones(32, dtype=torch.bool)
    others[slots] = False
    assert not cache.flatten(0, 1)[others].any()


def test_scales_that_are_powers_of_two() -> None:
    latent = torch.randn(6, 512)
    latent[0], latent[1] = 448.0, 449.0
    rows = quantize_fp8_ds_mla(latent, torch.zeros(6, 64), power_of_two=True)
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    assert scales[0].tolist() == [1.0] * 4
    assert scales[1].tolist() == [2.0] * 4


def faults() -> Iterator[tuple[str, dict[str, Any]]]:
    data = batch(PackedBatch, "cpu", heads=8)
    packed = data.packed(64)
    half = torch.zeros(4, 1, 8, 576, dtype=torch.float16)
    yield "^kv_cache must be torch.float16 or .* for a query of torch.float16", dict(kv_cache=packed, query=half)
    yield "^kv_cache must have the bytes of a row = 656", dict(kv_cache=packed[..., :640].contiguous())
    yield "for a kv_cache of uint8", dict(kv_cache=packed, qk_rope_head_dim=0, sparse_mla_top_k=4)
    yield r"^kv_cache must be .* or torch.uint8 \(rows of 656 bytes\)", dict(kv_cache=packed.view(torch.int8))


@pytest.mark.parametrize(("message", "changes"), list(faults()))
def test_refusals(message: str, changes: dict[str, Any]) -> None:
    data = batch(PackedBatch, "cpu", heads=8)
    refused(data, message, **changes)


def test_wide_caches_under_fp8_queries_are_refused() -> None:
    data = batch(MlaBatch, "cpu", heads=8)
    given = mla_arguments(data, data.decode(64))
    with pytest.raises(ValueError, match=r"^kv_cache must be torch\.float8_e4m3fn for a query of torch\.float8_e4m3fn"):
        hopwell.trtllm_batch_decode_with_kv_cache_mla(**(given | dict(query=given["query"].to(E4M3))))
