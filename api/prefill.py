"""Prefill entry points, at the module path and with the signatures of ``flashinfer.prefill``."""

from __future__ import annotations

import torch
from torch import Tensor

from hopwell._calls.dynamo import call_op, is_traced, traced_as_op
from hopwell._calls.launch import ANY_BOUND, Calls, call_arguments, halves, single
from hopwell._calls.repeat import Arguments, Results, output_parts
from hopwell._checks.arguments import INT32_MAX
from hopwell._checks.caches import has_dtype
from hopwell._entries.context import CONTEXT_OPERANDS, ContextCall, context_problem, dequantized_query, results
from hopwell._entries.context_by_request import ContextByRequest
from hopwell._entries.fmha_v2 import FMHA_V2_OPERANDS, FmhaV2Call, fmha_v2_problem, leaves
from hopwell.cudnn import cudnn_batch_prefill_with_kv_cache
from hopwell.utils import FP4Tensor

__all__ = [
    "cudnn_batch_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]

_CONTEXT, _CONTEXT_BY_REQUEST = Calls(CONTEXT_OPERANDS), ContextByRequest()
_FMHA_V2 = Calls(FMHA_V2_OPERANDS)
LOG2, INTERLEAVED = "log2", "interleaved"
ALL_KEYS = -1  # of a side of a window


def _checked_context(arguments: Arguments, call: ContextCall) -> Results:
    """Check and launch a call of the context entry that is not in the cache of checked calls."""
    if isinstance(call.causal, torch.Tensor):
        return _CONTEXT_BY_REQUEST.run(call)
    problem = context_problem(call)
    renamed = None if call.kv_cache_sf is None else {"kv_block_scales": "kv_cache_sf"}
    return _CONTEXT.run(arguments, call, problem, *results(call, problem), renamed=renamed)


@traced_as_op
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
    v_scale_layout: str = INTERLEAVED,
    causal: bool | torch.Tensor = True,
    window_right: int = ALL_KEYS,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: str = LOG2,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    backend: str | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> torch.Tensor | FP4Tensor | tuple[torch.Tensor | FP4Tensor, torch.Tensor]:
    """Compute causal (default) or full attention of new tokens over a paged KV cache that already holds them.

    Row t of a request with q_len new tokens and kv_len keys is aligned to the bottom right. Its own key is p = kv_len -
    q_len + t. The row sees keys 0..p, or p - window_left..p with a window::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled: the caller multiplies 1 / sqrt(head_dim) and the scales of quantized data into the two
    scales. A row without visible keys gives 0. Requests without new tokens write nothing.

    fp8 queries over an fp8 cache take fp8 MMA: both products multiply float8_e4m3fn. Softmax weights are rounded to
    e4m3, relative to the largest weight of one key tile, and summed in float32. All other combinations multiply 16-bit
    operands, and an fp8 or NVFP4 cache is dequantized to 16 bits exactly. The result is bitwise equal to the result of
    a 16-bit cache with the same values. fp8 queries over an NVFP4 cache are dequantized to float16 too, so the same
    holds for them. Hopper's kernels do so themselves. On other GPUs each call makes a float16 copy of the queries.
    Outputs in fp8 saturate at the largest e4m3 value.

    The signature and the meaning follow FlashInfer's function of this name, except where the text below says otherwise.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [tokens, num_heads, head_dim], bfloat16, float16 or float8_e4m3fn, request after request. The last stride
            is 1; the others are free multiples of 16 bytes.
        kv_cache: one tensor [pages, 2, *page] with K at index 0 and V at index 1, or [pages, 1, *page] with the same
            data for both. A pair (K, V) has [pages, *page] tensors, whose strides and head dims are independent.
            ``page`` is [num_kv_heads, page_size, head_dim] (HND) or [page_size, num_kv_heads, head_dim] (NHD). The
            dtype is query's dtype, float8_e4m3fn, or uint8 for NVFP4 (two e2m1 values a byte, head_dim / 2 wide). NVFP4
            takes a head_dim that is a multiple of 64, and with interleaved V scales a page_size that is a multiple of
            4. num_heads is a multiple of num_kv_heads.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        block_tables: int32, uint32 or int64 page ids, [batch_size, pages_per_request]. With
            ``uses_shared_paged_kv_idx=False`` [batch_size, 2, pages_per_request] with the ids of the K pages and of the
            V pages. Entries past the last page of a request are never read. The table may cover fewer than
            ``max_kv_len`` tokens.
        seq_lens: int32, uint32 or int64, ``batch_size`` elements: the keys of each request in tokens, new tokens
            included. A length beyond the capacity of ``block_tables`` counts as that capacity. A length that is
            negative as int32 counts as 0.
        max_q_len: upper bound of the new tokens of a request. It never changes a result, even if it is too small.
        max_kv_len: upper bound of ``seq_lens``. It never changes a result, even if it is too small.
        bmm1_scale: factor on q k^T in natural units (not multiplied by log2(e)), 0 or more: a float, or a one-element
            float32 tensor. The kernel reads the tensor, so its value may change under a CUDA graph. A tensor on the
            host is read during the call, which is slower. A negative value on the device makes the output NaN. With an
            fp8 or NVFP4 cache also a contiguous float32 tensor [num_kv_heads] on the device. Each KV head then has its
            own factor, the product of the softmax scale and the head's ``k_scale``.
        bmm2_scale: factor on the output, in the same forms; of each KV head with its ``v_scale``.
        batch_size: number of requests.
        cum_seq_lens_q: int32, uint32 or int64 [batch_size + 1], the first token of each request in ``query``.
        cum_seq_lens_kv: int32, uint32 or int64. Lengths come from ``seq_lens``; callers of FlashInfer pass token or
            page counts here, so only the type and the device are checked.
        window_left: keys to the left of its own key that a row sees, 0 or more; -1 means all of them.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates. For an NVFP4 output
            an FP4Tensor with ``data`` [tokens, num_heads, V head_dim / 2] and ``scale`` [rows, num_heads * V head_dim /
            16, rounded up to a multiple of 4]. The call writes one row of ``scale`` for each token, from
            ``scale_start_index`` on.
        out_dtype: dtype of the output: float16, bfloat16, float8_e4m3fn, or the string "nvfp4", which takes a V
            head_dim that is a multiple of 16. None means the dtype of ``out``, or of query. FlashInfer refuses
            float8_e4m3fn and "nvfp4" for 16-bit queries.
        o_sf_scale: positive factor on an NVFP4 output before rounding: element = code * scale / o_sf_scale, as in
            :func:`hopwell.layouts.dequantize_nvfp4_output`. None for other outputs.
        o_sf_vec_size: None, or 16 for an NVFP4 output.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None enables it on devices that have it (compute capability 9 and
            later).
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor. It is the natural, unscaled logit of one
            more key per head, which has no value.
        kv_block_scales: one scale for 16 elements of an NVFP4 cache, float8_e4m3fn, or uint8 with the same bits. The
            layout is the layout of ``kv_cache`` with head_dim / 16 as its last size. FlashInfer's code calls it
            ``kv_cache_sf``. The order of V's scales is ``v_scale_layout``. The last stride is 1; the others are
            free multiples of 4 bytes.
        skip_softmax_threshold_scale_factor: lets kernels skip keys whose weight is below this factor / kv_len; None and
            0 mean exact attention.
        uses_shared_paged_kv_idx: whether K and V share their page ids.
        kv_cache_sf: another name of ``kv_block_scales``; at most one of the two may be given.
        v_scale_layout: order of the V scales of an NVFP4 cache, see :class:`hopwell.layouts.VScaleLayout`. FlashInfer
            has "interleaved" by four tokens; decode reads "linear". hopwell cannot tell the two apart. Both give the
            same bits. Other caches take the default only.
        causal: False lets every row see all keys of its request, or the keys p - window_left..p + window_right. A bool,
            uint8, int32 or int64 tensor [batch_size] on the device selects for each request: nonzero is True. Such a
            call has two launches and takes no window.
        window_right: keys to the right of its own key that a row sees without a causal mask, 0 or more; -1 means all of
            them. FlashInfer does not have it.
        lse: float32 [tokens, num_heads] to write into, contiguous. Written with ``return_lse`` only; None allocates.
        return_lse: also return the log-sum-exp of each row's logits, sinks included; -inf for a row without visible
            keys. Tokens of no request are not written.
        lse_base: "log2" for the logarithm to base 2, or "ln" for the natural logarithm.
        multi_ctas_kv_counter_buffer: None or any tensor. hopwell has its own counters and does not use it.
        backend: any string or None. FlashInfer chooses between implementations with it; hopwell has one.
        use_fp16_softmax: None or False. True is refused: the softmax is computed in float32.
        uses_spcompress: None or False. True is refused.

    Returns:
        The output: ``out`` itself if given, else a contiguous tensor, or an FP4Tensor for NVFP4. With ``return_lse`` a
        pair of the output and the log-sum-exp (``lse`` itself if given).

    Raises:
        TypeError: an argument has a wrong Python type, or a tensor scale is not float32.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong, or arguments exclude each other; the
            message names the argument.
        NotImplementedError: the device's architecture has no kernel for the combination, see
            :func:`hopwell.kernels.capability.features.support_matrix`.
    """
    k, v = (kv_cache, None) if type(kv_cache) is Tensor else halves(kv_cache)
    given_scales = kv_block_scales if kv_cache_sf is None else kv_cache_sf
    k_scales = v_scales = query_dtype = None
    if given_scales is not None:
        k_scales, v_scales = halves(given_scales)
        query_dtype = getattr(query, "dtype", None)
    # Calls of output_parts among the arguments would make Python build a list before the tuple.
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
        and v_scale_layout is INTERLEAVED
        and skip_softmax_threshold_scale_factor is None
        and causal is True
        and window_right is ALL_KEYS
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
            v_scale_layout,
            o_sf_scale,
            o_sf_vec_size,
            skip_softmax_threshold_scale_factor,
            causal,
            window_right,
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
        arguments = (query := dequantized_query(query), *arguments[1:])  # unchanged if kernels dequantize it
        repeated = _CONTEXT.latest(arguments, out, lse)
    done = repeated or _CONTEXT.repeat(arguments, out, lse)
    if done is None:
        if is_traced(query):
            return call_op(trtllm_batch_context_with_kv_cache, "query", locals())
        done = _checked_context(arguments, call_arguments(ContextCall, locals()))
    return done if return_lse else done[0]


@traced_as_op
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
    *,
    window_right: int = ALL_KEYS,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over packed, contiguous, separate or paged inputs.

    For each request ``out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v``. Masks are aligned to
    the bottom right: row t of q_len has key p = kv_len - q_len + t. A row without visible keys gives 0.

    The signature and the meaning follow FlashInfer's function of this name, with these differences:

    * Strides are honoured in all layouts except the (K, V) pool.
    * ``bmm2_scale`` counts for every dtype.
    * Contiguous KV may be longer than the queries.
    * ``window_left=0`` means a window of one key under every mask mode that takes a window.
    * ``chunked_attention_size=1`` means chunks of one key.
    * "padding" hides no key by itself, under ALiBi either. It takes ``window_left`` and ``window_right``.
    * Contradictory arguments, unknown mask modes and unknown position encodings are refused.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        qkv: bfloat16, float16 or float8_e4m3fn tensors in the form that ``input_layout`` names, all of one dtype.
        input_layout: one of

            * "PACKED_QKV": qkv is [tokens, 3, num_heads, head_dim].
            * "CONTIGUOUS_Q_KV": (Q, KV), Q [tokens, num_heads, head_dim], KV [kv_tokens, 2, num_kv_heads, head_dim].
            * "SEPARATE_Q_K_V": (Q, K, V), K and V [kv_tokens, num_kv_heads, head_dim]; V may have its own head_dim.
            * "Q_PAGED_KV_NHD": (Q, pool), pool [pages, 2, page_size, num_kv_heads, head_dim] or a pair (K, V) of
              contiguous [pages, page_size, num_kv_heads, head_dim] in one storage, V behind K. K and V may have
              different numbers of pages.
            * "Q_PAGED_KV_HND": the same with num_kv_heads before page_size.
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        seq_lens: int32, uint32 or int64, ``batch_size`` elements. It is checked but not read: as in FlashInfer, KV
            lengths are the differences of ``cum_seq_lens_kv``.
        max_q_len: upper bound of the queries of a request. It never changes a result, even if it is too small.
        max_kv_len: upper bound of the keys of a request. It never changes a result, even if it is too small.
        bmm1_scale: factor on q k^T, a float in natural units, not negative; 0 means 1 / sqrt(head_dim).
        bmm2_scale: factor on the output, a float.
        batch_size: number of requests.
        cum_seq_lens_q: int32, uint32 or int64 [batch_size + 1], the first token of each request in Q.
        cum_seq_lens_kv: the same for K and V. With pages only the differences matter.
        block_tables: int32, uint32 or int64 page ids, required by the two paged layouts and refused by the others.
            [batch_size, pages_per_request] with a stacked pool, [batch_size, 2, pages_per_request] with a (K, V) pair.
            Both rows of a pair count pages from K's first page.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates.
        out_dtype: a torch.dtype or its name, such as "bfloat16": float16, bfloat16 or float8_e4m3fn, which saturates at
            the largest e4m3 value. None means the dtype of ``out``, or of Q.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor. It is the natural, unscaled logit of one
            more key per head, which has no value.
        pos_encoding_mode: None or "none", or "alibi"; case does not matter.
        logits_soft_cap_scale: c > 0 turns logits x into c * tanh(x / c), to which ALiBi adds its bias. None and 0 mean
            no cap. c > 2^64 means no cap either: the two are the same in float32.
        mask_mode: "causal" (keys 0..p), "sliding_window", "chunked" or "padding" (every key of the request); case does
            not matter. A window takes effect under all modes, a chunk size under all except "padding", which refuses
            it. "sliding_window" without a window and "chunked" without chunks are causal.
        window_left: w >= 0 limits a row to keys from p - w on; -1 means no window.
        chunked_attention_size: a power of two C limits a row to keys (p // C) * C..p, so 1 leaves only its own key; 0
            means no chunks.
        save_softmax_stats: also return the softmax statistics.
        skip_softmax_threshold_scale_factor: lets kernels skip keys whose weight is below this factor / kv_len; 0 means
            exact attention.
        window_right: with "padding", w >= 0 limits a row to keys up to p + w; -1 means no limit. The other modes are
            causal and take only -1. FlashInfer does not have it.

    Returns:
        The output: ``out`` itself if given, else a contiguous tensor. With ``save_softmax_stats`` a pair of the output
        and the statistics, float32 [tokens, num_heads, 2], in FlashInfer's form for Hopper. [..., 0] is the row's
        largest logit divided by sqrt(head_dim), for plain logits without ``bmm1_scale``. [..., 1] is the sum of
        exponentials relative to the largest logit, without sinks. With ``bmm1_scale = 1 / sqrt(head_dim)`` the
        log-sum-exp is the first plus the logarithm of the second. A row without visible keys has (-inf, 0).

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong, or a window comes together with chunks;
            the message names the argument.
        NotImplementedError: the device's architecture has no kernel for the combination, see
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
    if window_right is not ALL_KEYS:
        arguments += (window_right,)
    repeated = _FMHA_V2.latest(arguments, out, None) or _FMHA_V2.repeat(arguments, out)
    if repeated is not None:
        return repeated if save_softmax_stats else repeated[0]
    if is_traced(query):
        return call_op(trtllm_fmha_v2_prefill, "qkv", locals())
    call = call_arguments(FmhaV2Call, locals())
    problem = fmha_v2_problem(call)
    results = _FMHA_V2.run(arguments, call, problem, out, problem.statistics)
    return results if save_softmax_stats else results[0]
