"""Keywords of newer FlashInfer prefill versions beside the documented ones: taken, served or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    CONTEXT,
    CUDNN,
    FUNCTIONS,
    HEADS,
    KV_LENS,
    Q_LENS,
    TOKENS,
    cudnn_paged,
    cumulative,
    data,
    form,
)

from hopwell.kernels.problem import LseLayout, MaskKind

INERT: list[tuple[str, str, dict[str, Any]]] = [
    # vLLM on Blackwell
    (CONTEXT, "stacked-HND", {"kv_cache_sf": None, "multi_ctas_kv_counter_buffer": torch.empty(8, dtype=torch.uint8)}),
    # SGLang on Hopper
    (CONTEXT, "stacked-HND", {"kv_cache_sf": None, "causal": True}),
    (CONTEXT, "stacked-HND", {"backend": "trtllm-gen", "use_fp16_softmax": False, "uses_spcompress": None}),
    (CONTEXT, "stacked-HND", {"return_lse": False, "lse": torch.empty(TOKENS, HEADS), "lse_base": "ln"}),
    # vLLM's vision encoders
    (CUDNN, "paged", {"q_scale": None, "k_scale": None, "v_scale": None, "o_data_type": None}),
    (CUDNN, "paged", {"o_data_type": torch.bfloat16, "batch_offsets_units": "elements", "lse_base": "ln"}),
]


def call(entry: str, name: str, **changes: Any) -> Any:
    return FUNCTIONS[entry](**{**form(entry, name), **changes})


@pytest.mark.parametrize(
    ("entry", "name", "keywords"), INERT, ids=lambda part: part if isinstance(part, str) else "-".join(part)
)
def test_inert_values_change_nothing(entry: str, name: str, keywords: dict[str, Any], recorded: Any) -> None:
    for _ in range(2):
        call(entry, name)
        call(entry, name, **keywords)
    plain, other = recorded.problems[0], recorded.problems[-1]
    for field in ("mask", "softmax_scale", "output_scale", "score", "sinks", "programmatic_launch"):
        assert getattr(plain, field) == getattr(other, field), field
    assert (plain.lse is None) == (other.lse is None)
    assert all((addresses[15] == 0) == (plain.lse is None) for addresses in recorded.addresses)


REFUSED: list[tuple[str, str, dict[str, Any], type[Exception], str]] = [
    (CONTEXT, "stacked-HND", {"use_fp16_softmax": True}, NotImplementedError, "use_fp16_softmax=True"),
    (CONTEXT, "stacked-HND", {"uses_spcompress": True}, NotImplementedError, "uses_spcompress=True"),
    (CONTEXT, "stacked-HND", {"use_fp16_softmax": 1}, TypeError, "use_fp16_softmax"),
    (CONTEXT, "stacked-HND", {"causal": 1}, TypeError, "causal"),
    (CONTEXT, "stacked-HND", {"window_right": 3}, ValueError, "window_right must be -1 where causal is True"),
    (CONTEXT, "stacked-HND", {"lse_base": "e"}, ValueError, "lse_base must be one of 'log2', 'ln'"),
    (CONTEXT, "stacked-HND", {"return_lse": None}, TypeError, "return_lse"),
    (CONTEXT, "stacked-HND", {"multi_ctas_kv_counter_buffer": 3}, TypeError, "multi_ctas_kv_counter_buffer"),
    (CONTEXT, "stacked-HND", {"backend": 3}, TypeError, "backend"),
    (CONTEXT, "stacked-HND", {"lse": torch.empty(TOKENS, HEADS + 1)}, ValueError, "lse must have shape"),
    (CONTEXT, "stacked-HND", {"lse": torch.empty(HEADS, TOKENS).T}, ValueError, "lse must be contiguous"),
    (CONTEXT, "stacked-HND", {"lse": torch.empty(TOKENS, HEADS).half()}, ValueError, "lse must be torch.float32"),
    (CONTEXT, "stacked-HND", {"kv_cache_sf": torch.zeros(1)}, ValueError, "kv_cache_sf"),
    (CONTEXT, "stacked-HND", {"v_scale_layout": "linear"}, ValueError, "^v_scale_layout must be 'interleaved', .*bfl"),
    (CONTEXT, "nvfp4-HND", {"v_scale_layout": "swizzled"}, ValueError, "^v_scale_layout must be one of 'linear', 'int"),
    (CONTEXT, "nvfp4-HND", {"v_scale_layout": None}, TypeError, "^v_scale_layout must be one of"),
    (CUDNN, "paged", {"q_scale": torch.ones(1)}, ValueError, "q_scale must be None"),
    (CUDNN, "paged", {"v_scale": torch.ones(1)}, ValueError, "v_scale must be None"),
    (CUDNN, "paged", {"o_data_type": "bfloat16"}, TypeError, "o_data_type"),
    (CUDNN, "paged", {"o_data_type": torch.float32}, ValueError, "o_data_type"),
    (CUDNN, "paged", {"batch_offsets_units": "bytes"}, ValueError, "batch_offsets_units"),
    (CUDNN, "paged", {"lse_base": "log10"}, ValueError, "lse_base"),
    (CUDNN, "paged", {"lse_layout": "HND"}, ValueError, "lse_layout must be one of 'NH', 'HN'"),
    (CUDNN, "paged", {"lse_layout": None}, TypeError, "lse_layout"),
    (
        CUDNN,
        "paged",
        {"lse_layout": "HN", "lse": torch.empty(HEADS, TOKENS)},
        ValueError,
        r"lse must have shape \[batch=.*, num_heads=.*, max_token_per_sequence=.*; batch_offsets_stats",
    ),
    (
        CUDNN,
        "paged",
        {"lse_layout": "HN", "max_token_per_sequence": 2**31 - 1},
        ValueError,
        r"lse_layout must be 'NH' for a log-sum-exp of 2\^31 elements",
    ),
    (CUDNN, "paged", {"actual_seq_lens_q": None}, TypeError, "actual_seq_lens_q"),
    (CUDNN, "paged", {"actual_seq_lens_kv": None, "batch_offsets_units": "tokens"}, TypeError, "actual_seq_lens_kv"),
    (CUDNN, "paged", {"lse": torch.empty(TOKENS, HEADS)}, ValueError, "lse must have shape .*; batch_offsets_stats"),
]


@pytest.mark.parametrize(("entry", "name", "keywords", "error", "text"), REFUSED)
def test_refused_by_name(
    entry: str, name: str, keywords: dict[str, Any], error: type[Exception], text: str, recorded: Any
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=text):
            call(entry, name, **keywords)
        call(entry, name)
    assert len(recorded.problems) == 1


def test_scales_have_two_names(recorded: Any) -> None:
    arguments = form(CONTEXT, "nvfp4-HND")
    scales = arguments["kv_block_scales"]
    with pytest.raises(ValueError, match="two names of one argument"):
        FUNCTIONS[CONTEXT](**arguments, kv_cache_sf=scales)
    FUNCTIONS[CONTEXT](**arguments)
    del arguments["kv_block_scales"]
    FUNCTIONS[CONTEXT](**arguments, kv_cache_sf=scales)
    for problem in recorded.problems:
        assert problem.kv_scales.key.data_ptr() == scales.data_ptr()


def test_orders_of_scales_are_different_calls(recorded: Any) -> None:
    """A page of two tokens has linear scales only."""
    for order in ("interleaved", "linear") * 2:
        call(CONTEXT, "nvfp4-HND", v_scale_layout=order)
    assert [problem.kv_scales.interleaves_v for problem in recorded.problems] == [True, False]
    pages = {name: form(CONTEXT, "nvfp4-HND")[name][:, :, :, :2] for name in ("kv_cache", "kv_block_scales")}
    pages |= dict(seq_lens=torch.tensor([2, 3, 4], dtype=torch.int32))
    call(CONTEXT, "nvfp4-HND", v_scale_layout="linear", **pages)
    with pytest.raises(ValueError, match="v_scale_layout='interleaved' must have a page size that is a multiple of 4"):
        call(CONTEXT, "nvfp4-HND", **pages)


@pytest.mark.parametrize("base", ["log2", "ln"])
def test_context_log_sum_exp(base: str, recorded: Any) -> None:
    for _ in range(3):
        out, lse = call(CONTEXT, "stacked-HND", return_lse=True, lse_base=base)
        assert (lse.shape, lse.dtype) == ((TOKENS, HEADS), torch.float32)
        assert (recorded.addresses[-1][3], recorded.addresses[-1][15]) == (out.data_ptr(), lse.data_ptr())
    for _ in range(3):
        assert call(CONTEXT, "stacked-HND", return_lse=True, lse_base=base, lse=lse)[1] is lse
        assert recorded.addresses[-1][15] == lse.data_ptr()
    assert len(recorded.problems) == 2
    assert recorded.problems[0].lse.layout is LseLayout.RAGGED
    assert recorded.problems[0].lse.natural == (base == "ln")


def test_context_without_mask(recorded: Any) -> None:
    call(CONTEXT, "stacked-HND", causal=False)
    call(CONTEXT, "stacked-HND", causal=False)
    (problem,) = recorded.problems
    assert problem.mask.kind is MaskKind.FULL


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_context_with_masks_by_request(given: bool, return_lse: bool, recorded: Any) -> None:
    """Each mask has a launch, and repeated calls are not checked again."""
    causal = torch.tensor([1, 0, 0], dtype=torch.uint8)
    for _ in range(3):
        out = torch.empty_like(form(CONTEXT, "stacked-HND")["query"])
        results = dict(out=out, lse=torch.empty(TOKENS, HEADS)) if given else {}
        got = call(CONTEXT, "stacked-HND", causal=causal, return_lse=return_lse, **results)
        got = got if return_lse else (got,)
        assert not given or all(part is result for part, result in zip(got, results.values(), strict=False))
    assert [problem.mask.kind for problem in recorded.problems] == [MaskKind.CAUSAL, MaskKind.FULL]
    assert [problem.q_lens.tolist() for problem in recorded.problems] == [[Q_LENS[0], 0, 0], [0, *Q_LENS[1:]]]
    assert len(recorded.addresses) == 6


@pytest.mark.parametrize("lengths", [False, True])
def test_cudnn_offsets_in_tokens(lengths: bool, recorded: Any) -> None:
    """FlashInfer's wrappers give the offsets of q and k; all others follow from them, and lengths of None too."""
    arguments = form(CUDNN, "ragged")
    for name in ("batch_offsets_o", "batch_offsets_v"):
        del arguments[name]
    arguments |= dict(batch_offsets_q=cumulative(Q_LENS), batch_offsets_k=cumulative(KV_LENS))
    if not lengths:
        arguments |= dict(actual_seq_lens_q=None, actual_seq_lens_kv=None)
    lse = torch.empty(TOKENS, HEADS)
    stats = dict(batch_offsets_stats=arguments["batch_offsets_q"], lse=lse, lse_base="log2")
    for _ in range(3):
        assert FUNCTIONS[CUDNN](**arguments, **stats, batch_offsets_units="tokens")[1] is lse
    (problem,) = recorded.problems
    assert problem.batch == BATCH
    starts = (problem.q_offsets, problem.o_offsets, problem.k_offsets, problem.v_offsets, problem.lse.offsets)
    assert [offsets.token_elements for offsets in starts] == [1] * 5
    assert (problem.q_lens is None, problem.kv_lens is None) == (not lengths, not lengths)
    assert not problem.lse.natural
    assert recorded.addresses[0][4:] == recorded.addresses[-1][4:]


