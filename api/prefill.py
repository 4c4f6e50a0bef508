"""Prefill entry points, at the module path and with the signatures of ``flashinfer.prefill``."""

from __future__ import annotations

import torch

from hopwell._context import context_problem, context_sources
from hopwell._cudnn import cudnn_problem, cudnn_sources
from hopwell._fmha_v2 import fmha_v2_problem, fmha_v2_sources, leaves
from hopwell._launch import Calls, halves, single, upper_bound
from hopwell.utils import FP4Tensor

__all__ = [
    "cudnn_batch_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]

_CONTEXT, _FMHA_V2, _CUDNN = Calls(context_sources), Calls(fmha_v2_sources), Calls(cudnn_sources)


def trtllm_batch_context_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    window_left: int = -1,
    out: torch.Tensor | FP4Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
) -> torch.Tensor | FP4Tensor:
    """Causal attention of new tokens over a paged KV cache that already holds their keys and values.

    For query row t of a request with q_len new tokens and kv_len keys, p = kv_len - q_len + t is the row's own key and
    keys 0..p are visible (bottom-right alignment), or p - window_left..p with a window::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled: 1 / sqrt(head_dim) and the factors of quantised data belong into the two scales. A row with
    no visible key gives 0. Requests without new tokens write nothing.

    Signature and meaning follow FlashInfer's function of this name; where hopwell differs is said below.

    Args:
        query: [tokens, num_heads, head_dim], bfloat16, float16 or float8_e4m3fn, requests one after the other. Strides
            are free in multiples of 16 bytes, but for the last, which is 1.
        kv_cache: one tensor [pages, 2, *page], K at index 0 and V at index 1; or [pages, 1, *page], the same data for
            both; or a pair (K, V) of [pages, *page] tensors whose strides and V head_dim are independent. ``page`` is
            [num_kv_heads, page_size, head_dim] (HND) or [page_size, num_kv_heads, head_dim] (NHD). The dtype of
            query, float8_e4m3fn, or uint8 for NVFP4 (two e2m1 values a byte, head_dim / 2 wide). page_size is a power
            of two; num_heads is a multiple of num_kv_heads.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        block_tables: int32 or uint32 page ids, [batch_size, pages_per_request], or [batch_size, 2, pages_per_request]
            with ids of the K and of the V pages where ``uses_shared_paged_kv_idx`` is False. Entries past the last page
            of a request are never read. The table may be narrower than ``max_kv_len`` tokens.
        seq_lens: int32 or uint32, ``batch_size`` elements: keys of each request in tokens, new ones included.
        max_q_len: upper bound of the new tokens of a request. It never changes a result.
        max_kv_len: upper bound of ``seq_lens``. It never changes a result.
        bmm1_scale: factor on q k^T in natural units (not multiplied by log2(e)): a float, 0 or more, or a one-element
            float32 tensor that the kernel reads, so that it may change under a CUDA graph. A tensor on the host is read
            during the call, which is slower.
        bmm2_scale: factor on the output, likewise.
        batch_size: number of requests.
        cum_seq_lens_q: int32 or uint32 [batch_size + 1], where each request starts in ``query``, in tokens.
        cum_seq_lens_kv: int32 or uint32. Lengths come from ``seq_lens``; callers of FlashInfer pass token or page
            counts here, so only its type and device are checked.
        window_left: keys to the left of its own that a row sees, 0 or more; -1 for all of them.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own, or an FP4Tensor; None allocates.
        out_dtype: dtype of the output: that of query, float16 or bfloat16, or for fp8 queries the string "nvfp4". None
            means that of ``out``, or of query.
        o_sf_scale: global factor of an NVFP4 output's block scales; None otherwise.
        o_sf_vec_size: None, or 16 for an NVFP4 output.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None means where the device has it (compute capability 9 and later).
        sinks: float32 [num_heads], or a list of one such tensor: natural logits of one more key per head, without a
            value and not scaled.
        kv_block_scales: float8_e4m3fn, one for 16 elements of an NVFP4 cache, in the layout of ``kv_cache`` with
            head_dim / 16 as its last size; FlashInfer's code calls it ``kv_cache_sf``. V scales are interleaved in
            groups of four tokens (see :class:`hopwell.layouts.VScaleLayout`). With HND the last two dimensions are
            contiguous.
        skip_softmax_threshold_scale_factor: allows leaving out keys whose weight is below this factor / kv_len; None
            and 0 mean exact attention.
        uses_shared_paged_kv_idx: whether K and V share their page ids.

    Returns:
        The output: ``out`` itself where given, else a contiguous tensor.

    Raises:
        TypeError: an argument of a wrong Python type, or a tensor scale that is not float32.
        ValueError: a wrong dtype, shape, stride, alignment, device or value; the message names the argument.
        NotImplementedError: a combination without a kernel on the device's architecture, see
            :func:`hopwell.kernels.support.support_matrix`.
    """
    k, v = (kv_cache, None) if isinstance(kv_cache, torch.Tensor) else halves(kv_cache)
    arguments = (
        query,
        k,
        v,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        bmm1_scale,
        bmm2_scale,
        single(sinks),
        out,
        cum_seq_lens_kv,
        max_q_len,
        upper_bound(max_kv_len),
        batch_size,
        window_left,
        skip_softmax_threshold_scale_factor,
        type(workspace_buffer),
        kv_block_scales,
        o_sf_scale,
        o_sf_vec_size,
        out_dtype,
        kv_layout,
        enable_pdl,
        uses_shared_paged_kv_idx,
    )
    repeated = _CONTEXT.repeat(arguments, out)
    if repeated is not None:
        return repeated[0]
    problem = context_problem(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_q_len,
        max_kv_len,
        bmm1_scale,
        bmm2_scale,
        batch_size,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        window_left,
        out,
        out_dtype,
        o_sf_scale,
        o_sf_vec_size,
        kv_layout,
        enable_pdl,
        sinks,
        kv_block_scales,
        skip_softmax_threshold_scale_factor,
        uses_shared_paged_kv_idx,
    )
    return _CONTEXT.run(arguments, problem, out)[0]


