"""From an entry point's arguments to a launch; a call like one that has been checked before skips the checks.

What the checks look at, besides addresses, is in a call's key: shapes, strides, dtypes, devices and plain values. A
call with a known key needs its operands' addresses and nothing else. The first call with a key, a call that is too
malformed to have one, and a call whose addresses are unaligned or overlap go through the checks, which raise what there
is to raise.

Making and hashing a key takes longer than launching the kernel, and the layers of a model make the same few calls over
and over. So the latest calls are recognised without one, see :class:`Signature`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from operator import add, itemgetter
from typing import Any

import torch

from hopwell.kernels import Plan
from hopwell.kernels.launch import Addresses
from hopwell.kernels.plan import host_scales, operands
from hopwell.kernels.problem import AttentionProblem

# An entry point's arguments in one row: tensors, and plain values that can be compared. None for what is not given.
Arguments = tuple[Any, ...]
# The arguments that operands lie in, in the order of launch.Addresses.
Sources = tuple[torch.Tensor | None, ...]

# Places of the results among the operands: they may be allocated in the call.
OUT = Addresses._fields.index("out")
STATS = tuple(map(Addresses._fields.index, ("lse", "statistics")))  # no entry point gives both
CAPACITY = 4096  # keys kept for each entry point; serving meets a few a step, and all are cheap to make again
RECENT = 4  # calls recognised without a key: models alternate between few kinds of layers
ALIGNMENT_MASK = 15  # TMA reads and 16-byte stores


_data_ptr = torch.Tensor.data_ptr


def halves(cache: Any) -> tuple[Any, Any]:
    """K and V of a pair; the tensor of both and None otherwise."""
    return tuple(cache) if isinstance(cache, (tuple, list)) and len(cache) == 2 else (cache, None)


def on_device(scale: float | torch.Tensor) -> torch.Tensor | None:
    """A scale that the kernel reads from memory, if it is one."""
    return scale if isinstance(scale, torch.Tensor) else None


def single(sinks: Any) -> torch.Tensor | None:
    """Sinks given as a tensor, as a list of one, or not at all."""
    return sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks


def _key(arguments: Arguments) -> Hashable:
    """Everything that the checks look at but addresses. Types count: 1, 1.0 and True are equal."""
    return tuple(
        [(a.shape, a.stride(), a.dtype, a.device) if isinstance(a, torch.Tensor) else (type(a), a) for a in arguments]
    )


class Prepared:
    """A checked call: from here on addresses are all that is needed."""

    __slots__ = ("_empty_like", "_extents", "_gather", "_offsets", "_pick", "_plan", "_scales")

    def __init__(
        self, arguments: Arguments, sources: Callable[[Arguments], Sources], problem: AttentionProblem, plan: Plan
    ):
        tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        # Which argument is the source of an operand shows when every argument is an object of its own.
        marks = tuple([torch.empty(0) if i in tensors else argument for i, argument in enumerate(arguments)])
        number = {id(marks[i]): n for n, i in enumerate(tensors)}
        result, stats, nothing = range(len(tensors), len(tensors) + 3)
        places, offsets = [], []
        views = operands(problem, problem.out)
        for place, (view, source, mark) in enumerate(zip(views, sources(arguments), sources(marks), strict=True)):
            if place == OUT or view is None:
                places.append(result if place == OUT else nothing)
                offsets.append(0)
            elif place in STATS:
                places.append(stats)
                offsets.append(0)
            else:
                if source is None:
                    raise AssertionError(f"operand {place} of the kernel lies in no argument")
                places.append(number[id(mark)])
                offsets.append(view.data_ptr() - source.data_ptr())
        self._pick, self._gather = itemgetter(*tensors), itemgetter(*places)
        self._offsets = offsets if any(offsets) else None
        self._plan = plan
        self._scales = host_scales(problem)
        self._extents = tuple(_extent_bytes(view) for view in views[: OUT + 1])
        like_query = (problem.query.shape, problem.query.dtype) == (plan.output_shape, plan.output_dtype)
        self._empty_like = like_query and problem.query.is_contiguous()

    def output(self, query: torch.Tensor) -> torch.Tensor:
        """A new output tensor."""
        if self._empty_like:
            return torch.empty_like(query)
        return torch.empty(self._plan.output_shape, dtype=self._plan.output_dtype, device=query.device)

    def launch(self, arguments: Arguments, result: torch.Tensor, stats: torch.Tensor | None = None) -> bool:
        """Launch, unless the addresses have to be checked: then do nothing and return False."""
        stats_pointer = 0 if stats is None else stats.data_ptr()
        pointers = [*map(_data_ptr, self._pick(arguments)), result.data_ptr(), stats_pointer, 0]
        addresses = self._gather(pointers)
        if self._offsets is not None:
            addresses = tuple(map(add, addresses, self._offsets))
        q, k, v, out = addresses[: OUT + 1]
        if (q | k | v | out) & ALIGNMENT_MASK:
            return False
        q_bytes, k_bytes, v_bytes, out_bytes = self._extents
        end = out + out_bytes
        if (out < q + q_bytes and q < end) or (out < k + k_bytes and k < end) or (out < v + v_bytes and v < end):
            return False
        self._plan.launch(result, addresses, *self._scales)
        return True


def _extent_bytes(view: torch.Tensor | None) -> int:
    """Bytes from the first element of a view to the end of its last."""
    if view is None or view.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    return (last + 1) * view.element_size()


class Signature:
    """Recognises arguments that differ from these in nothing but the addresses of tensors.

    Metadata of tensors are compared by the guards that ``torch.compile`` puts before its compiled code: a tenth of the
    time of reading shapes and strides from Python.
    """

    __slots__ = ("_again", "_check", "_pick_plain", "_pick_tensors", "_plain", "_types")

    def __init__(self, arguments: Arguments):
        tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
        self._pick_plain = itemgetter(*(i for i in range(len(arguments)) if i not in tensors))
        self._plain = self._pick_plain(arguments)
        self._types = tuple(map(type, self._plain))
        # A guard of several tensors refuses one that is given twice; then it gets another guard for itself.
        once = [i for i in tensors if not any(arguments[i] is arguments[j] for j in tensors if j < i)]
        self._pick_tensors = itemgetter(*once)
        self._check = _guard(*self._pick_tensors(arguments))
        self._again = [(i, _guard(arguments[i])) for i in tensors if i not in once]

    def matches(self, arguments: Arguments) -> bool:
        plain = self._pick_plain(arguments)
        # Types first: after that no tensor is compared with a number, which would wait for the GPU.
        if tuple(map(type, plain)) != self._types or plain != self._plain:
            return False
        if not self._check(*self._pick_tensors(arguments)):
            return False
        for i, check in self._again:  # noqa: SIM110 (a generator would cost more than the checks)
            if not check(arguments[i]):
                return False
        return True


def _guard(*tensors: torch.Tensor) -> Any:
    from torch._C._dynamo import guards

    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


class Calls:
    """The checked calls of one entry point. ``sources`` finds the tensors that operands lie in."""

    def __init__(self, sources: Callable[[Arguments], Sources]) -> None:
        self.sources = sources
        self._prepared: dict[Hashable, Prepared] = {}
        self._recent: tuple[tuple[Signature, Prepared], ...] = ()

    def find(self, arguments: Arguments) -> Prepared | None:
        """What is prepared for a call with these arguments."""
        for signature, prepared in self._recent:
            if signature.matches(arguments):
                return prepared
        try:
            found = self._prepared.get(_key(arguments))
        except (RuntimeError, TypeError):  # a tensor without strides, a value without a hash
            return None
        if found is not None:
            # A torch whose guards are different ones: keys work as well.
            with contextlib.suppress(AttributeError, ImportError, TypeError):
                self._recent = ((Signature(arguments), found), *self._recent[: RECENT - 1])
        return found

    def run(self, arguments: Arguments, problem: AttentionProblem) -> torch.Tensor:
        """Launch a problem that has just been checked, and remember it for calls with arguments like these."""
        plan = Plan(problem)
        device = problem.query.device
        # What lies elsewhere was copied or read, and has to be in each call.
        here = all(argument.device == device for argument in arguments if isinstance(argument, torch.Tensor))
        if plan.has_work and plan.repeatable and here:
            if len(self._prepared) >= CAPACITY:
                self._prepared.clear()
            self._prepared[_key(arguments)] = Prepared(arguments, self.sources, problem, plan)
        return plan.execute(problem)
