"""CUDA graphs, streams and threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import Batch, starts
from concurrent_launches import check_threads, check_two_branches

import hopwell
from hopwell.kernels import Plan, execute

pytestmark = pytest.mark.gpu

LENGTHS = (
    ([5, 0, 130, 257], [77, 3, 130, 700]),
    ([257, 130, 5, 0], [300, 700, 9, 77]),
    ([1, 1, 1, 1], [700, 1, 16, 17]),
)


def graph_inputs() -> dict[str, torch.Tensor]:
    """Buffers that a graph reads: large enough for any of LENGTHS."""
    cuda: dict[str, Any] = dict(device="cuda")
    return dict(
        query=torch.zeros(400, 4, 128, dtype=torch.bfloat16, **cuda),
        kv_cache=torch.zeros(120, 2, 2, 16, 128, dtype=torch.bfloat16, **cuda),
        block_tables=torch.zeros(4, 60, dtype=torch.int32, **cuda),
        seq_lens=torch.zeros(4, dtype=torch.int32, **cuda),
        cum_seq_lens_q=torch.zeros(5, dtype=torch.int32, **cuda),
        out=torch.zeros(400, 4, 128, dtype=torch.bfloat16, **cuda),
    )


def fill(buffers: dict[str, torch.Tensor], data: Batch) -> None:
    key, value, table = data.pages(16)
    buffers["query"][: data.tokens] = data.q
    buffers["kv_cache"][: key.shape[0], 0], buffers["kv_cache"][: key.shape[0], 1] = key, value
    buffers["block_tables"].fill_(-1)
    buffers["block_tables"][:, : table.shape[1]] = table
    buffers["seq_lens"].copy_(data.ints(data.kv_lens))
    buffers["cum_seq_lens_q"].copy_(data.ints(starts(data.q_lens)))


def context(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return hopwell.trtllm_batch_context_with_kv_cache(
        **buffers,
        workspace_buffer=buffers["query"],
        max_q_len=400,
        max_kv_len=960,
        bmm1_scale=128**-0.5,
        bmm2_scale=1.0,
        batch_size=4,
        cum_seq_lens_kv=buffers["cum_seq_lens_q"],
    )


def test_graph_replays_with_new_lengths_and_tables() -> None:
    buffers = graph_inputs()
    context(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        context(buffers)
    for seed, lengths in enumerate(LENGTHS):
        data = Batch(*lengths, seed=seed)
        fill(buffers, data)
        for _ in range(3):
            buffers["out"].fill_(7)
            graph.replay()
        replayed = buffers["out"].clone()
        data.expected().check(replayed[: data.tokens])
        assert (replayed[data.tokens :] == 7).all()
        context(buffers)
        assert torch.equal(replayed, buffers["out"])


def test_graph_of_many_launches_on_two_branches() -> None:
    """Launches in a graph may run at the same time: each needs work counters of its own."""
    data = Batch([600], [600])
    problem = data.problem(16)
    plain = execute(problem).clone()
    plan = Plan(problem)
    problems = [data.problem(16, out=torch.empty_like(plain)) for _ in range(16)]
    check_two_branches(plan, problems, plain, 7)


def test_graph_of_the_cudnn_entry() -> None:
    """Replays see other lengths, offsets and tables than the capture; rows past the end of a request stay."""
    buffers = graph_inputs()
    q_lens, offsets = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 5))
    lse = torch.zeros(4, 300, 4, device="cuda")

    def call() -> None:
        hopwell.cudnn_batch_prefill_with_kv_cache(
            buffers["query"],
            buffers["kv_cache"][:, 0],
            buffers["kv_cache"][:, 1],
            128**-0.5,
            buffers["query"],
            max_token_per_sequence=300,
            max_sequence_kv=960,
            actual_seq_lens_q=q_lens,
            actual_seq_lens_kv=buffers["seq_lens"],
            block_tables=buffers["block_tables"],
            causal=True,
            return_lse=True,
            batch_offsets_q=offsets,
            batch_offsets_o=offsets,
            out=buffers["out"],
            lse=lse,
            is_cuda_graph_compatible=True,
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed, lengths in enumerate(LENGTHS):
        data = Batch(*lengths, seed=seed)
        fill(buffers, data)
        q_lens.copy_(data.ints(data.q_lens))
        offsets.copy_(buffers["cum_seq_lens_q"] * 512)
        results = []
        for run in (graph.replay, graph.replay, call):
            buffers["out"].fill_(7)
            lse.fill_(7)
            run()
            results.append((buffers["out"].clone(), lse.clone()))
        expected = data.expected()
        expected.check(buffers["out"][: data.tokens])
        expected.check_lse(torch.cat([lse[i, :n] for i, n in enumerate(data.q_lens)]))
        assert (buffers["out"][data.tokens :] == 7).all()
        assert int((lse == 7).sum()) == lse.numel() - data.tokens * 4
        for result in results[:2]:
            assert all(torch.equal(*pair) for pair in zip(result, results[2], strict=True))


def test_streams_and_threads_do_not_disturb_each_other() -> None:
    work = []
    for seed in range(4):
        data = Batch([700, 300], [700, 900], seed=seed)
        problem = data.problem(16)
        work.append((problem, execute(problem).clone()))
    check_threads(work, 7)


def test_first_call_inside_a_capture() -> None:
    """A kernel may be loaded while a graph is being captured."""
    data = Batch([33, 7], [90, 7], head_dim=64, dtype=torch.float16)
    problem = data.problem(256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execute(problem)
    graph.replay()
    data.expected().check(problem.out)
