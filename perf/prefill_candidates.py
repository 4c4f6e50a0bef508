"""Implementations of prefill to compare: each maps a workload's tensors to a call that fills and returns an output.

A candidate raises for workloads that it cannot run; the run records the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import hopwell
from hopwell._entries.fmha_v2 import FmhaV2Call, fmha_v2_problem
from hopwell.kernels import execute, support
from hopwell.kernels.registry import resolve
from hopwell.perf.family import Call, Candidate
from hopwell.perf.paging import page_starts
from hopwell.perf.peers import flash_attention_3, flashinfer, for_pages, peer_workspace
from hopwell.perf.prefill_workloads import Tensors
from hopwell.perf.quantized import BF16, E4M3

GROUP = 64  # queries that decide together which keys to skip
LARGEST_E4M3 = 448.0

Lengths = tuple[torch.Tensor, int, int, float, float, int, torch.Tensor, torch.Tensor]


def _lengths(t: Tensors) -> Lengths:
    """Return the arguments of the two TensorRT-LLM entries from ``seq_lens`` to ``cum_seq_lens_kv``."""
    work = t.work
    bounds = max(work.q_lens), max(work.kv_lens)
    return t.kv_lens, *bounds, work.scale, 1.0, work.batch, t.q_starts, t.kv_starts


def _fmha_v2(function: Callable[..., Any], t: Tensors, workspace: torch.Tensor, *qkv: Any, table: Any) -> partial[Any]:
    """Return a call of hopwell's function or of its FlashInfer counterpart. ``qkv`` is followed by its layout."""
    work = t.work
    return partial(
        function,
        *qkv,
        workspace,
        *_lengths(t),
        block_tables=table,
        out=t.output(),
        sinks=None if t.sinks is None else [t.sinks],
        mask_mode="causal" if work.causal else "padding",
        window_left=work.window_left,
        skip_softmax_threshold_scale_factor=work.skip_softmax,
    )


def _context(
    function: Callable[..., Any], t: Tensors, workspace: torch.Tensor, cache: Any, table: torch.Tensor, **options: Any
) -> partial[Any]:
    """Return a call of hopwell's context entry or of its FlashInfer counterpart."""
    return partial(
        function,
        t.q,
        cache,
        workspace,
        table,
        *_lengths(t),
        window_left=t.work.window_left,
        out=t.output(),
        skip_softmax_threshold_scale_factor=t.work.skip_softmax or None,
        causal=t.work.causal,
        **options,
    )


def _cudnn(function: Callable[..., Any], t: Tensors, workspace: torch.Tensor, *pages: torch.Tensor, table: Any) -> Call:
    """Return the candidate of cuDNN's entry, whose offsets count elements."""
    work = t.work
    offsets = {
        f"batch_offsets_{name}": t.q_starts * (work.heads * dim)
        for name, dim in (("q", work.head_dim), ("o", work.v_head_dim))
    }
    call = partial(
        function,
        t.q,
        *pages,
        work.scale,
        workspace,
        max_token_per_sequence=max(work.q_lens),
        max_sequence_kv=max(work.kv_lens),
        actual_seq_lens_q=t.q_lens.view(-1, 1, 1, 1),
        actual_seq_lens_kv=t.kv_lens.view(-1, 1, 1, 1),
        block_tables=table,
        causal=work.causal,
        return_lse=False,
        **offsets,
        out=t.output(),
        is_cuda_graph_compatible=True,
    )
    return lambda: call()[0]  # without the log-sum-exp


def _only_bf16(t: Tensors) -> None:
    if t.work.q_dtype is not BF16 or t.work.kv_dtype is not BF16:
        raise NotImplementedError("bf16 only")


def _only_one_dtype(t: Tensors) -> None:
    if t.work.q_dtype is not t.work.kv_dtype:
        raise NotImplementedError("queries, keys and values of one type only")


def hopwell_dense(t: Tensors) -> partial[Any]:
    if t.work.q_dtype is not t.work.kv_dtype:
        raise NotImplementedError("quantized caches have pages")
    return _fmha_v2(hopwell.trtllm_fmha_v2_prefill, t, t.q, (t.q, t.k, t.v), "SEPARATE_Q_K_V", table=None)


def hopwell_paged(page_size: int) -> Candidate:
    def prepare(t: Tensors) -> Call:
        key, value, table, _, scales = t.pages(page_size)
        if not t.work.causal and t.work.q_dtype is t.work.kv_dtype is BF16:
            pages = key.transpose(1, 2), value.transpose(1, 2)
            return _cudnn(hopwell.cudnn_batch_prefill_with_kv_cache, t, t.q, *pages, table=table)
        return _context(
            hopwell.trtllm_batch_context_with_kv_cache,
            t,
            t.q,
            (key, value),
            table,
            kv_layout="NHD",
            sinks=t.sinks,
            kv_block_scales=scales,
        )

    return prepare


