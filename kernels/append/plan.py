"""Launch of an append problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from hopwell.kernels import registry, support
from hopwell.kernels.append.config import AppendAddresses, AppendProblem
from hopwell.kernels.launch.arguments import address_of, named_tuple
from hopwell.kernels.launch.plan import bind, collected, device_anchor, emulated_memory

# Tensors whose addresses are AppendAddresses, with the same names.
AppendOperands = named_tuple("AppendOperands", *AppendAddresses._fields)
CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")


class AppendPlan:
    """A compiled kernel and its geometry. Addresses come with each launch."""

    def __init__(self, problem: AppendProblem):
        device = problem.key.device
        # HOPWELL_KERNELS is ignored: every architecture has the same append kernels.
        arch = support.native_arch(device)
        self.config = registry.resolve(problem, arch)
        made = registry.implementation_of(self.config)
        # Whether later calls may reuse the plan after comparing only tensors; the emulator also has settings.
        self.repeatable = device.type == "cuda"
        self.has_work = problem.key.shape[0] > 0 and not collected(self.config)
        if self.has_work:
            self.function = bind(self.config, device)
            self.constants: tuple[Any, ...] = (
                tvm_ffi.convert(tuple(made.geometry(problem, self.config))),
                *made.numbers(problem),
                int(problem.programmatic_launch),
            )
            self.anchor = device_anchor(device)

    def launch(self, views: Sequence[torch.Tensor | None], name: Callable[[str], str] = str) -> None:
        """Launch with the ``operands`` of a problem. ``name`` maps an operand to its name in the emulator's
        messages."""
        if self.has_work:
            named = [*zip(AppendAddresses._fields, views, strict=True)]
            # Caches are "inout": an append leaves most of a cache unchanged.
            spans = [(name(operand), "inout" if operand in CACHES else "in", view) for operand, view in named]
            with contextlib.nullcontext() if self.repeatable else emulated_memory(spans):
                addresses = tuple([address_of(operand, view) for operand, view in named])
                self.function(self.anchor, addresses, *self.constants)


def operands(problem: AppendProblem) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of :class:`AppendAddresses`, in its order."""
    p, table = problem, problem.page_table
    return AppendOperands(
        key=p.key,
        value=p.value,
        key_cache=p.key_cache,
        value_cache=p.value_cache,
        key_scales=p.key_scales,
        value_scales=p.value_scales,
        batch_indices=p.batch_indices,
        positions=p.positions,
        key_table=None if table is None else table.key,
        value_table=None if table is None else table.value,
        page_starts=p.page_starts,
        k_scale=p.k_scale if isinstance(p.k_scale, torch.Tensor) else None,
        v_scale=p.v_scale if isinstance(p.v_scale, torch.Tensor) else None,
    )
