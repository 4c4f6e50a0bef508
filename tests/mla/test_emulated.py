"""The MLA kernels in the emulator, against float64, in one ordinary and two adverse schedules.

They run under the race detector, the proxy check and strict mode. Data that a kernel must not read or must overwrite is
NaN, and so is the scratch at first. Each launch finds the scratch contents of the launch before.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
from helpers.batches.mla import MlaBatch
from helpers.cases import mla as cases
from helpers.cases.decode import cut_tokens
from helpers.cases.mla import Case
from helpers.covering.configs import COVERING_MLA
from helpers.device.schedules import schedules, setting

from hopwell import emulator
from hopwell.kernels import execute, registry
from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.jit import settings
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import LogSumExp, LseLayout

pytestmark = pytest.mark.emulator

MAIN, NARROW, UNROTATED = (576, 512), (320, 256), (512, 512)


def page_size(config: MlaConfig) -> int:
    return config.box_rows or 4


def check(case: Case, size: int, *, adverse: int = 2, config: MlaConfig | None = None) -> None:
    """The seed depends on the case, so that the cases together see many schedules."""
    seed = zlib.crc32(repr((case, size)).encode()) % 10**6
    cases.check_case(case, size, "cpu", schedules(seed, adverse, strict=True), config)
    assert not emulator.report().warnings


@pytest.mark.parametrize("config", COVERING_MLA, ids=lambda config: config.name)
def test_fetches(config: MlaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fetch meets requests without keys, with fewer keys than new tokens, at the edges of tiles, and
    two chunks.
    """
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", config.batch_invariant)
    dims, top_k = (config.head_dim_qk, config.head_dim_v), 132 if config.sparse else 0
    kv_lens = [0, 1, 70, cut_tokens(config) + 1]
    types = dict(dtype=config.dtype, kv_type=config.kv_type)
    case = Case([2] * 4, kv_lens, heads=cases.heads_of(config, 2), dims=dims, top_k=top_k, **types)
    check(case, page_size(config), adverse=1, config=config)


@pytest.mark.parametrize(("heads", "q_len"), [(1, 1), (16, 1), (65, 1), (128, 1), (6, 3), (128, 2)])
def test_rows(heads: int, q_len: int) -> None:
    """Part of a row tile, a whole one, and several; and both parts of a new token's heads at a tile's end."""
    check(Case([q_len] * 3, [q_len - 1, 64, 129 + q_len], heads), 64)


@pytest.mark.parametrize("top_k", [0, 64])
@pytest.mark.parametrize("q_lens", [[3, 0, 1, 9, 2], [4, 2, 4, 4, 3]], ids=["by length", "cta parts"])
def test_uneven_numbers_of_new_tokens(q_lens: list[int], top_k: int) -> None:
    """Requests have fewer row tiles than others, or none."""
    case = Case(q_lens, [1, 40, 0, 130, 70], heads=20, top_k=top_k, ragged=True)
    config = registry.resolve(cases.batch_of(case, "cpu").decode(16, ragged=True), "sm_90a")
    assert isinstance(config, MlaConfig)
    assert config.batch_invariant == (not top_k and max(q_lens) == 9)
    check(case, 16)


@pytest.mark.parametrize("heads", [16, 24])
@pytest.mark.parametrize("kind", cases.TOPK_KINDS)
@pytest.mark.parametrize("dims", [MAIN, UNROTATED], ids=str)
def test_topk_indices(dims: tuple[int, int], kind: str, heads: int) -> None:
    """Shorter and longer than the visible keys, with gaps, duplicates, and without an entry that counts."""
    case = Case([2] * 3, [1, 50, 200], heads=heads, dims=dims, top_k=68, topk_kind=kind)
    check(case, 16)
    with emulator.use("sm_90a"):
        cases.check_counts(cases.batch_of(case, "cpu"), 16)


@cases.BOTH_ROWS
@pytest.mark.parametrize("place", cases.GAPS)
def test_gaps_in_topk_indices(place: str, heads: int) -> None:
    """Top-k indices fill several tiles, and more leaves and chunks."""
    with emulator.use("sm_90a"):
        for top_k in (196, 2180):
            cases.check_gaps(place, top_k, heads, device="cpu")


@cases.BOTH_ROWS
def test_one_gap_anywhere(heads: int) -> None:
    with emulator.use("sm_90a"):
        cases.check_one_gap_anywhere(132, heads, "cpu")


