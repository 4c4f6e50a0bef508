"""Repeated calls: functions generated for the form of a checked call.

A repeated call compares two dozen arguments with the checked call's and passes some twenty addresses. Loops over tuples
would take as long as the launch, so the comparison is generated as source code. Sizes and scales, which differ between
calls of one form, are variables of the function. A form is the set of arguments that are tensors, the set that are
None, and the operands that they contain. An entry point has few forms. docs/kernels/host.md prints one such function.

A repeated call handles every argument like a first call. Its form, metadata and plain values must equal a checked
call's, else the call is checked. Addresses and storage sizes are compared with a set of known good places. These are
aligned, large enough, and disjoint from other tensors if a call writes there. :meth:`Repeat.fits` adds a place that
passes a conservative test. If the test fails, the call is checked, and a place that the checks accept is added too. One
case is not found. A storage is resized to the size of an earlier one, and its view starts further in, at the same
address.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from hopwell._checks.arguments import is_plain
from hopwell.kernels.launch.scratch import own_scratch
from hopwell.utils import FP4Tensor

# Arguments of an entry point in one row: tensors, comparable plain values, and None for arguments that are not given.
Arguments = tuple[Any, ...]
# The output, and the log-sum-exp or the softmax statistics, or None if they are not requested.
Results = tuple[Any, Any]
# Takes the arguments, and the results to write into, or None to allocate them. It returns None and launches nothing if
# the call must be checked. Each function makes the cheapest comparisons first: calls of other forms come here as well,
# see launch.RECENT, and may have more arguments. A nested tensor is refused before torch's guards see it: they throw an
# exception that ends the process. A value that is not a tensor raises AttributeError there.
Launch = Callable[[Arguments, Any, Any], Results | None]

# Conditions under which torch must see a call: a dispatch mode would miss the launch, and a dual tensor has a tangent.
# The guards do not compare these. Attributes of modules cost a few nanoseconds, and functions ten times as much.
SEEN = ("not modes._is_in_torch_dispatch_mode", "forward_ad._current_level < 0")
TENSOR = object()  # stands for a tensor among remembered arguments
RESULTS = {"out": "out", "lse": "statistics", "statistics": "statistics", "out_scales": "out.scale"}  # in the functions
ALIGNMENT = 16  # bytes, required by TMA reads and the largest stores
MOST_KNOWN = 1024  # places that are remembered; a model has one for each layer
PACKED = "packed(empty_like(out_like), empty_like(scales_like), 0, original_shape)"  # a new NVFP4 output

SOURCE = """
def launch(arguments, out, statistics):
    try:
        (
            {arguments},
        ) = arguments
        if not (
            {conditions}
        ):
            return None
    except (AttributeError, ValueError):
        return None
    {addresses}
    place = (
        {place_addresses},
        {place_sizes},
    )
    if place not in known and not fits(arguments, place):
        return None
    {results}
    operands = (
        {operands},
    )
    function(anchor, operands, {constants})
    return out, statistics