def left_out(t: Tensors) -> str:
    """Return the share of visited keys that skip-softmax leaves out, or "" without skip-softmax."""
    if not t.work.skip_softmax:
        return ""
    call = hopwell_dense(t)
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    problem = fmha_v2_problem(FmhaV2Call(**bound.arguments))
    count = torch.zeros(1, dtype=torch.int32, device=t.q.device)
    execute(replace(problem, skipped_tiles=count))
    keys = resolve(problem, support.arch_of(t.q.device)).tile.n
    visited = 0
    for q_len, kv_len in zip(t.work.q_lens, t.work.kv_lens, strict=True):
        visited += sum(-(-min(end, kv_len) // keys) for end in range(kv_len - q_len + GROUP, kv_len + GROUP, GROUP))
    return f"{int(count) / (t.work.heads * visited):.0%} of the keys left out, by {keys} for {GROUP} queries"


def fa4(page_size: int | None = None) -> Candidate:
    def prepare(t: Tensors) -> Call:
        from flash_attn.cute.interface import _flash_attn_fwd

        _only_one_dtype(t)
        work, out = t.work, t.output()
        q, k, v, o = t.q, t.k, t.v, out
        options: dict[str, Any] = {}
        if page_size is not None:
            k, v, table, *_ = t.pages(page_size)
            options = dict(page_table=table, seqused_k=t.kv_lens)
        if work.uniform:
            q, o = (x.unflatten(0, (work.batch, -1)) for x in (q, o))
            k, v = (x.unflatten(0, (work.batch, -1)) for x in (k, v)) if page_size is None else (k, v)
        else:
            options |= dict(cu_seqlens_q=t.q_starts, max_seqlen_q=max(work.q_lens))
            options |= dict(cu_seqlens_k=t.kv_starts, max_seqlen_k=max(work.kv_lens)) if page_size is None else {}
        if work.window_left >= 0:
            options |= dict(window_size_left=work.window_left, window_size_right=0)
        else:
            options |= dict(causal=work.causal)
        sinks = None if t.sinks is None else t.sinks.to(BF16)

        def call() -> torch.Tensor:
            _flash_attn_fwd(q, k, v, out=o, learnable_sink=sinks, **options)
            return out

        return call

    return prepare


def fa3(page_size: int | None = None) -> Candidate:
    """Prepare FlashAttention 3 with one split of the keys, its fastest setting for long queries."""

    def prepare(t: Tensors) -> Call:
        _only_one_dtype(t)
        work, q, k, v = t.work, t.q, t.k, t.v
        options: dict[str, Any] = {}
        if page_size is not None:
            k, v, table, *_ = t.pages(page_size)
            options = dict(page_table=table.clamp(min=0), seqused_k=t.kv_lens)
        if work.uniform:
            q = q.unflatten(0, (work.batch, -1))
            k, v = (x.unflatten(0, (work.batch, -1)) for x in (k, v)) if page_size is None else (k, v)
        else:
            options |= dict(cu_seqlens_q=t.q_starts, max_seqlen_q=max(work.q_lens))
            options |= dict(cu_seqlens_k=t.kv_starts, max_seqlen_k=max(work.kv_lens)) if page_size is None else {}
        options |= dict(sinks=None if t.sinks is None else t.sinks.to(BF16))
        windowed = work.window_left >= 0
        call = flash_attention_3(
            q,
            k,
            v,
            softmax_scale=work.scale,
            is_causal=work.causal and not windowed,
            window_size_left=work.window_left,
            window_size_right=0 if windowed else -1,
            **options,
        )
        return lambda: call().reshape(work.tokens, work.heads, work.v_head_dim)

    return prepare


def sdpa(backend: str) -> Candidate:
    """Prepare torch's attention through one of its backends, an element of ``SDPBackend``."""

    def prepare(t: Tensors) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        work = t.work
        _only_bf16(t)
        if not work.uniform or work.window_left >= 0 or work.sinks:
            raise NotImplementedError("requests of one length without window and sinks only")
        group = work.heads // work.kv_heads
        q, k, v = (tokens.view(work.batch, -1, *tokens.shape[1:]).transpose(1, 2) for tokens in (t.q, t.k, t.v))
        options: dict[str, Any] = dict(is_causal=work.causal, enable_gqa=group > 1)

        def call() -> torch.Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
            return out.transpose(1, 2).reshape(work.tokens, work.heads, work.v_head_dim)

        return call

    return prepare


def cudnn_fp8_graph(t: Tensors) -> Call:
    """Prepare cuDNN's e4m3 attention directly from its frontend.

    The output is bfloat16 on cards where cuDNN supports that for e4m3. On Hopper it is e4m3, since cuDNN refuses any
    other.
    """
    work = t.work
    if work.q_dtype is not E4M3 or work.kv_dtype is not E4M3:
        raise NotImplementedError("e4m3 only")
    if not work.uniform or work.window_left >= 0 or work.sinks:
        raise NotImplementedError("requests of one length without window and sinks only")
    import cudnn

    try:
        return _cudnn_fp8_graph(cudnn, t, t.output())
    except cudnn.cudnnGraphNotSupportedError:
        return _cudnn_fp8_graph(cudnn, t, torch.empty_like(t.output(), dtype=E4M3))


def _cudnn_fp8_graph(cudnn: Any, t: Tensors, out: torch.Tensor) -> Call:
    types, handle = cudnn.data_type, cudnn.create_handle()
    names = {E4M3: types.FP8_E4M3, BF16: types.BFLOAT16, torch.float32: types.FLOAT}
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=handle,
    )
    q, k, v, o = (x.unflatten(0, (t.work.batch, -1)).transpose(1, 2) for x in (t.q, t.k, t.v, out))
    # Weights are at most 1, and their scale gives small weights the best e4m3 resolution. All other scales are 1.
    values = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), 1.0)
    values |= {"scale_s": LARGEST_E4M3, "descale_s": 1 / LARGEST_E4M3}
    scales = {name: torch.full((1, 1, 1, 1), value, device=t.device) for name, value in values.items()}
    inputs = {"q": q, "k": k, "v": v, **scales}
    declared = {
        name: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=names[x.dtype])
        for name, x in inputs.items()
    }
    # Without a prefix, causal masks aligned top left and bottom right agree; Hopper supports the former. The largest
    # weight and the largest output are not outputs of the graph, because a kernel that computes them does more work.
    attention = graph.sdpa_fp8(
        **declared, attn_scale=t.work.scale, use_causal_mask=t.work.causal, generate_stats=False
    )[0]
    attention.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride())).set_data_type(names[o.dtype])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    pack = {declared[name]: x for name, x in inputs.items()} | {attention: o}
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=t.device)

    def call() -> torch.Tensor:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)  # a capture has another stream
        graph.execute(pack, workspace, handle=handle)
        return out

    return call


