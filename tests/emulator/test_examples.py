"""NVIDIA's CuTe DSL examples on the emulator: the command that runs them, and on request the examples themselves.

HOPWELL_CUTLASS names a checkout of CUTLASS for the second test. It takes about ten minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hopwell.emulator.tools.examples import EXAMPLES, PYTHON, Example, Result, run_example, run_examples

SCRIPT = """
import sys
import torch

x = torch.ones(2, device="cuda")
torch.testing.assert_close(x, x + float(sys.argv[1]), atol=0.5, rtol=0)
"""


@pytest.mark.parametrize(("difference", "failure"), [("0.25", ""), ("0.75", "AssertionError: Tensor-likes are not")])
def test_results_of_a_script(tmp_path: Path, difference: str, failure: str) -> None:
    script = tmp_path / PYTHON / "one.py"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT)
    example = Example("one", "one.py", difference)
    result = run_example(tmp_path, example, tmp_path / "log")
    assert result.failure.startswith(failure)
    assert bool(result.failure) == bool(failure)
    assert (result.error, result.largest) == (float(difference), 1 + float(difference))
    assert "largest error" in (tmp_path / "log").read_text()


def test_rows_of_the_table() -> None:
    example = Example("one", "one.py", "--n 1")
    assert (
        Result("", True, 0.00054, 1.3, 28993).row(example)
        == "| one | --n 1 | eager | 0.00054 (of 1.3) | 28993 | none |"
    )
    assert Result("Deadlock", hazards=2).row(example) == "| one | --n 1 | eager | Deadlock | 0 | 2 |"


@pytest.mark.emulator
@pytest.mark.nightly
@pytest.mark.skipif("HOPWELL_CUTLASS" not in os.environ, reason="HOPWELL_CUTLASS names no checkout of CUTLASS")
def test_examples_pass(tmp_path: Path) -> None:
    results = run_examples(Path(os.environ["HOPWELL_CUTLASS"]), tmp_path)
    assert set(results) == set(EXAMPLES)
    assert not {example.name: result.failure for example, result in results.items() if result.failure}
    assert {e.name for e, result in results.items() if result.hazards} == {e.name for e in EXAMPLES if e.hazards}
