"""Warning that no gradient flows through a call, and refusal of tangents: hopwell is inference only."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from hopwell.kernels.jit import settings
from hopwell.utils import FP4Tensor

UNUSED = ("workspace_buffer", "multi_ctas_kv_counter_buffer")  # their contents do not affect results


class Notice:
    """The warning of one entry point, given once."""

    def __init__(self) -> None:
        self._was_given = False

    def is_due(self, arguments: tuple[Any, ...]) -> bool:
        """Return whether the warning must be given before a call with these arguments is repeated."""
        if self._was_given or not torch.is_grad_enabled():
            return False
        return any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments)

    def give(self, arguments: Iterable[tuple[str, Any]]) -> None:
        """Warn if one of the checked ``arguments``, (name, value) pairs, requires a gradient.

        Raises:
            ValueError: in place of the warning, if device data is checked (``HOPWELL_CHECK``). Also if an argument has
                a tangent of forward-mode differentiation, which would be lost.
        """
        if forward_ad._current_level >= 0:
            arguments = tuple(arguments)
            _refuse_tangents(arguments)
        if not torch.is_grad_enabled() or (self._was_given and not settings.CHECK.is_on):
            return
        for name, value in arguments:
            if name not in UNUSED and any(tensor.requires_grad for tensor in _tensors(value)):
                message = (
                    f"inference only: no gradient flows through {name}; use torch.no_grad(), torch.inference_mode() or "
                    "detach()"
                )
                if settings.CHECK.is_on:
                    raise ValueError(message)
                warnings.warn(message, UserWarning, stacklevel=_frames_to_caller())
                self._was_given = True
                return


def _refuse_tangents(arguments: Iterable[tuple[str, Any]]) -> None:
    for name, value in arguments:
        if name not in UNUSED and any(forward_ad.unpack_dual(part).tangent is not None for part in _tensors(value)):
            raise ValueError(f"inference only: no tangent flows through {name}; use forward_ad.unpack_dual or detach()")


def _frames_to_caller() -> int:
    """Return the number of frames from the caller of this function to the code that calls an entry point."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("hopwell."):
        frame, count = frame.f_back, count + 1
    return count


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, FP4Tensor):
        yield from (value.data, value.scale)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
