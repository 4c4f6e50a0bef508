"""Every pair of sm_120's operand types, masks and pages runs in the emulator.

This file runs the pairs that other tests leave out, in an ordinary and an adverse schedule. ``-m slow_emulator`` runs
all combinations of the three.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches.fp8 import WHOLE_ERROR, Fp8Batch, round_keys_and_values, with_fp8_cache
from helpers.batches.low_precision import NVFP4, LowPrecisionBatch
from helpers.batches.mla import MlaBatch, PackedBatch, with_topk
from helpers.batches.prefill import CAUSAL, FULL, Batch, check_statistics, chunked, window
from helpers.calls.entries import context, mla
from helpers.cases import decode as decode_cases
from helpers.cases import prefill as prefill_cases
from helpers.cases.mla import TOP_K
from helpers.covering.configs import CONTIGUOUS, COVERING_SM120_DECODE, PAGES16, PAGES64, ROWS, TOPK
from helpers.covering.sm120 import BF16, Cell, every_cell, filling, missing, with_choices
from helpers.device.schedules import schedules

from hopwell import emulator, layouts
from hopwell.kernels import execute, registry, warp_mma
from hopwell.kernels.config.base import KvFetch, KvType
from hopwell.kernels.problem import AttentionProblem, Family, MaskKind, Score, ScoreKind
from hopwell.kernels.warp_mma.decode.config import Sm120DecodeConfig, Sm120MlaConfig
from hopwell.kernels.warp_mma.prefill.config import Sm120PrefillConfig

ARCH = "sm_120a"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.bfloat16}  # of references' operands
BYTES, BF16_TENSORS = ("e4m3", KvType.WIDE), torch.bfloat16
NARROW_OUTS = {"fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "nvfp4": torch.uint8}
OUTS = {torch.bfloat16: "", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3"}  # of e4m3 queries
CAPS = {ScoreKind.SOFT_CAP: 5.0, ScoreKind.LARGE_SOFT_CAP: 1e6, ScoreKind.CAPPED_ALIBI: 5.0}
MASKS = {mask.kind: mask for mask in (FULL, CAUSAL, window(70), chunked(64))}
# Rounding of weights to e4m3 averages out over many rows. The second request has three rows. In float64 this rounding
# alone puts them off by 2.0e-2 to 2.7e-2 of their norm with capped scores, and 2.1e-2 to 2.5e-2 with plain ones.
ROUNDING_OF_FEW_ROWS = 1.5 * WHOLE_ERROR
PAGE_SIZES = {CONTIGUOUS: None, ROWS: 4, PAGES16: 16, PAGES64: 64, TOPK: 16}
PREFILL = dict(q_lens=[70, 3], kv_lens=[130, 80], heads=4, kv_heads=2, head_dim=64, device="cpu")
# On Blackwell tcgen05 serves narrow caches up to head dim 128, and others at 192 too.
BLACKWELL_PREFILL, BLACKWELL_WIDE_PREFILL = PREFILL | dict(head_dim=192), PREFILL | dict(head_dim=176)


def pages(size: int | None) -> tuple[KvFetch, int]:
    return CONTIGUOUS if size is None else ROWS if size < 8 else PAGES16 if size <= 16 else PAGES64


def covered_elsewhere() -> Iterator[Cell]:
    """Return the cells that the prefill and decode tests on sm_120 run."""
    yield from map(Cell.of, COVERING_SM120_DECODE)
    yield from (cell for cell, _ in prefill_elsewhere())


def prefill_elsewhere() -> Iterator[tuple[Cell, tuple[int, int]]]:
    """Return the cells of the prefill tests on sm_120, with head dims (QK, V)."""
    for dims, size, mask, options in prefill_cases.SM120_CASES:
        kind = options.get("score", Score()).kind
        yield Cell(Family.PREFILL, BF16, mask.kind, pages(size), score=kind), dims
    for arch, (dims, size, mask, out) in prefill_cases.E4M3_EMULATED:
        if arch == ARCH:
            yield Cell(Family.PREFILL, BYTES, mask.kind, pages(size), OUTS[out]), dims
    yield Cell(Family.PREFILL, BYTES, CAUSAL.kind, PAGES16, "nvfp4"), (64, 64)  # of test_properties_of_other_tests
    for arch, (dims, size, mask) in prefill_cases.FP8_CACHE_EMULATED:
        if arch == ARCH:
            yield Cell(Family.PREFILL, ("bf16", KvType.E4M3), mask.kind, pages(size)), dims
    for arch, (dims, size, mask, dtype) in prefill_cases.NVFP4_EMULATED:
        if arch == ARCH:
            # The entry dequantizes e4m3 queries over NVFP4 to float16 before these kernels.
            types, out = (("bf16", KvType.NVFP4), "") if dtype is BF16_TENSORS else (("fp16", KvType.NVFP4), "bf16")
            yield Cell(Family.PREFILL, types, mask.kind, pages(size), out), dims


def in_schedules(launch: Callable[[], torch.Tensor], arch: str) -> torch.Tensor:
    """Return the output, checked to be equal in all schedules that run, under all detectors."""
    first = None
    for setting in schedules(4, 1, arch=arch, strict=True):
        with setting():
            out = launch().clone()
        first = out if first is None else first
        assert torch.equal(out.view(torch.uint8), first.view(torch.uint8))
        # MLA of few rows is one class for all matrix instructions; ``run_mla`` checks its config.
        assert any(name in emulator.report().kernel for name in ("Sm120", "SwapABMla"))
        assert not emulator.report().warnings
    assert first is not None
    return first


def run_prefill(cell: Cell, arch: str) -> None:
    mask, size, (dtype, kv_type) = MASKS[cell.mask], PAGE_SIZES[cell.pages], cell.types
    on_blackwell = BLACKWELL_WIDE_PREFILL if kv_type is KvType.WIDE else BLACKWELL_PREFILL
    sizes: dict[str, Any] = PREFILL if arch == ARCH else on_blackwell
    if kv_type is KvType.NVFP4:
        run_nvfp4(cell, arch)
        return
    sinks, score = torch.linspace(-2.0, 2.0, 4), Score(cell.score, CAPS.get(cell.score, 0.0))
    if dtype == "e4m3":
        data = Fp8Batch(**sizes)
        out_dtype = NARROW_OUTS.get(cell.out, torch.bfloat16)
        problem = data.in_fp8(size, mask, out_dtype, score=score, sinks=sinks, lse=data.ragged_lse())
        out = in_schedules(served(cell, problem, arch), arch)
        data.check_fp8(out, mask, score=score, sinks=sinks, whole_error=ROUNDING_OF_FEW_ROWS)
        return
    data = Batch(dtype=DTYPES[dtype], **sizes)
    if kv_type is KvType.E4M3:
        round_keys_and_values(data)
    results = dict(lse=data.ragged_lse(), statistics=data.statistics())
    problem = data.problem(size, mask, score=score, sinks=sinks, **results)
    if kv_type is KvType.E4M3:
        problem = with_fp8_cache(problem)
    expected = data.expected(mask, score=score, sinks=sinks)
    expected.check(in_schedules(served(cell, problem, arch), arch))
    expected.check_lse(results["lse"].tensor)
    check_statistics(results["statistics"], data.expected_statistics(mask, score=score))


def served(cell: Cell, problem: AttentionProblem, arch: str) -> Callable[[], torch.Tensor]:
    """Return the launch of a problem, whose kernel is the cell's kernel."""
    assert Cell.of(registry.resolve(problem, arch)) == cell
    return lambda: execute(problem)


