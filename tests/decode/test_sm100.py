"""Decode of Blackwell with tcgen05 in the emulator, against float64, in ordinary and adverse schedules.

These kernels have not run on a GPU. They run under the race detector, the proxy check and strict mode. Data is
NaN where a kernel must not read it, or must overwrite it. Results have the bits of Hopper's kernels, except where 32 or
64 rows add complete leaves, and where Hopper's warpgroups split the keys of 32 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.batches.decode import DRAFT, NVFP4, DecodeBatch
from helpers.batches.fp8 import E4M3
from helpers.batches.prefill import check_requests_alone, same
from helpers.cases.decode import TORCH_DTYPES, Case, batch_of, check_config, fewest_rows, mask_of, takes_ragged_drafts
from helpers.covering.configs import PAGES16, PAGES64
from helpers.covering.sm100_decode import COVERING_SM100_DECODE, page_size
from helpers.device.schedules import Setting, schedules, setting

from hopwell import emulator
from hopwell.kernels import execute, registry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.decode import MOST_ROWS_IN_REGISTERS
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import AttentionProblem, Family, MaskKind
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.support import BLACKWELL
from tests.decode import test_clients as clients

pytestmark = pytest.mark.emulator

ARCH, HOPPER = "sm_100a", "sm_90a"


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give CPU tensors the kernels of Blackwell, and refuse problems that tcgen05 decode does not serve."""
    monkeypatch.setenv("HOPWELL_EMULATE", ARCH)
    for arch in BLACKWELL:
        first, *_ = registry.IMPLEMENTATIONS[Family.DECODE, arch]
        assert first.config is Sm100DecodeConfig
        monkeypatch.setitem(registry.IMPLEMENTATIONS, (Family.DECODE, arch), (first,))


def all_schedules(seed: int, arch: str = ARCH) -> Sequence[Setting]:
    """Return the settings of a case; late work comes last in one of them."""
    return *schedules(seed, 1, arch=arch, strict=True), setting("late", seed, arch, strict=True)


def config_for(dim: int, rows: int, mask: MaskKind = MaskKind.FULL, fetch=PAGES16) -> Sm100DecodeConfig:
    return Sm100DecodeConfig(ARCH, "bf16", "bf16", dim, dim, mask, *fetch, KvType.WIDE, rows)


def case_of(config: Sm100DecodeConfig) -> Case:
    """Return requests without keys, at the edges of leaves, and with fewer keys than tokens. Drafts cross tiles and
    leaves. Rows fill a tile, or are the fewest that this kernel serves."""
    leaf, seed = config.leaf_tokens, COVERING_SM100_DECODE.index(config)
    group = config.rows if seed % 2 else fewest_rows(config)
    case = Case([1] * 4, [0, 1, leaf, leaf + 65], group, kv_heads=2)
    if config.mask is MaskKind.SLIDING_WINDOW:
        return replace(case, window=(70, leaf + 3)[seed % 2])
    if config.mask is MaskKind.DRAFT:
        q_lens, kind = [8, 0, 3, 1], ("tree", "any", "full", "none")[seed % 4]
        ragged = config.short_leaves or takes_ragged_drafts(config)
        return Case(
            q_lens if ragged else [8] * 4,
            [leaf + 2, 40, 1, 70],
            config.rows // 8,
            window=(-1, leaf)[seed % 2],
            drafts=kind,
            ragged=ragged,
        )
    return case


@pytest.mark.parametrize("config", COVERING_SM100_DECODE, ids=lambda config: config.name)
def test_decode(config: Sm100DecodeConfig) -> None:
    ways = all_schedules(COVERING_SM100_DECODE.index(config), config.arch)
    check_config(config, case_of(config), page_size(config), "cpu", ways)
    assert not emulator.report().warnings


