"""Launch of an append problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import tvm_ffi

from hopwell.kernels import registry, support
from hopwell.kernels.append.config import AppendProblem
from hopwell.kernels.launch.arguments import addresses_of
from hopwell.kernels.launch.plan import bind, collected, device_anchor, emulated_memory

CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")


class AppendPlan:
    """A compiled kernel and its geometry. Addresses come with each launch."""

    def __init__(self, problem: AppendProblem):
        device = problem.key.device
        # HOPWELL_KERNELS is ignored: every architecture has the same append kernels.
        arch = support.native_arch(device)
        self.config = registry.resolve(problem, arch)
        made = registry.implementation_of(self.config)
        self.operands = made.operands
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

    def launch(self, views: Mapping[str, torch.Tensor | None], name: Callable[[str], str] = str) -> None:
        """Launch with the ``operands`` of a problem. ``name`` maps an operand to its name in the emulator's
        messages."""
        if self.has_work:
            # Caches are "inout": an append leaves most of a cache unchanged.
            spans = [(name(operand), "inout" if operand in CACHES else "in", view) for operand, view in views.items()]
            with contextlib.nullcontext() if self.repeatable else emulated_memory(spans):
                self.function(self.anchor, tuple(addresses_of(views)), *self.constants)
