"""Arguments of ``trtllm_batch_decode_with_kv_cache_mla``: checked, and reduced to an AttentionProblem."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hopwell import _checks as checks
from hopwell import _features as features
from hopwell._decoding import (
    NATURAL_BASE,
    check_counter_buffer,
    dense_tokens,
    flat_tokens,
    log_sum_exp,
    ragged_starts,
    refuse_skip_softmax,
    refused,
    shard,
    workspace,
    workspace_bytes,
)
from hopwell.kernels import support
from hopwell.kernels.problem import AttentionProblem, Family, Mask, MaskKind, Shard
from hopwell.layouts import FP8_DS_MLA_BYTES, KVViews, low_words, mla_kv_views

BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl")
NATURAL_BACKEND = "cute-dsl"  # whose log-sum-exps are natural, also in the calls that merge ranks
DIMS = ((512, 64), (256, 64))  # (kv_lora_rank, qk_rope_head_dim)
SPARSE_DIMS = (*DIMS, (512, 0))
TOP_K_STEP = 4
CUTE_DSL_IMPLEMENTATIONS = ("auto", "modular", "monolithic")
KV_SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")


class MlaOptions(NamedTuple):
    """What the entry takes as plain values besides those of FlashInfer's documentation."""

    skip_softmax_threshold_scale_factor: Any = None
    is_var_seq: Any = True
    uses_shared_paged_kv_idx: Any = True
    cute_dsl_impl: Any = "auto"
    kv_scale_format: Any = "auto"
    enable_dcp: Any = False
    cp_world: Any = 1
    cp_rank: Any = 0
    use_fp16_softmax: Any = None

    def check(self, on: torch.device) -> None:
        """Refuse by name what would change a result."""
        refuse_skip_softmax(support.MLA, self.skip_softmax_threshold_scale_factor, on)
        checks.flag("is_var_seq", self.is_var_seq)
        checks.flag("uses_shared_paged_kv_idx", self.uses_shared_paged_kv_idx)
        checks.choice("cute_dsl_impl", self.cute_dsl_impl, CUTE_DSL_IMPLEMENTATIONS)
        checks.choice("kv_scale_format", self.kv_scale_format, KV_SCALE_FORMATS)
        if checks.optional_flag("use_fp16_softmax", self.use_fp16_softmax):
            raise refused(support.MLA, "use_fp16_softmax=True", on)

    def shard(self, kv_global: Any, batch: int, return_lse: bool, on: torch.device) -> Shard | None:
        """What this rank has of all keys; ``kv_global`` is ``causal_seqlens_kv_global``."""
        found = shard(kv_global, self.cp_world, self.cp_rank, batch, on)
        if not checks.flag("enable_dcp", self.enable_dcp):
            if found is not None or self.cp_world > 1:
                raise ValueError(
                    "cp_world must be 1 and causal_seqlens_kv_global None without enable_dcp, "
                    f"got cp_world={self.cp_world} and {checks.describe(kv_global)}"
                )
        elif not return_lse:
            raise ValueError("return_lse must be True with enable_dcp: ranks are merged by it")
        elif found is None:
            raise ValueError("causal_seqlens_kv_global must be given with enable_dcp, got None")
        return found


def _check_dims(rank: int, rope: int, top_k: int) -> None:
    allowed = SPARSE_DIMS if top_k else DIMS
    if (rank, rope) not in allowed:
        raise ValueError(f"kv_lora_rank and qk_rope_head_dim must be one of {allowed}, got {(rank, rope)}")


def widened_query(query: Any) -> Any:
    """e4m3 queries as bfloat16, which holds all of their values and is what kernels multiply. Others as they are."""
    if not (isinstance(query, torch.Tensor) and query.dtype == checks.FP8):
        return query
    checks.main_tensor("query", query)  # a copy has none of the faults that are looked for
    checks.tma_readable("query", query)
    return query.to(torch.bfloat16)


