"""A warp on the host: 32 threads run device code and meet at exchanges between lanes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32, Int64

from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core import device


def host(value: Any) -> int:
    return int(getattr(value, "value", value))


def device_tuple(kind: Any, **values: Any) -> Any:
    """Return addresses or a geometry of ``kind`` with these values, and zeros in all other fields."""
    return kind(**{name: Int64(values.get(name, 0)) for name in kind._fields})


class Lanes:
    """The lanes of a warp as threads."""

    def __init__(self) -> None:
        self.own = threading.local()  # a lane's own values
        self._values: list[Any] = [None] * LANES
        self._meet = threading.Barrier(LANES, timeout=60)

    def meet(self) -> None:
        self._meet.wait()

    def exchange(self, value: Any) -> list[Any]:
        """Return the value of every lane."""
        self._values[self.own.lane] = value
        self.meet()
        values = list(self._values)
        self.meet()
        return values

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` in every lane."""
        errors: list[BaseException] = []

        def of_lane(lane: int) -> None:
            self.own.lane = lane
            try:
                work()
            except BaseException as error:
                errors.append(error)
                self._meet.abort()

        threads = [threading.Thread(target=of_lane, args=(lane,)) for lane in range(LANES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A failing lane ends the others too; its own error gives the reason.
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error


class SchedulingWarp(Lanes):
    """A scheduling warp that draws ``tickets`` and records its actions in order.

    The actions are ("posted", tile), ("end",), ("ticket",), and ("room", step) for a wait for room, which is always
    available. An end that tells the number of all partials is ("end", partials).
    """

    def __init__(self, tickets: Iterable[int]) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self._drawn = iter(tickets)

    @property
    def posted(self) -> list[Any]:
        return [event[1] for event in self.events if event[0] == "posted"]

    @property
    def ring(self) -> SchedulingWarp:
        return self

    def note(self, *event: Any) -> None:
        """Record an action once for all lanes."""
        if self.own.lane == 0:
            self.events.append(event)

    def use(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Let device code, and the helpers that ``module`` imports, use this warp."""

        def below(value: Any, offset: int, mask_and_clamp: int) -> Any:
            values, lane = self.exchange(value), self.own.lane
            return values[lane - offset] if lane >= offset else value

        for name, function in (
            ("lane_idx", lambda: Int32(self.own.lane)),
            ("shuffle_sync", lambda value, lane: self.exchange(value)[host(lane)]),
            ("shuffle_sync_up", below),
            ("vote_ballot_sync", lambda held: sum(bool(v) << i for i, v in enumerate(self.exchange(bool(held))))),
            ("popc", lambda bits: Int32(bits.bit_count())),
        ):
            monkeypatch.setattr(cute.arch, name, function)
        monkeypatch.setattr(cutlass, "range_constexpr", range)
        monkeypatch.setattr(module, "running_sum", device.running_sum.__wrapped__)
        monkeypatch.setattr(module, "draw_ticket", lambda addresses: self.draw())
        monkeypatch.setattr(module, "from_lane", lambda value, lane: self.exchange(value)[host(lane)])

    def draw(self) -> Int32:
        """Return the next ticket, for lane 0."""
        self.note("ticket")
        return Int32(next(self._drawn) if self.own.lane == 0 else 0)

    def wait_empty(self, step: int) -> None:
        self.note("room", host(step))

    def post(self, step: int, tile: Any) -> None:
        assert self.own.lane > 0 or host(step) == len(self.posted)
        self.note(*(("posted", tile) if tile.exists else ("end", host(tile.all_partials))))

    def post_end(self, step: int) -> None:
        assert self.own.lane > 0 or host(step) == len(self.posted)
        self.note("end")
