"""Launches that may run at the same time: on branches of a graph, and on streams of several threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hopwell.kernels import Plan
from hopwell.kernels.problem import AttentionProblem


def check_two_branches(plan: Plan, problems: Sequence[AttentionProblem], want: torch.Tensor, fill: float) -> None:
    """Check that a graph with two branches gives each problem the result ``want``.

    The graph launches the plan for all problems, on alternating branches. Outputs are full of ``fill`` before each of
    some replays.
    """
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        for index, one in enumerate(problems):
            with torch.cuda.stream(other if index % 2 else torch.cuda.current_stream()):
                plan.execute(one)
        torch.cuda.current_stream().wait_stream(other)
    for _ in range(5):
        for one in problems:
            one.out.fill_(fill)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(want, one.out) for one in problems)


def check_threads(work: Sequence[tuple[AttentionProblem, torch.Tensor]], fill: float) -> None:
    """Check that results stay equal while threads launch repeatedly, each on a stream of its own.

    There is one thread for each (problem, result).
    """

    def hammer(problem: AttentionProblem, want: torch.Tensor) -> None:
        plan = Plan(problem)
        for _ in range(50):
            problem.out.fill_(fill)
            plan.execute(problem)
            assert torch.equal(problem.out, want), "results differ"

    check_jobs([functools.partial(hammer, *item) for item in work])


def check_jobs(jobs: Sequence[Callable[[], None]]) -> None:
    """Check that jobs succeed in one thread each: the first on the default stream, the others on their own streams."""
    torch.cuda.synchronize()
    failures: list[Exception] = []

    def run(job: Callable[[], None], stream: Any) -> None:
        try:
            with torch.cuda.stream(stream):
                job()
        except Exception as error:
            failures.append(error)

    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in jobs[1:])]
    threads = [threading.Thread(target=run, args=item) for item in zip(jobs, streams, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
