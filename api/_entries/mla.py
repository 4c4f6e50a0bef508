"""Check the arguments of ``trtllm_batch_decode_with_kv_cache_mla`` and convert them to an AttentionProblem."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hopwell._calls.dynamo import is_traced
from hopwell._checks import arguments as checks
from hopwell._checks.caches import check_dtype
from hopwell._checks.features import named, require_problem
from hopwell._entries.decoding import (
    NATURAL_BASE,
    check_counter_buffer,
    dcp_rank,
    dense_tokens,
    flat_tokens,
    log_sum_exp,
    ragged_starts,
    refuse_skip_softmax,
    refused,
    workspace,
    workspace_bytes,
)
from hopwell.kernels import registry, support
from hopwell.kernels.config.splitting import most_new_tokens
from hopwell.kernels.problem import (
    AttentionProblem,
    DcpRank,
    Family,
    LogSumExp,
    Mask,
    MaskKind,
    PageTable,
    TokenOffsets,
)
from hopwell.layouts import FP8_DS_MLA_BYTES, KVViews, mla_kv_views

BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl", "sparse")
SPARSE_BACKEND = "sparse"  # serves top-k indices only
NATURAL_BACKEND = "cute-dsl"  # returns natural log-sum-exps, also in calls that combine DCP ranks
# (kv_lora_rank, qk_rope_head_dim)
DIMS, SPARSE_DIMS = (
    tuple((v, qk - v) for qk, v in dims) for dims in (support.MLA_HEAD_DIMS, support.SPARSE_MLA_HEAD_DIMS)
)
TOP_K_STEP = 4
CUTE_DSL_IMPLEMENTATIONS = ("auto", "modular", "monolithic")
KV_SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")


class MlaCall(NamedTuple):
    """The arguments of a call after two conversions.

    ``query`` is :func:`dequantized_query` of the caller's query, whose dtype was ``query_dtype``. ``seq_lens`` and
    ``sparse_mla_top_k_lens`` are the results of :func:`list_lengths`.
    """

    query: torch.Tensor
    query_dtype: torch.dtype | None
    kv_cache: torch.Tensor
    workspace_buffer: torch.Tensor
    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor | None
    max_seq_len: int
    sparse_mla_top_k: int
    out: torch.Tensor | None
    bmm1_scale: float | torch.Tensor
    bmm2_scale: float | torch.Tensor
    sinks: torch.Tensor | list[torch.Tensor] | None
    enable_pdl: bool | None
    backend: str
    skip_softmax_threshold_scale_factor: float | None
    is_var_seq: bool
    uses_shared_paged_kv_idx: bool
    lse: torch.Tensor | None
    return_lse: bool
    cute_dsl_impl: str
    kv_scale_format: str
    cum_seq_lens_q: torch.Tensor | None
    max_q_len: int | None
    multi_ctas_kv_counter_buffer: torch.Tensor | None
    sparse_mla_top_k_lens: torch.Tensor | None
    enable_dcp: bool
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: torch.Tensor | None
    use_fp16_softmax: bool | None
    return_lse_base: str | None


def _refuse_unserved(call: MlaCall) -> None:
    """Refuse, by name, arguments that would change a result."""
    on = call.query.device
    refuse_skip_softmax(support.MLA, call.skip_softmax_threshold_scale_factor, on)
    checks.flag("is_var_seq", call.is_var_seq)
    checks.flag("uses_shared_paged_kv_idx", call.uses_shared_paged_kv_idx)
    checks.choice("cute_dsl_impl", call.cute_dsl_impl, CUTE_DSL_IMPLEMENTATIONS)
    checks.choice("kv_scale_format", call.kv_scale_format, KV_SCALE_FORMATS)
    if checks.optional_flag("use_fp16_softmax", call.use_fp16_softmax):
        raise refused(support.MLA, "use_fp16_softmax=True", on)


def _dcp_rank(call: MlaCall, batch: int) -> DcpRank | None:
    """Return this rank's share of all keys, or None without DCP."""
    kv_global = call.causal_seqlens_kv_global
    found = dcp_rank(kv_global, call.cp_world, call.cp_rank, batch, call.query.device)
    if not checks.flag("enable_dcp", call.enable_dcp):
        world = checks.host_int("cp_world", call.cp_world)
        if found is not None or world > 1:
            raise ValueError(
                "cp_world must be 1 and causal_seqlens_kv_global None without enable_dcp, "
                f"got cp_world={world} and {checks.describe(kv_global)}"
            )
    elif not call.return_lse:
        raise ValueError("return_lse must be True with enable_dcp: ranks are merged by it")
    elif found is None:
        raise ValueError("causal_seqlens_kv_global must be given with enable_dcp, got None")
    return found


