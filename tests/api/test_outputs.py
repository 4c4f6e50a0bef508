"""Rules for outputs, and refusals of problems without a kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    CONTEXT,
    CUDNN,
    DEFAULT,
    DIM,
    FMHA,
    FORMS,
    FP8,
    FP16,
    FUNCTIONS,
    HEADS,
    KV_HEADS,
    KV_TOKENS,
    PAGE,
    PAGES,
    TOKENS,
    U8,
    Form,
    data,
    form,
    misaligned,
    nvfp4_scales,
    odd_stride,
    refused,
    stacked,
)

import hopwell
from hopwell.kernels.launch.arguments import OPERANDS

OUT, OUT_SCALES = OPERANDS.index("out"), OPERANDS.index("out_scales")
FP4_ARGUMENTS = {"query": data(TOKENS, HEADS, DIM, dtype=FP8), "kv_cache": stacked("HND", FP8)}


def with_head_dim(entry: str, dim: int) -> dict[str, Any]:
    """Return a call without pages, or of the context entry, with this head dim."""
    query, key = data(TOKENS, HEADS, dim), data(KV_TOKENS, KV_HEADS, dim)
    if entry == CONTEXT:
        return form(entry, "stacked-HND") | dict(query=query, kv_cache=stacked("HND", width=dim))
    if entry == FMHA:
        return form(entry, "separate") | dict(qkv=(query, key, key))
    return form(entry, "ragged") | dict(q=query, k_cache=key, v_cache=key, batch_offsets_units="tokens")


@pytest.mark.parametrize("entry", [CONTEXT, FMHA, CUDNN])
def test_an_e4m3_output_of_any_head_dim_may_be_given(entry: str, recorded: Any) -> None:
    """Its rows need not be multiples of 16 bytes: the outputs that entries allocate are not."""
    arguments, name = with_head_dim(entry, 40), "o_data_type" if entry == CUDNN else "out_dtype"
    found = FUNCTIONS[entry](**{**arguments, name: FP8})
    out = found[0] if isinstance(found, tuple) else found
    FUNCTIONS[entry](**{**arguments, "out": out})
    assert recorded.problems[-1].out is out
    room = data(TOKENS, HEADS, 44, dtype=FP8)[..., :40]
    with pytest.raises(ValueError, match=r"^out must have 1 as its last stride, .* multiples of 8 bytes"):
        FUNCTIONS[entry](**{**arguments, "out": room})


@pytest.mark.parametrize(("entry", "dim"), [(CONTEXT, DIM), (FMHA, DIM), (CUDNN, 128)])
def test_out(entry: str, dim: int) -> None:
    out = data(TOKENS, HEADS, dim)
    refused(entry, TypeError, "^out must be a torch.Tensor", out=3)
    refused(entry, ValueError, "^out must be ", out=out.float())
    refused(entry, ValueError, "^out must be on cpu", out=out.to("meta"))
    for wrong in (out[:-1], out[:, :-1], out[..., :32], out[None], out.flatten(1)):
        refused(entry, ValueError, r"^out must have shape \[tokens=8, heads=4, head_dim=", out=wrong)
    refused(entry, ValueError, "^out has stride 2 in its last", out=out.repeat_interleave(2, -1)[..., ::2])
    refused(entry, ValueError, "^out starts at address", out=misaligned(out))
    refused(entry, ValueError, "^out has stride", out=odd_stride(TOKENS, HEADS, dim))
    refused(entry, ValueError, "^out must not overlap itself", out=data(1, HEADS, dim).expand(TOKENS, HEADS, dim))
    refused(entry, ValueError, "^out must not overlap itself", out=data(TOKENS, 1, dim).expand(TOKENS, HEADS, dim))
    half = data(TOKENS * HEADS * dim).as_strided((TOKENS, HEADS, dim), (HEADS * dim, dim // 2, 1))
    refused(entry, ValueError, "^out must not overlap itself", out=half)


def test_out_must_not_share_memory_with_inputs() -> None:
    query = data(TOKENS, HEADS, DIM)
    refused(CONTEXT, ValueError, "^out must not share memory with query", query=query, out=query)
    buffer = data(2 * TOKENS, HEADS, DIM)
    shifted = {"query": buffer[:TOKENS], "out": buffer[TOKENS - 1 : -1]}
    refused(CONTEXT, ValueError, "^out must not share memory with query", **shifted)
    buffer = data(TOKENS, HEADS, 2 * DIM)
    columns = {"query": buffer[..., :DIM], "out": buffer[..., DIM - 8 : -8]}
    refused(CONTEXT, ValueError, "^out must not share memory with query", **columns)
    cache = stacked("HND")
    rows = cache.view(-1, HEADS, DIM)[:TOKENS]
    refused(CONTEXT, ValueError, "^out must not share memory with kv_cache", kv_cache=cache, out=rows)
    kv = data(KV_TOKENS, 2, KV_HEADS, DIM)
    inside = kv.view(-1, HEADS, DIM)[-TOKENS:]
    refused(FMHA, ValueError, "^out must not share memory with qkv", qkv=(query, kv), out=inside)
    packed = data(TOKENS, 3, HEADS, DIM)
    refused(FMHA, ValueError, "^out must not share memory with qkv", "packed", qkv=packed, out=packed[:, 2])
    lse = torch.zeros(BATCH, 5, HEADS)
    table = {"lse": lse, "actual_seq_lens_q": lse.view(torch.int32).view(-1)[:BATCH]}
    refused(CUDNN, ValueError, "^lse must not share memory with actual_seq_lens_q", **table)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"out_dtype": "bfloat16"}, ValueError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        ({"out_dtype": 3}, TypeError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        ({"out_dtype": torch.tensor(3)}, TypeError, "^out_dtype must be a torch.dtype or the string 'nvfp4'"),
        (
            {"out_dtype": torch.float32},
            ValueError,
            "^out_dtype must be torch.bfloat16 or torch.float16 or torch.float8",
        ),
        ({"out": data(TOKENS, HEADS, DIM), "out_dtype": FP16}, ValueError, "^out_dtype must be the dtype of out"),
        ({"o_sf_scale": 1.0}, ValueError, "^o_sf_scale must be None unless"),
        ({"o_sf_vec_size": 16}, ValueError, "^o_sf_vec_size must be None unless"),
        ({"query": FP4_ARGUMENTS["query"]}, ValueError, "kv_cache"),
    ],
)
def test_context_out_dtype(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refused(CONTEXT, error, text, **changes)


def fp4(rows: int = 128, columns: int = HEADS * DIM // 16, start: int = 0, tokens: int = TOKENS) -> hopwell.FP4Tensor:
    scale = torch.zeros(rows, columns, dtype=FP8)
    return hopwell.FP4Tensor(data(tokens, HEADS, DIM // 2, dtype=U8), scale, start)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"o_sf_vec_size": 32}, ValueError, "^o_sf_vec_size must be"),
        ({"o_sf_vec_size": 16.0}, TypeError, "^o_sf_vec_size must be"),
        ({"o_sf_scale": None}, ValueError, "^o_sf_scale must be a float"),
        ({"o_sf_scale": 0.0}, ValueError, "^o_sf_scale must be positive"),
        ({"o_sf_scale": "1"}, TypeError, "^o_sf_scale must be a float"),
        ({"o_sf_scale": torch.tensor(1.0)}, TypeError, "^o_sf_scale must be a float"),
        ({"out": data(TOKENS, HEADS, DIM // 2, dtype=U8)}, ValueError, "^out must be an FP4Tensor"),
        ({"out": 3}, TypeError, "^out must be an FP4Tensor"),
        ({"out": fp4(tokens=7)}, ValueError, r"^out\.data must have shape"),
        ({"out": fp4(columns=20)}, ValueError, r"^out\.scale must have shape"),
        ({"out": fp4(), "out_dtype": torch.bfloat16, "o_sf_scale": None}, ValueError, "^out must be a torch.Tensor"),
    ],
)
def test_context_nvfp4_output(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    refused(CONTEXT, error, text, **{**FP4_ARGUMENTS, "out_dtype": "nvfp4", "o_sf_scale": 1.0, **changes})


def served(**changes: Any) -> Any:
    arguments = form(CONTEXT, DEFAULT[CONTEXT]) | FP4_ARGUMENTS | {"out_dtype": "nvfp4", "o_sf_scale": 2.0} | changes
    return hopwell.trtllm_batch_context_with_kv_cache(**arguments)


@pytest.mark.parametrize(
    "changes",
    [{}, {"out": fp4()}, {"out": fp4(256, start=200), "out_dtype": None}, {"o_sf_vec_size": 16}, {"return_lse": True}],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_context_nvfp4_output_is_served(changes: dict[str, Any], launched: list[Any]) -> None:
    found = served(**changes)
    if "return_lse" in changes:
        found, lse = found
        assert lse.shape == (TOKENS, HEADS)
    (problem,) = launched
    assert problem.out_scales.factor == 2.0
    assert (problem.out_scales.tensor is found.scale, problem.out is found.data) == (True, True)
    assert problem.out_scales.first_row == found.scale_start_index
    if "out" in changes:
        assert found is changes["out"]
    else:
        assert (found.scale.shape, found.original_shape) == ((128, HEADS * DIM // 16), (TOKENS, HEADS, DIM))


@pytest.mark.parametrize("given", [None, fp4(256, start=100)], ids=["allocated", "given"])
def test_warm_calls_with_nvfp4_outputs(given: hopwell.FP4Tensor | None, recorded: Any) -> None:
    """Warm calls go to the kernel without checks, with the data and the scales of the tensor that they return."""
    found = [served(out=given) for _ in range(4)]
    assert len(recorded.problems) == 1
    assert [(addresses[OUT], addresses[OUT_SCALES]) for addresses in recorded.addresses] == [
        (one.data.data_ptr(), one.scale.data_ptr()) for one in found
    ]
    if given is not None:
        assert all(one is given for one in found)
        return
    assert len({(one.data.shape, one.scale.shape, one.scale_start_index, one.original_shape) for one in found}) == 1
    assert len({part.data_ptr() for one in found for part in (one.data, one.scale)}) == 2 * len(found)


def test_another_nvfp4_output_is_another_call(recorded: Any) -> None:
    """Another output is another FP4Tensor, or the same one with new attributes."""
    out = fp4(256, start=100)
    others = [{"out": fp4(256, start=101)}, {"out": fp4(384, start=100)}, {"out": None}, {"o_sf_scale": 3.0}]
    for count, change in enumerate(others, 2):
        for _ in range(3):
            served(out=out)
        served(**{"out": out} | change)
        assert len(recorded.problems) == count
    assert [problem.out_scales.first_row for problem in recorded.problems] == [100, 101, 100, 0, 100]
    out.scale_start_index = 7
    served(out=out)
    assert recorded.problems[-1].out_scales.first_row == 7
    launches, out.scale_start_index = len(recorded.addresses), 250
    with pytest.raises(ValueError, match="scale_start_index"):
        served(out=out)
    assert len(recorded.addresses) == launches


def test_scales_of_warm_nvfp4_outputs_stay_apart(recorded: Any) -> None:
    """Scales stay apart from the queries and from the output's data at any place in a call."""
    size = TOKENS * HEADS * DIM
    memory = torch.zeros(3 * size + 128 * HEADS * DIM // 16, dtype=FP8)
    query, packed = memory[size : 2 * size], memory[2 * size : 2 * size + size // 2].view(U8)
    tensors = query.view(TOKENS, HEADS, DIM), packed.view(TOKENS, HEADS, DIM // 2)

    def call(first: int) -> None:
        scale = memory[first : first + 128 * HEADS * DIM // 16].view(128, -1)
        served(query=tensors[0], out=hopwell.FP4Tensor(tensors[1], scale))

    behind = 2 * size + size // 2
    for _ in range(3):
        call(behind)
    for first in (size - 16, size + 16, behind - 16):
        with pytest.raises(ValueError, match=r"^out\.scale must not share memory"):
            call(first)
    call(behind)
    assert (len(recorded.problems), len(recorded.addresses)) == (1, 4)


def test_context_nvfp4_output_of_values_of_another_width() -> None:
    """The shape before packing belongs to the output, not to the queries."""
    changes = {"query": data(TOKENS, HEADS, 192, dtype=FP8)}
    cache = tuple(data(PAGES, KV_HEADS, PAGE, width, dtype=FP8) for width in (192, 128))
    assert served(kv_cache=cache, **changes).original_shape == (TOKENS, HEADS, 128)


def test_context_nvfp4_output_of_rows_that_are_whole_blocks() -> None:
    """Heads of 80 columns are 40 bytes apart, and kernels store 8 bytes at a time."""
    out = hopwell.FP4Tensor(data(TOKENS, HEADS, 40, dtype=U8), torch.zeros(128, HEADS * 5, dtype=FP8))
    changes = {"query": data(TOKENS, HEADS, 80, dtype=FP8), "kv_cache": stacked("HND", FP8, 80)}
    assert served(out=out, **changes) is out
    out.data = torch.zeros(TOKENS * HEADS * 40 + 4, dtype=U8)[4:].view(TOKENS, HEADS, 40)
    with pytest.raises(ValueError, match=r"^out\.data must .* multiples of 8 bytes"):
        served(out=out, **changes)


def test_context_nvfp4_output_without_tokens() -> None:
    changes = {"query": data(0, HEADS, DIM, dtype=FP8), "cum_seq_lens_q": torch.zeros(BATCH + 1, dtype=torch.int32)}
    assert served(**changes).data.shape == (0, HEADS, DIM // 2)


def test_context_nvfp4_output_must_not_share_memory() -> None:
    out = fp4()
    out.scale = out.data.new_zeros(128 * HEADS * DIM // 16).view(FP8).view(128, -1)
    out.data = out.scale.view(U8).flatten()[: TOKENS * HEADS * DIM // 2].view(TOKENS, HEADS, DIM // 2)
    with pytest.raises(ValueError, match=r"^out\.scale must not share memory with out\.data"):
        served(out=out)
    cache, scales = stacked("HND", U8, DIM // 2), nvfp4_scales("HND")
    out = data(TOKENS, HEADS, DIM)
    scales = out.view(FP8).flatten()[: scales.numel()].view(scales.shape)
    changes = {"query": data(TOKENS, HEADS, DIM), "kv_cache": cache, "kv_block_scales": scales}
    refused(CONTEXT, ValueError, "^out must not share memory with kv_block_scales", out=out, **changes)


def test_context_nvfp4_output_changed_after_construction() -> None:
    arguments = {**FP4_ARGUMENTS, "out_dtype": "nvfp4", "o_sf_scale": 1.0}
    for attribute, value, error in (
        ("scale_start_index", 125, ValueError),
        ("scale_start_index", -1, ValueError),
        ("scale_start_index", None, TypeError),
        ("scale", None, TypeError),
        ("scale", torch.zeros(100, 16, dtype=FP8), ValueError),
        ("scale", torch.zeros(16, 128, dtype=FP8).t(), ValueError),
        ("data", None, TypeError),
        ("data", data(TOKENS, HEADS, DIM // 2), ValueError),
    ):
        out = fp4()
        setattr(out, attribute, value)
        refused(CONTEXT, error, rf"^out\.{attribute} ", **arguments, out=out)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": data(8, 4, 264), "kv_cache": data(PAGES, 2, 2, 16, 264)}, "head_dim=264"),
        ({"query": data(8, 4, 272), "kv_cache": data(PAGES, 2, 2, 16, 272, dtype=FP8)}, "head_dim=272"),
    ],
)
def test_context_without_kernel(changes: dict[str, Any], text: str) -> None:
    pattern = f"^trtllm_batch_context_with_kv_cache on sm_90a supports these .*; got .*{re.escape(text)}"
    refused(CONTEXT, NotImplementedError, pattern, **changes)


@pytest.mark.parametrize("case", [form for form in FORMS if not form.runs], ids=str)
def test_arguments_are_checked_before_a_missing_kernel_is_named(case: Form) -> None:
    arguments = case.build()
    name = "max_seq_len" if "max_seq_len" in arguments else "max_kv_len"
    with pytest.raises(TypeError, match=f"^{name} must be an int"):
        case.function(**{**arguments, name: None})
    with pytest.raises(NotImplementedError, match=case.function.__name__):
        case.function(**arguments)