def _checked_cache(
    query: torch.Tensor, query_dtype: torch.dtype, kv_cache: Any, kv_lora_rank: int, qk_rope_head_dim: int
) -> KVViews:
    checks.tensor("kv_cache", kv_cache)
    # Rows of 656 bytes have bfloat16 in them, and other elements times scales are rounded to it.
    packed = kv_cache.dtype == torch.uint8
    allowed = (torch.uint8,) if packed else (query_dtype, checks.FP8)
    if kv_cache.dtype not in allowed or (packed and query_dtype != torch.bfloat16):
        raise ValueError(
            f"kv_cache must have the dtype of query, {query_dtype}, be {checks.FP8}, or torch.uint8 for queries of "
            f"torch.bfloat16, got {kv_cache.dtype}"
        )
    checks.device("kv_cache", kv_cache, query.device)
    cache = mla_kv_views(kv_cache, kv_lora_rank)
    width = kv_lora_rank + qk_rope_head_dim
    dims = kv_lora_rank, qk_rope_head_dim
    if packed and dims != DIMS[0]:
        raise ValueError(f"kv_lora_rank and qk_rope_head_dim must be {DIMS[0]} for a kv_cache of uint8, got {dims}")
    row = FP8_DS_MLA_BYTES if packed else width
    for name, got, wanted, what in (
        ("query", query.shape[-1], width, "kv_lora_rank + qk_rope_head_dim"),
        ("kv_cache", cache.key.shape[3], row, "the bytes of a row" if packed else "kv_lora_rank + qk_rope_head_dim"),
    ):
        if got != wanted:
            raise ValueError(f"{name} must have {what} = {wanted} as its last size, got {got}")
    checks.tma_readable("kv_cache", kv_cache)
    checks.page_size("kv_cache", cache.key.shape[2])
    return cache


def _token_table(block_tables: Any, query: torch.Tensor, top_k: int) -> torch.Tensor:
    """The table of sparse attention, token indices, as [tokens, top_k]. It has the first dimensions of ``query``."""
    ids = low_words(checks.index_tensor("block_tables", block_tables, query.device))
    if query.dim() == 3:
        checks.shape("block_tables", block_tables, ("tokens", query.shape[0]), ("sparse_mla_top_k", top_k))
        checks.unit_stride("block_tables", block_tables)
        return ids
    batch, q_len = query.shape[:2]
    checks.shape("block_tables", block_tables, ("batch", batch), ("q_len", q_len), ("sparse_mla_top_k", top_k))
    checks.unit_stride("block_tables", block_tables)
    dense_tokens("block_tables", block_tables)
    return ids[:, 0] if q_len == 1 else ids.flatten(0, 1)


def _check_out(out: Any, query: torch.Tensor, rank: int) -> None:
    if out is None:
        return
    checks.tensor("out", out, "a torch.Tensor or None")
    if query.dim() == 4:
        names = ("batch", "q_len", "num_heads")
        checks.shape("out", out, *zip(names, query.shape[:3], strict=True), ("kv_lora_rank", rank))
        dense_tokens("out", out)
    tokens, heads, _ = flat_tokens(query).shape
    checks.output("out", flat_tokens(out), (tokens, heads, rank), query.dtype, query.device)


def _kv_lens(seq_lens: Any, sparse_lens: Any, batch: int, tokens: int, top_k: int, on: torch.device) -> torch.Tensor:
    """Lengths of the requests, or of the lists of all ``tokens`` where they are given."""
    lens = checks.lengths("seq_lens", seq_lens, batch, on)
    if sparse_lens is None:
        return lens
    checks.tensor("sparse_mla_top_k_lens", sparse_lens)
    if top_k == 0:
        raise ValueError("sparse_mla_top_k_lens must be None for dense attention (sparse_mla_top_k=0)")
    return checks.lengths("sparse_mla_top_k_lens", sparse_lens, tokens, on)


