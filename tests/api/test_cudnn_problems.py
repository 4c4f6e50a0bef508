"""The problem that ``cudnn_batch_prefill_with_kv_cache`` makes for the kernels: offsets, lengths and the log-
sum-exp.
"""

from __future__ import annotations

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    HEADS,
    KV_HEADS,
    PAGE,
    Q_LENS,
    TOKENS,
    call_cudnn,
    cudnn_paged,
    cudnn_ragged,
    cumulative,
    form,
    ints,
    starts,
)

import hopwell
from hopwell._entries import cudnn as cudnn_entry
from hopwell.kernels.problem import (
    AttentionProblem,
    LseLayout,
)

Problems = list[AttentionProblem]


def test_cudnn_offsets_count_elements(launched: Problems) -> None:
    call_cudnn()
    problem = launched[0]
    units = [o.token_elements for o in (problem.q_offsets, problem.o_offsets, problem.k_offsets, problem.v_offsets)]
    assert units == [HEADS * 192, HEADS * 128, KV_HEADS * 192, KV_HEADS * 128]
    for offsets in (problem.q_offsets, problem.o_offsets):
        assert starts(offsets) == [0, 3, 3]
    for offsets in (problem.k_offsets, problem.v_offsets):
        assert starts(offsets) == [0, 20, 21]


def test_cudnn_offsets_of_any_shape_with_or_without_the_last(launched: Problems) -> None:
    for change in (lambda t: t.view(-1, 1, 1, 1), lambda t: t[:BATCH]):
        arguments = form("cudnn", "ragged")
        arguments |= {name: change(value) for name, value in arguments.items() if name.startswith("batch_offsets")}
        arguments |= {
            name: arguments[name].view(BATCH, 1, 1, 1) for name in ("actual_seq_lens_q", "actual_seq_lens_kv")
        }
        call_cudnn(**arguments)
        problem = launched.pop()
        assert starts(problem.q_offsets) == ([0] * BATCH if problem.q_offsets is None else [0, 3, 3])
        assert problem.q_lens.shape == problem.kv_lens.shape == (BATCH,)


def test_cudnn_single_request_needs_no_offsets(launched: Problems) -> None:
    arguments = {name: value for name, value in cudnn_ragged().items() if not name.startswith("batch_offsets")}
    out, lse = hopwell.cudnn_batch_prefill_with_kv_cache(
        **{**arguments, "actual_seq_lens_q": ints(8), "actual_seq_lens_kv": ints(58)}
    )
    problem = launched[0]
    assert problem.q_offsets is problem.o_offsets is problem.k_offsets is problem.v_offsets is None
    assert out.shape == (TOKENS, HEADS, 128)
    assert lse.shape == (1, 5, HEADS)


def test_cudnn_paged_strides_are_kept(launched: Problems) -> None:
    arguments = cudnn_paged()
    hopwell.cudnn_batch_prefill_with_kv_cache(**arguments)
    assert launched[0].key is arguments["k_cache"]
    assert launched[0].key.stride() == (2 * PAGE * KV_HEADS * 128, 128, KV_HEADS * 128, 1)


def test_cudnn_lse(launched: Problems) -> None:
    _, lse = call_cudnn(return_lse=False)
    assert lse is None
    assert launched.pop().lse is None

    _, lse = call_cudnn(return_lse=True)
    problem = launched.pop()
    assert (lse.shape, lse.dtype) == ((BATCH, 5, HEADS), torch.float32)
    assert problem.lse.tensor.data_ptr() == lse.data_ptr()
    assert problem.lse.layout is LseLayout.PADDED
    assert problem.lse.natural
    assert problem.lse.offsets is None

    given = torch.zeros(BATCH, 5, HEADS)
    assert call_cudnn(lse=given)[1] is given
    assert launched.pop().lse.tensor is given
    assert call_cudnn(lse=given, return_lse=False)[1] is None
    assert launched.pop().lse is None


@pytest.mark.parametrize("given", [None, torch.zeros(BATCH, 5, HEADS)])
def test_cudnn_ragged_lse(launched: Problems, given: torch.Tensor | None) -> None:
    _, lse = call_cudnn(lse=given, batch_offsets_stats=cumulative(Q_LENS, HEADS))
    problem = launched[0]
    assert lse.shape == (BATCH, 5, HEADS)
    assert given is None or lse is given
    assert problem.lse.tensor.data_ptr() == lse.data_ptr()
    assert problem.lse.tensor.shape == (BATCH * 5, HEADS)
    assert problem.lse.layout is LseLayout.OFFSETS
    assert problem.lse.offsets.token_elements == HEADS
    assert starts(problem.lse.offsets) == [0, 3, 3]


def test_cudnn_host_lengths_are_copied_outside_graphs_only() -> None:
    device = torch.device("meta")  # stand-in for a GPU
    copied = cudnn_entry._lengths("actual_seq_lens_q", ints(1, 2).view(2, 1), 2, device, graphs=False)
    assert copied.device == device
    assert copied.shape == (2,)
    with pytest.raises(ValueError, match=r"actual_seq_lens_q.*is_cuda_graph_compatible"):
        cudnn_entry._lengths("actual_seq_lens_q", ints(1, 2), 2, device, graphs=True)


def test_cudnn_accepts_any_backend_name(launched: Problems) -> None:
    for backend in (None, "cubin", "cudnn", "anything"):
        call_cudnn(backend=backend, is_cuda_graph_compatible=True)
    assert len({problem.mask for problem in launched}) == 1
