"""What a family of workloads brings: its cases, the implementations to compare, the unit and axes of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hopwell.perf.ceilings import CEILINGS, Ceiling
from hopwell.perf.results import Labels


class Case(Protocol):
    """One workload. Cases of a series differ in one size, and a plot has a line for each candidate through them."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def series(self) -> str:
        """Say what the cases of a series have in common, in words; empty for a case that stands alone."""
        ...

    @property
    def x(self) -> int:
        """Return the size in which the cases of a series differ."""
        ...

    @property
    def work(self) -> float:
        """Return what a candidate gets done, in FLOP or bytes."""
        ...

    @property
    def demand(self) -> Mapping[str, float]:
        """Return what no candidate can do without, for each ceiling: FLOP of the products, bytes of inputs and outputs.
        A ceiling of the family that is missing here does not bound the case."""
        ...

    @property
    def max_error(self) -> float:
        """Return the largest relative error of an output that counts as right."""
        ...


class Inputs(Protocol):
    """The tensors of a case."""

    def error(self, out: Any) -> float:
        """Return the relative error of what a call returned, against float64."""
        ...


Call = Callable[[], Any]  # fills the output and returns it
Candidate = Callable[[Any], Call]  # takes the family's inputs; raises where it cannot run a case


@dataclass(frozen=True)
class Family:
    labels: Labels
    unit_size: float  # work in a second that makes one unit
    cases: Sequence[Case]
    inputs: Callable[..., Inputs]  # of a case, on the GPU or the device that is named
    candidates: Mapping[str, Candidate]
    host_calls: Callable[[], Mapping[str, Call]]  # warm calls whose time on the host is worth knowing
    # What there is to say of how a candidate computes its inputs, by the candidate's name; empty for nothing.
    remarks: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        return {name: CEILINGS[name] for name in self.labels.ceilings}

    @property
    def measured(self) -> dict[str, Candidate]:
        """Return all that a case is measured with."""
        return {**self.candidates, **{name: ceiling.prepare for name, ceiling in self.ceilings.items()}}
