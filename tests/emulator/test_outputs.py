"""The comparison of outputs with a recording, here made by the emulator itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hopwell.emulator import EmulatorError
from hopwell.emulator.tools.output_cases import DIMS, ENTRIES, cases
from hopwell.emulator.tools.outputs import FILE, Distance, compare, record
from hopwell.kernels.config.prefill import TILES
from hopwell.kernels.launch import geometry

pytestmark = pytest.mark.emulator

ONLY = "cudnn ragged"


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recording")
    record(folder, "cpu", ONLY, say=lambda line: None)
    return folder


def changed(recording, folder, change):
    """Return a copy of the recording with ``change`` applied to its arrays."""
    with np.load(recording / FILE) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(folder / FILE, **arrays)
    return folder


def test_the_emulator_equals_itself(recording):
    lines = []
    (rows,) = compare(recording, ONLY, say=lines.append).values()
    assert len(rows) == 2
    for row in rows:
        assert row["out"] == Distance(137 * 4 * 128, 137 * 4 * 128)
        assert row["statistics"] == Distance(4 * 131 * 4, 4 * 131 * 4)
    assert "| **all** | 2 | 100.0000 % | 0 | 0.00e+00 | 100.0000 % | 0 | 0.00e+00 |" in lines[-1]


def test_a_difference_shows(recording, tmp_path):
    def change(arrays):
        arrays[f"{ONLY} d128 bfloat16 causal=True/out"].flat[77] += 3

    lines = []
    (rows,) = compare(changed(recording, tmp_path, change), ONLY, say=lines.append).values()
    assert [row["out"].ulps for row in rows] == [0, 3]
    assert rows[1]["out"].equal == 137 * 4 * 128 - 1
    assert rows[1]["out"].value > 0
    assert "99.9993 % | 3 |" in lines[-1]


OTHERS = [
    ("causal=True", "has no case"),
    ('causal=True": "', "has other inputs"),
    ('"kernels": "sm_9', "is not of the kernels of"),
]


@pytest.mark.parametrize(("old", "message"), OTHERS)
def test_recordings_of_other_cases_are_refused(recording, tmp_path, old, message):
    def change(arrays):
        arrays["recording"] = np.array(str(arrays["recording"]).replace(old, old + "0"))

    with pytest.raises(EmulatorError, match=message):
        compare(changed(recording, tmp_path, change), ONLY, say=lambda line: None)


def test_a_folder_without_a_recording(tmp_path):
    with pytest.raises(EmulatorError, match="record it with"):
        compare(tmp_path)


def test_distances():
    one = torch.tensor([1.0, -1.0, 0.0, torch.nan, 2.0, -torch.inf])
    two = torch.tensor([1.0, -1.0, -0.0, torch.nan, 1.0, -torch.inf])
    two[1] = torch.nextafter(two[1], torch.tensor(-2.0))
    found = Distance.between(one, two)
    assert (found.elements, found.equal, found.ulps, found.value) == (6, 3, 1 << 23, 1.0)


def test_cases_cover_what_there_is():
    """Every entry and every head dim is covered, and the file stays small."""
    every = list(cases())
    assert len({case.name for case in every}) == len(every) <= 120
    assert {case.entry for case in every} == set(ENTRIES)
    assert {dims if isinstance(dims, tuple) else (dims, dims) for dims in DIMS} == set(TILES)


def test_mla_is_cut_for_as_many_multiprocessors(tmp_path):
    """The emulator uses the recording's number of SMs, by which MLA splits keys of many rows."""
    only = "mla dense d576-512 bfloat16 page64 4x16"
    record(tmp_path, "cpu", only, say=lambda line: None)

    def many(arrays):
        about = json.loads(str(arrays["recording"]))
        assert about["multiprocessors"] == geometry.EMULATED_SMS
        arrays["recording"] = np.array(json.dumps(about | {"multiprocessors": 30}))

    (same,) = compare(tmp_path, only, say=lambda line: None).values()
    (changes,) = compare(changed(tmp_path, tmp_path, many), only, say=lambda line: None).values()
    assert same[0]["out"].equal == same[0]["out"].elements
    assert changes[0]["out"].equal < changes[0]["out"].elements
    assert geometry.EMULATED_SMS < 30