def dequantized_query(query: Any) -> Any:
    """Return e4m3 queries in the dtype in which kernels take them. All other queries are returned unchanged."""
    if not (isinstance(query, torch.Tensor) and query.dtype == checks.FP8) or is_traced(query):
        return query
    checks.main_tensor("query", query)  # before the copy, which would hide faults of the original
    dtype = registry.query_dtype(Family.MLA, support.arch_of(query.device), query.dtype, checks.FP8)
    if dtype == query.dtype:
        return query
    checks.tma_readable("query", query)
    return query.to(dtype)


def list_lengths(query: Any, seq_lens: Any, top_k: int) -> tuple[Any, torch.Tensor | None]:
    """Return ``seq_lens`` and ``sparse_mla_top_k_lens`` for ``top_k`` top-k indices without the latter argument.

    FlashInfer's sparse back end takes these lengths as ``seq_lens`` of each new token, and None for all indices.
    """
    # Neither tensor has been checked, and nested tensors have no shapes.
    if not isinstance(query, torch.Tensor) or query.is_nested or query.dim() not in (3, 4) or top_k > checks.INT32_MAX:
        return seq_lens, None
    if is_traced(query):
        return seq_lens, None
    tokens = query.shape[:-2]
    if seq_lens is None:
        return None, torch.full((tokens.numel(),), top_k, dtype=torch.int32, device=query.device)
    if len(tokens) == 1 or tokens[1] == 1 or not isinstance(seq_lens, torch.Tensor) or seq_lens.is_nested:
        return seq_lens, None
    if tuple(seq_lens.shape) not in (tuple(tokens), (tokens.numel(),)):
        return seq_lens, None
    return None, checks.lengths("seq_lens", seq_lens, tokens.numel(), query.device)


def _checked_cache(
    query: torch.Tensor, query_dtype: torch.dtype, kv_cache: Any, kv_lora_rank: int, qk_rope_head_dim: int
) -> KVViews:
    checks.tensor("kv_cache", kv_cache)
    packed = kv_cache.dtype == torch.uint8
    # Rows of 656 bytes contain bfloat16, and their other elements times scales are rounded to bfloat16.
    allowed = (query_dtype, checks.FP8, *((torch.uint8,) if query_dtype == torch.bfloat16 else ()))
    check_dtype([("kv_cache", kv_cache)], query_dtype, allowed, f"rows of {FP8_DS_MLA_BYTES} bytes")
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
    """Return the top-k indices of sparse attention as [tokens, top_k]. The argument has the first sizes of
    ``query``."""
    ids = checks.index_tensor("block_tables", block_tables, query.device)
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
    dtype = torch.bfloat16 if query.dtype == checks.FP8 else query.dtype
    checks.output("out", flat_tokens(out), (tokens, heads, rank), dtype, query.device)


def _kv_lens(seq_lens: Any, sparse_lens: Any, batch: int, tokens: int, top_k: int, on: torch.device) -> torch.Tensor:
    """Return the lengths of the requests, or of the top-k indices of all ``tokens`` if given."""
    if sparse_lens is None:
        return checks.lengths("seq_lens", seq_lens, batch, on)
    if seq_lens is not None:
        checks.lengths("seq_lens", seq_lens, batch, on)
    checks.tensor("sparse_mla_top_k_lens", sparse_lens)
    if top_k == 0:
        raise ValueError("sparse_mla_top_k_lens must be None for dense attention (sparse_mla_top_k=0)")
    return checks.lengths("sparse_mla_top_k_lens", sparse_lens, tokens, on)


