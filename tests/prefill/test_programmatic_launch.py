"""Programmatic dependent launch: the kernel starts while the kernel that writes its query still runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.batches.prefill import Batch
from helpers.calls.entries import context_arguments, repeated
from helpers.device.late_copy import copy_function

import hopwell


@pytest.mark.parametrize("enable_pdl", [True, False, None])
def test_a_query_that_is_written_late(enable_pdl: bool | None, device: str, tmp_path: Path) -> None:
    """The two launches follow directly, and both have run before: loading a kernel would hide the overlap."""
    data = Batch([130, 64], [300, 200], device=device)
    key, value, table = data.pages(16)
    query = torch.zeros_like(data.q)
    arguments = context_arguments(data, (key, value), table, query=query, enable_pdl=enable_pdl)
    entry = hopwell.trtllm_batch_context_with_kv_cache
    late = copy_function(True, device, tmp_path)
    late(query, torch.empty_like(query))
    repeated(entry, data, arguments)
    for _ in range(3):
        query.zero_()
        late(data.q, query)
        out = entry(**arguments)
        data.expected().check(out)


@pytest.mark.gpu
def test_the_grid_behind_does_start_early(tmp_path: Path) -> None:
    """A control for the test above: here a kernel that does not wait finds the old contents."""
    late, early = (copy_function(is_late, "cuda", tmp_path / str(is_late)) for is_late in (True, False))
    source, target, seen = (torch.full((4096,), value, dtype=torch.int32, device="cuda") for value in (1, 0, 7))
    for _ in range(3):
        target.zero_()
        seen.fill_(7)
        late(source, target)
        early(target, seen)
    assert (seen == 0).all()
    assert (target == 1).all()


@pytest.mark.compile
@pytest.mark.parametrize("late", [True, False])
def test_what_the_copies_compile_to(late: bool, tmp_path: Path) -> None:
    """The tests above need this order: let the next grid start, sleep, and only then copy."""
    copy_function(late, "cpu", tmp_path)
    found = re.findall(r"griddepcontrol\.\w+|nanosleep|ld\.global|st\.global", (tmp_path / "entry.ptx").read_text())
    first = ["griddepcontrol.launch_dependents", "nanosleep"] if late else []
    assert found[: len(first)] == first
    assert set(found[len(first) :]) == {"ld.global", "st.global"}
