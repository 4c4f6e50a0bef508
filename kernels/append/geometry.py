"""Run-time sizes and strides of an append."""

from __future__ import annotations

import torch

from hopwell.kernels.append.config import AppendConfig, AppendGeometry, AppendProblem
from hopwell.kernels.config.base import page_and_head_stride


def append_geometry(problem: AppendProblem, config: AppendConfig) -> AppendGeometry:
    """Return the run-time sizes and strides of an append problem."""
    p, table = problem, problem.page_table
    has_rows = p.page_starts is None

    def strides(name: str, cache: torch.Tensor | None) -> dict[str, int]:
        if cache is None:
            return {f"{name}_page": 0, f"{name}_head": 0, f"{name}_row": 0}
        page, head = page_and_head_stride(cache)
        return {f"{name}_page": page, f"{name}_head": head, f"{name}_row": cache.stride(2)}

    return AppendGeometry(
        tokens=p.key.shape[0],
        kv_heads=p.key.shape[1],
        batch=p.batch,
        k_dim=p.key.shape[2],
        v_dim=p.value.shape[2],
        page_shift=p.key_cache.shape[2].bit_length() - 1,
        key_table_row=table.key.stride(0) if has_rows else 0,  # in page ids of either dtype
        value_table_row=table.value.stride(0) if has_rows else 0,
        table_width=table.key.shape[-1],
        k_pages=p.key_cache.shape[0],
        v_pages=p.value_cache.shape[0],
        key_token=p.key.stride(0),
        key_head=p.key.stride(1),
        value_token=p.value.stride(0),
        value_head=p.value.stride(1),
        **strides("k", p.key_cache),
        **strides("v", p.value_cache),
        **strides("k_scale", p.key_scales),
        **strides("v_scale", p.value_scales),
    )
