"""Refusal of well-formed calls that no kernel serves, by the table in ``hopwell.kernels.features``."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hopwell.kernels import support
from hopwell.kernels.features import require
from hopwell.kernels.problem import AttentionProblem


def require_all(entry: str, arch: str, needs: Iterable[tuple[bool, str, str]]) -> None:
    """Refuse what a call asks for and ``entry`` lacks on ``arch``.

    ``needs`` holds for each feature whether the call needs it, its key in the table, and the argument and value.
    """
    for needed, feature, detail in needs:
        if needed:
            require(entry, feature, detail, arch)


def require_problem(entry: str, problem: AttentionProblem, arch: str) -> None:
    """Refuse a problem that ``entry`` cannot solve on ``arch``; features beyond AttentionProblem are the caller's."""
    query, key, mask = problem.query, problem.key, problem.mask.kind.rule
    qk_dim, v_dim = query.shape[-1], problem.v_dim
    page_size = key.shape[2]
    paged = problem.page_table is not None
    known_page = page_size <= support.MAX_PAGE_SIZE
    out_dtype = query.dtype if problem.out is None else problem.out.dtype
    scales = [scale for scale in (problem.softmax_scale, problem.output_scale) if isinstance(scale, torch.Tensor)]
    has_bytes = any(operand.dtype.itemsize == 1 for operand in (query, key))
    known_byte_dim = "8bit_head_dim" if (qk_dim, v_dim) in support.BYTE_HEAD_DIMS else "other_8bit_head_dim"
    head_dims = f"head_dim={qk_dim} for Q and K, {v_dim} for V"
    dtypes = f"query.dtype={query.dtype}, KV dtype={key.dtype}, output dtype={out_dtype}"
    require_all(
        entry,
        arch,
        (
            (True, "16bit", dtypes),
            (True, support.prefill_head_dim((qk_dim, v_dim)), head_dims),
            (has_bytes, known_byte_dim, f"{head_dims}, {dtypes}"),
            (paged, "page_size" if known_page else "other_page_size", f"page_size={page_size}"),
            (True, "cache", f"KV of shape {tuple(key.shape)}"),
            (True, mask.feature, f"{mask.name} mask"),
            (problem.sinks is not None, "sinks", "sinks given"),
            (bool(scales) and entry != support.CUDNN, "tensor_scales", "scale given as a tensor"),
            (problem.lse is not None, "lse", "return_lse=True"),
        ),
    )
