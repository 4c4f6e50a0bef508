"""The decode family: its cases, its tensors, its errors, and its candidates' remarks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.perf import commands as command
from hopwell.perf.ceilings import MATMUL, READ
from hopwell.perf.decode import DECODE
from hopwell.perf.decode_candidates import hopwell_paged
from hopwell.perf.decode_workloads import BATCHES, LENGTHS, Decode, DecodeTensors
from hopwell.perf.mla import MLA
from hopwell.perf.mla_workloads import Mla
from hopwell.perf.paging import in_pages, page_starts
from hopwell.perf.prefill import PREFILL
from hopwell.perf.results import Run

CASES: dict[str, Any] = {case.name: case for case in DECODE.cases}
SMALL = Decode("small", "3 requests", (70, 200, 33), heads=4, kv_heads=2, head_dim=64)
DRAFTS = replace(SMALL, q_len=4)
LATENT = Mla("small", "3 requests", (70, 200, 33), heads=4)
LATENT_DRAFTS = replace(LATENT, q_len=4)


def test_names_pick_one_case() -> None:
    names = [case.name for family in (PREFILL, DECODE, MLA) for case in family.cases]
    assert len(set(names)) == len(names)


def test_cases_of_decode() -> None:
    assert sum(CASES["uneven"].kv_lens) == sum(CASES["even"].kv_lens)
    assert CASES["uneven"].batch == CASES["even"].batch
    assert CASES["D3-fp8"].work == CASES["D3"].work / 2
    drafts = [CASES[f"D2-q{new}-{cache}"] for new in (2, 4, 8) for cache in ("fp8", "nvfp4")]
    assert [case.q_len for case in drafts] == [2, 2, 4, 4, 8, 8]
    assert CASES["D-d512-fp8"].head_dim == 512
    sixteen = CASES["L16"].kv_lens
    assert (len(sixteen), min(sixteen), max(sixteen)) == (16, 1024, 8192)
    assert CASES["L16-nvfp4"].kv_lens == CASES["L16-fp8"].kv_lens == sixteen
    points = {(case.batch, case.x) for case in CASES.values() if case.series}
    assert {batch for batch, _ in points} == set(BATCHES)
    assert {length for _, length in points} == set(LENGTHS)
    assert max(case.work for case in CASES.values()) <= 4 << 30


def test_work_counts_keys_and_values() -> None:
    assert DRAFTS.work == 2 * DecodeTensors(DRAFTS, "cpu").k.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_demand_is_that_of_the_tensors(dtype: torch.dtype) -> None:
    case = replace(DRAFTS, kv_dtype=dtype)
    t = DecodeTensors(case, "cpu")
    visible = sum(length - 4 + row + 1 for length in (70, 200, 33) for row in range(4))
    read = sum(tokens.nbytes for tokens in (t.q, t.output(), t.k, t.v))
    assert case.demand == {MATMUL: 2 * 4 * (64 + 64) * visible, READ: read}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_hold_the_tokens(dtype: torch.dtype) -> None:
    t = DecodeTensors(replace(SMALL, kv_dtype=dtype), "cpu")
    pages = in_pages(t.k, t.v, SMALL.kv_lens, 16)
    assert sorted(pages.used.tolist()) == list(range(len(pages.key)))
    for pool, tokens in ((pages.key, t.k), (pages.value, t.v)):
        assert pool.dtype == dtype
        for ids, request in zip(pages.table, tokens.float().split(SMALL.kv_lens), strict=True):
            used = -(-len(request) // 16)
            assert (ids[used:] == -1).all()
            assert torch.equal(pool.float()[ids[:used].long()].flatten(0, 1)[: len(request)], request)
    assert pages.table[pages.table >= 0].tolist() == pages.used.tolist()
    starts, in_last = page_starts(t.kv_lens, 16)
    assert starts.tolist() == [0, 5, 18, 21]
    assert in_last.tolist() == [6, 8, 1]


def test_values_inside_keys_have_no_pages_of_their_own() -> None:
    t = DecodeTensors(LATENT, "cpu")
    assert t.v.data_ptr() == t.k.data_ptr()
    assert t.output().shape == (3, 4, 512)
    pages = t.pages(16)
    assert pages.value is pages.key
    assert pages.key.shape[1:] == (16, 1, 576)


@pytest.mark.parametrize("q_len", [2, 4, 16, 17, 33])
def test_masks_are_causal(q_len: int) -> None:
    mask = DecodeTensors(replace(SMALL, q_len=q_len), "cpu").mask
    assert mask is not None
    assert mask.dtype == torch.uint16
    assert mask.shape == (3, q_len, 2 * -(-q_len // 32))
    for request, row in itertools.product(range(3), range(q_len)):
        word = sum(value << 16 * i for i, value in enumerate(mask[request, row].tolist()))
        assert word == (1 << row + 1) - 1


def attention(t: DecodeTensors, request: int, hidden: int = 0, causal: bool = True) -> torch.Tensor:
    """Return a request's output with the first keys ``hidden``."""
    work, length = t.work, t.work.kv_lens[request]
    q = t.q.view(work.batch, work.q_len, work.heads, -1)[request].transpose(0, 1).double()
    k, v = (tokens.split(work.kv_lens)[request].transpose(0, 1).double() for tokens in (t.k, t.v))
    seen = torch.ones(work.q_len, length, dtype=torch.bool)
    if causal:
        seen = seen.tril(length - work.q_len)
    seen[:, :hidden] = False
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=work.scale, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.mark.parametrize("case", [SMALL, DRAFTS, LATENT, LATENT_DRAFTS], ids=["one", "drafts", "mla", "mla-drafts"])
def test_errors_are_those_against_float64(case: Decode) -> None:
    t = DecodeTensors(case, "cpu")
    right = [attention(t, request) for request in range(case.batch)]
    assert t.error(torch.cat(right)) < 1e-12
    for request in range(case.batch):
        wrong = list(right)
        wrong[request] = attention(t, request, hidden=1)
        assert t.error(torch.cat(wrong)) > case.max_error, f"a key too few in request {request}"
    if case.q_len > 1:
        wrong = [attention(t, request, causal=False) for request in range(case.batch)]
        assert t.error(torch.cat(wrong)) > case.max_error
    assert not t.error(t.output().fill_(float("nan"))) < case.max_error