def mla_workspace_bytes(
    num_heads: int, max_seq_len: int, q_len_per_req: int = 1, kv_lora_rank: int = 512, device: Any = None
) -> int:
    """Size of ``workspace_buffer`` that is enough for ``trtllm_batch_decode_with_kv_cache_mla`` with any batch.

    It holds partial results of requests whose keys several multiprocessors share, and grows with the logarithm of the
    keys: on 132 multiprocessors for up to 256 rows (heads times new tokens of a request) 72 MiB for 131072 keys, and
    no more than 84 for a million.

    Args:
        num_heads: query heads.
        max_seq_len: the most keys that a request can have: page size times columns of ``block_tables``, or of sparse
            attention its columns, ``sparse_mla_top_k``.
        q_len_per_req: new tokens of each request.
        kv_lora_rank: columns of the output.
        device: the device of the call; None means the current CUDA device, or the CPU where there is none.

    Returns:
        Bytes.
    """
    heads = checks.host_int("num_heads", num_heads, minimum=1)
    checks.host_int("max_seq_len", max_seq_len)
    checks.host_int("kv_lora_rank", kv_lora_rank, minimum=1)
    rows = heads * checks.host_int("q_len_per_req", q_len_per_req)
    return workspace_bytes(rows, 1, kv_lora_rank, max_seq_len, device, latent=True)


