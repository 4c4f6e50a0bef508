"""Calls like one that has been checked, as functions written for their form.

A repeated call compares two dozen arguments with those of the checked one and puts some twenty addresses in their
places. In loops over tuples that takes as long as the launch, so it is written out as source code. What differs between
calls of one form, such as sizes and scales, are variables of the function, and an entry point has few forms: which
arguments are tensors, which are None, and which operands lie in them.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hopwell._cache import SCALES_READ
from hopwell._checks import is_plain
from hopwell.kernels import Plan
from hopwell.kernels.launch import OPERANDS, address_of
from hopwell.kernels.plan import host_scales, operands
from hopwell.kernels.problem import AttentionProblem
from hopwell.kernels.scratch import own_scratch
from hopwell.utils import FP4Tensor

# An entry point's arguments in one row: tensors, and plain values that can be compared. None for what is not given.
Arguments = tuple[Any, ...]
# The output, and the log-sum-exp or the softmax statistics, or None where they are not asked for.
Results = tuple[Any, Any]
# Takes the arguments, and the results to write into, or None to allocate them. It gives None and launches nothing where
# arguments differ from the checked ones in more than addresses, where addresses are unaligned, and where queries, keys,
# values, output, its scales, statistics and workspace overlap. Tables, lengths and sinks are not looked at: they are a
# few bytes.
# Nor does it launch where a tensor is of another kind, or has no memory. Whether one is nested is asked before torch's
# guards look at it, which throw what ends the process at such a tensor. What is no tensor has no answer. It is asked
# after all that costs less: calls of other forms come here as well, see launch.RECENT. They may have more arguments.
Launch = Callable[[Arguments, Any, Any], Results | None]

TENSOR = object()  # stands for a tensor among remembered arguments

LETTERS = {"query": "q", "key": "k", "value": "v", "out": "o"}  # of operands, in the functions
# Results besides the output: they may be allocated in the call. No entry point gives both log-sum-exp and statistics.
RESULTS = {"lse": "s", "statistics": "s", "out_scales": "t"}
ALIGNMENT_MASK = 15  # TMA reads and 16-byte stores

PACKED = "packed(empty_like(output_like), empty_like(scales_like), 0, original_shape)"  # a new NVFP4 output

SOURCE = """
def launch(arguments, out, stats):
    try:
        {arguments} = arguments
        if not ({conditions}):
            return None
    except (AttributeError, ValueError):
        return None
    if out is None:
        out = {new_output}
    stats = {stats}
    {pointers}
    q, k, v, o = {query}, {key}, {value}, address({data}){more}
    where = {where}
    if not ({known}):
        if (q | k | v | o) & {mask} or {unaligned_scales}not ({present} and o) or {overlaps}:
            return None
        if len(known) >= {most_known}:
            known.clear()
        known.add(where)
    function(anchor, ({addresses}, ticket()), {constants})
    return out, stats