def run_nvfp4(cell: Cell, arch: str) -> None:
    """Run the cell through an entry; float16 kernels get e4m3 queries if the output is narrow, as the entry
    requires.
    """
    mask, size = MASKS[cell.mask], PAGE_SIZES[cell.pages]
    q_dtype = torch.float8_e4m3fn if cell.out in NARROW_OUTS else DTYPES[cell.types[0]]
    sizes: dict[str, Any] = PREFILL if arch == ARCH else BLACKWELL_PREFILL
    data = LowPrecisionBatch(kv_dtype=NVFP4, q_dtype=q_dtype, **sizes)
    key, value, table = data.pages(size)
    given = data.options(mask) | dict(kv_block_scales=data.block_scales(size, "interleaved"))
    given |= dict(sinks=torch.linspace(-2.0, 2.0, 4))

    def call(**out: Any) -> Any:
        return context(data, (key, value), table, **out, **given)

    if cell.out == "nvfp4":
        codes = in_schedules(lambda: call(out_dtype="nvfp4", o_sf_scale=2.0).data, arch)
        with emulator.use(arch):
            want = layouts.quantize_nvfp4_output(call(out_dtype=torch.float16), 2.0)
        assert (codes == want.data).float().mean() > 0.98
    else:
        out = in_schedules(lambda: call(out_dtype=NARROW_OUTS.get(cell.out, torch.bfloat16)), arch)
        data.expected_low(mask, sinks=given["sinks"]).check(out)


