"""Cases in e4m3 and over quantized caches, and their peers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from hopwell import layouts
from hopwell.perf import colors, peers
from hopwell.perf import commands as command
from hopwell.perf.append import APPEND
from hopwell.perf.append_candidates import torch_indexing
from hopwell.perf.append_workloads import Append, AppendTensors
from hopwell.perf.ceilings import MATMUL, MATMUL_8, READ
from hopwell.perf.decode import DECODE
from hopwell.perf.decode_workloads import Decode, DecodeTensors
from hopwell.perf.mla import MLA
from hopwell.perf.mla_workloads import Mla, MlaTensors
from hopwell.perf.prefill import PREFILL
from hopwell.perf.prefill_workloads import Prefill, Tensors
from hopwell.perf.quantized import BF16, E4M3, MAX_BYTE_ERROR, MAX_ERROR, NVFP4, cache_pages, latent_rows, stored
from hopwell.perf.results import Row, Run

FAMILIES = (PREFILL, DECODE, MLA, APPEND)
CASES: dict[str, Any] = {case.name: case for family in FAMILIES for case in family.cases}
PROMPTS = Prefill("small", "2 requests", (20, 5), (20, 70), 4, 2, 64, 64)
STEPS = Decode("small", "3 requests", (70, 200, 33), heads=4, kv_heads=2, head_dim=64)
LATENT = Mla("small", "2 requests", (70, 100), heads=4)
NEW = Append("small", 3, 5, before=14, kv_heads=2, head_dim=64)
TYPES = [(E4M3, E4M3), (BF16, E4M3), (BF16, NVFP4), (E4M3, NVFP4)]


def test_cases_that_the_tables_need() -> None:
    prefill = {"P1-fp8", "P2-fp8", "P3-fp8", "P4-fp8", "P1-fp8-cache", "chunk-fp8-cache", "P1-nvfp4-cache"}
    decode = {f"D{i}-{cache}" for i in range(1, 5) for cache in ("fp8", "nvfp4")}
    mla = {"M1-fp8", "M1-q2-fp8", "M2-fp8", "M3-fp8", "H64-fp8", "H16-fp8", "S1-fp8", "S1-q2-fp8", "S1-h64-fp8"}
    append = {f"A-{what}{cache}" for what in ("prompt", "chunks", "step") for cache in ("", "-fp8", "-nvfp4")}
    assert prefill | decode | mla | append <= set(CASES)
    assert CASES["P1-fp8"].work == CASES["P1"].work
    assert CASES["D2-nvfp4"].work == CASES["D2"].work * 9 / 32
    assert CASES["P1"].title == "P1: 1 x 16384, causal, 32/8 heads, d128"
    assert CASES["P1-fp8"].title.endswith("d128, e4m3")
    assert CASES["P1-fp8-nvfp4"].title.endswith("d128, NVFP4 cache, e4m3 query")
    assert CASES["S1-fp8"].title.endswith("2048 listed, rows of 656 bytes, e4m3 cache")
    assert CASES["M1-fp8"].max_error == MAX_BYTE_ERROR > MAX_ERROR == CASES["D1-nvfp4"].max_error


def test_peers_that_multiply_as_sm_120_does() -> None:
    """Torch's flash back end, which a CPU has too, and FlashInfer's fa2 are peers of dense prefill."""
    t = Tensors(Prefill("small", "2 requests", (20, 20), (20, 20), 4, 2, 64, 64), "cpu")
    out = PREFILL.candidates["FlashAttention 2"](t)()
    assert t.error(out) < MAX_ERROR
    assert {"FlashInfer fa2", "FlashInfer fa2, pages of 64"} <= set(PREFILL.candidates)
    narrow = Tensors(replace(PROMPTS, q_dtype=E4M3, kv_dtype=E4M3), "cpu")
    for name in ("FlashAttention 2", "FlashInfer fa2"):
        with pytest.raises(NotImplementedError, match="bf16 only"):
            PREFILL.candidates[name](narrow)()


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), TYPES)
def test_demand_of_prefill_is_that_of_the_tensors(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    t = Tensors(replace(PROMPTS, q_dtype=q_dtype, kv_dtype=kv_dtype), "cpu")
    parts = [t._key.data, t._value.data, t._key.scales, t._value.scales]
    held = sum(part.nbytes for part in parts if part is not None)
    assert t.work.demand[READ] == t.q.nbytes + t.output().nbytes + held
    products = MATMUL_8 if q_dtype == kv_dtype == E4M3 else MATMUL
    assert t.work.demand[products] == t.work.work
    assert set(t.work.demand) == {products, READ}
    assert (t.q.dtype, t.output().dtype) == (q_dtype, BF16)


def test_demand_over_nvfp4_and_packed_rows() -> None:
    steps = DecodeTensors(replace(STEPS, kv_dtype=NVFP4), "cpu")
    assert steps._key.scales is not None
    assert steps.work.read_bytes == 2 * (steps._key.data.nbytes + steps._key.scales.nbytes)
    latent = MlaTensors(replace(LATENT, kv_dtype=E4M3), "cpu")
    assert latent.work.demand[READ] == latent.q.nbytes + latent.output().nbytes + latent._key.data.nbytes
    assert latent.q.dtype == E4M3
    packed = MlaTensors(replace(LATENT, kv_dtype=E4M3, packed_rows=True, top_k=8), "cpu")
    assert packed.work.cache_bytes == packed._key.data.nbytes
    assert packed.work.read_bytes == 2 * 8 * 656


@pytest.mark.parametrize("interleaves", [True, False])
def test_pages_of_nvfp4_are_those_of_the_layouts(interleaves: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    key, value = (stored(torch.randn(103, 2, 64, generator=generator), NVFP4) for _ in range(2))
    assert torch.equal(key.values.float(), key.values), "what a code and a scale factor mean is exact in bfloat16"
    pages = cache_pages(key, value, (70, 33), 16, interleaves=interleaves)
    assert pages.scales is not None
    parts = (pages.key, pages.value, *pages.scales, 1.0, 1.0)
    order = layouts.VScaleLayout.INTERLEAVED if interleaves else layouts.VScaleLayout.LINEAR
    cache = layouts.NVFP4KVCache(*parts, layouts.KVLayout.NHD, order)
    for pool, tokens in zip(layouts.dequantize_nvfp4_kv_cache(cache), (key, value), strict=True):
        for ids, request in zip(pages.table, tokens.values.float().split((70, 33)), strict=True):
            used = ids[: -(-len(request) // 16)].long()
            assert torch.equal(pool[used].flatten(0, 1)[: len(request)], request)
    if interleaves:
        with pytest.raises(NotImplementedError, match="pages of four"):
            cache_pages(key, value, (70, 33), 2, interleaves=True)


def test_packed_rows() -> None:
    tokens = torch.randn(5, 1, 576, generator=torch.Generator().manual_seed(0))
    rows = latent_rows(tokens)
    assert rows.data.shape == (5, 1, 656)
    scales = rows.data[..., 512:528].contiguous().view(torch.float32)
    assert torch.equal(scales, tokens[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448)
    assert torch.equal(rows.data[..., 528:].contiguous().view(BF16), tokens[..., 512:].bfloat16())
    codes = rows.data[..., :512].view(E4M3).float().unflatten(-1, (4, 128))
    assert torch.equal((codes * scales[..., None]).flatten(-2), rows.values[..., :512])
    assert (rows.values - tokens).norm() < 0.03 * tokens.norm()


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, NVFP4])
def test_appending(kv_dtype: torch.dtype) -> None:
    """Torch's candidate writes the reference of the errors, and a wrong token is an error."""
    t = AppendTensors(replace(NEW, kv_dtype=kv_dtype), "cpu")
    pages = torch_indexing(16)(t)()
    assert t.error(pages) == 0
    pools = [*pages[:2], *(pages.scales or ())]
    written = sum(pool[0, 0].nbytes for pool in pools) * len(t.requests)
    assert t.work.work == t.key.nbytes + t.value.nbytes + written
    page = pages.key[pages.table[2, 1]].view(torch.uint8)
    page[0] = page[1]
    assert t.error(pages) > t.work.max_error


