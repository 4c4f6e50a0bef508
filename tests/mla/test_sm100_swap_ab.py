"""MLA decode of up to 16 packed rows on Blackwell in the emulator, against float64, in ordinary and adverse schedules.

These kernels have not run on a GPU. They run under the race detector, the proxy check and strict mode. Data is
NaN where a kernel must not read it, or must overwrite it.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
from helpers.batches.fp8 import Fp8MlaBatch
from helpers.batches.mla import MlaBatch, PackedBatch
from helpers.cases import mla as cases
from helpers.cases.decode import cut_tokens
from helpers.cases.mla import Case
from helpers.covering.sm100_swap_ab_mla import COVERING_SWAP_AB_MLA
from helpers.device.schedules import schedules, setting

from hopwell import emulator
from hopwell.kernels import execute, registry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import LogSumExp, LseLayout
from hopwell.kernels.sm100.mla.config import Sm100SwapABMlaConfig
from tests.mla.test_clients import test_context_parallel_ranks as ranks_share_keys

pytestmark = pytest.mark.emulator

ARCH = "sm_100a"
LEAF = 512  # keys: 8 tiles
MAIN, NARROW, UNROTATED = (576, 512), (320, 256), (512, 512)
KINDS = pytest.mark.parametrize("kind", [MlaBatch, Fp8MlaBatch, PackedBatch])


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE", ARCH)


def check(case: Case, page_size: int = 64, *, adverse: int = 1, config: Sm100SwapABMlaConfig | None = None) -> None:
    """Check a case that these kernels serve. The seed depends on the case, so that cases see many schedules."""
    arch = ARCH if config is None else config.arch
    if config is None:
        problem = cases.batch_of(case, "cpu").decode(page_size, ragged=case.ragged)
        assert isinstance(registry.resolve(problem, arch), Sm100SwapABMlaConfig)
    seed = zlib.crc32(repr((case, page_size)).encode()) % 10**6
    cases.check_case(case, page_size, "cpu", schedules(seed, adverse, arch=arch, strict=True), config)
    assert not emulator.report().warnings


def decoded(data: MlaBatch, page_size: int = 64, **changes: object) -> torch.Tensor:
    """Return a copy of the output of a batch that these kernels serve."""
    problem = data.decode(page_size, **changes)
    problem = data.over_fp8_ds_mla(problem) if isinstance(data, PackedBatch) else problem
    assert isinstance(registry.resolve(problem, ARCH), Sm100SwapABMlaConfig)
    return execute(problem).clone()


@pytest.mark.parametrize("config", COVERING_SWAP_AB_MLA, ids=lambda config: config.name)
def test_fetches(config: Sm100SwapABMlaConfig) -> None:
    """Requests have no keys, fewer keys than new tokens, keys at the edges of tiles, and two leaves."""
    assert cut_tokens(config) == LEAF
    dims, top_k = (config.head_dim_qk, config.head_dim_v), 132 if config.sparse else 0
    types = dict(dtype=config.dtype, kv_type=config.kv_type)
    case = Case([2] * 4, [0, 1, 70, LEAF + 1], cases.heads_of(config, 2), dims, top_k, **types)
    check(case, config.box_rows or 4, config=config)


@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (8, 1), (9, 1), (16, 1), (5, 3), (1, 16)])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_rows(dtype: str, heads: int, q_len: int) -> None:
    """Part of the first 8 rows, all of them, part of the others, and all 16."""
    check(Case([q_len] * 3, [q_len - 1, 64, 129 + q_len], heads, dtype=dtype))


@pytest.mark.parametrize(("dtype", "kv_type"), [("bf16", KvType.WIDE), ("e4m3", KvType.WIDE), ("bf16", KvType.E4M3)])
@pytest.mark.parametrize("top_k", [0, 64])
def test_uneven_numbers_of_new_tokens(top_k: int, dtype: str, kv_type: KvType) -> None:
    """Requests have fewer rows than others, or none, and more new tokens than keys."""
    check(Case([3, 0, 1, 3, 2], [1, 40, 0, 130, 70], 5, top_k=top_k, ragged=True, dtype=dtype, kv_type=kv_type), 4)


@pytest.mark.parametrize("kind", cases.TOPK_KINDS)
@pytest.mark.parametrize("dims", [MAIN, UNROTATED], ids=str)
def test_topk_indices(dims: tuple[int, int], kind: str) -> None:
    """Shorter and longer than the visible keys, with gaps, duplicates, and without an entry that counts."""
    case = Case([2] * 3, [1, 50, 200], heads=16, dims=dims, top_k=68, topk_kind=kind)
    check(case, 16)
    cases.check_counts(cases.batch_of(case, "cpu"), 16)


@pytest.mark.parametrize("kind", [MlaBatch, Fp8MlaBatch])
@pytest.mark.parametrize("place", cases.GAPS)
def test_gaps_in_topk_indices(place: str, kind: type[MlaBatch]) -> None:
    """Top-k indices fill several tiles, and two leaves."""
    for top_k in (196, LEAF + 100):
        cases.check_gaps(place, top_k, 5, device="cpu", kind=kind)


def test_one_gap_anywhere() -> None:
    cases.check_one_gap_anywhere(132, 5, "cpu")


@KINDS
def test_masks_are_exact(kind: type[MlaBatch]) -> None:
    """Each visible key counts equally at every edge of tiles and leaves, also with few keys."""
    if kind is not PackedBatch:
        cases.check_counts(kind([3] * 8, [0, 1, 2, 63, 65, 130, LEAF, LEAF + 1], heads=5, device="cpu"), 16)
        return
    data = kind([3] * 4, [2, 63, 65, LEAF + 1], heads=5, device="cpu")
    data.expected_mla().check(decoded(data))


@pytest.mark.parametrize(
    ("ctas", "q_len", "kv_lens"),
    [(1, 1, [LEAF - 1, 1, LEAF]), (3, 1, [4 * LEAF + 77]), (2, 2, [LEAF + 1, 3, 3 * LEAF - 1]), (5, 1, [2 * LEAF] * 3)],
)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_leaves_of_several_ctas(
    dtype: str, ctas: int, q_len: int, kv_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CTA has several requests, part of one, and parts of two, with nodes that wait in global memory."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
    check(Case([q_len] * len(kv_lens), kv_lens, heads=8, dtype=dtype))


@pytest.mark.parametrize("kv_type", [KvType.E4M3, KvType.FP8_DS_MLA])
def test_dequantized_leaves_of_several_ctas(kv_type: KvType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "EMULATED_SMS", 2)
    check(Case([2, 2], [2 * LEAF + 3, 70], heads=8, kv_type=kv_type), 4)


def test_topk_indices_of_several_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "EMULATED_SMS", 3)
    check(Case([2, 1], [2 * LEAF, 700], heads=16, top_k=LEAF + 68, ragged=True))


@pytest.mark.parametrize(("dims", "dtype"), [(MAIN, "bf16"), (NARROW, "bf16"), (MAIN, "fp16")], ids=str)
def test_rising_logits(dims: tuple[int, int], dtype: str) -> None:
    """The reference moves in every tile, and O in registers is rescaled each time."""
    assert isinstance(
        registry.resolve(MlaBatch([3], [9], heads=5, device="cpu").decode(64), ARCH), Sm100SwapABMlaConfig
    )
    if dtype == "bf16":
        cases.check_rising_logits(5, 600, dims, device="cpu")
    else:
        check(Case([1], [LEAF + 88], heads=8, dims=dims, dtype=dtype, magnitude=4.0))


def test_rising_fp8_logits() -> None:
    """Logits rise or fall by a power of two from tile to tile. Values change with them, so a wrong factor is seen."""
    for sign in (1, -1):
        data, token = Fp8MlaBatch([1], [LEAF + 88], heads=8, device="cpu"), torch.arange(LEAF + 88)
        data.q.zero_()
        data.q[..., -1] = 1.0
        data.k[0][:, 0, -1] = (sign * (token // 64 - 4)).to(data.dtype)
        data.k[0][..., :512] = 1.0 + (token // 64 % 4)[:, None, None].to(data.dtype)
        data.keep()
        expected = data.expected_mla(scale=2.0).out
        assert ((decoded(data, softmax_scale=2.0).double() - expected).abs() <= 2.0**-8 * expected.abs()).all()


def test_light_fp8_keys_keep_their_weight() -> None:
    """A tile whose logits all lie far below another tile's has a reference of its own: e4m3 would round it to 0."""
    data = Fp8MlaBatch.with_light_keys(heads=8)
    out = decoded(data)
    data.expected_mla().check(out)
    assert (out != 0).any()


