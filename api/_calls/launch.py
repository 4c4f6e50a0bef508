"""Launches of entry points: a call that is like an already checked call skips the checks.

A call's key holds everything that the checks look at, except addresses and storage sizes: shapes, strides, dtypes,
devices and plain values. A call with a known key needs only its operands' addresses. The checks raise all errors. They
run for the first call with a key, for a call too malformed to have one, and for unknown addresses or storage sizes.

Building and hashing a key takes longer than launching the kernel, and the layers of a model make the same few calls
repeatedly. The latest calls are therefore recognised without a key, see :mod:`hopwell._calls.repeat`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hopwell._calls import gradients, switches
from hopwell._calls.repeat import (
    Arguments,
    CheckedCall,
    Launch,
    OperandMap,
    Repeat,
    Results,
    is_seen,
    metadata,
    output_parts,
)
from hopwell._checks import device_data
from hopwell.kernels import Plan
from hopwell.kernels.launch.arguments import addresses_of
from hopwell.kernels.launch.device_data import rules_of
from hopwell.kernels.launch.plan import host_scales
from hopwell.kernels.problem import AttentionProblem

CAPACITY = 4096  # keys kept for each entry point; serving adds a few in each step, and all are cheap to rebuild
RECENT = 4  # calls recognised without a key: models alternate between few kinds of layers
# Placeholder among the arguments for a valid bound of lengths that changes no result: serving engines give another
# bound in every step. Entry points write the test inline, because a function call takes as long as ten comparisons.
ANY_BOUND = object()

# Types of plain values that never change. An object of another type may have another value in the next call.
CONSTANT_TYPES = frozenset((type(None), bool, int, float, str, object, torch.dtype))

_Call = TypeVar("_Call", bound=tuple[Any, ...])


def halves(cache: Any) -> tuple[Any, Any]:
    """Return K and V of a pair, or (cache, None) for anything else.

    A pair of a tensor and None stays whole, because the tensor alone is a different argument.
    """
    is_pair = isinstance(cache, (tuple, list)) and len(cache) == 2 and cache[1] is not None
    return tuple(cache) if is_pair else (cache, None)


def call_arguments(kind: type[_Call], given: Mapping[str, Any]) -> _Call:
    """Return the arguments of a call as the named tuple ``kind``.

    ``given`` has them by name: the local variables of an entry point, or the fields of another such tuple. Repeated
    calls do not build this tuple, which would add half of their time.
    """
    return kind(**{name: given[name] for name in kind._fields if name in given})  # type: ignore[attr-defined]


def single(sinks: Any) -> torch.Tensor | None:
    """Return sinks given as a tensor, as a list of one tensor, or as None. The checks handle all other lists."""
    is_list = isinstance(sinks, (list, tuple)) and len(sinks) == 1 and isinstance(sinks[0], torch.Tensor)
    return sinks[0] if is_list else sinks


def _nothing(arguments: Arguments, out: Any, stats: Any) -> Results | None:
    """Take the place of the latest call before there is one."""
    return None


def _key(arguments: Arguments) -> Hashable:
    """Return everything that the checks look at, except addresses and storage sizes.

    Types are included, because 1, 1.0 and True are equal.
    """
    return tuple([metadata(a) if isinstance(a, torch.Tensor) else (type(a), a) for a in arguments])


def _is_constant(value: Any) -> bool:
    """Return whether a plain value can never change. NumPy scalars cannot; its arrays can, and have no hash."""
    kind = type(value)
    is_scalar = kind.__module__ == "numpy" and kind.__hash__ is not None
    return kind in CONSTANT_TYPES or is_scalar or isinstance(value, (type, enum.Enum))


class Calls:
    """The checked calls of one entry point, and the arguments that contain the kernels' operands."""

    def __init__(self, operand_map: OperandMap) -> None:
        self.operand_map = operand_map
        self._gradients = gradients.Notice()
        self._checked: dict[Hashable, Repeat] = {}
        self._recent: tuple[Launch, ...] = ()
        self.latest: Launch = _nothing
        switches.on_switch(self._forget)

    def _forget(self) -> None:
        self._checked, self._recent, self.latest = {}, (), _nothing

    def repeat(self, arguments: Arguments, out: Any, stats: Any = None) -> Results | None:
        """Launch a call that is like a checked call but that ``latest`` did not recognise.

        Returns None if there is no such call or if addresses must be checked. ``out`` and ``stats`` are results to
        write into, if given. Entry points call ``latest`` themselves, because a call of this function takes a twentieth
        of the whole.
        """
        if is_seen():
            return None
        for launch in self._recent[1:]:
            results = launch(arguments, out, stats)
            if results is not None:
                return results
        try:
            found = self._checked.get(_key(arguments))
        except (RuntimeError, TypeError):  # a tensor without strides, or a value without a hash
            return None
        if found is None or self._gradients.is_due(arguments):
            return None
        results = found.run(arguments, out, stats)
        if results is not None and found.latest is not None:
            self._recent = (found.latest, *self._recent[: RECENT - 1])
            self.latest = found.latest
        return results

    def run(
        self,
        arguments: Arguments,
        call: Any,
        problem: AttentionProblem,
        out: Any,
        stats: Any = None,
        rows: Sequence[int] = (),
        renamed: Mapping[str, str] | None = None,
    ) -> Results:
        """Launch a problem that was just checked, and remember it for calls with similar arguments.

        ``call`` is the named tuple of the same arguments. ``out`` and ``stats`` are the results as they are returned:
        the output if given, and the log-sum-exp or the statistics if requested. An output allocated here has the
        problem's rows in dimensions of sizes ``rows``. ``renamed`` maps names of ``operand_map`` to the caller's names.
        """
        self.notice_gradients(call._asdict().items())
        looks = device_data.is_enabled()
        name = functools.partial(self.operand_map.name, arguments=arguments, renamed=renamed or {})
        if looks:
            device_data.check(rules_of(problem), problem.query.device, name)
        plan = Plan(problem)
        result = plan.execute(problem, name)
        if out is None:
            out = result.unflatten(0, rows) if rows else result
        if plan.has_work and plan.repeatable and not looks:
            views = plan.operands(problem, output_parts(out)[0])
            checked = CheckedCall(
                arguments=arguments,
                written=(*output_parts(call.out)[:2], getattr(call, "lse", None), call.workspace_buffer),
                operands=views,
                addresses=addresses_of(views),
                function=plan.function,
                anchor=plan.anchor,
                constants=plan.constants(*host_scales(problem)),
                ticket=plan.tickets.address,
                out=out,
                statistics=stats,
            )
            self.remember(checked, problem.query.device)
        return out, stats

    def notice_gradients(self, arguments: Iterable[tuple[str, Any]]) -> None:
        """Warn in the first call in which one of the ``arguments``, (name, value) pairs, requires a gradient."""
        self._gradients.give(arguments)

    def remember(self, call: CheckedCall, device: torch.device) -> None:
        """Enable the repetition of calls like this one on ``device``."""
        for argument in call.arguments:
            # A tensor on another device was copied or read, which each call must repeat.
            if argument.device != device if isinstance(argument, torch.Tensor) else not _is_constant(argument):
                return
        key = _key(call.arguments)
        if key in self._checked:
            self._checked[key].add_place(call.arguments)
            return
        if len(self._checked) >= CAPACITY:
            self._checked.clear()
        self._checked[key] = Repeat(call, self.operand_map)
