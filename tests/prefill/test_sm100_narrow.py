"""Blackwell's prefill kernels over e4m3 and NVFP4 caches in the emulator, against float64.

They run in an ordinary and an adverse schedule. Four warps dequantize K and V in place, between the warps that load
them and the warp that multiplies them. Unused pages and the ends of last pages are NaN, block scales included.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.low_precision import BF16, E4M3, FP16, NVFP4, LowPrecisionBatch, check_nvfp4_near
from helpers.batches.prefill import CAUSAL, FULL, check_statistics, same
from helpers.cases.prefill_configs import CAPS, SKIP_SOFTMAX, mask_of
from helpers.covering.configs import covering_blackwell_narrow_configs

from hopwell import FP4Tensor, emulator
from hopwell.kernels import execute
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.config.prefill import MASKS, PrefillConfig
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import AttentionProblem, BlockScales, OutputScales, PageTable, Score
from hopwell.kernels.registry import resolve
from hopwell.kernels.sm100.prefill.config import Sm100PrefillConfig
from hopwell.layouts import NVFP4_BLOCK, swizzled_128x4_shape

CONFIGS = covering_blackwell_narrow_configs()
ADVERSE = ("late", "random", "priority")
CACHES = {KvType.E4M3: E4M3, KvType.NVFP4: NVFP4}
DTYPES = {"bf16": BF16, "fp16": FP16, "e4m3": E4M3}
HEADS, KV_HEADS = 2, 2
K_SCALES, V_SCALES = (0.25, 2.0), (4.0, 0.5)  # of KV heads; powers of two are exact in queries and values
FACTOR = 4.0  # of an NVFP4 output


def batch(config: PrefillConfig) -> LowPrecisionBatch:
    """Make requests of zero to three query tiles and zero to four key tiles. Some rows see no key."""
    m, n = config.tile.m, config.tile.n
    requests = [(5, 9), (0, 3), (1, 0), (7, 3), (m, 3 * n + 1), (2 * m + 3, n + 5)]
    sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=config.head_dim_qk, v_head_dim=config.head_dim_v)
    types: dict[str, Any] = dict(q_dtype=DTYPES[config.dtype], kv_dtype=CACHES[config.kv_type], dtype=BF16)
    scales = {} if config.k_head_scales else dict(k_scale=0.5, v_scale=2.0)
    return LowPrecisionBatch(*zip(*requests, strict=True), device="cpu", **sizes, **types, **scales)


def page_size_of(config: PrefillConfig) -> int | None:
    if config.kv_fetch is KvFetch.CONTIGUOUS:
        return None
    if config.kv_fetch is KvFetch.PAGE_BOXES:
        return config.box_rows
    return 6 if config.uneven_pages else 4


def problem_of(
    data: LowPrecisionBatch, page_size: int | None, *, linear: bool = False, **more: Any
) -> AttentionProblem:
    """Return a batch as a problem with a 16-bit output full of NaN, unless ``more`` has another."""
    out = torch.full((data.tokens, data.heads, data.v_head_dim), math.nan, dtype=data.q.dtype)
    given = dict(softmax_scale=data.bmm1_scale, output_scale=data.bmm2_scale, out=out) | more
    if data.kv_dtype is NVFP4:
        assert page_size is not None
        key, value = data.block_scales(page_size, "linear" if linear else "interleaved")
        given["kv_scales"] = BlockScales(key, value, interleaves_v=not linear)
    return data.problem(page_size, **given)


def of_heads(data: LowPrecisionBatch) -> LowPrecisionBatch:
    """Return a batch with the scales of KV heads multiplied into queries and values."""
    scaled = replace(data)
    scaled.q, scaled.k = data.q * torch.tensor(K_SCALES)[:, None].to(data.q.dtype), data.k
    scaled.v = [v * torch.tensor(V_SCALES)[:, None].to(v.dtype) for v in data.v]
    return scaled


def output(data: LowPrecisionBatch, config: PrefillConfig) -> dict[str, Any]:
    """Return the output of a problem, and the block scales of an NVFP4 output."""
    shape = (data.tokens, data.heads, data.v_head_dim)
    if config.out_dtype != "nvfp4":
        return dict(out=torch.full(shape, math.nan).to(DTYPES[config.out_dtype]))
    codes = torch.full((*shape[:2], shape[2] // 2), 0xFF, dtype=torch.uint8)
    scales = torch.full(swizzled_128x4_shape(shape[0], shape[1] * shape[2] // NVFP4_BLOCK), math.nan).to(E4M3)
    return dict(out=codes, out_scales=OutputScales(scales, 0, FACTOR))


def check(config: PrefillConfig) -> None:
    """Check output, log-sum-exp and statistics of a kernel."""
    data, mask, score = batch(config), mask_of(config), Score(config.score, CAPS.get(config.score, 0.0))
    sinks = torch.linspace(-1.0, 1.0, HEADS)
    options: dict[str, Any] = dict(lse=data.ragged_lse(), sinks=sinks, score=score, mask=mask, **output(data, config))
    options["skip_softmax"] = SKIP_SOFTMAX if config.skip_softmax else 0.0
    wanted = data
    if config.k_head_scales:
        wanted, scales = of_heads(data), (torch.tensor(K_SCALES) * data.scale, torch.tensor(V_SCALES))
        options |= dict(zip(("softmax_scale", "output_scale"), scales, strict=True))
    else:
        options["statistics"] = data.statistics()
    problem = problem_of(data, page_size_of(config), linear=config.linear_v_scales, **options)
    assert resolve(problem, config.arch) == config
    out, expected = execute(problem), wanted.expected_low(mask, sinks=sinks, score=score)
    if config.out_dtype == "nvfp4":
        check_nvfp4_near(FP4Tensor(out, problem.out_scales.tensor), expected.out, FACTOR, error=2.0**-7)
    else:
        expected.check(out)
    expected.check_lse(problem.lse.tensor)
    if problem.statistics is not None:
        check_statistics(problem.statistics, data.expected_statistics(mask, scale=data.bmm1_scale, score=score))


@pytest.mark.emulator
@pytest.mark.parametrize("is_adverse", [True, False], ids=["adverse", "eager"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_prefill(config: PrefillConfig, is_adverse: bool) -> None:
    """Schedule and seed depend on the kernel, so that the kernels together see many of both."""
    seed = CONFIGS.index(config)
    schedule = ADVERSE[seed % len(ADVERSE)] if is_adverse else "eager"
    with emulator.use(config.arch, race=True, proxy=True, strict=True, schedule=schedule, seed=seed):
        check(config)
    assert not emulator.report().warnings


# Around tiles of 128 rows and of 128 keys; requests without queries or keys, and rows without keys.
Q_LENS, KV_LENS = [257, 0, 128, 3, 129, 1], [385, 3, 0, 129, 127, 128]


def usual(cache: torch.dtype, **changes: Any) -> LowPrecisionBatch:
    sizes = dict(q_lens=Q_LENS, kv_lens=KV_LENS, heads=2, kv_heads=1) | changes
    return LowPrecisionBatch(q_dtype=BF16, kv_dtype=cache, dtype=BF16, device="cpu", **sizes)


def served(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem that a tcgen05 kernel over a narrow cache serves."""
    config = resolve(problem, "sm_100a")
    assert isinstance(config, Sm100PrefillConfig)
    assert config.dequantizes_in_place
    return problem


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [E4M3, NVFP4], ids=["e4m3", "nvfp4"])
def test_requests_alone_are_what_they_are_in_a_batch(cache: torch.dtype) -> None:
    data = usual(cache)
    with emulator.use("sm_100a", schedule="random"):
        together = execute(served(problem_of(data, 16)))
        alone = []
        for index in range(data.size):
            one = data.request(index)
            one.stored_k, one.stored_v = ([part[index]] for part in (data.stored_k, data.stored_v))
            alone.append(execute(problem_of(one, 16)))
    assert not together.isnan().any()
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [E4M3, NVFP4], ids=["e4m3", "nvfp4"])
def test_order_of_pages_does_not_matter(cache: torch.dtype) -> None:
    data = usual(cache)
    key, value, table = data.pages(16, order=1)
    changes: dict[str, Any] = dict(key=key, value=value, page_table=PageTable(table, table))
    if cache is NVFP4:
        changes["kv_scales"] = BlockScales(*data.block_scales(16, "interleaved", order=1), interleaves_v=True)
    with emulator.use("sm_100a", schedule="random"):
        same(served(problem_of(data, 16)), **changes)


