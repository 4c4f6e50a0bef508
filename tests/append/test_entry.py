"""New tokens in paged caches equal the output of the quantizers in ``hopwell.layouts``; no other byte is written."""

from __future__ import annotations

import copy
import tracemalloc
from dataclasses import replace

import pytest
import torch
from helpers.batches.append import BF16, FP8, FP16, NVFP4, Case, Data, octets

import hopwell
from hopwell import emulator

CASES = {
    "bf16": Case(),
    "fp16-HND-stacked": Case(dtype=FP16, cache=FP16, layout="HND", stacked=True),
    "bf16-narrow": Case(dims=(40, 24), kv_heads=3),
    "e4m3": Case(cache=FP8, k_scale=0.3, v_scale=7.0, stacked=True, dims=(48, 48)),
    "e4m3-fp16": Case(dtype=FP16, cache=FP8, layout="HND", dims=(192, 128), page_size=1, k_scale=1e-3),
    "nvfp4": Case(cache=NVFP4, k_scale=0.37, v_scale=1.0, dims=(96, 64)),
    "nvfp4-interleaved": Case(cache=NVFP4, v_scale=3.1, v_scale_layout="interleaved", dims=(128, 128), stacked=True),
    "nvfp4-interleaved-fp16": Case(
        dtype=FP16, cache=NVFP4, layout="HND", v_scale_layout="interleaved", dims=(192, 128), page_size=4, kv_heads=1
    ),
}
NAMED = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def append(data: Data, **changes: object) -> None:
    places = (data.key, data.value, data.batch_indices, data.positions)
    options = dict(kv_indices=data.indices, kv_indptr=data.indptr, kv_last_page_len=data.last)
    hopwell.append_paged_kv_cache(*places, **(options | data.options() | changes))  # type: ignore[arg-type]


@NAMED
def test_writes_what_the_quantizers_give(device: str, case: Case) -> None:
    data = Data(replace(case, device=device))
    want = data.expected()
    append(data)
    data.check(want)


def append_slots(data: Data, slots: torch.Tensor, **changes: object) -> None:
    places = (data.key, data.value, slots)
    hopwell.append_paged_kv_cache_with_slot_mapping(*places, **(data.options() | changes))  # type: ignore[arg-type]


@NAMED
def test_slot_mapping(device: str, case: Case) -> None:
    """Negative slots, slots past the cache and tokens behind the last slot are not written."""
    data = Data(replace(case, device=device))
    slots = data.slots()[:-2]
    slots[3], slots[7], slots[8] = -1, data.pages * case.page_size, -(2**40)
    want = data.expected(skipped=(3, 7, 8, data.case.tokens - 2, data.case.tokens - 1))
    append_slots(data, slots)
    data.check(want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_slots_of_32_bits(device: str, dtype: torch.dtype) -> None:
    data = Data(replace(CASES["nvfp4"], device=device))
    want = data.expected()
    append_slots(data, data.slots().int().view(dtype))
    data.check(want)


def test_flashinfer_name_for_nvfp4_slots(device: str) -> None:
    data = Data(replace(CASES["nvfp4"], device=device))
    want = data.expected()
    places = (data.key, data.value, data.slots(), data.cache, data.scales)
    scales = (torch.tensor(scale, device=device) for scale in (data.case.k_scale, data.case.v_scale))
    hopwell.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*places, *scales, data.case.layout)
    data.check(want)


@pytest.mark.parametrize("page_size", [24, 7, 1040])
def test_page_sizes_that_are_no_powers_of_two(device: str, page_size: int) -> None:
    """With pages of 1040 tokens, request 1 has its new tokens in the second page."""
    data = Data(Case(old=(0, page_size - 5), new=(3, 9), page_size=page_size, kv_heads=1, device=device))
    want = data.expected()
    append(data)
    data.check(want)
    again = Data(data.case)
    append_slots(again, again.slots())
    again.check(want)


