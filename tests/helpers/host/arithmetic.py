"""The DSL's arithmetic on the host: traced code computes with Python's floats, in float64, one lane at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest

INF = math.inf


def number(value: Any) -> float:
    return float(getattr(value, "value", value))


def fmax(a: Any, b: Any, nan: bool = False, abs: bool = False) -> float:
    """Return the larger operand (PTX ISA, max.f32 and max.NaN.f32).

    For a NaN and a number, the result is the number, or the NaN if ``nan`` is set. ``abs`` compares absolute values.
    """
    first, second = (math.fabs(number(x)) if abs else number(x) for x in (a, b))
    if math.isnan(first) or math.isnan(second):
        return second if math.isnan(first) != nan else first
    return max(first, second)


def fmin(a: Any, b: Any) -> float:
    """Return the smaller operand; for a NaN and a number, the number."""
    return -fmax(-number(a), -number(b))


def exp2(value: Any, fastmath: bool = False) -> float:
    return INF if number(value) >= 1024 else 2.0 ** number(value)


def log2(value: Any, fastmath: bool = False) -> float:
    return -INF if number(value) <= 0 else math.log2(number(value))


def reciprocal(value: Any) -> float:
    return 1.0 / number(value) if number(value) else INF


def add_packed(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[float, float]:
    """Add in float32, because some sums rely on its rounding to make integers."""
    return fma_packed(a, (1.0, 1.0), b)


def fma_packed(a: tuple[Any, Any], b: tuple[Any, Any], c: tuple[Any, Any]) -> tuple[float, float]:
    low, high = (float(np.float32(number(x) * number(y) + number(z))) for x, y, z in zip(a, b, c, strict=True))
    return low, high


def use(monkeypatch: pytest.MonkeyPatch, *kinds: type | ModuleType) -> None:
    """Run the code of ``kinds``, classes or modules, on the host.

    A row belongs to one lane, so reductions over its lanes are already complete.
    """
    for name, function in (("exp2", exp2), ("log2", log2)):
        monkeypatch.setattr(cute.math, name, function)
    for name in ("warp_reduction_max", "warp_reduction_sum"):
        monkeypatch.setattr(cute.arch, name, lambda value, threads_in_group: value)
    monkeypatch.setattr(cute.arch, "fmax", fmax)
    monkeypatch.setattr(cute.arch, "fmin", fmin)
    monkeypatch.setattr(cute.arch, "add_packed_f32x2", add_packed)
    monkeypatch.setattr(cute.arch, "fma_packed_f32x2", fma_packed)
    monkeypatch.setattr(cute.arch, "rcp_approx", reciprocal)
    monkeypatch.setattr(cute, "make_rmem_tensor", lambda size, dtype: Registers(size))
    monkeypatch.setattr(cutlass, "range_constexpr", range)
    monkeypatch.setattr(cutlass, "select_", lambda condition, yes, no: yes if condition else no)
    for kind in kinds:
        for name, member in list(vars(kind).items()):
            if hasattr(member, "__wrapped__") and not isinstance(member, classmethod):
                monkeypatch.setattr(kind, name, member.__wrapped__)


class Registers(list[Any]):
    """A tensor in registers."""

    def __init__(self, size: int):
        super().__init__([math.nan] * size)

    def fill(self, value: float) -> None:
        self[:] = [value] * len(self)


class Fragment:
    """Rows of a tile with all columns in this lane; replaces a RowFragment."""

    lanes_per_row = 1

    def __init__(self, rows: Iterable[Iterable[float]], first_column: int = 0):
        self.values = [list(row) for row in rows]
        self.rows, self.columns = len(self.values), len(self.values[0])
        self._first_column = first_column

    def get(self, r: int, c: int) -> Any:
        return self.values[r][c]

    def set(self, r: int, c: int, value: Any) -> None:
        self.values[r][c] = number(value)

    @staticmethod
    def row_offset(r: int) -> int:
        return 8 * r

    @staticmethod
    def column_offset(c: int) -> int:
        return c

    def first_column(self) -> int:
        return self._first_column
