"""CUDA graphs, streams and threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, check_statistics, starts
from helpers.calls.entries import context_arguments, cudnn_arguments, elements, fmha_v2_arguments
from helpers.device.concurrent_launches import check_jobs, check_threads, check_two_branches
from torch.utils._pytree import tree_leaves

import hopwell
from hopwell._calls.launch import RECENT
from hopwell._calls.switches import forget_calls
from hopwell.kernels import Plan, execute
from hopwell.kernels.launch import tickets

pytestmark = pytest.mark.gpu

LENGTHS = (
    ([5, 0, 130, 257], [77, 3, 130, 700]),
    ([257, 130, 5, 0], [300, 700, 9, 77]),
    ([1, 1, 1, 1], [700, 1, 16, 17]),
)
# Room for the tensors of any batch.
TOKENS, KEYS, PAGES, WIDTH = 400, 1200, 120, 60
BOUNDS = dict(max_q_len=300, max_kv_len=960)


def room(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the tensor at the beginning of a longer one, with NaN after it."""
    longer = tensor.new_full((size, *tensor.shape[1:]), math.nan)
    longer[: tensor.shape[0]] = tensor
    return longer


def paged(data: Batch, order: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return K and V pages, and their table."""
    key, value, table = data.pages(16, order=order)
    return room(key, PAGES), room(value, PAGES), torch.nn.functional.pad(table, (0, WIDTH - table.shape[1]), value=-1)


def query_and_out(data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    query = room(data.q, TOKENS)
    return query, torch.full_like(query, 7.0)


def context(data: Batch) -> dict[str, Any]:
    key, value, table = paged(data)
    query, out = query_and_out(data)
    return context_arguments(data, torch.stack((key, value), 1), table, query=query, out=out, **BOUNDS)


def context_with_everything(data: Batch) -> dict[str, Any]:
    """Return a call with separate page ids for K and V, sinks, and scales that the kernel reads."""
    _, value, v_table = paged(data, order=5)
    key, _, k_table = paged(data)
    changes = dict(
        kv_cache=(key, value),
        block_tables=torch.stack((k_table, v_table), 1),
        uses_shared_paged_kv_idx=False,
        sinks=torch.linspace(-3, 3, 4, device=data.device).roll(data.seed),
        bmm1_scale=torch.full((1,), 0.06 + 0.02 * data.seed, device=data.device),
        bmm2_scale=torch.full((1,), 1.5 - data.seed, device=data.device),
    )
    return context(data) | changes


def check_context(data: Batch, arguments: dict[str, Any], out: torch.Tensor) -> None:
    expected = data.expected(scale=float(arguments["bmm1_scale"]), sinks=arguments.get("sinks"))
    expected.check(out[: data.tokens], factor=float(arguments["bmm2_scale"]))


def fmha_v2(data: Batch, layout: str) -> dict[str, Any]:
    query, out = query_and_out(data)
    changes: dict[str, Any] = dict(out=out, save_softmax_stats=True, **BOUNDS)
    if layout == "SEPARATE_Q_K_V":
        key, value, _ = data.ragged()
        return fmha_v2_arguments(data, (query, room(key, KEYS), room(value, KEYS)), layout, **changes)
    key, value, table = paged(data)
    return fmha_v2_arguments(data, (query, torch.stack((key, value), 1)), layout, block_tables=table, **changes)


def check_fmha_v2(data: Batch, arguments: dict[str, Any], out: torch.Tensor, statistics: torch.Tensor) -> None:
    data.expected().check(out[: data.tokens])
    check_statistics(statistics[: data.tokens], data.expected_statistics())


def cudnn(data: Batch, **more: Any) -> dict[str, Any]:
    query, out = query_and_out(data)
    lse = torch.full((4, 300, 4), 7.0, device=data.device)
    bounds = dict(max_token_per_sequence=300, max_sequence_kv=960, is_cuda_graph_compatible=True)
    return cudnn_arguments(data, **more, q=query, out=out, lse=lse, **bounds)


def cudnn_paged(data: Batch) -> dict[str, Any]:
    key, value, table = paged(data)
    return cudnn(data, k_cache=key, v_cache=value, block_tables=table)


def cudnn_ragged(data: Batch) -> dict[str, Any]:
    """Return a call with offsets for each tensor, and with gaps between the requests of K and of V."""
    key, _, k_begins = data.ragged(gap=2)
    _, value, v_begins = data.ragged(gap=5)
    return cudnn(
        data,
        k_cache=room(key, KEYS),
        v_cache=room(value, KEYS),
        batch_offsets_k=elements(data, k_begins, 256),
        batch_offsets_v=elements(data, v_begins, 256),
        batch_offsets_stats=elements(data, starts(data.q_lens), data.heads),
        causal=False,
    )


def check_cudnn(data: Batch, arguments: dict[str, Any], out: torch.Tensor, lse: torch.Tensor) -> None:
    """Check that rows past a request's end are -inf in a padded log-sum-exp, and unchanged with offsets for rows."""
    expected = data.expected(CAUSAL if arguments["causal"] else FULL)
    expected.check(out[: data.tokens])
    if arguments.get("batch_offsets_stats") is None:
        rows, rest = torch.cat([lse[i, :n] for i, n in enumerate(data.q_lens)]), -torch.inf
    else:
        rows, rest = lse.flatten(0, 1)[: data.tokens], 7
    expected.check_lse(rows)
    assert int((lse == rest).sum()) == lse.numel() - rows.numel()


CONTEXT, FMHA_V2, CUDNN = (
    (hopwell.trtllm_batch_context_with_kv_cache, check_context),
    (hopwell.trtllm_fmha_v2_prefill, check_fmha_v2),
    (hopwell.cudnn_batch_prefill_with_kv_cache, check_cudnn),
)
ENTRIES = {
    "context": (context, *CONTEXT),
    "context-everything": (context_with_everything, *CONTEXT),
    "fmha_v2-separate": (partial(fmha_v2, layout="SEPARATE_Q_K_V"), *FMHA_V2),
    "fmha_v2-paged": (partial(fmha_v2, layout="Q_PAGED_KV_HND"), *FMHA_V2),
    "cudnn-paged": (cudnn_paged, *CUDNN),
    "cudnn-ragged": (cudnn_ragged, *CUDNN),
}


def tensors(nested: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", ENTRIES)
def test_replays_see_new_inputs(name: str) -> None:
    """Every tensor changes in place, while numbers and shapes stay; memory after a batch is not written."""
    arguments_of, entry, check = ENTRIES[name]
    buffers = arguments_of(Batch(*LENGTHS[0], seed=9))
    call = partial(entry, **buffers)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()

    def replay() -> Any:
        graph.replay()
        return captured

    for seed, lengths in enumerate(LENGTHS):
        data = Batch(*lengths, seed=seed)
        arguments, outs = arguments_of(data), []
        for run in (replay, replay, call):
            for buffer, value in zip(tensors(buffers), tensors(arguments), strict=True):
                buffer.copy_(value)
            results = tensors(run())
            check(data, arguments, *results)
            assert (results[0][data.tokens :] == 7).all()
            outs.append(results[0].clone())
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


def test_graph_of_many_launches_on_two_branches() -> None:
    """Launches in a graph may run at the same time: each needs work counters of its own."""
    data = Batch([600], [600])
    problem = data.problem(16)
    plain = execute(problem).clone()
    plan = Plan(problem)
    problems = [data.problem(16, out=torch.empty_like(plain)) for _ in range(16)]
    check_two_branches(plan, problems, plain, 7)


def test_streams_and_threads_do_not_disturb_each_other() -> None:
    work = []
    for seed in range(4):
        data = Batch([700, 300], [700, 900], seed=seed)
        problem = data.problem(16)
        work.append((problem, execute(problem).clone()))
    check_threads(work, 7)


def test_threads_that_call_an_entry() -> None:
    """More kinds of calls than are recognised without a key.

    Each call is new to all threads at once and then repeated by them, with tensors of their own.
    """

    def work(thread: int) -> Callable[[], None]:
        calls = []
        for kind in range(RECENT + 2):
            data = Batch([97 + kind, 30], [150, 90 + kind], seed=thread)
            key, value, table = data.pages(16)
            calls.append((context_arguments(data, (key, value), table), execute(data.problem(16))))

        def job() -> None:
            for i in range(20 * len(calls)):
                arguments, want = calls[i % len(calls)]
                got = hopwell.trtllm_batch_context_with_kv_cache(**arguments)
                assert torch.equal(got, want), "results differ"

        return job

    check_jobs([work(thread) for thread in range(4)])


def test_first_call_inside_a_capture() -> None:
    """A kernel may be loaded while a graph is being captured."""
    data = Batch([33, 7], [90, 7], head_dim=64, dtype=torch.float16)
    problem = data.problem(256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        execute(problem)
    graph.replay()
    data.expected().check(problem.out)


def test_first_calls_in_a_cuda_graph_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """``reduce-overhead`` without an eager call before. Nothing of hopwell may stay in the memory of the graphs."""
    monkeypatch.setattr(tickets, "_sets", {})
    forget_calls()
    torch._dynamo.reset()
    data = Batch([33, 7], [90, 37])
    key, value, table = data.pages(16)
    arguments = context_arguments(data, (key, value), table)
    query = arguments.pop("query")

    def model(query: torch.Tensor) -> torch.Tensor:
        first = hopwell.trtllm_batch_context_with_kv_cache(query=query, **arguments)
        return hopwell.trtllm_batch_context_with_kv_cache(query=first + 1, **arguments) * 2

    compiled, want = torch.compile(model, mode="reduce-overhead", fullgraph=True), None
    with torch.no_grad():
        results = [compiled(query.clone()).clone() for _ in range(6)]
        want = model(query)
    assert all(torch.equal(result, want) for result in results)