@pytest.fixture
def by_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split requests by their own lengths alone, not all keys into equal CTA parts."""
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", True)


@pytest.mark.usefixtures("by_own_length")
@pytest.mark.parametrize("heads", [8, 40])
@pytest.mark.parametrize(("dims", "sparse"), [(MAIN, False), (NARROW, False), (MAIN, True)], ids=str)
def test_partials_are_combined(dims: tuple[int, int], sparse: bool, heads: int) -> None:
    """Requests have one partial, two whole ones, or some, with more work than CTAs."""
    chunk = cases.chunk_tokens(dims, sparse)
    kv_lens = [chunk - 1, 2 * chunk, 4 * chunk + 77, 3]
    check(Case([1] * 4, kv_lens, heads, dims=dims, top_k=4 * chunk + 8 if sparse else 0), 64)


@pytest.mark.usefixtures("by_own_length")
@pytest.mark.parametrize("heads", [2, 17])
def test_many_partials(heads: int) -> None:
    check(Case([1, 1], [18 * cases.chunk_tokens(MAIN) - 5, 3], heads), 64, adverse=1)


@pytest.mark.parametrize(
    ("ctas", "q_len", "kv_lens", "heads"),
    [(20, 1, [1024], 128), (9, 1, [700] * 3, 128), (6, 1, [1500, 3, 900], 128), (7, 2, [900, 1300, 500], 96)],
)
def test_own_partials_are_combined(
    ctas: int, q_len: int, kv_lens: list[int], heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs have no partial, one, and two of different requests."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
    check(Case([q_len] * len(kv_lens), kv_lens, heads), 64, adverse=1)


@pytest.mark.parametrize(
    ("ctas", "heads", "q_lens", "top_k", "kind"),
    [
        (4, 128, [2, 0, 1], 68, "distinct"),
        (7, 128, [1, 2], 400, "any"),
        (9, 256, [1, 1], 132, "any"),
        (2, 256, [2], 68, "any"),
        (1, 128, [1, 2], 68, "any"),
    ],
    ids=["two pairs", "odd number of SMs", "two pairs of row tiles", "several rounds", "one SM"],
)
def test_clusters_share_dequant(
    ctas: int, heads: int, q_lens: list[int], top_k: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CTAs of a cluster meet in every stage, with one work tile, several, none, and partials."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
    kv_lens = [900, 70, 3][: len(q_lens)]
    case = Case(q_lens, kv_lens, heads=heads, top_k=top_k, topk_kind=kind, ragged=True, kv_type=KvType.FP8_DS_MLA)
    check(case, 16, adverse=1)


def test_own_partials_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CTA has CTA parts of several row tiles, and stores all of its partials before it waits for others'."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 13)
    check(Case([4] * 2, [900, 3000], heads=128), 64, adverse=1)


def test_launches_whose_ctas_wait_are_cooperative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with too few SMs refuses CTA parts, whose CTAs would wait for CTAs that cannot run.

    It takes chunks by each request's length instead; their CTAs wait only for CTAs that have begun.
    """
    problem = MlaBatch([1], [70], heads=33, device="cpu").decode(64)
    monkeypatch.setattr(geometry, "EMULATED_SMS", 6)
    refused = pytest.raises(emulator.HostError, match=r"cooperative launch of 6 CTAs .* room for 5")
    with emulator.use("sm_90a", sms=5), refused:
        execute(problem)
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", True)
    with emulator.use("sm_90a", sms=5):
        execute(problem)


@pytest.mark.parametrize("heads", [2, 33])
@pytest.mark.parametrize("largest", [2.0**100, 1.0, 2.0**-70])
def test_columns_of_all_sizes(largest: float, heads: int) -> None:
    with emulator.use("sm_90a"):
        cases.check_column_sizes(largest, "cpu", heads=heads)


@pytest.mark.parametrize("heads", [5, 16])
def test_rising_logits(heads: int) -> None:
    with emulator.use("sm_90a"):
        cases.check_rising_logits(heads, 600, device="cpu")


@pytest.mark.parametrize("heads", [3, 40])
def test_query_that_is_expanded_over_heads(heads: int) -> None:
    """Query rows at one address, as from ``expand``, give the same result as contiguous rows."""
    data = MlaBatch([2, 2], [70, 5], heads=heads, device="cpu")
    problem = data.decode(64)
    one = problem.query[:, :1].expand(-1, heads, -1)
    with emulator.use("sm_90a"):
        expanded, alike = (execute(replace(problem, query=query)).clone() for query in (one, one.contiguous()))
    assert torch.equal(expanded, alike)


