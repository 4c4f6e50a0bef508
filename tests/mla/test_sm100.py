"""MLA decode of Blackwell by pairs of CTAs in the emulator, against float64, in ordinary and adverse schedules.

These kernels have not run on a GPU. They run under the race detector, the proxy check and strict mode. Data is
NaN where a kernel must not read it, or must overwrite it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from helpers.batches.fp8 import Fp8MlaBatch
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import check_requests_alone
from helpers.calls.entries import mla
from helpers.cases.mla import TOPK_KINDS, Case, batch_of, check_case, check_gaps, check_rising_logits
from helpers.covering.configs import COVERING_PAIR_MLA
from helpers.device.schedules import Setting, schedules, setting

from hopwell import emulator
from hopwell.kernels import execute, registry
from hopwell.kernels.jit import settings
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import LogSumExp, LseLayout
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from tests.mla.test_clients import test_context_parallel_ranks as ranks_share_keys

pytestmark = pytest.mark.emulator

ARCH = "sm_100a"


@pytest.fixture(autouse=True)
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE", ARCH)


def all_schedules(seed: int, arch: str = ARCH) -> Sequence[Setting]:
    """Return the settings of a case; late work comes last in one of them."""
    return *schedules(seed, 1, arch=arch, strict=True), setting("late", seed, arch, strict=True)


def check(case: Case, page_size: int = 64, seed: int = 0) -> None:
    problem = batch_of(case, "cpu").decode(page_size, ragged=case.ragged)
    assert isinstance(registry.resolve(problem, ARCH), Sm100MlaConfig)
    check_case(case, page_size, "cpu", all_schedules(seed))
    assert not emulator.report().warnings


@pytest.mark.parametrize("config", COVERING_PAIR_MLA, ids=lambda config: config.name)
def test_fetches(config: Sm100MlaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests have no keys, fewer keys than new tokens, and keys at the edges of steps and of partials."""
    monkeypatch.setattr(settings.BATCH_INVARIANT, "given", config.batch_invariant)
    dims = (config.head_dim_qk, config.head_dim_v)
    heads, top_k = (65, 196) if config.sparse else (64, 0)
    kinds = dict(dims=dims, dtype=config.dtype, kv_type=config.kv_type)
    case = Case([2] * 4, [0, 1, 129, 320], heads, **kinds, top_k=top_k)
    ways = all_schedules(COVERING_PAIR_MLA.index(config), config.arch)
    check_case(case, config.box_rows or 4, "cpu", ways, config)
    assert not emulator.report().warnings


@pytest.mark.parametrize(("heads", "q_len"), [(17, 1), (32, 1), (16, 3), (64, 1), (65, 1), (128, 1), (22, 3), (128, 2)])
def test_rows(heads: int, q_len: int) -> None:
    """None of the second CTA's rows, part of them, all of them, and a tile that begins in the middle of a token's
    heads."""
    check(Case([q_len] * 2, [q_len - 1, 64 + q_len], heads), seed=heads)


@pytest.mark.parametrize(("q_lens", "heads"), [([3, 0, 3, 3], 24), ([4, 2, 4, 3], 40), ([3, 1, 0, 2], 16)])
def test_uneven_numbers_of_new_tokens(q_lens: list[int], heads: int) -> None:
    """Requests have fewer rows than others, or none. With most of the tokens there, keys are cut into CTA parts."""
    check(Case(q_lens, [40, 130, 70, 5], heads, ragged=True))


@pytest.mark.parametrize(
    ("ctas", "q_len", "kv_lens"), [(10, 1, [700]), (6, 1, [900, 3, 600]), (8, 2, [500, 700]), (2, 4, [300])]
)
def test_partials_are_combined(ctas: int, q_len: int, kv_lens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair has no partial, one, two of different requests, or partials of several row tiles."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", ctas)
    check(Case([q_len] * len(kv_lens), kv_lens, heads=128), seed=ctas)


