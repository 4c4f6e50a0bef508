"""One small case of each kind of kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from config_cases import MAIN_DIMS, check_config
from sanitizer import TOOLS, check_sanitized

from hopwell.kernels.config import KvFetch, PrefillConfig, shipped_configs
from hopwell.kernels.problem import MaskKind, ScoreKind

pytestmark = pytest.mark.gpu

SANITIZED_DIMS = (*MAIN_DIMS, (80, 80), (512, 512))


def cases() -> list[PrefillConfig]:
    """The main head dims in full; of the others, which differ in tile sizes alone, the causal bf16 kernels."""
    found = []
    for config in shipped_configs():
        main = (config.head_dim_qk, config.head_dim_v) in MAIN_DIMS
        bf16 = config.dtype == "bf16"
        if (main and (bf16 or config.mask is not MaskKind.CHUNKED)) or (bf16 and config.mask is MaskKind.CAUSAL):
            found.append(config)
        if main and bf16 and config.mask is MaskKind.CAUSAL and config.box_rows in (0, 16):
            scores = (ScoreKind.SOFT_CAP, ScoreKind.ALIBI)
            found += [replace(config, score=score) for score in scores] + [replace(config, skip_softmax=True)]
    return found


def small_case(config: PrefillConfig) -> None:
    """Empty, short and long requests in up to four tiles, checked against float64."""
    lengths = ([5, 0, 1, config.tile.m + 3], [9, 3, 0, 2 * config.tile.n + 5])
    page_size = {KvFetch.CONTIGUOUS: None, KvFetch.PAGE_ROWS: 4, KvFetch.PAGE_BOXES: config.box_rows}[config.kv_fetch]
    check_config(config, lengths, page_size, sinks=(0.5, -1.0))


@pytest.mark.parametrize("config", cases(), ids=lambda config: config.name)
def test_small_case(config: PrefillConfig) -> None:
    small_case(config)


@pytest.mark.parametrize("dims", SANITIZED_DIMS, ids=lambda dims: f"qk{dims[0]}-v{dims[1]}")
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, dims: tuple[int, int]) -> None:
    """compute-sanitizer finds nothing in the bf16 kernels of these head dims."""
    check_sanitized(tool, __file__, *dims)


if __name__ == "__main__":
    wanted = tuple(map(int, sys.argv[1:]))
    for each in cases():
        if each.dtype == "bf16" and (each.head_dim_qk, each.head_dim_v) == wanted:
            small_case(each)
            print(each.name, flush=True)
