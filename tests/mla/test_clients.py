"""MLA calls of serving engines, copied from their sources, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.mla import MlaBatch, PackedBatch, with_topk
from helpers.batches.prefill import starts
from helpers.calls.entries import repeated

from hopwell import decode

KV_LENS = [70, 0, 3, 330]


def batch(device: str, q_lens: list[int], top_k: int = 0, **options: Any) -> MlaBatch:
    return with_topk(MlaBatch, q_lens, KV_LENS, top_k, device=device, **({"heads": 8} | options))


def arguments_of(data: MlaBatch, problem: Any) -> dict[str, Any]:
    return dict(
        kv_cache=problem.key,
        workspace_buffer=torch.zeros(1 << 20, dtype=torch.int8, device=data.device),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=None if problem.page_table is None else problem.page_table.key,
        seq_lens=problem.kv_lens,
        max_seq_len=max(KV_LENS),
        bmm1_scale=data.scale,
        bmm2_scale=1.0,
        multi_ctas_kv_counter_buffer=torch.zeros(64, dtype=torch.uint8, device=data.device),
    )


def call(data: MlaBatch, problem: Any, **more: Any) -> Any:
    return repeated(decode.trtllm_batch_decode_with_kv_cache_mla, data, arguments_of(data, problem) | more)


def even(data: MlaBatch) -> torch.Tensor:
    return data.q.view(data.size, -1, data.heads, data.head_dim)


@pytest.mark.parametrize("heads", [8, 40])
def test_vllm_and_sglang(heads: int, device: str) -> None:
    """Arguments of both engines are accepted. The log-sum-exp has base 2, or the requested base."""
    data = batch(device, [1] * 4, heads=heads)
    problem, expected = data.decode(64), data.expected_mla()
    options: dict[str, Any] = dict(query=even(data), skip_softmax_threshold_scale_factor=None, enable_dcp=False)
    out, lse = call(data, problem, return_lse=True, cp_world=1, cp_rank=0, causal_seqlens_kv_global=None, **options)
    expected.check(out.flatten(0, 1))
    expected.check_lse(lse, natural=False)
    given = torch.full((data.size, 1, heads), torch.nan, device=device)
    assert torch.equal(call(data, problem, lse=given, return_lse_base="basee", is_var_seq=False, **options), out)
    expected.check_lse(given[:, 0], natural=True)


@pytest.mark.parametrize("top_k", [0, 68], ids=["dense", "sparse"])
def test_uneven_new_tokens(top_k: int, device: str) -> None:
    """Lengths come from the device; rows after the last request keep their contents, and are not read."""
    data = batch(device, [3, 0, 2, 1], top_k)
    problem = data.decode(64, ragged=True)
    query = torch.cat((data.q, data.q.new_full((4, data.heads, 576), torch.nan)))
    out = torch.full((data.tokens + 4, data.heads, 512), 7.0, dtype=data.dtype, device=device)
    options: dict[str, Any] = dict(query=query, out=out, cum_seq_lens_q=data.ints(starts(data.q_lens)), max_q_len=3)
    if top_k:
        table = torch.cat((problem.token_table, problem.token_table[:4]))
        options |= dict(block_tables=table, sparse_mla_top_k=top_k)
    found, lse = call(data, problem, return_lse=True, **options)
    assert found is out
    expected = data.expected_mla()
    expected.check(out[: data.tokens])
    expected.check_lse(lse[: data.tokens], natural=False)
    assert (out[data.tokens :] == 7).all()


@pytest.mark.parametrize("heads", [8, 40])
def test_replays_with_other_new_tokens(heads: int, device: str) -> None:
    """Under a graph, requests get other numbers of new tokens, from none to the maximum.

    In the emulator, later calls read them from the first call's memory.
    """
    batches = [
        batch(device, q_lens, heads=heads, seed=seed)
        for seed, q_lens in enumerate(([3, 0, 2, 1], [0, 1, 3, 0], [0] * 4, [3] * 4, [1, 0, 0, 3]))
    ]
    rows = max(data.tokens for data in batches)
    buffers = arguments_of(batches[0], batches[0].decode(64, ragged=True)) | dict(
        query=torch.empty(rows, heads, 576, dtype=torch.bfloat16, device=device),
        out=torch.empty(rows, heads, 512, dtype=torch.bfloat16, device=device),
        lse=torch.empty(rows, heads, device=device),
        cum_seq_lens_q=torch.empty(5, dtype=torch.int32, device=device),
        max_q_len=3,
    )

    def fill(data: MlaBatch) -> None:
        problem = data.decode(64, ragged=True)
        for name in ("kv_cache", "block_tables", "seq_lens"):
            buffers[name].copy_(arguments_of(data, problem)[name])
        buffers["cum_seq_lens_q"].copy_(data.ints(starts(data.q_lens)))
        buffers["query"].fill_(torch.nan)[: data.tokens] = data.q
        for name in ("out", "lse"):
            buffers[name].fill_(7.0)

    def run() -> None:
        decode.trtllm_batch_decode_with_kv_cache_mla(**buffers)

    replay = run
    if device == "cuda":
        fill(batches[0])
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    for data in batches:
        fill(data)
        replay()
        if data.tokens:
            expected = data.expected_mla()
            expected.check(buffers["out"][: data.tokens])
            expected.check_lse(buffers["lse"][: data.tokens], natural=False)
        assert (buffers["out"][data.tokens :] == 7).all()
        assert (buffers["lse"][data.tokens :] == 7).all()


def test_vllm_sparse_rows_of_656_bytes(device: str) -> None:
    """Top-k lengths count per token, rows have scales of their own, and the log-sum-exp is returned."""
    top_k = 68
    data = with_topk(PackedBatch, [1] * 4, KV_LENS, top_k, device=device, heads=8)
    problem = data.decode(64)
    counted = torch.cat([data.counted(i).sum(1) for i in range(data.size)]).to(torch.int32).to(device)
    options: dict[str, Any] = dict(query=even(data), kv_cache=data.packed(64), kv_scale_format="arbitrary_fp32")
    options |= dict(block_tables=problem.token_table[:, None], sparse_mla_top_k=top_k, sparse_mla_top_k_lens=counted)
    out, lse = call(data, problem, return_lse=True, **options)
    expected = data.expected_mla()
    expected.check(out.flatten(0, 1))
    expected.check_lse(lse, natural=False)


def test_more_new_tokens_than_their_bound(device: str) -> None:
    """No write goes past the room for new tokens, and other requests do not change."""
    data = batch(device, [3, 0, 2, 1])
    out = torch.full((data.tokens, data.heads, 512), 7.0, dtype=data.dtype, device=device)
    options: dict[str, Any] = dict(query=data.q, out=out, cum_seq_lens_q=data.ints(starts(data.q_lens)), max_q_len=2)
    call(data, data.decode(64, ragged=True), **options)
    assert (out[2] == 7).all()
    expected = data.expected_mla()
    type(expected)(*(part[3:] for part in vars(expected).values())).check(out[3:])


def test_counts_of_topk_indices(device: str) -> None:
    """Lengths are given for each new token; a length per request is ignored."""
    data = batch(device, [2] * 4, 68)
    problem = data.decode(16)
    counted = torch.cat([data.counted(i).sum(1) for i in range(data.size)]).to(torch.int32).to(device)
    options = dict(query=even(data), block_tables=problem.token_table.view(data.size, 2, -1), sparse_mla_top_k=68)
    seq_lens = torch.full_like(problem.kv_lens, 10**6)
    out = call(data, problem, sparse_mla_top_k_lens=counted, seq_lens=seq_lens, **options)
    data.expected_mla().check(out.flatten(0, 1))


@pytest.mark.parametrize("q_lens", [[1] * 4, [2] * 4, [3, 0, 2, 1]], ids=["one", "two", "ragged"])
def test_all_topk_indices(q_lens: list[int], device: str) -> None:
    """FlashInfer's sparse backend takes no lengths: the indices themselves mark the tokens that count."""
    data = batch(device, q_lens, 68)
    is_ragged = len(set(q_lens)) > 1
    problem = data.decode(16, ragged=is_ragged)
    counted = torch.cat([data.counted(i) for i in range(data.size)]).to(device)
    table = torch.where(counted, problem.token_table, -1)
    options: dict[str, Any] = dict(query=data.q if is_ragged else even(data), sparse_mla_top_k=68, backend="sparse")
    options["block_tables"] = table if is_ragged else table.view(data.size, -1, 68)
    if is_ragged:
        options |= dict(cum_seq_lens_q=data.ints(starts(q_lens)), max_q_len=3)
    out = call(data, problem, seq_lens=None, max_seq_len=68, **options)
    data.expected_mla().check(out.view(-1, data.heads, 512))
    lens = torch.full((data.tokens,), 68, dtype=torch.int32, device=device)
    assert torch.equal(out, call(data, problem, seq_lens=None, sparse_mla_top_k_lens=lens, **options))


