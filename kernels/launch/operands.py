"""Tensors whose addresses the kernels of a family get, by name and in the order of these addresses."""

from __future__ import annotations

import torch

from hopwell.kernels.launch.geometry import topk_page_table
from hopwell.kernels.problem import AttentionProblem, TokenOffsets


def prefill_operands(problem: AttentionProblem, out: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return the operands of prefill, see ``launch.Addresses``."""
    return _operands(problem, out, k_offsets=_start(problem.k_offsets))


def decode_operands(problem: AttentionProblem, out: torch.Tensor | None) -> dict[str, torch.Tensor | None]:
    """Return the operands of decode and of MLA decode, see ``launch.DecodeAddresses``."""
    return _operands(problem, out, dcp_kv_lens=None if problem.dcp_rank is None else problem.dcp_rank.kv_lens)


def _operands(
    problem: AttentionProblem, out: torch.Tensor | None, **keys: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    """Return the operands; ``keys`` is the one that tells where the keys of a request are, or how many it has."""
    table, lse = problem.page_table or topk_page_table(problem), problem.lse
    named = dict(
        query=problem.query,
        key=problem.key,
        value=problem.value,
        out=out,
        q_offsets=_start(problem.q_offsets),
        o_offsets=_start(problem.o_offsets),
        **keys,
        v_offsets=_start(problem.v_offsets),
        q_lens=problem.q_lens,
        kv_lens=problem.kv_lens,
        key_table=None if table is None else table.key,
        value_table=None if table is None else table.value,
        softmax_scale=_on_device(problem.softmax_scale),
        output_scale=_on_device(problem.output_scale),
        sinks=problem.sinks,
        lse=None if lse is None else lse.tensor,
        lse_offsets=None if lse is None else _start(lse.offsets),
        statistics=problem.statistics,
        skipped=problem.skipped_tiles,
        output_factor=_on_device(problem.output_factor),
        draft_mask=problem.draft_mask,
        scratch=problem.scratch,
    )
    kv, out_scales = problem.kv_scales, problem.out_scales
    if kv is None and out_scales is None:
        return named
    return named | dict(
        key_scales=None if kv is None else kv.key,
        value_scales=None if kv is None else kv.value,
        out_scales=None if out_scales is None else out_scales.tensor,
    )


def _start(offsets: TokenOffsets | None) -> torch.Tensor | None:
    return None if offsets is None else offsets.tensor


def _on_device(scale: float | torch.Tensor) -> torch.Tensor | None:
    return scale if isinstance(scale, torch.Tensor) else None
