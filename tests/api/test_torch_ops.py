"""Custom ops: schemas, fake results and gradients, and the ops that compilers put into graphs for calls of entries.

A stand-in for the kernels writes zeros. tests/append/test_torch_compile.py runs kernels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.calls import valid_calls
from helpers.calls.valid_calls import CONTEXT, CUDNN, FMHA, FORMS, FP8, FUNCTIONS, MLA, U8, XQA, Form, data, form, ints
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import hopwell
from hopwell import page, torch_ops
from hopwell._calls import launch
from hopwell._entries import append as append_entry
from hopwell.kernels.append.geometry import append_operands
from hopwell.utils import FP4Tensor
from tests.api.conftest import RecordingPlan

OPS = torch.ops.hopwell
CASES = [case for case in FORMS if case.runs]


class ZeroPlan(RecordingPlan):
    """A plan whose kernel writes zeros to all results."""

    repeatable = False  # a repeated call would write nothing

    def execute(self, problem: Any, name: Callable[[str], str] = str) -> torch.Tensor:
        out = super().execute(problem, name)
        extra = (part and part.tensor for part in (problem.lse, problem.out_scales))
        for result in (out, problem.statistics, *extra):
            if result is not None:
                result.copy_(torch.zeros(result.shape))
        return out


class ZeroAppend:
    """The same for append: the first key and value of each page are zeros."""

    has_work, repeatable = True, False
    operands = staticmethod(append_operands)

    def __init__(self, problem: Any):
        self._problem = problem

    def launch(self, *_: Any) -> None:
        for cache in (self._problem.key_cache, self._problem.value_cache):
            cache[:, :, 0] = 0


@pytest.fixture(autouse=True)
def zeros(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "Plan", ZeroPlan)
    monkeypatch.setattr(append_entry, "AppendPlan", ZeroAppend)
    monkeypatch.setattr(page, "_APPEND", append_entry.AppendCalls())
    torch._dynamo.reset()


def append_arguments(stacked: bool = True) -> dict[str, Any]:
    cache = torch.ones(4, 2, 16, 2, 64, dtype=torch.bfloat16)
    return dict(
        append_key=data(3, 2, 64),
        append_value=data(3, 2, 64),
        batch_indices=ints(0, 0, 0),
        positions=ints(0, 1, 17),
        paged_kv_cache=cache if stacked else (cache[:, 0], cache[:, 1]),
        block_tables=ints(2, 3)[None],
    )


def slot_arguments() -> dict[str, Any]:
    named = append_arguments()
    kept = ("append_key", "append_value", "paged_kv_cache")
    return {name: named[name] for name in kept} | dict(slot_mapping=torch.tensor([0, -1, 33]))


def nvfp4_output() -> dict[str, Any]:
    cache = valid_calls.stacked("HND", FP8)
    return {**valid_calls.context(cache, "HND", data(8, 4, 64, dtype=FP8)), "out_dtype": "nvfp4", "o_sf_scale": 1.0}


def narrower_values() -> dict[str, Any]:
    """Return drafts over a cache whose V has fewer columns than K."""
    tokens, heads, _ = form(XQA, "drafts")["query"].shape
    cache = data(4, 16, 2, 192), data(4, 16, 2, 128)
    return {**form(XQA, "drafts"), "query": data(tokens, heads, 192), "kv_cache": cache, "kv_layout": "NHD"}


def results_of(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the arguments with every combination of given and requested results."""
    flag = "save_softmax_stats" if name == FMHA else "return_lse"
    shapes = [{flag: False}, {flag: True}]
    out, second = FUNCTIONS[name](**{**arguments, flag: True})
    shapes += [{flag: asked, "out": out} for asked in (False, True)]
    if name != FMHA:
        shapes += [{flag: True, "lse": second}, {flag: True, "lse": second, "out": out}, {flag: False, "lse": second}]
    return [{**arguments, **shape} for shape in shapes]


