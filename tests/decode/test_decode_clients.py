"""The calls that serving engines make for decode, as they stand in their sources, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import starts
from decode_batches import DRAFT, FULL, DecodeBatch
from decode_cases import draft_bits
from entry_calls import repeated

from hopwell import decode
from hopwell.kernels.problem import Mask, MaskKind

KV_LENS = [70, 0, 3, 330, 17]
ROOM = 48 << 20


def batch(device: str, q_lens: list[int], kind: str = "linear", **options: Any) -> DecodeBatch:
    bits = [draft_bits(kind, q_len, seed) for seed, q_len in enumerate(q_lens)]
    return DecodeBatch(q_lens, KV_LENS, device=device, drafts=bits, **options)


def split_cache(data: DecodeBatch, problem: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as halves of the rows of one cache [pages, heads, page_size, 2 * head_dim], which is vLLM's."""
    return tuple(torch.cat((problem.key, problem.value), -1).split(data.head_dim, -1))


def common(data: DecodeBatch, problem: Any, **more: Any) -> dict[str, Any]:
    return (
        dict(
            query=data.q,
            kv_cache=split_cache(data, problem),
            workspace_buffer=torch.zeros(ROOM, dtype=torch.uint8, device=data.device),
            block_tables=problem.page_table.key,
            seq_lens=problem.kv_lens,
            max_seq_len=max(KV_LENS),
            bmm1_scale=data.scale,
            bmm2_scale=1.0,
            window_left=-1,
            sinks=None,
            kv_layout="HND",
            o_scale=1.0,
            kv_cache_sf=None,
        )
        | more
    )


def test_vllm_xqa_of_one_token(device: str) -> None:
    """The output is the front of one that a full graph has padded."""
    data = batch(device, [1] * 5)
    room = torch.full((8, 4, 128), 7.0, dtype=data.dtype, device=device)
    options = dict(q_len_per_req=1, mask=None, q_cu_seq_lens=None, out=room[: data.tokens])
    out = repeated(decode.xqa_batch_decode_with_kv_cache, data, common(data, data.decode(16), **options))
    data.expected_decode().check(out)
    assert (room[data.tokens :] == 7).all()


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("heads", [4, 16])
def test_vllm_xqa_of_uneven_drafts(kv_dtype: torch.dtype | None, heads: int, device: str) -> None:
    """Lengths come from the device; rows behind the last request's keep what they hold, and are not read."""
    data = batch(device, [3, 0, 5, 1, 6], "tree", heads=heads, kv_heads=2, kv_dtype=kv_dtype)
    problem = data.decode(16, DRAFT, ragged=True)
    padding = data.q.new_full((4, heads, 128), torch.nan)
    out = torch.full((data.tokens + 4, heads, 128), 7.0, dtype=data.dtype, device=device)
    mask = torch.cat((problem.draft_mask, problem.draft_mask[:4]))
    options = dict(query=torch.cat((data.q, padding)), out=out, mask=mask, q_len_per_req=6)
    options |= dict(q_cu_seq_lens=data.ints(starts(data.q_lens)), return_lse=True, return_lse_base="basee")
    given, lse = repeated(decode.xqa_batch_decode_with_kv_cache, data, common(data, problem, **options))
    expected = data.expected_decode(DRAFT)
    assert given is out
    expected.check(out[: data.tokens])
    expected.check_lse(lse[: data.tokens], natural=True)
    assert (out[data.tokens :] == 7).all()