def mla_problem(
    query: torch.Tensor,
    query_dtype: torch.dtype | None,
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
    *,
    options: MlaOptions = MlaOptions(),  # noqa: B008 - immutable
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
) -> AttentionProblem:
    """Check every argument, refuse what has no kernel, and return the problem. No device memory is read.

    ``query`` is :func:`widened_query` of what the caller gave, whose dtype was ``query_dtype``."""
    checks.main_tensor("query", query)
    checks.dtype("query", query, (*checks.SIXTEEN_BIT, checks.FP8))
    is_ragged, on = cum_seq_lens_q is not None, query.device
    if is_ragged:
        checks.tensor("cum_seq_lens_q", cum_seq_lens_q)
    sizes = (("tokens", None),) if is_ragged else (("batch", None), ("q_len", None))
    checks.shape("query", query, *sizes, ("num_heads", None), ("head_dim", None))
    checks.tma_readable("query", query)
    heads, width = query.shape[-2:]
    if is_ragged:
        batch, q_len, starts = ragged_starts("cum_seq_lens_q", cum_seq_lens_q, "max_q_len", max_q_len, query)
    else:
        dense_tokens("query", query)
        (batch, q_len), starts = query.shape[:2], None
        if max_q_len is not None:
            most = checks.host_int("max_q_len", max_q_len)
            raise ValueError(f"max_q_len must be None without cum_seq_lens_q, got {most}")
    flat_query = flat_tokens(query)
    tokens = flat_query.shape[0]
    if is_ragged:
        q_len = min(q_len, max(tokens, 1))  # scratch grows with it, and no request has more tokens than there are
    checks.flag("return_lse", return_lse)
    check_counter_buffer(multi_ctas_kv_counter_buffer)
    options.check(on)
    part = options.shard(causal_seqlens_kv_global, batch, return_lse, on)
    if heads < 1:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")

    checks.host_int("qk_nope_head_dim", qk_nope_head_dim, minimum=1)
    rank = checks.host_int("kv_lora_rank", kv_lora_rank, minimum=1)
    rope = checks.host_int("qk_rope_head_dim", qk_rope_head_dim)
    top_k = checks.host_int("sparse_mla_top_k", sparse_mla_top_k)
    if top_k % TOP_K_STEP:
        raise ValueError(f"sparse_mla_top_k must be a multiple of {TOP_K_STEP}, got {top_k}")
    _check_dims(rank, rope, top_k)
    cache = _checked_cache(query, query_dtype or query.dtype, kv_cache, rank, rope)
    page_size = cache.key.shape[2]
    if top_k > 0:
        if not options.uses_shared_paged_kv_idx:
            raise ValueError(f"uses_shared_paged_kv_idx must be True with sparse_mla_top_k={top_k}")
        lists = _token_table(block_tables, query, top_k)
        table, capacity = None, top_k
    else:
        table, lists = checks.page_table(block_tables, batch, on, shared=options.uses_shared_paged_kv_idx), None
        capacity = checks.capacity(table, page_size)
    kv_lens = _kv_lens(seq_lens, sparse_mla_top_k_lens, batch, tokens, top_k, on)
    if part is not None and top_k > 0:
        raise refused(support.MLA, f"enable_dcp=True with sparse_mla_top_k={top_k}", on)
    if sparse_mla_top_k_lens is not None:  # Every token is a request of its own then, with its list as its keys.
        batch, q_len, starts = tokens, 1, None
    checks.host_int("max_seq_len", max_seq_len)
    softmax_scale = checks.scale("bmm1_scale", bmm1_scale, on, minimum=0.0)
    output_scale = checks.scale("bmm2_scale", bmm2_scale, on)
    sink_logits = checks.sinks(sinks, heads, on)
    if part is not None and sinks is not None:
        raise ValueError("sinks must be None with enable_dcp: every rank would count them")
    enable_pdl = checks.optional_flag("enable_pdl", enable_pdl)
    checks.choice("backend", backend, BACKENDS)
    _check_out(out, query, rank)
    if return_lse_base is None and (backend == NATURAL_BACKEND or part is not None):
        return_lse_base = NATURAL_BASE
    log = log_sum_exp(lse, return_lse, return_lse_base, flat_query, tuple(query.shape[:-1]))
    needed = mla_workspace_bytes(heads, capacity, q_len, rank, on)
    inputs = (
        ("query", query),
        ("kv_cache", cache.key),
        ("block_tables", block_tables),
        ("seq_lens", seq_lens),
        ("sinks", sink_logits),
        ("cum_seq_lens_q", cum_seq_lens_q),
        ("causal_seqlens_kv_global", causal_seqlens_kv_global),
        ("sparse_mla_top_k_lens", sparse_mla_top_k_lens),
    )
    results = (("out", out), ("lse", None if log is None else log.tensor))
    scratch = workspace(workspace_buffer, needed, results, inputs)

    arch = support.arch_of(on)
    dtypes = f"query.dtype={query_dtype}, kv_cache.dtype={kv_cache.dtype}"
    has_tensor_scale = any(isinstance(scale, torch.Tensor) for scale in (softmax_scale, output_scale))
    known_dims = "head_dim" if (width, rank) in support.MLA_HEAD_DIMS else "sparse_head_dim"  # DIMS has no others
    needs = (
        (kv_cache.dtype == checks.FP8, "fp8", dtypes),
        (kv_cache.dtype == torch.uint8, "fp8_ds_mla", dtypes),
        (True, "16bit", dtypes),
        (top_k > 0, "sparse", f"sparse_mla_top_k={top_k}"),
        (True, known_dims, f"head_dim={width}/{rank}"),
        (True, "page_size" if page_size <= support.MAX_PAGE_SIZE else "other_page_size", f"page_size={page_size}"),
        (True, "cache", f"kv_cache of shape {tuple(kv_cache.shape)}"),
        (q_len > 1, "multi_token", f"query with q_len={q_len}"),
        (part is not None, "dcp", "enable_dcp=True"),
        (sinks is not None, "sinks", "sinks given"),
        (has_tensor_scale, "tensor_scales", "scale given as a tensor"),
    )
    features.require_all(support.MLA, arch, needs)
    return AttentionProblem(
        query=flat_query,
        key=cache.key,
        value=cache.value,
        out=flat_tokens(out),
        batch=batch,
        max_q_len=q_len,
        max_kv_len=capacity,
        q_offsets=starts,
        kv_lens=kv_lens,
        mask=Mask(MaskKind.CAUSAL if part is None else MaskKind.CYCLIC),
        softmax_scale=softmax_scale,
        output_scale=output_scale,
        page_table=table,
        token_table=lists,
        shard=part,
        sinks=sink_logits,
        lse=log,
        scratch=scratch,
        family=Family.MLA,
        programmatic_launch=support.has_pdl(arch) if enable_pdl is None else enable_pdl,
    )