def flashinfer_fmha_v2(page_size: int | None = None) -> Candidate:
    def prepare(t: Tensors) -> Call:
        function = flashinfer().prefill.trtllm_fmha_v2_prefill
        _only_one_dtype(t)
        if page_size is None:
            return _fmha_v2(function, t, peer_workspace(), (t.q, t.k, t.v), "SEPARATE_Q_K_V", table=None)
        if t.work.head_dim != t.work.v_head_dim:
            raise NotImplementedError("pools of keys and values of one head dim only")
        key, value, table, *_ = t.pages(page_size)
        pool = torch.stack([key.transpose(1, 2), value.transpose(1, 2)], 1)
        return _fmha_v2(function, t, peer_workspace(), (t.q, pool), "Q_PAGED_KV_HND", table=table)

    return prepare


def flashinfer_cudnn(page_size: int | None = None) -> Candidate:
    def prepare(t: Tensors) -> Call:
        flashinfer()
        from flashinfer.cudnn import cudnn_batch_prefill_with_kv_cache as function

        _only_one_dtype(t)
        work = t.work
        if work.window_left >= 0 or work.sinks:
            raise NotImplementedError("no windows and no sinks")
        options: dict[str, Any] = {}
        if work.q_dtype is not BF16:
            one = torch.ones(1, 1, 1, 1, device=t.device)
            options = dict(q_scale=one, k_scale=one, v_scale=one, o_data_type=BF16)
        workspace = peer_workspace().view(torch.int8)
        if page_size is None:
            strides = {"k": work.kv_heads * work.head_dim, "v": work.kv_heads * work.v_head_dim}
            options |= {f"batch_offsets_{name}": t.kv_starts * stride for name, stride in strides.items()}
            return _cudnn(partial(function, **options), t, workspace, t.k, t.v, table=None)
        key, value, table, *_ = t.pages(page_size)
        pages = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
        return _cudnn(partial(function, **options), t, workspace, *pages, table=table)

    return prepare