"""


def is_seen() -> bool:
    """Return whether torch must see a call, so that none is repeated. It is true inside the ops of a dispatch mode."""
    return _python_dispatch._is_in_torch_dispatch_mode or forward_ad._current_level >= 0


def output_parts(out: Any) -> tuple[Any, Any, Any]:
    """Return (data, scales, first scale row) of an NVFP4 output, or (out, None, None)."""
    return (out.data, out.scale, out.scale_start_index) if isinstance(out, FP4Tensor) else (out, None, None)


class OperandMap(NamedTuple):
    """The arguments of an entry point that contain the operands of its kernels.

    A call's arguments start with the names in ``tensors``, in this order. ``operands`` maps each operand to the
    argument that contains it, or to several, of which the first given one counts.
    """

    tensors: tuple[str, ...]
    operands: Mapping[str, str | tuple[str, ...]]

    def find(self, operand: str, arguments: Arguments) -> int:
        """Return the position of the tensor argument that contains an operand."""
        for name in self._names(operand):
            position = self.tensors.index(name)
            if isinstance(arguments[position], torch.Tensor):
                return position
        raise AssertionError(f"operand {operand} of the kernel lies in no argument")

    def name(self, operand: str, arguments: Arguments, renamed: Mapping[str, str]) -> str:
        """Return the caller's name of the argument that contains an operand, or the operand's name if none does.

        An index after the name is kept: in ``kv_cache[1]``, ``kv_cache`` may be renamed.
        """
        given = [name for name in self._names(operand) if isinstance(arguments[self.tensors.index(name)], torch.Tensor)]
        name, bracket, index = (given[0] if given else operand).partition("[")
        return renamed.get(name, name) + bracket + index

    def variable(self, position: int, argument: Any, call: CheckedCall) -> str:
        """Return the name of an argument in generated functions."""
        if position < len(self.tensors):
            return re.sub(r"\W+", "_", self.tensors[position]).strip("_")
        results = zip(("given_out", "given_scales", "given_lse"), call.results, strict=True)
        found = (name for name, result in results if isinstance(argument, torch.Tensor) and argument is result)
        return next(found, f"argument{position}")

    def _names(self, operand: str) -> tuple[str, ...]:
        names = self.operands.get(operand, ())
        return (names,) if isinstance(names, str) else names


class CheckedCall(NamedTuple):
    """A call that has been checked and launched."""

    arguments: Arguments
    written: Sequence[Any]  # arguments that the call may write into
    operands: Mapping[str, torch.Tensor | None]  # of the kernel, in the order of its addresses
    addresses: Sequence[int]  # of the operands, in the form that the kernel takes
    function: Callable[..., Any]
    anchor: Any
    constants: Sequence[Any]  # further arguments of the function
    ticket: Callable[[], int] | None = None  # returns the last address, if the kernel takes tickets
    out: torch.Tensor | FP4Tensor | None = None  # this and the next in the form that is returned
    statistics: torch.Tensor | None = None

    @property
    def results(self) -> tuple[Any, Any, Any]:
        """The output, its scales, and the log-sum-exp or the statistics; None for absent ones."""
        return *output_parts(self.out)[:2], self.statistics


class Repeat:
    """A checked call that can be repeated. ``latest`` is the function of the last repetition."""

    __slots__ = (
        "_addresses",
        "_extents",
        "_known",
        "_misaligned",
        "_names",
        "_pairs",
        "_plain",
        "_positions",
        "_results",
        "_variables",
        "latest",
    )

    def __init__(self, call: CheckedCall, operand_map: OperandMap):
        arguments = call.arguments
        self._names = [operand_map.variable(i, argument, call) for i, argument in enumerate(arguments)]
        self._plain = tuple([TENSOR if isinstance(argument, torch.Tensor) else argument for argument in arguments])
        self._positions = [i for i, argument in enumerate(self._plain) if argument is TENSOR]
        self._variables: dict[str, Any] = dict(
            address=torch.Tensor.data_ptr,
            storage=torch.Tensor.untyped_storage,
            empty_like=torch.empty_like,
            function=call.function,
            anchor=call.anchor,
            fits=self.fits,
            modes=_python_dispatch,
            forward_ad=forward_ad,
        )
        for i, constant in enumerate(call.constants):
            self._variables[f"constant{i}"] = constant
        self._addresses = self._operands(call, operand_map)
        self._results = self._new_results(call)
        self._known: set[tuple[int, ...]] = set()
        self._variables["known"] = self._known
        tensors = [arguments[i] for i in self._positions]
        at = [tensor.data_ptr() for tensor in tensors]
        self._extents = [extent_bytes(tensor) for tensor in tensors]
        self._misaligned = [address % ALIGNMENT for address in at]
        is_written = [any(tensor is written for written in call.written) for tensor in tensors]
        # Two tensors of one storage may interleave, but only at the distance that was checked.
        self._pairs = [
            (i, j, at[j] - at[i])
            for i, j in itertools.combinations(range(len(tensors)), 2)
            if (is_written[i] or is_written[j]) and self._extents[i] and self._extents[j]
        ]
        self.latest: Launch | None = None
        self.add_place(arguments)

    def run(self, arguments: Arguments, out: Any, statistics: Any) -> Results | None:
        """Launch for arguments whose key equals the checked call's key."""
        results = None if self.latest is None else self.latest(arguments, out, statistics)
        if results is None:
            # The key does not show every property of a tensor, such as whether it is fake.
            if not all(is_plain(argument) for argument in arguments if isinstance(argument, torch.Tensor)):
                return None
            # This is the first repetition, or tensors differ in a property outside the key, such as requires_grad.
            self.latest = self._function(arguments)
            results = self.latest(arguments, out, statistics)
        return results

    def add_place(self, arguments: Arguments) -> None:
        """Remember addresses and storage sizes that were checked."""
        tensors = [arguments[i] for i in self._positions]
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._add((*(tensor.data_ptr() for tensor in tensors), *sizes))

    def _add(self, place: tuple[int, ...]) -> None:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known.add(place)

    def fits(self, arguments: Arguments, place: tuple[int, ...]) -> bool:
        """Remember and accept a place that passes a conservative test.

        Every storage must hold its tensor's elements. Every address must be aligned like the checked one or to 16
        bytes. No written tensor may overlap another tensor. ``place`` has the address of each tensor argument and then
        the size of each storage.
        """
        at, sizes, extents = place[: len(self._positions)], place[len(self._positions) :], self._extents
        for i, address, size, extent, misaligned in zip(
            self._positions, at, sizes, extents, self._misaligned, strict=True
        ):
            tensor = arguments[i]
            if extent and size < tensor.storage_offset() * tensor.element_size() + extent:
                return False
            if address % ALIGNMENT not in (0, misaligned):
                return False
        for i, j, distance in self._pairs:
            between = at[j] - at[i]
            if -extents[j] < between < extents[i] and between != distance:
                return False
        self._add(place)
        return True

    def _operands(self, call: CheckedCall, operand_map: OperandMap) -> list[str]:
        """Return the address of each operand as an expression, in order."""
        found = []
        data, scales, statistics = call.results
        given = {"out": data, "out_scales": scales, "lse": statistics, "statistics": statistics}
        for (name, view), address in zip(call.operands.items(), call.addresses, strict=True):
            if view is None:
                found.append("0")
                continue
            if name in RESULTS:
                position = next((i for i in self._positions if call.arguments[i] is given[name]), None)
                if position is None:
                    new = "out.data" if name == "out" and isinstance(call.out, FP4Tensor) else RESULTS[name]
                    found.append(f"address({new})")
                    continue
            else:
                position = operand_map.find(name, call.arguments)
            argument = call.arguments[position]
            if not _same_memory(view, argument):
                if name != "scratch":
                    raise AssertionError(f"operand {name} of the kernel does not lie in {self._names[position]}")
                # Launches on another stream have other scratch.
                self._variables["own_scratch"] = functools.partial(own_scratch(view.device).address, view.numel())
                found.append("own_scratch()")
                continue
            offset = address - argument.data_ptr()
            if offset:
                self._variables[f"{name}_offset"] = offset
            found.append(f"{self._names[position]}_at" + (f" + {name}_offset" if offset else ""))
        if call.ticket is not None:
            self._variables["ticket"] = call.ticket
            found.append("ticket()")
        return found

    def _new_results(self, call: CheckedCall) -> list[str]:
        """Return the lines that allocate results that are not given."""
        lines = []
        data, scales, _ = call.results
        if data is not None and not any(argument is data for argument in call.arguments):
            self._variables["out_like"] = _like(data)
            if isinstance(call.out, FP4Tensor):
                shape = call.out.original_shape
                self._variables.update(packed=FP4Tensor, scales_like=_like(scales), original_shape=shape)
            lines.append(f"out = {PACKED if scales is not None else 'empty_like(out_like)'}")
        if call.statistics is None:
            lines.append("statistics = None")
        elif not any(argument is call.statistics for argument in call.arguments):
            self._variables["statistics_like"] = _like(call.statistics)
            lines.append("statistics = empty_like(statistics_like)")
        return lines

    def _function(self, arguments: Arguments) -> Launch:
        """Return a new function that recognises these arguments."""
        variables, names = dict(self._variables), self._names
        firsts: dict[int, int] = {}  # tensor id to the first position of the tensor
        for i in self._positions:
            firsts.setdefault(id(arguments[i]), i)
        variables["check"] = _guard([arguments[i] for i in firsts.values()])
        first = {i: firsts[id(arguments[i])] for i in self._positions}
        conditions = _conditions(self._plain, names, first, variables)
        if any(arguments[i].requires_grad for i in firsts.values()):
            # In grad mode such a call warns first. The guards compare only requires_grad.
            variables["is_grad_enabled"] = torch.is_grad_enabled
            conditions.insert(0, f"is_grad_enabled() is {torch.is_grad_enabled()}")
        of_positions = [names[first[i]] for i in self._positions]
        aliases = [f"{names[i]}_at = {names[j]}_at" for i, j in first.items() if i != j]
        source = SOURCE.format(
            arguments=_wrapped(names, 12),
            conditions="\n            and ".join(conditions),
            addresses="\n    ".join([*(f"{names[i]}_at = address({names[i]})" for i in firsts.values()), *aliases]),
            place_addresses=_wrapped([f"{name}_at" for name in of_positions], 8),
            place_sizes=_wrapped([f"len(storage({name}))" for name in of_positions], 8),
            results="\n    ".join(self._results),
            operands=_wrapped(self._addresses, 8),
            constants=", ".join(name for name in variables if name.startswith("constant")),
        )
        # The variables are globals of a new function: entering a closure over 45 variables copies all of them. The code
        # object is copied, because functions with one code object share its cache of globals and spoil it.
        return types.FunctionType(_compiled(source).replace(), {"__builtins__": builtins, **variables})


