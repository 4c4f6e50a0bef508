"""Random problems of prefill, decode and MLA from the supported range, each with its check against float64.

Lengths are around the edges of tiles and pages. Data that must not be read is NaN, as in all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from helpers.batches.decode import NVFP4
from helpers.batches.fp8 import WHOLE_ERROR, Fp8Batch, round_keys_and_values, to_e4m3
from helpers.batches.low_precision import LowPrecisionBatch, check_nvfp4_near
from helpers.batches.prefill import (
    CAUSAL,
    FULL,
    Batch,
    Expected,
    check_statistics,
    chunked,
    context_mask,
    local,
    window,
)
from helpers.calls.entries import (
    cache_forms,
    context,
    cudnn,
    fmha_v2,
    ragged_offsets,
    ragged_rows,
)
from helpers.cases.draw import BF16, E4M3, FP16, PAGE_SIZES, Draw
from helpers.cases.random_decode import decode, latent, narrow_decode
from hopwell.kernels import execute, support
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind, OutputScales, Score, ScoreKind
from hopwell.layouts import NVFP4_BLOCK, swizzled_128x4_shape
from hopwell.utils import FP4Tensor

EDGES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 95, 96, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 383, 520)
# e4m3 rows of whole 16 bytes, as TMA needs them
FP8_DIMS = [dims for dims in support.PREFILL_HEAD_DIMS if dims[0] % 16 == 0]


def prefill_batch(
    draw: Draw, kind: type[Batch], dims: tuple[int, int], kv_heads: Sequence[int] = (1, 2, 3), **options: Any
) -> Batch:
    q_lens = draw.lengths("q_lens", draw.one("queries", (EDGES, (0, 1, 2, 3, 5, 9, 40))))
    kv_lens = [draw.one(f"keys{i}", EDGES) for i in range(len(q_lens))]
    sizes = draw.heads(kv_heads) | dict(head_dim=dims[0], v_head_dim=dims[1])
    return kind(q_lens, kv_lens, **sizes, **draw.common(), **options)


def skip_softmax(draw: Draw, data: Batch) -> float:
    """Return a threshold of skip-softmax, 0 in most draws. The keys left out together weigh 1e-5 of a row at most.

    From the right, 30 of each 300 keys become larger and the others smaller, so that whole tiles are negligible.
    """
    if not draw.for_kernel("skip", (False, False, True)):
        return 0.0
    factor = draw.one("heavy", (4, 16))
    for k in data.k:
        heavy = torch.arange(len(k), device=k.device).flip(0) % 300 < 30
        k *= torch.where(heavy, factor, 0.25)[:, None, None]
    if isinstance(data, Fp8Batch):
        round_keys_and_values(data)
    return draw.one("threshold", (1e-30, 1e-5, 1e-5))


def score_of(draw: Draw) -> Score:
    kind = draw.for_kernel("score", ("plain", "plain", "capped", "alibi"))
    if kind == "capped":
        return Score.capped(draw.for_kernel("cap", (0.5, 20.0, 3e5)))
    return Score(ScoreKind.ALIBI) if kind == "alibi" else Score()


def output_of(draw: Draw, dims: tuple[int, int], *wide: Any) -> Any:
    """Return the type of an output: one of ``wide``, e4m3 or "nvfp4"."""
    return draw.for_kernel("out", (*wide, E4M3) + (("nvfp4",) if dims[1] % NVFP4_BLOCK == 0 else ()))


def check_output(data: Batch, out: Any, mask: Mask, factor: float, **options: Any) -> Expected:
    """Check an output of a 16-bit call in any type, and return what was expected.

    No output is more precise than weights of the inputs' type. Their rounding shows even in a row with one heavy key,
    because its weight is relative to an earlier maximum, and is not exactly 1.
    """
    if isinstance(out, FP4Tensor):
        expected = data.expected(mask, **options)
        check_nvfp4_near(out, expected.out, factor, error=2.0**-7)
        return expected
    dtype = max(data.dtype, out.dtype, key=lambda one: torch.finfo(one).eps)
    expected = data.expected(mask, out_dtype=dtype, **options)
    expected.check(out.to(dtype))
    return expected


def mask_of(draw: Draw, chunks: bool = False) -> Mask:
    left = draw.for_kernel("window", (0, 1, 20, 64, 127, 130, 400))
    right = draw.for_kernel("right", (1, 2, 31, 64, 129, 300))
    both = local(draw.for_kernel("left", (-1, left)), right)
    masks = dict(causal=CAUSAL, full=FULL, window=window(left), local=both)
    if chunks:
        masks["chunked"] = chunked(draw.one("chunk", (1, 16, 32, 64, 128, 256)))
    return masks[draw.for_kernel("mask", ["causal", *masks])]


def mask_options(mask: Mask) -> dict[str, Any]:
    """Return fmha_v2's arguments for a mask."""
    modes = dict.fromkeys((MaskKind.FULL, MaskKind.LOCAL), "padding")
    modes |= {MaskKind.CAUSAL: "causal", MaskKind.CHUNKED: "chunked"}
    options: dict[str, Any] = dict(mask_mode=modes.get(mask.kind, "sliding_window"))
    if mask.kind in (MaskKind.SLIDING_WINDOW, MaskKind.LOCAL):
        options["window_left"] = mask.window_left
    if mask.kind is MaskKind.LOCAL:
        options["window_right"] = mask.window_right
    if mask.kind is MaskKind.CHUNKED:
        options["chunked_attention_size"] = mask.chunk
    return options


