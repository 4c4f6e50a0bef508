"""For every argument, a repeated call does the same as a first call."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from helpers.calls.mutations import Index, mutations
from helpers.calls.valid_calls import FORMS, HEADS, KV_HEADS, PAGE, PAGES, data, ints

import hopwell
from hopwell import cudnn, decode, mla, page, prefill
from hopwell._calls import gradients, launch
from hopwell._calls.repeat import metadata
from hopwell._entries import append as append_entry
from hopwell.kernels.append.geometry import append_operands

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # some kinds of tensors are prototypes
CALLS = {
    "trtllm_batch_context_with_kv_cache": (prefill, "_CONTEXT"),
    "trtllm_fmha_v2_prefill": (prefill, "_FMHA_V2"),
    "cudnn_batch_prefill_with_kv_cache": (cudnn, "_CUDNN"),
    "xqa_batch_decode_with_kv_cache": (decode, "_XQA"),
    "trtllm_batch_decode_with_kv_cache": (decode, "_TRTLLM"),
    "trtllm_batch_decode_with_kv_cache_mla": (mla, "_MLA"),
    "append_paged_kv_cache": (page, "_APPEND"),
}


def described(value: Any) -> Any:
    """Return the properties of a problem that its plan may depend on: all except addresses and the bound of lengths."""
    if isinstance(value, torch.Tensor):
        return metadata(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.name not in ("out", "max_kv_len")]
        return [described(getattr(value, name)) for name in names]
    return value.value if isinstance(value, enum.Enum) else repr(value)


class Launches:
    """Stand-in for the plans of attention and append: records addresses and constants of their launches."""

    def __init__(self, recorded: Any) -> None:
        self.noted: list[tuple[Any, ...]] = []
        outer = self

        class AttentionPlan(recorded):  # type: ignore[misc]
            def __init__(self, problem: Any):
                self.problem = described(problem)
                self.has_work = min(problem.batch, problem.query.shape[0], problem.max_q_len) > 0

            def execute(self, problem: Any, *_: Any) -> torch.Tensor:
                out = problem.out
                if out is None:
                    out = problem.query.new_empty((*problem.query.shape[:-1], problem.v_dim))
                addresses = launch.addresses_of(self.operands(problem, out))
                self.function(self.anchor, (*addresses, 0), *self.constants(*launch.host_scales(problem)))
                return out

            def constants(self, *scales: float) -> tuple[Any, ...]:
                return self.problem, *scales

            def function(self, anchor: object, addresses: tuple[int, ...], *constants: Any) -> None:
                outer.noted.append((addresses[:-1], constants))

        class AppendPlan:
            repeatable = True
            anchor = object()
            operands = staticmethod(append_operands)

            def __init__(self, problem: Any):
                self.constants = (described(problem),)
                self.has_work = problem.key.shape[0] > 0

            def launch(self, views: Any, *_: Any) -> None:
                self.function(self.anchor, tuple(0 if view is None else view.data_ptr() for view in views.values()))

            def function(self, anchor: object, addresses: tuple[int, ...], *constants: Any) -> None:
                outer.noted.append((addresses, constants or self.constants))

        self.attention, self.append = AttentionPlan, AppendPlan


@pytest.fixture
def launches(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> Launches:
    noted = Launches(recorded)
    monkeypatch.setattr(launch, "Plan", noted.attention)
    monkeypatch.setattr(append_entry, "AppendPlan", noted.append)
    return noted


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments that a call need not give."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def remembered(function: Callable[..., Any]) -> Any:
    """Return the calls that an entry has checked."""
    module, name = CALLS[function.__name__]
    known = getattr(module, name)
    return getattr(known, "_calls", known)


def forget(function: Callable[..., Any]) -> Any:
    """Replace an entry's calls by calls without memory; return the new calls."""
    module, name = CALLS[function.__name__]
    known = getattr(module, name)
    new = append_entry.AppendCalls() if module is page else launch.Calls(known.operand_map)
    setattr(module, name, new)
    return known


def restore(function: Callable[..., Any], known: Any) -> None:
    module, name = CALLS[function.__name__]
    setattr(module, name, known)


