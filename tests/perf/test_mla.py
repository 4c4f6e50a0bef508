"""The MLA family: its cases, its counts, and its candidates' remarks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.perf import commands as command
from hopwell.perf.ceilings import CEILINGS, MATMUL, READ
from hopwell.perf.colors import is_ours
from hopwell.perf.mla import MLA
from hopwell.perf.mla_candidates import hopwell_paged
from hopwell.perf.mla_workloads import BATCHES, Mla, MlaTensors
from hopwell.perf.results import Run

CASES: dict[str, Any] = {case.name: case for case in MLA.cases}
SMALL = Mla("small", "3 requests", (70, 200, 33), heads=4)


def test_cases() -> None:
    assert {"M1", "M1-q2", "M2", "M2-q2", "M3", "M3-q2", "H16", "H16-long", "S1", "S1-q2"} <= set(CASES)
    lines = [case for case in CASES.values() if case.series]
    assert {case.batch for case in lines} == set(BATCHES)
    assert len({case.series for case in lines}) == len(BATCHES)
    assert all((case.head_dim, case.v_head_dim, case.kv_heads) == (576, 512, 1) for case in CASES.values())


@pytest.mark.parametrize("q_len", [1, 2, 5])
def test_work_counts_visible_keys(q_len: int) -> None:
    case = replace(SMALL, q_len=q_len)
    visible = sum(length - q_len + row + 1 for length in case.kv_lens for row in range(q_len))
    assert case.work == 2 * 4 * (576 + 512) * visible
    assert replace(case, top_k=16).work == 2 * 4 * (576 + 512) * 3 * q_len * 16


@pytest.mark.parametrize("q_len", [1, 2])
def test_demand_is_that_of_the_tensors(q_len: int) -> None:
    case = replace(SMALL, q_len=q_len)
    t = MlaTensors(case, "cpu")
    queries = t.q.nbytes + t.output().nbytes
    assert case.demand == {MATMUL: case.work, READ: queries + t.k.nbytes}, "values are in the keys"
    listed = replace(case, top_k=16)
    assert listed.demand == {MATMUL: listed.work, READ: queries + 3 * q_len * 16 * 576 * 2}


@pytest.mark.parametrize(("name", "limit"), [("M1", MATMUL), ("S1", MATMUL), ("H16", READ), ("H16-long", READ)])
def test_heads_decide_what_is_the_limit(name: str, limit: str) -> None:
    rates = {MATMUL: 720e12, READ: 4.5e12}
    assert max(rates, key=lambda ceiling: CASES[name].demand[ceiling] / rates[ceiling]) == limit


def test_titles_tell_the_bytes() -> None:
    assert SMALL.cache_bytes == MlaTensors(SMALL, "cpu").k.nbytes
    assert CASES["H16"].title == "H16: 32 x 8192, 16 heads, d576/512, 302 MB of keys"
    assert CASES["S1"].title == "S1: 64 x 32768, 128 heads, d576/512, 2416 MB of keys, 2048 listed"
    assert CASES["M3-q2"].title == "M3-q2: 1 x 65536, 2 new tokens, 128 heads, d576/512, 75 MB of keys"


@pytest.mark.emulator
@pytest.mark.parametrize("top_k", [0, 16])
@pytest.mark.parametrize("q_len", [1, 2])
def test_candidates_compute_the_case(q_len: int, top_k: int) -> None:
    t = MlaTensors(replace(SMALL, q_len=q_len, top_k=top_k), "cpu")
    assert t.error(hopwell_paged(64)(t)()) < SMALL.max_error


@pytest.mark.gpu
def test_a_sweep_on_the_gpu(tmp_path: Path) -> None:
    arguments = ["sweep", "--out", str(tmp_path), "--cases", "H16,M3-q2,mla-b8-1024", "--candidates", "hopwell*"]
    arguments += [argument for name in CEILINGS for argument in ("--candidates", name)]
    done = CliRunner().invoke(command.app, arguments)
    assert done.exit_code == 0, done.output
    rows = Run.load(tmp_path / "mla.json").rows
    # The queries have 16 bits, so no case is measured against products of e4m3.
    assert {row.candidate for row in rows} == {name for name in MLA.measured if name in (MATMUL, READ) or is_ours(name)}
    assert all(row.rate and row.failure is None for row in rows), done.output
