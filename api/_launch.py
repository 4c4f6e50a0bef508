"""From an entry point's arguments to a launch; a call like one that has been checked before skips the checks.

What the checks look at, besides addresses, is in a call's key: shapes, strides, dtypes, devices and plain values. A
call with a known key needs its operands' addresses and nothing else. The first call with a key, a call that is too
malformed to have one, and a call whose addresses are unaligned or overlap go through the checks, which raise what there
is to raise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from hopwell.kernels import Plan
from hopwell.kernels.plan import host_scales, operands
from hopwell.kernels.problem import AttentionProblem

Sources = tuple[torch.Tensor | None, ...]  # the arguments that operands lie in, in the order of launch.Addresses

OUT = 3  # the output's place among them
CAPACITY = 4096  # keys kept for each entry point; serving meets a few a step, and all are cheap to make again
ALIGNMENT_MASK = 15  # TMA reads and 16-byte stores


def facts(value: torch.Tensor) -> Hashable:
    """What the checks look at in a tensor, besides its address."""
    return value.shape, value.stride(), value.dtype, value.device


def optional_facts(value: torch.Tensor | None) -> Hashable:
    """The same for an argument that may be None."""
    return None if value is None else facts(value)


def scale_facts(value: float | torch.Tensor, device: torch.device) -> Hashable:
    """The same for a scale. One that lies on the host as a tensor is read in each call, so it has no key."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.device != device:
        raise TypeError("a scale on another device has to be read")
    return facts(value)


def on_device(scale: float | torch.Tensor) -> torch.Tensor | None:
    """A scale that the kernel reads from memory, if it is one."""
    return scale if isinstance(scale, torch.Tensor) else None


def single(sinks: Any) -> torch.Tensor | None:
    """Sinks given as a tensor, as a list of one, or not at all."""
    return sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks


class Prepared:
    """A checked call: from here on addresses are all that is needed."""

    __slots__ = ("_empty_like", "_extents", "_offsets", "_plan", "_scales")

    def __init__(self, problem: AttentionProblem, sources: Sources, plan: Plan):
        views = operands(problem, problem.out)
        for place, (view, source) in enumerate(zip(views, sources, strict=True)):
            if place != OUT and (view is None) != (source is None):
                raise AssertionError(f"operand {place} of the kernel and its argument: one is missing")
        self._plan = plan
        self._scales = host_scales(problem)
        self._offsets = tuple(
            0 if view is None or source is None else view.data_ptr() - source.data_ptr()
            for view, source in zip(views, sources, strict=True)
        )
        self._extents = tuple(_extent_bytes(view) for view in views[: OUT + 1])
        like_query = (problem.query.shape, problem.query.dtype) == (plan.output_shape, plan.output_dtype)
        self._empty_like = like_query and problem.query.is_contiguous()

    def output(self, query: torch.Tensor) -> torch.Tensor:
        """A new output tensor."""
        if self._empty_like:
            return torch.empty_like(query)
        return torch.empty(self._plan.output_shape, dtype=self._plan.output_dtype, device=query.device)

    def launch(self, result: torch.Tensor, sources: Sources) -> bool:
        """Launch, unless the addresses have to be checked: then do nothing and return False."""
        addresses = [
            0 if source is None else source.data_ptr() + offset
            for source, offset in zip(sources, self._offsets)  # noqa: B905 (one length by construction, a hot path)
        ]
        q, k, v, out, *_ = addresses
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


class Calls:
    """The checked calls of one entry point."""

    def __init__(self) -> None:
        self._prepared: dict[Hashable, Prepared] = {}

    def find(self, make_key: Callable[[], Hashable]) -> tuple[Hashable, Prepared | None]:
        """A call's key, None where its arguments are too malformed to have one, and what is prepared for it."""
        try:
            key = make_key()
            return key, self._prepared.get(key)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None, None

    def run(self, key: Hashable, problem: AttentionProblem, sources: Sources) -> torch.Tensor:
        """Launch a problem that has just been checked, and remember it under its key."""
        plan = Plan(problem)
        if plan.has_work and key is not None:
            if len(self._prepared) >= CAPACITY:
                self._prepared.clear()
            self._prepared[key] = Prepared(problem, sources, plan)
        return plan.execute(problem)