def outcome(function: Callable[..., Any], arguments: dict[str, Any], launches: Launches) -> Any:
    """Return the warnings, launches and results of a call, or its exception."""
    launches.noted.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results, error = function(**arguments), None
        except Exception as raised:
            results, error = None, raised
    if error is not None:
        assert not launches.noted, f"{error!r} was raised after a launch"
        assert isinstance(error, (TypeError, ValueError, NotImplementedError)), repr(error)
        assert any(name in str(error) for name in arguments), f"{error!r} names no argument"
        return type(error), str(error)
    told = [str(warning.message) for warning in caught if "inference only" in str(warning.message)]
    results = results if isinstance(results, tuple) else (results,)
    tensors = [part for result in results for part in (getattr(result, "data", result), getattr(result, "scale", None))]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    new = {tensor.data_ptr(): i for i, tensor in enumerate(tensors)}
    given = [any(result is argument for argument in arguments.values()) for result in results]
    launched = [([new.get(address, address) for address in noted], constants) for noted, constants in launches.noted]
    return told, launched, [metadata(tensor) for tensor in tensors], given


def append(cache: torch.dtype, stacked: bool) -> dict[str, Any]:
    """Return a valid call of the append entry."""
    packing, dims = 2 if cache is torch.uint8 else 1, (64, 16)

    def pool(width: int, dtype: torch.dtype) -> Any:
        shape = (PAGE, KV_HEADS, width)
        return data(PAGES, 2, *shape, dtype=dtype) if stacked else tuple(data(PAGES, *shape, dtype=dtype) for _ in "kv")

    return dict(
        append_key=data(5, KV_HEADS, dims[0]),
        append_value=data(5, KV_HEADS, dims[0]),
        batch_indices=ints(0, 0, 1, 1, 2),
        positions=ints(0, 1, 2, 3, 4),
        paged_kv_cache=pool(dims[0] // packing, cache),
        kv_indices=ints(0, 1, 2),
        kv_indptr=ints(0, 1, 2, 3),
        kv_last_page_len=ints(1, 1, 1),
        kv_layout="NHD",
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_sf=pool(dims[0] // 16, torch.float8_e4m3fn) if packing == 2 else None,
        uses_shared_paged_kv_idx=True,
        enable_pdl=None,
    )


def with_results(form: str, **more: Callable[[dict[str, Any]], Any]) -> Callable[[], dict[str, Any]]:
    """Return a function that builds the arguments of a form, with results to write into."""
    case = next(case for case in FORMS if str(case) == form)

    def build() -> dict[str, Any]:
        arguments = case.build()
        return arguments | {name: make(arguments) for name, make in more.items()}

    return build


def rows(arguments: dict[str, Any]) -> torch.Tensor:
    return torch.empty(arguments["query"].shape[:-1], dtype=torch.float32)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "context": (
        hopwell.trtllm_batch_context_with_kv_cache,
        with_results(
            "trtllm_batch_context_with_kv_cache-stacked-HND",
            out=lambda given: torch.empty_like(given["query"]),
            lse=rows,
            return_lse=lambda given: True,
            sinks=lambda given: torch.zeros(HEADS),
        ),
    ),
    "context-allocates": (
        hopwell.trtllm_batch_context_with_kv_cache,
        with_results("trtllm_batch_context_with_kv_cache-pair-NHD"),
    ),
    "context-nvfp4": (
        hopwell.trtllm_batch_context_with_kv_cache,
        with_results(
            "trtllm_batch_context_with_kv_cache-nvfp4-HND",
            out=lambda given: torch.empty_like(given["query"]),
        ),
    ),
    "fmha-v2": (
        hopwell.trtllm_fmha_v2_prefill,
        with_results(
            "trtllm_fmha_v2_prefill-contiguous",
            out=lambda given: torch.empty_like(given["qkv"][0]),
            save_softmax_stats=lambda given: True,
        ),
    ),
    "fmha-v2-pool": (hopwell.trtllm_fmha_v2_prefill, with_results("trtllm_fmha_v2_prefill-pair-HND")),
    "fmha-v2-packed": (hopwell.trtllm_fmha_v2_prefill, with_results("trtllm_fmha_v2_prefill-packed")),
    "cudnn": (
        hopwell.cudnn_batch_prefill_with_kv_cache,
        with_results(
            "cudnn_batch_prefill_with_kv_cache-ragged",
            out=lambda given: torch.empty(*given["q"].shape[:2], given["v_cache"].shape[-1], dtype=given["q"].dtype),
            lse=lambda given: torch.empty(3, 5, HEADS),
        ),
    ),
    "cudnn-allocates": (
        hopwell.cudnn_batch_prefill_with_kv_cache,
        with_results("cudnn_batch_prefill_with_kv_cache-paged"),
    ),
    "xqa": (
        hopwell.xqa_batch_decode_with_kv_cache,
        with_results(
            "xqa_batch_decode_with_kv_cache-nvfp4",
            out=lambda given: torch.empty_like(given["query"]),
            lse=rows,
            return_lse=lambda given: True,
            o_scale=lambda given: 1.0,
        ),
    ),
    "xqa-drafts": (hopwell.xqa_batch_decode_with_kv_cache, with_results("xqa_batch_decode_with_kv_cache-drafts")),
    "trtllm-ranks": (
        hopwell.trtllm_batch_decode_with_kv_cache,
        with_results(
            "trtllm_batch_decode_with_kv_cache-ranks",
            out=lambda given: torch.empty_like(given["query"]),
        ),
    ),
    "trtllm-causal": (
        hopwell.trtllm_batch_decode_with_kv_cache,
        with_results("trtllm_batch_decode_with_kv_cache-causal"),
    ),
    "mla": (
        hopwell.trtllm_batch_decode_with_kv_cache_mla,
        with_results(
            "trtllm_batch_decode_with_kv_cache_mla-dense",
            out=lambda given: torch.empty(*given["query"].shape[:-1], 512, dtype=given["query"].dtype),
        ),
    ),
    "mla-counted": (
        hopwell.trtllm_batch_decode_with_kv_cache_mla,
        with_results("trtllm_batch_decode_with_kv_cache_mla-counted"),
    ),
    "append": (hopwell.append_paged_kv_cache, lambda: append(torch.bfloat16, stacked=True)),
    "append-nvfp4": (hopwell.append_paged_kv_cache, lambda: append(torch.uint8, stacked=False)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_does_what_a_first_call_does(name: str, launches: Launches) -> None:
    function, build = CASES[name]
    arguments = defaults(function) | build()
    forget(function)
    with torch.no_grad():  # a first call that asks for no gradient
        for _ in range(3):
            function(**arguments)
    differing, seen = [], 0
    for change, mutated in mutations(arguments):
        remembered(function)._gradients = gradients.Notice()  # each change is the first to ask for a gradient
        function(**arguments)
        second, third = (outcome(function, mutated, launches) for _ in range(2))
        known = forget(function)
        first, again = (outcome(function, mutated, launches) for _ in range(2))
        restore(function, known)
        seen += 1
        differing += [(change, second, first)] if (second, third) != (first, again) else []
    assert not differing, f"{len(differing)} of {seen} changes: {differing[:8]}"
    assert seen > 100


@pytest.mark.parametrize("name", CASES)
def test_an_integer_that_changes_is_read_in_each_call(name: str, launches: Launches) -> None:
    function, build = CASES[name]
    arguments = defaults(function) | build()
    for argument, value in arguments.items():
        if type(value) is not int or argument == "skip_softmax_threshold_scale_factor":  # a float, 0 by default
            continue
        for number in (Index(value), numpy.array(value)):
            forget(function)
            mutated = {**arguments, argument: number}
            same = outcome(function, {**arguments, argument: value}, launches)
            assert all(outcome(function, mutated, launches) == same for _ in range(3)), argument
            for other in (value + 1, -1):
                if isinstance(number, Index):
                    number.value = other
                else:
                    number[...] = other
                changed = outcome(function, mutated, launches)
                assert changed == outcome(function, {**arguments, argument: other}, launches), argument


@pytest.mark.parametrize("name", CASES)
def test_minus_zero_is_zero(name: str, launches: Launches) -> None:
    """The two compare equal, so that a repeated call cannot tell them apart."""
    function, build = CASES[name]
    arguments = defaults(function) | build()
    for argument, value in arguments.items():
        if type(value) is float:
            forget(function)
            *_, last = [outcome(function, {**arguments, argument: zero}, launches) for zero in (0.0, 0.0, -0.0)]
            forget(function)
            assert outcome(function, {**arguments, argument: -0.0}, launches) == last, argument