@pytest.mark.emulator
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_is_the_same_on_other_archs(arch: str) -> None:
    for case in (CASES["e4m3"], CASES["nvfp4-interleaved"]):
        data = Data(case)
        want = data.expected()
        with emulator.use(arch):
            append(data)
        data.check(want)


@pytest.mark.parametrize("shared", [True, False])
def test_block_tables(device: str, shared: bool) -> None:
    data = Data(replace(CASES["nvfp4"], device=device))
    want = data.expected()
    table = data.block_tables()
    tables = table if shared else torch.stack([table, table], 1)
    append(data, kv_indices=None, kv_indptr=None, block_tables=tables, uses_shared_paged_kv_idx=shared)
    data.check(want)


def test_keys_and_values_in_different_pages(device: str) -> None:
    """K's ids index K's pool, and V's ids index V's pool: with V's pool rolled the cache is the same."""
    data = Data(replace(CASES["bf16"], device=device))
    want = data.expected()
    table = data.block_tables()
    moved = torch.where(table < 0, table, (table + 1) % data.pages)
    append(
        data,
        kv_indices=None,
        kv_indptr=None,
        block_tables=torch.stack([table, moved], 1),
        uses_shared_paged_kv_idx=False,
    )
    data.check([want[0], want[1].roll(1, 0)])


