"""One small case of every shipped decode kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest
from helpers.cases.decode import Case, check_config, cut_tokens, fewest_rows, takes_ragged_drafts
from helpers.device.sanitizer import TOOLS, check_sanitized

from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.config.decode import DecodeConfig, shipped_decode_configs
from hopwell.kernels.config.splitting import ROWS
from hopwell.kernels.problem import MaskKind

pytestmark = pytest.mark.gpu

SHIPPED = list(shipped_decode_configs())


def small_case(config: DecodeConfig) -> None:
    """Check requests from zero keys to three chunks or leaves, which are combined.

    Drafts fill one tile of rows, or two tiles.
    """
    chunk, group = cut_tokens(config), min(fewest_rows(config) + 4, config.rows)
    case = Case([1] * 5, [0, 3, chunk, chunk + 1, 2 * chunk + 70], group, kv_heads=2, window=chunk + 3)
    if config.mask is MaskKind.DRAFT:
        most, group = (8, config.rows // 8) if config.rows < ROWS else (33, 3)
        ragged = takes_ragged_drafts(config)
        q_lens = [3, 0, most, 5] if ragged else [most] * 4
        case = Case(q_lens, [1, 9, chunk + 20, 2 * chunk + 40], group, ragged=ragged)
    check_config(config, case, 4 if config.kv_fetch is KvFetch.PAGE_ROWS else config.box_rows)


@pytest.mark.parametrize("config", SHIPPED, ids=lambda config: config.name)
def test_small_case(config: DecodeConfig) -> None:
    small_case(config)


def sanitized() -> dict[str, list[DecodeConfig]]:
    """Return the sanitizer cases, in parts of about a minute that may run side by side."""
    parts = defaultdict(list)
    for config in SHIPPED:
        if config.dtype == "bf16" and config.box_rows in (0, 16):
            parts[f"{config.head_dim_qk}-{config.mask.value}-{config.kv_type.value}"].append(config)
    return parts


@pytest.mark.parametrize("part", sanitized())
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, part: str) -> None:
    """compute-sanitizer finds nothing in a part's kernels."""
    check_sanitized(tool, __file__, part)


if __name__ == "__main__":
    for each in sanitized()[sys.argv[1]]:
        print(each.name, flush=True)  # reports below name the code, which many kernels share
        small_case(each)
