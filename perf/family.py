"""A family of workloads: its cases, the implementations to compare, the unit and axes of its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hopwell.perf.ceilings import CEILINGS, Ceiling
from hopwell.perf.results import Labels


class Case(Protocol):
    """One workload. Cases of a series differ in one size; a plot has a line for each candidate through them."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def series(self) -> str:
        """Common properties of the cases of a series, in words; empty for a case that stands alone."""
        ...

    @property
    def x(self) -> int:
        """Size in which the cases of a series differ."""
        ...

    @property
    def work(self) -> float:
        """Work of a candidate, in FLOP or bytes."""
        ...

    @property
    def demand(self) -> Mapping[str, float]:
        """Minimum demand of any candidate, for each ceiling: FLOP of the products, bytes of inputs and outputs.

        A ceiling of the family that is missing here does not bound the case.
        """
        ...

    @property
    def max_error(self) -> float:
        """Largest relative error of a correct output."""
        ...


class Inputs(Protocol):
    """The tensors of a case."""

    def error(self, out: Any) -> float:
        """Return the relative error of a call's output, against float64."""
        ...


Call = Callable[[], Any]  # fills the output and returns it
Candidate = Callable[[Any], Call]  # takes the family's inputs; raises for cases that it cannot run


@dataclass(frozen=True)
class Family:
    labels: Labels
    unit_size: float  # work per second in one unit
    cases: Sequence[Case]
    inputs: Callable[..., Inputs]  # of a case, on the GPU or the device that is named
    candidates: Mapping[str, Candidate]
    host_calls: Callable[[], Mapping[str, Call]]  # warm calls with a host time worth knowing
    # Remark on a candidate's computation of its inputs, by the candidate's name; empty for none.
    remarks: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    @property
    def ceilings(self) -> dict[str, Ceiling]:
        return {name: CEILINGS[name] for name in self.labels.ceilings}

    @property
    def measured(self) -> dict[str, Candidate]:
        """Candidates and ceilings of a case, by title."""
        return {**self.candidates, **{name: ceiling.prepare for name, ceiling in self.ceilings.items()}}
