"""The prefill kernels in the emulator, against float64, in one ordinary and two adverse schedules.

All of them run under the race detector, the proxy check and strict mode. Data that a kernel must not read or must
overwrite is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from helpers.cases.emulated_prefill import check, page_sizes
from helpers.cases.prefill_configs import FP16_FEATURES, MAIN_DIMS
from helpers.covering.configs import covering_configs, stands_for_masks

from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.problem import MaskKind, ScoreKind
from hopwell.kernels.registry import shipped_configs

pytestmark = pytest.mark.emulator

# Performance choices have a list of their own, because all of them with all features would double the time.
BF16 = [c for c in shipped_configs() if c.dtype == "bf16" and not c.short_steps and not c.packs_heads]
CHOSEN = [c for c in covering_configs() if c.short_steps or c.packs_heads]
CONFIGS = [
    c
    for c in BF16
    if (dims := (c.head_dim_qk, c.head_dim_v)) in MAIN_DIMS
    and c.mask is not MaskKind.CHUNKED
    and stands_for_masks(dims, c.mask, (c.kv_fetch, c.box_rows))
]


def feature_configs() -> Iterator[PrefillConfig]:
    """Yield configs of chunks, scores and skipped tiles with two head dims, and other head dims with each fetch."""
    for config in BF16:
        dims = (config.head_dim_qk, config.head_dim_v)
        if config.box_rows not in (0, 16):
            continue
        if dims not in MAIN_DIMS and config.mask is MaskKind.CAUSAL:
            yield config
        if dims in ((64, 64), (128, 128)) and config.kv_fetch is not KvFetch.PAGE_ROWS:
            if config.mask is MaskKind.CHUNKED:
                yield config
            if config.mask is MaskKind.CAUSAL:
                yield replace(config, score=ScoreKind.SOFT_CAP)
                yield replace(config, score=ScoreKind.ALIBI)
                yield replace(config, skip_softmax=True)
            elif dims == (128, 128) and config.kv_fetch is KvFetch.CONTIGUOUS:
                yield replace(config, skip_softmax=True)


FEATURES = list(feature_configs())


def cases() -> Iterator[object]:
    for config in CONFIGS + CHOSEN:
        for size in page_sizes(config):
            yield pytest.param(config, size, id=config.name + (f"-page{size}" if size else ""))


def fp16_configs() -> Iterator[PrefillConfig]:
    """Yield one config of each head dim, with a different mask and fetch each."""
    wanted = {
        (64, 64): (MaskKind.CAUSAL, KvFetch.PAGE_ROWS, 0),
        (128, 128): (MaskKind.FULL, KvFetch.CONTIGUOUS, 0),
        (192, 128): (MaskKind.SLIDING_WINDOW, KvFetch.PAGE_BOXES, 16),
        (256, 256): (MaskKind.CAUSAL, KvFetch.PAGE_BOXES, 64),
    }
    for config in shipped_configs():
        which = (config.mask, config.kv_fetch, config.box_rows)
        if config.dtype == "fp16" and wanted.get((config.head_dim_qk, config.head_dim_v)) == which:
            yield config


# The core set takes the first test of a kernel, so adverse schedules come first.
@pytest.mark.parametrize("schedule", ["random", "priority"])
@pytest.mark.parametrize("config", CONFIGS + CHOSEN, ids=lambda config: config.name)
def test_adverse_schedules(config: PrefillConfig, schedule: str) -> None:
    """The seed depends on the kernel, so that the kernels together see many schedules."""
    seed = (CONFIGS + CHOSEN).index(config)
    check(config, page_sizes(config)[0], heads=2, kv_heads=1, schedule=schedule, seed=seed)


@pytest.mark.parametrize(("config", "page_size"), [*cases()])
def test_prefill(config: PrefillConfig, page_size: int | None) -> None:
    # Three heads leave rows of a tile over.
    heads = dict(heads=3, kv_heads=1) if config.packs_heads else dict(heads=4, kv_heads=2)
    check(config, page_size, **heads)


@pytest.mark.parametrize("config", [*fp16_configs(), *FP16_FEATURES], ids=lambda config: config.name)
def test_fp16(config: PrefillConfig) -> None:
    check(config, page_sizes(config)[0], heads=4, kv_heads=2)


@pytest.mark.parametrize("schedule", ["eager", "random"])
@pytest.mark.parametrize("config", FEATURES, ids=lambda config: config.name)
def test_features(config: PrefillConfig, schedule: str) -> None:
    check(config, page_sizes(config)[0], heads=2, kv_heads=1, schedule=schedule, seed=FEATURES.index(config))