RESULTS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    (CONTEXT, lambda: form(CONTEXT, "fp8-HND")),
    (CONTEXT, nvfp4_output),
    (FMHA, lambda: form(FMHA, "pair-HND")),
    (FMHA, lambda: form(FMHA, "packed")),
    (FMHA, lambda: {**form(FMHA, "separate"), "out_dtype": "bfloat16"}),
    (CUDNN, lambda: form(CUDNN, "ragged")),
    (CUDNN, lambda: {**form(CUDNN, "paged"), "lse_layout": "HN"}),
    (CUDNN, lambda: {**form(CUDNN, "ragged"), "lse_layout": "HN", "batch_offsets_stats": ints(0, 3, 3, 8)}),
    (XQA, lambda: form(XQA, "drafts")),
    (XQA, narrower_values),
    (MLA, lambda: form(MLA, "several-tokens")),
]


def described(results: Any) -> Any:
    """Return what a fake result must have in common with a real one."""
    if isinstance(results, tuple):
        return tuple(map(described, results))
    if isinstance(results, FP4Tensor):
        return described(results.data), described(results.scale), results.original_shape
    return results if results is None else (results.shape, results.dtype, results.stride())


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a function to all tensors of an argument, or of a dictionary of arguments."""
    if isinstance(value, dict):
        return {name: each_tensor(function, part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(each_tensor(function, part) for part in value)
    if isinstance(value, FP4Tensor):
        parts = function(value.data), function(value.scale)
        return FP4Tensor(*parts, value.scale_start_index, value.original_shape)
    return function(value) if isinstance(value, torch.Tensor) else value


def in_graph(function: Callable[..., Any], backend: str = "eager") -> Callable[..., Any]:
    """Return a compiled model that consists of one call of ``function``."""
    return torch.compile(lambda **arguments: function(**arguments), backend=backend, fullgraph=True)


class OpCalls(TorchDispatchMode):
    """Keeps calls of hopwell's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "hopwell":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


# Arguments of entries, by the op that serves them.
CHECKED: dict[str, Callable[[], dict[str, Any]]] = {
    "trtllm_batch_context_with_kv_cache": lambda: form(CONTEXT, "stacked-HND"),
    "trtllm_fmha_v2_prefill": lambda: form(FMHA, "contiguous"),
    "trtllm_fmha_v2_prefill_out_stats": lambda: {
        **form(FMHA, "contiguous"),
        "out": data(8, 4, 64),
        "save_softmax_stats": True,
    },
    "cudnn_batch_prefill_with_kv_cache": lambda: {**form(CUDNN, "paged"), "return_lse": False},
    "cudnn_batch_prefill_with_kv_cache_lse": lambda: form(CUDNN, "ragged"),
    "xqa_batch_decode_with_kv_cache": lambda: form(XQA, "stacked-NHD"),
    "xqa_batch_decode_with_kv_cache_out": lambda: {**form(XQA, "ragged"), "out": data(8, 4, 64)},
    "trtllm_batch_decode_with_kv_cache": lambda: valid_calls.xqa(valid_calls.stacked("HND"), "HND"),
    "trtllm_batch_decode_with_kv_cache_mla": lambda: form(MLA, "dense"),
    "append_paged_kv_cache": append_arguments,
    "append_paged_kv_cache_with_slot_mapping": slot_arguments,
    "get_seq_lens": lambda: dict(kv_indptr=ints(0, 3), kv_last_page_len=ints(13), page_size=16),
    "get_batch_indices_positions": lambda: dict(append_indptr=ints(0, 1, 3), seq_lens=ints(5, 5), nnz=4),
}