def trtllm_fmha_v2_prefill(
    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed, contiguous, separate or paged inputs.

    For each request ``out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v``. Masks are aligned to
    the bottom right: row t of q_len sits at key p = kv_len - q_len + t. A row with no visible key gives 0.

    Signature and meaning follow FlashInfer's function of this name. Differences: strides are honoured in all layouts
    but the (K, V) pool, ``bmm2_scale`` counts for every dtype, contiguous KV may be longer than the queries,
    ``window_left=0`` means a window of one key under every mask mode that takes one and ``chunked_attention_size=1`` a
    chunk of one, "padding" hides no key under ALiBi either, and contradictory arguments, unknown mask modes and unknown
    position encodings are refused.

    Args:
        qkv: bfloat16, float16 or float8_e4m3fn tensors as ``input_layout`` says, all of one dtype.
        input_layout: one of

            * "PACKED_QKV": qkv is [tokens, 3, num_heads, head_dim].
            * "CONTIGUOUS_Q_KV": (Q, KV), Q [tokens, num_heads, head_dim], KV [kv_tokens, 2, num_kv_heads, head_dim].
            * "SEPARATE_Q_K_V": (Q, K, V), K and V [kv_tokens, num_kv_heads, head_dim]; V may have its own head_dim.
            * "Q_PAGED_KV_NHD": (Q, pool), pool [pages, 2, page_size, num_kv_heads, head_dim] or a pair (K, V) of
              contiguous [pages, page_size, num_kv_heads, head_dim] in one storage, V behind K.
            * "Q_PAGED_KV_HND": the same with num_kv_heads before page_size.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        seq_lens: int32 or uint32, ``batch_size`` elements. As in FlashInfer, KV lengths are the differences of
            ``cum_seq_lens_kv``; this is checked but not read.
        max_q_len: upper bound of the queries of a request. It never changes a result.
        max_kv_len: upper bound of the keys of a request. It never changes a result.
        bmm1_scale: factor on q k^T, a float in natural units, not negative; 0 means 1 / sqrt(head_dim).
        bmm2_scale: factor on the output, a float.
        batch_size: number of requests.
        cum_seq_lens_q: int32 or uint32 [batch_size + 1], where each request starts in Q, in tokens.
        cum_seq_lens_kv: the same for K and V. With pages only the differences matter.
        block_tables: page ids, int32 or uint32, for the two paged layouts and only for them: [batch_size,
            pages_per_request] with a stacked pool; [batch_size, 2, pages_per_request] with a (K, V) pair, where both
            rows count pages from K's first.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates.
        out_dtype: a torch.dtype or the name of one such as "bfloat16"; None means that of ``out``, or of Q.
        sinks: float32 [num_heads], or a list of one such tensor: natural logits of one more key per head, without a
            value and not scaled.
        pos_encoding_mode: None or "none", or "alibi"; case does not matter.
        logits_soft_cap_scale: c > 0 turns logits x into c * tanh(x / c); None and 0 mean off.
        mask_mode: "causal" (keys 0..p), "sliding_window", "chunked" or "padding" (every key of the request); case does
            not matter. A window or a chunk size takes effect under all modes but "padding", where it is refused, and
            without either "sliding_window" and "chunked" are causal.
        window_left: w >= 0 limits a row to keys p - w..p; -1 means no window.
        chunked_attention_size: a power of two C limits a row to keys (p // C) * C..p, so 1 leaves it its own key; 0
            means no chunks.
        save_softmax_stats: also return the softmax statistics.
        skip_softmax_threshold_scale_factor: allows leaving out keys whose weight is below this factor / kv_len; 0 means
            exact attention.

    Returns:
        The output: ``out`` itself where given, else a contiguous tensor. With ``save_softmax_stats`` a pair of it and
        the statistics, float32 [tokens, num_heads, 2], in FlashInfer's form for Hopper: [..., 0] is the row's largest
        logit divided by sqrt(head_dim), for plain logits without ``bmm1_scale``; [..., 1] is the sum of exponentials
        relative to the largest logit, sinks not included. With ``bmm1_scale = 1 / sqrt(head_dim)`` the log-sum-exp is
        the first plus the logarithm of the second. A row without visible keys has (-inf, 0).

    Raises:
        TypeError: an argument of a wrong Python type.
        ValueError: a wrong dtype, shape, stride, alignment, device or value, or a window together with chunks; the
            message names the argument.
        NotImplementedError: a combination without a kernel on the device's architecture, see
            :func:`hopwell.kernels.support.support_matrix`.
    """
    arguments = (
        *leaves(qkv),
        cum_seq_lens_q,
        cum_seq_lens_kv,
        block_tables,
        single(sinks),
        out,
        seq_lens,
        max_q_len,
        upper_bound(max_kv_len),
        batch_size,
        window_left,
        chunked_attention_size,
        bmm1_scale,
        bmm2_scale,
        logits_soft_cap_scale,
        skip_softmax_threshold_scale_factor,
        type(workspace_buffer),
        input_layout,
        out_dtype,
        pos_encoding_mode,
        mask_mode,
        save_softmax_stats,
    )
    repeated = _FMHA_V2.repeat(arguments, out)
    if repeated is not None:
        return repeated if save_softmax_stats else repeated[0]
    problem = fmha_v2_problem(
        qkv,
        input_layout,
        workspace_buffer,
        seq_lens,
        max_q_len,
        max_kv_len,
        bmm1_scale,
        bmm2_scale,
        batch_size,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        block_tables,
        out,
        out_dtype,
        sinks,
        pos_encoding_mode,
        logits_soft_cap_scale,
        mask_mode,
        window_left,
        chunked_attention_size,
        save_softmax_stats,
        skip_softmax_threshold_scale_factor,
    )
    results = _FMHA_V2.run(arguments, problem, out, problem.statistics)
    return results if save_softmax_stats else results[0]


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention over ragged or paged K and V, with the log-sum-exp where asked for.

    ``out = softmax(scale * q k^T over the visible keys) v``. With ``causal``, row t of a request with q_len queries and
    kv_len keys sees keys 0..kv_len - q_len + t, otherwise all kv_len. A row with no visible key gives 0, and -inf
    in the log-sum-exp.

    Signature and meaning follow FlashInfer's function of this name (cuDNN itself is not used): offsets count elements,
    and the log-sum-exp is natural.

    Args:
        q: [tokens, num_heads, head_dim], bfloat16 or float16.
        k_cache: paged [pages, num_kv_heads, page_size, head_dim], strides free in multiples of 16 bytes but for the
            last, so that NHD storage may come as a transposed view; or, without ``block_tables``, ragged [kv_tokens,
            num_kv_heads, head_dim]. The dtype of q.
        v_cache: the same with strides and head_dim of its own.
        scale: factor on q k^T, a float in natural units, 0 or more, typically 1 / sqrt(head_dim).
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        max_token_per_sequence: upper bound of ``actual_seq_lens_q``. It shapes ``lse`` and changes no other result.
        max_sequence_kv: upper bound of ``actual_seq_lens_kv``. It never changes a result.
        actual_seq_lens_q: int32 or uint32, one element per request in any shape; their number is the batch size. On the
            device of q, or on the host, from where each call copies them, which is slower.
        actual_seq_lens_kv: the same for the keys.
        block_tables: int32 or uint32 page ids [batch, pages_per_request], shared by K and V. Entries past the last page
            of a request are never read and may be -1. None for ragged K and V.
        causal: whether to mask.
        return_lse: whether to compute and return the log-sum-exp.
        batch_offsets_q: int32 or uint32, contiguous, batch or batch + 1 elements, of which the first batch count: where
            each request starts in q, in elements of storage from q's first on: token * q.stride(0), which is token *
            num_heads * head_dim where q is contiguous, and three times that where q is a slice of [tokens, 3,
            num_heads, head_dim]. An offset inside a token counts as the token's start. Together with
            ``batch_offsets_o``; both are required for more than one request, and without them the request starts at
            token 0.
        batch_offsets_o: the same in the output (token * num_heads * V head_dim where it is allocated).
        batch_offsets_k: the same in ragged K (token * k_cache.stride(0)). Together with ``batch_offsets_v``; both are
            required for more than one request with ragged K and V, and refused with pages.
        batch_offsets_v: the same in ragged V (token * v_cache.stride(0)).
        batch_offsets_stats: the same in the log-sum-exp (row * num_heads), which it makes ragged: row t of request b is
            row offset + t of ``lse`` seen as [rows, num_heads]. None pads: row t of request b is ``lse[b, t]``.
        out: [tokens, num_heads, V head_dim] in the dtype of q to write into, with strides of its own; None allocates.
        lse: float32 [batch, max_token_per_sequence, num_heads] to write into, contiguous. Written with ``return_lse``
            only; None allocates. Where it is padded, rows past the end of a request become -inf; where offsets place
            requests, rows of none are left as they are. Tokens past ``max_token_per_sequence``, or past its last row,
            have no place in it and write nothing there.
        is_cuda_graph_compatible: refuse lengths on the host, whose copies a graph would not replay.
        backend: any string or None. FlashInfer chooses between cuDNN's variants with it; hopwell has none.

    Returns:
        The output (``out`` itself where given), and the log-sum-exp (``lse`` itself where given) or None.

    Raises:
        TypeError: an argument of a wrong Python type.
        ValueError: a wrong dtype, shape, stride, alignment, device or value, or offsets missing; the message names the
            argument.
        NotImplementedError: a combination without a kernel on the device's architecture, see
            :func:`hopwell.kernels.support.support_matrix`.
    """
    arguments = (
        q,
        k_cache,
        v_cache,
        actual_seq_lens_q,
        actual_seq_lens_kv,
        block_tables,
        batch_offsets_q,
        batch_offsets_o,
        batch_offsets_k,
        batch_offsets_v,
        batch_offsets_stats,
        out,
        lse,
        scale,
        max_token_per_sequence,
        upper_bound(max_sequence_kv),
        causal,
        return_lse,
        type(workspace_buffer),
        is_cuda_graph_compatible,
        type(backend),
    )
    repeated = _CUDNN.repeat(arguments, out, lse)
    if repeated is not None:
        return repeated
    problem = cudnn_problem(
        q,
        k_cache,
        v_cache,
        scale,
        workspace_buffer,
        max_token_per_sequence=max_token_per_sequence,
        max_sequence_kv=max_sequence_kv,
        actual_seq_lens_q=actual_seq_lens_q,
        actual_seq_lens_kv=actual_seq_lens_kv,
        block_tables=block_tables,
        causal=causal,
        return_lse=return_lse,
        batch_offsets_q=batch_offsets_q,
        batch_offsets_o=batch_offsets_o,
        batch_offsets_k=batch_offsets_k,
        batch_offsets_v=batch_offsets_v,
        batch_offsets_stats=batch_offsets_stats,
        out=out,
        lse=lse,
        is_cuda_graph_compatible=is_cuda_graph_compatible,
        backend=backend,
    )
    stats = None
    if problem.lse is not None:
        # A ragged log-sum-exp was viewed as rows for the kernel.
        stats = problem.lse.tensor.view(problem.batch, max_token_per_sequence, q.shape[1]) if lse is None else lse
    return _CUDNN.run(arguments, problem, out, stats)
