"""From an entry point's arguments to a launch; a call like one that has been checked before skips the checks.

What the checks look at, besides addresses, is in a call's key: shapes, strides, dtypes, devices and plain values. A
call with a known key needs its operands' addresses and nothing else. The first call with a key, a call that is too
malformed to have one, and a call whose addresses are unaligned, or whose large operands overlap what it writes,
go through the checks, which raise what there is to raise.

Making and hashing a key takes longer than launching the kernel, and the layers of a model make the same few calls over
and over. So the latest calls are recognised without one, see :mod:`hopwell._repeat`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hopwell import _device_data, _switches
from hopwell._repeat import Arguments, Checked, Launch, Places, Repeat, Results, metadata
from hopwell.kernels import Plan
from hopwell.kernels.device_data import rules_of
from hopwell.kernels.problem import AttentionProblem

CAPACITY = 4096  # keys kept for each entry point; serving meets a few a step, and all are cheap to make again
RECENT = 4  # calls recognised without a key: models alternate between few kinds of layers
# Stands among arguments for a bound of lengths that changes no result and that the checks accept, as serving engines
# give another one in every step. Entry points write it out, because a function's call takes as long as ten comparisons.
ANY_BOUND = object()

_Record = TypeVar("_Record", bound=tuple[Any, ...])


def halves(cache: Any) -> tuple[Any, Any]:
    """Return K and V of a pair; the tensor of both and None otherwise."""
    return tuple(cache) if isinstance(cache, (tuple, list)) and len(cache) == 2 else (cache, None)


def record(kind: type[_Record], given: Mapping[str, Any]) -> _Record:
    """Return the arguments of a call by their names: a named tuple of what is ``given``, the local variables of an
    entry point or another record's fields. Calls that need no checks go without one, which would take half as long as
    they do."""
    return kind(**{name: given[name] for name in kind._fields if name in given})  # type: ignore[attr-defined]


def single(sinks: Any) -> torch.Tensor | None:
    """Return sinks that are given as a tensor, as a list of one, or not at all. What else there may be in a list is for
    the checks."""
    is_list = isinstance(sinks, (list, tuple)) and len(sinks) == 1 and isinstance(sinks[0], torch.Tensor)
    return sinks[0] if is_list else sinks


def _nothing(arguments: Arguments, out: Any, stats: Any) -> Results | None:
    """Stand in for the latest call where there has been none."""
    return None


def _key(arguments: Arguments) -> Hashable:
    """Return everything that the checks look at but addresses. Types count: 1, 1.0 and True are equal."""
    return tuple([metadata(a) if isinstance(a, torch.Tensor) else (type(a), a) for a in arguments])


class Calls:
    """The checked calls of one entry point, and in which of its arguments operands lie."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self._checked: dict[Hashable, Repeat] = {}
        self._recent: tuple[Launch, ...] = ()
        self.latest: Launch = _nothing
        _switches.on_switch(self._forget)

    def _forget(self) -> None:
        self._checked, self._recent, self.latest = {}, (), _nothing

    def repeat(self, arguments: Arguments, out: Any, stats: Any = None) -> Results | None:
        """Launch a call like one that has been checked, which ``latest`` did not recognise; None where there was none
        like it, or where addresses have to be checked. ``out`` and ``stats`` are results to write into, if given.
        Entry points ask ``latest`` themselves, as a call of this function takes a twentieth of the whole."""
        for launch in self._recent[1:]:
            results = launch(arguments, out, stats)
            if results is not None:
                return results
        try:
            found = self._checked.get(_key(arguments))
        except (RuntimeError, TypeError):  # a tensor without strides, a value without a hash
            return None
        if found is None:
            return None
        results = found.run(arguments, out, stats)
        if results is not None and found.latest is not None:
            self._recent = (found.latest, *self._recent[: RECENT - 1])
            self.latest = found.latest
        return results

    def run(
        self,
        arguments: Arguments,
        problem: AttentionProblem,
        out: Any,
        stats: Any = None,
        rows: Sequence[int] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> Results:
        """Launch a problem that has just been checked, and remember it for calls with arguments like these.

        ``out`` and ``stats`` are the results as they are returned: the output if given, and the log-sum-exp or the
        statistics if asked for. An output allocated here has the problem's rows in dimensions of sizes ``rows``.
        ``renamed`` has the caller's names of arguments that are called otherwise in ``places``.
        """
        looks = _device_data.is_enabled()
        name = functools.partial(self.places.name, arguments=arguments, renamed=renamed or {})
        if looks:
            _device_data.check(rules_of(problem), problem.query.device, name)
        plan = Plan(problem)
        result = plan.execute(problem, name)
        if out is None:
            out = result.unflatten(0, rows) if rows else result
        device = problem.query.device
        # What lies elsewhere was copied or read, and has to be in each call.
        here = all(argument.device == device for argument in arguments if isinstance(argument, torch.Tensor))
        if plan.has_work and plan.repeatable and here and not looks:
            if len(self._checked) >= CAPACITY:
                self._checked.clear()
            self._checked[_key(arguments)] = Repeat(Checked(arguments, problem, plan, out, stats), self.places)
        return out, stats
