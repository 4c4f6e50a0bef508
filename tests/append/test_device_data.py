"""With the check of device data, an append names tokens that would be lost: by argument, index and value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.batches.append import FP8, NVFP4, Case, Data

import hopwell
from hopwell.kernels.append.geometry import append_operands
from hopwell.kernels.append.plan import AppendPlan
from hopwell.kernels.jit import settings

SMALL = torch.finfo(torch.float32).tiny / 2
REQUESTS, POSITIONS = "batch_indices", "positions"


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the recorded launches, with the check on."""
    found: list[Any] = []
    monkeypatch.setenv("HOPWELL_CHECK", "1")
    monkeypatch.setattr(AppendPlan, "__init__", lambda self, problem: None)
    monkeypatch.setattr(AppendPlan, "has_work", True, raising=False)
    monkeypatch.setattr(AppendPlan, "repeatable", True, raising=False)
    monkeypatch.setattr(AppendPlan, "operands", staticmethod(append_operands), raising=False)
    monkeypatch.setattr(AppendPlan, "launch", lambda self, views, name: found.append(views))
    return found


def call(data: Data, **changes: Any) -> None:
    places = (data.key, data.value, data.batch_indices, data.positions)
    pages = dict(kv_indices=data.indices, kv_indptr=data.indptr)
    hopwell.append_paged_kv_cache(*places, **(pages | data.options() | changes))  # type: ignore[arg-type]


def call_with_table(data: Data, table: torch.Tensor, **changes: Any) -> None:
    call(data, kv_indices=None, kv_indptr=None, block_tables=table, **changes)


# Requests have 1, 1, 5 and 4 pages of 8 tokens; 13 pages are in the cache. Tokens 0 to 2 are request 0's.
BAD: list[tuple[str, int, int, str]] = [
    (REQUESTS, 2, 4, r"batch_indices\[2\] must be less than 4, the number of requests, or negative.*, got 4"),
    (POSITIONS, 1, 8, r"positions\[1\] must be less than 8, because request 0 has 1 pages of 8, or.*, got 8"),
    (POSITIONS, 20, 32, r"positions\[20\] must be less than 32, because request 3 has 4 pages of 8, or.*, got 32"),
    ("indices", 0, -1, r"kv_indices\[0\] must be a page id in \[0, 13\), because a new token goes to .*, got -1"),
    ("indices", 4, 13, r"kv_indices\[4\] must be a page id in \[0, 13\), .*, got 13"),
    ("indptr", 0, -1, r"kv_indptr\[0\] must be in \[0, 11\], the number of page ids, got -1"),
    ("indptr", 4, 12, r"kv_indptr\[4\] must be in \[0, 11\], the number of page ids, got 12"),
    ("indptr", 2, 0, r"kv_indptr\[2\] must be at least the one before it, got 0"),
]


@pytest.mark.parametrize(("name", "place", "value", "text"), BAD)
def test_what_is_lost_is_named(launches: list[Any], name: str, place: int, value: int, text: str) -> None:
    data = Data(Case())
    for _ in range(3):
        call(data)
    assert len(launches) == 3
    getattr(data, name)[place] = value
    for dtype in (torch.int32, torch.int64):
        setattr(data, name, getattr(data, name).to(dtype))
        with pytest.raises(ValueError, match=f"^{text}$"):
            call(data)
    assert len(launches) == 3


@pytest.mark.parametrize("argument", ["batch_indices", "positions", "kv_indices", "kv_indptr"])
@pytest.mark.parametrize("distance", [2**32, -(2**32)])
def test_upper_halves_are_looked_at(launches: list[Any], argument: str, distance: int) -> None:
    data = Data(Case())
    given = {"kv_indices": "indices", "kv_indptr": "indptr"}.get(argument, argument)
    wide = getattr(data, given).long()
    wide[4] += distance
    setattr(data, given, wide)
    if distance < 0 and argument in (REQUESTS, POSITIONS):  # padding
        call(data)
        assert len(launches) == 1
    else:
        with pytest.raises(ValueError, match=rf"^{argument}\[4\] must be .*, got {int(wide[4])}$"):
            call(data)


def test_padding_is_no_loss(launches: list[Any]) -> None:
    data = Data(Case())
    data.batch_indices[4] = -1
    data.positions[7] = -5
    data.positions[4] = 10**6  # of a token without a request
    data.batch_indices[7] = 10**6
    call(data)
    assert len(launches) == 1


