"""8-bit K and V before the tensor cores: dequantization, transposition by a warp, and the match of keys and columns."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from helpers.host.warps import Lanes

from hopwell.kernels.config.base import MMA_DEPTH, rounded_up
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.sm90.common import dequant as conversion
from hopwell.kernels.sm90.common.dequant import E4m3Converter, TransposingConverter
from hopwell.kernels.sm90.prefill.fp8 import (
    N_SLICE_COLUMNS,
    PRODUCT_REGISTERS,
    Fp8Rows,
    NSliceOperands,
    n_slice_columns,
)
from hopwell.kernels.support import PREFILL_HEAD_DIMS

pytestmark = pytest.mark.traced

KEYS, TARGET = 64, 1 << 20  # of a tile, and the start of its converted stage
RING_METHODS = ("wait_full", "wait_empty", "release")


class Bytes(Lanes):
    """A warp over shared memory with bytes (key, column) of V, and its matrix instructions (PTX ISA, ldmatrix and
    stmatrix).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.memory: dict[int, Any] = {}
        monkeypatch.setattr(cute.arch, "lane_idx", lambda: self.own.lane)
        monkeypatch.setattr(copy, "load_matrix_x4", self._load)
        monkeypatch.setattr(copy, "store_matrix_x4", self._store)
        monkeypatch.setattr(conversion, "prmt", lambda a, b, select: [(a + b)[select >> 4 * i & 15] for i in range(4)])

    def _load(self, address: int, transposes: bool) -> list[list[Any]]:
        """A lane gets the elements [2 (lane % 4) + i, lane // 4] of each matrix, of two bytes each."""
        assert transposes
        rows, lane = self.exchange(address), self.own.lane
        self._check(rows)
        return [
            [self.memory[rows[8 * m + 2 * (lane % 4) + i] + 2 * (lane // 4) + byte] for i in (0, 1) for byte in (0, 1)]
            for m in range(4)
        ]

    def _store(self, address: int, words: list[list[Any]]) -> None:
        rows, lane = self.exchange(address), self.own.lane
        self._check(rows)
        for m, word in enumerate(words):
            for i, byte in enumerate(word):
                place = rows[8 * m + lane // 4] + 4 * (lane % 4) + i
                assert place not in self.memory, "written twice"
                self.memory[place] = byte
        self.meet()

    @staticmethod
    def _check(rows: list[int]) -> None:
        """Eight rows are served at a time, and must be in different banks."""
        for first in range(0, 32, 8):
            assert len({row % 128 for row in rows[first : first + 8]}) == 8


@pytest.mark.parametrize(("in_place", "by_two"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("columns", [64, 128, 192, 256])
def test_dequantized_chunks(
    columns: int, columns_first: bool, in_place: bool, by_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each vector is read once and becomes two at their places in the layout. No two of 8 lanes meet in a bank."""
    loaded = -(-columns // 128) * 64  # in units of 16 bits
    source = {
        copy.tile_vector(0, row, vector, KEYS, loaded, columns_first): (row, vector)
        for row, vector in itertools.product(range(KEYS), range(columns // 16))
    }
    layout = SimpleNamespace(
        columns=(loaded, loaded),
        stage_columns=(columns, columns) if in_place else (loaded, loaded),
        operand_columns=(columns, columns),
    )
    config = SimpleNamespace(
        layout=layout,
        dequantizes_in_place=in_place,
        converting_warpgroups=1 + by_two,
        kv_type=None,
    )
    ring = SimpleNamespace(stage=lambda step: 0, **dict.fromkeys(RING_METHODS, lambda step: None))
    kernel = SimpleNamespace(
        config=config,
        layout=layout,
        dtype=None,
        tile=SimpleNamespace(n=KEYS),
        source=SimpleNamespace(columns_first=columns_first),
    )
    converter = E4m3Converter(kernel, 0, ring, TARGET, ring, 0)
    monkeypatch.setattr(E4m3Converter, "show", lambda self, step: None)
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    monkeypatch.setattr(cute.arch, "barrier", lambda **_: None)
    monkeypatch.setattr(conversion, "dequantized_words", lambda kind, dtype, word: [(*word, half) for half in range(2)])
    reads: list[list[int]] = []
    writes: list[dict[int, Any]] = []

    def load(address: int, count: int) -> list[Any]:
        reads[-1].append(address)
        return [(*source[address], word) for word in range(count)]

    monkeypatch.setattr(copy, "load_shared", load)
    monkeypatch.setattr(copy, "store_shared", lambda address, words: writes[-1].update({address: words}))
    for thread in range(WARPGROUP):
        monkeypatch.setattr(cute.arch, "thread_idx", lambda thread=thread: (thread, 0, 0))
        reads.append([])
        writes.append({})
        E4m3Converter.convert.__wrapped__(converter, 0, [])
    assert sorted(itertools.chain(*reads)) == sorted(source)
    for first in range(0, WARPGROUP, 8):
        for lanes in (reads[first : first + 8], map(list, writes[first : first + 8])):
            assert all(len({address % 128 for address in addresses}) == 8 for addresses in zip(*lanes, strict=True))
    found = {address: words for of_thread in writes for address, words in of_thread.items()}
    assert len(found) == sum(map(len, writes))
    target_first = in_place and columns_first
    assert found == {
        copy.tile_vector(TARGET, row, 2 * vector + half, KEYS, columns, target_first): [
            (row, vector, 2 * half + word, part) for word in range(2) for part in range(2)
        ]
        for row, vector in source.values()
        for half in range(2)
    }


@pytest.mark.parametrize("keys", [64, 192])
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize("columns", [32, 80, 192])
def test_transposed_keys_and_columns(
    columns: int, columns_first: bool, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte of the target follows the order: keys 2t, 2t + 1, 8 + 2t, 8 + 2t + 1 together, even columns first.

    Reads and writes have no bank conflict.
    """
    warp = Bytes(monkeypatch)
    loaded = -(-columns // 128) * 64  # in units of 16 bits
    width = -(-keys // 128) * 128
    layout = SimpleNamespace(
        columns=(loaded, loaded),
        transposed_rows=columns,
        transposed_columns=width,
        converted_bytes=dict(v=columns * width),
    )
    kernel = SimpleNamespace(
        config=SimpleNamespace(layout=layout),
        layout=layout,
        tile=SimpleNamespace(n=keys),
        source=SimpleNamespace(columns_first=columns_first),
    )
    for key, column in itertools.product(range(keys), range(columns)):
        vector = copy.tile_vector(0, key, column // 16, keys, loaded, columns_first)
        warp.memory[vector + column % 16] = (key, column)
    assert len(warp.memory) == keys * columns
    converter = TransposingConverter(kernel, 0, None, TARGET, None)

    def work() -> None:
        for vector in range(columns // 16):
            converter._transpose(0, TARGET, vector)

    warp.run(work)
    found = {place: value for place, value in warp.memory.items() if place >= TARGET}
    want = {}
    for row, place in itertools.product(range(columns), range(keys)):
        lane, byte = divmod(place % 16, 4)
        key = place // 16 * 16 + 2 * lane + (0, 1, 8, 9)[byte]
        column = row // 16 * 16 + row % 8 * 2 + row % 16 // 8
        want[copy.tile_vector(TARGET, row, place // 16, columns, width // 2, False) + place % 16] = (key, column)
    assert found == want


def test_keys_of_p_are_those_of_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane's operand P (PTX ISA, "wgmma register fragment A", 8 bits) has the keys in the order of transposed V."""
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    monkeypatch.setattr(cute, "size", len)
    monkeypatch.setattr(cute, "recast_tensor", lambda words, dtype: words)
    monkeypatch.setattr(copy, "pack_e4m3_x4", tuple)
    for lane in range(4):
        # Accumulators: two neighbouring keys of each eight, of two rows.
        scores = [(r, 8 * block + 2 * lane + i) for block in range(KEYS // 8) for r in range(2) for i in range(2)]
        words: list[Any] = [None] * (KEYS // 8)
        Fp8Rows.round_scores.__wrapped__(SimpleNamespace(p=words, s=scores))
        for i, word in enumerate(words):
            # Words are rows 0 and 8 of bytes from 4 lane on, of a sixteen, then of the next sixteen.
            row, first = i % 2, i // 2 * 16
            assert word == tuple((row, first + 2 * lane + k) for k in (0, 1, 8, 9))


def test_n_slices_are_added_to_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each register of O is rescaled to its row's reference once, and gets the product of its own columns."""
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    monkeypatch.setattr(cute, "size", len)
    monkeypatch.setattr("hopwell.kernels.sm90.prefill.fp8.fma", lambda a, b, c: a * b + c)
    size, n_slices, factors = 8, 3, [10.0, 1000.0]
    operands = SimpleNamespace(o=[1.0 + i for i in range(size * n_slices)], product=None)
    for n_slice in range(n_slices):
        operands.product = [0.25 * (n_slice * size + i) for i in range(size)]
        NSliceOperands.add_n_slice.__wrapped__(operands, n_slice, factors)
    rows = [i // 2 % 2 for i in range(size * n_slices)]
    assert operands.o == [(1.0 + i) * factors[row] + 0.25 * i for i, row in enumerate(rows)]


@pytest.mark.parametrize("dims", PREFILL_HEAD_DIMS, ids=str)
def test_parts_of_v_begin_at_swizzle_atoms(dims: tuple[int, int]) -> None:
    """The products together have all columns."""
    tile = PrefillConfig.tile_of(dims, skip_softmax=True, uses_fp8_mma=True)
    n, depth = tile.n, rounded_up(dims[1], MMA_DEPTH) // (2 if tile.splits_v else 1)  # of a warpgroup
    width = n_slice_columns(depth, n)
    assert depth % width == 0
    assert width % copy.ATOM_ROWS == 0
    assert width <= N_SLICE_COLUMNS
    assert n // 2 + n // 8 + depth // 2 + width // 2 <= PRODUCT_REGISTERS
