"""Decode entry point, at the module path and with the signature of ``flashinfer.decode``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hopwell._calls.dynamo import call_op, is_traced, traced_as_op
from hopwell._calls.launch import ANY_BOUND, Calls, call_arguments, halves, single
from hopwell._calls.repeat import Arguments, Results
from hopwell._checks.arguments import FP8, INT32_MAX
from hopwell._entries.decoding import AUTO, FIRST_RANK, ONE_RANK, decode_operands
from hopwell._entries.draft_mask import packed_mask
from hopwell._entries.xqa import (
    TrtllmDecodeCall,
    XqaCall,
    dequantized_query,
    trtllm_decode_problem,
    xqa_problem,
    xqa_workspace_bytes,
)
from hopwell.mla import trtllm_batch_decode_with_kv_cache_mla

__all__ = [
    "pack_mask",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_workspace_bytes",
]

_XQA = Calls(decode_operands("q_cu_seq_lens"))
_TRTLLM = Calls(decode_operands("cum_seq_lens_q"))


def pack_mask(
    mask: torch.Tensor | None = None,
    *,
    parents: torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | None = None,
    q_len_per_req: int | None = None,
) -> torch.Tensor:
    """Pack the mask of several new tokens per request into the bits that the decode entries take as ``mask``.

    The mask is given as booleans, or as a tree of drafts, in which each token sees itself and its ancestors. The call
    does not wait for the device. ``HOPWELL_CHECK=1`` reports cycles in a tensor of parents and indices past the end.
    Without it, such an index is a root, and the tokens of a cycle see each other.

    Args:
        mask: bool [batch, q_len, q_len], or [tokens, q_len] for requests with different numbers of new tokens. Element
            [..., i, j] is True if new token i of a request sees new token j.
        parents: index of each token's parent among the new tokens of its request, negative for a root, in any order.
            int32, uint32 or int64 [batch, q_len] or [q_len], or a list of such ints, which is always checked.
        q_len_per_req: bound of the new tokens that the decode call gives; None means q_len.

    Returns:
        Contiguous uint16 on the device of the argument: the shape of the mask, with 2 * ceil(q_len_per_req / 32) as its
        last size. Bit j % 16 of word j // 16 is new token j; other bits are 0.

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape or value is wrong, or not exactly one of ``mask`` and ``parents`` is given.

    >>> pack_mask(parents=[-1, 0, 0, 1]).tolist()  # token 0 is the root, 1 and 2 its children, 3 a child of 1
    [[1, 0], [3, 0], [5, 0], [11, 0]]
    >>> pack_mask(torch.ones(3, 3, dtype=torch.bool).tril()).tolist()
    [[1, 0], [3, 0], [7, 0]]
    """
    return packed_mask(mask, parents, q_len_per_req)


@traced_as_op
def xqa_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | torch.Tensor | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    q_cu_seq_lens: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one or a few new tokens per request over a paged KV cache.

    With one new token per request all of its seq_len keys are visible; a window leaves keys seq_len - 1 - window_left
    and later. With several new tokens, ``mask`` names the new tokens that each of them sees::

        out = bmm2_scale * o_scale * softmax(bmm1_scale * q k^T over the visible keys) v  (o_scale: 16-bit output only)

    A row without visible keys gives 0. Results are independent of max_seq_len and of the other requests of the batch.
    The keys of a request are always split in the same way and combined in the same order.

    The signature and the meaning follow FlashInfer's function of this name, except that the output scale is the same
    for every cache dtype. It is ``bmm2_scale`` for an fp8 output and ``bmm2_scale * o_scale`` for a 16-bit output.
    (FlashInfer divides ``bmm1_scale`` by both if the cache is 16 bits wide.)

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [batch * q_len_per_req, num_heads, head_dim], request by request, bfloat16 or float16. head_dim is a
            multiple of 16 up to 256, or 512; 64, 80, 96, 128, 160, 192 or 256 with an NVFP4 cache.
        kv_cache: one tensor [pages, 2, *page] with K at index 0 and V at index 1, or [pages, 1, *page] with the same
            data for both. A pair (K, V) has [pages, *page] tensors. ``page`` is [page_size, num_kv_heads, head_dim]
            (NHD) or [num_kv_heads, page_size, head_dim] (HND). The dtype is query's dtype, float8_e4m3fn, int8, or
            uint8 for NVFP4 (two e2m1 values a byte, head_dim / 2 wide). num_heads is a multiple of num_kv_heads. 8-bit
            values, and NVFP4 values times their block scales, are dequantized to 16 bits before they are multiplied. 16
            bits hold all of these values, so the result is at least as accurate as with a 16-bit cache of the same
            values. Scales of whole tensors go into ``bmm1_scale`` and ``bmm2_scale``. V of a pair and the output may
            have 128 columns beside a head_dim of 192 (MiMo-V2). All strides except the last are multiples of 16 bytes.
            NVFP4 rows of head_dim 80 have 40 bytes, so they must be padded: ``codes[..., :40]`` of 48 bytes.
        workspace_buffer: contiguous memory of any dtype and content for partial results, best ``xqa_workspace_bytes``
            bytes or more; the kernel uses its last bytes. Calls that may run at the same time need one buffer each. If
            it is too small, hopwell uses its own memory, one allocation for each device and stream. CUDA graphs
            captured with that memory on the same stream must not be replayed at the same time.
        block_tables: int32, uint32 or int64 page ids [batch, pages_per_request]; entries past a request's last page are
            not read.
        seq_lens: int32, uint32 or int64, one element per request: its keys in tokens, new tokens included. A length
            beyond the capacity of ``block_tables`` counts as that capacity. A length that is negative as int32 counts
            as 0.
        max_seq_len: upper bound of ``seq_lens``. It never changes a result.
        bmm1_scale: factor on q k^T in natural units, 0 or more: a float, or a one-element float32 tensor on the device.
            The call does not read the tensor, so a negative value there makes the output NaN instead of an error. With
            an 8-bit or NVFP4 cache also a float32 tensor [num_kv_heads] on the device. Each KV head then has its own
            scale, the product of the softmax scale and the head's ``k_scale``.
        bmm2_scale: factor on the output, in the same forms; of each KV head with its ``v_scale``.
        window_left: keys to the left of its own key that a row sees, 0 or more; -1 means all of them.
        out: [batch * q_len_per_req, num_heads, head_dim] or [batch, q_len_per_req, num_heads, head_dim] to write into,
            in the dtype of query, or float8_e4m3fn (saturating) with a float8_e4m3fn or NVFP4 cache; None allocates.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor. It is the natural, unscaled logit of one
            more key per head, which has no value.
        kv_layout: "NHD" or "HND".
        enable_pdl: programmatic dependent launch; None enables it on devices that have it.
        q_len_per_req: new tokens of each request; None means 1.
        o_scale: a second factor on a 16-bit output, a float or a one-element float32 tensor; None means 1. For an fp8
            output ``bmm2_scale`` already contains it, as in FlashInfer.
        mask: uint16 [batch, q_len_per_req, 2 * ceil(q_len_per_req / 32)], required for q_len_per_req > 1. Each row is
            read as little-endian 32-bit words; the row sees new token j if bit j % 32 of word j // 32 is set. Keys
            before the new tokens are always visible. :func:`pack_mask` makes it from booleans or from a tree.
        kv_cache_sf: block scales of an NVFP4 cache, float8_e4m3fn or uint8 with the same bits, linear for K and V. They
            have the layout of ``kv_cache`` with head_dim / 16 as its last size. One tensor or a pair, with strides of
            its own; all strides except the last are multiples of 4. Rows of head_dim 80, 96 and 160 must be padded:
            ``scales[..., :6]`` of 8.
        q_cu_seq_lens: int32, uint32 or int64 [batch + 1], cumulative numbers of new tokens, for requests with different
            numbers. The tensor stays on the device. ``query`` and ``out`` are then [tokens, num_heads, head_dim],
            ``q_len_per_req`` is an upper bound of the new tokens of a request, and ``mask`` is [tokens, 2 *
            ceil(q_len_per_req / 32)]. If a request has more new tokens than the bound, the first ones are computed as
            if there were no others. The others are not written. Rows behind the last request's rows are neither read
            nor written.
        lse: float32 [batch * q_len_per_req, num_heads], contiguous, to write the log-sum-exp of the scaled scores and
            sinks into, whatever the value of ``return_lse``. A row without visible keys has -inf.
        return_lse: whether to return the log-sum-exp.
        return_lse_base: "base2" or None for logarithms to base 2, as in FlashInfer's other decode functions; "basee"
            for natural logarithms.

    Returns:
        The output: ``out`` itself if given; else the shape of query for one token per request and with
        ``q_cu_seq_lens``, and [batch, q_len_per_req, num_heads, head_dim] for more tokens. With ``return_lse`` a pair
        of the output and the log-sum-exp (``lse`` itself if given).

    Raises:
        TypeError: an argument has a wrong Python type, or a tensor scale is not float32.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong; the message names the argument.
        NotImplementedError: the call is well-formed, but no kernel serves it on this architecture; the message lists
            what is supported.
    """
    k, v = (kv_cache, None) if type(kv_cache) is torch.Tensor else halves(kv_cache)
    k_scales, v_scales = (None, None) if kv_cache_sf is None else halves(kv_cache_sf)
    arguments: Arguments = (
        query,
        k,
        v,
        block_tables,
        seq_lens,
        bmm1_scale,
        bmm2_scale,
        None if sinks is None else single(sinks),
        workspace_buffer,
        q_cu_seq_lens,
        None,
        o_scale,
        mask,
        k_scales,
        v_scales,
        out,
        ANY_BOUND if type(max_seq_len) is int and 0 <= max_seq_len <= INT32_MAX else max_seq_len,
        window_left,
        kv_layout,
        enable_pdl,
        q_len_per_req,
    )
    if not (lse is None and return_lse is False and return_lse_base is None):
        arguments += (lse, return_lse, return_lse_base)
    done = _XQA.latest(arguments, out, lse) or _XQA.repeat(arguments, out, lse)
    if done is None:
        if is_traced(query):
            return call_op(xqa_batch_decode_with_kv_cache, "query", locals())
        call = call_arguments(XqaCall, locals())
        problem = xqa_problem(call)
        is_nested = problem.max_q_len > 1 and q_cu_seq_lens is None
        rows = (problem.batch, problem.max_q_len) if is_nested else ()
        stats = lse if problem.lse is None or lse is not None else problem.lse.tensor
        done = _XQA.run(arguments, call, problem, out, stats, rows)
    return done if return_lse else done[0]


