"""Fair timing on a GPU whose clocks follow its power and temperature.

Each candidate becomes a CUDA graph with enough launches to last some milliseconds. Each round replays all graphs one
after the other, in a new random order. Every candidate therefore meets the same states of the card; a candidate after a
power-hungry one gets lower clocks. The result is the median over rounds. Launches are back to back: they keep the card
under a sustained load, and hide the cost of a launch on an idle card.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

GRAPH_MS = 12.0
ROUNDS = 21
# A graph that replays in less than this share of the time of its calls does not hold their launches. A peer that
# launches on a stream of its own leaves nothing in the graph (FlashInfer's FMHAv2 at head dims 64 and 256, H100,
# 2026-11-25).
LEAST_REPLAY = 1e-3
FIRST_CALLS = 3
# This script runs in a process of its own. Everything except the call has happened before, as in a server with loaded
# weights.
FIRST_CALL = """
import importlib, sys, time
import torch
module, function, name = sys.argv[1:]
call = getattr(importlib.import_module(module), function)()[name]
torch.cuda.synchronize()
begin = time.perf_counter()
call()
torch.cuda.synchronize()
print((time.perf_counter() - begin) * 1e3)
"""


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, graph_ms: float = GRAPH_MS
) -> dict[str, float]:
    """Measure the milliseconds of each call; a call that cannot be captured in a graph has no result."""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = Captured.of(call, graph_ms)
        except Exception:  # a peer may fail in any way; an error that ends the whole process raises in the next line
            torch.cuda.synchronize()
    for captured in graphs.values():
        captured.graph.replay()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    shuffle = random.Random(0)
    for _ in range(rounds):
        events = {}
        for name in shuffle.sample(list(graphs), len(graphs)):
            events[name] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[name][0].record()
            graphs[name].graph.replay()
            events[name][1].record()
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            times[name].append(begin.elapsed_time(end) / graphs[name].calls)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {name: median for name, median in medians.items() if graphs[name].holds_launches(median)}


@dataclass
class Captured:
    """A graph of several calls."""

    graph: torch.cuda.CUDAGraph
    calls: int
    milliseconds: float  # time of a call alone, before the capture

    @staticmethod
    def of(call: Callable[[], object], graph_ms: float) -> Captured:
        """Capture a graph with calls for about ``graph_ms`` milliseconds."""
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            call()
        end.record()
        torch.cuda.synchronize()
        milliseconds = begin.elapsed_time(end) / 3
        graph = torch.cuda.CUDAGraph()
        calls = max(1, round(graph_ms / milliseconds))
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        return Captured(graph, calls, milliseconds)

    def holds_launches(self, replayed: float) -> bool:
        """Whether the graph holds the calls' launches, given ``replayed``, the milliseconds of each
        call in a replay.
        """
        return replayed > LEAST_REPLAY * self.milliseconds


def host_microseconds(
    calls: Mapping[str, Callable[[], object]], at_once: int = 50, rounds: int = 101
) -> dict[str, float]:
    """Measure the host time of each warm call without its kernel; ``at_once`` launches queue up without waiting.

    The calls take turns, so other load on the host affects all alike. In sequence, the three entries of prefill took
    12, 12 and 9 us in one process, and 8, 12 and 13 us in another (H200's host, 2026-11-22 and 23).
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(at_once):
                call()
            times[name].append((time.perf_counter() - begin) / at_once * 1e6)
    torch.cuda.synchronize()
    return {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round is not warm


def first_call_milliseconds(calls: Callable[[], Mapping[str, Callable[[], object]]], name: str) -> float:
    """Measure the time from a process's first call to its result, with the kernel compiled and on disk.

    The result is the median of several processes. ``calls`` is a function of a module and makes the call with this
    name.
    """
    command = [sys.executable, "-c", FIRST_CALL, calls.__module__, calls.__name__, name]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(FIRST_CALLS)]
    return statistics.median(float(each.stdout.split()[-1]) for each in outputs)
