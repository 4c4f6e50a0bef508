"""Decode of sm_120 in the emulator, against float64, in an ordinary and an adverse schedule.

The detectors are on, as for Hopper's kernels. On a Hopper GPU, ``HOPWELL_KERNELS=sm_120a python -m pytest -m gpu`` runs
the tests of decode on these kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.batches.decode import DRAFT, NVFP4, DecodeBatch
from helpers.batches.prefill import check_requests_alone, same
from helpers.cases.decode import Case, check_config
from helpers.covering.configs import COVERING_SM120_DECODE
from helpers.device.schedules import schedules

from hopwell import emulator
from hopwell.kernels import execute
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.problem import Family, MaskKind
from tests.decode import test_light_weights as light_weights
from tests.decode import test_narrower_values as narrower_values
from tests.decode import test_nvfp4 as nvfp4
from tests.decode.test_clients import test_context_parallel_ranks as ranks_share_keys

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("sm120_emulated")]

ARCH = "sm_120a"
DECODE = [config for config in COVERING_SM120_DECODE if config.family is Family.DECODE]


@pytest.mark.parametrize("config", DECODE, ids=lambda config: config.name)
def test_decode(config: DecodeConfig) -> None:
    """Requests without keys, at the edges of leaves, and with fewer keys than tokens; drafts cross tiles and leaves.

    The largest tile gets more rows than it holds.
    """
    leaf, page = config.leaf_tokens, config.box_rows or 4
    most = config.rows_for(1000, config.head_dim_qk, config.kv_type)
    group = 2 * config.rows - 3 if config.rows == most else config.rows
    case = Case([1] * 4, [0, 1, leaf, leaf + 65], group, kv_heads=2)
    if config.mask is MaskKind.SLIDING_WINDOW:
        case = replace(case, window=leaf + 3)
    if config.mask is MaskKind.DRAFT:
        group = config.rows // 4
        case = Case([7, 0, 3, 1], [leaf + 2, 40, 1, 70], group, drafts="tree", window=leaf, ragged=True)
    check_config(config, case, page, "cpu", schedules(leaf, 1, arch=ARCH, strict=True))
    assert not emulator.report().warnings


def test_a_batch_is_its_requests_wherever_their_pages_are() -> None:
    """Requests across several CTAs, with rows in two tiles, have the same bits alone and with others."""
    data = DecodeBatch([5, 5, 5], [700, 3, 900], heads=16, kv_heads=2, head_dim=128, device="cpu")
    out, other = execute(data.decode(16, DRAFT)), data.decode(16, DRAFT, order=7)
    same(data.decode(16, DRAFT), key=other.key, value=other.value, page_table=other.page_table)
    check_requests_alone(data, out, 16, DRAFT)


def test_drafts_over_nvfp4_caches() -> None:
    """Through the entry, in several tiles of rows, a request gives the same bits alone and in the batch."""
    nvfp4.test_drafts_with_a_window_and_sinks(group=20, device="cpu")


@pytest.mark.parametrize(("dims", "page_size"), [((96, 96), 7), ((192, 192), 16)])
def test_nvfp4_rows_of_other_sizes(dims: tuple[int, int], page_size: int) -> None:
    nvfp4.test_rows_of_other_sizes(dims, 9, page_size, "cpu")


def test_nvfp4_gives_the_bits_of_e4m3() -> None:
    nvfp4.test_bits_are_those_of_e4m3(head_dim=128, group=3, device="cpu")


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["wide", "e4m3"])
def test_values_narrower_than_keys(kv_dtype: torch.dtype | None) -> None:
    """Through the entry, with drafts, a window and sinks, in several tiles of rows."""
    narrower_values.test_drafts(heads=18, kv_dtype=kv_dtype, device="cpu")


@pytest.mark.parametrize(("kv_dtype", "rows"), [(torch.float8_e4m3fn, 4), (NVFP4, 36)], ids=["e4m3", "nvfp4"])
def test_light_keys_beside_a_heavy_one(kv_dtype: torch.dtype, rows: int) -> None:
    light_weights.test_light_keys_beside_a_heavy_one(25.9, kv_dtype, rows, "cpu")


def test_hopper_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DecodeBatch([1, 1], [300, 70], heads=8, kv_heads=1, head_dim=128, device="cpu").decode(16)
    out = execute(problem).clone()
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_90a")
    monkeypatch.setenv("HOPWELL_KERNELS", ARCH)
    assert torch.equal(execute(problem), out)


def test_ranks_that_share_keys() -> None:
    ranks_share_keys([1] * 5, 4, None, "cpu")