def context_call(draw: Draw) -> None:
    """Draw a call of the context entry in 16 bits over pages, with outputs of all types."""
    dims = draw.head_dims(support.PREFILL_HEAD_DIMS)
    data = prefill_batch(draw, Batch, dims, dtype=draw.for_kernel("dtype", (BF16, FP16)))
    out_type, factor = output_of(draw, dims, None, None), draw.one("o_sf_scale", (1.0, 16.0))
    skip = skip_softmax(draw, data)
    key, value, table = data.pages(draw.for_kernel("page_size", PAGE_SIZES), order=draw.number)
    forms = cache_forms(key, value)
    cache, layout = forms[draw.one("form", range(4)) % len(forms)]
    mask, sinks = mask_of(draw), draw.sinks(data.heads)
    options = context_mask(mask) | dict(kv_layout=layout, sinks=sinks, return_lse=True, out_dtype=out_type)
    options |= dict(skip_softmax_threshold_scale_factor=skip) if skip else {}
    out, lse = context(data, cache, table, **options | (dict(o_sf_scale=factor) if out_type == "nvfp4" else {}))
    expected = check_output(data, out, mask, factor, sinks=sinks)
    expected.check_lse(lse, natural=False)


def fmha_v2_call(draw: Draw) -> None:
    """Draw a 16-bit call with masks and scores of FMHAv2, ragged or paged."""
    page_size = draw.for_kernel("page_size", (0, 0, 0, *PAGE_SIZES))
    dims = draw.head_dims(dims for dims in support.PREFILL_HEAD_DIMS if not page_size or dims[0] == dims[1])
    data = prefill_batch(draw, Batch, dims, dtype=draw.for_kernel("dtype", (BF16, FP16)))
    mask, score, sinks = mask_of(draw, chunks=True), score_of(draw), draw.sinks(data.heads)
    options = mask_options(mask) | dict(sinks=sinks, save_softmax_stats=draw.maybe("statistics"))
    options["out_dtype"] = draw.for_kernel("out", (None, None, E4M3))
    if score.kind.caps:
        options["logits_soft_cap_scale"] = score.soft_cap
    if score.kind.has_slopes:
        options["pos_encoding_mode"] = "alibi"
    if skip := skip_softmax(draw, data):
        options["skip_softmax_threshold_scale_factor"] = skip
    if page_size:
        key, value, table = data.pages(page_size, order=draw.number)
        found = fmha_v2(data, (data.q, torch.stack((key, value), 1)), "Q_PAGED_KV_HND", block_tables=table, **options)
    else:
        key, value, _ = data.ragged()
        found = fmha_v2(data, (data.q, key, value), "SEPARATE_Q_K_V", **options)
    out, statistics = found if options["save_softmax_stats"] else (found, None)
    check_output(data, out, mask, 1.0, score=score, sinks=sinks)
    if statistics is not None:
        check_statistics(statistics, data.expected_statistics(mask, score=score))


