"""Multi-head latent attention entry point, at the module path and with the signature of ``flashinfer.mla``."""

from __future__ import annotations

import torch

from hopwell._calls.dynamo import call_op, is_traced, traced_as_op
from hopwell._calls.launch import ANY_BOUND, Calls, call_arguments, single
from hopwell._calls.repeat import Arguments
from hopwell._checks.arguments import FP8, INT32_MAX
from hopwell._entries.decoding import AUTO, FIRST_RANK, ONE_RANK, decode_operands
from hopwell._entries.mla import (
    MlaCall,
    dequantized_query,
    list_lengths,
    mla_problem,
    mla_workspace_bytes,
)

__all__ = ["mla_workspace_bytes", "trtllm_batch_decode_with_kv_cache_mla"]

_MLA = Calls(decode_operands("cum_seq_lens_q", latent=True))


@traced_as_op
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
    backend: str = AUTO,
    *,
    skip_softmax_threshold_scale_factor: float | None = None,
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = AUTO,
    kv_scale_format: str = AUTO,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute multi-head latent attention (DeepSeek) of one or a few new tokens per request over a paged latent cache.

    All heads share one key row per token, ``kv_lora_rank + qk_rope_head_dim`` wide. Its first ``kv_lora_rank`` entries
    are also the value. In dense attention row t of q_len sees the first n = seq_len - q_len + t + 1 keys. In sparse
    attention it sees the tokens named by the first n entries of its top-k indices. Negative entries name no token::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled: the caller multiplies the scales of e4m3 queries and caches into ``bmm1_scale`` and
    ``bmm2_scale``. A row without visible keys gives 0.

    With 16-bit queries, 8-bit keys are dequantized to 16 bits, and results are bitwise equal to the results of a 16-bit
    cache with the same values. With e4m3 queries and cache both products multiply float8_e4m3fn on Hopper, B200 and
    B300. Softmax weights are then rounded to e4m3, relative to the largest of 64 or 128 keys. On RTX GPUs the call
    casts e4m3 queries to bfloat16.

    Results never depend on max_seq_len, and the same call always gives the same bits. With up to 16 rows (heads times
    new tokens), or under ``hopwell.batch_invariant(True)``, results do not depend on the other requests of the batch
    either. The keys of a request are then split in the same way and combined in the same order. Otherwise the keys of
    all requests are cut into equal CTA parts, which is faster. CTA parts take a cooperative launch with one CTA for
    each SM of the device. The driver refuses it if a green context or MPS leaves fewer SMs.

    The signature and the meaning follow FlashInfer's documentation of the function of this name.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [batch, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], the absorbed latent query first and the
            rotary part last; bfloat16, float16 or float8_e4m3fn. Tokens lie at equal distances, without gaps between
            requests. With ``cum_seq_lens_q`` [tokens, num_heads, ...].
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim] or [pages, 1, page_size, ...] in the dtype of
            query, or in float8_e4m3fn with queries of any dtype. With bfloat16 queries also uint8 [..., 656], rows of
            512 float8_e4m3fn with four float32 scales and 64 bfloat16, see ``hopwell.layouts.mla_rows``. Pages may have
            any size.
        workspace_buffer: contiguous memory of any dtype and content for partial results, best ``mla_workspace_bytes``
            bytes or more; the kernel uses its last bytes. Calls that may run at the same time need one buffer each. If
            it is too small, hopwell uses its own memory, one allocation for each device and stream. CUDA graphs
            captured with that memory on the same stream must not be replayed at the same time.
        qk_nope_head_dim: head dimension before absorption. It enters no computation.
        kv_lora_rank: 512 or 256.
        qk_rope_head_dim: 64; sparse attention with a kv_lora_rank of 512 also takes 0.
        block_tables: int32, uint32 or int64. Dense: page ids [batch, pages_per_request], for at most 2^30 tokens of a
            request; entries past a request's last page are not read. Sparse: top-k indices [batch, q_len,
            sparse_mla_top_k], each page * page_size + offset, or -1 for no token; with ``cum_seq_lens_q`` [tokens,
            sparse_mla_top_k].
        seq_lens: int32, uint32 or int64, one element per request: its keys in tokens, new tokens included. A length
            beyond the capacity of ``block_tables`` counts as that capacity. A length that is negative as int32 counts
            as 0. Sparse attention with more than one new token also takes [batch, q_len] or [batch * q_len], which is
            ``sparse_mla_top_k_lens`` under this name. Sparse attention also takes None: all entries that are not
            negative count. None costs a launch that fills the lengths.
        max_seq_len: upper bound of ``seq_lens``. It never changes a result.
        sparse_mla_top_k: 0 for dense attention, else the number of top-k indices of each row, a multiple of 4.
        out: [batch, q_len, num_heads, kv_lora_rank] to write into, in the dtype of query, bfloat16 for fp8 inputs,
            without gaps between requests; None allocates.
        bmm1_scale: factor on q k^T in natural units, 0 or more: a float, or a one-element float32 tensor on the device.
            The call does not read the tensor, so a negative value there makes the output NaN instead of an error.
        bmm2_scale: factor on the output, in the same forms.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor. It is the natural, unscaled logit of one
            more key per head, which has no value.
        enable_pdl: programmatic dependent launch; None enables it on devices that have it.
        backend: "auto", "xqa", "trtllm-gen", "cute-dsl" or, with top-k indices, "sparse". These are FlashInfer's
            implementations; here they differ only in the base of the log-sum-exp.
        skip_softmax_threshold_scale_factor: None or 0; other values are refused.
        is_var_seq: not used: lengths may always differ.
        uses_shared_paged_kv_idx: False for page ids [batch, 2, pages_per_request]. A page holds keys and values at
            once, so both rows are equal; the first is read.
        lse: float32 [batch * q_len, num_heads] or [batch, q_len, num_heads], contiguous, to write the log-sum-exp of
            the scaled scores and sinks into, whatever the value of ``return_lse``. A row without visible keys has -inf.
        return_lse: whether to return the log-sum-exp.
        cute_dsl_impl: "auto", "modular" or "monolithic", which all mean the same here.
        kv_scale_format: "auto", "pow2_fp32" or "arbitrary_fp32": the form of the scales in a cache of uint8. It enters
            no computation: the scales are float32 in either form and are multiplied as float32.
        cum_seq_lens_q: int32, uint32 or int64 [batch + 1], cumulative numbers of new tokens, for requests with
            different numbers. The tensor stays on the device. Rows behind the last request's rows are neither read nor
            written.
        max_q_len: upper bound of the new tokens of a request, required with ``cum_seq_lens_q``. If a request has more
            new tokens, the first ones are computed as if there were no others, and the others are not written.
        multi_ctas_kv_counter_buffer: not used; the kernels have their own counters.
        sparse_mla_top_k_lens: int32, uint32 or int64, one element per new token: the number of its top-k indices that
            count. It replaces ``seq_lens``, which may be None then; sparse only.
        enable_dcp: whether DCP ranks share the keys of each request (decode context parallel): ``kv_cache`` and
            ``seq_lens`` belong to this rank. It needs ``return_lse``, because the ranks' results are combined by it,
            and is refused with top-k indices and sinks.
        cp_world: number of DCP ranks.
        cp_rank: this rank: key c of the cache is key c * cp_world + cp_rank of the request.
        causal_seqlens_kv_global: int32, uint32 or int64, one element per request: its keys on all ranks, new tokens
            included. New token t of q_len is at position causal_seqlens_kv_global - q_len + t, and sees this rank's
            keys up to that position. Required with ``enable_dcp``, None without.
        use_fp16_softmax: None or False; True is refused.
        return_lse_base: "base2" for logarithms to base 2, "basee" for natural logarithms. None means FlashInfer's base:
            natural with the backend "cute-dsl" and with ``enable_dcp``, which FlashInfer has only in that backend; else
            base 2.

    Returns:
        The output: ``out`` itself if given. With ``return_lse`` a pair of the output and the log-sum-exp: ``lse``
        itself if given, else [batch * q_len, num_heads].

    Raises:
        TypeError: an argument has a wrong Python type, or a tensor scale is not float32.
        ValueError: a dtype, shape, stride, alignment, device or value is wrong; the message names the argument.
        NotImplementedError: the call is well-formed, but no kernel serves it on this architecture; the message lists
            what is supported.
    """
    query_dtype, given_lens = getattr(query, "dtype", None), sparse_mla_top_k_lens
    if sparse_mla_top_k_lens is None and type(sparse_mla_top_k) is int and sparse_mla_top_k > 0:
        seq_lens, sparse_mla_top_k_lens = list_lengths(query, seq_lens, sparse_mla_top_k)
    arguments: Arguments = (
        query,
        kv_cache,
        block_tables,
        seq_lens if sparse_mla_top_k_lens is None else sparse_mla_top_k_lens,
        bmm1_scale,
        bmm2_scale,
        None if sinks is None else single(sinks),
        workspace_buffer,
        cum_seq_lens_q if sparse_mla_top_k_lens is None else None,
        causal_seqlens_kv_global,
        out,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        ANY_BOUND if type(max_seq_len) is int and 0 <= max_seq_len <= INT32_MAX else max_seq_len,
        sparse_mla_top_k,
        enable_pdl,
        backend,
    )
    if not (
        lse is None
        and return_lse is False
        and return_lse_base is None
        and max_q_len is None
        and sparse_mla_top_k_lens is None
        and skip_softmax_threshold_scale_factor is None
        and is_var_seq is True
        and uses_shared_paged_kv_idx is True
        and multi_ctas_kv_counter_buffer is None
        and cute_dsl_impl is AUTO
        and kv_scale_format is AUTO
        and enable_dcp is False
        and cp_world is ONE_RANK
        and cp_rank is FIRST_RANK
        and use_fp16_softmax is None
    ):
        arguments += (
            lse,
            return_lse,
            return_lse_base,
            max_q_len,
            # No kernel reads these two, but the checks do.
            None if sparse_mla_top_k_lens is None else seq_lens,
            None if sparse_mla_top_k_lens is None else cum_seq_lens_q,
            skip_softmax_threshold_scale_factor,
            is_var_seq,
            uses_shared_paged_kv_idx,
            type(multi_ctas_kv_counter_buffer),
            cute_dsl_impl,
            kv_scale_format,
            enable_dcp,
            cp_world,
            cp_rank,
            use_fp16_softmax,
        )
    done = _MLA.latest(arguments, out, lse)
    if done is None and query_dtype is FP8:
        # Kernels that multiply e4m3 take the query unchanged, and the look-ups find such a repeated call.
        done = _MLA.repeat(arguments, out, lse)
        if done is None:
            query = dequantized_query(query)
            arguments = (query, *arguments[1:])
            done = _MLA.latest(arguments, out, lse)
    done = done or _MLA.repeat(arguments, out, lse)
    if done is None:
        if is_traced(query):
            return call_op(trtllm_batch_decode_with_kv_cache_mla, "query", locals())
        call = call_arguments(MlaCall, locals())
        problem = mla_problem(call)
        rows = query.shape[:2] if cum_seq_lens_q is None else ()
        stats = lse if problem.lse is None or lse is not None else problem.lse.tensor
        renamed = {} if given_lens is None else {"seq_lens": "sparse_mla_top_k_lens"}
        done = _MLA.run(arguments, call, problem, out, stats, rows, renamed)
    return done if return_lse else done[0]