@functools.lru_cache(maxsize=512)
def _compiled(source: str) -> types.CodeType:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<repeated call>", "exec"), namespace)
    return namespace["launch"].__code__


def _conditions(
    plain: Arguments, names: Sequence[str], firsts: Mapping[int, int], variables: dict[str, Any]
) -> list[str]:
    """Return the conditions for repeated arguments, cheapest first.

    Values to compare with become variables. A tensor given twice must be given at the same positions again, because
    torch's guards take each tensor once.
    """
    single, equal, tensors = [], [], []
    for i, value in enumerate(plain):
        name = names[i]
        if value is TENSOR and firsts[i] == i:
            tensors.append(name)
        elif value is TENSOR:
            single.append(f"{name} is {names[firsts[i]]}")
        elif value is None or isinstance(value, bool):
            single.append(f"{name} is {value}")
        elif isinstance(value, (type, torch.dtype)):
            variables[f"value{i}"] = value
            single.append(f"{name} is value{i}")
        else:
            # Types are compared too: 1, 1.0 and True are equal. The type precedes the value, because comparing a tensor
            # would wait for the GPU. Most calls pass the same object as before, which is the fastest test.
            variables[f"type{i}"], variables[f"value{i}"] = type(value), value
            equal.append(f"({name} is value{i} or type({name}) is type{i} and {name} == value{i})")
    flat = [f"not {tensor}.is_nested" for tensor in tensors]
    return [*SEEN, *single, *equal, *flat, f"check({', '.join(tensors)})"]


