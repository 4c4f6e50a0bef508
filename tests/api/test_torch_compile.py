"""Every public function works under ``torch.compile``.

Dynamo traces layouts and merges, and puts ops into the graph for entries and append. It leaves functions of the host
alone.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.batches.append import FP8, NVFP4, Case, Data
from helpers.calls import valid_calls

import hopwell
from hopwell import layouts
from hopwell.kernels.append.geometry import append_operands
from hopwell.kernels.append.plan import AppendPlan
from hopwell.kernels.jit import settings

SUBMODULES = ("prefill", "decode", "mla", "page", "cudnn", "utils", "layouts")
SETUP = ("install", "uninstall", "warm_up")  # functions for the start of a program, not for models
TRACED = ("hopwell.layouts.", "hopwell.cascade.", "hopwell.decode.pack_mask")
MODULES = ("hopwell", *(f"hopwell.{name}" for name in SUBMODULES))


def append(case: Case) -> dict[str, Any]:
    data = Data(case)
    tokens = dict(append_key=data.key, append_value=data.value)
    places = dict(batch_indices=data.batch_indices, positions=data.positions)
    return tokens | places | dict(kv_indices=data.indices, kv_indptr=data.indptr) | data.options()


def nvfp4_append() -> dict[str, Any]:
    return append(Case(cache=NVFP4)) | dict(kv_last_page_len=None)


def append_slots(case: Case) -> dict[str, Any]:
    data = Data(case)
    return dict(append_key=data.key, append_value=data.value, slot_mapping=data.slots()) | data.options()


# Arguments of functions whose docstrings have no example.
ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    **{form.function.__name__: form.build for form in reversed(valid_calls.FORMS) if form.runs},
    "append_paged_kv_cache": lambda: append(Case(cache=FP8)),
    "append_paged_kv_cache_with_slot_mapping": lambda: append_slots(Case()),
    "nvfp4_quantize_append_paged_kv_cache": nvfp4_append,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": lambda: append_slots(Case(cache=NVFP4)),
    "batch_invariant": lambda: dict(enable=False),
    "check_device_data": lambda: dict(enable=False),
    "mla_workspace_bytes": lambda: dict(num_heads=16, max_seq_len=100),
    "xqa_workspace_bytes": lambda: dict(num_heads=8, num_kv_heads=2, head_dim=64, max_seq_len=100),
}


# Functions of the host, which no graph contains.
HOST = ("batch_invariant", "check_device_data", "mla_workspace_bytes", "xqa_workspace_bytes")


def public_functions() -> Iterator[Any]:
    """Yield each public function once, where its name is found first."""
    seen = set()
    for name in MODULES:
        module = importlib.import_module(name)
        for function in (getattr(module, public) for public in module.__all__):
            if inspect.isfunction(function) and function not in seen and function.__name__ not in SETUP:
                seen.add(function)
                yield pytest.param(function, id=f"{function.__module__}.{function.__name__}")


class Compiled:
    """Calls a function from compiled code, as a model does, and keeps the graphs that Dynamo traced."""

    def __init__(self, function: Callable[..., Any]):
        self.graphs: list[torch.fx.GraphModule] = []
        self._call = torch.compile(lambda *args, **keywords: function(*args, **keywords), backend=self._keep)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._call(*args, **keywords)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


def examples(function: Callable[..., Any], stand_in: Compiled) -> doctest.TestResults:
    """Run the examples in a docstring, with ``stand_in`` instead of the function."""
    module = inspect.getmodule(function)
    assert isinstance(module, ModuleType)
    names = {**vars(layouts), **vars(module), function.__name__: stand_in}
    found = doctest.DocTestFinder(recurse=False).find(function, function.__name__, module, names)
    runner = doctest.DocTestRunner(verbose=False)
    for test in found:
        runner.run(test)
    return runner.summarize(verbose=False)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("function", list(public_functions()))
def test_a_public_function_in_a_compiled_one(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    for switch in (settings.CHECK, settings.BATCH_INVARIANT):
        monkeypatch.setattr(switch, "given", None)  # and again after the test
    launches: list[Any] = []
    monkeypatch.setattr(AppendPlan, "__init__", lambda self, problem: None)
    monkeypatch.setattr(AppendPlan, "has_work", False, raising=False)
    monkeypatch.setattr(AppendPlan, "operands", staticmethod(append_operands), raising=False)
    monkeypatch.setattr(AppendPlan, "launch", lambda self, views, name: launches.append(views))
    build, called = ARGUMENTS.get(function.__name__), Compiled(function)
    if build is None:
        result = examples(function, called)
        assert result.attempted, "a public function has an example in its docstring, or arguments in this file"
        assert not result.failed
    else:
        called(**build())
        assert len(launches) == ("append" in function.__name__)
    if not f"{function.__module__}.{function.__name__}".startswith(TRACED):
        ops = [node.target for graph in called.graphs for node in graph.graph.nodes if node.op == "call_function"]
        assert len([op for op in ops if getattr(op, "namespace", "") == "hopwell"]) == len(called.graphs)
        assert bool(called.graphs) == (function.__name__ not in HOST)


def test_functions_are_found() -> None:
    found = {parameter.values[0].__name__ for parameter in public_functions()}
    assert {"append_paged_kv_cache", "get_seq_lens", "quantize_fp8", *ARGUMENTS} <= found
    assert hopwell.append_paged_kv_cache.__name__ in found
