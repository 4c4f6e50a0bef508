"""The problems that entry points build for the kernels: the right elements of the caller's memory, and the
right facts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calls.operations import operations_of
from helpers.calls.valid_calls import (
    BATCH,
    BF16,
    DIM,
    FORMS,
    FP16,
    HEADS,
    IN_PLACE,
    KV_HEADS,
    KV_LENS,
    PAGE,
    PAGES,
    Q_LENS,
    TABLE,
    TOKENS,
    Form,
    call_cudnn,
    cumulative,
    data,
    form,
    ints,
    starts,
)

import hopwell
from hopwell._checks import arguments as checks
from hopwell.kernels.capability import features
from hopwell.kernels.problem import (
    AttentionProblem,
    Mask,
    MaskKind,
    Score,
    ScoreKind,
)

Problems = list[AttentionProblem]

# The only tensor operations that an entry point may use before the launch: views and allocation.
VIEWS = {"view", "unbind", "transpose", "unsqueeze", "select", "slice", "as_strided", "expand", "detach", "empty"}
VIEWS |= {"flatten", "unflatten"}  # a copy in them would be an operation of its own


@pytest.fixture(scope="module", autouse=True)
def probed() -> None:
    """Probe the supported features on small tensors, which a process does once."""
    for entry in features.ENTRIES:
        for row in features.table_of(entry).features:
            assert isinstance(row.archs, tuple)


def context(**changes: Any) -> Any:
    return hopwell.trtllm_batch_context_with_kv_cache(**{**form("trtllm_batch_context", "stacked-HND"), **changes})


def fmha_v2(name: str = "contiguous", **changes: Any) -> Any:
    return hopwell.trtllm_fmha_v2_prefill(**{**form("trtllm_fmha", name), **changes})


def addresses(problem: AttentionProblem, which: str, request: int, kv_len: int) -> list[list[int]]:
    """Return the addresses of K or V rows of a request according to the problem: [key][kv head]."""
    tensor = getattr(problem, which)
    if problem.page_table is None:
        start = starts(problem.k_offsets if which == "key" else problem.v_offsets)[request]
        rows = [(0, start + j) for j in range(kv_len)]
    else:
        table = getattr(problem.page_table, which)
        size = tensor.shape[2]
        rows = [(int(table[request, j // size]), j % size) for j in range(kv_len)]
    return [[tensor[page, head, row].data_ptr() for head in range(tensor.shape[1])] for page, row in rows]


def expected_row(arguments: dict[str, Any], part: int, request: int, key: int, head: int) -> torch.Tensor:
    """Return the K (part 0) or V (part 1) row of the caller's tensors, following their documentation."""
    page, row = TABLE[request][key // PAGE], key % PAGE
    token = sum(KV_LENS[:request]) + key
    if "kv_cache" in arguments:
        cache = arguments["kv_cache"]
        if "kv_lora_rank" in arguments:
            return cache.view(PAGES, PAGE, -1)[page, row]
        cell = (head, row) if arguments["kv_layout"] == "HND" else (row, head)
        if not arguments.get("uses_shared_paged_kv_idx", True):
            page = int(arguments["block_tables"][request, part, key // PAGE])
        if isinstance(cache, torch.Tensor):
            return cache[(page, min(part, cache.shape[1] - 1), *cell)]
        return cache[part][(page, *cell)]
    if "k_cache" in arguments:
        tensor = arguments[("k_cache", "v_cache")[part]]
        return tensor[page, head, row] if "block_tables" in arguments else tensor[token, head]
    qkv, layout = arguments["qkv"], arguments["input_layout"]
    if layout == "PACKED_QKV":
        return qkv[sum(Q_LENS[:request]) + key, part + 1, head]
    if layout == "CONTIGUOUS_Q_KV":
        return qkv[1][token, part, head]
    if layout == "SEPARATE_Q_K_V":
        return qkv[1 + part][token, head]
    cell = (head, row) if layout.endswith("HND") else (row, head)
    return qkv[1][part][(page, *cell)] if isinstance(qkv[1], tuple) else qkv[1][(page, part, *cell)]


@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_problem_addresses_the_callers_elements(case: Form, launched: Problems) -> None:
    arguments = case.build()
    case.function(**arguments)
    (problem,) = launched
    packed = arguments.get("input_layout") == "PACKED_QKV"
    lengths = Q_LENS if packed else KV_LENS
    if problem.token_table is not None:  # the indices themselves give the places of keys
        lengths = []
        assert problem.token_table.data_ptr() == arguments["block_tables"].data_ptr()
        assert torch.equal(problem.token_table, arguments["block_tables"].flatten(0, 1))
        assert problem.key.data_ptr() == problem.value.data_ptr() == arguments["kv_cache"].data_ptr()
    for request, kv_len in enumerate(lengths):
        for part, which in enumerate(("key", "value")):
            got = addresses(problem, which, request, kv_len)
            want = [
                [expected_row(arguments, part, request, key, head).data_ptr() for head in range(len(got[key]))]
                for key in range(kv_len)
            ]
            assert got == want
    query = arguments.get("query", arguments.get("q"))
    if query is None:
        query = arguments["qkv"][:, 0] if packed else arguments["qkv"][0]
    if "kv_lora_rank" in arguments and query.dim() == 4:
        query = query.flatten(0, 1)
    assert problem.query.data_ptr() == query.data_ptr()
    assert problem.query.stride() == query.stride()
    assert problem.query.shape == query.shape
    assert starts(problem.q_offsets) == ([0] * BATCH if problem.q_offsets is None else [0, 3, 3])
    assert problem.key.stride(-1) == problem.value.stride(-1) == 1


@pytest.mark.parametrize("case", [form for form in IN_PLACE if "decode" not in str(form)], ids=str)
def test_problem_facts(case: Form, launched: Problems) -> None:
    arguments = case.build()
    case.function(**arguments)
    (problem,) = launched
    assert problem.batch == BATCH
    assert problem.max_q_len == 5
    packed = arguments.get("input_layout") == "PACKED_QKV"
    assert problem.max_kv_len == (TOKENS if packed else 37)
    assert problem.mask == Mask(MaskKind.CAUSAL)
    assert problem.softmax_scale == 0.125
    assert problem.output_scale == 1.0
    assert problem.sinks is None
    assert problem.out is None
    assert problem.programmatic_launch == ("enable_pdl" in case.function.__code__.co_varnames)
    assert (problem.lse is None) == ("return_lse" not in arguments)


@pytest.mark.parametrize("case", [form for form in FORMS if not form.copies], ids=str)
def test_nothing_is_read_or_copied(case: Form) -> None:
    arguments = case.build()

    def call() -> None:
        try:
            case.function(**arguments)
        except NotImplementedError:
            assert not case.runs

    assert set(operations_of(call, nested=True)) <= VIEWS | {"new_empty"}  # the stand-in for the launch uses new_empty


def test_context_lengths_and_table_are_the_callers_tensors(launched: Problems) -> None:
    arguments = form("trtllm_batch_context", "stacked-HND")
    context(**arguments)
    (problem,) = launched
    assert problem.kv_lens.data_ptr() == arguments["seq_lens"].data_ptr()
    assert problem.q_offsets.tensor.data_ptr() == arguments["cum_seq_lens_q"].data_ptr()
    assert problem.q_offsets.token_elements == 1
    assert problem.page_table.key is problem.page_table.value is arguments["block_tables"]
    assert problem.q_lens is problem.o_offsets is problem.k_offsets is problem.v_offsets is None


def test_unsigned_lengths_of_any_shape(launched: Problems) -> None:
    context(
        seq_lens=ints(*KV_LENS, dtype=torch.uint32).view(BATCH, 1, 1, 1),
        block_tables=ints(*TABLE).view(torch.uint32),
        cum_seq_lens_q=cumulative(Q_LENS).view(torch.uint32),
    )
    (problem,) = launched
    assert problem.kv_lens.shape == (BATCH,)
    assert problem.kv_lens.dtype == problem.page_table.key.dtype == torch.uint32


def test_context_ignores_what_cum_seq_lens_kv_says(launched: Problems) -> None:
    context(cum_seq_lens_kv=ints(0, 1, 2, 3, 4, 5, 6))
    assert launched[0].k_offsets is None


def test_context_same_data_for_k_and_v(launched: Problems) -> None:
    context(**form("trtllm_batch_context", "same-NHD"))
    assert launched[0].key.data_ptr() == launched[0].value.data_ptr()


def test_context_keeps_strides_of_k_and_v_apart(launched: Problems) -> None:
    cache = data(PAGES, KV_HEADS, PAGE, 2 * DIM)[..., :DIM], data(PAGES, PAGE, KV_HEADS, DIM).transpose(1, 2)
    context(kv_cache=cache)
    assert launched[0].key.stride() == cache[0].stride()
    assert launched[0].value.stride() == cache[1].stride()


def test_context_v_head_dim_shapes_the_output(launched: Problems) -> None:
    cache = data(PAGES, KV_HEADS, PAGE, 192), data(PAGES, KV_HEADS, PAGE, 128)
    out = context(query=data(TOKENS, HEADS, 192), kv_cache=cache)
    assert out.shape == (TOKENS, HEADS, 128)


@pytest.mark.parametrize(
    ("window_left", "mask"),
    [(-1, Mask(MaskKind.CAUSAL)), (0, Mask(MaskKind.SLIDING_WINDOW, 0)), (127, Mask(MaskKind.SLIDING_WINDOW, 127))],
)
def test_context_mask(launched: Problems, window_left: int, mask: Mask) -> None:
    context(window_left=window_left)
    assert launched[0].mask == mask


@pytest.mark.parametrize(
    ("changes", "mask"),
    [
        ({}, Mask(MaskKind.CAUSAL)),
        ({"mask_mode": "CAUSAL"}, Mask(MaskKind.CAUSAL)),
        ({"mask_mode": "Padding"}, Mask(MaskKind.FULL)),
        ({"mask_mode": "sliding_window"}, Mask(MaskKind.CAUSAL)),
        ({"mask_mode": "SLIDING_WINDOW", "window_left": 9}, Mask(MaskKind.SLIDING_WINDOW, 9)),
        ({"mask_mode": "sliding_window", "window_left": 0}, Mask(MaskKind.SLIDING_WINDOW, 0)),
        ({"mask_mode": "causal", "window_left": 9}, Mask(MaskKind.SLIDING_WINDOW, 9)),
        ({"mask_mode": "causal", "window_left": 0}, Mask(MaskKind.SLIDING_WINDOW, 0)),
        ({"mask_mode": "chunked", "window_left": 9}, Mask(MaskKind.SLIDING_WINDOW, 9)),
        ({"mask_mode": "chunked"}, Mask(MaskKind.CAUSAL)),
        ({"mask_mode": "CHUNKED", "chunked_attention_size": 64}, Mask(MaskKind.CHUNKED, chunk=64)),
        ({"chunked_attention_size": 64}, Mask(MaskKind.CHUNKED, chunk=64)),
    ],
)
def test_fmha_v2_mask_precedence(launched: Problems, changes: dict[str, Any], mask: Mask) -> None:
    fmha_v2(**changes)
    assert launched[0].mask == mask


@pytest.mark.parametrize(("causal", "kind"), [(True, MaskKind.CAUSAL), (False, MaskKind.FULL)])
def test_cudnn_mask(launched: Problems, causal: bool, kind: MaskKind) -> None:
    call_cudnn(causal=causal)
    assert launched[0].mask == Mask(kind)


def test_tensor_scales_stay_on_the_device(launched: Problems) -> None:
    softmax_scale, output_scale = torch.tensor(0.5), torch.tensor([[2.0]])
    context(bmm1_scale=softmax_scale, bmm2_scale=output_scale)
    assert launched[0].softmax_scale is softmax_scale
    assert launched[0].output_scale is output_scale


def test_scales_on_the_host_are_read() -> None:
    device = torch.device("meta")  # stands for a GPU
    assert checks.scale("bmm1_scale", torch.tensor([0.5]), device, minimum=0.0) == 0.5
    for value, text in ((-1.0, "at least 0.0"), (math.nan, "finite"), (math.inf, "finite")):
        with pytest.raises(ValueError, match=f"bmm1_scale must be {text}"):
            checks.scale("bmm1_scale", torch.tensor(value), device, minimum=0.0)


@pytest.mark.parametrize("value", [0, 0.0, 0.25, np.float32(0.25), np.float64(0.25), 3])
def test_host_scales(launched: Problems, value: Any) -> None:
    context(bmm1_scale=value, bmm2_scale=-value)
    assert (launched[0].softmax_scale, launched[0].output_scale) == (float(value), -float(value))
    assert type(launched[0].softmax_scale) is float


def test_fmha_v2_scale_zero_means_inverse_root_of_head_dim(launched: Problems) -> None:
    fmha_v2("separate", bmm1_scale=0.0, bmm2_scale=2.0)
    assert launched[0].softmax_scale == 1 / math.sqrt(192)
    assert launched[0].output_scale == 2.0


@pytest.mark.parametrize("container", [lambda t: t, lambda t: [t], lambda t: (t,)])
def test_sinks(launched: Problems, container: Any) -> None:
    sinks = torch.zeros(HEADS)
    context(sinks=container(sinks))
    fmha_v2(sinks=container(sinks))
    assert launched[0].sinks is launched[1].sinks is sinks


@pytest.mark.parametrize(("given", "want"), [(None, True), (True, True), (False, False)])
def test_context_pdl(launched: Problems, given: bool | None, want: bool) -> None:
    context(enable_pdl=given)
    assert launched[0].programmatic_launch is want


@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8, int])
def test_integers_of_other_types(launched: Problems, number: Any) -> None:
    context(batch_size=number(BATCH), max_q_len=number(4), max_kv_len=number(30), window_left=number(7))
    problem = launched[0]
    assert (problem.batch, problem.max_q_len, problem.max_kv_len, problem.mask.window_left) == (BATCH, 4, 30, 7)
    assert {type(value) for value in (problem.batch, problem.max_q_len, problem.mask.window_left)} == {int}


def test_bounds_never_exceed_what_the_tensors_hold(launched: Problems) -> None:
    context(max_q_len=10**6, max_kv_len=10**6)
    fmha_v2(max_q_len=10**6, max_kv_len=10**6)
    call_cudnn(max_token_per_sequence=10**3, max_sequence_kv=10**6)
    assert [(p.max_q_len, p.max_kv_len) for p in launched] == [(TOKENS, 4 * PAGE), (TOKENS, 58), (TOKENS, 58)]


def test_out_is_written_in_place_whatever_its_strides(launched: Problems) -> None:
    context_out = data(HEADS, TOKENS, DIM).transpose(0, 1)
    assert context(out=context_out) is context_out
    fmha_out = data(TOKENS, HEADS, 3 * DIM)[..., DIM : 2 * DIM]
    assert fmha_v2(out=fmha_out) is fmha_out
    cudnn_out = data(TOKENS, HEADS, 128)
    assert call_cudnn(out=cudnn_out)[0] is cudnn_out
    assert [problem.out for problem in launched] == [context_out, fmha_out, cudnn_out]


def test_out_beside_the_query_in_one_buffer_is_no_overlap() -> None:
    buffer = data(TOKENS, HEADS, 2 * DIM)
    context(query=buffer[..., :DIM], out=buffer[..., DIM:])
    buffer = data(2 * TOKENS, HEADS, DIM)
    context(query=buffer[:TOKENS], out=buffer[TOKENS:])
    buffer = data(TOKENS, HEADS + 2 * KV_HEADS, DIM)
    context(query=buffer[:, :HEADS], out=data(TOKENS, HEADS, DIM))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_out_dtype(launched: Problems, dtype: torch.dtype) -> None:
    assert context(out_dtype=dtype).dtype == dtype
    assert fmha_v2(out_dtype=dtype).dtype == dtype
    assert fmha_v2(out_dtype=str(dtype).removeprefix("torch.")).dtype == dtype
    out = data(TOKENS, HEADS, DIM, dtype=dtype)
    assert context(out=out) is out
    assert context(out=out, out_dtype=dtype) is out
    assert fmha_v2(out=out, out_dtype=dtype) is out
    assert [problem.out is None for problem in launched] == [*[dtype == BF16] * 3, False, False, False]


def test_fmha_v2_lengths_come_from_cumulative_lengths(launched: Problems) -> None:
    for name in ("contiguous", "paged-HND"):
        arguments = form("trtllm_fmha", name)
        fmha_v2(**arguments)
        problem = launched.pop()
        assert problem.kv_lens is None
        assert problem.k_offsets.tensor.data_ptr() == arguments["cum_seq_lens_kv"].data_ptr()
        assert problem.k_offsets.token_elements == 1
        assert (problem.v_offsets is None) == (problem.page_table is not None)


def test_fmha_v2_position_encoding_none_is_the_default(launched: Problems) -> None:
    fmha_v2(pos_encoding_mode="NONE", logits_soft_cap_scale=0.0, skip_softmax_threshold_scale_factor=0.0)
    assert launched[0].score == Score()
    assert launched[0].skip_softmax == 0.0
    assert launched[0].statistics is None


def test_fmha_v2_scores(launched: Problems) -> None:
    fmha_v2(pos_encoding_mode="Alibi")
    fmha_v2(logits_soft_cap_scale=30)
    assert [problem.score for problem in launched] == [Score(ScoreKind.ALIBI), Score(ScoreKind.SOFT_CAP, 30.0)]


def test_skip_softmax(launched: Problems) -> None:
    fmha_v2(skip_softmax_threshold_scale_factor=500)
    context(skip_softmax_threshold_scale_factor=1e-30)
    assert [problem.skip_softmax for problem in launched] == [500.0, 1e-30]


def test_fmha_v2_statistics(launched: Problems) -> None:
    out, stats = fmha_v2(save_softmax_stats=True)
    assert stats is launched[0].statistics
    assert stats.shape == (*out.shape[:2], 2)
    assert stats.dtype == torch.float32


@pytest.mark.parametrize("batch", [0, 2])
def test_no_tokens(launched: Problems, batch: int) -> None:
    table = torch.zeros(batch, 4, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    total = torch.zeros(batch + 1, dtype=torch.int32)
    sizes = {"batch_size": batch, "seq_lens": lengths, "cum_seq_lens_q": total, "cum_seq_lens_kv": total}
    context(query=data(0, HEADS, DIM), block_tables=table, max_q_len=0, max_kv_len=0, out=data(0, HEADS, DIM), **sizes)
    fmha_v2(qkv=(data(0, HEADS, DIM), data(0, 2, KV_HEADS, DIM)), **sizes)
    fmha_v2(qkv=data(0, 3, HEADS, DIM), input_layout="PACKED_QKV", **sizes)
    names = ("batch_offsets_q", "batch_offsets_o", "batch_offsets_k", "batch_offsets_v")
    _, lse = call_cudnn(
        q=data(0, HEADS, 192),
        k_cache=data(0, KV_HEADS, 192),
        v_cache=data(0, KV_HEADS, 128),
        actual_seq_lens_q=lengths,
        actual_seq_lens_kv=lengths,
        max_token_per_sequence=0,
        **dict.fromkeys(names, total),
    )
    assert lse.shape == (batch, 0, HEADS)
    assert [problem.max_q_len for problem in launched] == [0] * 4
    assert [problem.batch for problem in launched] == [batch] * 4


def test_empty_table_and_pool(launched: Problems) -> None:
    context(kv_cache=data(0, 2, KV_HEADS, PAGE, DIM), block_tables=torch.zeros(BATCH, 0, dtype=torch.int32))
    assert launched[0].max_kv_len == 0


@pytest.mark.parametrize("page", [1, 2, 8, 64, 1024])
def test_page_sizes(launched: Problems, page: int) -> None:
    context(kv_cache=data(PAGES, 2, KV_HEADS, page, DIM))
    assert launched[0].key.shape == (PAGES, KV_HEADS, page, DIM)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_group_sizes(launched: Problems, kv_heads: int) -> None:
    context(kv_cache=data(PAGES, 2, kv_heads, PAGE, DIM))
    assert launched[0].key.shape[1] == kv_heads


def test_cache_as_list(launched: Problems) -> None:
    cache = [data(PAGES, KV_HEADS, PAGE, DIM), data(PAGES, KV_HEADS, PAGE, DIM)]
    context(kv_cache=cache)
    assert launched[0].key is cache[0]


def test_positional_call(launched: Problems) -> None:
    arguments = form("trtllm_batch_context", "stacked-HND")
    layout = arguments.pop("kv_layout")
    hopwell.trtllm_batch_context_with_kv_cache(*arguments.values(), -1, None, None, None, None, layout)
    assert len(launched) == 1
