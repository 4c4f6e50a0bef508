"""Arguments of ``xqa_batch_decode_with_kv_cache``: checked."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hopwell import _cache
from hopwell import _checks as checks
from hopwell import _features as features
from hopwell.kernels import support

MAX_HEAD_DIM = 512
HEAD_DIM_STEP = 16
MASK_BITS = 32  # a row of the speculative mask is a whole number of 32-bit words, seen as uint16


def _check_mask(mask: Any, batch: int, q_len: int, on: torch.device) -> None:
    """Drafts need a mask; a single token per request has no use for one, and upstream callers may pass any."""
    if mask is not None:
        checks.tensor("mask", mask)
    if q_len == 1:
        return
    if mask is None:
        raise ValueError(f"mask must be given for q_len_per_req > 1, got None with q_len_per_req={q_len}")
    words = 2 * -(-q_len // MASK_BITS)
    checks.dtype("mask", mask, (torch.uint16,))
    checks.shape("mask", mask, ("batch", batch), ("q_len_per_req", q_len), ("2 * ceil(q_len_per_req / 32)", words))
    checks.device("mask", mask, on)
    if not mask.is_contiguous():
        raise ValueError(f"mask must be contiguous, got strides {mask.stride()}")


def _check_out(out: Any, query: torch.Tensor, cache: _cache.PagedCache, batch: int, q_len: int) -> None:
    if out is None:
        return
    checks.tensor("out", out)
    tokens, heads, _ = query.shape
    allowed = (query.dtype, checks.FP8) if cache.key.dtype == checks.FP8 else (query.dtype,)
    checks.dtype("out", out, allowed)
    flat = out
    if out.dim() == 4:
        checks.shape("out", out, ("batch", batch), ("q_len", q_len), ("num_heads", heads), ("head_dim", cache.v_dim))
        if batch > 1 and out.stride(0) != q_len * out.stride(1):
            raise ValueError(f"out must be dense in its first two dimensions, got strides {out.stride()}")
        flat = out[:, 0] if q_len == 1 else out.flatten(0, 1)
    checks.output("out", flat, (tokens, heads, cache.v_dim), out.dtype, query.device)


def check_xqa_call(
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
    sinks: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    kv_cache_sf: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
) -> NoReturn:
    """Check every argument, then refuse: no kernel serves this entry. No device memory is read."""
    checks.main_tensor("query", query)
    checks.dtype("query", query, checks.SIXTEEN_BIT)
    checks.shape("query", query, ("batch * q_len_per_req", None), ("num_heads", None), ("head_dim", None))
    checks.tma_readable("query", query)
    on = query.device
    tokens, heads, head_dim = query.shape
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"query must have a head_dim that is a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, got {head_dim}"
        )
    kv_dtypes = (query.dtype, checks.FP8, torch.int8, torch.uint8)
    cache = _cache.paged_cache(kv_cache, kv_layout, query, kv_dtypes)
    _cache.block_scales("kv_cache_sf", kv_cache_sf, cache, kv_layout, (checks.FP8, torch.uint8), dense_pages=False)
    checks.tensor("workspace_buffer", workspace_buffer)

    q_len = 1 if q_len_per_req is None else checks.host_int("q_len_per_req", q_len_per_req, minimum=1)
    if tokens % q_len:
        raise ValueError(f"q_len_per_req must divide the {tokens} rows of query, got {q_len}")
    batch = tokens // q_len
    checks.page_table(block_tables, batch, on)
    checks.lengths("seq_lens", seq_lens, batch, on)
    checks.host_int("max_seq_len", max_seq_len)
    checks.scale("bmm1_scale", bmm1_scale, on, minimum=0.0)
    checks.scale("bmm2_scale", bmm2_scale, on)
    if o_scale is not None:
        checks.scale("o_scale", o_scale, on)
    window_left = checks.host_int("window_left", window_left, minimum=-1)
    checks.sinks(sinks, heads, on)
    checks.optional_flag("enable_pdl", enable_pdl)
    _check_mask(mask, batch, q_len, on)
    _check_out(out, query, cache, batch, q_len)
    if out is not None:
        checks.disjoint("out", out, (("query", query), ("kv_cache", cache.key), ("kv_cache", cache.value)))

    arch = support.arch_of(on)
    kv = f"kv_cache.dtype={cache.key.dtype}"
    needs = (
        (cache.is_nvfp4, "nvfp4_kv", kv),
        (cache.key.dtype == torch.int8, "int8_kv", kv),
        (cache.key.dtype == checks.FP8, "fp8_kv", kv),
        (out is not None and out.dtype == checks.FP8, "fp8_out", f"out.dtype={checks.FP8}"),
        (q_len > 1, "speculative", f"q_len_per_req={q_len}"),
        (window_left >= 0, "window", f"window_left={window_left}"),
        (sinks is not None, "sinks", "sinks given"),
    )
    features.require_all(support.XQA, arch, needs)
    raise support.refusal(support.XQA, "16bit", f"query.dtype={query.dtype}, {kv}", arch)
