"""Worker processes, named memory, and the parts of the GPU comparison that run without a GPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from helpers.device.ptx import empty, run_ptx

from hopwell.emulator import Hazard, MemoryFault
from hopwell.emulator.host.module import spans_of
from hopwell.emulator.machine import workers
from hopwell.emulator.tools.approximations import INSTRUCTIONS, compare
from hopwell.emulator.tools.hardware import run_comparison

COUNT = """
    mov.u32 %r1, %ctaid.x; mul.wide.u32 %d1, %r1, 4; add.u64 %d2, %a0, %d1; setp.eq.u32 %p1, %tid, 0;
    @%p1 st.global.b32 [%d2], %r1; @%p1 atom.global.add.u32 %r2, [%a1], 1;
"""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_worker_processes_share_a_launch(monkeypatch, count):
    monkeypatch.setattr(workers, "SERIAL_SECONDS", 0.0)
    y, total = empty(64), empty(1)
    report = run_ptx(COUNT, y, total, grid=64, roles="out inout", workers=count)
    assert report.workers == count
    assert y.tolist() == list(range(64))
    assert total.item() == 64
    assert report.opcodes["atom.global.add.u32"] == 64
    assert not report.never_written


def test_a_worker_reports_its_fault(monkeypatch):
    monkeypatch.setattr(workers, "SERIAL_SECONDS", 0.0)
    with pytest.raises(MemoryFault, match="past the end of arg0"):
        run_ptx(COUNT, empty(63), empty(1), grid=64, workers=2)


def test_detectors_keep_a_launch_in_one_process(monkeypatch):
    monkeypatch.setattr(workers, "SERIAL_SECONDS", 0.0)
    assert run_ptx(COUNT, empty(64), empty(1), grid=64, workers=2, race=True).workers == 1
    with pytest.raises(Hazard):
        run_ptx("mov.u32 %r1, %ctaid.x; st.global.b32 [%a0], %r1;", empty(1), grid=64, workers=2, race=True)


def test_names_and_roles_of_memory():
    a, b = torch.zeros(4, 4), torch.zeros(8, dtype=torch.int16)
    spans = spans_of({"a": a[:, 1], "b": (b, "out"), "absent": None})
    assert [(s.name, s.size, s.role, s.element) for s in spans] == [("a", 52, "inout", 4), ("b", 16, "out", 2)]
    assert spans[0].address == a.data_ptr() + 4


def test_comparison_without_a_gpu(tmp_path):
    found = run_comparison(tmp_path, count=1024, tiles=1, model_only=True)
    kept = json.loads((tmp_path / "hardware.json").read_text())
    assert [row["equal"] for row in kept["instructions"]] == [1024] * len(INSTRUCTIONS)
    answers = {row["question"]: row["emulator"] for row in found["questions"]}
    assert answers["tensor reduction issued by all lanes"] == "every element becomes [32]"
    assert answers["NaN fill outside of the tensor"] == "; ".join(
        f"{kind}: words ['0x7ff77ff7'], descriptor bits [79]" for kind in ("float32", "float16", "bfloat16")
    )
    assert answers["descriptor bytes"] == "equal in all fields"
    assert "bytes of 32 expected: phase completes" in answers["tensor load issued by all lanes"]
    assert "0 of" in answers["CTA exit with a bulk store in flight"]
    assert (tmp_path / "hardware.md").read_text().count("\n| ") > len(INSTRUCTIONS)


def test_distances_in_units_of_the_last_place():
    x = np.array([1.0, -1.0, 2.0, np.nan], np.float32).view(np.uint32)
    other = x.copy()
    other[0] += 1
    other[1] += 3
    other[3] += 7  # another NaN
    found = compare("x", "f32", np.arange(4, dtype=np.uint32), x, other)
    assert (found.equal, found.ulp) == (2, {1: 1, 3: 1})
    assert found.first_difference == (0, int(x[0]), int(other[0]))