@pytest.mark.parametrize("largest", [2.0**100, 1.0, 2.0**-70])
def test_columns_of_all_sizes(largest: float) -> None:
    cases.check_column_sizes(largest, "cpu", heads=2)


@KINDS
def test_a_request_alone_has_the_bits_that_it_has_in_a_batch(
    kind: type[MlaBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many CTAs there are, the tree is one of the request alone."""
    data, found = kind([2] * 4, [LEAF + 88, 1, 70, 2 * LEAF], heads=8, device="cpu"), []
    for ctas in (1, 3, 8):
        monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
        found.append(decoded(data))
        assert not found[-1].isnan().any()
        assert torch.equal(found[-1], found[0])
    assert torch.equal(found[0], torch.cat([decoded(data.request(i)) for i in range(data.size)]))


@pytest.mark.parametrize("kind", [MlaBatch, Fp8MlaBatch])
@pytest.mark.parametrize("top_k", [0, 132])
def test_places_of_keys_change_no_bit(top_k: int, kind: type[MlaBatch]) -> None:
    """Boxes and rows of pages come in the same order, for every page size and place."""
    case = Case([2] * 3, [LEAF + 88, 130, 1], 8, top_k=top_k, dtype="bf16" if kind is MlaBatch else "e4m3")
    data = cases.batch_of(case, "cpu")
    outs = [decoded(data, size, order=order) for size, order in ((64, 1), (64, 2), (8, 5), (1, 3))]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_counts_of_keys_are_those_of_hopper() -> None:
    """With queries of zero and one-hot keys, a row's output counts its visible keys."""
    for kind in (MlaBatch, Fp8MlaBatch):
        data, found = kind([2] * 3, [LEAF + 88, 130, 1], heads=8, device="cpu"), []
        data.q.zero_()
        for k in data.k:
            k.zero_()
            token = torch.arange(k.shape[0])
            k[token, :, token % data.v_head_dim] = 1.0
        for arch in ("sm_90a", ARCH):
            lse = torch.full((data.tokens, data.heads), torch.nan)
            with emulator.use(arch):
                out = execute(data.decode(64, lse=LogSumExp(lse, LseLayout.RAGGED, natural=True)))
            data.expected_mla().check(out)
            data.expected_mla().check_lse(lse)
            found.append(torch.cat([out.double(), lse[..., None]], -1))
        assert torch.equal(*found)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_keys(world: int) -> None:
    ranks_share_keys([3, 0, 2, 1], 5, world, "cpu")


@pytest.mark.parametrize("top_k", [0, 64])
def test_scales_on_the_device(top_k: int) -> None:
    check(Case([2, 2], [90, 300], heads=8, top_k=top_k, tensor_scales=True, sinks=False))


def test_query_that_is_expanded_over_heads() -> None:
    """Query rows at one address, as from ``expand``, give the same result as contiguous rows."""
    data = MlaBatch([2, 2], [70, 5], heads=3, device="cpu")
    problem = data.decode(64)
    one = problem.query[:, :1].expand(-1, 3, -1)
    expanded, alike = (execute(replace(problem, query=query)).clone() for query in (one, one.contiguous()))
    assert torch.equal(expanded, alike)


@pytest.mark.parametrize("top_k", [0, 64])
def test_more_requests_than_lanes(top_k: int) -> None:
    """Segments of many requests are found in the right order."""
    kv_lens = [(0, 3, 40, 130)[i * i % 7 % 4] for i in range(75)]
    check(Case([1] * 75, kv_lens, 4, top_k=top_k, sinks=False), 16)


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_late_work(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and products come last, after all other progress."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 2)
    case = Case([2] * 3, [127, 2 * LEAF + 3, 5], heads=8, dtype=dtype)
    cases.check_case(case, 64, "cpu", [setting("late", 710860, ARCH, strict=True)])
    assert not emulator.report().warnings
