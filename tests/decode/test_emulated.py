"""The decode kernels in the emulator, against float64, in one ordinary and two adverse schedules.

All of them run under the race detector and the proxy check. Data that a kernel must not read or must overwrite is NaN,
and so is the scratch at first. Each launch finds the scratch contents of the launch before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.batches.prefill import check_requests_alone
from helpers.cases.decode import (
    HEAD_DIMS,
    Case,
    batch_of,
    check_config,
    config_for,
    cut_tokens,
    fewest_rows,
    mask_of,
    takes_ragged_drafts,
)
from helpers.covering.configs import COVERING_DECODE
from helpers.device.schedules import schedules, setting

from hopwell import emulator
from hopwell.kernels import execute, registry
from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import FAN_IN, ROWS
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import MaskKind

pytestmark = pytest.mark.emulator

# Head dims and caches whose kernels run with other dtypes of query and output than bf16.
OTHER_DTYPES = ((128, KvType.WIDE), (64, KvType.E4M3), (64, KvType.NVFP4), (128, KvType.NVFP4))


def is_emulated(config: DecodeConfig) -> bool:
    """Whether a config is emulated: all except configs that would only take longer.

    Boxes between 16 tokens and the tallest are left out. Other caches and dtypes have one head dim each if it has no
    effect.
    """
    if config.dtype != "bf16" or config.out_dtype != "bf16":
        return (config.head_dim_qk, config.kv_type) in OTHER_DTYPES
    if config.kv_type is KvType.WIDE:
        return config.box_rows in (0, 16, tallest(config)) or (config.head_dim_qk, config.box_rows) == (128, 8)
    if config.kv_type is KvType.INT8:
        return config.head_dim_qk == 128 or (config.head_dim_qk == 512 and config.has_tree)
    decides = config.mask is MaskKind.DRAFT or config.head_dim_qk in (80, 128) or config.has_tree
    # Rows of the widest heads take half a minute; the tests of entries have them.
    return decides and config.box_rows in ((16,) if config.dequantizes_in_place else (0, 16))


def tallest(config: DecodeConfig) -> int:
    return min(64, config.tile.n)


CONFIGS = [config for config in COVERING_DECODE if is_emulated(config)]


def page_sizes(config: DecodeConfig) -> list[int]:
    if config.kv_fetch is KvFetch.PAGE_ROWS:
        return [1, 4]
    # Pages beyond the tallest box are several boxes.
    return [config.box_rows, 256] if config.box_rows == tallest(config) else [config.box_rows]


def cases() -> Iterator[object]:
    for config in CONFIGS:
        yield from (pytest.param(config, size, id=f"{config.name}-page{size}") for size in page_sizes(config))


def lengths(chunk: int) -> list[int]:
    return [0, 1, 5, chunk - 1, chunk, chunk + 1, 2 * chunk + 77]


def drafts(chunk: int, most: int) -> list[tuple[int, int]]:
    """Return new tokens, up to ``most``, and keys.

    The cases are fewer keys than tokens, drafts across the end of a chunk, and requests without tokens.
    """
    return [(3, 1), (0, 40), (5, 5), (1, chunk), (most, chunk + most // 4), (2, 0), (most - 4, 2 * chunk + 40)]


@pytest.mark.parametrize(("config", "page_size"), [*cases()])
def test_decode(config: DecodeConfig, page_size: int) -> None:
    """A few requests have zero keys to three chunks or leaves; drafts fill a tile of rows, or exceed it."""
    seed, chunk = CONFIGS.index(config), cut_tokens(config)
    group = min(fewest_rows(config) + (0, 2, 3, 6, 15)[seed % 5], config.rows)
    case = Case([1] * 7, lengths(chunk), group, kv_heads=2)
    if config.mask is MaskKind.SLIDING_WINDOW:
        case = replace(case, window=(70, chunk + 3)[seed % 2])
    if config.mask is MaskKind.DRAFT:
        most, group = (8, config.rows // 8) if config.rows < ROWS else (37, (3, 4, 1, 6)[seed % 4])
        q_lens, kv_lens = zip(*drafts(chunk, most), strict=True)
        window = (-1, 100, 0, chunk - 5)[seed % 4]
        kind = ("tree", "any", "full", "linear", "none")[seed % 5]
        ragged = takes_ragged_drafts(config)
        q_lens = q_lens if ragged else [most] * len(q_lens)
        case = Case(q_lens, kv_lens, group, window=window, drafts=kind, ragged=ragged)
    check_config(config, case, page_size, "cpu", schedules(10 * seed))
    assert not emulator.report().warnings


@pytest.mark.parametrize(
    ("head_dim", "group", "kv_type"),
    [(128, 4, KvType.WIDE), (128, 4, KvType.E4M3), *((head_dim, 20, KvType.WIDE) for head_dim in HEAD_DIMS)],
)
def test_scales_on_the_device(head_dim: int, group: int, kv_type: KvType) -> None:
    config = config_for(head_dim, MaskKind.DRAFT, 16, kv_type=kv_type, rows=2 * group)
    case = Case([2, 2], [90, cut_tokens(config) + 33], group, tensor_scales=True, sinks=False)
    check_config(config, case, 16, "cpu", schedules(3, adverse=1))


@pytest.mark.parametrize(
    ("kv_type", "head_dim", "group"),
    [
        (KvType.E4M3, 144, 3),
        (KvType.E4M3, 192, 20),
        (KvType.E4M3, 240, 9),
        (KvType.INT8, 176, 8),
        (KvType.INT8, 208, 40),
    ],
)
def test_widths_of_8_bits_with_a_second_block_of_columns(kv_type: KvType, head_dim: int, group: int) -> None:
    config = config_for(head_dim, MaskKind.FULL, 16, kv_type=kv_type, rows=group)
    case = Case([1] * 4, [0, 3, cut_tokens(config), 2 * cut_tokens(config) + 77], group, kv_heads=2)
    check_config(config, case, 16, "cpu", schedules(head_dim, adverse=1))
    assert not emulator.report().warnings


@pytest.mark.parametrize(
    ("group", "kv_type"), [(1, KvType.WIDE), (5, KvType.WIDE), (33, KvType.WIDE), (3, KvType.INT8)]
)
def test_more_requests_than_lanes(group: int, kv_type: KvType) -> None:
    """More work than CTAs: work tiles of many requests are found in the right order."""
    config = config_for(64, MaskKind.FULL, 16, kv_type=kv_type, rows=group)
    kv_lens = [(0, 3, 40, cut_tokens(config) + 1)[i * i % 7 % 4] for i in range(75)]
    case = Case([1] * len(kv_lens), kv_lens, group=group, sinks=False)
    check_config(config, case, 16, "cpu", schedules(group, adverse=1))


@pytest.mark.parametrize("leaves", [4, 8, 15, 33])
@pytest.mark.parametrize(
    ("head_dim", "rows", "kv_type", "window"),
    [
        (128, 4, KvType.WIDE, -1),
        (64, 4, KvType.WIDE, 3000),
        (208, 4, KvType.E4M3, -1),
        (128, 12, KvType.INT8, -1),
        (128, 32, KvType.E4M3, -1),
        (64, 28, KvType.NVFP4, 3000),
    ],
)
def test_a_single_request_is_as_one_of_several(
    head_dim: int, rows: int, kv_type: KvType, window: int, leaves: int
) -> None:
    """Its blocks of leaves are longer."""
    kind = MaskKind.FULL if window < 0 else MaskKind.SLIDING_WINDOW
    config = config_for(head_dim, kind, 16, kv_type=kv_type, rows=rows)
    case = Case([1], [leaves * cut_tokens(config) - leaves % 2], rows, kv_heads=1, window=window)
    check_config(config, case, 16, "cpu", schedules(leaves, adverse=1))
    alone, mask = batch_of(config, case, "cpu"), mask_of(config, case)
    want = execute(alone.decode(16, mask))
    assert torch.equal(execute(alone.repeated(3).decode(16, mask)), want.expand(3, -1, -1))


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(144, 1), (256, 2), (512, 1)])
def test_two_levels_of_combines(head_dim: int, kv_heads: int) -> None:
    """There are chunks of one fan-in group and one more, of three groups and of one whole group, and a short window."""
    full, windowed = (config_for(head_dim, mask, 16, rows=33) for mask in (MaskKind.FULL, MaskKind.SLIDING_WINDOW))
    n, chunk = FAN_IN, cut_tokens(full)
    kv_lens = [(n + 1) * chunk, 2 * n * chunk + 1, n * chunk][: 3 if head_dim == 144 else 1]
    case = Case([1] * len(kv_lens), kv_lens, group=33, kv_heads=kv_heads)
    check_config(full, case, 16, "cpu", schedules(kv_heads, adverse=1))
    check_config(windowed, replace(case, window=2 * chunk), 16, "cpu", schedules(kv_heads, adverse=1))


@pytest.mark.parametrize("seed", range(4))
def test_warps_that_have_parted_meet_before_they_hand_work_back(seed: int) -> None:
    """Some lanes of a combining warp have one store more than the others. Few schedules keep the lanes together."""
    config = config_for(512, MaskKind.FULL, 64, rows=16)
    kv_lens = [cut_tokens(config) - 1, 2 * cut_tokens(config), 4 * cut_tokens(config) + 77, 3]
    check_config(config, Case([1] * 4, kv_lens, group=16), 64, "cpu", [setting("random", seed)])


# Partials wait for earlier partials in their slot, more often with fewer slots: here one request's slots and little
# more.
@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "COMFORTABLE_BYTES", 0)
    monkeypatch.setattr(splitting, "IN_FLIGHT", 1)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "q_len"), [(256, 1, 17, 1), (144, 2, 3, 30), (512, 1, 9, 1)])
def test_slots_are_used_again(head_dim: int, kv_heads: int, group: int, q_len: int) -> None:
    """Requests with one fan-in group of partials and with two reuse slots."""
    config = config_for(head_dim, MaskKind.DRAFT if q_len > 1 else MaskKind.FULL, 16, rows=group * q_len)
    chunks = [18, 2, 3, 1, 17, 2, 2, 5, 18, 4] if q_len == 1 else [4, 2, 3, 1, 2, 4, 2]
    case = Case([q_len] * len(chunks), [n * cut_tokens(config) - 5 for n in chunks], group, kv_heads, sinks=False)
    check_config(config, case, 16, "cpu", schedules(head_dim))


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize("seed", range(4))
def test_slots_that_keep_count_are_waited_for(seed: int) -> None:
    """Ten slots: requests of four partials reuse the slots of two requests of two partials.

    The second request may be done before the first, which still counts its partials in the slot that will count the
    four. One schedule in ten does that.
    """
    config = config_for(144, MaskKind.FULL, 16, rows=33)
    chunks = ([2] * 5 + [4, 4, 2]) * 3
    case = Case([1] * len(chunks), [n * cut_tokens(config) - 5 for n in chunks], group=33, sinks=False)
    check_config(config, case, 16, "cpu", [setting("priority", seed, resident=4)])


# With one head, every CTA has a range of its own; with three, some CTAs have none. With five all are handed out, or
# with nine if two CTAs share an SM.
@pytest.mark.parametrize(
    ("head_dim", "rows", "kv_heads", "kv_type"),
    [
        *((128, *sizes, KvType.WIDE) for sizes in ((8, 1), (8, 3), (32, 5), (16, 2))),
        *((256, 8, kv_heads, KvType.E4M3) for kv_heads in (1, 3, 9)),
        (64, 64, 3, KvType.WIDE),
        *((128, 16, kv_heads, KvType.E4M3) for kv_heads in (1, 9)),
        (64, 32, 3, KvType.E4M3),
        *((128, 32, kv_heads, KvType.NVFP4) for kv_heads in (1, 5)),
        (96, 32, 2, KvType.INT8),
        (128, 64, 2, KvType.NVFP4),
        (512, 8, 1, KvType.INT8),
    ],
)
def test_whoever_has_which_leaves(head_dim: int, rows: int, kv_heads: int, kv_type: KvType) -> None:
    """A batch equals its requests one by one, bit for bit, although each single request is divided among the CTAs
    alone.

    Long lines leave nodes for combines in two rounds. With 32 rows, or 256 columns and half of the shared memory, more
    levels wait than there is room for. With 64 rows, or 32 rows of 8 bits, long requests begin the tree above leaves.
    """
    config = config_for(head_dim, MaskKind.FULL, 64, kv_type=kv_type, rows=rows)
    leaf = config.leaf_tokens
    kv_lens = [40 * leaf + 5, 0, 3 * leaf, 1, 17 * leaf - 1, 33 * leaf]
    case = Case([1] * len(kv_lens), kv_lens, group=rows, kv_heads=kv_heads, sinks=False)
    check_config(config, case, 64, "cpu", schedules(rows, adverse=1))
    data = batch_of(config, case, "cpu")
    out = execute(data.decode(64))
    check_requests_alone(data, out, 64)


# Rows of one warpgroup, of two that split the keys, of two that split the rows, and of the widest heads.
NARROW_KERNELS = [
    (KvType.E4M3, 128, 12),
    (KvType.NVFP4, 96, 16),
    (KvType.INT8, 64, 20),
    (KvType.E4M3, 128, 32),
    (KvType.NVFP4, 128, 24),
    (KvType.NVFP4, 128, 64),
    (KvType.E4M3, 512, 8),
]


@pytest.mark.parametrize(("kv_type", "head_dim", "rows"), NARROW_KERNELS)
def test_bits_depend_on_neither_ctas_nor_pages(
    kv_type: KvType, head_dim: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CTA takes all leaves of two new tokens, or several CTAs share a request. Pages that no request has are NaN,
    and so are their scales."""
    config = config_for(head_dim, MaskKind.DRAFT, 16, kv_type=kv_type, rows=rows)
    leaf = config.leaf_tokens
    case = Case([2, 2, 2], [12 * leaf + 9, 5, 3 * leaf], rows // 2, window=9 * leaf)
    data, mask = batch_of(config, case, "cpu"), mask_of(config, case)
    sinks = torch.linspace(-1.0, 2.0, data.heads)
    problem, other = data.decode(16, mask, sinks=sinks), data.decode(16, mask, sinks=sinks, order=7)
    assert registry.resolve(problem, config.arch) == config
    cache = problem.key if problem.kv_scales is None else problem.kv_scales.key
    assert cache.dtype is torch.int8 or cache.float().isnan().any()
    out = execute(problem).clone()
    data.expected_decode(mask, sinks=sinks).check(out)
    assert torch.equal(execute(other), out)
    check_requests_alone(data, out, 16, mask, sinks=sinks)
    for sms in (1, 3):
        monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
        for way in schedules(sms, adverse=1):
            with way():
                assert torch.equal(execute(data.decode(16, mask, sinks=sinks)), out)
    assert not emulator.report().warnings