def test_sglang_decode(device: str) -> None:
    """Every argument that its backend gives; the workspace is for others' kernels and too small for this one."""
    data = batch(device, [1] * 5)
    problem, mask = data.decode(16, Mask(MaskKind.SLIDING_WINDOW, 50)), Mask(MaskKind.SLIDING_WINDOW, 50)
    options: dict[str, Any] = dict(out_dtype=data.dtype, skip_softmax_threshold_scale_factor=None, window_left=50)
    options |= dict(multi_ctas_kv_counter_buffer=torch.zeros(64, dtype=torch.uint8, device=device), mask=None)
    options |= dict(workspace_buffer=torch.zeros(1024, dtype=torch.uint8, device=device))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device)
    out = repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, sinks=sinks, **options))
    data.expected_decode(mask, sinks=sinks).check(out)


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_several_tokens_without_a_mask_are_causal(ragged: bool, device: str) -> None:
    """They are in trtllm-gen too; the log-sum-exp is to base 2. Beyond 32 tokens there is more than a word of bits."""
    q_lens = [3, 0, 40, 1, 6] if ragged else [3] * 5
    data = batch(device, q_lens)
    problem = data.decode(16, DRAFT, ragged=True)
    lse = torch.full((data.tokens, data.heads), torch.nan, device=device)
    options: dict[str, Any] = dict(q_len_per_req=3, lse=lse, return_lse=True)
    if ragged:
        options |= dict(q_len_per_req=None, max_q_len=40, cum_seq_lens_q=data.ints(starts(q_lens)))
    out, found = repeated(decode.trtllm_batch_decode_with_kv_cache, data, common(data, problem, **options))
    expected = data.expected_decode(DRAFT)
    expected.check(out)
    assert found is lse
    expected.check_lse(lse, natural=False)


@pytest.mark.parametrize(
    ("q_lens", "heads", "kv_dtype"),
    [([1] * 5, 4, None), ([3] * 5, 32, None), ([3, 0, 7, 1, 6], 4, torch.float8_e4m3fn)],
    ids=["one", "rows", "ragged-e4m3"],
)
def test_context_parallel_ranks(q_lens: list[int], heads: int, kv_dtype: torch.dtype | None, device: str) -> None:
    """Ranks mask by where keys are among those of all, and are merged by log-sum-exps, as in latent attention."""
    data = batch(device, q_lens, heads=heads, kv_heads=1, kv_dtype=kv_dtype)
    options: dict[str, Any] = dict(cp_world=2, causal_seqlens_kv_global=data.ints(KV_LENS), return_lse=True)
    if len(set(q_lens)) > 1:
        options |= dict(max_q_len=max(q_lens), cum_seq_lens_q=data.ints(starts(q_lens)))
    else:
        options |= dict(q_len_per_req=q_lens[0])
    parts = []
    for rank in range(2):
        arguments = common(data, data.shard(2, rank).decode(16), cp_rank=rank, **options)
        parts.append(repeated(decode.trtllm_batch_decode_with_kv_cache, data, arguments))
    data.expected_decode(DRAFT).check_merged(parts, natural=False)


def test_pages_of_k_and_v(device: str) -> None:
    """K and V have page ids of their own."""
    data = batch(device, [1] * 5)
    problem = data.decode(16)
    moved = torch.roll(problem.value, 1, 0)
    table = torch.stack((problem.page_table.key, (problem.page_table.key + 1) % len(moved)), 1)
    options = dict(kv_cache=(problem.key, moved), block_tables=table, uses_shared_paged_kv_idx=False)
    data.expected_decode(FULL).check(decode.trtllm_batch_decode_with_kv_cache(**common(data, problem, **options)))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_e4m3_queries(out_dtype: torch.dtype | None, device: str) -> None:
    """They give the bits of the same values in 16 bits; the output is e4m3 unless asked otherwise."""
    fp8 = torch.float8_e4m3fn
    data = batch(device, [1] * 5, kv_dtype=fp8)
    data.q = data.q.to(fp8)
    arguments = common(data, data.decode(16), out_dtype=out_dtype)
    out = repeated(decode.trtllm_batch_decode_with_kv_cache, data, arguments)
    assert out.dtype == (out_dtype or fp8)
    wide = data.q.to(torch.float16 if out_dtype == torch.float16 else torch.bfloat16)
    more = dict(query=wide, out_dtype=out_dtype or fp8)
    assert torch.equal(out, decode.trtllm_batch_decode_with_kv_cache(**arguments | more))


def test_e4m3_queries_need_an_e4m3_cache() -> None:
    data = batch("cpu", [1] * 5)
    data.q = data.q.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"query must be torch\.bfloat16 or torch\.float16"):
        decode.trtllm_batch_decode_with_kv_cache(**common(data, data.decode(16)))
