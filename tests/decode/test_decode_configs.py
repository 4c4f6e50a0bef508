"""One small case of every shipped decode kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import sys

import pytest
from decode_cases import HEAD_DIMS, Case, check_config, fewest_rows
from sanitizer import TOOLS, check_sanitized

from hopwell.kernels.config import KvFetch
from hopwell.kernels.decode_config import MASKS, DecodeConfig, shipped_decode_configs
from hopwell.kernels.problem import MaskKind

pytestmark = pytest.mark.gpu

SHIPPED = list(shipped_decode_configs())


def small_case(config: DecodeConfig) -> None:
    """From no keys to three chunks or leaves, which are merged; with drafts all rows of a tile, or two tiles."""
    chunk, group = config.chunk_tokens, min(fewest_rows(config) + 4, config.rows)
    case = Case([1] * 5, [0, 3, chunk, chunk + 1, 2 * chunk + 70], group, kv_heads=2, window=chunk + 3)
    if config.mask is MaskKind.DRAFT:
        most, group = (8, config.rows // 8) if config.has_tree else (33, 3)
        case = Case([3, 0, most, 5], [1, 9, chunk + 20, 2 * chunk + 40], group, ragged=True)
    check_config(config, case, 4 if config.kv_fetch is KvFetch.PAGE_ROWS else config.box_rows)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_small_case(config: DecodeConfig) -> None:
    small_case(config)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.value)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, head_dim: int, mask: MaskKind) -> None:
    """compute-sanitizer finds nothing in the bf16 kernels of this head dim and mask."""
    check_sanitized(tool, __file__, head_dim, mask.value)


if __name__ == "__main__":
    chosen = ("bf16", int(sys.argv[1]), MaskKind(sys.argv[2]))
    for each in SHIPPED:
        if (each.dtype, each.head_dim_qk, each.mask) == chosen and each.box_rows in (0, 16):
            print(each.name, flush=True)  # reports below name the code, which many kernels share
            small_case(each)
