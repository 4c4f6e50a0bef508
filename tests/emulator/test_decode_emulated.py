"""The decode kernels on the emulator, against float64, in one ordinary and two adverse schedules.

All of them run under the race detector and the proxy check. What a kernel must not read or must not leave out is NaN,
and so is the scratch at first; what one launch leaves there the next one finds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from covering import COVERING_DECODE
from decode_cases import HEAD_DIMS, Case, Setting, check_config

from hopwell import emulator
from hopwell.kernels import splitting
from hopwell.kernels.config import KvFetch
from hopwell.kernels.decode_config import DecodeConfig
from hopwell.kernels.problem import MaskKind
from hopwell.kernels.splitting import CHUNK_TOKENS as CHUNK
from hopwell.kernels.splitting import GROUP_PIECES

pytestmark = pytest.mark.emulator

BF16 = [config for config in COVERING_DECODE if config.dtype == "bf16"]


def setting(schedule: str, seed: int = 0) -> Setting:
    return functools.partial(emulator.use, "sm_90a", schedule=schedule, seed=seed, race=True, proxy=True)


def schedules(seed: int, adverse: int = 2) -> Sequence[Setting]:
    """The seed goes with the case, so that the cases together see many schedules."""
    drawn = [setting(("random", "priority")[i % 2], seed + i) for i in range(adverse)]
    return setting("eager"), *drawn


def kernel(head_dim: int, mask: MaskKind, dtype: str = "bf16") -> DecodeConfig:
    """The kernel for pages of 16 tokens."""
    wanted = (head_dim, mask, dtype, 16)
    return next(c for c in COVERING_DECODE if (c.head_dim_qk, c.mask, c.dtype, c.box_rows) == wanted)


def page_sizes(config: DecodeConfig) -> list[int]:
    if config.kv_fetch is KvFetch.PAGE_ROWS:
        return [1, 4]
    tallest = max(c.box_rows for c in BF16 if c.head_dim_qk == config.head_dim_qk)
    # Pages beyond the tallest box are several boxes.
    return [config.box_rows, 256] if config.box_rows == tallest else [config.box_rows]


def cases() -> Iterator[object]:
    for config in BF16:
        yield from (pytest.param(config, size, id=f"{config.name}-page{size}") for size in page_sizes(config))


LENGTHS = [0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77]
# New tokens and keys: fewer keys than tokens, drafts across the end of a chunk, and requests without tokens.
DRAFTS = [(3, 1), (0, 40), (5, 5), (1, CHUNK), (37, CHUNK + 9), (2, 0), (33, 2 * CHUNK + 40)]


@pytest.mark.parametrize(("config", "page_size"), cases())
def test_decode(config: DecodeConfig, page_size: int) -> None:
    """A few requests from no keys to three chunks; with drafts more rows than a tile has."""
    seed = BF16.index(config)
    case = Case([1] * len(LENGTHS), LENGTHS, group=(1, 3, 4, 7, 16)[seed % 5], kv_heads=2)
    if config.mask is MaskKind.SLIDING_WINDOW:
        case = replace(case, window=(70, CHUNK + 3)[seed % 2])
    if config.mask is MaskKind.DRAFT:
        q_lens, kv_lens = zip(*DRAFTS, strict=True)
        window = (-1, 100, 0, CHUNK - 5)[seed % 4]
        kind = ("tree", "any", "full", "linear", "none")[seed % 5]
        case = Case(q_lens, kv_lens, (3, 4, 1, 6)[seed % 4], window=window, drafts=kind, ragged=True)
    check_config(config, case, page_size, "cpu", schedules(10 * seed))
    assert not emulator.report().warnings


FP16 = [config for config in COVERING_DECODE if config.dtype == "fp16"]


@pytest.mark.parametrize("config", FP16, ids=lambda config: config.name)
def test_fp16(config: DecodeConfig) -> None:
    check_config(config, Case([9] * 3, [70, 9, CHUNK + 33], group=5), 16, "cpu", schedules(FP16.index(config)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scales_on_the_device(head_dim: int) -> None:
    case = Case([2, 2], [90, CHUNK + 33], group=4, tensor_scales=True, sinks=False)
    check_config(kernel(head_dim, MaskKind.DRAFT), case, 16, "cpu", schedules(3, adverse=1))


@pytest.mark.parametrize("group", [1, 5, 16])
def test_more_requests_than_lanes(group: int) -> None:
    """And more work than CTAs: units of many requests are found in the right order."""
    lengths = [(0, 3, 40, CHUNK + 1)[i * i % 7 % 4] for i in range(75)]
    case = Case([1] * len(lengths), lengths, group=group, sinks=False)
    check_config(kernel(64, MaskKind.FULL), case, 16, "cpu", schedules(group))


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 1), (64, 3), (512, 1)])
def test_two_levels_of_merges(head_dim: int, kv_heads: int) -> None:
    """Chunks in one group and one more, in two whole groups, and in three; and a window that leaves few of many."""
    lengths = [(GROUP_PIECES + 1) * CHUNK, GROUP_PIECES * CHUNK, 2 * GROUP_PIECES * CHUNK, 2 * GROUP_PIECES * CHUNK + 1]
    count = 4 if head_dim == 64 else 2
    case = Case([1] * count, lengths[:count], group=2, kv_heads=kv_heads)
    check_config(kernel(head_dim, MaskKind.FULL), case, 16, "cpu", schedules(kv_heads, adverse=1))
    short = replace(case, window=2 * CHUNK)
    check_config(kernel(head_dim, MaskKind.SLIDING_WINDOW), short, 16, "cpu", schedules(kv_heads, adverse=1))


# As few slots as there may be, so that pieces wait for each other.
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("head_dim", "kv_heads", "group", "q_len"), [(64, 1, 2, 1), (64, 2, 3, 30), (512, 1, 1, 1)])
def test_slots_are_used_again(
    head_dim: int, kv_heads: int, group: int, q_len: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many requests of unlike numbers of pieces, and a ring that holds one request and little more."""
    monkeypatch.setattr(splitting, "COMFORTABLE_BYTES", 0)
    monkeypatch.setattr(splitting, "UNDER_WAY", 1)
    chunks = [18, 2, 3, 1, 17, 2, 2, 5, 18, 4] if q_len == 1 else [4, 2, 3, 1, 2, 4, 2]
    case = Case([q_len] * len(chunks), [n * CHUNK - 5 for n in chunks], group, kv_heads, sinks=False)
    mask = MaskKind.DRAFT if q_len > 1 else MaskKind.FULL
    schedule = ("random", "priority")[seed % 2]
    check_config(kernel(head_dim, mask), case, 16, "cpu", [setting(schedule, seed)])
