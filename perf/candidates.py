"""Implementations to compare: each takes a workload's tensors and gives a function that fills and returns an output.

A candidate raises where it cannot run a workload; the run records why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

import hopwell
from hopwell.perf.workloads import Tensors

Call = Callable[[], torch.Tensor]
Candidate = Callable[[Tensors], Call]

CEILING = "bf16 matmul"
MATMUL_SIZE = 8192


def hopwell_dense(t: Tensors) -> Call:
    work, out = t.work, t.output()
    return lambda: hopwell.trtllm_fmha_v2_prefill(
        (t.q, t.k, t.v),
        "SEPARATE_Q_K_V",
        out,
        t.lengths,
        work.length,
        work.length,
        work.scale,
        1.0,
        work.batch,
        t.starts,
        t.starts,
        out=out,
        mask_mode="causal" if work.causal else "padding",
    )


def hopwell_paged(page_size: int) -> Candidate:
    def prepare(t: Tensors) -> Call:
        work, out = t.work, t.output()
        key, value, table = t.pages(page_size)
        if work.causal:
            return lambda: hopwell.trtllm_batch_context_with_kv_cache(
                t.q,
                (key, value),
                out,
                table,
                t.lengths,
                work.length,
                work.length,
                work.scale,
                1.0,
                work.batch,
                t.starts,
                t.starts,
                out=out,
                kv_layout="NHD",
            )
        offsets = t.starts * work.heads * work.head_dim
        return lambda: hopwell.cudnn_batch_prefill_with_kv_cache(
            t.q,
            key.transpose(1, 2),
            value.transpose(1, 2),
            work.scale,
            out,
            max_token_per_sequence=work.length,
            max_sequence_kv=work.length,
            actual_seq_lens_q=t.lengths,
            actual_seq_lens_kv=t.lengths,
            block_tables=table,
            causal=False,
            return_lse=False,
            batch_offsets_q=offsets,
            batch_offsets_o=offsets,
            out=out,
        )[0]

    return prepare


def fa4(page_size: int | None) -> Candidate:
    def prepare(t: Tensors) -> Call:
        from flash_attn.cute.interface import _flash_attn_fwd

        work, out = t.work, t.output()
        shape = (work.batch, work.length)
        paging = {}
        if page_size is None:
            key, value = (tokens.view(*shape, *tokens.shape[1:]) for tokens in (t.k, t.v))
        else:
            key, value, table = t.pages(page_size)
            paging = dict(page_table=table, seqused_k=t.lengths)
        q, o = (tokens.view(*shape, *tokens.shape[1:]) for tokens in (t.q, out))

        def call() -> torch.Tensor:
            _flash_attn_fwd(q, key, value, causal=work.causal, out=o, **paging)
            return out

        return call

    return prepare


def cudnn_sdpa(t: Tensors) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    work = t.work
    group = work.heads // work.kv_heads
    q, k, v = (tokens.view(work.batch, work.length, *tokens.shape[1:]).transpose(1, 2) for tokens in (t.q, t.k, t.v))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=work.causal, enable_gqa=group > 1)
        return out.transpose(1, 2).reshape(work.tokens, work.heads, work.v_head_dim)

    return call


def flashinfer(page_size: int | None) -> Candidate:
    """FlashInfer's fa3 backend, planned once as its wrappers ask for."""

    def prepare(t: Tensors) -> Call:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        import flashinfer as peer

        work, out = t.work, t.output()
        workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
        options = dict(
            causal=work.causal, q_data_type=t.dtype, kv_data_type=t.dtype, o_data_type=t.dtype, sm_scale=work.scale
        )
        sizes = (work.heads, work.kv_heads, work.head_dim)
        if page_size is None:
            ragged = peer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
            ragged.plan(t.starts, t.starts, *sizes, head_dim_vo=work.v_head_dim, **options)
            return lambda: ragged.run(t.q, t.k, t.v, out=out)
        key, value, table = t.pages(page_size)
        paged = peer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        last_page = torch.full_like(t.lengths, page_size)
        paged.plan(
            t.starts,
            t.starts // page_size,
            table.flatten(),
            last_page,
            *sizes,
            page_size,
            head_dim_vo=work.v_head_dim,
            **options,
        )
        return lambda: paged.run(t.q, (key, value), out=out)

    return prepare


def matmul(t: Tensors) -> Call:
    """The ceiling: a product of random square matrices."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


PREFILL: dict[str, Candidate] = {
    "hopwell": hopwell_dense,
    "hopwell, pages of 16": hopwell_paged(16),
    "hopwell, pages of 64": hopwell_paged(64),
    "hopwell, pages of 128": hopwell_paged(128),
    "hopwell, pages of 1": hopwell_paged(1),
    "FlashAttention 4": fa4(None),
    "FlashInfer fa3": flashinfer(None),
    "FlashInfer fa3, pages of 16": flashinfer(16),
    "FlashInfer fa3, pages of 64": flashinfer(64),
    "cuDNN SDPA": cudnn_sdpa,
    CEILING: matmul,
}
