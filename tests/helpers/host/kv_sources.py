"""KV sources of all shipped kernels, and support to run their device code on the host, one lane at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32

from hopwell.kernels.config.base import KernelConfig, KvType
from hopwell.kernels.config.decode import DecodeConfig, shipped_decode_configs
from hopwell.kernels.launch.arguments import Addresses, Geometry, page_divisor
from hopwell.kernels.parts.core import copy, pipeline
from hopwell.kernels.parts.load import kv_rows, kv_source
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import ContiguousBoxes, KvOperand, KvSource, PageBoxes, PageColumnBoxes
from hopwell.kernels.registry import shipped_configs
from hopwell.kernels.sm90.decode.kernel import DecodeSm90
from hopwell.kernels.sm90.prefill.kernel import PrefillSm90

KV_HEAD, HEADS, REQUEST = 1, 3, 2
SHARED = 1 << 14  # address of stage 0
K_START, V_START = 1000, 2000  # of the request, in contiguous K and V
ADDRESSES = Addresses(*range(1 << 40, (1 << 40) + len(Addresses._fields)))
STRIDES = dict(k_page=3 << 20, k_head=1 << 20, k_row=1 << 10, v_page=3 << 21, v_head=1 << 21, v_row=1 << 11)


def geometry(page_size: int) -> Geometry:
    tables = dict(key_table_row=50, value_table_row=60)
    sizes = dict(page_divisor=page_divisor(page_size), k_rows=page_size, v_rows=page_size)
    return Geometry(*[0] * len(Geometry._fields))._replace(**STRIDES, **tables, **sizes)


class Case(NamedTuple):
    """A KV source of a shipped kernel with one of its operands. Cases with the same numbers have the same code."""

    kind: type[KvSource]
    tile_n: int
    box_rows: int
    head_dim: int
    columns: int
    depth: int
    read_once: bool
    config: KernelConfig
    is_value: bool

    def operand(self, page_size: int = 16) -> KvOperand:
        make = KvOperand.value if self.is_value else KvOperand.key
        return make(ADDRESSES, geometry(page_size), self.config)

    def source(self, first_key: int = 0, end_key: int = 1, page_size: int = 16, *, device: bool = False) -> Any:
        """Return the source for a request whose keys of interest are [first_key, end_key).

        ``device`` selects device integers.
        """
        integer: Callable[[int], Any] = Int32 if device else int
        request = SimpleNamespace(index=REQUEST, kv_len=integer(end_key), k_start=K_START, v_start=V_START)
        keys = SimpleNamespace(first_key=integer(first_key))
        tile = SimpleNamespace(kv_head=integer(KV_HEAD), keys=keys, request=request, kv_policy=lambda: "policy")
        return self.kind.create(self.operand(page_size), tile, "descriptor", SHARED, self.tile_n, self.box_rows)

    def __str__(self) -> str:
        boxes = str(self.box_rows) if self.box_rows else ""
        return (
            f"{self.kind.__name__}{boxes}-{self.tile_n}x{self.head_dim}-{'v' if self.is_value else 'k'}{self.depth}"
            + "-once" * self.read_once
        )


def all_cases() -> list[Case]:
    found: dict[tuple[Any, ...], Case] = {}
    decode = (config for config in shipped_decode_configs() if config.kv_type is KvType.WIDE)
    # Packed heads share the same keys, and short steps are only another size, so two head dims stand for all.
    prefill = (
        config
        for config in shipped_configs()
        if not config.packs_heads and (not config.short_steps or config.head_dim_qk in (64, 128))
    )
    for config, is_value in itertools.product(itertools.chain(prefill, decode), (False, True)):
        kernel = DecodeSm90 if isinstance(config, DecodeConfig) else PrefillSm90
        operand = (KvOperand.value if is_value else KvOperand.key)(ADDRESSES, geometry(16), config)
        key = (
            kernel(config).source,
            config.tile.n,
            config.box_rows,
            operand.head_dim,
            operand.columns,
            operand.depth,
            operand.read_once,
        )
        found.setdefault(key, Case(*key, config, is_value))
    return list(found.values())


CASES = all_cases()


def cases(*kinds: type[KvSource]) -> Any:
    return pytest.mark.parametrize("case", [case for case in CASES if case.kind in kinds], ids=str)


def host(value: Any) -> int:
    return int(getattr(value, "value", value))


class Table:
    """Page ids of a request; only entries with tokens of interest may be read."""

    def __init__(self, pages: int, valid: range):
        self.ids = [(7 * page + 3) % 64 for page in range(pages)]
        self.valid = valid

    def __getitem__(self, index: Any) -> Any:
        assert host(index) in self.valid, f"entry {host(index)} is read, valid are {self.valid}"
        return type(index)(self.ids[host(index)])


class Warp:
    """Records a warp's actions on shared memory, in order. One lane at a time runs the whole code."""

    def __init__(self) -> None:
        self.lane: Any = 0
        self.events: list[tuple[Any, ...]] = []

    def note(self, name: str) -> Callable[..., None]:
        return lambda *values, arrive_count=1, **options: self.events.extend([(name, *values)] * arrive_count)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]

    @property
    def order(self) -> list[str]:
        """Names of the events, without repeats."""
        return [name for name, _ in itertools.groupby(event[0] for event in self.events)]