def test_ids_of_pages_without_new_tokens_are_not_looked_at(launches: list[Any]) -> None:
    data = Data(Case())
    table = data.block_tables()
    table[3, :3] = -1  # the new token is in the last page
    call_with_table(data, table)
    table[3, 3] = -1
    text = r"block_tables\[3, 3\] must be a page id in \[0, 13\), because a new token goes to this page, got -1"
    with pytest.raises(ValueError, match=text):
        call_with_table(data, table)
    data.positions[20] = 48
    with pytest.raises(ValueError, match=r"positions\[20\] must be less than 48, because request 3 has 6 pages of 8"):
        call_with_table(data, table)
    with pytest.raises(ValueError, match=r"batch_indices\[0\] must be less than 0, the number of requests"):
        call_with_table(data, table[:0])
    assert len(launches) == 1


def test_ids_of_values_alone(launches: list[Any]) -> None:
    data = Data(Case())
    table = data.block_tables()
    values = table.clone()
    values[0, 0] = 99
    with pytest.raises(ValueError, match=r"block_tables\[0, 0\] must be a page id .*, got 99"):
        call_with_table(data, torch.stack([table, values], 1), uses_shared_paged_kv_idx=False)
    assert not launches


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(launches: list[Any], dtype: torch.dtype) -> None:
    data = Data(Case())
    slots = data.slots().to(dtype)
    slots[2], slots[3] = -1, 13 * 8 - 1
    hopwell.append_paged_kv_cache_with_slot_mapping(data.key, data.value, slots, **data.options())
    slots[5] = 13 * 8
    text = r"slot_mapping\[5\] must be less than 104, because the cache has 13 pages of 8, or negative for padding"
    with pytest.raises(ValueError, match=f"^{text}, got 104$"):
        hopwell.append_paged_kv_cache_with_slot_mapping(data.key, data.value, slots, **data.options())
    assert len(launches) == 1


def test_new_keys_and_values_in_one_page_of_a_pool(launches: list[Any]) -> None:
    """Page p of V is page p + 1 of K: even ids keep them apart."""
    data = Data(Case())
    pool = torch.stack(data.cache, 1).flatten(0, 1)
    data.cache, data.indices = (pool[:-1], pool[1:]), 2 * data.indices
    call(data)
    data.indices[0] = data.indices[-1] - 1  # V of request 0 goes to the page of K of request 3's new token
    text = rf"^kv_indices\[0\] must be another page, because new keys go to .*, got {int(data.indices[0])}$"
    with pytest.raises(ValueError, match=text):
        call(data)
    assert len(launches) == 1


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("cache", [FP8, NVFP4])
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, SMALL, math.nan, math.inf, -math.inf])
def test_scales(launches: list[Any], name: str, cache: torch.dtype, value: float) -> None:
    data = Data(Case(cache=cache))
    call(data, **{name: torch.tensor([0.5])})
    with pytest.raises(ValueError, match=rf"^{name}\[0\] must be finite and at least 1\.17.*e-38, got {value}$"):
        call(data, **{name: torch.tensor([value])})
    with pytest.raises(ValueError, match=rf"^{name} must be "):
        call(data, **{name: value})
    assert len(launches) == 1


def test_switching(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated call is checked as soon as the check is on."""
    repeated = staticmethod(lambda anchor, addresses: launches.append(addresses))
    for name, value in dict(function=repeated, anchor=None, constants=()).items():
        monkeypatch.setattr(AppendPlan, name, value, raising=False)
    monkeypatch.setattr(settings.CHECK, "given", None)  # and again after the test
    data = Data(Case())
    data.positions[1] = 8
    hopwell.check_device_data(False)
    for _ in range(3):
        call(data)
    assert len(launches) == 3
    hopwell.check_device_data(True)
    with pytest.raises(ValueError, match=r"positions\[1\]"):
        call(data)


def test_places_are_looked_at_as_well() -> None:
    starts, lengths = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    hopwell.get_batch_indices_positions(starts, lengths, 3)
    with pytest.raises(ValueError, match=r"^append_indptr\[2\] must be at most 2, the number of tokens .* nnz, got 3"):
        hopwell.get_batch_indices_positions(starts, lengths, 2)
    with pytest.raises(ValueError, match=r"^append_indptr\[1\] must be at least the one before it, got -1"):
        hopwell.get_batch_indices_positions(torch.tensor([0, -1, 2]), lengths, 3)
    with pytest.raises(ValueError, match=r"^seq_lens\[1\] must be at least 2, its new tokens, got 1"):
        hopwell.get_batch_indices_positions(starts, torch.tensor([4, 1]), 3)
    hopwell.get_seq_lens(starts, torch.tensor([0, 16]), 16)
    for last in (-1, 17):
        with pytest.raises(ValueError, match=rf"^kv_last_page_len\[1\] must be in \[0, 16\], got {last}"):
            hopwell.get_seq_lens(starts, torch.tensor([0, last]), 16)
    with pytest.raises(ValueError, match=r"^kv_indptr\[2\] must be at least the one before it, got 0"):
        hopwell.get_seq_lens(torch.tensor([0, 1, 0]), torch.tensor([1, 1]), 16)