def with_scales(data: Batch, k_scales: torch.Tensor, v_scales: torch.Tensor) -> Any:
    """Return a batch with scales [heads, 1], powers of two, multiplied into queries and values."""
    scaled = replace(data)
    scaled.q, scaled.k = data.q * k_scales.to(data.q), data.k
    of_kv_heads = v_scales[:: data.heads // data.kv_heads].to(data.q)
    scaled.v = [v * of_kv_heads for v in data.v]
    return scaled


def scales_of_heads(draw: Draw, data: Batch, asked: tuple[bool, bool]) -> tuple[Any, list[torch.Tensor]]:
    """Return a batch with scales of KV heads multiplied in, and the scales of K and V [kv_heads]."""
    ones = torch.ones(data.heads, 1, device=draw.device)
    names = ("k_scales", "v_scales")
    both = [
        draw.powers(name, data.heads, data.kv_heads) if is_asked else ones
        for name, is_asked in zip(names, asked, strict=True)
    ]
    per_kv_head = [scales[:: data.heads // data.kv_heads, 0].contiguous() for scales in both]
    return with_scales(data, *both), per_kv_head


def has_scales_of_heads(draw: Draw) -> tuple[bool, bool]:
    """Return whether K, and whether V, has a scale for each KV head: neither in half of all draws."""
    return draw.for_kernel("scales of heads", ((False, False),) * 3 + ((True, False), (False, True), (True, True)))


def cudnn_call(draw: Draw) -> None:
    """Draw a call in 16 bits or e4m3, paged or over ragged keys with unowned tokens between requests."""
    dtype = draw.for_kernel("dtype", (BF16, FP16, E4M3))
    is_fp8 = dtype is E4M3
    dims = draw.head_dims(FP8_DIMS if is_fp8 else support.PREFILL_HEAD_DIMS)
    of_heads = has_scales_of_heads(draw) if is_fp8 else (False, False)
    kind, types = (Fp8Batch, {}) if is_fp8 else (Batch, dict(dtype=dtype))
    data = prefill_batch(draw, kind, dims, (2, 3) if any(of_heads) else (1, 2, 3), **types)
    causal, page_size = draw.for_kernel("causal", (True, False)), draw.for_kernel("page_size", (0, 0, 0, *PAGE_SIZES))
    options: dict[str, Any] = dict(causal=causal, o_data_type=draw.for_kernel("out", (BF16, FP16, E4M3)))
    if page_size:
        key, value, options["block_tables"] = data.pages(page_size, order=draw.number)
    else:
        key, value, begins = data.ragged(gap=draw.one("gap", (0, 3)))
        options |= ragged_offsets(data, begins)
    mask, scaled = CAUSAL if causal else FULL, data
    if is_fp8:
        options["q"], key, value = map(to_e4m3, (data.q, key, value))
        scaled, both = scales_of_heads(draw, data, of_heads)
        names = zip(("k_scale", "v_scale"), both, of_heads, strict=True)
        options |= {name: scale for name, scale, is_asked in names if is_asked}
    out, lse = cudnn(data, key, value, **options)
    if is_fp8:
        scaled.check_fp8(out, mask, whole_error=1.5 * WHOLE_ERROR)
        scaled.check_fp8_lse(ragged_rows(data, lse), mask)
    else:
        check_output(data, out, mask, 1.0).check_lse(ragged_rows(data, lse))


def fp8_prefill(draw: Draw) -> None:
    """Draw queries, keys and values in e4m3, as problems: no entry supports all of their masks and outputs."""
    dims = draw.head_dims(support.PREFILL_HEAD_DIMS)
    of_heads = has_scales_of_heads(draw)
    data = prefill_batch(draw, Fp8Batch, dims, (2, 3) if any(of_heads) else (1, 2, 3))
    mask, score, sinks = mask_of(draw, chunks=True), score_of(draw), draw.sinks(data.heads)
    out_type, skip = output_of(draw, dims, BF16, FP16), skip_softmax(draw, data)
    page_size = draw.for_kernel("page_size", (None, None, None, *PAGE_SIZES))
    scaled, (k_scales, v_scales) = scales_of_heads(draw, data, of_heads)
    options: dict[str, Any] = dict(sinks=sinks, score=score, skip_softmax=skip, lse=data.ragged_lse())
    options |= dict(softmax_scale=k_scales * data.scale) if of_heads[0] else {}
    options |= dict(output_scale=v_scales) if of_heads[1] else {}
    problem = data.in_fp8(page_size, mask, BF16 if out_type == "nvfp4" else out_type, **options)
    if out_type == "nvfp4":
        check_fp8_in_nvfp4(problem, scaled, mask, draw.one("o_sf_scale", (1.0, 16.0)))
    else:
        # A few rows with flat weights have a larger error than whole tiles.
        scaled.check_fp8(execute(problem), mask, sinks=sinks, score=score, whole_error=1.5 * WHOLE_ERROR)
    scaled.check_fp8_lse(problem.lse.tensor, mask, sinks=sinks, score=score)


def check_fp8_in_nvfp4(problem: AttentionProblem, data: Fp8Batch, mask: Mask, factor: float) -> None:
    """Check a problem in e4m3 with an NVFP4 output."""
    tokens, heads, dim = problem.out.shape
    shape = swizzled_128x4_shape(tokens, heads * dim // NVFP4_BLOCK)
    out = FP4Tensor(
        torch.full((tokens, heads, dim // 2), 0xFF, dtype=torch.uint8, device=problem.out.device),
        torch.full(shape, math.nan, device=problem.out.device).to(E4M3),
    )
    execute(replace(problem, out=out.data, out_scales=OutputScales(out.scale, 0, factor)))
    expected = data.expected(mask, sinks=problem.sinks, score=problem.score)
    check_nvfp4_near(out, expected.out, factor, error=1.5 * WHOLE_ERROR)


def narrow_cache_prefill(draw: Draw) -> None:
    """Draw a call of the context entry with 16-bit queries over 8-bit and 4-bit caches, with outputs of all types."""
    cache = draw.for_kernel("cache", (E4M3, NVFP4))
    dims = draw.head_dims(support.NVFP4_HEAD_DIMS if cache is NVFP4 else FP8_DIMS)
    types = dict(q_dtype=draw.for_kernel("dtype", (BF16, FP16)), kv_dtype=cache)
    of_heads = has_scales_of_heads(draw)
    kv_heads = (2, 3) if any(of_heads) else (1, 2, 3)
    data = prefill_batch(draw, LowPrecisionBatch, dims, kv_heads, **types, k_scale=0.5, v_scale=2.0)
    out_type, factor = output_of(draw, dims, data.q_dtype, data.q_dtype), draw.one("o_sf_scale", (1.0, 16.0))
    if skip := skip_softmax(draw, data):
        data.store(data.k, data.v)
    order = draw.for_kernel("v_scale_layout", ("interleaved", "interleaved", "linear"))
    # Interleaved scales of V are in groups of four tokens.
    sizes = [n for n in PAGE_SIZES if cache is E4M3 or order == "linear" or n % 4 == 0]
    page_size = draw.for_kernel("page_size", sizes)
    mask, sinks = mask_of(draw), draw.sinks(data.heads)
    key, value, table = data.pages(page_size, order=draw.number)
    options = data.options(mask) | dict(sinks=sinks, out_dtype=out_type, return_lse=True, lse_base="ln")
    scaled, both = scales_of_heads(draw, data, of_heads)
    for name, scales, is_asked in zip(("bmm1_scale", "bmm2_scale"), both, of_heads, strict=True):
        options[name] = scales * options[name] if is_asked else options[name]
    if skip:
        options["skip_softmax_threshold_scale_factor"] = skip
    if cache is NVFP4:
        options["kv_block_scales"] = data.block_scales(page_size, order, order=draw.number)
        options["v_scale_layout"] = order
    if out_type == "nvfp4":
        options["o_sf_scale"] = factor
    out, lse = context(data, (key, value), table, **options)
    expected = scaled.expected_low(mask, sinks=sinks)
    if isinstance(out, FP4Tensor):
        check_nvfp4_near(out, expected.out, factor, error=2.0**-7)
    else:
        expected.check(out)
    expected.check_lse(lse)


KINDS: tuple[Callable[[Draw], None], ...] = (
    context_call,
    fmha_v2_call,
    cudnn_call,
    fp8_prefill,
    narrow_cache_prefill,
    decode,
    decode,
    narrow_decode,
    latent,
)


def problem(number: int, device: str, per_kernel: int = 1) -> tuple[Draw, Callable[[Draw], None]]:
    """Return the draw of a problem, and the function that makes and checks it. Kinds take turns, and ``per_kernel``
    problems of a kind in a row have one kernel."""
    turn, kind = divmod(number, len(KINDS))
    return Draw(number, device, turn // per_kernel * len(KINDS) + kind), KINDS[kind]
