"""Parameters of the decode entries beyond FlashInfer's documentation: served, without effect, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls.valid_calls import BATCH, FUNCTIONS, HEADS, MLA, TABLE, XQA, form, ints

import hopwell
from hopwell.kernels.problem import AttentionProblem

Problems = list[AttentionProblem]
TRTLLM = "trtllm_batch_decode_with_kv_cache"


def call(entry: str, name: str, **changes: Any) -> Any:
    return getattr(hopwell, entry)(**{**form(entry, name), **changes})


COUNTERS = dict(multi_ctas_kv_counter_buffer=torch.zeros(64, dtype=torch.uint8))
INERT_MLA: list[dict[str, Any]] = [
    COUNTERS,
    dict(skip_softmax_threshold_scale_factor=0.0),
    dict(is_var_seq=False),
    dict(cute_dsl_impl="modular", kv_scale_format="arbitrary_fp32"),
    dict(use_fp16_softmax=False),
    dict(cp_world=1, cp_rank=0, enable_dcp=False),
    dict(return_lse_base="basee"),  # of a log-sum-exp that is not requested
]


@pytest.mark.parametrize("changes", INERT_MLA, ids=str)
def test_inert_values_change_nothing(changes: dict[str, Any], launched: Problems) -> None:
    call(FUNCTIONS[MLA].__name__, "dense", **changes)
    (problem,) = launched
    assert problem.lse is None
    assert problem.q_offsets is None
    assert problem.skip_softmax == 0


GLOBAL = dict(causal_seqlens_kv_global=ints(*[40] * BATCH))
WRONG = dict(causal_seqlens_kv_global=ints(*[40] * (BATCH + 1)))
REFUSED_MLA: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
    (
        "dense",
        NotImplementedError,
        "skip_softmax_threshold_scale_factor=2.0",
        dict(skip_softmax_threshold_scale_factor=2),
    ),
    ("dense", NotImplementedError, "use_fp16_softmax", dict(use_fp16_softmax=True)),
    ("dense", ValueError, "^cp_world must be 1", dict(cp_world=2)),
    ("dense", ValueError, "causal_seqlens_kv_global None without enable_dcp", GLOBAL),
    ("dense", ValueError, "^return_lse must be True", dict(enable_dcp=True, cp_world=2, **GLOBAL)),
    ("dense", ValueError, "^causal_seqlens_kv_global must be given", dict(enable_dcp=True, return_lse=True)),
    ("dense", ValueError, "^cp_rank", dict(cp_rank=1)),
    ("sparse", NotImplementedError, "enable_dcp=True with sparse", dict(enable_dcp=True, return_lse=True, **GLOBAL)),
    (
        "dense",
        ValueError,
        "^sinks must be None",
        dict(enable_dcp=True, return_lse=True, sinks=torch.zeros(HEADS), **GLOBAL),
    ),
    ("dense", ValueError, "^causal_seqlens_kv_global must have", dict(enable_dcp=True, return_lse=True, **WRONG)),
    ("dense", ValueError, "^max_q_len must be None", dict(max_q_len=1)),
    ("ragged", ValueError, "^max_q_len must be given", dict(max_q_len=None)),
    ("dense", ValueError, "^sparse_mla_top_k_lens must be None", dict(sparse_mla_top_k_lens=ints(*[1] * BATCH))),
    ("dense", ValueError, "^backend must not be 'sparse'", dict(backend="sparse")),
    ("sparse", ValueError, "^seq_lens must be torch.int32", dict(seq_lens=torch.ones(BATCH, 2))),
    ("sparse", ValueError, "^seq_lens must have", dict(seq_lens=ints(*[1] * (BATCH + 1)))),
    ("sparse", ValueError, "^uses_shared_paged_kv_idx", dict(uses_shared_paged_kv_idx=False)),
    ("dense", ValueError, "^return_lse_base must be one of", dict(return_lse_base="natural")),
    ("dense", ValueError, "^lse must have shape", dict(lse=torch.zeros(BATCH))),
    ("dense", ValueError, "^lse must be contiguous", dict(lse=torch.zeros(HEADS, BATCH).T)),
]


@pytest.mark.parametrize(("name", "error", "text", "changes"), REFUSED_MLA)
def test_latent_attention_refuses_by_name(
    name: str, error: type[Exception], text: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(error, match=text):
        call(FUNCTIONS[MLA].__name__, name, **changes)


REFUSED_TRTLLM: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (NotImplementedError, "skip_softmax_threshold_scale_factor=2.0", dict(skip_softmax_threshold_scale_factor=2)),
    (NotImplementedError, "nvfp4", dict(out_dtype="nvfp4")),
    (NotImplementedError, "bmm1_scale_log2", dict(bmm1_scale_log2=torch.ones(1))),
    (NotImplementedError, "enable_block_sparse_attention", dict(enable_block_sparse_attention=True)),
    (ValueError, "^cp_world must be 1", dict(cp_world=2)),
    (ValueError, "^cp_rank", dict(cp_rank=1)),
    (TypeError, "cp_rank", dict(cp_rank=0.5)),
    (ValueError, "^return_lse must be True with causal_seqlens_kv_global", GLOBAL),
    (TypeError, "^return_lse must be True or False", dict(return_lse=torch.zeros(0), **GLOBAL)),
    (
        ValueError,
        r"^cum_seq_lens_q must be on cpu",
        dict(cum_seq_lens_q=torch.zeros(4, device="meta").int(), max_q_len=3),
    ),
    (ValueError, "^window_left must be -1", dict(return_lse=True, window_left=3, **GLOBAL)),
    (ValueError, "^sinks must be None", dict(return_lse=True, sinks=torch.zeros(HEADS), **GLOBAL)),
    (ValueError, "^causal_seqlens_kv_global must have", dict(return_lse=True, **WRONG)),
    (NotImplementedError, "bf16q_fp8kv_transform_mode", dict(bf16q_fp8kv_transform_mode="k_only")),
    (NotImplementedError, "request_order ", dict(request_order=ints(0, 1, 2))),
    (NotImplementedError, "request_order_plan", dict(request_order_plan=object())),
    (ValueError, "^o_sf_scale must be None", dict(o_sf_scale=1.0)),
    (ValueError, "^o_sf_vec_size must be None", dict(o_sf_vec_size=16)),
    (ValueError, "^max_q_len must be None", dict(max_q_len=3)),
    (ValueError, "^max_q_len must be given", dict(cum_seq_lens_q=ints(0, 3, 6, 9))),
    (ValueError, "^q_len_per_req must be None", dict(cum_seq_lens_q=ints(0, 3, 6, 9), max_q_len=4, q_len_per_req=3)),
    (ValueError, "^backend must be one of", dict(backend="fa2")),
    (ValueError, "^block_tables must", dict(uses_shared_paged_kv_idx=False)),
    (NotImplementedError, "trtllm-gen' with kv_cache_sf", dict(backend="trtllm-gen", kv_cache_sf=torch.ones(1))),
]


@pytest.mark.parametrize(("error", "text", "changes"), REFUSED_TRTLLM)
def test_decode_refuses_by_name(error: type[Exception], text: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        call(TRTLLM, "causal", **changes)


def test_ragged_masks_have_a_row_for_every_token() -> None:
    mask = form(XQA, "ragged")["mask"]
    for wrong, text in ((mask[:-1], r"^mask must have the 8 rows of query"), (mask[:, :1], r"^mask must have shape")):
        with pytest.raises(ValueError, match=text):
            call(FUNCTIONS[XQA].__name__, "ragged", mask=wrong)


def test_log_sum_exp_of_warm_calls(recorded: Any) -> None:
    """The log-sum-exp is allocated anew, or written to the caller's tensor; without a request it is written but not
    returned.
    """
    entry = FUNCTIONS[MLA].__name__
    results = [call(entry, "dense", return_lse=True) for _ in range(4)]
    assert len(recorded.problems) == 1
    assert {lse.shape for _, lse in results} == {(BATCH, HEADS)}
    assert [addresses[15] for addresses in recorded.addresses] == [lse.data_ptr() for _, lse in results]
    given = torch.zeros(BATCH, 1, HEADS)
    for _ in range(4):
        assert isinstance(call(entry, "dense", lse=given), torch.Tensor)
        assert recorded.addresses[-1][15] == given.data_ptr()
        assert call(entry, "dense", lse=given, return_lse=True)[1] is given


def test_topk_indices_without_lengths_in_warm_calls(recorded: Any) -> None:
    """Each call has lengths of its own, which count all entries of the top-k indices."""
    for _ in range(4):
        call(FUNCTIONS[MLA].__name__, "sparse", seq_lens=None)
    (problem,) = recorded.problems
    assert problem.kv_lens.tolist() == [8] * 2 * BATCH
    assert (problem.batch, problem.max_q_len) == (2 * BATCH, 1)


def test_base_of_log_sum_exps(launched: Problems) -> None:
    """The base of a log-sum-exp is natural by default in FlashInfer's cute-dsl kernels.

    Only these kernels support DCP ranks. Engines that combine partials choose the base by the name of the backend.
    """
    entry = FUNCTIONS[MLA].__name__
    for options, natural in (
        (dict(), False),
        (dict(backend="trtllm-gen"), False),
        (dict(backend="cute-dsl"), True),
        (dict(backend="cute-dsl", return_lse_base="base2"), False),
        (dict(enable_dcp=True, cp_world=2, **GLOBAL), True),
        (dict(enable_dcp=True, cp_world=2, return_lse_base="base2", **GLOBAL), False),
    ):
        call(entry, "dense", return_lse=True, **options)
        assert launched.pop().lse.natural is natural, options


def test_ragged_calls_with_other_lengths(recorded: Any) -> None:
    """Repeated calls find offsets by address; they do not read the values."""
    for entry, name, argument in ((XQA, "ragged", "q_cu_seq_lens"), (MLA, "ragged", "cum_seq_lens_q")):
        for _ in range(4):
            arguments = form(FUNCTIONS[entry].__name__, name)
            FUNCTIONS[entry](**arguments)
            assert recorded.addresses[-1][4] == arguments[argument].data_ptr()
    assert len(recorded.problems) == 2


def test_dcp_ranks_of_warm_calls(recorded: Any) -> None:
    """A DCP rank's call repeats with other lengths of all keys, found by address, but not with other rank fields."""
    for entry, name in ((FUNCTIONS[MLA].__name__, "several-tokens"), (TRTLLM, "causal")):
        dcp = dict(enable_dcp=True) if name == "several-tokens" else {}
        for rank in (0, 0, 0, 1, 1):
            lengths = ints(*[40 + rank] * BATCH)
            options = dict(cp_world=2, cp_rank=rank, causal_seqlens_kv_global=lengths, return_lse=True)
            call(entry, name, **options, **dcp)
            assert recorded.addresses[-1][6] == lengths.data_ptr()
        ranks = [problem.dcp_rank for problem in recorded.problems]
        assert [(rank.world, rank.rank) for rank in ranks] == [(2, 0), (2, 1)]
        recorded.problems.clear()


def test_separate_tables_of_warm_calls(recorded: Any) -> None:
    for _ in range(4):
        arguments = form(TRTLLM, "separate-ids")
        hopwell.trtllm_batch_decode_with_kv_cache(**arguments)
        first = arguments["block_tables"].data_ptr()
        assert recorded.addresses[-1][10:12] == (first, first + 4 * len(TABLE[0]))
    assert len(recorded.problems) == 1