def _wrapped(parts: Sequence[str], indent: int) -> str:
    """Return comma-separated parts in lines of 120 columns. The first line is already indented."""
    return textwrap.fill(", ".join(parts), 119 - indent).replace("\n", "\n" + indent * " ")


def _same_memory(view: torch.Tensor, source: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _like(result: torch.Tensor) -> torch.Tensor:
    """Return a tensor from which torch.empty_like makes contiguous ones of this shape, twice as fast as torch.empty.

    It has no memory: in the warm-up of a CUDA graph tree, torch refuses memory that stays.
    """
    like = torch.empty((), dtype=result.dtype, device=result.device).expand(result.shape)
    like.untyped_storage().resize_(0)
    return like


def extent_bytes(view: torch.Tensor | None) -> int:
    """Return the bytes from the first element of a view to the end of its last element."""
    if view is None or view.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that the checks look at, except its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that checks whether other tensors, none of them nested, differ from these only in addresses.

    It uses the guards that ``torch.compile`` puts before its compiled code: they take a tenth of the time of reading
    shapes and strides from Python. They also compare properties that select torch's implementations, such as
    requires_grad.
    """
    try:
        return _torch_guard(*tensors)
    except (AttributeError, ImportError, TypeError):  # this torch has other guards
        return _slow_guard(tensors)


def _torch_guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _slow_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    known = [*map(_guarded, tensors)]
    return lambda *others: all(map(is_plain, others)) and [*map(_guarded, others)] == known


def _guarded(tensor: torch.Tensor) -> tuple[Any, ...]:
    return *metadata(tensor), tensor.requires_grad
