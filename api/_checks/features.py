"""Refusal of well-formed calls that no kernel serves, by the table in ``hopwell.kernels.capability.features``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hopwell.kernels.append.config import AppendProblem
from hopwell.kernels.capability import features
from hopwell.kernels.problem import AttentionProblem

# Descriptions of the arguments that need a row of the table, by the row's key. Rows of dtypes, sizes, caches and masks
# follow from tensors, which messages describe.
SINKS, SCALES = {"sinks": "sinks given"}, {"tensor_scales": "scale given as a tensor"}


def require_problem(
    entry: str,
    problem: AttentionProblem | AppendProblem,
    arch: str,
    arguments: Mapping[str, str] | None = None,
    query_dtype: torch.dtype | None = None,
) -> None:
    """Refuse a problem that ``entry`` cannot solve on ``arch``.

    Args:
        entry: name of the entry point.
        problem: the checked call.
        arch: architecture of the call.
        arguments: descriptions of arguments that need rows of the table, by the rows' keys.
        query_dtype: dtype of the caller's query, if the problem's query is a dequantized copy.
    """
    row = features.lacking(entry, problem, arch)
    if row is not None:
        words = {**SINKS, **SCALES, **_described(problem, query_dtype), **(arguments or {})}
        detail = words.get(row.key) or words.get(row.kind) or row.title
        raise features.refusal(entry, row.key, detail, arch)


def _described(problem: Any, query_dtype: torch.dtype | None) -> dict[str, str]:
    """Return the descriptions of a problem's tensors for messages, by kinds of rows."""
    if isinstance(problem, AppendProblem):
        key, cache = problem.key, problem.key_cache
        dtypes, dims = f"append_key.dtype={key.dtype}, cache dtype={cache.dtype}", f"head_dim={key.shape[2]}"
    else:
        query, cache = problem.query, problem.key
        out = query.dtype if problem.out is None else problem.out.dtype
        dtypes = f"query.dtype={query_dtype or query.dtype}, KV dtype={cache.dtype}, output dtype={out}"
        dims = f"head_dim={query.shape[-1]} for Q and K, {problem.v_dim} for V, {dtypes}"
    return {
        "data types": dtypes,
        "head dims": dims,
        "page sizes": f"page_size={cache.shape[2]}",
        "KV caches": f"KV of shape {tuple(cache.shape)}",
    }


def named(call: Any, **arguments: str) -> dict[str, str]:
    """Return ``argument=value`` texts of a record's arguments, by the keys of the rows that they need."""
    values = {key: (name, getattr(call, name)) for key, name in arguments.items()}
    return {key: f"{name}={_short(value)}" for key, (name, value) in values.items()}


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