@pytest.mark.parametrize("shape", [(4, 2), (8,)], ids=str)
def test_lengths_of_topk_indices_as_seq_lens(shape: tuple[int, ...], device: str) -> None:
    """FlashInfer's sparse backend takes top-k lengths instead of request lengths."""
    data = batch(device, [2] * 4, 68)
    problem = data.decode(16)
    counted = torch.cat([data.counted(i).sum(1) for i in range(data.size)]).to(torch.int32).to(device)
    options = dict(query=even(data), block_tables=problem.token_table.view(data.size, 2, -1), sparse_mla_top_k=68)
    out = call(data, problem, seq_lens=counted.view(shape), backend="sparse", **options)
    data.expected_mla().check(out.flatten(0, 1))


@pytest.mark.parametrize(
    ("q_lens", "heads", "world"),
    [([1] * 4, 8, 2), ([5] * 4, 2, 3), ([5] * 4, 16, 4), ([3, 0, 7, 1], 16, 2)],
    ids=["one", "few-rows", "rows", "ragged"],
)
def test_context_parallel_ranks(q_lens: list[int], heads: int, world: int, device: str) -> None:
    """Every DCP rank has each ``world``-th key, and masks by the keys' global positions.

    Combined by their log-sum-exps, the ranks give the result of all keys. A rank without a visible key for a token has
    0 and -inf.
    """
    data = batch(device, q_lens, heads=heads)
    is_ragged = len(set(q_lens)) > 1
    options: dict[str, Any] = dict(enable_dcp=True, cp_world=world, causal_seqlens_kv_global=data.ints(KV_LENS))
    options |= dict(query=data.q if is_ragged else even(data), return_lse=True, backend="cute-dsl")
    if is_ragged:
        options |= dict(cum_seq_lens_q=data.ints(starts(q_lens)), max_q_len=max(q_lens))
    parts = []
    for rank in range(world):
        dcp_rank = data.dcp_rank(world, rank)
        out, lse = call(data, dcp_rank.decode(64), cp_rank=rank, **options)
        parts.append((out.view(-1, heads, 512), lse.view(-1, heads)))
    data.expected_mla().check_merged(parts, natural=True)


def test_tables_of_keys_and_values(device: str) -> None:
    data = batch(device, [2] * 4)
    problem = data.decode(64)
    table = problem.page_table.key[:, None].expand(-1, 2, -1).contiguous()
    out = call(data, problem, query=even(data), block_tables=table, uses_shared_paged_kv_idx=False)
    data.expected_mla().check(out.flatten(0, 1))


@pytest.mark.parametrize("heads", [8, 40])
def test_keys_of_a_rank_behind_its_bound(heads: int, device: str) -> None:
    """A rank may hold keys that no row sees: NaN there has no effect."""
    have, bound, world = 700, 140, 2
    seen = MlaBatch([1], [bound // world], heads=heads, device=device)
    data = MlaBatch([1], [have], heads=heads, device=device)
    data.q, data.k[0][: bound // world] = seen.q, seen.k[0]
    data.k[0][bound // world :] = torch.nan
    options = dict(cp_world=world, cp_rank=0, causal_seqlens_kv_global=data.ints([bound]))
    out, lse = call(data, data.decode(64), query=even(data), enable_dcp=True, return_lse=True, **options)
    seen.expected_mla().check(out.flatten(0, 1))
    seen.expected_mla().check_lse(lse)
