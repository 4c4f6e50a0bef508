"""Entry points under ``torch.compile``: each call is one graph break and runs unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])


def opaque(function: _F) -> _F:
    """Exclude ``function`` and its callees from Dynamo.

    ``torch.compiler.disable`` would wrap the function, which costs a noticeable part of a warm call, and would import
    Dynamo. The two marks set here have the same effect: callers do not trace into the function, and its frames are not
    compiled.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # this torch has no such strategies and tries to compile the frames
        return function
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function