def flashinfer_planned(page_size: int | None = None, *, backend: str) -> Candidate:
    """Prepare a backend of FlashInfer, planned once as its wrappers require.

    fa3 is for Hopper, cute-dsl and cutlass are for B200 and B300, and fa2 has mma.sync for all.
    """

    def prepare(t: Tensors) -> Call:
        if backend != "fa3":
            _only_bf16(t)
        _only_one_dtype(t)
        peer, work, out = flashinfer(), t.work, t.output()
        if work.sinks:
            raise NotImplementedError("no sinks in these wrappers")
        workspace = peer_workspace()
        options = dict(
            causal=work.causal,
            q_data_type=t.dtype,
            kv_data_type=t.dtype,
            o_data_type=out.dtype,
            sm_scale=work.scale,
            window_left=work.window_left,
        )
        sizes = (work.heads, work.kv_heads, work.head_dim)
        # The peer takes a scale per head for 8-bit queries, keys and values.
        counts = (work.heads, work.kv_heads, work.kv_heads) if t.dtype is not BF16 else ()
        scales = [torch.ones(count, device=t.device) for count in counts]
        if page_size is None:
            ragged = peer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=backend)
            ragged.plan(t.q_starts, t.kv_starts, *sizes, head_dim_vo=work.v_head_dim, **options)
            return lambda: ragged.run(t.q, t.k, t.v, *scales, out=out)
        key, value, _, used, _ = t.pages(page_size)
        paged = peer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        starts, in_last = page_starts(t.kv_lens, page_size)
        paged.plan(
            t.q_starts,
            starts,
            used,
            in_last,
            *sizes,
            page_size,
            head_dim_vo=work.v_head_dim,
            **options,
        )
        return lambda: paged.run(t.q, (key, value), *scales, out=out)

    return prepare


flashinfer_fa2, flashinfer_fa3, flashinfer_cute_dsl, flashinfer_cutlass = (
    partial(flashinfer_planned, backend=backend) for backend in ("fa2", "fa3", "cute-dsl", "cutlass")
)


def trtllm_gen(page_size: int) -> Candidate:
    """Prepare TensorRT-LLM's kernels for B200 and B300 over pages; the cache has heads before tokens, their fastest
    layout."""

    def prepare(t: Tensors) -> Call:
        key, value, table, _, scales = t.pages(page_size)
        cache = _heads_first(key, value)
        options = {} if scales is None else dict(kv_cache_sf=_heads_first(*scales))
        sinks = None if t.sinks is None else [t.sinks]
        function = flashinfer().prefill.trtllm_batch_context_with_kv_cache
        return _context(function, t, peer_workspace(), cache, table.clamp(min=0), sinks=sinks, **options)

    return prepare


def _heads_first(*pools: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(pages.transpose(1, 2).contiguous() for pages in pools)


def trtllm_gen_ragged(t: Tensors) -> Call:
    """Prepare TensorRT-LLM's kernels over contiguous keys, which serve head dims 128, 256 and 192/128."""
    work = t.work
    _only_one_dtype(t)
    lens, q_len, kv_len, scale, v_scale, batch, q_starts, kv_starts = _lengths(t)
    return partial(
        flashinfer().prefill.trtllm_ragged_attention_deepseek,
        *(t.q, t.k, t.v, peer_workspace(), lens, q_len, kv_len, scale, v_scale),
        o_sf_scale=1.0,
        batch_size=batch,
        window_left=work.window_left,
        cum_seq_lens_q=q_starts,
        cum_seq_lens_kv=kv_starts,
        enable_pdl=None,
        is_causal=work.causal,
        return_lse=False,
        attention_sinks=t.sinks,
        skip_softmax_threshold_scale_factor=work.skip_softmax or None,
        out=t.output(),
    )


PREFILL: dict[str, Candidate] = {
    "hopwell": hopwell_dense,
    **for_pages("hopwell", hopwell_paged, 16, 64, 128, 1),
    "FlashAttention 3": fa3(),
    **for_pages("FlashAttention 3", fa3, 16, 64, 128),
    "FlashAttention 4": fa4(),
    **for_pages("FlashAttention 4", fa4, 128),  # loaded with TMA up to head dim 128
    "FlashInfer fa3": flashinfer_fa3(),
    **for_pages("FlashInfer fa3", flashinfer_fa3, 16, 64),
    "FlashInfer fa2": flashinfer_fa2(),
    **for_pages("FlashInfer fa2", flashinfer_fa2, 16, 64),
    "FlashInfer trtllm-gen": trtllm_gen_ragged,
    **for_pages("FlashInfer trtllm-gen", trtllm_gen, 16, 64),
    "FlashInfer cute-dsl": flashinfer_cute_dsl(),
    **for_pages("FlashInfer cute-dsl", flashinfer_cute_dsl, 64),
    "FlashInfer cutlass": flashinfer_cutlass(),
    "FlashInfer FMHAv2": flashinfer_fmha_v2(),
    **for_pages("FlashInfer FMHAv2", flashinfer_fmha_v2, 16, 64),
    "FlashInfer cuDNN": flashinfer_cudnn(),
    **for_pages("FlashInfer cuDNN", flashinfer_cudnn, 16, 64),
    "FlashAttention 2": sdpa("FLASH_ATTENTION"),
    "cuDNN SDPA": sdpa("CUDNN_ATTENTION"),
    "cuDNN fp8 graph": cudnn_fp8_graph,
}
