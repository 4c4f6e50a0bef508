"""Entry points in graphs: compilers and dispatch modes see a custom op in place of a call, see
:mod:`hopwell.torch_ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_F = TypeVar("_F", bound=Callable[..., object])


def traced_as_op(function: _F) -> _F:
    """Make Dynamo trace a call of the op that belongs to ``function``, and never the function itself.

    Dynamo reads the marks that are set here when it meets the function. The marks cost an eager call nothing, and
    neither Dynamo nor the ops are imported before a call is traced. ``torch._dynamo.substitute_in_graph`` would have
    the same effect and import Dynamo.
    """
    name = function.__name__

    def traced(*args: Any, **keywords: Any) -> Any:
        from hopwell.torch_ops import TRACED

        return TRACED[name](*args, **keywords)

    function._torchdynamo_inline = traced  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # this torch has no such strategies
        return function
    # Code that runs after a graph break calls the function itself, whose frames are not to be compiled.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(function.__code__, skip)
    return function


def constant_in_graphs(function: _F) -> _F:
    """Make Dynamo call ``function`` and keep the result as a constant of the graph, instead of tracing it.

    ``torch.compiler.assume_constant_result`` sets the same mark and imports Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def has_no_data(value: Any) -> bool:
    """Return whether ``value`` is a tensor with a shape only: on the meta device, or traced by a compiler."""
    return isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, (FakeTensor, FunctionalTensor)))


def is_traced(value: Any) -> bool:
    """Return whether a call with the main tensor ``value`` goes through its op. It does if the tensor has no data, or
    if a dispatch mode, such as ``make_fx``'s, would not see the launch.
    """
    if has_no_data(value):
        return True
    # Modes that trace before autograd have no place on the stack.
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)


def call_op(function: Callable[..., Any], main: str, given: Mapping[str, Any]) -> Any:
    """Call the op that belongs to ``function``.

    Args:
        function: the entry.
        main: the name of the entry's first tensor argument.
        given: all arguments of the entry, and other local variables.

    Raises:
        ValueError: ``main`` has no data, and another tensor argument has.
    """
    from hopwell.torch_ops import TRACED

    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: given[name] for name in names}
    kind = given[main]
    while isinstance(kind, (tuple, list)):  # of tensors, as in the FMHAv2 entry
        kind = kind[0]
    # Tensors with data are constants of a graph, if torch's mode allows them.
    if has_no_data(kind) and not (
        isinstance(kind, FunctionalTensor) or (isinstance(kind, FakeTensor) and kind.fake_mode.allow_non_fake_inputs)
    ):
        for name, value in arguments.items():
            _check_without_data(name, value, main)
    return TRACED[function.__name__](**arguments)


def _check_without_data(name: str, value: Any, main: str) -> None:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    for part in parts:
        if isinstance(part, (tuple, list)):
            _check_without_data(name, part, main)
        elif isinstance(part, torch.Tensor) and not has_no_data(part):
            raise ValueError(f"{name} must be a tensor without data as {main} is, got a tensor on {part.device}")