@pytest.mark.usefixtures("by_own_length")
def test_late_work_beside_polling() -> None:
    """CTAs without work poll for row shares and write their observations.

    A schedule that does late work only without other progress would never reach the loads of other CTAs.
    """
    cases.check_case(
        Case([1] * 5, [127, 3500, 3500, 5, 1025], heads=20), 64, "cpu", [setting("late", 710860, strict=True)]
    )


# Partials wait for earlier partials in their slot, more often with fewer slots: here one request's slots and little
# more.
@pytest.fixture
def few_slots(by_own_length: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "COMFORTABLE_BYTES", 0)
    monkeypatch.setattr(splitting, "LATENT_IN_FLIGHT", 1)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize(("heads", "q_len"), [(17, 1), (33, 2)])
def test_slots_are_used_again(heads: int, q_len: int) -> None:
    """Rows fill one or two tiles, whose partials are interleaved."""
    chunks = [6, 2, 3, 1, 5, 2, 2, 4] if q_len == 1 else [3, 2, 1, 3, 2, 2]
    kv_lens = [n * cases.chunk_tokens(MAIN) - 5 for n in chunks]
    check(Case([q_len] * len(chunks), kv_lens, heads, sinks=False), 64)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize("kv_type", [KvType.E4M3, KvType.FP8_DS_MLA])
def test_slots_are_used_again_where_keys_are_dequantized(kv_type: KvType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dequantization, one warp of each CTA also combines beside work tiles.

    Otherwise work tiles would wait for slots forever: no other warp frees slots before the last work tile.
    """
    monkeypatch.setattr(geometry, "EMULATED_SMS", 1)
    check(Case([1] * 5, [cases.chunk_tokens(MAIN) + 6] * 5, heads=17, sinks=False, kv_type=kv_type), 64, adverse=1)


@pytest.mark.usefixtures("few_slots")
def test_slots_are_used_again_by_uneven_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with no or few rows has fewer row tiles than the others, and may have more chunks."""
    monkeypatch.setattr(splitting, "LATENT_WORK_TILES", 6)
    kv_lens = [n * cases.chunk_tokens(MAIN) - 5 for n in (6, 1, 2)]
    for first in (0, 1):
        check(Case([first, 4, 1], kv_lens, heads=17, sinks=False, ragged=True), 64, adverse=1)


@pytest.mark.usefixtures("few_slots")
def test_slots_are_used_again_by_topk_indices() -> None:
    """More tokens have top-k indices than there are slots, each with two chunks."""
    chunk = cases.chunk_tokens(MAIN, sparse=True)
    check(Case([9, 2], [chunk + 40, chunk], heads=17, top_k=chunk + 68, ragged=True), 64, adverse=1)


@pytest.mark.parametrize(("top_k", "heads"), [(0, 4), (0, 17), (64, 4)])
def test_more_requests_than_lanes(top_k: int, heads: int) -> None:
    """Work tiles of many requests are found in the right order."""
    kv_lens = [(0, 3, 40, 130)[i * i % 7 % 4] for i in range(75)]
    check(Case([1] * 75, kv_lens, heads, top_k=top_k, sinks=False), 16, adverse=1)


@pytest.mark.parametrize("top_k", [0, 64])
def test_scales_on_the_device(top_k: int) -> None:
    check(Case([2, 2], [90, 300], heads=16, top_k=top_k, tensor_scales=True, sinks=False), 64, adverse=1)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("chunks", [6, 9])
def test_whoever_combines_finds_the_same(monkeypatch: pytest.MonkeyPatch, chunks: int, heads: int) -> None:
    """Alone, the attending warps combine a request's partials.

    In a batch other warps do so too, some of them beside work tiles, and all must agree on the row shares.
    """
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", True)
    kv_lens = [*[2 * cases.chunk_tokens(MAIN)] * 5, chunks * cases.chunk_tokens(MAIN) - 100]
    data, found = MlaBatch([1] * 6, kv_lens, heads=heads, device="cpu"), []
    for ctas, batch in ((4, data), (16, data.request(5))):
        monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
        lse = torch.empty(batch.tokens, batch.heads)
        with emulator.use("sm_90a"):
            out = execute(batch.decode(64, lse=LogSumExp(lse, LseLayout.RAGGED, natural=False)))
        found.append((out[-1], lse[-1]))
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
