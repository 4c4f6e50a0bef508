"""Runs a batch through the decode kernel of a given config, checked against float64: on the GPU and in the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.batches.decode import DecodeBatch
from helpers.batches.prefill import Expected, starts
from helpers.device.schedules import PLAIN, Setting
from hopwell.kernels import Plan, registry
from hopwell.kernels.config.base import MAX_BOX_ROWS, MIN_BOX_ROWS, QUERY_DTYPES, KvFetch, KvType
from hopwell.kernels.config.decode import NARROW_TYPES, DecodeConfig
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import SWAP_AB_ROWS
from hopwell.kernels.problem import AttentionProblem, LogSumExp, LseLayout, Mask, MaskKind

HEAD_DIMS = (64, 128, 256, 512)
TORCH_DTYPES = {name: dtype for dtype, name in QUERY_DTYPES.items()}
KV_DTYPES = {kind: dtype for dtype, kind in NARROW_TYPES.items()}


@dataclass(frozen=True)
class Case:
    """Requests and options. ``window`` counts the visible keys to the left, -1 for all."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    group: int = 4
    kv_heads: int = 1
    window: int = -1
    drafts: str = "tree"  # the new tokens that each new token sees, see draft_bits
    ragged: bool = False
    sinks: bool = True
    tensor_scales: bool = False
    magnitude: float = 1.0


def config_for(
    head_dim: int | tuple[int, int],
    mask: MaskKind,
    page_size: int,
    dtype: str = "bf16",
    kv_type: KvType = KvType.WIDE,
    *,
    rows: int = 1,
) -> DecodeConfig:
    """Return the kernel for contiguous pages of ``page_size`` tokens and this number of packed rows.

    ``head_dim`` is a pair (QK, V) if V has another one. A request's packed rows are the query heads of a KV head times
    its new tokens.
    """
    dims = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    common, kind = ("sm_90a", dtype, dtype, *dims, mask), (kv_type, DecodeConfig.rows_for(rows, dims[0], kv_type))
    box_rows = min(page_size, MAX_BOX_ROWS, DecodeConfig(*common, KvFetch.PAGE_ROWS, 0, *kind).tile.n)
    fetch = (KvFetch.PAGE_BOXES, box_rows) if box_rows >= MIN_BOX_ROWS else (KvFetch.PAGE_ROWS, 0)
    return DecodeConfig(*common, *fetch, *kind)


def cut_tokens(config: DecodeConfig | MlaConfig) -> int:
    """Return the keys of a leaf, or of a chunk in a kernel without a tree."""
    return config.leaf_tokens if config.has_tree else config.chunk_tokens


def fewest_rows(config: DecodeConfig) -> int:
    """Return the smallest number of packed rows that selects this kernel."""
    others = (config.rows_for(m, config.head_dim_qk, config.kv_type) for m in SWAP_AB_ROWS)
    return 1 + max((m for m in others if m < config.rows), default=0)


def takes_ragged_drafts(config: DecodeConfig) -> bool:
    """Whether ragged drafts resolve to this kernel, not to one with short leaves."""
    may_be_short = config.has_tree and config.rows in SWAP_AB_ROWS and config.kv_type is KvType.WIDE
    short = replace(config, short_leaves=may_be_short)
    return (short.leaf_tiles, short.accumulated_levels) == (config.leaf_tiles, config.accumulated_levels)


def draft_bits(kind: str, q_len: int, seed: int) -> torch.Tensor:
    """Return [q_len, q_len], true if a new token sees another."""
    own = torch.eye(q_len, dtype=torch.bool)
    if kind == "linear":
        return torch.ones(q_len, q_len, dtype=torch.bool).tril()
    if kind == "full":
        return torch.ones(q_len, q_len, dtype=torch.bool)
    if kind == "none":
        return ~torch.ones(q_len, q_len, dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    if kind == "any":
        return torch.randint(0, 2, (q_len, q_len), generator=generator) > 0
    # A tree: each token sees itself and all tokens that its parent sees.
    for token in range(1, q_len):
        own[token] |= own[int(torch.randint(token, (1,), generator=generator))]
    return own


def mask_of(config: DecodeConfig, case: Case) -> Mask:
    return Mask(config.mask, case.window if config.mask is not MaskKind.FULL else -1)


def batch_of(config: DecodeConfig, case: Case, device: str) -> DecodeBatch:
    return DecodeBatch(
        case.q_lens,
        case.kv_lens,
        heads=case.group * case.kv_heads,
        kv_heads=case.kv_heads,
        head_dim=config.head_dim_qk,
        v_head_dim=config.head_dim_v,
        dtype=TORCH_DTYPES[config.dtype],
        device=device,
        magnitude=case.magnitude,
        kv_dtype=KV_DTYPES.get(config.kv_type),
        drafts=[draft_bits(case.drafts, n, seed) for seed, n in enumerate(case.q_lens)],
    )


def check_config(
    config: DecodeConfig, case: Case, page_size: int, device: str = "cuda", settings: Sequence[Setting] = PLAIN
) -> None:
    """Check output and log-sum-exp of every request; every launch gives the same bits and leaves its counters zero."""
    data, mask = batch_of(config, case, device), mask_of(config, case)
    sinks = torch.linspace(-1.0, 2.0, data.heads, device=device) if case.sinks else None
    lse = torch.full((data.tokens, data.heads), torch.nan, device=device)
    scales: dict[str, Any] = {}
    if case.tensor_scales:
        values = dict(softmax_scale=data.scale, output_scale=-1.5, output_factor=0.5)
        scales = {name: torch.tensor([value], device=device) for name, value in values.items()}
    out_dtype = TORCH_DTYPES[config.out_dtype]
    options = dict(out=data.output().to(out_dtype), sinks=sinks, lse=LogSumExp(lse, LseLayout.RAGGED, natural=False))
    problem = data.decode(page_size, mask, ragged=case.ragged, **options, **scales)
    assert registry.resolve(problem, config.arch) == config
    expected = data.expected_decode(mask, sinks=sinks, out_dtype=out_dtype)
    check_problem(problem, data, expected, settings, factor=-0.75 if case.tensor_scales else 1.0)


def check_problem(
    problem: AttentionProblem, data: DecodeBatch, expected: Expected, settings: Sequence[Setting], factor: float = 1.0
) -> None:
    """Check a problem with LSE to base 2, launched in every setting."""
    assert problem.out is not None
    assert problem.lse is not None
    lse, first = problem.lse.tensor, None
    for setting in settings:
        lse.fill_(torch.nan)
        with setting():
            plan = Plan(problem)
            found = plan.execute(replace(problem, out=torch.full_like(problem.out, torch.nan))), lse.clone()
        first = first or found
        pairs = [(one.double(), other.double()) for one, other in zip(first, found, strict=True)]  # equal lacks fp8
        assert all(torch.equal(*pair) for pair in pairs), "launches differ"
        assert not any(slab.any() for slab in plan.tickets._slabs), "counters are left behind"
    assert first is not None
    expected.check_lse(first[1], natural=False)
    for begin, length in zip(starts(data.q_lens), data.q_lens, strict=False):
        rows = slice(begin, begin + length)
        expected.of_tokens(rows).check(first[0][rows], factor)