@pytest.mark.parametrize("op", CHECKED)
def test_torch_checks_the_op(op: str) -> None:
    """torch's opcheck: the schema, autograd keys, fake results, and AOT dispatch with dynamic shapes."""
    entry = max((name for name in torch_ops.TRACED if op.startswith(name)), key=len)
    with torch.no_grad(), OpCalls() as mode:
        torch_ops.TRACED[entry](**CHECKED[op]())
    ((called, args, keywords),) = mode.calls
    assert called is getattr(OPS, op).default
    opcheck(called, args, keywords)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_meta_tensors_give_the_shapes_of_results(case: Form) -> None:
    want = described(case.function(**case.build()))
    meta = case.function(**each_tensor(lambda tensor: tensor.to("meta"), case.build()))
    assert described(meta) == want


@pytest.mark.parametrize("case", RESULTS, ids=lambda case: case[0])
def test_every_combination_of_results(case: tuple[str, Callable[[], dict[str, Any]]]) -> None:
    """Shapes of fake results, results that are given, and results of a full graph equal the entry's."""
    name, build = case
    for arguments in results_of(name, build()):
        function = FUNCTIONS[name]
        want = described(function(**arguments))
        with FakeTensorMode() as mode:
            assert described(function(**each_tensor(mode.from_tensor, arguments))) == want
        torch._dynamo.reset()
        got = in_graph(function)(**arguments)
        assert described(got) == want
        out, second = got if isinstance(got, tuple) else (got, None)
        assert arguments.get("out") is None or out is arguments["out"]
        assert arguments.get("lse") is None or second is None or second is arguments["lse"]


def test_ops_take_the_arguments_of_their_entries() -> None:
    assert set(torch_ops.TRACED) == {max((n for n in torch_ops.TRACED if op.startswith(n)), key=len) for op in CHECKED}
    schema = OPS.xqa_batch_decode_with_kv_cache_out.default._schema
    kinds = {argument.name: str(argument.type) for argument in schema.arguments}
    assert (kinds["k_cache"], kinds["v_cache"]) == ("Tensor", "Optional[Tensor]")
    assert (kinds["bmm1_scale"], kinds["bmm1_scale_tensor"]) == ("float", "Optional[Tensor]")
    assert "workspace_buffer" not in kinds
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["out", "lse"]
    written = [a.name for a in OPS.append_paged_kv_cache.default._schema.arguments if a.is_write]
    assert written == ["paged_k_cache", "paged_v_cache", "k_cache_sf", "v_cache_sf"]


def test_a_tensor_with_data_beside_tensors_without_is_named() -> None:
    arguments = each_tensor(lambda tensor: tensor.to("meta"), form(XQA, "stacked-NHD"))
    for name in ("block_tables", "kv_cache"):
        real = form(XQA, "stacked-NHD")[name]
        with pytest.raises(ValueError, match=f"{name} must be a tensor without data as query is"):
            FUNCTIONS[XQA](**{**arguments, name: real})
        mode = FakeTensorMode()
        fake = each_tensor(mode.from_tensor, form(XQA, "stacked-NHD"))
        with pytest.raises(ValueError, match=f"{name} must be a tensor without data as query is"):
            FUNCTIONS[XQA](**{**fake, name: real})


def test_arguments_that_must_be_none_are_refused_in_graphs() -> None:
    arguments = each_tensor(lambda tensor: tensor.to("meta"), valid_calls.xqa(valid_calls.stacked("HND"), "HND"))
    with pytest.raises(ValueError, match="request_order_plan must be None"):
        hopwell.trtllm_batch_decode_with_kv_cache(**arguments, request_order_plan=object())


