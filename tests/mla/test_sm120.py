"""MLA of sm_120 in the emulator, against float64, in an ordinary and an adverse schedule.

The detectors are on, as for Hopper's kernels. On a Hopper GPU, ``HOPWELL_KERNELS=sm_120a python -m pytest -m gpu`` runs
the tests of MLA on these kernels.
"""

from __future__ import annotations

import pytest
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import check_requests_alone
from helpers.cases.mla import Case, check_case
from helpers.covering.configs import COVERING_SM120_DECODE
from helpers.device.schedules import schedules

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.config.mla import MlaConfig
from tests.mla.test_clients import test_context_parallel_ranks as ranks_share_keys

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("sm120_emulated")]

ARCH = "sm_120a"
MLA = [config for config in COVERING_SM120_DECODE if isinstance(config, MlaConfig)]


@pytest.mark.parametrize("config", MLA, ids=lambda config: config.name)
def test_mla(config: MlaConfig) -> None:
    """Top-k indices have gaps, and dense keys are in pages of one and of 64, in several row tiles.

    The third request's first token does not see the last key, which has a leaf to itself.
    """
    dims, page = (config.head_dim_qk, config.head_dim_v), config.box_rows or 1
    heads, top_k = (20, 132) if config.sparse else (17, 0)
    case = Case([2, 1, 2, 0], [1, 129, config.leaf_tokens + 1, 3], heads, dims, top_k=top_k, ragged=True)
    check_case(case, page, "cpu", schedules(heads, 1, arch=ARCH, strict=True), config)
    assert not emulator.report().warnings


def test_a_latent_batch_is_its_requests() -> None:
    data = MlaBatch([1, 1], [1100, 70], heads=128, device="cpu")
    out = execute(data.decode(64))
    data.expected_mla().check(out)
    check_requests_alone(data, out, 64)


def test_ranks_that_share_keys() -> None:
    ranks_share_keys([5] * 4, 2, 3, "cpu")