def run_decode(cell: Cell, arch: str) -> None:
    dtype, kv_type = cell.types
    group, dim = 4, 64 if arch == ARCH else 512  # tcgen05 serves all other head dims there
    rows = Sm120DecodeConfig.rows_for(group, dim, kv_type)
    config = Sm120DecodeConfig(arch, dtype, cell.out or dtype, dim, dim, cell.mask, *cell.pages, kv_type, rows)
    case = decode_cases.Case([1, 1], [config.leaf_tokens + 65, 3], group)
    if cell.mask is MaskKind.SLIDING_WINDOW:
        case = decode_cases.Case([1, 1], [config.leaf_tokens + 65, 3], group, window=70)
    if cell.mask is MaskKind.DRAFT:
        case = decode_cases.Case([2, 1], [config.leaf_tokens + 1, 3], max(group // 2, 4), ragged=True)
    decode_cases.check_config(config, case, PAGE_SIZES[cell.pages] or 0, "cpu", schedules(4, 1, arch=arch, strict=True))


def run_mla(cell: Cell, arch: str) -> None:
    size, (dtype, kv_type) = PAGE_SIZES[cell.pages] or 0, cell.types
    kind, options = MlaBatch, dict(heads=5, dtype=DTYPES[dtype], device="cpu")
    if kv_type is KvType.FP8_DS_MLA:
        kind = PackedBatch
    elif kv_type is KvType.E4M3:
        options |= dict(kv_dtype=torch.float8_e4m3fn)
    data = with_topk(kind, [1, 1], [70, 3], TOP_K if cell.pages == TOPK else 0, **options)
    cache = {}
    if kv_type is KvType.FP8_DS_MLA:
        cache = dict(kv_cache=data.packed(size), kv_scale_format="arbitrary_fp32")
    assert isinstance(registry.resolve(data.decode(size), arch), Sm120MlaConfig)
    out = in_schedules(lambda: mla(data, data.decode(size), **cache), arch)
    data.expected_mla().check(out.flatten(0, 1))


def run(cell: Cell, arch: str = ARCH) -> None:
    {Family.PREFILL: run_prefill, Family.DECODE: run_decode, Family.MLA: run_mla}[cell.family](cell, arch)


FILLING = filling(covered_elsewhere())


def classes_of_sm120(base: type) -> set[type]:
    """Return all subclasses of ``base`` in the modules of these kernels, used or not."""
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(warp_mma.__path__, warp_mma.__name__ + ".")
    ]
    kinds = [kind for module in modules for kind in vars(module).values() if isinstance(kind, type)]
    return {kind for kind in kinds if issubclass(kind, base) and kind is not base}


def test_every_kind_of_kernel_and_of_operands_is_emulated() -> None:
    """A cell has no head dims. Together with the types, they decide which role dequantizes K and V, and so
    the product.
    """
    from hopwell.kernels.sm90.decode.dequant_swap_ab import DequantLeafOperands
    from hopwell.kernels.warp_mma.common.narrow_operands import NarrowElements
    from hopwell.kernels.warp_mma.common.operands import WideElements
    from hopwell.kernels.warp_mma.common.products import WarpProducts

    kernels = [registry.build(config)[0] for config in COVERING_SM120_DECODE]
    for cell, dims in prefill_elsewhere():
        dtype, kv_type = cell.types
        out = cell.out or ("bf16" if dtype == "e4m3" else dtype)
        config = Sm120PrefillConfig(ARCH, dtype, out, *dims, cell.mask, *CONTIGUOUS, kv_type=kv_type)
        kernels.append(registry.build(config)[0])
    prefill = [kernel for kernel in kernels if kernel.config.family is Family.PREFILL]
    elements = {kernel.elements for kernel in prefill}
    assert elements == {WideElements, *classes_of_sm120(WideElements)} - {NarrowElements}, "it has no values"
    products = {kernel.products.operands for kernel in kernels if kernel not in prefill}
    assert products == classes_of_sm120(WarpProducts) | {DequantLeafOperands}


def test_nothing_is_missing() -> None:
    assert not missing([*covered_elsewhere(), *FILLING])
    assert len(FILLING) < 34, "other tests cover less than they did"


def test_the_document_counts_them() -> None:
    pairs = {pair for cell in every_cell() for one in with_choices(cell) for pair in one.pairs()}
    left = missing(covered_elsewhere())
    text = (Path(__file__).parents[2] / "docs" / "kernels" / "sm120.md").read_text()
    for said in (
        f"has {len(pairs)} pairs",
        f"| {len(pairs) - len(left)} | other tests |",
        f"| {len(left)} | `tests/kernels/test_sm120_covering.py`, in {len(FILLING)} cases",
        f"all {len(every_cell())} combinations",
    ):
        assert said in text


@pytest.mark.emulator
@pytest.mark.nightly
@pytest.mark.parametrize("cell", FILLING, ids=str)
def test_cells_that_others_leave_out(cell: Cell) -> None:
    run(cell)


@pytest.mark.slow_emulator
@pytest.mark.parametrize("cell", every_cell(), ids=str)
def test_every_cell(cell: Cell) -> None:
    run(cell)


# Blackwell runs these kernels for problems without kernels of its own, with more stages and tree levels in shared
# memory. Masks and pages share their code, so each kind of operands runs with one of each.
_PREFILL, _DECODE = Family.PREFILL, Family.DECODE
BLACKWELL_CELLS = [
    Cell(_PREFILL, BF16, MaskKind.CAUSAL, CONTIGUOUS, score=ScoreKind.CAPPED_ALIBI),
    Cell(_PREFILL, BYTES, MaskKind.CAUSAL, PAGES16, "e4m3"),
    Cell(_PREFILL, ("bf16", KvType.E4M3), MaskKind.SLIDING_WINDOW, PAGES64),
    Cell(_PREFILL, ("bf16", KvType.NVFP4), MaskKind.CAUSAL, ROWS),
    Cell(_PREFILL, ("fp16", KvType.NVFP4), MaskKind.FULL, PAGES16, "nvfp4"),
    Cell(_DECODE, BF16, MaskKind.FULL, PAGES64),
    Cell(_DECODE, ("fp16", KvType.WIDE), MaskKind.DRAFT, ROWS),
    Cell(_DECODE, ("bf16", KvType.E4M3), MaskKind.SLIDING_WINDOW, PAGES16, "e4m3"),
    Cell(_DECODE, ("bf16", KvType.INT8), MaskKind.DRAFT, PAGES64),
]


def test_blackwell_takes_kernels_of_these_families() -> None:
    def kinds(family: Family, arch: str) -> set[type]:
        return {made.config for made in registry.IMPLEMENTATIONS[family, arch]}

    families = {cell.family for cell in every_cell()}
    assert {cell.family for cell in BLACKWELL_CELLS} == {
        family for family in families if kinds(family, ARCH) & kinds(family, "sm_100a")
    }


@pytest.mark.emulator
@pytest.mark.parametrize("cell", BLACKWELL_CELLS, ids=str)
def test_what_blackwell_takes_from_sm120(cell: Cell) -> None:
    run(cell, "sm_100a")


@pytest.mark.emulator
def test_wide_prefill_on_blackwell() -> None:
    """At 248 columns Blackwell runs the kernel of sm_120, and gives its bits."""
    data = Batch(**PREFILL | dict(head_dim=248))
    problem = data.problem(16, CAUSAL)
    out = in_schedules(lambda: execute(problem), "sm_100a")
    data.expected(CAUSAL).check(out)
    assert torch.equal(out, in_schedules(lambda: execute(problem), ARCH))


@pytest.mark.emulator
@pytest.mark.parametrize(("dim", "mask", "rows"), [(512, MaskKind.FULL, 8), (512, MaskKind.DRAFT, 8)])
def test_wide_decode_on_blackwell(dim: int, mask: MaskKind, rows: int) -> None:
    """Tiles of 512 columns are loaded as a whole; sm_120 loads their halves. Leaves are the same."""
    config = Sm120DecodeConfig("sm_100a", "bf16", "bf16", dim, dim, mask, *PAGES64, KvType.WIDE, rows)
    case = decode_cases.Case([1] * 3, [1, config.leaf_tokens, 2 * config.leaf_tokens + 65], rows, kv_heads=2)
    if mask is MaskKind.DRAFT:
        case = decode_cases.Case([7, 0, 1], [config.leaf_tokens + 2, 40, 70], rows // 4, drafts="tree", ragged=True)
    decode_cases.check_config(config, case, 64, "cpu", schedules(4, 1, arch="sm_100a", strict=True))