@pytest.mark.emulator
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3, NVFP4])
def test_append_is_right(monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype) -> None:
    case = replace(NEW, kv_dtype=kv_dtype)
    _is_right_or_not_served(monkeypatch, APPEND, AppendTensors, case, ["hopwell, pages of 16"])


@pytest.mark.emulator
@pytest.mark.parametrize(("q_dtype", "kv_dtype"), TYPES)
def test_prefill_is_right_or_not_served(
    monkeypatch: pytest.MonkeyPatch, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    # Without a mask, 16-bit pages go through cuDNN's entry, and narrow ones do not.
    case = replace(PROMPTS, q_dtype=q_dtype, kv_dtype=kv_dtype, causal=kv_dtype is not E4M3)
    _is_right_or_not_served(monkeypatch, PREFILL, Tensors, case, ["hopwell", "hopwell, pages of 16"])


@pytest.mark.emulator
def test_decode_is_right_or_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(STEPS, kv_dtype=NVFP4)
    _is_right_or_not_served(monkeypatch, DECODE, DecodeTensors, case, ["hopwell, pages of 16"])


@pytest.mark.emulator
@pytest.mark.parametrize("packed", [False, True])
def test_mla_is_right_or_not_served(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    case = replace(LATENT, kv_dtype=E4M3, packed_rows=packed, top_k=8 if packed else 0)
    _is_right_or_not_served(monkeypatch, MLA, MlaTensors, case, ["hopwell, pages of 64"])


def _is_right_or_not_served(
    monkeypatch: pytest.MonkeyPatch, family: Any, tensors: Callable[..., Any], case: Any, candidates: list[str]
) -> None:
    monkeypatch.setattr("hopwell.perf.measure.interleaved", lambda calls: dict.fromkeys(calls, 1.0))
    on_cpu = replace(family, inputs=lambda one: tensors(one, "cpu"))
    for row in command._measure(on_cpu, case, candidates, lambda step: None):
        assert row.rate or (row.failure or "").startswith("not served: "), row.failure


def test_arguments_of_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    fwd = SimpleNamespace(default=lambda *arguments: (given.append(arguments), "lse"))
    monkeypatch.setitem(sys.modules, "sgl_kernel", SimpleNamespace(flash_attn=None))
    monkeypatch.setattr(torch, "ops", SimpleNamespace(sgl_kernel=SimpleNamespace(fwd=fwd)))
    q = torch.zeros(1)
    peers.flash_attention_3(q, q, q, page_table="table", softmax_scale=0.5, is_causal=True, num_splits=0)()
    [arguments] = given
    want = [q, q, q, *[None] * 20, 0.5, True, -1, -1, 0, 0.0, False, None, 0, None, 0, None]
    want[14] = "table"
    assert list(arguments) == want
    with pytest.raises(TypeError, match="no arguments window"):
        peers.flash_attention_3(q, q, q, window=3)


def test_every_peer_has_a_colour_of_its_own() -> None:
    names = {colors.base(name) for family in FAMILIES for name in family.candidates}
    assert names - {colors.OURS} <= set(colors.PEER_COLORS)
    assert len(set(colors.PEER_COLORS.values())) == len(colors.PEER_COLORS)


def test_tables_and_plots_of_narrow_types(tmp_path: Path) -> None:
    """Each case has its own ceilings; our forms that read a cache are drawn beside all the peers."""
    names = ("P1", "P1-fp8", "P1-nvfp4-cache")
    rows = []
    for name in names:
        case = CASES[name]
        for title in PREFILL.measured:
            if title in PREFILL.ceilings and title not in case.demand:
                continue
            serves = (
                title.startswith("hopwell,") if name == "P1-nvfp4-cache" and title not in PREFILL.ceilings else True
            )
            rate = {MATMUL: 700.0, MATMUL_8: 1300.0, READ: 5000.0}.get(title, 600.0)
            found = dict(milliseconds=1.0, rate=rate) if serves else dict(failure="not served: narrow caches")
            rows.append(Row(case.title, title, **found))
    run = Run("no GPU", "today", {}, PREFILL.labels, rows)
    run.save(tmp_path / "prefill.json")
    assert {path.name for path in tmp_path.glob("*.png")} == {f"prefill{part}.png" for part in ("", "-fp8", "-nvfp4")}
    tables = [
        {cells[0]: cells[1:] for cells in map(cells_of, text.splitlines()) if len(cells) == 2}
        for text in re.split("^In .*:$", run.markdown(), flags=re.MULTILINE)[1:]
    ]
    assert [table["roofline"] for table in tables] == [["700"], ["1300"], ["700"]]
    assert [f"floor: {MATMUL_8}" in table for table in tables] == [False, True, False]
    assert ["FlashAttention 3" in table for table in tables] == [True, True, False]
    assert list(tables[0])[2:4] == ["hopwell", "hopwell, pages of 16"]
    assert "hopwell, pages of 16" in colors.shown({name: [1.0] for name in PREFILL.candidates})


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
