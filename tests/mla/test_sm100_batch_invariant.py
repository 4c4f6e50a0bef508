"""Batch-invariant MLA decode by pairs of CTAs in the emulator, against float64 and against requests alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from helpers.batches.fp8 import Fp8MlaBatch
from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import check_requests_alone
from helpers.cases.mla import DIMS, Case, chunk_tokens
from helpers.device.schedules import setting

from hopwell.kernels import execute, registry
from hopwell.kernels.config import splitting
from hopwell.kernels.config.base import KvType
from hopwell.kernels.launch import geometry
from hopwell.kernels.sm100.mla.config import Sm100MlaConfig
from tests.mla.test_sm100 import ARCH, check, check_case

pytestmark = [pytest.mark.emulator, pytest.mark.usefixtures("blackwell", "batch_invariant")]

MAIN = DIMS[0]
CHUNK = chunk_tokens(MAIN)


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPWELL_EMULATE", ARCH)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the slots of one request and little more, so that partials wait for earlier partials in their slots."""
    monkeypatch.setattr(splitting, "COMFORTABLE_BYTES", 0)
    monkeypatch.setattr(splitting, "LATENT_IN_FLIGHT", 1)


@pytest.mark.parametrize("kind", [MlaBatch, Fp8MlaBatch])
@pytest.mark.parametrize("sms", [4, 10])
def test_a_request_alone_has_the_bits_that_it_has_in_a_batch(
    kind: type[MlaBatch], sms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "EMULATED_SMS", sms)
    data = kind([1, 1, 1], [CHUNK + 76, 5, 2 * CHUNK + 1], heads=70, device="cpu")
    config = registry.resolve(data.decode(64), ARCH)
    assert isinstance(config, Sm100MlaConfig)
    assert config.batch_invariant
    together = execute(data.decode(64)).clone()
    data.expected_mla().check(together)
    check_requests_alone(data, together, 64)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize(("heads", "q_len", "chunks"), [(70, 1, [5, 2, 3, 1, 2]), (70, 2, [2, 1, 3])])
def test_slots_are_used_again(heads: int, q_len: int, chunks: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows fill one or two tiles, whose partials are interleaved."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 4)
    check(Case([q_len] * len(chunks), [n * CHUNK - 5 for n in chunks], heads, sinks=False), 64)


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize("kv_type", [KvType.E4M3, KvType.FP8_DS_MLA])
def test_slots_are_used_again_where_keys_are_dequantized(kv_type: KvType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pair is there, and one warp of each CTA combines beside its work tiles."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 2)
    check(Case([1] * 4, [CHUNK + 6] * 4, heads=66, sinks=False, kv_type=kv_type))


@pytest.mark.usefixtures("few_slots")
def test_slots_are_used_again_by_uneven_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with no or few rows has fewer row tiles than the others, and may have more chunks."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 4)
    monkeypatch.setattr(splitting, "LATENT_WORK_TILES", 6)
    kv_lens = [n * CHUNK - 5 for n in (4, 1, 2)]
    for first in (0, 1):
        check(Case([first, 4, 1], kv_lens, heads=34, sinks=False, ragged=True))


@pytest.mark.usefixtures("few_slots")
def test_slots_are_used_again_by_topk_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "EMULATED_SMS", 4)
    chunk = chunk_tokens(MAIN, sparse=True)
    check(Case([3, 2], [chunk + 40, chunk], heads=66, top_k=chunk + 68, ragged=True))


def test_late_work_beside_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """CTAs without work poll for row shares while others load."""
    monkeypatch.setattr(geometry, "EMULATED_SMS", 6)
    case = Case([1] * 4, [127, 2 * CHUNK + 9, 5, CHUNK + 1], heads=66)
    check_case(case, 64, "cpu", [setting("late", 710860, ARCH, strict=True)])
