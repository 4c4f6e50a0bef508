"""Refusals of ``append_paged_kv_cache``, by name and before a launch; and its compiled kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches.append import BF16, FP8, FP16, NVFP4, Case, Data

import hopwell
from hopwell import emulator, page
from hopwell._entries.append import AppendCalls
from hopwell.kernels import support
from hopwell.kernels.append.config import CacheType, shipped_append_configs
from hopwell.kernels.append.geometry import append_operands
from hopwell.kernels.append.plan import AppendPlan
from hopwell.kernels.jit.toolchain import artifact

CASES = {
    "bf16": Case(),
    "e4m3": Case(cache=FP8),
    "nvfp4": Case(cache=NVFP4),
    "interleaved": Case(cache=NVFP4, v_scale_layout="interleaved"),
}


def call(name: str, change: Callable[[dict[str, Any]], None]) -> None:
    data = Data(CASES[name])
    places = dict(append_key=data.key, append_value=data.value)
    places |= dict(batch_indices=data.batch_indices, positions=data.positions)
    arguments = places | dict(kv_indices=data.indices, kv_indptr=data.indptr) | data.options()
    change(arguments)
    hopwell.append_paged_kv_cache(**arguments)


BAD = {
    "key is a list": ("bf16", "append_key", lambda x: x.tolist(), TypeError, "append_key"),
    "key in float32": ("bf16", "append_key", lambda x: x.float(), ValueError, "append_key must be torch.bfloat16"),
    "key of another rank": ("bf16", "append_key", lambda x: x[0], ValueError, "append_key must have shape"),
    "value in fp16": ("bf16", "append_value", lambda x: x.half(), ValueError, "append_value must be torch.bfloat16"),
    "fewer values": ("bf16", "append_value", lambda x: x[1:], ValueError, "append_value must have shape"),
    "unaligned key": (
        "bf16",
        "append_key",
        lambda x: torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape),
        ValueError,
        "append_key starts at",
    ),
    "key on another device": (
        "bf16",
        "append_value",
        lambda x: x.to("meta"),
        ValueError,
        "append_value must be on cpu",
    ),
    "int16 positions": (
        "bf16",
        "positions",
        lambda x: x.short(),
        ValueError,
        r"positions must be torch\.int32 or torch\.uint32 or torch\.int64, got torch\.int16",
    ),
    "pages in float32": ("bf16", "kv_indices", lambda x: x.float(), ValueError, "kv_indices must be torch.int32"),
    "short positions": ("bf16", "positions", lambda x: x[1:], ValueError, "positions must have shape"),
    "strided requests": (
        "bf16",
        "batch_indices",
        lambda x: x.repeat_interleave(2)[::2],
        ValueError,
        "batch_indices must have stride 1",
    ),
    "fp16 cache": (
        "bf16",
        "paged_kv_cache",
        lambda x: tuple(p.half() for p in x),
        ValueError,
        "must have the dtype of append_key",
    ),
    "float32 cache": ("bf16", "paged_kv_cache", lambda x: x[0].float(), ValueError, "paged_kv_cache must be"),
    "one cache": ("bf16", "paged_kv_cache", lambda x: x[:1], ValueError, "must be a pair"),
    "caches that are one": ("bf16", "paged_kv_cache", lambda x: (x[0], x[0]), ValueError, "must not share memory"),
    "other heads": (
        "bf16",
        "paged_kv_cache",
        lambda x: tuple(p[:, :, :1] for p in x),
        ValueError,
        "heads and head_dim of the new tokens",
    ),
    "empty pages": (
        "bf16",
        "paged_kv_cache",
        lambda x: tuple(p[:, :0] for p in x),
        ValueError,
        "^paged_kv_cache must have a page size of at least 1, got 0$",
    ),
    "layout": ("bf16", "kv_layout", lambda x: "NDH", ValueError, "kv_layout must be one of"),
    "scale of bf16": ("bf16", "k_scale", lambda x: 2.0, ValueError, "k_scale must be 1.0 for a 16-bit cache"),
    "tensor scale of bf16": ("bf16", "v_scale", lambda x: torch.ones(1), ValueError, "v_scale must be 1.0"),
    "negative scale": ("e4m3", "v_scale", lambda x: -1.0, ValueError, "v_scale must be positive"),
    "scale that is 0 in float32": ("e4m3", "k_scale", lambda x: 1e-46, ValueError, "k_scale must be positive"),
    "scale in float64": (
        "e4m3",
        "k_scale",
        lambda x: torch.ones(1, dtype=torch.float64),
        TypeError,
        "k_scale as a tensor must be torch.float32",
    ),
    "scales of other heads": ("e4m3", "k_scale", lambda x: torch.ones(5), ValueError, r"the shape \(num_kv_heads,\)"),
    "strided scales": ("nvfp4", "v_scale", lambda x: torch.ones(2, 2)[:, 0], ValueError, "v_scale must be contiguous"),
    "scales of heads of bf16": ("bf16", "k_scale", lambda x: torch.ones(2), ValueError, "k_scale must be 1.0"),
    "scales of e4m3": ("e4m3", "kv_cache_sf", lambda x: torch.ones(1), ValueError, "kv_cache_sf must be None"),
    "no block scales": ("nvfp4", "kv_cache_sf", lambda x: None, ValueError, "kv_cache_sf must be provided"),
    "block scales of other pages": (
        "nvfp4",
        "kv_cache_sf",
        lambda x: tuple(p[1:] for p in x),
        ValueError,
        "kv_cache_sf",
    ),
    "order of scales": ("nvfp4", "v_scale_layout", lambda x: "swizzled", ValueError, "v_scale_layout must be one of"),
    "no pages": ("bf16", "kv_indices", lambda x: None, ValueError, r"kv_indices and kv_indptr, or as block_tables"),
    "two kinds of pages": (
        "bf16",
        "block_tables",
        lambda x: torch.zeros(4, 9, dtype=torch.int32),
        ValueError,
        "or as block_tables",
    ),
    "empty kv_indptr": ("bf16", "kv_indptr", lambda x: x[:0], ValueError, "kv_indptr must have batch"),
    "last pages of fewer requests": (
        "bf16",
        "kv_last_page_len",
        lambda x: torch.ones(2, dtype=torch.int32),
        ValueError,
        "kv_last_page_len must have shape",
    ),
    "separate ids in a row": ("bf16", "uses_shared_paged_kv_idx", lambda x: False, ValueError, "needs block_tables"),
    "enable_pdl": ("bf16", "enable_pdl", lambda x: 1, TypeError, "enable_pdl must be True, False or None"),
}


@pytest.mark.parametrize(("case", "name", "of", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(
    case: str, name: str, of: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = of(arguments.get(name))

    with pytest.raises(error, match=message):
        call(case, change)


SLOTS = torch.arange(21)
BAD_SLOTS = {
    "more slots than tokens": (
        torch.arange(22),
        ValueError,
        r"^slot_mapping must have at most 21 elements, the tokens of append_key, got 22$",
    ),
    "none": (None, TypeError, r"^slot_mapping must be a torch\.Tensor, got None$"),
    "float slots": (SLOTS.float(), ValueError, r"^slot_mapping must be torch\.int32 or"),
    "strided slots": (torch.arange(42)[::2], ValueError, r"^slot_mapping must have stride 1"),
    "2-D slots": (SLOTS[None], ValueError, r"^slot_mapping must have shape \[slots\], got \(1, 21\)$"),
    "slots elsewhere": (SLOTS.to("meta"), ValueError, r"^slot_mapping must be on cpu, the device of append_key"),
}


@pytest.mark.parametrize(("slots", "error", "message"), BAD_SLOTS.values(), ids=BAD_SLOTS)
def test_bad_slots_are_named(slots: Any, error: type[Exception], message: str) -> None:
    data = Data(Case())
    with pytest.raises(error, match=message):
        hopwell.append_paged_kv_cache_with_slot_mapping(data.key, data.value, slots, **data.options())


def test_positions_and_batch_indices_are_still_required() -> None:
    for name in ("batch_indices", "positions"):
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got None$"):
            call("bf16", lambda arguments, name=name: arguments.update({name: None}))


def test_int16_block_tables_are_refused() -> None:
    def change(arguments: dict[str, Any]) -> None:
        tables = torch.zeros(4, 9, dtype=torch.int16)
        arguments |= dict(kv_indices=None, kv_indptr=None, block_tables=tables)

    with pytest.raises(ValueError, match=r"block_tables must be torch\.int32"):
        call("bf16", change)


def test_interleaved_scales_need_whole_groups() -> None:
    for case in (Case(cache=NVFP4, page_size=2), Case(cache=NVFP4, dims=(64, 96))):
        data = Data(case)
        options = data.options() | dict(v_scale_layout="interleaved")
        places = (data.key, data.value, data.batch_indices, data.positions)
        with pytest.raises(
            ValueError, match=r"interleaved.* multiple of 4 and a head_dim of V that is a multiple of 64"
        ):
            hopwell.append_paged_kv_cache(*places, kv_indices=data.indices, kv_indptr=data.indptr, **options)


def test_new_tokens_that_lie_in_the_cache_are_refused() -> None:
    cache = torch.zeros(2, 8, 2, 64, dtype=FP16)
    ids = torch.zeros(8, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="K of paged_kv_cache must not share memory with append_key"):
        hopwell.append_paged_kv_cache(cache[0], cache[1], ids, ids, (cache, torch.zeros_like(cache)), ids[:1], starts)


def test_keys_and_values_that_share_parts_of_pages_are_refused() -> None:
    """Pages of one pool start whole pages apart, and no page reaches into the next one."""
    tokens, ids = torch.zeros(8, 2, 64, dtype=FP16), torch.zeros(8, dtype=torch.int32)
    pool = torch.zeros(5 * 8 * 2 * 64, dtype=FP16)
    page = 8 * 2 * 64
    shape, pages = (3, 8, 2, 64), dict(kv_indices=ids[:1], kv_indptr=torch.tensor([0, 1], dtype=torch.int32))

    def cache(offset: int, step: int = page) -> torch.Tensor:
        return pool.as_strided(shape, (step, 128, 64, 1), offset)

    for key, value in (
        (cache(0), cache(page // 2)),
        (cache(0), cache(0)),
        (cache(0), cache(page + 128)),
        (cache(0, page // 2), cache(page, page // 2)),
        (cache(0), cache(page, page + 128)),
    ):
        with pytest.raises(ValueError, match="V of paged_kv_cache must not share memory with K of paged_kv_cache"):
            hopwell.append_paged_kv_cache(tokens, tokens, ids, ids, (key, value), **pages)


def test_refused_where_there_is_no_kernel() -> None:
    with emulator.use("sm_89"), pytest.raises(NotImplementedError, match=r"append_paged_kv_cache on sm_89"):
        call("bf16", lambda arguments: None)
    data = Data(Case())
    with emulator.use("sm_89"), pytest.raises(NotImplementedError, match=r"cache_with_slot_mapping on sm_89"):
        hopwell.append_paged_kv_cache_with_slot_mapping(data.key, data.value, data.slots(), **data.options())


def test_kernels_are_the_devices_own_whatever_attention_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for sm_120a could not be loaded on another device."""
    monkeypatch.setenv("HOPWELL_KERNELS", "sm_120a")
    bound: list[Any] = []

    def bind(config: Any, device: torch.device) -> Any:
        bound.append(config.target)
        raise RuntimeError("found")

    monkeypatch.setattr("hopwell.kernels.append.plan.bind", bind)
    with emulator.use("sm_90a"), pytest.raises(RuntimeError, match="found"):
        call("bf16", lambda arguments: None)
    assert bound == ["sm_90a"]


