"""Settings and faults of calls with CPU tensors. Their results are in tests/prefill."""

from __future__ import annotations

import pytest
import torch
from helpers.batches.append import Case, Data
from helpers.batches.prefill import CAUSAL, Batch
from helpers.calls import entries as entry_calls

import hopwell
from hopwell import emulator
from hopwell.kernels.launch import plan

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


def test_settings_of_the_environment(batch, monkeypatch):
    monkeypatch.setenv("HOPWELL_EMULATE_SCHEDULE", "random")
    monkeypatch.setenv("HOPWELL_EMULATE_SEED", "5")
    monkeypatch.setenv("HOPWELL_EMULATE_CHECKS", "race,proxy")
    assert emulator.options() == emulator.Options(schedule="random", seed=5, race=True, proxy=True)
    batch.expected(CAUSAL).check(context(batch))
    monkeypatch.setenv("HOPWELL_EMULATE_CHECKS", "rac")
    with pytest.raises(ValueError, match=r"HOPWELL_EMULATE_CHECKS must be .* race, proxy, sync, strict; got 'rac'"):
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


def test_an_architecture_without_kernels_is_refused_by_name(monkeypatch):
    batch = Batch([3], [5], device="cpu")
    with emulator.use("sm_80"), pytest.raises(NotImplementedError, match="sm_80"):
        context(batch)
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_80")
    with pytest.raises(NotImplementedError, match="sm_80"):
        context(batch)


@pytest.mark.parametrize(
    ("arch", "kernel", "threads"), [("sm_100a", "PrefillSm100", 768), ("sm_120a", "PrefillSm120", 384)]
)
def test_another_architecture_runs_its_own_kernels(batch, arch, kernel, threads):
    with emulator.use(arch):
        batch.expected(CAUSAL).check(context(batch))
    report = emulator.report()
    assert kernel in report.kernel
    assert report.block == (threads, 1, 1)


def test_unknown_settings_are_refused(monkeypatch):
    monkeypatch.setenv("HOPWELL_EMULATE", "sm_42")
    with pytest.raises(ValueError, match=r"HOPWELL_EMULATE must be one of off, .*; got 'sm_42'"):
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


@pytest.mark.parametrize("bad_page", [-1, 10**6, 2**31 - 1])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_page_number_out_of_range(batch, page_size, bad_page):
    """TMA would read zeros for such a page. Entries after a request's last page may hold anything."""
    text = rf"block_tables\[2, 1\] must be a page id in \[0, \d+\), because request 2 .* from {page_size} on, got"
    with pytest.raises(emulator.MemoryFault, match=f"{text} {bad_page}$"):
        context(batch, page_size, bad_page)


def test_a_length_beyond_the_table(batch):
    key, value, table = batch.pages(16)
    with pytest.raises(emulator.MemoryFault, match=r"seq_lens\[2\] must be at most 48, what 3 pages of 16 .*, got 150"):
        entry_calls.context(batch, (key, value), table[:, :3].contiguous())


def test_memory_has_the_names_of_arguments(batch, monkeypatch):
    """Faults of kernels use these names."""
    named, memory = [], emulator.memory

    def recorded(spans):
        named.append({span.name for span in spans if span.size})
        return memory(spans)

    monkeypatch.setattr(emulator, "memory", recorded)
    context(batch)
    inputs = {"query", "kv_cache", "kv_cache[1]", "block_tables", "seq_lens", "cum_seq_lens_q"}
    assert named.pop() == {*inputs, "out", "tickets"}
    data = Data(Case())
    places = (data.key, data.value, data.batch_indices, data.positions)
    hopwell.append_paged_kv_cache(*places, kv_indices=data.indices, kv_indptr=data.indptr, **data.options())
    inputs = {"append_key", "append_value", "batch_indices", "positions", "kv_indices", "kv_indptr"}
    assert named.pop() == {*inputs, "paged_kv_cache"}


def test_a_page_number_that_a_kernel_comes_to(batch, monkeypatch):
    """A kernel that reads pages row by row would read foreign memory; the next call is not affected."""
    monkeypatch.setattr(plan, "_check_device_data", lambda problem, name: None)
    with pytest.raises(emulator.MemoryFault, match="outside of every tensor"):
        context(batch, page_size=4, bad_page=10**6)
    batch.expected(CAUSAL).check(context(batch, page_size=4))
