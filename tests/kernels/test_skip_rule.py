"""The rule of skip-softmax against its definition. Device arithmetic runs on the host in float64."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import cutlass.cute as cute
import pytest
from cutlass import Float32, Int32
from helpers.host import arithmetic
from helpers.host.arithmetic import INF, Registers, number

from hopwell.kernels.parts.rows import skip as skip_module
from hopwell.kernels.parts.rows.mask import LogitRow
from hopwell.kernels.parts.rows.skip import SkipRule

pytestmark = pytest.mark.traced
ROWS = 2


@pytest.fixture(autouse=True)
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    arithmetic.use(monkeypatch, SkipRule)


class TestSkipRule:
    @staticmethod
    def unneeded(
        largest: list[float],
        maxima: list[float],
        *,
        factor: float,
        kv_len: int,
        scale: float = 0.5,
        positions: tuple[int, ...] = (0, 0),
    ) -> bool:
        softmax: Any = SimpleNamespace(largest=largest, scale=Float32(scale))
        rule, row = SkipRule.create(factor), LogitRow(positions, Int32(kv_len), Float32(0.0))
        return bool(number(rule.unneeded(softmax, maxima, row)))

    @pytest.mark.parametrize("kv_len", [1, 100, 100_000])
    @pytest.mark.parametrize("factor", [1e-3, 1.0, 500.0])
    def test_against_the_definition(self, factor: float, kv_len: int) -> None:
        """A tile is left out if, in each row, its largest weight is below factor / kv_len of the largest so far."""
        draw, seen = random.Random(kv_len), set()
        at_limit = math.log2(factor / kv_len) / 0.5
        for _ in range(100):
            largest = [draw.gauss(0, 15) for _ in range(ROWS)]
            maxima = [most + at_limit + draw.gauss(0, 3) for most in largest]
            weights = [2 ** (0.5 * (m - most)) for m, most in zip(maxima, largest, strict=True)]
            want = all(weight < factor / kv_len for weight in weights)
            assert self.unneeded(largest, maxima, factor=factor, kv_len=kv_len) == want
            seen.add(want)
        assert seen == {True, False}

    def test_the_threshold_itself_is_needed(self) -> None:
        assert not self.unneeded([0.0, 0.0], [-8.0, -9.0], factor=1.0, kv_len=16)
        assert self.unneeded([0.0, 0.0], [-8.01, -9.0], factor=1.0, kv_len=16)

    def test_rows_without_keys(self) -> None:
        """A row without visible keys in a tile does not need it; a row with its first visible keys there does."""
        limit = dict(factor=1.0, kv_len=16)
        assert self.unneeded([0.0, 0.0], [-INF, -INF], **limit)
        assert self.unneeded([-INF, 0.0], [-INF, -100.0], **limit)
        assert self.unneeded([0.0, -INF], [-100.0, -INF], **limit)
        assert not self.unneeded([-INF, 0.0], [-50.0, -100.0], **limit)
        assert not self.unneeded([0.0, -INF], [-100.0, -50.0], **limit)
        assert self.unneeded([-INF, -INF], [-INF, -INF], **limit)

    def test_rows_past_the_end_of_the_request_do_not_vote(self) -> None:
        limit = dict(factor=1.0, kv_len=16)
        assert not self.unneeded([0.0, 0.0], [-100.0, 5.0], **limit, positions=(14, 15))
        assert self.unneeded([0.0, 0.0], [-100.0, 5.0], **limit, positions=(15, 16))

    def test_notes(self) -> None:
        rule = SkipRule.create(1.0)
        assert rule.skipped[0] == 0
        for counts in (True, False, False, True, False):
            rule.note(counts)
            assert rule.pending[0] == counts
        assert rule.skipped[0] == 3
        assert isinstance(rule.skipped, Registers)

    @pytest.mark.parametrize(("address", "reports", "adds"), [(4096, True, 1), (4096, False, 0), (0, True, 0)])
    @pytest.mark.parametrize("row_blocks", [1, 2])
    def test_rows_are_reported_once(
        self, row_blocks: int, address: int, reports: bool, adds: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread reports left-out tiles, by row blocks of 64 rows, if there is a counter."""
        added: list[tuple[Any, Any]] = []
        monkeypatch.setattr(cute.arch, "atomic_add", lambda pointer, value: added.append((pointer, value)))
        monkeypatch.setattr(skip_module, "global_pointer", lambda dtype, address: (dtype, address))
        rule = SkipRule.create(1.0)
        for _ in range(7):
            rule.note(False, row_blocks)
        rule.report(address, reports)
        assert added == [((Int32, address), 7 * row_blocks)] * adds
