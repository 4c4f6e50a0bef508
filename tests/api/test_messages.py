"""Messages are short, quick to build, and list the allowed values; sizes of workspaces are checked."""

from __future__ import annotations

import time

import pytest
import torch
from helpers.calls.valid_calls import (
    BATCH,
    CONTEXT,
    CUDNN,
    DIM,
    FMHA,
    HEADS,
    MLA,
    TABLE,
    XQA,
    data,
    ints,
    refused,
    stacked,
    xqa,
)

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.mla import mla_workspace_bytes


@pytest.mark.parametrize("entry", [CONTEXT, XQA])
def test_no_object_is_formatted_as_a_whole(entry: str) -> None:
    for large in (torch.empty(1 << 22, dtype=torch.uint8).untyped_storage(), [0] * 10**7, "x" * 10**8):
        start = time.perf_counter()
        refused(entry, TypeError, "^workspace_buffer must be a torch.Tensor, got .{,99}$", workspace_buffer=large)
        assert time.perf_counter() - start < 1


def test_what_else_is_allowed_is_named() -> None:
    refused(CONTEXT, TypeError, "^bmm1_scale must be a float or a float32 tensor of one element", bmm1_scale="1")
    refused(CONTEXT, TypeError, "^sinks must be a torch.Tensor, a list of one, or None", sinks=3)
    refused(CONTEXT, TypeError, "^enable_pdl must be True, False or None", enable_pdl=1)
    refused(FMHA, TypeError, "^logits_soft_cap_scale must be a float or None", logits_soft_cap_scale="1")


def test_the_batch_is_traced_to_the_arguments_that_give_it() -> None:
    queries = {XQA: data(9, HEADS, DIM), MLA: data(2, 1, HEADS, 576)}
    text = r"^block_tables must have 9 rows \(9 rows of query / q_len_per_req=1\), got shape \(3, 4\)$"
    refused(XQA, ValueError, text, query=queries[XQA])
    refused(MLA, ValueError, r"^block_tables must have 2 rows \(the first size of query\)", query=queries[MLA])
    text = r"^block_tables must have 2 rows \(elements of {} - 1\)"
    starts = dict(q_cu_seq_lens=ints(0, 3, 8), mask=None, q_len_per_req=1)
    refused(XQA, ValueError, text.format("cumulative lengths"), "ragged", **starts)
    refused(MLA, ValueError, text.format("cum_seq_lens_q"), "ragged", cum_seq_lens_q=ints(0, 3, 8))
    text = r"^block_tables must have 3 rows \(elements of actual_seq_lens_q\), got shape \(2, 4\)$"
    refused(CUDNN, ValueError, text, "paged", block_tables=ints(*TABLE[:2]))
    refused(CONTEXT, ValueError, r"^block_tables must have 3 rows \(batch_size\)", block_tables=ints(*TABLE[:2]))


def test_ranks_that_depend_on_other_arguments() -> None:
    query = data(BATCH, HEADS, 576)
    refused(MLA, ValueError, r"^query must have shape \[batch, q_len, .* without cum_seq_lens_q$", query=query)
    refused(
        MLA, ValueError, r"^query must have shape \[tokens, .* with cum_seq_lens_q$", "ragged", query=query[:, None]
    )
    starts = torch.zeros(4)
    refused(MLA, ValueError, "^cum_seq_lens_q must be torch.int32", cum_seq_lens_q=starts, max_q_len=1)
    with pytest.raises(ValueError, match=r"^cum_seq_lens_q must be torch\.int32"):
        hopwell.trtllm_batch_decode_with_kv_cache(**xqa(stacked("HND"), "HND", cum_seq_lens_q=starts))
    refused(CUDNN, ValueError, "^k_cache must be 3-D .* without block_tables", "paged", block_tables=None)
    refused(CUDNN, ValueError, "^k_cache must be 4-D .* with block_tables", "ragged", block_tables=ints(*TABLE))
    refused(CONTEXT, ValueError, r"^kv_cache must be 5-D .*, or a pair \(K, V\) of 4-D", kv_cache=stacked("HND")[:, 0])
    for of, start in (("q", "q"), ("kv", "k")):
        text = (
            f"^actual_seq_lens_{of} must be a torch.Tensor, or None where batch_offsets_{start} counts tokens, got None"
        )
        refused(CUDNN, TypeError, text, **{f"actual_seq_lens_{of}": None})


def test_names_of_output_dtypes() -> None:
    """A string has the right type, so an unknown one is a wrong value."""
    text = "^out_dtype must be a torch.dtype.*, got str 'fp4'$"
    refused(CONTEXT, ValueError, text, out_dtype="fp4", o_sf_scale=1.0)
    refused(FMHA, ValueError, text, out_dtype="fp4")
    with pytest.raises(ValueError, match=text):
        hopwell.trtllm_batch_decode_with_kv_cache(**xqa(stacked("HND"), "HND", out_dtype="fp4"))


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim", "max_seq_len", "q_len_per_req"])
def test_sizes_of_workspaces_are_checked(name: str) -> None:
    sizes = dict(num_heads=8, num_kv_heads=2, head_dim=128, max_seq_len=1024, q_len_per_req=1)
    assert xqa_workspace_bytes(**sizes, device="cpu") > 0
    for bad, error in ((-1, ValueError), ("8", TypeError), (2.0, TypeError), (1 << 40, ValueError)):
        with pytest.raises(error, match=f"^{name} must"):
            xqa_workspace_bytes(**{**sizes, name: bad}, device="cpu")
        if name in ("num_heads", "max_seq_len", "q_len_per_req"):
            latent = {k: sizes[k] for k in ("num_heads", "max_seq_len", "q_len_per_req")}
            with pytest.raises(error, match=f"^{name} must"):
                mla_workspace_bytes(**{**latent, name: bad}, device="cpu")
