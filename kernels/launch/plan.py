"""From a problem to a launch: a plan holds everything that shapes, strides, dtypes and options determine."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import tvm_ffi  # with hopwell, not in the first call, of whose 55 ms it would be 30 (H200's host, 2026-11-22)

from hopwell.kernels import registry, support
from hopwell.kernels.jit import toolchain
from hopwell.kernels.launch.arguments import addresses_of
from hopwell.kernels.launch.device_data import first_fault, rules_of
from hopwell.kernels.launch.geometry import host_value
from hopwell.kernels.launch.tickets import tickets
from hopwell.kernels.problem import AttentionProblem, LseLayout
from hopwell.kernels.registry import Buildable

if TYPE_CHECKING:
    from hopwell.emulator import Span

_planned: contextvars.ContextVar[dict[str, Buildable] | None] = contextvars.ContextVar("hopwell_planned", default=None)

RESULTS = ("out", "lse", "statistics", "skipped", "out_scales", "scratch")


@contextlib.contextmanager
def planning() -> Iterator[dict[str, Buildable]]:
    """Collect the kernels of the calls inside the block, by name. Nothing is compiled or launched.

    Calls that repeat an earlier call are launched nevertheless, so a caller forgets earlier calls first.
    """
    kernels: dict[str, Buildable] = {}
    token = _planned.set(kernels)
    try:
        yield kernels
    finally:
        _planned.reset(token)


def collected(config: Buildable) -> bool:
    """Return whether the calls only collect their kernels, and add ``config`` to these."""
    kernels = _planned.get()
    if kernels is not None:
        kernels[config.name] = config
    return kernels is not None


class Plan:
    """A compiled kernel with its geometry. Addresses and scales come with each launch."""

    def __init__(self, problem: AttentionProblem):
        query = problem.query
        arch = support.arch_of(query.device)
        config = registry.resolve(problem, arch)
        made = registry.implementation_of(config)
        self.operands = made.operands
        target = support.target_of(query.device)
        self.config = config if config.target == target else replace(config, compiled_for=target)
        self.has_work = min(problem.batch, query.shape[0], problem.max_q_len) > 0 and not collected(self.config)
        # Whether later calls may use it without a look at anything but the tensors: the emulator has settings.
        self.repeatable = query.device.type == "cuda"
        self._options = (*made.numbers(problem), int(problem.programmatic_launch))
        if self.has_work:
            sizes = made.geometry(problem, self.config)
            self._counters = made.counters(sizes, self.config)
            self.tickets = tickets(query.device, self._counters)
            self.tickets.reserve()
            self.function = bind(self.config, query.device)
            self.anchor = device_anchor(query.device)
            # One object holds them all: converting 30 integers in each call would cost more than the launch.
            self._geometry = tvm_ffi.convert(tuple(sizes))

    def launch(self, addresses: Sequence[int], softmax_scale: float, output_scale: float) -> None:
        """Launch on the current stream of the plan's device.

        ``addresses`` belong to ``operands``, in its order. The kernel uses a scale by value if its address is 0.
        """
        self.function(self.anchor, (*addresses, self.tickets.address()), *self.constants(softmax_scale, output_scale))

    def constants(self, softmax_scale: float, output_scale: float) -> tuple[Any, ...]:
        """Return the arguments of ``function`` after the anchor and the addresses."""
        return self._geometry, softmax_scale, output_scale, *self._options

    def execute(self, problem: AttentionProblem, name: Callable[[str], str] = str) -> torch.Tensor:
        """Compute the problem that the plan was made for; allocates the output where the problem has none. ``name``
        returns what the emulator's messages call an operand."""
        out = problem.out
        if out is None:
            query = problem.query
            out = torch.empty((*query.shape[:2], problem.v_dim), dtype=query.dtype, device=query.device)
        if not self.has_work and problem.lse is not None and problem.lse.layout is LseLayout.PADDED:
            problem.lse.tensor.fill_(-math.inf)  # as a kernel does with rows that no request has
        if self.has_work:
            views = self.operands(problem, out)
            addresses = addresses_of(views)
            if not self.repeatable:
                _check_device_data(problem, name)
            with contextlib.nullcontext() if self.repeatable else self._emulated_memory(views, name):
                self.launch(addresses, *host_scales(problem))
        return out

    @contextlib.contextmanager
    def _emulated_memory(self, views: Mapping[str, torch.Tensor | None], name: Callable[[str], str]) -> Iterator[None]:
        """Tell the emulator which memory a launch may reach."""
        from hopwell.emulator import EmulatorError, Span

        counters, size = self.tickets.address(), 4 * self._counters
        operands = [(name(one), "out" if one in RESULTS else "in", view) for one, view in views.items()]
        try:
            with emulated_memory(operands, [Span("tickets", counters, size)]):
                yield
        except EmulatorError:
            ctypes.memset(counters, 0, size)  # a stopped kernel leaves them as they are
            raise


def _check_device_data(problem: AttentionProblem, name: Callable[[str], str]) -> None:
    """Raise a fault for device data that leads a kernel out of its operands, where TMA would read zeros."""
    from hopwell import emulator

    fault = first_fault(rules_of(problem), defined=False)
    if fault is not None:
        raise emulator.MemoryFault(fault.message(name(fault.operand)))


@contextlib.contextmanager
def emulated_memory(
    operands: Iterable[tuple[str, str, torch.Tensor | None]], others: Iterable[Span] = ()
) -> Iterator[None]:
    """Tell the emulator which memory a launch may reach: names, roles and tensors of operands, and ``others``. Roles
    are defined by ``emulator.Span``: "in" is only read, "out" is only written, "inout" is partly written."""
    from hopwell import emulator

    spans = [emulator.span_of(name, view, role) for name, role, view in operands if view is not None]
    with emulator.memory([*spans, *others]):
        yield


@functools.cache
def device_anchor(device: torch.device) -> torch.Tensor:
    """Return a tensor without elements. TVM-FFI takes the device of a launch, and with it the stream, from a tensor
    argument. A tensor with elements would need the dimensions that the kernel was compiled for."""
    return torch.empty(0, dtype=torch.int32, device=device)


def bind(config: Buildable, device: torch.device) -> Any:
    """Return the launch function: the GPU's, or the same compiled kernel in the emulator for tensors on the CPU."""
    if device.type == "cuda":
        return toolchain.function(config)
    from hopwell import emulator

    built = toolchain.artifact(config)
    return emulator.load(built.object_file, built.ptx).function(config.name)


def execute(problem: AttentionProblem) -> torch.Tensor:
    """Compute ``problem`` on the current stream and return the output, allocated where the problem has none."""
    return Plan(problem).execute(problem)


def host_scales(problem: AttentionProblem) -> tuple[float, float]:
    """Return the softmax scale and the output scale as kernel arguments."""
    factor = 1.0 if problem.out_scales is None else problem.out_scales.factor
    return host_value(problem.softmax_scale), host_value(problem.output_scale) * factor