@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_keys_and_values_in_pages_of_one_pool(device: str, name: str) -> None:
    """K and V are views one page apart, as in transformers' continuous batching; the table has even ids only."""
    data = Data(replace(CASES[name], device=device, v_scale_layout="linear", dims=(64, 64)))
    want = data.expected()

    def one_pool(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        pool = torch.stack(parts, 1).flatten(0, 1)  # K of page 0, V of page 0, K of page 1, ...
        return pool[:-1], pool[1:]

    caches, scales = one_pool(data.cache), None if data.scales is None else one_pool(data.scales)
    append(data, kv_indices=2 * data.indices, paged_kv_cache=caches, kv_cache_sf=scales)
    data.cache = tuple(part[::2] for part in caches)
    if scales is not None:
        data.scales = tuple(part[::2] for part in scales)
    data.check(want)


def test_one_cache_for_keys_and_values_with_ids_of_their_own(device: str) -> None:
    data = Data(replace(CASES["bf16"], device=device))
    want = data.expected()
    pool, table = torch.cat(data.cache), data.block_tables()
    tables = torch.stack([table, table + data.pages], 1)
    places = dict(kv_indices=None, kv_indptr=None, block_tables=tables, uses_shared_paged_kv_idx=False)
    append(data, paged_kv_cache=(pool, pool), **places)
    data.cache = tuple(pool.split(data.pages))
    data.check(want)


@pytest.mark.parametrize("name", ["e4m3", "nvfp4"])
def test_scales_on_the_device(device: str, name: str) -> None:
    data = Data(replace(CASES[name], device=device))
    want = data.expected()
    scales = [torch.tensor([scale], device=device) for scale in (data.case.k_scale, data.case.v_scale)]
    append(data, k_scale=scales[0], v_scale=scales[1])
    data.check(want)


@pytest.mark.parametrize("name", ["e4m3", "nvfp4"])
def test_scales_of_each_kv_head(device: str, name: str) -> None:
    """A head has the bytes of an append with its scales for all heads. NaN in a scale stays in its own head."""
    heads, k_scales, v_scales = 3, (0.01, 1.0, 100.0), (7.0, 0.3, 1e-3)
    data = Data(replace(CASES[name], kv_heads=heads, device=device))
    want = data.expected()
    for head, (k_scale, v_scale) in enumerate(zip(k_scales, v_scales, strict=True)):
        one = copy.copy(data)
        one.case = replace(data.case, k_scale=k_scale, v_scale=v_scale)
        for pool, expected in zip(want, one.expected(), strict=True):
            pool[:, head] = expected[:, head]
    given = [torch.tensor(scales, device=device) for scales in (k_scales, v_scales)]
    append(data, k_scale=given[0], v_scale=given[1])
    data.check(want)
    before = [octets(view).clone() for view in data.views()]
    given[0][1] = torch.nan
    append(data, k_scale=given[0], v_scale=given[1])
    for pool, old in zip(data.views(), before, strict=True):
        assert torch.equal(octets(pool)[:, ::2], old[:, ::2])


INDICES = ("batch_indices", "positions", "indices", "indptr", "last")


@pytest.mark.parametrize("wide", [INDICES, *((name,) for name in INDICES)], ids=lambda names: "+".join(names))
def test_indices_of_64_bits(device: str, wide: tuple[str, ...]) -> None:
    """All indices have 64 bits, or each one alone among 32-bit ones."""
    data = Data(replace(CASES["nvfp4"], device=device))
    want = data.expected()
    for name in wide:
        setattr(data, name, getattr(data, name).long())
    append(data)
    data.check(want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
@pytest.mark.parametrize("shared", [True, False])
def test_block_tables_of_other_types(device: str, shared: bool, dtype: torch.dtype) -> None:
    data = Data(replace(CASES["e4m3"], device=device))
    want = data.expected()
    table = data.block_tables()
    tables = (table if shared else torch.stack([table, table], 1)).to(dtype)
    append(data, kv_indices=None, kv_indptr=None, block_tables=tables, uses_shared_paged_kv_idx=shared)
    data.check(want)


@pytest.mark.parametrize("multiple", [1, -1, 2**31 - 1, -(2**31)])
def test_indices_beyond_32_bits_name_no_place(device: str, multiple: int) -> None:
    """Their lower halves would be valid places."""
    for name, place in (("batch_indices", 4), ("positions", 5), ("indices", 6), ("indptr", 0)):
        data = Data(replace(CASES["bf16"], device=device))
        pages = data.ids.tolist().index(int(data.indices[6]))
        skipped = {
            "batch_indices": [4],
            "positions": [5],
            "indices": [i for i in range(data.case.tokens) if page_of(data, i) == pages],
            "indptr": [i for i in range(data.case.tokens) if int(data.batch_indices[i]) == 0],
        }[name]
        want = data.expected(skipped=skipped)
        changed = getattr(data, name).long()
        changed[place] += multiple * 2**32
        setattr(data, name, changed)
        append(data)
        data.check(want)


def page_of(data: Data, token: int) -> int:
    """Return the position in kv_indices of a token's page."""
    return int(data.indptr[int(data.batch_indices[token])]) + int(data.positions[token]) // data.case.page_size


@pytest.mark.emulator
def test_the_emulator_takes_no_memory_for_what_stays_as_it_is() -> None:
    """One token in a cache of 8 MiB."""
    cache = torch.zeros(64, 2, 8, 16, 128, dtype=FP16)
    new, ids = torch.ones(1, 8, 128, dtype=FP16), torch.zeros(1, dtype=torch.int32)
    places = dict(batch_indices=ids, positions=ids, block_tables=ids[None], kv_layout="HND")
    hopwell.append_paged_kv_cache(new, new, paged_kv_cache=cache[:1], **places)
    tracemalloc.start()
    try:
        hopwell.append_paged_kv_cache(new, new, paged_kv_cache=cache, **places)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache[0, :, :, 0].eq(1).all()
    assert peak < cache.nbytes / 4


def test_places_of_64_bits() -> None:
    """Places follow FlashInfer's example. Places beyond int32 become the largest ones, which are invalid."""
    starts, lengths = torch.tensor([0, 1, 3, 6, 10]), torch.tensor([5, 5, 5, 2**32 + 5])
    for change in (lambda x: x, lambda x: x.int()):
        requests, positions = hopwell.get_batch_indices_positions(change(starts), lengths, 11)
        assert (requests.dtype, positions.dtype) == (torch.int32, torch.int32)
        assert requests.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, -1]
        assert positions.tolist() == [4, 3, 4, 2, 3, 4, *[2**31 - 1] * 4, -1]
    assert hopwell.get_seq_lens(torch.tensor([0, 3, 4]), torch.tensor([13, 8]), 16).tolist() == [45, 8]
    assert hopwell.get_seq_lens(torch.tensor([0, 2**40]), torch.tensor([1]), 16).tolist() == [2**31 - 1]


def test_what_names_no_place_is_not_written(device: str) -> None:
    data = Data(replace(CASES["nvfp4"], device=device))
    wrong = {0: ("batch_indices", -1), 4: ("batch_indices", 4), 7: ("positions", -1), 9: ("positions", 1000)}
    want = data.expected(skipped=[*wrong, 20])
    for token, (name, value) in wrong.items():
        getattr(data, name)[token] = value
    table = data.block_tables()
    table[3, 30 // 8] = -1  # of the last token
    append(data, kv_indices=None, kv_indptr=None, block_tables=table)
    data.check(want)
    table[3, 30 // 8] = data.pages
    append(data, kv_indices=None, kv_indptr=None, block_tables=table)
    data.check(want)
    # With ids in a row, a position past a request's pages would be in the next request's.
    append(data, kv_indices=data.indices[:-1])
    data.check(want)


def test_no_tokens(device: str) -> None:
    data = Data(Case(old=(4, 2), new=(0, 0), device=device))
    want = data.expected()
    append(data)
    data.check(want)


def test_flashinfer_name_for_nvfp4(device: str) -> None:
    data = Data(replace(CASES["nvfp4"], device=device))
    want = data.expected()
    places = (data.key, data.value, data.batch_indices, data.positions, data.cache, data.scales)
    pages = (data.indices, data.indptr, data.last)
    hopwell.nvfp4_quantize_append_paged_kv_cache(*places, *pages, data.case.k_scale, data.case.v_scale)
    data.check(want)


def test_an_append_is_read_by_attention(device: str) -> None:
    """The cache after appends, token by token, is the cache that is filled at once."""
    data, again = (Data(replace(CASES["e4m3"], device=device)) for _ in range(2))
    append(data)
    for token in range(0, data.case.tokens, 7):
        part = slice(token, token + 7)
        places = (again.key[part], again.value[part], again.batch_indices[part], again.positions[part])
        hopwell.append_paged_kv_cache(*places, kv_indices=again.indices, kv_indptr=again.indptr, **again.options())
    again.check([view.view(torch.uint8).cpu() for view in data.views()])


def test_places_from_lengths(device: str) -> None:
    data = Data(replace(CASES["bf16"], device=device))
    starts = data.ints([sum(data.case.new[:i]) for i in range(5)])
    lengths = hopwell.get_seq_lens(data.indptr, data.last, data.case.page_size)
    assert lengths.tolist() == [old + new for old, new in zip(data.case.old, data.case.new, strict=True)]
    places = hopwell.get_batch_indices_positions(starts, lengths, data.case.tokens + 2)
    for got, want in zip(places, (data.batch_indices, data.positions), strict=True):
        assert got.dtype == torch.int32
        assert got.tolist() == [*want.tolist(), -1, -1]


@pytest.mark.emulator
def test_neighbours_of_a_scale_are_written_without_races() -> None:
    data = Data(CASES["nvfp4-interleaved"])
    want = data.expected()
    with emulator.use("sm_90a", race=True, strict=True, schedule="random", seed=1):
        append(data)
    data.check(want)


@pytest.mark.gpu
def test_graphs_replay_with_new_contents() -> None:
    data = Data(replace(CASES["nvfp4-interleaved"], device="cuda"))
    append(data)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(data)
    data.key.copy_(data.key.roll(1, 0))
    data.value.copy_(data.value.roll(1, 0))
    want = data.expected()
    graph.replay()
    torch.cuda.synchronize()
    data.check(want)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [BF16, FP8, NVFP4], ids=str)
def test_many_tokens(cache: torch.dtype) -> None:
    """More tokens than fit the GPU at once are appended, and again with other tensors of the same kind."""
    case = Case(old=(0, 100, 7), new=(3000, 1, 5000), kv_heads=8, dims=(128, 128), page_size=16, cache=cache)
    for _ in range(2):
        data = Data(replace(case, device="cuda"))
        want = data.expected()
        append(data)
        data.check(want)