def test_a_log_sum_exp_that_no_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the bound that causes the size. With the smallest possible bound, it names memory instead."""
    empty = torch.empty

    def full(*sizes: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        if dtype is torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(*sizes, dtype=dtype, **options)

    monkeypatch.setattr(torch, "empty", full)  # 512 GB of memory hold even the largest log-sum-exp
    with pytest.raises(ValueError, match=r"^max_token_per_sequence must be small enough .* got 2147483647 for"):
        call(CUDNN, "paged", return_lse=True, max_token_per_sequence=2**31 - 1)
    with pytest.raises(torch.OutOfMemoryError):
        call(CUDNN, "paged", return_lse=True, max_token_per_sequence=max(Q_LENS))


def test_cudnn_output_type(recorded: Any) -> None:
    for _ in range(2):
        out, _ = FUNCTIONS[CUDNN](**cudnn_paged(), o_data_type=torch.float16)
        assert out.dtype == torch.float16
    out = data(TOKENS, HEADS, 128, dtype=torch.float16)
    assert FUNCTIONS[CUDNN](**cudnn_paged(), o_data_type=torch.float16, out=out)[0] is out
    assert FUNCTIONS[CUDNN](**cudnn_paged(), out=out)[0] is out
    with pytest.raises(ValueError, match=r"^o_data_type must be the dtype of out, torch\.float16"):
        FUNCTIONS[CUDNN](**cudnn_paged(), o_data_type=torch.bfloat16, out=out)
    with pytest.raises(
        ValueError, match=r"^out must be torch\.bfloat16 or torch\.float16 or torch\.float8_e4m3fn for q of "
    ):
        FUNCTIONS[CUDNN](**cudnn_paged(), out=out.float())
