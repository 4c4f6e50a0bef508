"""Implementations of MLA decode to compare, with the interface of decode's candidates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import hopwell
from hopwell.mla import mla_workspace_bytes
from hopwell.perf.family import Call, Candidate
from hopwell.perf.mla_workloads import MlaTensors
from hopwell.perf.paging import page_starts
from hopwell.perf.peers import flash_mla, flashinfer, for_pages, peer_workspace
from hopwell.perf.quantized import BF16, E4M3

NOPE_HEAD_DIM = 128  # before absorption; it enters no computation


def hopwell_paged(page_size: int) -> Candidate:
    def prepare(t: MlaTensors) -> Call:
        work, pages = t.work, t.pages(page_size)
        rank, capacity = work.v_head_dim, work.top_k or pages.table.shape[1] * page_size
        workspace_bytes = mla_workspace_bytes(work.heads, capacity, work.q_len, rank, t.q.device)
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=t.device)
        return _entry(hopwell.trtllm_batch_decode_with_kv_cache_mla, t, page_size, workspace)

    return prepare


def _entry(
    function: Callable[..., Any], t: MlaTensors, page_size: int, workspace: torch.Tensor, **options: Any
) -> partial[Any]:
    """Return a call of hopwell's entry or of its FlashInfer counterpart."""
    work, pages = t.work, t.pages(page_size)
    query, out = (tokens.unflatten(0, (work.batch, work.q_len)) for tokens in (t.q, t.output()))
    rank = work.v_head_dim
    return partial(
        function,
        query,
        pages.key.squeeze(2),
        workspace,
        NOPE_HEAD_DIM,
        rank,
        work.head_dim - rank,
        t.token_table(page_size) if work.top_k else pages.table,
        t.kv_lens,
        max(work.kv_lens),
        sparse_mla_top_k=work.top_k,
        out=out,
        bmm1_scale=work.scale,
        **options,
    )


def flashinfer_entry(page_size: int, *, backend: str) -> Candidate:
    """Prepare FlashInfer's function of the same name with a backend for B200 and B300: trtllm-gen or cute-dsl."""

    def prepare(t: MlaTensors) -> Call:
        if t.work.packed_rows:
            raise NotImplementedError("no rows of 656 bytes on this architecture")
        function = flashinfer().mla.trtllm_batch_decode_with_kv_cache_mla
        return _entry(function, t, page_size, peer_workspace(), bmm2_scale=1.0, backend=backend)

    return prepare


trtllm_gen, flashinfer_cute_dsl = (partial(flashinfer_entry, backend=backend) for backend in ("trtllm-gen", "cute-dsl"))


def fa4(page_size: int | None = None) -> Candidate:
    """Prepare FlashAttention 4's MLA kernel for B200 and B300; lists of tokens are over contiguous keys."""

    def prepare(t: MlaTensors) -> Call:
        from flash_attn.cute.interface import _flash_attn_fwd

        work, options = t.work, dict[str, Any]()
        if work.packed_rows:
            raise NotImplementedError("no rows of 656 bytes")
        if page_size is None:
            if len({*work.kv_lens}) > 1:
                raise NotImplementedError("requests of one length only")
            cache = t.k.unflatten(0, (work.batch, -1))
            options = dict(gather_kv_indices=t.lists.int()) if work.top_k else {}
        else:
            if work.top_k:
                raise NotImplementedError("no lists over pages")
            pages = t.pages(page_size)
            cache, options = pages.key, dict(page_table=pages.table, seqused_k=t.kv_lens)
        query, out = (tokens.unflatten(0, (work.batch, work.q_len)) for tokens in (t.q, t.output()))
        rank = work.v_head_dim
        call = partial(
            _flash_attn_fwd,
            query[..., rank:].contiguous(),
            cache[..., rank:],
            cache[..., :rank],
            qv=query[..., :rank].contiguous(),
            softmax_scale=work.scale,
            causal=work.q_len > 1 and not work.top_k,
            out=out,
            **options,
        )

        def run() -> torch.Tensor:
            call()
            return out.flatten(0, 1)

        return run

    return prepare


