"""Runs a batch through the MLA kernel that serves it, against float64: on the GPU and in the emulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from helpers.batches.fp8 import Fp8MlaBatch
from helpers.batches.mla import MlaBatch, PackedBatch, draw_topk, with_topk
from helpers.cases.decode import check_problem
from helpers.device.schedules import PLAIN, Setting
from hopwell.kernels import execute, registry
from hopwell.kernels.config.base import KvType
from hopwell.kernels.config.mla import MlaConfig, shipped_mla_configs
from hopwell.kernels.problem import LogSumExp, LseLayout

ARCH = "sm_90a"
DIMS = ((576, 512), (320, 256))  # columns of keys, and of values
SPARSE_DIMS = (*DIMS, (512, 512))
OUTPUT_SCALE = -2.0  # a power of two, so the output of a single key stays exact
# Batches of queries and keys of these types.
KINDS: dict[tuple[str, KvType], type[MlaBatch]] = {
    ("bf16", KvType.WIDE): MlaBatch,
    ("bf16", KvType.E4M3): MlaBatch,
    ("bf16", KvType.FP8_DS_MLA): PackedBatch,
    ("fp16", KvType.WIDE): MlaBatch,
    ("fp16", KvType.E4M3): MlaBatch,
    ("e4m3", KvType.WIDE): Fp8MlaBatch,
}
TOPK_KINDS = ("distinct", "any", "one", "twice", "none")
# Heads: up to three new tokens of FEW_HEADS are 16 rows of swap-AB, and MANY_HEADS have more rows. Each number has a
# kernel for pages and one for top-k.
FEW_HEADS, MANY_HEADS = 5, 40
TOP_K = 68  # top-k that fills no tile
BOTH_ROWS = pytest.mark.parametrize("heads", [FEW_HEADS, MANY_HEADS], ids=["rows16", "rows64"])
# Places of negative top-k entries.
GAPS = {
    "none": slice(0, 0),
    "first": slice(0, 1),
    "last": slice(-1, None),
    "one": slice(70, 71),
    "some": slice(70, 75),
    "tile": slice(128, 192),
    "last tiles": slice(-150, None),
    "leaf": slice(512, 1024),
    "chunk": slice(0, 2048),
    "every other": slice(0, None, 2),
    "all": slice(None),
}


@dataclass(frozen=True)
class Case:
    """Requests and options. With a ``top_k``, attention is sparse, and ``topk_kind`` selects the kind of indices."""

    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int = 16
    dims: tuple[int, int] = DIMS[0]
    top_k: int = 0
    topk_kind: str = "any"
    ragged: bool = False
    sinks: bool = True
    tensor_scales: bool = False
    magnitude: float = 1.0
    kv_type: KvType = KvType.WIDE
    dtype: str = "bf16"


def chunk_tokens(dims: tuple[int, int], sparse: bool = False) -> int:
    """Return the keys of a work tile."""
    found = (c for c in shipped_mla_configs(ARCH) if (c.head_dim_qk, c.head_dim_v) == dims and c.sparse == sparse)
    return next(found).chunk_tokens


def heads_of(config: MlaConfig, q_len: int) -> int:
    """Return the heads that fill one tile of a kernel with ``q_len`` new tokens, or one fewer.

    CTAs of a cluster have a full tile each.
    """
    if config.shares_dequant:
        return config.cluster_ctas * config.rows
    return (config.rows - 1) // (1 if config.sparse else q_len)


def check_column_sizes(largest: float, device: str = "cuda", q_len: int = 1, heads: int = 2) -> None:
    """Check partials with columns of very different sizes, up to ``largest``.

    With uniform attention, each column is its mean.
    """
    chunk = chunk_tokens(DIMS[0])
    data = MlaBatch([q_len] * 2, [3 * chunk + 5, chunk + 1], heads=heads, device=device)
    data.q.zero_()
    sizes = largest * 2.0 ** -(torch.arange(576, device=device) % 25)
    for k in data.k:
        k.copy_(((k.float().abs() + 1) * sizes).to(k.dtype))
    out = execute(data.decode(64))
    for request, v in enumerate(data.v):
        mean = v[: len(v) - q_len + 1, 0].double().mean(dim=0)  # of the first new token
        assert ((out[request * q_len] / mean - 1).abs() < 2**-7).all()


def check_rising_logits(heads: int, keys: int, dims: tuple[int, int] = DIMS[0], device: str = "cuda") -> None:
    """Check logits whose maximum rises in every step of the second request, by little more than the lazy-rescale
    threshold.

    Values become smaller towards its end, so a missing rescale is visible.
    """
    data = MlaBatch([1, 3], [keys, keys], heads=heads, head_dim=dims[0], v_head_dim=dims[1], device=device)
    data.q.zero_()
    data.q[..., -1] = 1.0
    last = 8.5 / 64 * keys / 2 * math.log(2) / data.scale
    for request, k in enumerate(data.k):
        k[:, 0, -1] = torch.linspace(-last, last, keys, device=k.device) * (1 - 2 * request)
    for larger in (64, 128):
        data.k[1][larger:, 0, : dims[1]] *= 64
    data.expected_mla().check(execute(data.decode(64, ragged=True)))


def check_counts(data: MlaBatch, page_size: int = 64) -> None:
    """Check that the output counts the visible keys, which all have equal weights. ``data`` gets these values.

    One key too many or too few changes an element far more than rounding; random values would hide it. Absent keys may
    be zero rows, whose logits would be so large that they had all the weight.
    """
    data.q.fill_(-256.0)
    for k in data.k:
        token = torch.arange(k.shape[0], device=k.device)
        k.zero_()
        k[token, :, token % data.v_head_dim] = 1.0
    out, expected = execute(data.decode(page_size)), data.expected_mla().out
    assert not out.isnan().any()
    assert ((out.double() - expected).abs() <= 2**-7 * expected).all()


def check_gaps(
    place: str,
    top_k: int,
    heads: int,
    dims: tuple[int, int] = DIMS[0],
    device: str = "cuda",
    kind: type[MlaBatch] = MlaBatch,
) -> None:
    """Check two requests with negative entries at ``place``; one request has fewer keys than top-k entries."""
    kv_lens = [3 * top_k, top_k - 3]
    topk_indices = [draw_topk("distinct", 2, kv_len, top_k, seed) for seed, kv_len in enumerate(kv_lens)]
    for topk, negative in zip(topk_indices, (-1, -(2**31)), strict=True):
        topk[:, GAPS[place]] = negative
    data = kind([2, 2], kv_lens, heads, head_dim=dims[0], v_head_dim=dims[1], device=device, topk_indices=topk_indices)
    data.expected_mla().check(execute(data.decode(64)))
    check_counts(data)


def check_one_gap_anywhere(top_k: int, heads: int, device: str = "cuda") -> None:
    """Check one negative entry at every position: the number of new tokens is the top-k, and each has another gap."""
    topk = draw_topk("distinct", top_k, 3 * top_k, top_k).fill_diagonal_(-1)
    check_counts(MlaBatch([top_k], [3 * top_k], heads, device=device, topk_indices=[topk]))


def lengths(chunk: int, page: int) -> list[int]:
    """Return lengths around the sizes of the kernels' work tiles, and lengths that give many partials."""
    tiles = [63, 64, 65, 127, 128, 129]
    return [0, 1, page, page + 1, *tiles, chunk - 1, chunk, chunk + 1, 3 * chunk + 5, 17 * chunk, 40 * chunk + 9]


