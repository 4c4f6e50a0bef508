"""Multi-head latent attention entry point, at the module path and with the signature of ``flashinfer.mla``."""

from __future__ import annotations

import torch

from hopwell._decoding import decode_sources
from hopwell._launch import Calls, single, upper_bound
from hopwell._mla import mla_problem, mla_workspace_bytes

__all__ = ["mla_workspace_bytes", "trtllm_batch_decode_with_kv_cache_mla"]

_MLA = Calls(decode_sources)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multi-head latent attention (DeepSeek) of one or a few new tokens per request over a paged latent cache.

    All heads share one key row per token, ``kv_lora_rank + qk_rope_head_dim`` wide, whose first ``kv_lora_rank``
    entries are also the value. Row t of q_len sees the first seq_len - q_len + t + 1 keys, or, sparse, the tokens that
    are named by as many entries of its list, at most all of them; negative ones name none::

        out = bmm2_scale * softmax(bmm1_scale * q k^T over the visible keys) v

    Nothing else is scaled. A row with no visible key gives 0. Results depend neither on what else is in the batch nor
    on max_seq_len: the keys of a request are always split in the same way and merged in the same order.

    Signature and meaning follow FlashInfer's documentation of the function of this name.

    Args:
        query: [batch, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], the absorbed latent query first and the
            rotary part last; bfloat16 or float8_e4m3fn. Tokens lie at equal distances: no gap between requests.
        kv_cache: [pages, page_size, kv_lora_rank + qk_rope_head_dim] or [pages, 1, page_size, ...] in the dtype of
            query. page_size is a power of two up to 1024.
        workspace_buffer: contiguous memory of any dtype for partial results, ``mla_workspace_bytes`` bytes or more. It
            may hold anything. Calls that may run at the same time need one each.
        qk_nope_head_dim: head dimension before absorption. It enters no computation.
        kv_lora_rank: 512 or 256.
        qk_rope_head_dim: 64; sparse with a kv_lora_rank of 512 also 0.
        block_tables: int32 or uint32. Dense: page ids [batch, pages_per_request], for 2^30 tokens of a request at most;
            entries past a request's last page are not read. Sparse: [batch, q_len, sparse_mla_top_k] token indices
            page * page_size + offset, -1 where there is none.
        seq_lens: int32 or uint32, one element per request: its keys in tokens, new ones included.
        max_seq_len: upper bound of ``seq_lens``. It never changes a result.
        sparse_mla_top_k: 0 for dense attention, else the number of tokens each row attends to, a multiple of 4.
        out: bfloat16 [batch, q_len, num_heads, kv_lora_rank] to write into, for fp8 inputs too, without gaps between
            requests; None allocates.
        bmm1_scale: factor on q k^T in natural units, 0 or more: a float, or a one-element float32 tensor, unchecked.
        bmm2_scale: factor on the output, likewise.
        sinks: float32 [num_heads], or a list of one such tensor: natural logits of one more key per head, without a
            value and not scaled.
        enable_pdl: programmatic dependent launch; None means where the device has it.
        backend: "auto", "xqa", "trtllm-gen" or "cute-dsl". FlashInfer's implementations; all mean the same here.

    Returns:
        The output: ``out`` itself where given.

    Raises:
        TypeError: an argument of a wrong Python type, or a tensor scale that is not float32.
        ValueError: a wrong dtype, shape, stride, alignment, device or value; the message names the argument.
        NotImplementedError: a well-formed call that no kernel serves on this architecture; the message says what is.
    """
    arguments = (
        query,
        kv_cache,
        None,
        block_tables,
        seq_lens,
        bmm1_scale,
        bmm2_scale,
        single(sinks),
        None,
        None,
        workspace_buffer,
        out,
        qk_nope_head_dim,
        kv_lora_rank,
        qk_rope_head_dim,
        upper_bound(max_seq_len),
        sparse_mla_top_k,
        enable_pdl,
        backend,
    )
    done = _MLA.repeat(arguments, out)
    if done is None:
        problem = mla_problem(
            query,
            kv_cache,
            workspace_buffer,
            qk_nope_head_dim,
            kv_lora_rank,
            qk_rope_head_dim,
            block_tables,
            seq_lens,
            max_seq_len,
            sparse_mla_top_k,
            out,
            bmm1_scale,
            bmm2_scale,
            sinks,
            enable_pdl,
            backend,
        )
        done = _MLA.run(arguments, problem, out, rows=query.shape[:2])
    return done[0]
