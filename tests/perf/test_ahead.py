"""Sweeps in parts: kernels compiled ahead, time limits, and resumed runs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from hopwell.kernels.jit import toolchain
from hopwell.perf import commands as command
from hopwell.perf.ahead import configs_of, smaller
from hopwell.perf.append import APPEND
from hopwell.perf.append_workloads import Append
from hopwell.perf.ceilings import CEILINGS, MATMUL_8, Ceiling
from hopwell.perf.decode import DECODE
from hopwell.perf.decode_workloads import Decode
from hopwell.perf.mla import MLA
from hopwell.perf.prefill import PREFILL
from hopwell.perf.prefill_workloads import Prefill
from hopwell.perf.quantized import E4M3, NVFP4
from hopwell.perf.results import Run
from tests.perf.test_sweep import COPIES, sweep

PROMPTS = Prefill("small", "2 x 200", (200, 200), (300, 300), 4, 2, 128, 128, q_dtype=E4M3, kv_dtype=E4M3)


def test_kernels_of_a_case() -> None:
    titles = [*PREFILL.candidates]
    found = configs_of(PREFILL, [PROMPTS], titles)
    forms = ("contiguous", "pages16", "pages64", "rows")  # pages of 128 are loaded in halves
    assert set(found) == {f"prefill_sm_90a_e4m3_to_bf16_d128_causal_{form}" for form in forms}
    steps = Decode("small", "2 requests", (70, 33), heads=4, kv_heads=2, kv_dtype=E4M3)
    [name] = configs_of(DECODE, [steps], ["hopwell, pages of 16", "FlashInfer fa2, pages of 16"])
    assert name == "decode_sm_90a_bf16_d128_full_kv_e4m3_rows8_pages16"
    [name] = configs_of(APPEND, [Append("small", 2, 3, kv_dtype=NVFP4)], ["hopwell, pages of 16"])
    assert name == "append_sm_90a_bf16_nvfp4"


def test_kernels_of_another_architecture_are_compiled_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    wide = replace(PROMPTS, q_dtype=Prefill.q_dtype, kv_dtype=Prefill.kv_dtype)
    [config] = configs_of(PREFILL, [wide], ["hopwell"]).values()
    assert (config.name, config.target) == ("prefill_sm_120a_on_sm_90a_bf16_d128_causal_contiguous", "sm_90a")


def test_smaller_cases_take_the_same_kernels() -> None:
    few = Prefill("few", "2 x 16", (16, 16), (8192, 8192), 8, 2, 128, 128)
    full = Prefill("serve", "", (700, 1, 1), (800, 600, 600), 8, 2, 128, 128)
    for case in (few, PROMPTS, full):
        found, same = (configs_of(PREFILL, [one], ["hopwell, pages of 16"]) for one in (case, smaller(case)))
        assert found == same != {}
    assert (smaller(full).q_lens, smaller(full).kv_lens) == (full.q_lens, full.q_lens)
    assert smaller(few).q_lens == (16,)
    for case in (*DECODE.cases, *MLA.cases):
        small = smaller(case)
        assert (small.q_len, small.heads, small.kv_dtype, small.batch) == (case.q_len, case.heads, case.kv_dtype, 1)


def test_the_command_compiles_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compile_ahead(configs: Any, jobs: int | None) -> list[Any]:
        asked.extend(config.name for config in configs)
        return [toolchain.Artifact(Path(name)) for name in asked]

    monkeypatch.setattr(toolchain, "compile_ahead", compile_ahead)
    monkeypatch.setattr(toolchain, "stored", lambda config: None)
    arguments = ["compile", "--cases", "L1", "--candidates", "*pages of 16", "--jobs", "1"]
    done = CliRunner().invoke(command.app, arguments)
    assert done.exit_code == 0, done.output
    assert asked == ["decode_sm_90a_bf16_d128_full_rows8_pages16"]
    assert "[1/1] decode_sm_90a" in done.output


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a family that needs no GPU, with cases of 10 s each."""
    now = itertools.count(step=10)
    monkeypatch.setattr(command, "_families", lambda: (COPIES,))
    monkeypatch.setattr(command.time, "monotonic", lambda: float(next(now)))
    for name, amount in (("multiply", 8e6), ("read", 4e5)):
        monkeypatch.setitem(CEILINGS, name, Ceiling(lambda t: lambda: None, amount, "MB/s", 1e6))
    monkeypatch.setattr(Run, "here", lambda labels: Run("no GPU", "today", {"torch": "1"}, labels))
    monkeypatch.setattr("hopwell.perf.measure.interleaved", lambda calls: dict.fromkeys(calls, 2.0))


def names(path: Path) -> list[str]:
    return list(dict.fromkeys(row.workload.split(":")[0] for row in Run.load(path).rows))


@pytest.mark.usefixtures("clock")
def test_a_limit_and_what_goes_on_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "copies.json"
    done = sweep(tmp_path, "--no-host", "--limit", "25", "--cases", "C2,*")
    assert done.exit_code == 0, done.output
    assert names(path) == ["C1", "C2"], "in the order of the family, whichever came first"
    assert not Run.load(path).host_microseconds
    monkeypatch.setattr(Run, "here", lambda labels: Run("no GPU", "tomorrow", {"torch": "1"}, labels))
    done = sweep(tmp_path, "--no-host", "--resume")
    assert done.exit_code == 0, done.output
    assert names(path) == ["C1", "C2", "line-8", "line-16"]
    run = Run.load(path)
    assert run.date == "today, tomorrow"
    assert len(run.rows) == 4 * 6
    # 8e6 and 4e5 in 2 ms, for every case.
    assert run.ceiling_rates == {"multiply, MB/s": [pytest.approx(4000)] * 4, "read, MB/s": [pytest.approx(200)] * 4}
    assert "\n\nCeilings, over all cases of this run: multiply, MB/s: 4000 to 4000; read, MB/s: 200 to 200.\n\n" in (
        path.with_suffix(".md").read_text()
    )


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("other", [{"gpu": "another"}, {"versions": {}}, {"settings": {"HOPWELL_KERNELS": "sm_120a"}}])
def test_a_run_does_not_go_on_with_another_one(tmp_path: Path, other: dict[str, Any]) -> None:
    assert sweep(tmp_path, "--no-host", "--cases", "C1").exit_code == 0
    path = tmp_path / "copies.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    done = sweep(tmp_path, "--no-host", "--resume", "--cases", "C2")
    assert done.exit_code == 2
    assert next(iter(other)) in done.output
    assert names(path) == ["C1"]


def test_tables_say_whose_kernels_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a card")
    assert Run.here(COPIES.labels).markdown().splitlines()[0].endswith(". HOPWELL_KERNELS=sm_120a.")


@pytest.mark.gpu
def test_narrow_types_on_the_gpu(tmp_path: Path) -> None:
    chosen = ["--cases", "P3-fp8,chunk-nvfp4-cache,D4-fp8,A-step-nvfp4,M1", "--candidates", "hopwell, *"]
    done = sweep(tmp_path, "--no-host", *chosen, "--candidates", MATMUL_8)
    assert done.exit_code == 0, done.output
    found = {name: Run.load(tmp_path / f"{name}.json") for name in ("prefill", "decode", "append", "mla")}
    for run in found.values():
        for row in run.rows:
            # Block scales by four tokens do not fit pages of one.
            is_served = not (row.candidate.endswith("pages of 1") and "NVFP4" in row.workload)
            assert bool(row.rate) == is_served, row
    assert list(found["prefill"].ceiling_rates) == [f"{MATMUL_8}, TFLOP/s"]
    assert not found["mla"].ceiling_rates
