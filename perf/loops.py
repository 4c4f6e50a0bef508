"""Loops in a kernel's code (PTX or SASS): instructions are numbers, and an edge leads to each successor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    header: int
    latch: int  # the last instruction that jumps back to the header
    body: frozenset[int]

    @property
    def path(self) -> list[int]:
        """Body in code order, up to the latch.

        Code after the latch retries waits; a step on time does not reach it.
        """
        return sorted(i for i in self.body if i <= self.latch)

    def without(self, inner: Loop) -> list[int]:
        """Return the path around an inner loop."""
        return [i for i in self.path if i not in inner.body]


def natural_loops(successors: Sequence[Sequence[int]]) -> list[Loop]:
    """Return the loop of each back edge's target, inner loops before outer ones. Instruction 0 is the entry."""
    latches: dict[int, list[int]] = {}
    for source, target in _back_edges(successors):
        latches.setdefault(target, []).append(source)
    predecessors: list[list[int]] = [[] for _ in successors]
    for source, targets in enumerate(successors):
        for target in targets:
            predecessors[target].append(source)
    loops = []
    for header, sources in latches.items():
        body, open_ends = {header}, list(sources)
        while open_ends:
            node = open_ends.pop()
            if node not in body:
                body.add(node)
                open_ends += predecessors[node]
        loops.append(Loop(header, max(sources), frozenset(body)))
    return sorted(loops, key=lambda loop: len(loop.body))


def _back_edges(successors: Sequence[Sequence[int]]) -> Iterable[tuple[int, int]]:
    """Yield the edges to instructions that are still on the stack of the depth-first search."""
    entered, left = {0}, set()
    stack = [(0, iter(successors[0]))]
    while stack:
        node, targets = stack[-1]
        target = next(targets, None)
        if target is None:
            left.add(node)
            stack.pop()
        elif target not in entered:
            entered.add(target)
            stack.append((target, iter(successors[target])))
        elif target not in left:
            yield node, target


def innermost(loops: Sequence[Loop], is_wanted: Callable[[Loop], bool]) -> list[Loop]:
    """Return the wanted loops without another wanted loop inside."""
    wanted = [loop for loop in loops if is_wanted(loop)]
    return [loop for loop in wanted if not any(other.body < loop.body for other in wanted)]


def around(loops: Sequence[Loop], inner: Loop) -> Loop | None:
    """Return the next loop around ``inner``, from the result of :func:`natural_loops`."""
    return next((loop for loop in loops if inner.body < loop.body), None)
