"""Spills of Hopper decode of 16 rows over 8-bit and 4-bit caches."""

from __future__ import annotations

import pytest
from helpers.covering.configs import COVERING_DECODE

from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import SWAP_AB_ROWS
from hopwell.kernels.jit.toolchain import artifact
from hopwell.perf.resources import Resources
from tests.kernels.test_compile import HEAD_SCALES

pytestmark = pytest.mark.compile

# Two CTAs share the registers of an SM, and 8 bytes of stack hold a 64-bit value. A step stores or loads it up to six
# times. Two CTAs are worth it: drafts of two tokens over e4m3 read 3958 instead of 2800 GB/s (H200, 2026-11-27).
MOST_STEP_SPILLS = 6
FEW_ROWS = [
    config
    for config in (*COVERING_DECODE, *HEAD_SCALES)
    if config.arch == "sm_90a" and config.rows == SWAP_AB_ROWS[1] and config.kv_type is not KvType.WIDE
]


@pytest.mark.parametrize("config", FEW_ROWS, ids=lambda config: config.name)
def test_spills_of_a_step(config: DecodeConfig) -> None:
    assert config.ctas_per_sm == 2
    assert Resources.of(artifact(config)).step_spills <= MOST_STEP_SPILLS