@pytest.mark.compile
@pytest.mark.parametrize("arch", support.ARCHS)
def test_kernels_move_16_bytes_and_wait_for_the_grid_in_front(arch: str) -> None:
    for config in shipped_append_configs(arch):
        ptx = artifact(config).ptx.read_text()
        assert re.search(rf"^\.target {support.build_of(arch)}$", ptx, re.MULTILINE)
        before, after = ptx.split("griddepcontrol.wait")
        assert not re.search(r"\b(?:ld|st)\.(?:\w+\.)*global", before)
        assert not re.search(r"\.local\b", ptx)
        # For K and for V.
        assert len(re.findall(r"\bld\.global\.cg\.v4\b", after)) == 2 * config.kind.elements // 8
        width = 2 if config.kind.is_nvfp4 else 4
        assert len(re.findall(rf"\bst\.global\.v{width}\b", after)) == 2
        divisions = 0 if config.kind is CacheType.WIDE else 16 if config.kind is CacheType.E4M3 else 33
        assert len(re.findall(r"\bdiv\.rn\.f32\b", after)) == 2 * divisions


def test_places_are_refused_by_name() -> None:
    starts, lengths = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([4, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"append_indptr must be torch.int32"):
        hopwell.get_batch_indices_positions(starts.float(), lengths, 3)
    with pytest.raises(ValueError, match=r"kv_last_page_len must be on cpu, the device of kv_indptr, got meta"):
        hopwell.get_seq_lens(starts, lengths.to("meta"), 16)
    with pytest.raises(ValueError, match="seq_lens must have shape"):
        hopwell.get_batch_indices_positions(starts, lengths[:1], 3)
    with pytest.raises(ValueError, match="at least one request"):
        hopwell.get_batch_indices_positions(starts[:1], lengths[:0], 3)
    with pytest.raises(TypeError, match="nnz must be an int"):
        hopwell.get_batch_indices_positions(starts, lengths, starts[2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kv_last_page_len must have shape"):
        hopwell.get_seq_lens(starts, lengths[:1], 16)
    with pytest.raises(ValueError, match="page_size must be in"):
        hopwell.get_seq_lens(starts, lengths, 0)


def test_one_kernel_copies_both_16_bit_types() -> None:
    names = [config.name for config in shipped_append_configs()]
    assert len(set(names)) == len(names) == 1 + 2 * 3


@pytest.mark.parametrize("case", ["bf16", "interleaved"])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_repeated_call_is_launched_with_its_own_addresses(
    monkeypatch: pytest.MonkeyPatch, case: str, stacked: bool
) -> None:
    launched: list[tuple[int, ...]] = []
    constants = (object(), 0.5, 0.25, 1)

    def function(anchor: object, addresses: tuple[int, ...], *more: object) -> None:
        assert more == constants
        launched.append(addresses)

    made = dict(has_work=True, repeatable=True, operands=append_operands)
    made |= dict(function=function, anchor=object(), constants=constants)
    monkeypatch.setattr(AppendPlan, "__init__", lambda self, problem: vars(self).update(made))
    monkeypatch.setattr(AppendPlan, "launch", lambda self, views, name: None)
    monkeypatch.setattr(page, "_APPEND", AppendCalls())
    monkeypatch.setattr(page, "_APPEND_SLOTS", AppendCalls(by_slot=True))

    def call(data: Data, **changes: Any) -> None:
        places = (data.key, data.value, data.batch_indices, data.positions)
        pages = dict(kv_indices=data.indices, kv_indptr=data.indptr)
        hopwell.append_paged_kv_cache(*places, **pages | data.options() | changes)

    first, second = (Data(replace(CASES[case], stacked=stacked)) for _ in range(2))
    call(first)
    assert launched == []
    call(second)
    parts = [view.data_ptr() for view in second.views()]
    inputs = [second.key.data_ptr(), second.value.data_ptr()]
    assert launched.pop()[:6] == (*inputs, *parts, *[0] * (4 - len(parts)))
    if not stacked:
        with pytest.raises(ValueError, match="must not share memory"):
            call(second, paged_kv_cache=(second.cache[0], second.cache[0]))
    wide = second.indices.long()
    for _ in range(2):
        call(second, kv_indices=wide)
    assert launched.pop()[8:10] == (wide.data_ptr() + 1,) * 2  # odd as an address of int64
    with pytest.raises(ValueError, match="kv_layout"):
        call(second, kv_layout="ndh")
    slots = second.slots()
    for _ in range(2):
        hopwell.append_paged_kv_cache_with_slot_mapping(second.key, second.value, slots, **second.options())
    assert launched.pop()[6:11] == (0, slots.data_ptr() + 1, 0, 0, 0)
    assert launched == []
