"""Prefill entry point of ``flashinfer.cudnn``, also available in ``hopwell.prefill``."""

from __future__ import annotations

import torch

from hopwell._calls.dynamo import call_op, is_traced, traced_as_op
from hopwell._calls.launch import ANY_BOUND, Calls, call_arguments
from hopwell._calls.repeat import Arguments
from hopwell._checks.arguments import INT32_MAX
from hopwell._entries.cudnn import CUDNN_OPERANDS, CudnnCall, cudnn_problem, returned_lse, scaled

__all__ = ["cudnn_batch_prefill_with_kv_cache"]

_CUDNN = Calls(CUDNN_OPERANDS)
ELEMENTS, NATURAL, TOKENS_FIRST = "elements", "ln", "NH"


@traced_as_op
def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor | None,
    actual_seq_lens_kv: torch.Tensor | None,
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
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_units: str = ELEMENTS,
    o_data_type: torch.dtype | None = None,
    lse_base: str = NATURAL,
    lse_layout: str = TOKENS_FIRST,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention over ragged or paged K and V, with the log-sum-exp on request.

    ``out = v_scale * softmax(scale * q_scale * k_scale * q k^T over the visible keys) v``, where the three tensor
    scales of bfloat16 and float16 are 1. With ``causal``, row t of a request with q_len queries and kv_len keys sees
    keys 0..kv_len - q_len + t, otherwise all kv_len. A row without visible keys gives 0, and -inf in the log-sum-exp.

    The signature and the meaning follow FlashInfer's function of this name (cuDNN itself is not used). By default
    offsets count elements, and the log-sum-exp is natural.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        q: [tokens, num_heads, head_dim], bfloat16, float16 or float8_e4m3fn.
        k_cache: paged [pages, num_kv_heads, page_size, head_dim]; or, without ``block_tables``, ragged [kv_tokens,
            num_kv_heads, head_dim]. Strides except the last are free multiples of 16 bytes, so a transposed view of NHD
            storage is allowed. The dtype of q.
        v_cache: the same with strides and head_dim of its own.
        scale: factor on q k^T, a float in natural units, 0 or more, typically 1 / sqrt(head_dim).
        workspace_buffer: any tensor. hopwell does not use it, so its content and size do not matter.
        max_token_per_sequence: upper bound of ``actual_seq_lens_q``. It shapes ``lse`` and changes no other result.
        max_sequence_kv: upper bound of ``actual_seq_lens_kv``. It never changes a result.
        actual_seq_lens_q: int32, uint32 or int64, one element per request in any shape; the number of elements is the
            batch size. On the device of q, or on the host, from which each call copies them, which is slower. None if
            ``batch_offsets_q`` counts tokens: the lengths are then the differences of its batch + 1 elements.
        actual_seq_lens_kv: the same for the keys; None if ``batch_offsets_k`` counts tokens.
        block_tables: int32, uint32 or int64 page ids [batch, pages_per_request], shared by K and V. Entries past the
            last page of a request are never read and may be -1. None for ragged K and V.
        causal: whether to mask.
        return_lse: whether to compute and return the log-sum-exp.
        batch_offsets_q: int32, uint32 or int64, contiguous, batch or batch + 1 elements, of which the first batch
            count. An offset is the start of a request in q, in elements of storage from q's first element: token *
            q.stride(0). This is token * num_heads * head_dim for a contiguous q, and 3 times that for a slice of
            [tokens, 3, num_heads, head_dim]. An offset inside a token counts as the token's start. It comes together
            with ``batch_offsets_o``. Both are required for more than one request; without them the request starts at
            token 0.
        batch_offsets_o: the same in the output (token * num_heads * V head_dim if it is allocated).
        batch_offsets_k: the same in ragged K (token * k_cache.stride(0)). It comes together with ``batch_offsets_v``;
            both are required for more than one request with ragged K and V, and refused with pages.
        batch_offsets_v: the same in ragged V (token * v_cache.stride(0)).
        batch_offsets_stats: the same in the log-sum-exp (row * num_heads). It makes the log-sum-exp ragged: row t of
            request b is row offset + t of ``lse`` seen as [rows, num_heads]. None pads: row t of request b is ``lse[b,
            t]``.
        out: [tokens, num_heads, V head_dim] to write into, with strides of its own; None allocates.
        lse: float32 [batch, max_token_per_sequence, num_heads], or with ``batch_offsets_stats`` [tokens, num_heads], to
            write into, contiguous. It is written with ``return_lse`` only; None allocates. A padded lse has -inf in
            rows past the end of a request. With offsets, rows of no request are not written. Tokens past
            ``max_token_per_sequence``, or past the last row of lse, have no place in it and write nothing there.
        is_cuda_graph_compatible: refuse lengths on the host, because a graph would not replay their copies.
        backend: any string or None. FlashInfer chooses between cuDNN's variants with it; hopwell has none.
        q_scale: the factor that dequantizes float8_e4m3fn queries, a one-element float32 tensor, or [num_kv_heads]: a
            factor for the queries of each KV head. It is on the device, so that its value may change under a CUDA
            graph. None means 1; bfloat16 and float16 take only None.
        k_scale: the same for K.
        v_scale: the same for V.
        batch_offsets_units: the unit of all ``batch_offsets_*``: "elements" as above, or "tokens". With "tokens" the
            offsets of the output default to the offsets of q, and the offsets of V to the offsets of K.
        o_data_type: dtype of the output: float16, bfloat16, or float8_e4m3fn, which saturates at the largest e4m3
            value. None means the dtype of ``out``, or of q.
        lse_base: "ln" for the natural logarithm, or "log2" for the logarithm to base 2, the default of newer FlashInfer
            versions.
        lse_layout: "NH" for the shapes of ``lse`` above, or "HN" for FlashAttention's shapes: [batch, num_heads,
            max_token_per_sequence], or [num_heads, tokens] with ``batch_offsets_stats``, which then count tokens in
            either unit.

    Returns:
        The output (``out`` itself if given), and the log-sum-exp (``lse`` itself if given) or None.

    Raises:
        TypeError: an argument has a wrong Python type.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong, or offsets are missing; the message
            names the argument.
        NotImplementedError: the device's architecture has no kernel for the combination, see
            :func:`hopwell.kernels.capability.features.support_matrix`.
    """
    if batch_offsets_units is not ELEMENTS and isinstance(batch_offsets_units, str) and batch_offsets_units == "tokens":
        batch_offsets_o = batch_offsets_q if batch_offsets_o is None else batch_offsets_o
        batch_offsets_v = batch_offsets_k if batch_offsets_v is None else batch_offsets_v
    output_scale: float | torch.Tensor = 1.0
    # The common case comes first: isinstance(float, torch.Tensor) takes longer than the whole rest of the condition.
    if not (type(scale) is float and q_scale is k_scale is v_scale is None) and (
        isinstance(scale, torch.Tensor) or not (q_scale is k_scale is v_scale is None)
    ):
        scale, output_scale = scaled(q, k_cache, scale, q_scale, k_scale, v_scale)
    arguments: Arguments = (
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
        scale,
        output_scale,
        out,
        lse,
        max_token_per_sequence,
        ANY_BOUND if type(max_sequence_kv) is int and 0 <= max_sequence_kv <= INT32_MAX else max_sequence_kv,
        causal,
        return_lse,
        type(workspace_buffer),
        is_cuda_graph_compatible,
    )
    if not (
        backend is None
        and batch_offsets_units is ELEMENTS
        and o_data_type is None
        and lse_base is NATURAL
        and lse_layout is TOKENS_FIRST
    ):
        arguments += (type(backend), batch_offsets_units, o_data_type, lse_base, lse_layout)
    repeated = _CUDNN.latest(arguments, out, lse) or _CUDNN.repeat(arguments, out, lse)
    if repeated is not None:
        return repeated
    if is_traced(q):
        return call_op(cudnn_batch_prefill_with_kv_cache, "q", locals())
    call = call_arguments(CudnnCall, locals())
    problem = cudnn_problem(call)
    stats = returned_lse(problem, call)
    return _CUDNN.run(arguments, call, problem, out, stats)
