"""One small case of each kind of kernel, alone and under compute-sanitizer."""

from __future__ import annotations

import sys
from collections import defaultdict

import pytest
from helpers.cases.prefill_configs import FP16_FEATURES, MAIN_DIMS, check_config
from helpers.covering.configs import with_features
from helpers.device.sanitizer import TOOLS, check_sanitized

from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import MaskKind, ScoreKind
from hopwell.kernels.registry import shipped_configs

pytestmark = pytest.mark.gpu

# Besides the main head dims: columns that fill no swizzle block, and warpgroups that share rows. All other head dims
# have one kernel each.
FULLY_SANITIZED = (*MAIN_DIMS, (80, 80), (512, 512))


def dims_of(config: PrefillConfig) -> tuple[int, int]:
    return config.head_dim_qk, config.head_dim_v


def cases() -> list[PrefillConfig]:
    """Return the cases: main head dims with all masks, and performance choices in bf16.

    Other head dims differ only in tile sizes, so they have the causal bf16 kernels.
    """
    found = list(FP16_FEATURES)
    for config in shipped_configs():
        main = dims_of(config) in MAIN_DIMS
        bf16 = config.dtype == "bf16"
        if not bf16 and (config.short_steps or config.packs_heads):
            continue
        if (main and (bf16 or config.mask is not MaskKind.CHUNKED)) or (bf16 and config.mask is MaskKind.CAUSAL):
            found.append(config)
        if main and bf16 and config.mask is MaskKind.CAUSAL and config.box_rows in (0, 16):
            # Scores, and skip-softmax, one at a time.
            found += [c for c in with_features(config) if (c.score is not ScoreKind.SCALED) != c.skip_softmax]
    return found


def small_case(config: PrefillConfig) -> None:
    """Check empty, short and long requests against float64: three query tiles, or a few queries for packed heads."""
    tile = config.tile
    lengths = ([5, 0, 1, (1 if config.packs_heads else 2) * tile.m + 3], [9, 3, 0, 6 * tile.n + 5])
    page_size = {KvFetch.CONTIGUOUS: None, KvFetch.PAGE_ROWS: 4, KvFetch.PAGE_BOXES: config.box_rows}[config.kv_fetch]
    # Three heads leave rows of a tile over.
    check_config(config, lengths, page_size, sinks=(0.5, -1.0, 2.0) if config.packs_heads else (0.5, -1.0))


@pytest.mark.parametrize("config", cases(), ids=lambda config: config.name)
def test_small_case(config: PrefillConfig) -> None:
    small_case(config)


def sanitized() -> dict[str, list[PrefillConfig]]:
    """Return the sanitizer cases, in parts of about a minute that may run side by side."""
    parts, others = defaultdict(list, fp16=list(FP16_FEATURES)), defaultdict(list)
    for config in cases():
        if config.dtype != "bf16":
            continue
        qk, v = dims = dims_of(config)
        if dims in FULLY_SANITIZED:
            plain = config.score is ScoreKind.SCALED and not config.skip_softmax
            kind = "packed-" * config.packs_heads + config.mask.value if plain else "features"
            parts[f"qk{qk}-v{v}-{kind}"].append(config)
        else:
            others[dims].append(config)
    # Each has a different fetch.
    return parts | {"others": [configs[i % len(configs)] for i, configs in enumerate(others.values())]}


@pytest.mark.parametrize("part", sanitized())
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer(tool: str, part: str) -> None:
    """compute-sanitizer finds nothing in a part's kernels."""
    check_sanitized(tool, __file__, part)


if __name__ == "__main__":
    for each in sanitized()[sys.argv[1]]:
        small_case(each)
        print(each.name, flush=True)