def mla_workspace_bytes(
    num_heads: int, max_seq_len: int, q_len_per_req: int = 1, kv_lora_rank: int = 512, device: Any = None
) -> int:
    """Return a ``workspace_buffer`` size that is enough for ``trtllm_batch_decode_with_kv_cache_mla`` with any batch.

    The workspace holds partial results of requests whose keys several SMs share. It grows with the logarithm of the
    keys. On 132 SMs and for up to 256 rows (heads times new tokens of a request) it is 72 MiB for 131072 keys. For a
    million keys it is at most 84 MiB.

    Args:
        num_heads: query heads.
        max_seq_len: the most keys of a request: page size times columns of ``block_tables``; for sparse attention the
            columns of ``block_tables``, ``sparse_mla_top_k``.
        q_len_per_req: new tokens of each request.
        kv_lora_rank: columns of the output.
        device: the device of the call; None means the current CUDA device, or the CPU if there is none.

    Returns:
        Bytes.
    """
    heads = checks.host_int("num_heads", num_heads, minimum=1)
    checks.host_int("max_seq_len", max_seq_len)
    checks.host_int("kv_lora_rank", kv_lora_rank, minimum=1)
    rows = heads * checks.host_int("q_len_per_req", q_len_per_req)
    return workspace_bytes(rows, 1, kv_lora_rank, max_seq_len, device, latent=True)


def _requests(call: MlaCall) -> tuple[int, int, TokenOffsets | None]:
    """Return (requests, most new tokens of a request, starts); starts are None without cumulative lengths."""
    if call.cum_seq_lens_q is not None:
        return ragged_starts("cum_seq_lens_q", call.cum_seq_lens_q, "max_q_len", call.max_q_len, call.query)
    dense_tokens("query", call.query)
    if call.max_q_len is not None:
        most = checks.host_int("max_q_len", call.max_q_len)
        raise ValueError(f"max_q_len must be None without cum_seq_lens_q, got {most}")
    batch, q_len = call.query.shape[:2]
    return batch, q_len, None


def _check_query(call: MlaCall) -> None:
    checks.main_tensor("query", call.query)
    checks.dtype("query", call.query, (*checks.SIXTEEN_BIT, checks.FP8))
    is_ragged = call.cum_seq_lens_q is not None
    if is_ragged:
        checks.index_tensor("cum_seq_lens_q", call.cum_seq_lens_q, call.query.device)
    sizes = (("tokens", None),) if is_ragged else (("batch", None), ("q_len", None))
    hint = f" {'with' if is_ragged else 'without'} cum_seq_lens_q"
    checks.shape("query", call.query, *sizes, ("num_heads", None), ("head_dim", None), hint=hint)
    checks.tma_readable("query", call.query)


def _dims(call: MlaCall) -> tuple[int, int, int]:
    """Return (kv_lora_rank, qk_rope_head_dim, sparse_mla_top_k)."""
    checks.host_int("qk_nope_head_dim", call.qk_nope_head_dim, minimum=1)
    rank = checks.host_int("kv_lora_rank", call.kv_lora_rank, minimum=1)
    rope = checks.host_int("qk_rope_head_dim", call.qk_rope_head_dim)
    top_k = checks.host_int("sparse_mla_top_k", call.sparse_mla_top_k)
    if top_k % TOP_K_STEP:
        raise ValueError(f"sparse_mla_top_k must be a multiple of {TOP_K_STEP}, got {top_k}")
    allowed = SPARSE_DIMS if top_k else DIMS
    if (rank, rope) not in allowed:
        raise ValueError(f"kv_lora_rank and qk_rope_head_dim must be one of {allowed}, got {(rank, rope)}")
    return rank, rope, top_k


def _tables(call: MlaCall, batch: int, top_k: int, page_size: int) -> tuple[PageTable | None, torch.Tensor | None, int]:
    """Return the page table or the top-k indices (the other is None), and the most keys of a request."""
    shared = call.uses_shared_paged_kv_idx
    if top_k > 0:
        if not shared:
            raise ValueError(f"uses_shared_paged_kv_idx must be True with sparse_mla_top_k={top_k}")
        return None, _token_table(call.block_tables, call.query, top_k), top_k
    source = "the first size of query" if call.cum_seq_lens_q is None else "elements of cum_seq_lens_q - 1"
    table = checks.page_table(call.block_tables, batch, call.query.device, shared=shared, batch_source=source)
    return table, None, checks.capacity(table, page_size)