"""
MOST_KNOWN = 1024  # places in memory that are remembered; a model has one for each layer


def _overlaps(written: str, others: str) -> list[str]:
    """What a call writes overlaps another operand that starts inside it, or less than its own size before it. Sizes are
    variables, ``q_before`` is minus that of q: to negate it in each call would take time."""
    return [f"{name}_before < {name} - {written} < {written}_bytes" for name in others]


OUT_OVERLAPS = _overlaps("o", "qkv")
# A call also writes results besides the output, the workspace, and the scales of an NVFP4 output.
MORE_OVERLAPS = {name: _overlaps(name, "qkvo") for name in "swt"}


def output_parts(out: Any) -> tuple[Any, Any, Any]:
    """Return what there is to compare of an output that is given: its data, and of an NVFP4 one its scales and the row
    at which they begin."""
    return (out.data, out.scale, out.scale_start_index) if isinstance(out, FP4Tensor) else (out, None, None)


class Places(NamedTuple):
    """Which arguments of an entry point the operands of its kernels lie in.

    A call's arguments begin with those that ``tensors`` names, in this order. ``operands`` names for operands of
    :data:`hopwell.kernels.launch.OPERANDS` which of them they lie in: the first one that is given.
    """

    tensors: tuple[str, ...]
    operands: Mapping[str, str | tuple[str, ...]]

    def find(self, operand: str, arguments: Arguments) -> int:
        """Return the place among the arguments of the tensor that an operand lies in."""
        for name in self._names(operand):
            place = self.tensors.index(name)
            if isinstance(arguments[place], torch.Tensor):
                return place
        raise AssertionError(f"operand {operand} of the kernel lies in no argument")

    def name(self, operand: str, arguments: Arguments, renamed: Mapping[str, str]) -> str:
        """Return the argument that an operand lies in, by the caller's name of it; the operand's own name for what lies
        in none. An index behind the name stays: of ``kv_cache[1]``, ``kv_cache`` may be renamed."""
        given = [name for name in self._names(operand) if isinstance(arguments[self.tensors.index(name)], torch.Tensor)]
        name, bracket, index = (given[0] if given else operand).partition("[")
        return renamed.get(name, name) + bracket + index

    def _names(self, operand: str) -> tuple[str, ...]:
        names = self.operands.get(operand, ())
        return (names,) if isinstance(names, str) else names


class Checked(NamedTuple):
    """A call that has been checked."""

    arguments: Arguments
    problem: AttentionProblem
    plan: Plan
    out: torch.Tensor | FP4Tensor  # this and the next as they are returned
    stats: torch.Tensor | None


class Repeat:
    """What it takes to repeat a checked call. ``latest`` is the function that the last repetition went through."""

    __slots__ = ("_addresses", "_also_written", "_inputs", "_is_packed", "_plain", "_variables", "latest")

    def __init__(self, call: Checked, places: Places):
        problem, plan, stats = call.problem, call.plan, call.stats
        self._is_packed = isinstance(call.out, FP4Tensor)
        data, scales, _ = output_parts(call.out)
        views = dict(zip(OPERANDS, operands(problem, data), strict=False))
        self._variables: dict[str, Any] = dict(
            address=torch.Tensor.data_ptr,
            empty_like=torch.empty_like,
            function=plan.function,
            anchor=plan.anchor,
            ticket=plan.tickets.address,
            output_like=_like(data),
            stats_like=None if stats is None else _like(stats),
        )
        if isinstance(call.out, FP4Tensor):
            self._variables.update(packed=FP4Tensor, scales_like=_like(scales), original_shape=call.out.original_shape)
        by_letter = {letter: views[name] for name, letter in LETTERS.items()}
        for letter, view in {**by_letter, "s": stats, "w": problem.scratch, "t": scales}.items():
            self._variables[f"{letter}_bytes"] = extent_bytes(view)
            self._variables[f"{letter}_before"] = -extent_bytes(view)
        for i, constant in enumerate(plan.constants(*host_scales(problem))):
            self._variables[f"constant{i}"] = constant
        self._plain = tuple([TENSOR if isinstance(argument, torch.Tensor) else argument for argument in call.arguments])
        self._inputs, self._addresses = self._find(call.arguments, places, views)
        self._also_written = {} if stats is None else {"s": "address(stats)"}
        if self._is_packed:
            self._also_written["t"] = "address(out.scale)"
        if problem.scratch is not None:
            self._also_written["w"] = self._addresses["scratch"]
            self._addresses["scratch"] = "w"
        self.latest: Launch | None = None

    def run(self, arguments: Arguments, out: Any, stats: Any) -> Results | None:
        """Launch for arguments that have the key of the checked ones."""
        results = None if self.latest is None else self.latest(arguments, out, stats)
        if results is None:
            # No key holds what else a tensor may be, such as a fake one.
            if not all(is_plain(argument) for argument in arguments if isinstance(argument, torch.Tensor)):
                return None
            # The first repetition, or tensors that differ in what no key holds, such as requires_grad.
            self.latest = self._function(arguments)
            results = self.latest(arguments, out, stats)
        return results

    def _find(
        self, arguments: Arguments, places: Places, views: Mapping[str, torch.Tensor | None]
    ) -> tuple[list[int], dict[str, str]]:
        """Return the arguments that operands lie in, and the address of each operand as an expression, in order."""
        inputs, addresses = set(), {}
        for name, view in views.items():
            if view is None or name == "out":
                addresses[name] = "0"
                continue
            if name in RESULTS:
                addresses[name] = RESULTS[name]
                continue
            place = places.find(name, arguments)
            if not _same_memory(view, arguments[place]):
                if name != "scratch":
                    raise AssertionError(f"operand {name} of the kernel does not lie in {places.tensors[place]}")
                # Launches on another stream have other memory.
                self._variables["own_scratch"] = functools.partial(own_scratch(view.device).address, view.numel())
                addresses[name] = "own_scratch()"
                continue
            inputs.add(place)
            addresses[name] = f"p{place}"
            offset = address_of(name, view) - arguments[place].data_ptr()
            if offset:
                self._variables[f"offset_{name}"] = offset
                addresses[name] += f" + offset_{name}"
        return sorted(inputs), addresses

    def _function(self, arguments: Arguments) -> Launch:
        """Make the function that recognises these arguments."""
        variables = dict(self._variables)
        constants = [name for name in variables if name.startswith("constant")]
        firsts: dict[int, int] = {}  # by tensor, the place where it is given first
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                firsts.setdefault(id(argument), i)
        variables["check"] = _guard([arguments[i] for i in firsts.values()])
        conditions = _conditions(self._plain, [firsts.get(id(argument)) for argument in arguments], variables)
        variables["known"] = set()
        # What lies in one argument is at the same distance in every call.
        inputs = {name: self._addresses[name] for name in ("query", "key", "value")}
        places = {address.partition(" ")[0]: LETTERS[name] for name, address in reversed(inputs.items())}
        small = [f"p{i}" for i in self._inputs if f"p{i}" not in places]
        scales = [found for name in ("key_scales", "value_scales") if (found := self._addresses.get(name, "0")) != "0"]
        source = SOURCE.format(
            where=", ".join([*places.values(), "o", *self._also_written, *scales]),
            known=" and ".join(["where in known", *small]),
            most_known=MOST_KNOWN,
            arguments=", ".join(f"a{i}" for i in range(len(arguments))),
            conditions=" and ".join(conditions),
            new_output=PACKED if self._is_packed else "empty_like(output_like)",
            data="out.data" if self._is_packed else "out",
            stats="None" if variables["stats_like"] is None else "empty_like(stats_like) if stats is None else stats",
            pointers="; ".join(f"p{i} = address(a{i})" for i in self._inputs),
            **inputs,
            present=" and ".join([*(f"p{i}" for i in self._inputs), *self._also_written]),
            more="".join(f"; {name} = {address}" for name, address in self._also_written.items()),
            mask=ALIGNMENT_MASK,
            unaligned_scales="".join(f"({address}) & {SCALES_READ - 1} or " for address in scales),
            overlaps=" or ".join([*OUT_OVERLAPS, *itertools.chain(*(MORE_OVERLAPS[n] for n in self._also_written))]),
            addresses=", ".join((self._addresses | LETTERS).values()),
            constants=", ".join(constants),
        )
        # These are globals of a new function: entering a function that closes over 45 variables copies all of them,
        # and functions that share one code object would share, and spoil, what it remembers about its globals.
        return types.FunctionType(_compiled(source).replace(), {"__builtins__": builtins, **variables})


@functools.lru_cache(maxsize=512)
def _compiled(source: str) -> types.CodeType:
    namespace: dict[str, Any] = {}
    exec(compile(source, "<repeated call>", "exec"), namespace)
    return namespace["launch"].__code__


def _conditions(plain: Arguments, firsts: Sequence[int | None], variables: dict[str, Any]) -> list[str]:
    """Return what has to hold for other arguments, cheapest first. Values to compare with become variables. Tensors are
    given again where they were before, as torch's guards take each of them once."""
    single, equal, tensors = [], [], []
    for i, value in enumerate(plain):
        if value is TENSOR and firsts[i] == i:
            tensors.append(f"a{i}")
        elif value is TENSOR:
            single.append(f"a{i} is a{firsts[i]}")
        elif value is None or isinstance(value, bool):
            single.append(f"a{i} is {value}")
        elif isinstance(value, (type, torch.dtype)):
            variables[f"value{i}"] = value
            single.append(f"a{i} is value{i}")
        else:
            # Types count: 1, 1.0 and True are equal. They come before values because comparing a tensor would wait for
            # the GPU; most calls give the very object of the call before, which is the quickest to see.
            variables[f"type{i}"], variables[f"value{i}"] = type(value), value
            equal.append(f"(a{i} is value{i} or type(a{i}) is type{i} and a{i} == value{i})")
    flat = [f"not {tensor}.is_nested" for tensor in tensors]
    return [*single, *equal, *flat, f"check({', '.join(tensors)})"]


def _same_memory(view: torch.Tensor, source: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _like(result: torch.Tensor) -> torch.Tensor:
    """Return what torch.empty_like makes contiguous tensors of this shape from, in half the time of torch.empty."""
    return _element(result.dtype, result.device).expand(result.shape)


@functools.cache
def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device=device)


def extent_bytes(view: torch.Tensor | None) -> int:
    """Count the bytes from the first element of a view to the end of its last."""
    if view is None or view.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what the checks look at in a tensor, besides its address."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether other tensors, none of them nested, differ from these in nothing but
    addresses.

    It uses the guards that ``torch.compile`` puts before its compiled code: a tenth of the time of reading shapes and
    strides from Python. They also compare what decides between torch's implementations, such as requires_grad.
    """
    try:
        return _torch_guard(*tensors)
    except (AttributeError, ImportError, TypeError):  # this torch has others
        return _slow_guard(tensors)


def _torch_guard(*tensors: torch.Tensor) -> Callable[..., bool]:
    from torch._C._dynamo.guards import TensorGuards

    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def _slow_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    known = [*map(metadata, tensors)]
    return lambda *others: all(map(is_plain, others)) and [*map(metadata, others)] == known