@pytest.mark.emulator
@pytest.mark.parametrize("case", [SMALL, DRAFTS], ids=["one", "drafts"])
def test_candidates_compute_the_case(case: Decode) -> None:
    t = DecodeTensors(case, "cpu")
    assert t.error(hopwell_paged(16)(t)()) < case.max_error


def test_a_cache_without_a_kernel_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused case shows the reason instead of a figure."""
    monkeypatch.setattr("hopwell.perf.measure.interleaved", lambda calls: dict.fromkeys(calls, 1.0))
    family = replace(DECODE, inputs=lambda case: DecodeTensors(case, "cpu"))
    [row] = command._measure(family, replace(SMALL, head_dim=272), ["hopwell, pages of 16"], lambda step: None)
    assert row.rate is None
    assert row.failure is not None
    assert row.failure.startswith("not served: xqa_batch_decode_with_kv_cache on sm_90a supports these head dims: ")


@pytest.mark.gpu
def test_a_sweep_on_the_gpu(tmp_path: Path) -> None:
    arguments = ["sweep", "--out", str(tmp_path), "--cases", "L1,D2-q4,b4-1024", "--candidates", "hopwell*"]
    done = CliRunner().invoke(command.app, [*arguments, "--candidates", "memory read"])
    assert done.exit_code == 0, done.output
    rows = Run.load(tmp_path / "decode.json").rows
    assert len(rows) == 9
    assert all(row.rate and row.failure is None for row in rows), done.output
