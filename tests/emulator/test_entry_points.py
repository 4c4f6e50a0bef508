"""hopwell's entry points called with CPU tensors, and the settings that decide how they run."""

from __future__ import annotations

import entry_calls
import pytest
import torch
from batches import CAUSAL, FULL, Batch, starts, window

import hopwell
from hopwell import emulator
from hopwell.kernels.problem import Mask, MaskKind, Score, ScoreKind

pytestmark = pytest.mark.emulator


def context(data: Batch, page_size: int = 16, bad_page: int | None = None) -> torch.Tensor:
    key, value, table = data.pages(page_size)
    if bad_page is not None:
        table[2, 1] = bad_page
    return entry_calls.context(data, (key, value), table)


@pytest.fixture
def batch() -> Batch:
    return Batch([3, 0, 130], [40, 5, 150], heads=2, kv_heads=1, device="cpu")


def test_cpu_tensors_run_on_the_emulator(batch):
    batch.expected(CAUSAL).check(context(batch))
    report = emulator.report()
    assert report.totals["matrix flops"] > 0
    assert report.block == (384, 1, 1)


def test_ragged_keys_and_log_sum_exp(batch):
    key, value, begins = batch.ragged(gap=3)

    def elements(tokens: list[int], heads: int) -> torch.Tensor:
        return batch.ints([n * heads * batch.head_dim for n in tokens])

    queries = elements(starts(batch.q_lens), batch.heads)
    keys = elements(begins, batch.kv_heads)
    out, lse = hopwell.cudnn_batch_prefill_with_kv_cache(
        batch.q,
        key,
        value,
        batch.scale,
        torch.empty(0, dtype=torch.uint8),
        max_token_per_sequence=max(batch.q_lens),
        max_sequence_kv=max(batch.kv_lens),
        actual_seq_lens_q=batch.ints(batch.q_lens),
        actual_seq_lens_kv=batch.ints(batch.kv_lens),
        causal=True,
        return_lse=True,
        batch_offsets_q=queries,
        batch_offsets_o=queries,
        batch_offsets_k=keys,
        batch_offsets_v=keys,
        batch_offsets_stats=batch.ints([n * batch.heads for n in starts(batch.q_lens)]),
    )
    expected = batch.expected(CAUSAL)
    expected.check(out)
    expected.check_lse(lse.view(-1, batch.heads)[: batch.tokens])


@pytest.mark.parametrize(
    ("arguments", "mask", "score"),
    [
        ({"chunked_attention_size": 64}, Mask(MaskKind.CHUNKED, chunk=64), Score()),
        ({"pos_encoding_mode": "ALIBI"}, CAUSAL, Score(ScoreKind.ALIBI)),
        ({"logits_soft_cap_scale": 2.0, "window_left": 20}, window(20), Score(ScoreKind.SOFT_CAP, 2.0)),
        ({"mask_mode": "padding", "logits_soft_cap_scale": 2.0}, FULL, Score(ScoreKind.SOFT_CAP, 2.0)),
        ({"skip_softmax_threshold_scale_factor": 1e-30}, CAUSAL, Score()),
        ({"save_softmax_stats": True}, CAUSAL, Score()),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_features_of_fmha_v2(batch, arguments, mask, score):
    key, value, _ = batch.ragged()
    sinks = torch.tensor([0.5, -1.0])
    qkv = (batch.q, torch.stack([key, value], 1))
    # a bmm1_scale of 0 means 1 / sqrt(head_dim)
    arguments = {**arguments, "bmm1_scale": 0.0, "bmm2_scale": 1.5, "sinks": sinks}
    result = entry_calls.fmha_v2(batch, qkv, "CONTIGUOUS_Q_KV", **arguments)
    if "save_softmax_stats" in arguments:
        result, stats = result
        without_sinks = batch.expected(mask, score=score)
        without_sinks.check_lse(stats[..., 0] + stats[..., 1].log())
    batch.expected(mask, score=score, sinks=sinks).check(result, factor=1.5)


@pytest.mark.parametrize("head_dim", [40, 512])
def test_other_head_dims_of_context(head_dim):
    data = Batch([3, 0, 70], [40, 5, 90], heads=2, kv_heads=1, head_dim=head_dim, device="cpu")
    data.expected(CAUSAL).check(context(data))


def test_settings_of_the_environment(batch, monkeypatch):
    monkeypatch.setenv("HOPWELL_EMULATE_SCHEDULE", "random")
    monkeypatch.setenv("HOPWELL_EMULATE_SEED", "5")
    monkeypatch.setenv("HOPWELL_EMULATE_CHECKS", "race,proxy")
    assert emulator.options() == emulator.Options(schedule="random", seed=5, race=True, proxy=True)
    batch.expected(CAUSAL).check(context(batch))
    monkeypatch.setenv("HOPWELL_EMULATE_CHECKS", "rac")
    with pytest.raises(ValueError, match="unknown checks"):
        emulator.options()


@pytest.mark.parametrize("switch", ["environment", "use"])
def test_switched_off(batch, monkeypatch, switch):
    if switch == "environment":
        monkeypatch.setenv("HOPWELL_EMULATE", "off")
        with pytest.raises(ValueError, match="tensors are on the CPU, and HOPWELL_EMULATE=off"):
            context(batch)
        return
    with emulator.use("off"), pytest.raises(ValueError, match="tensors are on the CPU"):
        context(batch)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a"])
def test_an_architecture_without_kernels_is_refused_by_name(batch, monkeypatch, arch):
    with emulator.use(arch), pytest.raises(NotImplementedError, match=arch):
        context(batch)
    monkeypatch.setenv("HOPWELL_EMULATE", arch)
    with pytest.raises(NotImplementedError, match=arch):
        context(batch)


def test_unknown_settings_are_refused(monkeypatch):
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_42")
    with pytest.raises(ValueError, match="unknown architecture 'sm_42'"):
        emulator.options()
    monkeypatch.delenv("HOPWELL_EMULATE")
    for wrong in ({"schedule": "lazy"}, {"numerics": "exact"}, {"hazards": "ignore"}):
        with pytest.raises(ValueError, match=r"unknown|must be"), emulator.use(**wrong):
            pass


def test_settings_nest_and_end():
    before = emulator.options()
    with emulator.use("sm_100a", schedule="late"):
        with emulator.use(race=True) as inner:
            assert (inner.arch, inner.schedule, inner.race) == ("sm_100a", "late", True)
        assert not emulator.options().race
    assert emulator.options() == before


def test_a_page_number_beyond_the_cache(batch):
    """A kernel that reads pages row by row would get somebody else's memory; and the next call is not affected."""
    with pytest.raises(emulator.MemoryFault, match="outside of every tensor"):
        context(batch, page_size=4, bad_page=10**6)
    batch.expected(CAUSAL).check(context(batch, page_size=4))