def test_changing_lengths_and_tensor_scales_need_no_new_graph() -> None:
    counter = CompileCounter()
    arguments = form(XQA, "stacked-NHD")

    def call(query: torch.Tensor, length: int, scale: Any) -> torch.Tensor:
        return FUNCTIONS[XQA](**{**arguments, "query": query, "max_seq_len": length, "bmm1_scale": scale})

    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for length in (20, 21, 25, 30, 37):
        compiled(arguments["query"], length, torch.tensor([length / 100]))
    assert counter.frame_count == 2  # one for the first length, and one for all lengths
    for scale in (0.5, 0.25):
        compiled(arguments["query"], 37, scale)
    assert counter.frame_count == 4


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    arguments = append_arguments()

    class Model(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, cache: torch.Tensor, table: torch.Tensor) -> Any:
            tokens = dict(append_key=key, append_value=key, paged_kv_cache=cache, block_tables=table)
            hopwell.append_paged_kv_cache(**{**arguments, **tokens})
            return hopwell.xqa_batch_decode_with_kv_cache(query, cache, torch.empty(0), table, ints(20), 32)

    def inputs() -> tuple[torch.Tensor, ...]:
        return data(1, 4, 64), arguments["append_key"], append_arguments()["paged_kv_cache"], ints(2, 3)[None]

    pages = torch.export.Dim("pages", min=2)
    dynamic = (None, None, {0: pages}, None)
    program = torch.export.export(Model(), inputs(), dynamic_shapes=dynamic, strict=strict)
    assert "hopwell.xqa_batch_decode_with_kv_cache" in program.graph_module.code.replace("ops.", "")
    query, key, cache, table = inputs()
    out = program.module()(query, key, cache, table)
    assert out.shape == query.shape
    assert not cache[:, :, 0].any()
    assert cache[:, :, 1:].all()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_backward_raises_when_it_runs(backend: str) -> None:
    """A model in grad mode runs. Results that are written have no gradient."""
    arguments = form(XQA, "stacked-NHD")
    query = arguments["query"].clone().requires_grad_()

    def call(query: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        return FUNCTIONS[XQA](**{**arguments, "query": query, "out": out}) * 2

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    result = compiled(query, None)
    with pytest.raises(RuntimeError, match=r"inference only: hopwell::xqa_batch_decode_with_kv_cache has no backward"):
        result.sum().backward()
    assert not compiled(query, torch.empty_like(query)).requires_grad
    inputs = query, arguments["kv_cache"], None, arguments["block_tables"], arguments["seq_lens"], 37
    with pytest.raises(RuntimeError, match="xqa_batch_decode_with_kv_cache_out has no backward"):
        OPS.xqa_batch_decode_with_kv_cache_out(*inputs, out=torch.empty_like(arguments["query"]))
    key = data(3, 2, 64).requires_grad_()
    in_graph(hopwell.append_paged_kv_cache, backend)(**{**append_arguments(), "append_key": key})


@pytest.mark.parametrize("stacked", [True, False])
def test_the_second_name_of_append_is_traced(stacked: bool) -> None:
    cache, scales = data(4, 2, 16, 2, 32, dtype=U8), data(4, 2, 16, 2, 4, dtype=FP8)
    arguments = {**append_arguments(), "paged_kv_cache": cache, "kv_cache_sf": scales}
    del arguments["block_tables"]
    arguments |= dict(kv_indices=ints(2, 3), kv_indptr=ints(0, 2), kv_last_page_len=None, k_scale=1.0, v_scale=1.0)
    if not stacked:
        arguments |= dict(paged_kv_cache=(cache[:, 0], cache[:, 1]), kv_cache_sf=(scales[:, 0], scales[:, 1]))
    cache.fill_(1)
    in_graph(hopwell.nvfp4_quantize_append_paged_kv_cache, "aot_eager")(**arguments)
    assert not cache[:, :, 0].any()
    assert cache[:, :, 1:].all()


def test_a_first_call_may_be_a_traced_one() -> None:
    """Neither Dynamo nor the ops are imported before."""
    code = """
import sys, hopwell, torch
from hopwell import decode, mla, page, prefill
assert not {"torch._dynamo", "hopwell.torch_ops"} & set(sys.modules)
call = lambda starts: hopwell.get_seq_lens(starts, starts[1:], 16)
assert torch.compile(call, backend="eager", fullgraph=True)(torch.tensor([0, 1])).tolist() == [1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