def _log_sum_exp(call: MlaCall, query: torch.Tensor, part: DcpRank | None) -> LogSumExp | None:
    """Return the destination of the log-sum-exp of ``query`` [tokens, heads, head_dim], or None."""
    base = call.return_lse_base
    if base is None and (call.backend == NATURAL_BACKEND or part is not None):
        base = NATURAL_BASE
    return log_sum_exp(call.lse, call.return_lse, base, query, tuple(call.query.shape[:-1]))


def _scratch(call: MlaCall, cache: KVViews, log: LogSumExp | None, needed: int) -> torch.Tensor:
    """Return the workspace, and check that it, the results and the inputs do not overlap."""
    inputs = (
        ("query", call.query),
        ("kv_cache", cache.key),
        ("block_tables", call.block_tables),
        ("seq_lens", call.seq_lens),
        ("sinks", checks.sinks(call.sinks, call.query.shape[-2], call.query.device)),
        ("cum_seq_lens_q", call.cum_seq_lens_q),
        ("causal_seqlens_kv_global", call.causal_seqlens_kv_global),
        ("sparse_mla_top_k_lens", call.sparse_mla_top_k_lens),
    )
    results = (("out", call.out), ("lse", None if log is None else log.tensor))
    return workspace(call.workspace_buffer, needed, "hopwell.mla.mla_workspace_bytes", results, inputs)


def mla_problem(call: MlaCall) -> AttentionProblem:
    """Check every argument, refuse calls without a kernel, and return the problem. No device memory is read."""
    _check_query(call)
    on, heads, query = call.query.device, call.query.shape[-2], flat_tokens(call.query)
    tokens = query.shape[0]
    batch, q_len, starts = _requests(call)
    checks.flag("return_lse", call.return_lse)
    check_counter_buffer(call.multi_ctas_kv_counter_buffer)
    _refuse_unserved(call)
    part = _dcp_rank(call, batch)
    if heads < 1:
        raise ValueError(f"query must have at least one head, got shape {tuple(call.query.shape)}")

    rank, rope, top_k = _dims(call)
    cache = _checked_cache(call.query, call.query_dtype or call.query.dtype, call.kv_cache, rank, rope)
    page_size = cache.key.shape[2]
    table, lists, capacity = _tables(call, batch, top_k, page_size)
    kv_lens = _kv_lens(call.seq_lens, call.sparse_mla_top_k_lens, batch, tokens, top_k, on)
    if part is not None and top_k > 0:
        raise refused(support.MLA, f"enable_dcp=True with sparse_mla_top_k={top_k}", on)
    if call.sparse_mla_top_k_lens is not None:  # each token becomes a request, with its top-k indices as its keys
        batch, q_len, starts = tokens, 1, None
    checks.host_int("max_seq_len", call.max_seq_len)
    softmax_scale = checks.scale("bmm1_scale", call.bmm1_scale, on, minimum=0.0)
    output_scale = checks.scale("bmm2_scale", call.bmm2_scale, on)
    sinks = checks.sinks(call.sinks, heads, on)
    if part is not None and sinks is not None:
        raise ValueError("sinks must be None with enable_dcp: every rank would count them")
    enable_pdl = checks.optional_flag("enable_pdl", call.enable_pdl)
    if checks.choice("backend", call.backend, BACKENDS) == SPARSE_BACKEND and top_k == 0:
        raise ValueError(f"backend must not be {SPARSE_BACKEND!r} for dense attention (sparse_mla_top_k=0)")
    _check_out(call.out, call.query, rank)
    log = _log_sum_exp(call, query, part)
    most = most_new_tokens(q_len, tokens, heads)
    scratch = _scratch(call, cache, log, mla_workspace_bytes(heads, capacity, most, rank, on))

    arch = support.arch_of(on)
    out = call.out
    if out is None and query.dtype == checks.FP8:
        out = torch.empty((tokens, heads, rank), dtype=torch.bfloat16, device=on)
    problem = AttentionProblem(
        query=query,
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
        dcp_rank=part,
        sinks=sinks,
        lse=log,
        scratch=scratch,
        family=Family.MLA,
        programmatic_launch=True if enable_pdl is None else enable_pdl,
    )
    asked = named(call, sparse="sparse_mla_top_k", dcp="enable_dcp")
    require_problem(support.MLA, problem, arch, asked, call.query_dtype)
    return problem