def batch_of(case: Case, device: str) -> MlaBatch:
    return with_topk(
        KINDS[case.dtype, case.kv_type],
        case.q_lens,
        case.kv_lens,
        case.top_k,
        case.topk_kind,
        heads=case.heads,
        head_dim=case.dims[0],
        v_head_dim=case.dims[1],
        device=device,
        magnitude=case.magnitude,
        kv_dtype=torch.float8_e4m3fn if KvType.E4M3.value in (case.kv_type.value, case.dtype) else None,
        dtype=torch.float16 if case.dtype == "fp16" else torch.bfloat16,
    )


def check_case(
    case: Case,
    page_size: int,
    device: str = "cuda",
    settings: Sequence[Setting] = PLAIN,
    config: MlaConfig | None = None,
) -> None:
    """Check output and log-sum-exp of every request; every launch gives the same bits and leaves its counters zero.

    With a ``config``, check that it serves the case.
    """
    data = batch_of(case, device)
    sinks = torch.linspace(-1.0, 2.0, data.heads, device=device) if case.sinks else None
    lse = torch.full((data.tokens, data.heads), torch.nan, device=device)
    scales: dict[str, Any] = {}
    if case.tensor_scales:
        values = dict(softmax_scale=data.scale, output_scale=OUTPUT_SCALE)
        scales = {name: torch.tensor([value], device=device) for name, value in values.items()}
    options = dict(sinks=sinks, lse=LogSumExp(lse, LseLayout.RAGGED, natural=False))
    problem = data.decode(page_size, ragged=case.ragged, **options, **scales)
    if isinstance(data, PackedBatch):
        problem = data.over_fp8_ds_mla(problem)
    assert config is None or registry.resolve(problem, config.arch) == config
    expected = data.expected_mla(sinks=sinks)
    check_problem(problem, data, expected, settings, factor=OUTPUT_SCALE if case.tensor_scales else 1.0)
