"""One small case of every shipped kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from batches import Batch

from hopwell.kernels import execute
from hopwell.kernels.config import DTYPES, TILES, KvFetch, PrefillConfig, resolve, shipped_configs
from hopwell.kernels.problem import Mask, MaskKind

pytestmark = pytest.mark.gpu

TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


def small_case(config: PrefillConfig) -> None:
    """Empty, short and long requests in up to four tiles, checked against float64."""
    lengths = ([5, 0, 1, config.tile.m + 3], [9, 3, 0, 2 * config.tile.n + 5])
    data = Batch(
        *lengths,
        heads=2,
        kv_heads=1,
        head_dim=config.head_dim_qk,
        v_head_dim=config.head_dim_v,
        dtype=TORCH_DTYPES[config.dtype],
    )
    page_size = {KvFetch.CONTIGUOUS: None, KvFetch.PAGE_ROWS: 4, KvFetch.PAGE_BOXES: config.box_rows}[config.kv_fetch]
    mask = Mask(config.mask, 70) if config.mask is MaskKind.SLIDING_WINDOW else Mask(config.mask)
    sinks = torch.tensor([0.5, -1.0], device=data.device)
    problem = data.problem(page_size, mask, lse=data.ragged_lse(), sinks=sinks)
    assert resolve(problem, config.arch) == config
    out = execute(problem)
    expected = data.expected(mask, sinks=sinks)
    expected.check(out)
    expected.check_lse(problem.lse.tensor)


@pytest.mark.parametrize("config", shipped_configs(), ids=lambda config: config.name)
def test_small_case(config: PrefillConfig) -> None:
    small_case(config)


@pytest.mark.parametrize("dims", TILES, ids=lambda dims: f"qk{dims[0]}-v{dims[1]}")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool: str, dims: tuple[int, int]) -> None:
    """compute-sanitizer finds nothing in the bf16 kernels of these head dims."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", sys.executable, __file__, *map(str, dims)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=pathlib.Path(__file__).parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards displayed" in done.stdout


if __name__ == "__main__":
    wanted = tuple(map(int, sys.argv[1:]))
    for each in shipped_configs():
        if each.dtype == "bf16" and (each.head_dim_qk, each.head_dim_v) == wanted:
            small_case(each)
            print(each.name, flush=True)
