"""A call like a checked one goes straight to the kernel, with the operands of this call only."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import valid_calls
from helpers.calls.operations import operations_of
from helpers.calls.valid_calls import CONTEXT, CUDNN, FMHA, FUNCTIONS, IN_PLACE, MLA, XQA, Form, form

from hopwell._calls import launch, repeat

# The log-sum-exp of cuDNN's entry is allocated anew in each call: test_warm_cudnn_lse looks at that.
RUNNING = [case for case in IN_PLACE if not case.function.__name__.startswith(CUDNN)]


HOST = Path(__file__).parents[2] / "docs" / "kernels" / "host.md"


def output_of(results: Any) -> torch.Tensor:
    """Return the output of a call, which may have a log-sum-exp beside it."""
    return results[0] if isinstance(results, tuple) else results


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_a_warm_call_has_the_addresses_that_a_checked_call_has(case: Form, recorded: Any) -> None:
    case.function(**case.build())
    case.function(**case.build())
    arguments = copy.deepcopy(case.build())
    arguments["out"] = output_of(case.function(**arguments))
    assert len(recorded.problems) == 1, "a later call went through the checks again"
    warm = recorded.addresses[-1]
    recorded.problems.clear()
    case.function(**arguments)
    assert len(recorded.problems) == 1, "an output given where there was none is another call"
    assert recorded.addresses[-1] == warm


def of_a_warm_call(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Return the operations on tensors."""
    for _ in range(3):
        function(**arguments)
    return operations_of(lambda: function(**arguments))


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_a_warm_call_makes_no_tensors_but_its_results(case: Form) -> None:
    """A warm call makes not even a view, which would take about as long as the rest of the call."""
    arguments = case.build()
    results = case.function(**arguments)
    out, *stats = results if isinstance(results, tuple) else (results,)
    of_stats = ["empty_like"] if stats and "lse" not in arguments else []
    assert of_a_warm_call(case.function, arguments) == ["empty_like", *of_stats]
    assert of_a_warm_call(case.function, {**arguments, "out": out}) == of_stats


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_a_remembered_call_keeps_no_memory(case: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses memory that stays in the pool of a CUDA graph tree, in which a first call may run."""
    made: list[torch.Tensor] = []
    like = repeat._like
    monkeypatch.setattr(repeat, "_like", lambda result: made.append(like(result)) or made[-1])
    for _ in range(2):
        case.function(**case.build())
    assert made
    assert not any(part.untyped_storage().nbytes() for part in made)


@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_results_of_warm_calls_are_alike_and_apart(case: Form) -> None:
    results = [output_of(case.function(**case.build())) for _ in range(4)]
    assert len({(one.shape, one.stride(), one.dtype, one.device) for one in results}) == 1
    assert len({one.data_ptr() for one in results}) == len(results)
    assert all(one._base is None for one in results[1:])


def test_warm_cudnn_lse(recorded: Any) -> None:
    for name in ("ragged", "paged"):
        for stats in (None, valid_calls.cumulative(valid_calls.Q_LENS, valid_calls.HEADS)):
            recorded.problems.clear()
            arguments = form(CUDNN, name)
            arguments["batch_offsets_stats"] = stats
            FUNCTIONS[CUDNN](**arguments)
            out, lse = FUNCTIONS[CUDNN](**arguments)
            assert len(recorded.problems) == 1
            assert recorded.addresses[-1][3] == out.data_ptr()
            assert recorded.addresses[-1][15] == lse.data_ptr()
            assert lse.shape == (valid_calls.BATCH, 5, valid_calls.HEADS)
            arguments["out"], arguments["lse"] = out, lse
            assert FUNCTIONS[CUDNN](**arguments)[1] is lse
            assert recorded.addresses[-1] == recorded.addresses[-2]
            FUNCTIONS[CUDNN](**{**arguments, "lse": lse.fill_(7)})
            assert (lse == 7).all(), "rows are for the kernel to fill, without a launch more"
            none = FUNCTIONS[CUDNN](**{**arguments, "return_lse": False})[1]
            assert none is None
            assert not any(recorded.addresses[-1][15:])


def test_warm_statistics(recorded: Any) -> None:
    arguments = {**form(FMHA, "contiguous"), "save_softmax_stats": True}
    for _ in range(3):
        out, stats = FUNCTIONS[FMHA](**arguments)
        assert recorded.addresses[-1][3] == out.data_ptr()
        assert (
            [address for address in recorded.addresses[-1][15:] if address]
            == [recorded.addresses[-1][17]]
            == [stats.data_ptr()]
        )
        assert stats.shape == (*out.shape[:2], 2)
    assert len(recorded.problems) == 1


def test_warm_calls_say_how_wide_indices_are(recorded: Any) -> None:
    """An odd address shows the width, in the checked call and in repeats with other tensors."""
    arguments = form(XQA, "stacked-NHD")
    for width in (torch.int64, torch.int32, torch.int64):
        for _ in range(3):
            for name in ("block_tables", "seq_lens"):
                arguments[name] = arguments[name].clone().to(width)
            FUNCTIONS[XQA](**arguments)
            odd = int(width == torch.int64)
            assert recorded.addresses[-1][9] == arguments["seq_lens"].data_ptr() + odd
            assert set(recorded.addresses[-1][10:12]) == {arguments["block_tables"].data_ptr() + odd}
    assert len(recorded.problems) == 2


CHANGES: list[tuple[str, dict[str, Any]]] = [
    (CONTEXT, {"window_left": 7}),
    (CONTEXT, {"bmm1_scale": 0.5}),
    (CONTEXT, {"bmm2_scale": 0.5}),
    (CONTEXT, {"bmm1_scale": torch.tensor(0.5)}),
    (CONTEXT, {"max_q_len": 6}),
    (CONTEXT, {"enable_pdl": False}),
    (CONTEXT, {"sinks": torch.zeros(valid_calls.HEADS)}),
    (CONTEXT, {"seq_lens": torch.zeros(3, 1, 1, dtype=torch.int32)}),
    (CONTEXT, {"out_dtype": torch.float16}),
    (FMHA, {"mask_mode": "padding"}),
    (FMHA, {"bmm1_scale": 0.5}),
    (FMHA, {"sinks": [torch.zeros(valid_calls.HEADS)]}),
    (CUDNN, {"causal": False}),
    (CUDNN, {"scale": 0.5}),
    (CUDNN, {"return_lse": False}),
    (XQA, {"bmm1_scale": 0.5}),
    (XQA, {"bmm2_scale": torch.tensor(0.5)}),
    (XQA, {"o_scale": 0.5}),
    (XQA, {"window_left": 7}),
    (XQA, {"sinks": [torch.zeros(valid_calls.HEADS)]}),
    (XQA, {"enable_pdl": False}),
    (MLA, {"bmm1_scale": 0.5}),
    (MLA, {"bmm2_scale": torch.tensor(0.5)}),
    (MLA, {"sinks": [torch.zeros(valid_calls.HEADS)]}),
    (MLA, {"enable_pdl": False}),
]


@pytest.mark.parametrize(
    ("entry", "change"), CHANGES, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_what_the_checks_look_at_makes_another_call(entry: str, change: dict[str, Any], recorded: Any) -> None:
    arguments = form(entry, valid_calls.DEFAULT[entry])
    for _ in range(3):  # checked, found by its key, recognised without one
        FUNCTIONS[entry](**arguments)
    FUNCTIONS[entry](**{**arguments, **change})
    assert len(recorded.problems) == 2


BOUNDS = {
    CONTEXT: "max_kv_len",
    FMHA: "max_kv_len",
    CUDNN: "max_sequence_kv",
    XQA: "max_seq_len",
    MLA: "max_seq_len",
}


@pytest.mark.parametrize(("entry", "name"), BOUNDS.items())
def test_a_bound_that_changes_no_result_makes_no_other_call(entry: str, name: str, recorded: Any) -> None:
    """The bound grows with every step of a model. An invalid bound is still refused."""
    arguments = form(entry, valid_calls.DEFAULT[entry])
    for bound in range(20, 30):
        FUNCTIONS[entry](**{**arguments, name: bound})
    assert len(recorded.problems) == 1
    for bad, error in (
        (-1, ValueError),
        (1 << 31, ValueError),
        (20.0, TypeError),
        (True, TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error, match=name):
            FUNCTIONS[entry](**{**arguments, name: bad})


@pytest.mark.parametrize("entry", [CONTEXT, FMHA, XQA, MLA])
def test_sinks_as_a_list_are_the_tensor_in_it(entry: str, recorded: Any) -> None:
    sinks = torch.zeros(valid_calls.HEADS)
    arguments = {**form(entry, valid_calls.DEFAULT[entry]), "sinks": [sinks]}
    for _ in range(3):
        FUNCTIONS[entry](**arguments)
    FUNCTIONS[entry](**{**arguments, "sinks": sinks})
    assert len(recorded.problems) == 1
    assert all(sinks.data_ptr() in addresses for addresses in recorded.addresses)


def test_latest_calls_are_recognised_without_a_key(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [{**form(CONTEXT, "stacked-HND"), "window_left": left} for left in range(launch.RECENT)]
    for arguments in kinds * 2:
        FUNCTIONS[CONTEXT](**arguments)
    monkeypatch.setattr(launch, "_key", None)
    for arguments in kinds:
        FUNCTIONS[CONTEXT](**copy.deepcopy(arguments))
    assert len(recorded.problems) == len(kinds)


def test_more_kinds_of_calls_than_are_recognised(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls are found by their keys, and the recognisers are not made again."""
    kinds = [{**form(CONTEXT, "stacked-HND"), "window_left": left} for left in range(launch.RECENT + 2)]
    for arguments in kinds * 2:
        FUNCTIONS[CONTEXT](**arguments)
    monkeypatch.setattr(repeat, "_guard", None)
    for arguments in kinds * 2:
        FUNCTIONS[CONTEXT](**arguments)
    assert len(recorded.problems) == len(kinds)


@pytest.mark.parametrize("guards", ["torch's", "other"])
@pytest.mark.parametrize("change", ["shape", "strides", "dtype", "none", "number"])
@pytest.mark.parametrize("case", RUNNING, ids=str)
def test_other_metadata_is_another_call(
    case: Form, change: str, guards: str, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with other metadata never goes to the kernel of the call before."""
    if guards == "other":
        monkeypatch.setattr(repeat, "_torch_guard", lambda *tensors: torch.no_such_guard)
    arguments = case.build()
    changes = {
        "shape": lambda t: torch.cat([t, t[-1:]]),
        "strides": lambda t: t.repeat_interleave(3, 0)[::3],
        "dtype": lambda t: t.half() if t.is_floating_point() else t.view(torch.uint32),
        "none": lambda t: None,
        "number": lambda t: 1,
    }
    for name, argument in arguments.items():
        if not isinstance(argument, torch.Tensor) or name == "workspace_buffer":
            continue
        for _ in range(3):
            case.function(**arguments)
        before = len(recorded.addresses), len(recorded.problems)
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            case.function(**{**arguments, name: changes[change](argument)})
        launches, checked = len(recorded.addresses) - before[0], len(recorded.problems) - before[1]
        assert launches == checked, f"{name} of another {change} was launched unchecked"
    assert len(recorded.problems) > 0


def test_tensors_that_need_a_gradient_are_recognised_too(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys do not include requires_grad, and torch's guards do. The first call warns, and is checked."""
    arguments = form(CONTEXT, "stacked-HND")
    other = {**arguments, "query": arguments["query"].clone().requires_grad_()}
    FUNCTIONS[CONTEXT](**arguments)
    with pytest.warns(UserWarning, match="query"):
        FUNCTIONS[CONTEXT](**other)
    for each in (arguments, other):
        FUNCTIONS[CONTEXT](**each)
    monkeypatch.setattr(launch, "_key", None)
    for each in (arguments, other):
        FUNCTIONS[CONTEXT](**each)
    assert len(recorded.problems) == 2


def test_a_tensor_given_twice_is_two_operands(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later calls may give two tensors where the first call gave one for both; calls without this need no key."""
    arguments = form(CONTEXT, "stacked-HND")
    lengths = arguments["seq_lens"]
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        arguments[name] = arguments["cum_seq_lens_q"]
    arguments["bmm1_scale"] = arguments["bmm2_scale"] = torch.tensor(1.0)
    for _ in range(3):
        FUNCTIONS[CONTEXT](**arguments)
    with monkeypatch.context() as patches:
        patches.setattr(launch, "_key", None)
        FUNCTIONS[CONTEXT](**copy.deepcopy(arguments))
    arguments["seq_lens"] = lengths.clone()
    arguments["bmm2_scale"] = torch.tensor(2.0)
    FUNCTIONS[CONTEXT](**arguments)
    assert len(recorded.problems) == 1
    assert recorded.addresses[-1][9] == arguments["seq_lens"].data_ptr()
    assert recorded.addresses[-1][12:14] == (arguments["bmm1_scale"].data_ptr(), arguments["bmm2_scale"].data_ptr())
    arguments["cum_seq_lens_kv"] = arguments["cum_seq_lens_kv"].short()
    with pytest.raises(ValueError, match="cum_seq_lens_kv"):
        FUNCTIONS[CONTEXT](**arguments)


def test_two_sinks_are_refused_after_one_was_accepted() -> None:
    arguments = form(CONTEXT, "stacked-HND")
    sinks = torch.zeros(valid_calls.HEADS)
    FUNCTIONS[CONTEXT](**arguments, sinks=[sinks])
    with pytest.raises(ValueError, match="sinks"):
        FUNCTIONS[CONTEXT](**arguments, sinks=[sinks, sinks])


def test_a_scale_on_the_host_as_a_tensor_is_read_each_time(recorded: Any) -> None:
    arguments = form(CONTEXT, "stacked-HND")
    for name in ("query", "block_tables", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv"):
        assert arguments[name].device.type == "cpu"  # on the CPU, so a tensor scale is on the device and stays there
    arguments["bmm1_scale"] = torch.tensor(0.25)
    FUNCTIONS[CONTEXT](**arguments)
    FUNCTIONS[CONTEXT](**arguments)
    assert len(recorded.problems) == 1
    assert recorded.addresses[-1][12] == arguments["bmm1_scale"].data_ptr()


def test_an_output_over_an_input_is_refused_in_a_warm_call_too() -> None:
    arguments = form(CONTEXT, "stacked-HND")
    arguments["out"] = torch.empty_like(arguments["query"])
    for _ in range(3):
        FUNCTIONS[CONTEXT](**arguments)
    arguments["out"] = arguments["query"]
    with pytest.raises(ValueError, match="out must not share memory with query"):
        FUNCTIONS[CONTEXT](**arguments)


@pytest.mark.parametrize("name", ["q", "k_cache", "out"])
def test_a_log_sum_exp_over_an_operand_is_refused_in_a_warm_call_too(name: str) -> None:
    arguments = form(CUDNN, "ragged")
    arguments["out"], arguments["lse"] = FUNCTIONS[CUDNN](**arguments)
    for _ in range(3):
        FUNCTIONS[CUDNN](**arguments)
    operand, lse = arguments[name], arguments["lse"]
    space = torch.zeros(operand.numel() + 2 * lse.numel() - 2, dtype=operand.dtype)
    arguments[name] = space[: operand.numel()].view_as(operand)
    arguments["lse"] = space[operand.numel() - 2 :].view(lse.dtype).view_as(lse)
    with pytest.raises(ValueError, match="must not share memory"):
        FUNCTIONS[CUDNN](**arguments)


@pytest.mark.parametrize("entry", [XQA, MLA])
@pytest.mark.parametrize("name", ["query", "kv_cache", "out"])
def test_a_workspace_over_an_operand_is_refused_in_a_warm_call_too(entry: str, name: str, recorded: Any) -> None:
    """A call is refused even if only the ends of the workspace and an operand overlap."""
    arguments = form(entry, valid_calls.DEFAULT[entry])
    results = FUNCTIONS[entry](**arguments)
    arguments["out"] = torch.empty_like(results)
    for _ in range(3):
        FUNCTIONS[entry](**arguments)
    launches, operand = len(recorded.addresses), arguments[name]
    size, workspace = operand.numel() * operand.element_size(), arguments["workspace_buffer"]
    bytes_of_both = torch.zeros(workspace.numel() * workspace.element_size() + size - 16, dtype=torch.uint8)
    over = bytes_of_both[-size:].view(operand.dtype).view(operand.shape).copy_(operand)
    space = bytes_of_both[: -(size - 16)].view(workspace.dtype)
    with pytest.raises(ValueError, match="must not share memory"):
        FUNCTIONS[entry](**{**arguments, name: over, "workspace_buffer": space})
    assert len(recorded.addresses) == launches


@pytest.mark.parametrize("name", ["query", "kv_cache", "out"])
def test_unaligned_memory_is_refused_in_a_warm_call_too(name: str) -> None:
    arguments = form(CONTEXT, "stacked-HND")
    arguments["out"] = torch.empty_like(arguments["query"])
    for _ in range(3):
        FUNCTIONS[CONTEXT](**arguments)
    arguments[name] = valid_calls.misaligned(arguments[name])
    with pytest.raises(ValueError, match=name):
        FUNCTIONS[CONTEXT](**arguments)


@pytest.mark.parametrize(("entry", "name"), [(CONTEXT, "kv_block_scales"), (XQA, "kv_cache_sf")])
def test_unaligned_scales_are_refused_in_a_warm_call_too(entry: str, name: str) -> None:
    """Kernels read four scales at a time; an address with three extra bytes would be a device fault."""
    arguments = form(entry, "nvfp4" if entry == XQA else "nvfp4-HND")
    for _ in range(3):
        FUNCTIONS[entry](**arguments)
    scales = arguments[name]
    moved = torch.zeros(scales.nbytes + 4, dtype=torch.uint8)[1 : 1 + scales.nbytes].view(scales.dtype)
    with pytest.raises(ValueError, match=f"{name} must begin at a multiple of 4 bytes"):
        FUNCTIONS[entry](**{**arguments, name: moved.view(scales.shape)})


def test_a_pool_with_v_elsewhere_is_another_call(recorded: Any) -> None:
    arguments = form(FMHA, "pair-HND")
    for _ in range(3):
        FUNCTIONS[FMHA](**arguments)
    query, _ = arguments["qkv"]
    pool = valid_calls.data(3, valid_calls.PAGES, *valid_calls.page_shape("HND"))
    FUNCTIONS[FMHA](**{**arguments, "qkv": (query, (pool[0], pool[2]))})
    assert len(recorded.problems) == 2


def test_the_document_prints_the_function_of_a_repeated_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    compiled = repeat._compiled
    monkeypatch.setattr(repeat, "_compiled", lambda source: sources.append(source) or compiled(source))
    arguments = form(XQA, "stacked-NHD")
    arguments["out"] = torch.empty_like(arguments["query"])
    for _ in range(2):
        FUNCTIONS[XQA](**arguments)
    (source,) = sources
    printed = HOST.read_text().partition("```text\n")[2].partition("```")[0]
    assert printed.strip() == source.strip()


def test_results_that_interleave_with_inputs_are_remembered(recorded: Any) -> None:
    """StreamKRanges overlap and rows do not: the checks decide this once for each distance or place."""
    arguments = form(CONTEXT, "stacked-HND")
    tokens, heads, dim = arguments["query"].shape

    def call(out_at: int) -> None:
        rows = torch.zeros(tokens, heads, 3 * dim, dtype=arguments["query"].dtype)
        for _ in range(3):
            out = rows[..., out_at * dim : (out_at + 1) * dim]
            FUNCTIONS[CONTEXT](**{**arguments, "query": rows[..., :dim], "out": out})

    for out_at, checked in ((1, 1), (1, 1), (2, 2), (1, 2), (2, 3)):
        call(out_at)
        assert len(recorded.problems) == checked


def test_an_address_with_the_alignment_that_was_checked_is_known(recorded: Any) -> None:
    """Indices may start at any multiple of 4 bytes, such as the rest of a longer tensor."""
    arguments = form(XQA, "stacked-NHD")
    for first in (1, 1, 0, 1, 2):
        longer = torch.zeros(first + 3, dtype=torch.int32)
        FUNCTIONS[XQA](**{**arguments, "seq_lens": longer[first:]})
    assert len(recorded.problems) == 2
    assert [addresses[9] % 16 for addresses in recorded.addresses] == [4, 4, 0, 4, 8]