@pytest.mark.parametrize("sms", [1, 5])
def test_an_odd_number_of_sms(sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device has one pair even with one SM."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
    check(Case([1], [300], heads=70))


@pytest.mark.parametrize("q_len", [1, 2])
def test_fp8_partials(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "EMULATED_SMS", 6)
    check(Case([q_len] * 2, [500, 260], heads=96, dtype="e4m3"), seed=q_len)


def test_light_fp8_keys_keep_their_weight() -> None:
    """A step whose logits all lie far below another step's has a reference of its own: e4m3 would round it to 0."""
    data = Fp8MlaBatch.with_light_keys(heads=65)
    out = execute(data.decode(64))
    data.expected_mla().check(out)
    assert (out != 0).any()


@pytest.mark.parametrize(("heads", "page_size"), [(70, 4), (32, 64)])
def test_entry_with_fp8_queries(heads: int, page_size: int) -> None:
    """The entry leaves e4m3 queries to the kernels."""
    data = Fp8MlaBatch([1, 1], [70, 5], heads=heads, device="cpu")
    problem = data.decode(page_size)
    query = problem.query.view(2, 1, heads, 576)
    out = mla(data, problem, query=query, bmm2_scale=-0.5)
    data.expected_mla().check(out.flatten(0, 1), factor=-0.5)
    assert isinstance(registry.resolve(problem, ARCH), Sm100MlaConfig)
    assert torch.equal(execute(replace(problem, output_scale=-0.5)), out.flatten(0, 1))


@pytest.mark.parametrize("kind", TOPK_KINDS)
def test_topk_indices(kind: str) -> None:
    """Shorter and longer than the visible keys, with gaps, duplicates, and without an entry that counts."""
    check(Case([2] * 3, [1, 50, 200], heads=68, top_k=132, topk_kind=kind), 16)


@pytest.mark.parametrize("place", ["one", "tile", "last tiles", "every other", "all"])
def test_gaps_in_topk_indices(place: str) -> None:
    check_gaps(place, 260, 66, device="cpu")


def test_rising_logits() -> None:
    """The reference moves in every step, and O is rescaled each time."""
    check_rising_logits(40, 600, device="cpu")


def test_query_that_is_expanded_over_heads() -> None:
    """Query rows at one address, which lanes copy, give the same result as contiguous rows, which TMA loads."""
    data = MlaBatch([1, 1], [70, 5], heads=80, device="cpu")
    problem = data.decode(64)
    one = problem.query[:, :1].expand(-1, 80, -1)
    expanded, alike = (execute(replace(problem, query=query)).clone() for query in (one, one.contiguous()))
    assert torch.equal(expanded, alike)


# Requests have one, two and three steps, and no key for some tokens.
Q_LENS, KV_LENS = [2, 2, 2], [300, 130, 1]
KINDS = pytest.mark.parametrize("kind", [MlaBatch, Fp8MlaBatch])


@KINDS
def test_requests_and_pages_elsewhere_change_no_bit(kind: type[MlaBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair of CTAs takes every request whole, and three pairs cut them."""
    data = kind(Q_LENS, KV_LENS, heads=70, device="cpu")
    monkeypatch.setattr(geometry, "EMULATED_SMS", 2)
    together = execute(data.decode(64)).clone()
    assert not together.isnan().any()
    check_requests_alone(data, together, 64)
    for sms in (2, 6):
        monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
        assert torch.equal(*(execute(data.decode(64, order=order)).clone() for order in (1, 2)))


@KINDS
def test_counts_of_keys_are_those_of_hopper(kind: type[MlaBatch], monkeypatch: pytest.MonkeyPatch) -> None:
    """With queries of zero and one-hot keys, a row's output counts its visible keys, however they are cut."""
    data = kind(Q_LENS, KV_LENS, heads=70, device="cpu")
    data.q.zero_()
    for k in data.k:
        k.zero_()
        token = torch.arange(k.shape[0])
        k[token, :, token % data.v_head_dim] = 1.0
    expected, found = data.expected_mla(), []
    for arch, sms in (("sm_90a", 1), (ARCH, 2), (ARCH, 6)):
        monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
        lse = torch.full((data.tokens, data.heads), torch.nan)
        with emulator.use(arch):
            out = execute(data.decode(64, lse=LogSumExp(lse, LseLayout.RAGGED, natural=True))).clone()
        expected.check(out)
        expected.check_lse(lse)
        found.append(torch.cat([out.double(), lse[..., None]], -1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(("kind", "power"), [(MlaBatch, 30), (Fp8MlaBatch, 24)])
def test_logits_beyond_the_precision_of_float32(kind: type[MlaBatch], power: int) -> None:
    """Equal keys share the weight, though the product of their logit and the scale is off by many powers of two."""
    data = kind([1], [300], heads=70, device="cpu")
    data.q.zero_()
    data.q[0, :, -1] = 2.0 * torch.arange(8, 16).repeat(9)[:70]
    data.k[0].fill_(1.0)
    out = execute(data.decode(64, softmax_scale=1.01 * 2**power * math.log(2) / 30))
    assert ((out.double() - 1).abs() <= (2**-4 if kind is Fp8MlaBatch else 0)).all()


def test_ranks_that_share_keys() -> None:
    ranks_share_keys([5] * 4, 2, 24, "cpu")


def test_scales_on_the_device() -> None:
    check(Case([2, 2], [90, 200], heads=40, tensor_scales=True, sinks=False))
