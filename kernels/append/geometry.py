"""Operands, and run-time sizes and strides, of an append."""

from __future__ import annotations

import torch

from hopwell.kernels.append.config import AppendAddresses, AppendConfig, AppendGeometry, AppendProblem
from hopwell.kernels.config.base import page_and_head_stride
from hopwell.kernels.launch.arguments import named_tuple

# Tensors whose addresses are AppendAddresses, with the same names.
AppendOperands = named_tuple("AppendOperands", *AppendAddresses._fields)


def append_geometry(problem: AppendProblem, config: AppendConfig) -> AppendGeometry:
    """Return the run-time sizes and strides of an append problem."""
    p, table, page_size = problem, problem.page_table, problem.key_cache.shape[2]
    rows = table if p.page_starts is None else None  # a table with a row for each request

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
        page_size=page_size,
        page_shift=page_size.bit_length() - 1 if page_size & (page_size - 1) == 0 else -1,
        key_table_row=0 if rows is None else rows.key.stride(0),  # in page ids of either dtype
        value_table_row=0 if rows is None else rows.value.stride(0),
        table_width=0 if table is None else table.key.shape[-1],
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


def append_operands(problem: AppendProblem) -> dict[str, torch.Tensor | None]:
    """Return the tensors whose addresses are :class:`AppendAddresses`, by name and in its order."""
    p, table = problem, problem.page_table
    operands = AppendOperands(
        key=p.key,
        value=p.value,
        key_cache=p.key_cache,
        value_cache=p.value_cache,
        key_scales=p.key_scales,
        value_scales=p.value_scales,
        batch_indices=p.batch_indices,
        positions=p.positions,
        key_table=None if table is None else table.key,
        value_table=None if table is None else table.value,
        page_starts=p.page_starts,
        k_scale=p.k_scale if isinstance(p.k_scale, torch.Tensor) else None,
        v_scale=p.v_scale if isinstance(p.v_scale, torch.Tensor) else None,
    )
    return operands._asdict()