def both(problem: AttentionProblem, arch: str = ARCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of tcgen05 decode and of Hopper's kernel. Each finds NaN in the scratch and in its output."""
    found = []
    for each in (arch, HOPPER):
        assert isinstance(registry.resolve(problem, each), Sm100DecodeConfig) == (each == arch)
        fresh = {name: torch.full_like(getattr(problem, name), torch.nan) for name in ("out", "scratch")}
        with emulator.use(each):
            found.append(execute(replace(problem, **fresh)))
    return found[0], found[1]


# Hopper's warpgroups split the keys of 32 rows over 8-bit and 4-bit caches, so products are added in another order.
LIKE_HOPPER = [c for c in COVERING_SM100_DECODE if c.kv_type is KvType.WIDE or c.rows != MOST_ROWS_IN_REGISTERS]


@pytest.mark.parametrize("config", LIKE_HOPPER, ids=lambda config: config.name)
def test_bits_are_those_of_hopper(config: Sm100DecodeConfig) -> None:
    """Leaves, tree and registers are Hopper's. Requests are long enough for a tree of several levels."""
    case, leaf = case_of(config), config.leaf_tokens
    case = replace(case, kv_lens=[*case.kv_lens[:2], leaf - 3, 5 * leaf + 70])
    data, mask = batch_of(config, case, "cpu"), mask_of(config, case)
    problem = data.decode(page_size(config), mask, ragged=case.ragged, sinks=torch.linspace(-1.0, 2.0, data.heads))
    problem = replace(problem, out=problem.out.to(TORCH_DTYPES[config.out_dtype]))
    assert registry.resolve(problem, config.arch) == config
    found, hopper = both(problem, config.arch)
    if config.kv_type is not KvType.NVFP4:
        assert torch.equal(found, hopper)
    else:  # an instruction sums over other columns of K, so few results are rounded to the other side
        assert (found != hopper).float().mean() < 0.01
        torch.testing.assert_close(found.float(), hopper.float(), rtol=2 * torch.finfo(found.dtype).eps, atol=1e-4)


@pytest.mark.parametrize("group", [8, 33])
def test_scales_on_the_device(group: int) -> None:
    config = config_for(128, 16 if group == 8 else 64, MaskKind.DRAFT if group == 8 else MaskKind.FULL)
    q_len = 2 if group == 8 else 1
    case = Case([q_len] * 2, [90, config.leaf_tokens + 33], group, tensor_scales=True, sinks=False)
    check_config(config, case, 16, "cpu", all_schedules(3))


@pytest.mark.parametrize(
    ("dim", "rows", "kv_type", "group", "q_len"),
    [
        (128, 64, KvType.WIDE, 130, 1),
        (256, 16, KvType.WIDE, 8, 5),
        (128, 64, KvType.NVFP4, 12, 6),
        (256, 8, KvType.E4M3, 21, 1),
    ],
)
def test_more_rows_than_a_tile(dim: int, rows: int, kv_type: KvType, group: int, q_len: int) -> None:
    """More packed rows take several work tiles. Their last tile has fewer rows."""
    mask = MaskKind.DRAFT if q_len > 1 else MaskKind.FULL
    config = replace(config_for(dim, rows, mask), kv_type=kv_type)
    case = Case([q_len] * 3, [1, config.leaf_tokens + 33, 70], group)
    check_config(config, case, 16, "cpu", all_schedules(rows))
    assert not emulator.report().warnings


@pytest.mark.parametrize("rows", [8, 64])
def test_more_requests_than_lanes(rows: int) -> None:
    """More work than CTAs: work tiles of many requests are found in the right order."""
    config = config_for(64, rows)
    kv_lens = [(0, 3, 40, config.leaf_tokens + 1)[i * i % 7 % 4] for i in range(75)]
    case = Case([1] * len(kv_lens), kv_lens, group=rows - 3, sinks=False)
    check_config(config, case, 16, "cpu", all_schedules(rows))
    assert not emulator.report().warnings


@pytest.mark.parametrize(("dim", "rows", "kv_heads"), [(128, 8, 1), (256, 16, 2), (128, 32, 5), (64, 64, 3)])
def test_whoever_has_which_leaves(dim: int, rows: int, kv_heads: int) -> None:
    """A batch equals its requests one by one, bit for bit, although each single request is divided among the CTAs
    alone. Long requests leave nodes in memory, and with 32 or 64 rows they begin the tree above leaves."""
    config = config_for(dim, rows, fetch=PAGES64)
    leaf = config.leaf_tokens
    kv_lens = [40 * leaf + 5, 0, 3 * leaf, 1, 17 * leaf - 1]
    case = Case([1] * len(kv_lens), kv_lens, group=rows, kv_heads=kv_heads, sinks=False)
    check_config(config, case, 64, "cpu", all_schedules(rows))
    assert not emulator.report().warnings
    data = batch_of(config, case, "cpu")
    out = execute(data.decode(64)).clone()
    check_requests_alone(data, out, 64)
    if not config.accumulated_levels:  # otherwise a complete leaf is added to O, where wgmma adds tile by tile
        assert torch.equal(*both(data.decode(64)))


@pytest.mark.parametrize(
    ("dim", "rows", "kv_dtype"), [(128, 8, None), (64, 64, None), (128, 8, NVFP4), (64, 8, E4M3), (128, 32, E4M3)]
)
@pytest.mark.parametrize("sms", [1, 3])
def test_bits_do_not_depend_on_the_number_of_ctas(
    dim: int, rows: int, kv_dtype: torch.dtype | None, sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SM takes every leaf, and reuses every stage of shared memory and its tensor memory. Up to three CTAs share
    it."""
    sizes = dict(heads=rows, kv_heads=1, head_dim=dim)
    data = DecodeBatch([1, 1], [2000, 300], **sizes, kv_dtype=kv_dtype, device="cpu")
    want = execute(data.decode(16)).clone()
    monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
    for way in all_schedules(sms):
        with way():
            assert torch.equal(execute(data.decode(16)), want)
    assert not emulator.report().warnings


@pytest.mark.parametrize("group", [3, 12])
def test_a_batch_is_its_requests_wherever_their_pages_are(group: int) -> None:
    """Requests across several CTAs have the same bits alone and with others, and in both layouts of pages. Pages that
    no request has are NaN."""
    data = DecodeBatch([5, 5, 5], [700, 3, 900], heads=2 * group, kv_heads=2, head_dim=128, device="cpu")
    problem, other = data.decode(16, DRAFT), data.decode(16, DRAFT, order=7)
    assert isinstance(registry.resolve(problem, ARCH), Sm100DecodeConfig)
    assert problem.key.isnan().any()
    out = execute(problem).clone()
    assert not out.isnan().any()
    same(problem, key=other.key, value=other.value, page_table=other.page_table)
    same(problem, **{name: in_nhd(getattr(problem, name)) for name in ("key", "value")})
    check_requests_alone(data, out, 16, DRAFT)


def in_nhd(pool: torch.Tensor) -> torch.Tensor:
    """Return the pages in memory as [pages, tokens, heads, dim], viewed as [pages, heads, tokens, dim]."""
    return pool.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(("q_lens", "heads"), [([1] * 5, 4), ([3] * 5, 16)])
def test_ranks_that_share_keys(q_lens: list[int], heads: int) -> None:
    """DCP ranks have every second key, and their outputs merge to the output of all keys."""
    clients.test_context_parallel_ranks(q_lens, heads, None, "cpu")


def test_ragged_drafts_do_not_depend_on_their_bound() -> None:
    """Short leaves keep the bits of a request when others have more tokens."""
    clients.test_uneven_drafts_do_not_change_a_request(None, "cpu")


def test_more_new_tokens_than_their_bound() -> None:
    clients.test_more_new_tokens_than_their_bound(16, "cpu")


def test_pages_of_k_and_v() -> None:
    """K and V have separate page ids, in both layouts."""
    for layout in ("HND", "NHD"):
        clients.test_pages_of_k_and_v(3, None, layout, "cpu")


@pytest.mark.parametrize("rows", [8, 64])
def test_large_and_equal_logits(rows: int) -> None:
    """Uniform rows, and rows that few keys dominate."""
    config = config_for(128, rows)
    for magnitude in (0.0, 8.0):
        case = Case([1, 1], [config.leaf_tokens - 1, 3 * config.leaf_tokens], rows, magnitude=magnitude, sinks=False)
        check_config(config, case, 16, "cpu", all_schedules(rows))