class Ring:
    """Stages and barriers by step; ``waits`` are the steps that waited for an empty stage."""

    def __init__(self, producer_lanes: int = 1) -> None:
        self.waits: list[int] = []
        self.producer_lanes = producer_lanes

    @staticmethod
    def stage(step: int) -> int:
        return step % 2

    @staticmethod
    def full_barrier(step: int) -> str:
        return f"full {step % 2}"

    def wait_empty(self, step: int) -> None:
        self.waits.append(step)

    fill_rest = pipeline.Ring.fill_rest.__wrapped__  # type: ignore[attr-defined]


def host_warp(monkeypatch: pytest.MonkeyPatch) -> Warp:
    """Run device code on the host, with Python's loops, integers and branches instead of traced ones."""
    warp = Warp()
    monkeypatch.setattr(cute.arch, "lane_idx", lambda: warp.lane)
    monkeypatch.setattr(cute.arch, "shuffle_sync", lambda of_lanes, lane: of_lanes[lane])
    monkeypatch.setattr(cute.arch, "elect_one", contextlib.nullcontext)
    for name, event in (
        ("fence_proxy", "fence"),
        ("sync_warp", "sync"),
        ("cp_async_mbarrier_arrive_noinc", "arrive when copied"),
        ("mbarrier_arrive", "arrive"),
        ("mbarrier_arrive_and_expect_tx", "expect"),
        ("mbarrier_wait", "wait"),
    ):
        monkeypatch.setattr(cute.arch, name, warp.note(event))
    for name, event in (("tma_load", "box"), ("async_copy_or_zero", "copy"), ("store_shared_zero", "zero")):
        monkeypatch.setattr(copy, name, warp.note(event))
    for name in ("range", "range_constexpr"):
        monkeypatch.setattr(cutlass, name, lambda *bounds, **unrolled: range(*bounds))
    for kind in (KvSource, ContiguousBoxes, PageBoxes, PageColumnBoxes, PageRows):
        loops = ("load", "fill_down", "fill", "fetch", "zero_rows", "zero_hidden")
        for name in (*loops, "_entry", "_address", "copy_rows", "_copy_row"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, vars(kind)[name].__wrapped__)
    return warp


def put_table(monkeypatch: pytest.MonkeyPatch, page_size: int, first: int, end: int) -> Table:
    table = Table(-(-end // page_size) + 2, range(first // page_size, (end - 1) // page_size + 1))
    for module in (kv_source, kv_rows):
        monkeypatch.setattr(module, "load_index", lambda address, index: table[index])
    return table


def one_for_each(kind: type[KvSource]) -> list[Case]:
    """Return one case for each placement of tokens; the number of columns does not affect the placement."""
    return list({(case.tile_n, case.box_rows): case for case in CASES if issubclass(case.kind, kind)}.values())
