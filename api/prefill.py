"""Prefill entry points, at the module path and with the signatures of ``flashinfer.prefill``."""

from __future__ import annotations

import torch
from torch import Tensor

from hopwell._cache import has_dtype
from hopwell._checks import INT32_MAX
from hopwell._context import CONTEXT_OPERANDS, ContextCall, context_problem, dequantized_query
from hopwell._dynamo import opaque
from hopwell._fmha_v2 import FMHA_V2_OPERANDS, FmhaV2Call, fmha_v2_problem, leaves
from hopwell._launch import ANY_BOUND, Calls, call_arguments, halves, single
from hopwell._repeat import Arguments, Results, output_parts
from hopwell.cudnn import cudnn_batch_prefill_with_kv_cache
from hopwell.utils import FP4Tensor

__all__ = [
    "cudnn_batch_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]

_CONTEXT = Calls(CONTEXT_OPERANDS)
_FMHA_V2 = Calls(FMHA_V2_OPERANDS)
LOG2 = "log2"


def _checked_context(arguments: Arguments, call: ContextCall) -> Results:
    """Check a call of the context entry that was not recognised, and launch it."""
    problem, out = context_problem(call), call.out
    stats = None if problem.lse is None else problem.lse.tensor
    if out is None and problem.out is not None and problem.out_scales is not None:
        shape = (*call.query.shape[:-1], problem.v_dim)
        out = FP4Tensor(problem.out, problem.out_scales.tensor, original_shape=shape)
    renamed = None if call.kv_cache_sf is None else {"kv_block_scales": "kv_cache_sf"}
    return _CONTEXT.run(arguments, call, problem, out, stats, renamed=renamed)


@opaque
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
    *,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    causal: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: str = LOG2,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    backend: str | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> torch.Tensor | FP4Tensor | tuple[torch.Tensor | FP4Tensor, torch.Tensor]:
    """Compute attention, causal unless told, of new tokens over a paged KV cache that already holds their keys and
    values.

    For query row t of a request with q_len new tokens and kv_len keys, p = kv_len - q_len + t is the row's own key and
    keys 0..p are visible (bottom-right alignment), or p - window_left..p with a window::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled: 1 / sqrt(head_dim) and the factors of quantised data belong into the two scales. A row with
    no visible key gives 0. Requests without new tokens write nothing.

    With fp8 queries and an fp8 cache both products multiply float8_e4m3fn: softmax weights are rounded to it, relative
    to the largest one of as many neighbouring keys as a kernel takes at a time, and added up in float32. In all other
    cases they multiply 16-bit numbers, to which an fp8 or NVFP4 cache is dequantized exactly: the result has the bits
    that the same values give in a 16-bit cache. Beside an NVFP4 cache that holds for fp8 queries as well: their kernels
    multiply float16, to which they are dequantized, but on Hopper by a copy in each call. Values that an fp8 output
    cannot hold become the largest that it can.

    Signature and meaning follow FlashInfer's function of this name; where hopwell differs is said below.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [tokens, num_heads, head_dim], bfloat16, float16 or float8_e4m3fn, requests one after the other. Strides
            are free in multiples of 16 bytes, but for the last, which is 1.
        kv_cache: one tensor [pages, 2, *page], K at index 0 and V at index 1; or [pages, 1, *page], the same data for
            both; or a pair (K, V) of [pages, *page] tensors whose strides and V head_dim are independent. ``page`` is
            [num_kv_heads, page_size, head_dim] (HND) or [page_size, num_kv_heads, head_dim] (NHD). The dtype of
            query, float8_e4m3fn, or uint8 for NVFP4 (two e2m1 values a byte, head_dim / 2 wide, head_dim a multiple
            of 64 and page_size of 4). page_size is 1 to 1024; num_heads is a multiple of num_kv_heads.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        block_tables: int32, uint32 or int64 page ids, [batch_size, pages_per_request], or [batch_size, 2,
            pages_per_request] with ids of the K and of the V pages where ``uses_shared_paged_kv_idx`` is False. Entries
            past the last page of a request are never read. The table may be narrower than ``max_kv_len`` tokens.
        seq_lens: int32, uint32 or int64, ``batch_size`` elements: keys of each request in tokens, new ones included.
            One beyond what ``block_tables`` has room for counts as that, one that is negative as int32 as 0.
        max_q_len: upper bound of the new tokens of a request. It never changes a result, even where it is too small.
        max_kv_len: upper bound of ``seq_lens``, likewise.
        bmm1_scale: factor on q k^T in natural units (not multiplied by log2(e)): a float, 0 or more, or a one-element
            float32 tensor that the kernel reads, so that it may change under a CUDA graph. A tensor on the host is read
            during the call, which is slower. A negative one on the device makes the output NaN.
        bmm2_scale: factor on the output, likewise.
        batch_size: number of requests.
        cum_seq_lens_q: int32, uint32 or int64 [batch_size + 1], where each request starts in ``query``, in tokens.
        cum_seq_lens_kv: int32, uint32 or int64. Lengths come from ``seq_lens``; callers of FlashInfer pass token or
            page counts here, so only its type and device are checked.
        window_left: keys to the left of its own that a row sees, 0 or more; -1 for all of them.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates. For an NVFP4 output
            an FP4Tensor with ``data`` [tokens, num_heads, V head_dim / 2] and ``scale`` [rows, num_heads * V head_dim /
            16, rounded up to a multiple of 4], of which the rows from ``scale_start_index`` on, one for each token, are
            written.
        out_dtype: dtype of the output: that of query, float16 or bfloat16, or for fp8 queries the string "nvfp4", which
            takes a V head_dim that is a multiple of 16. None means that of ``out``, or of query.
        o_sf_scale: factor on an NVFP4 output before it is rounded, positive: element = code * scale / o_sf_scale, as
            :func:`hopwell.layouts.dequantize_nvfp4_output` has it; None otherwise.
        o_sf_vec_size: None, or 16 for an NVFP4 output.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None means where the device has it (compute capability 9 and later).
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor: natural logits of one more key per head,
            without a value and not scaled.
        kv_block_scales: float8_e4m3fn, or uint8 with the same bits, one for 16 elements of an NVFP4 cache, in the
            layout of ``kv_cache`` with head_dim / 16 as its last size; FlashInfer's code calls it ``kv_cache_sf``. V
            scales are interleaved in groups of four tokens (see :class:`hopwell.layouts.VScaleLayout`). Strides are
            free in multiples of 4 bytes, but for the last, which is 1.
        skip_softmax_threshold_scale_factor: allows leaving out keys whose weight is below this factor / kv_len; None
            and 0 mean exact attention.
        uses_shared_paged_kv_idx: whether K and V share their page ids.
        kv_cache_sf: another name of ``kv_block_scales``; one of the two at most is given.
        causal: False lets every row see all keys of its request; a window is refused with it.
        lse: float32 [tokens, num_heads] to write into, contiguous. Written with ``return_lse`` only; None allocates.
        return_lse: also return the log-sum-exp of each row's logits, sinks included; -inf where it sees no key. Tokens
            of no request are left as they are.
        lse_base: "log2" for the logarithm to base 2, or "ln" for the natural one.
        multi_ctas_kv_counter_buffer: None or any tensor. hopwell has counters of its own and does not use it.
        backend: any string or None. FlashInfer chooses between implementations with it; hopwell has one.
        use_fp16_softmax: None or False. True is refused: the softmax is computed in float32.
        uses_spcompress: None or False. True is refused.

    Returns:
        The output: ``out`` itself where given, else a contiguous tensor, or an FP4Tensor of NVFP4. With ``return_lse``
        a pair of it and the log-sum-exp (``lse`` itself where given).

    Raises:
        TypeError: an argument of a wrong Python type, or a tensor scale that is not float32.
        ValueError: a wrong dtype, shape, stride, alignment, device or value, or arguments that exclude each other; the
            message names the argument.
        NotImplementedError: a combination without a kernel on the device's architecture, see
            :func:`hopwell.kernels.capability.features.support_matrix`.
    """
    k, v = (kv_cache, None) if type(kv_cache) is Tensor else halves(kv_cache)
    given_scales = kv_block_scales if kv_cache_sf is None else kv_cache_sf
    k_scales = v_scales = query_dtype = None
    if given_scales is not None:
        k_scales, v_scales = halves(given_scales)
        query_dtype = getattr(query, "dtype", None)
    # A function's result among the arguments would make Python build them as a list first.
    data, out_scales, first_row = out, None, None
    if type(out) is not Tensor and out is not None:
        data, out_scales, first_row = output_parts(out)
    arguments: Arguments = (
        query,
        k,
        v,
        block_tables,
        seq_lens,
        cum_seq_lens_q,
        bmm1_scale,
        bmm2_scale,
        None if sinks is None else single(sinks),
        k_scales,
        v_scales,
        query_dtype,
        data,
        out_scales,
        first_row,
        cum_seq_lens_kv,
        max_q_len,
        ANY_BOUND if type(max_kv_len) is int and 0 <= max_kv_len <= INT32_MAX else max_kv_len,
        batch_size,
        window_left,
        type(workspace_buffer),
        out_dtype,
        kv_layout,
        enable_pdl,
        uses_shared_paged_kv_idx,
    )
    if not (
        given_scales is None
        and o_sf_scale is None
        and o_sf_vec_size is None
        and skip_softmax_threshold_scale_factor is None
        and causal is True
        and lse is None
        and return_lse is False
        and lse_base is LOG2
        and multi_ctas_kv_counter_buffer is None
        and backend is None
        and use_fp16_softmax is None
        and uses_spcompress is None
    ):
        arguments += (
            kv_block_scales is None,
            kv_cache_sf is None,
            o_sf_scale,
            o_sf_vec_size,
            skip_softmax_threshold_scale_factor,
            causal,
            lse,
            return_lse,
            lse_base,
            type(multi_ctas_kv_counter_buffer),
            type(backend),
            use_fp16_softmax,
            uses_spcompress,
        )
    repeated = _CONTEXT.latest(arguments, out, lse)
    if repeated is None and query_dtype is torch.float8_e4m3fn and has_dtype(kv_cache, torch.uint8):
        arguments = (query := dequantized_query(query), *arguments[1:])  # itself where kernels dequantize it
        repeated = _CONTEXT.latest(arguments, out, lse)
    done = repeated or _CONTEXT.repeat(arguments, out, lse)
    if done is None:
        done = _checked_context(arguments, call_arguments(ContextCall, locals()))
    return done if return_lse else done[0]


@opaque
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
    """Compute attention over packed, contiguous, separate or paged inputs.

    For each request ``out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v``. Masks are aligned to
    the bottom right: row t of q_len sits at key p = kv_len - q_len + t. A row with no visible key gives 0.

    Signature and meaning follow FlashInfer's function of this name. Differences: strides are honoured in all layouts
    but the (K, V) pool, ``bmm2_scale`` counts for every dtype, contiguous KV may be longer than the queries,
    ``window_left=0`` means a window of one key under every mask mode that takes one and ``chunked_attention_size=1`` a
    chunk of one, "padding" hides no key under ALiBi either, and contradictory arguments, unknown mask modes and unknown
    position encodings are refused.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        qkv: bfloat16, float16 or float8_e4m3fn tensors as ``input_layout`` says, all of one dtype.
        input_layout: one of

            * "PACKED_QKV": qkv is [tokens, 3, num_heads, head_dim].
            * "CONTIGUOUS_Q_KV": (Q, KV), Q [tokens, num_heads, head_dim], KV [kv_tokens, 2, num_kv_heads, head_dim].
            * "SEPARATE_Q_K_V": (Q, K, V), K and V [kv_tokens, num_kv_heads, head_dim]; V may have its own head_dim.
            * "Q_PAGED_KV_NHD": (Q, pool), pool [pages, 2, page_size, num_kv_heads, head_dim] or a pair (K, V) of
              contiguous [pages, page_size, num_kv_heads, head_dim] in one storage, V behind K. K and V may have
              different numbers of pages.
            * "Q_PAGED_KV_HND": the same with num_kv_heads before page_size.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        seq_lens: int32, uint32 or int64, ``batch_size`` elements. As in FlashInfer, KV lengths are the differences of
            ``cum_seq_lens_kv``; this is checked but not read.
        max_q_len: upper bound of the queries of a request. It never changes a result, even where it is too small.
        max_kv_len: upper bound of the keys of a request, likewise.
        bmm1_scale: factor on q k^T, a float in natural units, not negative; 0 means 1 / sqrt(head_dim).
        bmm2_scale: factor on the output, a float.
        batch_size: number of requests.
        cum_seq_lens_q: int32, uint32 or int64 [batch_size + 1], where each request starts in Q, in tokens.
        cum_seq_lens_kv: the same for K and V. With pages only the differences matter.
        block_tables: page ids, int32, uint32 or int64, for the two paged layouts and only for them: [batch_size,
            pages_per_request] with a stacked pool; [batch_size, 2, pages_per_request] with a (K, V) pair, where both
            rows count pages from K's first.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates.
        out_dtype: a torch.dtype or the name of one such as "bfloat16": that of Q, float16 or bfloat16, see
            :func:`hopwell.kernels.capability.features.support_matrix`; None means that of ``out``, or of Q. Values that
            float8_e4m3fn cannot hold become the largest that it can.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor: natural logits of one more key per head,
            without a value and not scaled.
        pos_encoding_mode: None or "none", or "alibi"; case does not matter.
        logits_soft_cap_scale: c > 0 turns logits x into c * tanh(x / c), to which ALiBi adds; None and 0 mean off, as
            does c > 2^64, where the two are the same in float32.
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
            :func:`hopwell.kernels.capability.features.support_matrix`.
    """
    query, k, v, pool = leaves(qkv)
    arguments: Arguments = (
        query,
        k,
        v,
        pool,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        block_tables,
        None if sinks is None else single(sinks),
        out,
        seq_lens,
        max_q_len,
        ANY_BOUND if type(max_kv_len) is int and 0 <= max_kv_len <= INT32_MAX else max_kv_len,
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
    repeated = _FMHA_V2.latest(arguments, out, None) or _FMHA_V2.repeat(arguments, out)
    if repeated is not None:
        return repeated if save_softmax_stats else repeated[0]
    call = call_arguments(FmhaV2Call, locals())
    problem = fmha_v2_problem(call)
    results = _FMHA_V2.run(arguments, call, problem, out, problem.statistics)
    return results if save_softmax_stats else results[0]