@pytest.mark.emulator
@pytest.mark.parametrize("cache", [E4M3, NVFP4], ids=["e4m3", "nvfp4"])
@pytest.mark.parametrize("schedule", ["late", "priority"])
def test_work_tiles_follow_each_other_in_a_cta(
    schedule: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaders, dequantizing warps and the mma warp are in different work tiles, with one step, with several and with
    none."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 1)
    kv_lens = [300, 0, 0, 128, 5, 0, 400, 129, 1, 0]
    data = usual(cache, q_lens=[3] * len(kv_lens), kv_lens=kv_lens, heads=1, kv_heads=1)
    problem = served(problem_of(data, 16, mask=FULL, lse=data.ragged_lse()))
    with emulator.use("sm_100a", schedule=schedule, race=True, proxy=True, strict=True):
        out = execute(problem)
    expected = data.expected_low(FULL)
    expected.check(out)
    expected.check_lse(problem.lse.tensor)
    assert not emulator.report().warnings


@pytest.mark.emulator
@pytest.mark.parametrize("key", [4, 129])
def test_a_key_that_is_not_a_number_shows(key: int) -> None:
    """The NaN of an e4m3 key shows in all rows that see the key and in no other."""
    data = usual(E4M3, q_lens=[130], kv_lens=[130], heads=1, kv_heads=1)
    data.stored_k[0].view(torch.uint8)[key, 0, 3] = 0x7F
    with emulator.use("sm_100a"):
        out = execute(served(problem_of(data, 16, mask=CAUSAL)))
    assert out.isfinite().all(dim=(1, 2))[:key].all()
    assert not out.isfinite().any(dim=(1, 2))[key:].any()


def test_covering_kernels_have_each_choice_with_each_cache() -> None:
    assert len(set(CONFIGS)) == len(CONFIGS)
    for kv_type in CACHES:
        here = [config for config in CONFIGS if config.kv_type is kv_type]
        fetches = {KvFetch.PAGE_BOXES, KvFetch.PAGE_ROWS} | ({KvFetch.CONTIGUOUS} if kv_type is KvType.E4M3 else set())
        assert {config.kv_fetch for config in here} == fetches
        assert {config.mask for config in here} == set(MASKS)
        assert {config.out_dtype for config in here} == {"bf16", "fp16", "e4m3", "nvfp4"}
        assert {config.score.name for config in here} == {"SCALED", "SOFT_CAP", "ALIBI"}
        assert {(config.head_dim_qk, config.head_dim_v) for config in here} >= {(64, 64), (128, 128), (192, 128)}
        for choice in ("skip_softmax", "k_head_scales", "v_head_scales", "uneven_pages"):
            assert {getattr(config, choice) for config in here} == {True, False}, choice
    assert {config.linear_v_scales for config in CONFIGS if config.kv_type is KvType.NVFP4} == {True, False}
