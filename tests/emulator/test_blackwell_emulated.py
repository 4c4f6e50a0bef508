"""The Blackwell prefill kernels on the emulator, against float64, in an ordinary and an adverse schedule.

Nobody has run them on a GPU. All of them run under the race detector, the proxy check and strict mode, and what a
kernel must not read or must not leave out is NaN. Kernels take long to compile, so a few stand for all; the rest run
with ``-m slow_emulator``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from covering import covering_blackwell_configs
from emulated_prefill import check, page_sizes

from hopwell.kernels.config import PrefillConfig, shipped_configs

CONFIGS = covering_blackwell_configs()
ADVERSE = ("late", "random", "priority")
REST = [config for config in shipped_configs("sm_100a") if config not in CONFIGS]


def cases(configs: list[PrefillConfig]) -> Iterator[object]:
    for config in configs:
        for size in page_sizes(config):
            yield pytest.param(config, size, id=config.name + (f"-page{size}" if size else ""))


@pytest.mark.emulator
@pytest.mark.parametrize("is_adverse", [False, True], ids=["eager", "adverse"])
@pytest.mark.parametrize(("config", "page_size"), cases(CONFIGS))
def test_prefill(config: PrefillConfig, page_size: int | None, is_adverse: bool) -> None:
    """Schedule and seed go with the kernel, so that the kernels together see many of both."""
    seed = CONFIGS.index(config)
    schedule = ADVERSE[seed % len(ADVERSE)] if is_adverse else "eager"
    check(config, page_size, heads=2, kv_heads=1, schedule=schedule, seed=seed)


@pytest.mark.slow_emulator
@pytest.mark.parametrize("schedule", ["eager", *ADVERSE])
@pytest.mark.parametrize(("config", "page_size"), cases(REST))
def test_other_configs(config: PrefillConfig, page_size: int | None, schedule: str) -> None:
    check(config, page_size, heads=4, kv_heads=2, schedule=schedule, seed=REST.index(config))
