"""Calls under a dispatch mode of torch: ``make_fx`` with real tensors, and modes of users. The mode sees an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.batches.append import Case, Data
from helpers.calls.valid_calls import FORMS, Form
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import hopwell
from hopwell import page
from hopwell._entries import append as append_entry
from hopwell.kernels.append.geometry import append_operands

CASES = [case for case in FORMS if case.runs]


class Seen(TorchDispatchMode):
    """Keeps the names of hopwell's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hopwell":
            self.ops.append(func._opname)
        return func(*args, **(kwargs or {}))


class RecordingAppend:
    """A plan of append that counts launches."""

    has_work = repeatable = True
    anchor, constants = object(), ()
    operands = staticmethod(append_operands)
    launches = 0

    def __init__(self, problem: Any):
        pass

    def launch(self, *_: Any) -> None:
        RecordingAppend.launches += 1

    function = launch


@pytest.fixture(autouse=True)
def append_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append_entry, "AppendPlan", RecordingAppend)
    monkeypatch.setattr(page, "_APPEND", append_entry.AppendCalls())
    monkeypatch.setattr(RecordingAppend, "launches", 0)


def append_arguments() -> dict[str, Any]:
    data = Data(Case())
    tokens = dict(append_key=data.key, append_value=data.value, batch_indices=data.batch_indices)
    return dict(**tokens, positions=data.positions, kv_indices=data.indices, kv_indptr=data.indptr) | data.options()


def ops_of(graph: torch.fx.GraphModule) -> list[Any]:
    return [node for node in graph.graph.nodes if getattr(node.target, "namespace", "") == "hopwell"]


def traced(function: Callable[..., Any], arguments: dict[str, Any], pre_dispatch: bool) -> torch.fx.GraphModule:
    """Return make_fx's graph of a call whose first argument is the graph's input."""
    name = next(iter(arguments))
    model = lambda value: function(**{**arguments, name: value})  # noqa: E731
    return make_fx(model, pre_dispatch=pre_dispatch)(arguments[name])


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_make_fx_records_an_op(case: Form, pre_dispatch: bool, recorded: Any) -> None:
    """A first call and repeated ones, with results that are allocated and that are given."""
    for warm in (False, True):
        arguments = case.build()
        result = case.function(**arguments) if warm else None
        for _ in range(3 * warm):
            case.function(**arguments)
        graph = traced(case.function, arguments, pre_dispatch)
        (node,) = ops_of(graph)
        assert node.target._opname.startswith(case.function.__name__)
        launches = len(recorded.addresses)
        for _ in range(2):
            graph(next(iter(arguments.values())))
        assert len(recorded.addresses) == launches + 2
        if isinstance(result, torch.Tensor):
            (node,) = ops_of(traced(case.function, {**arguments, "out": result}, pre_dispatch))
            assert node.target._opname.endswith("_out")


def test_append_under_make_fx() -> None:
    arguments = append_arguments()
    for _ in range(3):
        hopwell.append_paged_kv_cache(**arguments)
    graph = traced(hopwell.append_paged_kv_cache, arguments, False)
    assert len(ops_of(graph)) == 1
    launches = RecordingAppend.launches
    graph(arguments["append_key"])
    assert RecordingAppend.launches == launches + 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mode_sees_an_op_for_each_call(case: Form, recorded: Any) -> None:
    arguments = case.build()
    for _ in range(3):
        case.function(**arguments)
    launches = len(recorded.addresses)
    with Seen() as mode:
        case.function(**arguments)
        case.function(**arguments)
    assert len(mode.ops) == 2
    case.function(**arguments)
    assert len(mode.ops) == 2
    assert len(recorded.addresses) == launches + 3
