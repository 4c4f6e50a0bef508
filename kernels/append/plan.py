"""From an append problem to a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from hopwell.kernels import registry, support
from hopwell.kernels.append.config import AppendAddresses, AppendProblem
from hopwell.kernels.launch.arguments import address_of, named_tuple
from hopwell.kernels.launch.plan import bind, device_anchor, emulated_memory
from hopwell.kernels.problem import Family

# The tensors whose addresses are AppendAddresses, by the same names.
AppendOperands = named_tuple("AppendOperands", *AppendAddresses._fields)
CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")


class AppendPlan:
    """A compiled kernel with its geometry. Addresses come with each launch."""

    def __init__(self, problem: AppendProblem):
        device = problem.key.device
        # The device's own, whatever HOPWELL_KERNELS says: every architecture has the same kernels.
        arch = support.native_arch(device)
        made = registry.implementation(Family.APPEND, arch)
        self.config = made.resolve(problem, arch)
        # Whether later calls may use it without a look at anything but the tensors: the emulator has settings.
        self.repeatable = device.type == "cuda"
        self.has_work = problem.key.shape[0] > 0
        if self.has_work:
            self.function = bind(self.config, device)
            self.constants: tuple[Any, ...] = (
                tvm_ffi.convert(tuple(made.geometry(problem, self.config))),
                *made.numbers(problem),
                int(problem.programmatic_launch),
            )
            self.anchor = device_anchor(device)

    def launch(self, views: Sequence[torch.Tensor | None], name: Callable[[str], str] = str) -> None:
        """Launch with ``operands`` of the plan's problem. ``name`` returns what the emulator's messages call one."""
        if self.has_work:
            named = [*zip(AppendAddresses._fields, views, strict=True)]
            # Most of a cache stays as it is.
            spans = [(name(operand), "inout" if operand in CACHES else "in", view) for operand, view in named]
            with contextlib.nullcontext() if self.repeatable else emulated_memory(spans):
                addresses = tuple([address_of(operand, view) for operand, view in named])
                self.function(self.anchor, addresses, *self.constants)


def operands(problem: AppendProblem) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors whose addresses the kernel gets, in the order of :class:`AppendAddresses`."""
    p = problem
    return AppendOperands(
        key=p.key,
        value=p.value,
        key_cache=p.key_cache,
        value_cache=p.value_cache,
        key_scales=p.key_scales,
        value_scales=p.value_scales,
        batch_indices=p.batch_indices,
        positions=p.positions,
        key_table=p.page_table.key,
        value_table=p.page_table.value,
        page_starts=p.page_starts,
        k_scale=p.k_scale if isinstance(p.k_scale, torch.Tensor) else None,
        v_scale=p.v_scale if isinstance(p.v_scale, torch.Tensor) else None,
    )