def flashinfer_fa3(page_size: int) -> Candidate:
    """Return a candidate that is planned once.

    Queries are two tensors, latent and rotary; the cache is one tensor with two views.
    """

    def prepare(t: MlaTensors) -> Call:
        if t.work.top_k or t.work.q_dtype is not BF16:
            raise NotImplementedError("dense attention in bf16 only")
        flashinfer()
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        work, out, pages = t.work, t.output(), t.pages(page_size)
        rank = work.v_head_dim
        wrapper = BatchMLAPagedAttentionWrapper(peer_workspace(), backend="fa3")
        wrapper.plan(
            qo_indptr=torch.arange(work.batch + 1, dtype=torch.int32, device=t.device) * work.q_len,
            kv_indptr=page_starts(t.kv_lens, page_size)[0],
            kv_indices=pages.used,
            kv_len_arr=t.kv_lens,
            num_heads=work.heads,
            head_dim_ckv=rank,
            head_dim_kpe=work.head_dim - rank,
            page_size=page_size,
            causal=work.q_len > 1,
            sm_scale=work.scale,
            q_data_type=t.q.dtype,
            kv_data_type=work.kv_dtype,
        )
        latent, rotary = t.q[..., :rank].contiguous(), t.q[..., rank:].contiguous()
        cache = pages.key.squeeze(2)
        parts = dict(ckv_cache=cache[..., :rank], kpe_cache=cache[..., rank:])
        return lambda: wrapper.run(q_nope=latent, q_pe=rotary, out=out, **parts)

    return prepare


def flashmla(page_size: int) -> Candidate:
    """Prepare FlashMLA, scheduled once: bf16 and e4m3 dense on Hopper; sparse in bf16 and over rows of 656 bytes."""

    def prepare(t: MlaTensors) -> Call:
        peer, work, pages = flash_mla(), t.work, t.pages(page_size)
        q = t.q.unflatten(0, (work.batch, work.q_len))
        rows, causal = work.q_len * work.heads, work.q_len > 1
        common = (work.v_head_dim, t.kv_lens, pages.table, work.scale)
        if work.top_k and not work.packed_rows:  # FlashMLA's prefill kernel: each query token has its list
            indices = t.token_table(page_size).view(-1, 1, work.top_k)
            pool = pages.key.flatten(0, 1)
            sparse = partial(peer.flash_mla_sparse_fwd, t.q, pool, indices, work.scale, work.v_head_dim)
            return lambda: sparse()[0]
        if work.top_k:
            schedule, splits = peer.get_mla_metadata(t.kv_lens, rows, 1, work.heads, True, work.top_k)
            call = partial(
                peer.flash_mla_with_kvcache,
                *(q, pages.key.view(E4M3), pages.table, t.kv_lens, work.v_head_dim, schedule, splits),
                softmax_scale=work.scale,
                is_fp8_kvcache=True,
                indices=t.token_table(page_size),
            )
        elif work.q_dtype is E4M3:
            # Its Python function refuses cases that the operator supports.
            operators, one = torch.ops.sgl_kernel, torch.ones(1, device=t.device)
            schedule, splits = operators.get_mla_decoding_metadata_dense_fp8.default(t.kv_lens, rows, 1)
            call = partial(
                operators.fwd_kvcache_mla_fp8.default, q, pages.key, *common, causal, schedule, splits, one, one
            )
        else:
            schedule, splits = peer.get_mla_metadata(t.kv_lens, rows, 1)
            call = partial(
                peer.flash_mla_with_kvcache,
                *(q, pages.key, pages.table, t.kv_lens, work.v_head_dim, schedule, splits),
                softmax_scale=work.scale,
                causal=causal,
            )
        return lambda: call()[0].flatten(0, 1)

    return prepare


MLA: dict[str, Candidate] = {
    **for_pages("hopwell", hopwell_paged, 64, 32),
    **for_pages("FlashMLA", flashmla, 64),
    **for_pages("FlashInfer trtllm-gen", trtllm_gen, 32, 64),
    **for_pages("FlashInfer cute-dsl", flashinfer_cute_dsl, 64, 128),
    "FlashAttention 4": fa4(),
    **for_pages("FlashAttention 4", fa4, 128),  # loaded with TMA
    **for_pages("FlashInfer fa3", flashinfer_fa3, 64),
}
