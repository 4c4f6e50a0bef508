"""Implementations of decode to compare. As for prefill, each maps tensors to a call that returns its output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import hopwell
from hopwell.decode import xqa_workspace_bytes
from hopwell.perf.decode_workloads import DecodeTensors
from hopwell.perf.family import Call, Candidate
from hopwell.perf.paging import page_starts
from hopwell.perf.peers import flash_attention_3, flashinfer, for_pages, peer_workspace
from hopwell.perf.quantized import NVFP4


def hopwell_paged(page_size: int) -> Candidate:
    def prepare(t: DecodeTensors) -> Call:
        work, out, pages = t.work, t.output(), t.pages(page_size)
        sizes = (work.heads, work.kv_heads, work.head_dim, pages.table.shape[1] * page_size, work.q_len)
        workspace = torch.empty(xqa_workspace_bytes(*sizes, t.q.device), dtype=torch.uint8, device=t.device)
        return partial(
            hopwell.xqa_batch_decode_with_kv_cache,
            t.q,
            (pages.key, pages.value),
            workspace,
            pages.table,
            t.kv_lens,
            max(work.kv_lens),
            bmm1_scale=work.scale,
            out=out,
            q_len_per_req=work.q_len,
            mask=t.mask,
            kv_cache_sf=pages.scales,
        )

    return prepare


def _no_nvfp4(t: DecodeTensors) -> None:
    if t.work.kv_dtype is NVFP4:
        raise NotImplementedError("no NVFP4 cache")


def flashinfer_planned(page_size: int, *, backend: str) -> Candidate:
    """Decode on tensor cores, planned once: fa2 with mma.sync, and cute-dsl for B200 and B300."""

    def prepare(t: DecodeTensors) -> Call:
        work, out, pages = t.work, t.output(), t.pages(page_size)
        options = dict(use_tensor_cores=True, backend=backend)
        wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(peer_workspace(), "NHD", **options)
        starts, in_last = page_starts(t.kv_lens, page_size)
        sizes = (work.heads, work.kv_heads, work.head_dim, page_size)
        drafts = dict(q_len_per_req=work.q_len) if work.q_len > 1 else {}
        dtypes = dict(q_data_type=t.q.dtype, kv_data_type=work.kv_dtype, o_data_type=out.dtype)
        wrapper.plan(starts, pages.used, in_last, *sizes, sm_scale=work.scale, **dtypes, **drafts)
        scales = {} if pages.scales is None else dict(kv_cache_sf=pages.scales)
        return lambda: wrapper.run(t.q, (pages.key, pages.value), out=out, **scales)

    return prepare


flashinfer_fa2, flashinfer_cute_dsl = (partial(flashinfer_planned, backend=backend) for backend in ("fa2", "cute-dsl"))


def trtllm_gen(page_size: int) -> Candidate:
    """Prepare TensorRT-LLM's kernels for B200 and B300; the cache has heads before tokens, their fastest layout."""

    def prepare(t: DecodeTensors) -> Call:
        _no_nvfp4(t)  # block scales of V are interleaved there, as in prefill
        work, pages = t.work, t.pages(page_size)
        return partial(
            flashinfer().decode.trtllm_batch_decode_with_kv_cache,
            t.q,
            tuple(pool.transpose(1, 2).contiguous() for pool in (pages.key, pages.value)),
            peer_workspace(),
            pages.table,
            t.kv_lens,
            max(work.kv_lens),
            bmm1_scale=work.scale,
            bmm2_scale=1.0,
            out=t.output(),
            backend="trtllm-gen",
            q_len_per_req=work.q_len,
        )

    return prepare


def flashinfer_xqa(page_size: int) -> Candidate:
    def prepare(t: DecodeTensors) -> Call:
        work, out, pages, workspace = t.work, t.output(), t.pages(page_size), peer_workspace()
        decode = flashinfer().decode.xqa_batch_decode_with_kv_cache
        scales = {} if pages.scales is None else dict(kv_cache_sf=pages.scales)  # taken on sm_120 only
        shaped = out if work.q_len == 1 else out.unflatten(0, (work.batch, work.q_len))
        return lambda: decode(
            t.q,
            (pages.key, pages.value),
            workspace,
            pages.table,
            t.kv_lens,
            max(work.kv_lens),
            bmm1_scale=work.scale,
            bmm2_scale=1.0,
            out=shaped,
            kv_layout="NHD",
            q_len_per_req=work.q_len,
            mask=t.mask,
            **scales,
        )

    return prepare


def flashinfer_cudnn(page_size: int) -> Candidate:
    def prepare(t: DecodeTensors) -> Call:
        flashinfer()
        from flashinfer.cudnn import cudnn_batch_decode_with_kv_cache as decode

        work, out, pages = t.work, t.output(), t.pages(page_size)
        if work.kv_dtype != t.q.dtype:
            raise NotImplementedError("a cache of the query's dtype only")
        key, value = (pool.transpose(1, 2).contiguous() for pool in (pages.key, pages.value))
        workspace = peer_workspace().view(torch.int8)
        options: dict[str, Any] = dict(actual_seq_lens_kv=t.kv_lens.view(-1, 1, 1, 1), block_tables=pages.table)
        options |= dict(max_sequence_kv=max(work.kv_lens), is_cuda_graph_compatible=True, out=out)
        options |= dict(q_len_per_req=work.q_len) if work.q_len > 1 else {}

        def call() -> torch.Tensor:
            decode(t.q, key, value, work.scale, workspace, **options)
            return out

        return call

    return prepare


def fa3(page_size: int) -> Candidate:
    """Prepare FlashAttention 3, which chooses the number of key splits itself.

    With an e4m3 cache, its queries are e4m3 too, rounded beforehand.
    """

    def prepare(t: DecodeTensors) -> Call:
        _no_nvfp4(t)
        work, pages = t.work, t.pages(page_size)
        q = t.q.to(work.kv_dtype).unflatten(0, (work.batch, work.q_len))
        options = dict(page_table=pages.table, seqused_k=t.kv_lens, softmax_scale=work.scale, is_causal=True)
        call = flash_attention_3(q, pages.key, pages.value, num_splits=0, **options)
        return lambda: call().flatten(0, 1)

    return prepare


def fa4(page_size: int) -> Candidate:
    def prepare(t: DecodeTensors) -> Call:
        from flash_attn.cute.interface import _flash_attn_fwd

        work, out, pages = t.work, t.output(), t.pages(page_size)
        if work.kv_dtype != t.q.dtype:
            raise NotImplementedError("a cache of the query's dtype only")
        q, o = (tokens.unflatten(0, (work.batch, work.q_len)) for tokens in (t.q, out))
        options = dict(causal=True, out=o, page_table=pages.table, seqused_k=t.kv_lens)

        def call() -> torch.Tensor:
            _flash_attn_fwd(q, pages.key, pages.value, **options)
            return out

        return call

    return prepare


DECODE: dict[str, Candidate] = {
    **for_pages("hopwell", hopwell_paged, 16, 64),
    **for_pages("FlashInfer fa2", flashinfer_fa2, 16, 64),
    **for_pages("FlashInfer trtllm-gen", trtllm_gen, 16, 64),
    **for_pages("FlashInfer cute-dsl", flashinfer_cute_dsl, 64, 128),
    **for_pages("FlashInfer xqa", flashinfer_xqa, 16, 64),
    **for_pages("FlashInfer cuDNN", flashinfer_cudnn, 16, 64),
    **for_pages("FlashAttention 3", fa3, 16, 64),
    **for_pages("FlashAttention 4", fa4, 128),  # loaded with TMA up to head dim 128
}
