"""Multi-head latent attention entry point, at the module path and with the signature of ``flashinfer.mla``."""

from __future__ import annotations

import torch

from hopwell._checks import FP8, INT32_MAX
from hopwell._decoding import AUTO, FIRST_RANK, ONE_RANK, decode_operands
from hopwell._dynamo import opaque
from hopwell._launch import ANY_BOUND, Calls, call_arguments, single
from hopwell._mla import MlaCall, dequantized_query, list_lengths, mla_problem, mla_workspace_bytes
from hopwell._repeat import Arguments

__all__ = ["mla_workspace_bytes", "trtllm_batch_decode_with_kv_cache_mla"]

_MLA = Calls(decode_operands("cum_seq_lens_q", latent=True))


@opaque
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

    All heads share one key row per token, ``kv_lora_rank + qk_rope_head_dim`` wide, whose first ``kv_lora_rank``
    entries are also the value. Row t of q_len sees the first seq_len - q_len + t + 1 keys, or, sparse, the tokens that
    are named by as many entries of its list, at most all of them; negative ones name none::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled: the scales of e4m3 queries and caches belong into ``bmm1_scale`` and ``bmm2_scale``. With
    16-bit queries, keys of 8 bits are multiplied as 16-bit ones of the same values, so that results have the bits that
    a cache of those gives. With e4m3 queries and cache both products multiply float8_e4m3fn on Hopper: softmax weights
    are rounded to it, relative to the largest one of 64 or 128 keys. Elsewhere such queries are dequantized to
    bfloat16. A row with no visible key gives 0. Results do not depend on max_seq_len, and with up to 16 heads times new
    tokens, or under ``hopwell.batch_invariant(True)``, not on what else is in the batch either: the keys of a request
    are split in the same way and combined in the same order. Else the keys of all requests are cut into equal CTA
    parts, which is faster; the same call gives the same bits in any case. CTA parts take a cooperative launch with a
    CTA for each of the device's multiprocessors, which the driver refuses where a green context or MPS leaves fewer of
    them.

    Signature and meaning follow FlashInfer's documentation of the function of this name.

    Inference only: no gradient flows through a call. In grad mode, the first call with an argument that requires grad
    warns; under ``HOPWELL_CHECK=1`` every such call raises ValueError.

    Args:
        query: [batch, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], the absorbed latent query first and the
            rotary part last; bfloat16, float16 or float8_e4m3fn. Tokens lie at equal distances: no gap between
            requests. With ``cum_seq_lens_q`` [tokens, num_heads, ...].
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim] or [pages, 1, page_size, ...] in the dtype of
            query, or in float8_e4m3fn beside queries of any dtype. Beside bfloat16 queries also uint8 [..., 656], rows
            of 512 float8_e4m3fn with four float32 scales and 64 bfloat16, see ``hopwell.layouts.mla_rows``.
            page_size is 1 to 1024.
        workspace_buffer: contiguous memory of any dtype for partial results, best of ``mla_workspace_bytes`` bytes or
            more, of which the last ones are used. It may hold anything. Calls that may run at the same time need one
            each. In place of one that is too small, memory of our own is used, one partial for each device and stream;
            CUDA graphs that were captured with it on the same stream must not be replayed at the same time.
        qk_nope_head_dim: head dimension before absorption. It enters no computation.
        kv_lora_rank: 512 or 256.
        qk_rope_head_dim: 64; sparse with a kv_lora_rank of 512 also 0.
        block_tables: int32, uint32 or int64. Dense: page ids [batch, pages_per_request], for 2^30 tokens of a request
            at most; entries past a request's last page are not read. Sparse: [batch, q_len, sparse_mla_top_k] token
            indices page * page_size + offset, -1 where there is none; with ``cum_seq_lens_q`` [tokens,
            sparse_mla_top_k].
        seq_lens: int32, uint32 or int64, one element per request: its keys in tokens, new ones included. One
            beyond what ``block_tables`` has room for counts as that, one that is negative as int32 as 0. Sparse also
            [batch, q_len] or [batch * q_len] with more than one new token, which is ``sparse_mla_top_k_lens`` under
            this name, or None: all entries of lists count that are not negative. None costs a launch that fills
            lengths.
        max_seq_len: upper bound of ``seq_lens``. It never changes a result.
        sparse_mla_top_k: 0 for dense attention, else the number of tokens each row attends to, a multiple of 4.
        out: [batch, q_len, num_heads, kv_lora_rank] to write into, in the dtype of query, bfloat16 for fp8 inputs,
            without gaps between requests; None allocates.
        bmm1_scale: factor on q k^T in natural units, 0 or more: a float, or a one-element float32 tensor on the
            device, which is not looked at: a negative one makes the output NaN.
        bmm2_scale: factor on the output, likewise.
        sinks: float32 or bfloat16 [num_heads], or a list of one such tensor: natural logits of one more key per head,
            without a value and not scaled.
        enable_pdl: programmatic dependent launch; None means where the device has it.
        backend: "auto", "xqa", "trtllm-gen", "cute-dsl" or, with lists, "sparse". FlashInfer's implementations; they
            differ here in the base of the log-sum-exp alone.
        skip_softmax_threshold_scale_factor: None or 0; other values are refused.
        is_var_seq: not used: lengths may always differ.
        uses_shared_paged_kv_idx: False for page ids [batch, 2, pages_per_request]. A page holds keys and values at
            once, so that both rows are the same, of which the first is read.
        lse: float32 [batch * q_len, num_heads] or [batch, q_len, num_heads], contiguous, to write the log-sum-exp of
            the scaled scores and sinks into, whatever ``return_lse`` says. A row with no visible key has -inf.
        return_lse: whether to return the log-sum-exp.
        cute_dsl_impl: "auto", "modular" or "monolithic", which all mean the same here.
        kv_scale_format: "auto", "pow2_fp32" or "arbitrary_fp32": what the scales in a cache of uint8 are. It enters no
            computation, as they are float32 either way and are multiplied as such.
        cum_seq_lens_q: int32, uint32 or int64 [batch + 1], cumulative numbers of new tokens, for requests with
            different ones. They stay on the device. Rows behind the last request's are neither read nor written.
        max_q_len: upper bound of the new tokens of a request, required with ``cum_seq_lens_q``. Of a request with more,
            the first ones are computed as if there were no others, and the others are not written.
        multi_ctas_kv_counter_buffer: not used, as the kernels have counters of their own.
        sparse_mla_top_k_lens: int32, uint32 or int64, one element per new token: how many entries of its list count, in
            place of what ``seq_lens`` says, which may be None then; sparse only.
        enable_dcp: whether ranks share the keys of each request (decode context parallel): ``kv_cache`` and
            ``seq_lens`` are this rank's. Needs ``return_lse``, as ranks are combined by it; refused with lists and
            sinks.
        cp_world: number of ranks.
        cp_rank: this rank: key c of the cache is key c * cp_world + cp_rank of the request.
        causal_seqlens_kv_global: int32, uint32 or int64, one element per request: its keys on all ranks, new ones
            included. New token t of q_len is at position causal_seqlens_kv_global - q_len + t, and sees this rank's
            keys up to there. Required with ``enable_dcp``, None without.
        use_fp16_softmax: None or False; True is refused.
        return_lse_base: "base2" for logarithms to base 2, "basee" for natural ones. None is as in FlashInfer: natural
            where ``backend`` is "cute-dsl" and with ``enable_dcp``, which it has there only, else to base 2.

    Returns:
        The output: ``out`` itself where given. With ``return_lse`` a pair of it and the log-sum-exp: ``lse`` itself
        where given, else [batch * q_len, num_heads].

    Raises:
        TypeError: an argument of a wrong Python type, or a tensor scale that is not float32.
        ValueError: a wrong dtype, shape, stride, alignment, device or value; the message names the argument.
        NotImplementedError: a well-formed call that no kernel serves on this architecture; the message says what is.
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
            # What no kernel reads, but the checks do.
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
        # Where kernels multiply e4m3 the call has been recognised with the query as it is, without asking for that.
        query = dequantized_query(query)
        arguments = (query, *arguments[1:])
        done = _MLA.latest(arguments, out, lse)
    done = done or _MLA.repeat(arguments, out, lse)
    if done is None:
        call = call_arguments(MlaCall, locals())
        problem = mla_problem(call)
        rows = query.shape[:2] if cum_seq_lens_q is None else ()
        stats = lse if problem.lse is None or lse is not None else problem.lse.tensor
        renamed = {} if given_lens is None else {"seq_lens": "sparse_mla_top_k_lens"}
        done = _MLA.run(arguments, call, problem, out, stats, rows, renamed)
    return done if return_lse else done[0]
