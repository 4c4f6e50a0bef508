"""From an append problem to a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm_ffi

from hopwell.kernels import support
from hopwell.kernels.append.config import AppendAddresses, AppendGeometry, AppendProblem, resolve_append
from hopwell.kernels.config.base import page_and_head_stride
from hopwell.kernels.launch.arguments import address_of, named_tuple
from hopwell.kernels.launch.plan import bind, device_anchor, emulated_memory

# The tensors whose addresses are AppendAddresses, by the same names.
AppendOperands = named_tuple("AppendOperands", *AppendAddresses._fields)
CACHES = ("key_cache", "value_cache", "key_scales", "value_scales")


class AppendPlan:
    """A compiled kernel with its geometry. Addresses come with each launch."""

    def __init__(self, problem: AppendProblem):
        device = problem.key.device
        # The device's own, whatever HOPWELL_KERNELS says: every architecture has the same kernels.
        self.config = resolve_append(problem, support.native_arch(device))
        # Whether later calls may use it without a look at anything but the tensors: the emulator has settings.
        self.repeatable = device.type == "cuda"
        self.has_work = problem.key.shape[0] > 0
        if self.has_work:
            self.function = bind(self.config, device)
            self.constants: tuple[Any, ...] = (
                tvm_ffi.convert(tuple(geometry(problem))),
                *(1.0 if isinstance(scale, torch.Tensor) else scale for scale in (problem.k_scale, problem.v_scale)),
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


def geometry(problem: AppendProblem) -> AppendGeometry:
    """Return the run-time sizes and strides of a problem."""
    p, table = problem, problem.page_table
    has_rows = p.page_starts is None

    def strides(name: str, cache: torch.Tensor | None) -> dict[str, int]:
        if cache is None:
            return {f"{name}_page": 0, f"{name}_head": 0, f"{name}_row": 0}
        page, head = page_and_head_stride(cache)
        return {f"{name}_page": page, f"{name}_head": head, f"{name}_row": cache.stride(2)}

    return AppendGeometry(
        tokens=p.key.shape[0],
        kv_heads=p.key.shape[1],
        batch=p.batch,
        k_dim=p.key.shape[2],
        v_dim=p.value.shape[2],
        page_shift=p.key_cache.shape[2].bit_length() - 1,
        key_table_row=table.key.stride(0) if has_rows else 0,  # in page ids, whatever their dtype
        value_table_row=table.value.stride(0) if has_rows else 0,
        table_width=table.key.shape[-1],
        k_pages=p.key_cache.shape[0],
        v_pages=p.value_cache.shape[0],
        key_token=p.key.stride(0),
        key_head=p.key.stride(1),
        value_token=p.value.stride(0),
        value_head=p.value.stride(1),
        **strides("k", p.key_cache),
        **strides("v", p.value_cache),
        **strides("k_scale", p.key_scales),
        **strides("v_scale", p.value_scales),
    )
