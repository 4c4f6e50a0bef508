"""Arguments of ``trtllm_batch_decode_with_kv_cache_mla``: checked."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hopwell import _checks as checks
from hopwell import _features as features
from hopwell.kernels import support
from hopwell.layouts import mla_kv_views

BACKENDS = ("auto", "xqa", "trtllm-gen", "cute-dsl")
DIMS = ((512, 64), (256, 64))  # (kv_lora_rank, qk_rope_head_dim)
TOP_K_STEP = 4


def _check_cache(query: torch.Tensor, kv_cache: Any, kv_lora_rank: int, qk_rope_head_dim: int) -> torch.Tensor:
    checks.tensor("kv_cache", kv_cache)
    if kv_cache.dtype != query.dtype:
        raise ValueError(f"kv_cache must have the dtype of query, {query.dtype}, got {kv_cache.dtype}")
    checks.device("kv_cache", kv_cache, query.device)
    key = mla_kv_views(kv_cache, kv_lora_rank).key
    width = kv_lora_rank + qk_rope_head_dim
    for name, row in (("query", query.shape[3]), ("kv_cache", key.shape[3])):
        if row != width:
            raise ValueError(f"{name} must have kv_lora_rank + qk_rope_head_dim = {width} as its last size, got {row}")
    checks.tma_readable("kv_cache", kv_cache)
    checks.power_of_two("the page size of kv_cache", key.shape[2])
    return key


def _check_table(block_tables: Any, batch: int, q_len: int, top_k: int, on: torch.device) -> None:
    """Dense: page ids [batch, pages]. Sparse: token indices [batch, q_len, top_k]."""
    if top_k == 0:
        checks.page_table(block_tables, batch, on)
        return
    checks.index_tensor("block_tables", block_tables, on)
    checks.shape("block_tables", block_tables, ("batch", batch), ("q_len", q_len), ("sparse_mla_top_k", top_k))
    checks.unit_stride("block_tables", block_tables)


def check_mla_call(
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
) -> NoReturn:
    """Check every argument, then refuse: no kernel serves this entry. No device memory is read."""
    checks.main_tensor("query", query)
    checks.dtype("query", query, (torch.bfloat16, checks.FP8))
    checks.shape("query", query, ("batch", None), ("q_len", None), ("num_heads", None), ("head_dim", None))
    checks.tma_readable("query", query)
    on = query.device
    batch, q_len, heads, _ = query.shape
    if heads < 1:
        raise ValueError(f"query must have at least one head, got shape {tuple(query.shape)}")

    checks.host_int("qk_nope_head_dim", qk_nope_head_dim, minimum=1)
    rank = checks.host_int("kv_lora_rank", kv_lora_rank, minimum=1)
    rope = checks.host_int("qk_rope_head_dim", qk_rope_head_dim)
    if (rank, rope) not in DIMS:
        raise ValueError(f"kv_lora_rank and qk_rope_head_dim must be one of {DIMS}, got {(rank, rope)}")
    key = _check_cache(query, kv_cache, rank, rope)
    checks.tensor("workspace_buffer", workspace_buffer)

    top_k = checks.host_int("sparse_mla_top_k", sparse_mla_top_k)
    if top_k % TOP_K_STEP:
        raise ValueError(f"sparse_mla_top_k must be a multiple of {TOP_K_STEP}, got {top_k}")
    _check_table(block_tables, batch, q_len, top_k, on)
    checks.lengths("seq_lens", seq_lens, batch, on)
    checks.host_int("max_seq_len", max_seq_len)
    checks.scale("bmm1_scale", bmm1_scale, on, minimum=0.0)
    checks.scale("bmm2_scale", bmm2_scale, on)
    checks.sinks(sinks, heads, on)
    checks.optional_flag("enable_pdl", enable_pdl)
    checks.choice("backend", backend, BACKENDS)
    if out is not None:
        checks.tensor("out", out)
        checks.shape("out", out, ("batch", batch), ("q_len", q_len), ("num_heads", heads), ("kv_lora_rank", rank))
        checks.dtype("out", out, (torch.bfloat16,))
        checks.device("out", out, on)
        checks.tma_readable("out", out)
        checks.disjoint("out", out, (("query", query), ("kv_cache", key)))

    arch = support.arch_of(on)
    dtypes = f"query.dtype={query.dtype}, kv_cache.dtype={kv_cache.dtype}"
    needs = (
        (query.dtype == checks.FP8, "fp8", dtypes),
        (top_k > 0, "sparse", f"sparse_mla_top_k={top_k}"),
        (q_len > 1, "multi_token", f"query with q_len={q_len}"),
        (sinks is not None, "sinks", "sinks given"),
    )
    features.require_all(support.MLA, arch, needs)
    raise support.refusal(support.MLA, "16bit", dtypes, arch)
