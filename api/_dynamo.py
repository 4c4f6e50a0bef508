"""What ``torch.compile`` makes of a call: one graph break, and the call itself as it is without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])


def opaque(function: _F) -> _F:
    """Have Dynamo leave ``function``, and what it calls, alone.

    ``torch.compiler.disable`` would wrap it, which takes as long as a part of a warm call, and import Dynamo. These two
    marks are what it comes down to: callers do not trace into the function, and its frames are not compiled.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # this torch has no such strategies; frames are tried
        return function
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function