def _checked_trtllm(arguments: Arguments, call: TrtllmDecodeCall) -> Results:
    """Check and launch a call of the trtllm entry that is not in the cache of checked calls."""
    problem = trtllm_decode_problem(call)
    stats = call.lse if problem.lse is None or call.lse is not None else problem.lse.tensor
    return _TRTLLM.run(arguments, call, problem, call.out, stats)


@traced_as_op
def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = AUTO,
    q_len_per_req: int | None = 1,
    o_scale: float | torch.Tensor | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    enable_block_sparse_attention: bool = False,
    *,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    bf16q_fp8kv_transform_mode: str | None = None,
    request_order: torch.Tensor | None = None,
    request_order_plan: object | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of one or a few new tokens per request over a paged KV cache, as
    :func:`xqa_batch_decode_with_kv_cache` does.

    New tokens of a request see all keys in front of the new tokens, and each other as ``mask`` allows. Without a mask,
    each new token sees itself and the tokens before it.

    The signature and the meaning follow FlashInfer's function of this name. :func:`xqa_batch_decode_with_kv_cache`
    describes everything that is not described here; "as there" below refers to it.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [tokens, num_heads, head_dim], request by request, bfloat16 or float16. Also float8_e4m3fn over a
            float8_e4m3fn or NVFP4 cache: each call dequantizes it to 16 bits, which is exact.
        kv_cache: as there; a tensor or a pair (K, V).
        workspace_buffer: as there.
        block_tables: int32, uint32 or int64 page ids [batch, pages_per_request]. With
            ``uses_shared_paged_kv_idx=False`` [batch, 2, pages_per_request] with the ids of the K pages and of the V
            pages.
        seq_lens: int32, uint32 or int64, one element per request: its keys in tokens, new tokens included. A length
            beyond the capacity of ``block_tables`` counts as that capacity. A length that is negative as int32 counts
            as 0.
        max_seq_len: upper bound of ``seq_lens``. It never changes a result.
        bmm1_scale: factor on q k^T in natural units, a float, a one-element float32 tensor, or float32 [num_kv_heads]
            as there.
        bmm2_scale: factor on the output, in the same forms.
        window_left: keys to the left of its own key that a row sees; -1 means all of them.
        out: [tokens, num_heads, head_dim] to write into; None allocates.
        out_dtype: dtype of the output: the dtype of ``query``, or float8_e4m3fn with a float8_e4m3fn or NVFP4 cache.
            float8_e4m3fn queries allow bfloat16, float16 and float8_e4m3fn. None means the dtype of ``out``, or of
            ``query``. "nvfp4" is refused.
        o_sf_scale: for nvfp4 outputs; must be None.
        o_sf_vec_size: for nvfp4 outputs; must be None.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor.
        kv_layout: "HND" or "NHD".
        enable_pdl: programmatic dependent launch; None enables it on devices that have it.
        backend: "auto", "xqa" or "trtllm-gen". All mean the same here, except that "trtllm-gen" is refused with an
            NVFP4 cache: FlashInfer interleaves V scales for that backend.
        q_len_per_req: new tokens of each request; None means 1.
        o_scale: a second factor on a 16-bit output.
        mask: uint16 bits as there, for several new tokens; None means causal.
        max_q_len: upper bound of the new tokens of a request, required with ``cum_seq_lens_q``. If a request has more
            new tokens, the first ones are computed as if there were no others, and the others are not written.
        cum_seq_lens_q: int32, uint32 or int64 [batch + 1], cumulative numbers of new tokens, for requests with
            different numbers.
        skip_softmax_threshold_scale_factor: None or 0; other values are refused.
        kv_cache_sf: block scales of an NVFP4 cache, linear for K and V, as there.
        uses_shared_paged_kv_idx: whether K and V share the ids of ``block_tables``. With False, the pools of K and V
            may have different numbers of pages.
        lse: float32 [tokens, num_heads], contiguous, to write the log-sum-exp into, whatever the value of
            ``return_lse``.
        return_lse: whether to return the log-sum-exp.
        bmm1_scale_log2: must be None: ``bmm1_scale`` takes tensors.
        multi_ctas_kv_counter_buffer: not used; the kernels have their own counters.
        enable_block_sparse_attention: must be False.
        cp_world: number of DCP ranks that share the keys of each request (decode context parallel).
        cp_rank: this rank: key c of the cache is key c * cp_world + cp_rank of the request.
        causal_seqlens_kv_global: int32, uint32 or int64, one element per request: its keys on all ranks, new tokens
            included, while ``seq_lens`` counts the keys of this rank. New token t of q_len is at position
            causal_seqlens_kv_global - q_len + t, and sees this rank's keys up to that position. It needs
            ``return_lse``, because the ranks' results are combined by it, and is refused with ``mask``, a window and
            sinks. None without DCP.
        bf16q_fp8kv_transform_mode: must be None.
        request_order: must be None.
        request_order_plan: must be None.
        return_lse_base: "base2" or None for logarithms to base 2, as in FlashInfer; "basee" for natural logarithms.

    Returns:
        The output: ``out`` itself if given, else a tensor of the shape of query. With ``return_lse`` a pair of the
        output and the log-sum-exp (``lse`` itself if given).

    Raises:
        TypeError: an argument has a wrong Python type, or a tensor scale is not float32.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong; the message names the argument.
        NotImplementedError: the call is well-formed, but no kernel serves it on this architecture; the message lists
            what is supported.
    """
    k, v = (kv_cache, None) if type(kv_cache) is torch.Tensor else halves(kv_cache)
    k_scales, v_scales = (None, None) if kv_cache_sf is None else halves(kv_cache_sf)
    query_dtype = getattr(query, "dtype", None)
    if query_dtype is FP8:
        query = dequantized_query(query, kv_cache, out, out_dtype)
    arguments: Arguments = (
        query,
        k,
        v,
        block_tables,
        seq_lens,
        bmm1_scale,
        bmm2_scale,
        None if sinks is None else single(sinks),
        workspace_buffer,
        cum_seq_lens_q,
        causal_seqlens_kv_global,
        o_scale,
        mask,
        k_scales,
        v_scales,
        out,
        ANY_BOUND if type(max_seq_len) is int and 0 <= max_seq_len <= INT32_MAX else max_seq_len,
        window_left,
        kv_layout,
        enable_pdl,
        q_len_per_req,
        out_dtype,
        query_dtype,
    )
    if not (
        lse is None
        and return_lse is False
        and return_lse_base is None
        and max_q_len is None
        and uses_shared_paged_kv_idx is True
        and backend is AUTO
        and o_sf_scale is None
        and o_sf_vec_size is None
        and skip_softmax_threshold_scale_factor is None
        and bmm1_scale_log2 is None
        and multi_ctas_kv_counter_buffer is None
        and enable_block_sparse_attention is False
        and causal_seqlens_kv_global is None
        and cp_world is ONE_RANK
        and cp_rank is FIRST_RANK
        and bf16q_fp8kv_transform_mode is None
        and request_order is None
        and request_order_plan is None
    ):
        arguments += (
            lse,
            return_lse,
            return_lse_base,
            max_q_len,
            uses_shared_paged_kv_idx,
            backend,
            o_sf_scale,
            o_sf_vec_size,
            skip_softmax_threshold_scale_factor,
            bmm1_scale_log2,
            type(multi_ctas_kv_counter_buffer),
            enable_block_sparse_attention,
            cp_world,
            cp_rank,
            bf16q_fp8kv_transform_mode,
            request_order,
            request_order_plan,
        )
    done = _TRTLLM.latest(arguments, out, lse) or _TRTLLM.repeat(arguments, out, lse)
    if done is None:
        if is_traced(query):
            return call_op(trtllm_batch_decode_with_kv_cache, "query", locals())
        done = _checked_trtllm(arguments, call_arguments(TrtllmDecodeCall, locals()))
    return done if return_lse else done[0]
