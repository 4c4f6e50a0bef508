"""Random problems of prefill, decode and MLA from the supported range, each with its check against float64.

Lengths are around the edges of tiles and pages. Data that must not be read is NaN, as in all batches.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

import hopwell
from helpers.batches.decode import NVFP4, DecodeBatch
from helpers.batches.fp8 import WHOLE_ERROR, Fp8Batch, Fp8MlaBatch, round_keys_and_values, to_e4m3
from helpers.batches.low_precision import LowPrecisionBatch, check_nvfp4_near
from helpers.batches.mla import MlaBatch, PackedBatch, with_topk
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
    mla,
    mla_arguments,
    ragged_offsets,
    ragged_rows,
    xqa,
)
from helpers.cases.decode import draft_bits
from hopwell._calls import switches
from hopwell.kernels import execute, support
from hopwell.kernels.config import splitting
from hopwell.kernels.jit import settings
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind, OutputScales, Score, ScoreKind
from hopwell.kernels.sm100.prefill.config import PAIR_DIMS
from hopwell.layouts import NVFP4_BLOCK, swizzled_128x4_shape
from hopwell.utils import FP4Tensor

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
EDGES = (0, 1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 95, 96, 127, 128, 129, 191, 192, 193, 255, 256, 257, 300, 383, 520)
PAGE_SIZES = (1, 2, 3, 4, 8, 16, 16, 24, 32, 64, 64, 96, 128, 256)
# e4m3 rows of whole 16 bytes, as TMA needs them
FP8_DIMS = [dims for dims in support.PREFILL_HEAD_DIMS if dims[0] % 16 == 0]
MLA_HEADS = (1, 5, 16, 17, 64, 65, 66, 80, 96, 127, 128, 128)
DECODE_KEYS = (0, 1, 3, 16, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1023, 1025, 2049, 4100)


@dataclass
class Draw:
    """A source of random choices that records them, so that a failure shows its draw.

    Draws with equal ``kernel`` and entry run one kernel: only their other choices differ.
    """

    number: int
    device: str
    kernel: int
    noted: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random, self._of_kernel = random.Random(self.number), random.Random(f"kernel {self.kernel}")

    def one(self, name: str, choices: Any) -> Any:
        self.noted[name] = chosen = self._random.choice(list(choices))
        return chosen

    def for_kernel(self, name: str, choices: Any) -> Any:
        """Return a choice that decides which kernel runs."""
        self.noted[name] = chosen = self._of_kernel.choice(list(choices))
        return chosen

    def head_dims(self, choices: Any) -> tuple[int, int]:
        """Return head dims, in two of five cases common ones or head dims of CTA pairs. An architecture may have more
        kinds of kernels there."""
        choices = list(choices)
        common = [dims for dims in choices if dims in support.COMMON_HEAD_DIMS]
        pairs = [dims for dims in choices if dims in PAIR_DIMS]
        return self.for_kernel(
            "dims", self.for_kernel("kind of dims", (common, pairs, choices, choices, choices)) or choices
        )

    def maybe(self, name: str, odds: float = 0.5) -> bool:
        self.noted[name] = happens = self._random.random() < odds
        return happens

    def lengths(self, name: str, choices: Any) -> list[int]:
        """Return lengths of one or more requests, not all of them 0."""
        found = [self._random.choice(list(choices)) for _ in range(self._random.randint(1, 5))]
        found[-1] = found[-1] or 1
        self.noted[name] = found
        return found

    def heads(self, kv_heads: Sequence[int] = (1, 2, 3)) -> dict[str, int]:
        kv_heads = self.one("kv_heads", kv_heads)
        return dict(heads=kv_heads * self.for_kernel("group", (1, 2, 3, 4, 5, 7, 8, 16)), kv_heads=kv_heads)

    def sinks(self, heads: int) -> torch.Tensor | None:
        if not self.maybe("sinks", 0.3):
            return None
        return torch.tensor([self._random.uniform(-4, 8) for _ in range(heads)], device=self.device)

    def powers(self, name: str, heads: int, kv_heads: int) -> torch.Tensor:
        """Return a power of two for each KV head, as [heads, 1] of its query heads."""
        self.noted[name] = chosen = [2.0 ** self._random.randint(-4, 2) for _ in range(kv_heads)]
        return torch.tensor(chosen, device=self.device).repeat_interleave(heads // kv_heads)[:, None]

    def common(self) -> dict[str, Any]:
        return dict(device=self.device, seed=self.number, magnitude=self.one("magnitude", (0.0, 0.5, 1.0, 1.0, 3.0)))


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


def decode(draw: Draw) -> None:
    """Draw decode over caches of all kinds, with drafts, windows and sinks, by either entry."""
    tokens = draw.for_kernel("tokens", (1, 1, 1, 2, 3, 4, 7, 16))
    kv_lens = draw.lengths("kv_lens", DECODE_KEYS)
    drafts = [draft_bits("tree", tokens, draw.number + i) for i in range(len(kv_lens))]
    cache, dtype = (
        draw.for_kernel("cache", (None, None, E4M3, torch.int8, NVFP4)),
        draw.for_kernel("dtype", (BF16, FP16)),
    )
    known = support.DECODE_NVFP4_HEAD_DIMS if cache is NVFP4 else support.DECODE_HEAD_DIMS
    dims = draw.for_kernel("dims", [*known, (64, 64), *[(128, 128)] * 3])
    sizes = dict(head_dim=dims[0], v_head_dim=dims[1], **draw.heads())
    data = DecodeBatch(
        [tokens] * len(kv_lens), kv_lens, dtype=dtype, kv_dtype=cache, drafts=drafts, **sizes, **draw.common()
    )
    left = draw.for_kernel("window", (-1, -1, 0, 30, 128, 700))
    kind = MaskKind.DRAFT if tokens > 1 else MaskKind.FULL if left < 0 else MaskKind.SLIDING_WINDOW
    mask, sinks = Mask(kind, left), draw.sinks(data.heads)
    problem = data.decode(draw.for_kernel("page_size", PAGE_SIZES), mask, order=draw.number)
    entry, options = draw.one("entry", ("xqa", "trtllm")), dict(window_left=left, sinks=sinks)
    k_scales, v_scales = torch.ones(2, data.heads, 1, device=draw.device)
    if cache is not None and draw.for_kernel("scales of heads", (False, True)):
        k_scales, v_scales = (draw.powers(name, data.heads, data.kv_heads) for name in ("k_scales", "v_scales"))
        options["bmm1_scale"], options["bmm2_scale"] = (
            scales[:: data.heads // data.kv_heads, 0].contiguous() * factor
            for scales, factor in ((k_scales, data.scale), (v_scales, 1.0))
        )
    out, lse = xqa(data, problem, tokens, entry, return_lse=True, **options)
    scaled = replace(data)  # powers of two are exact
    scaled.q, scaled.k, scaled.v = (data.q * k_scales).to(dtype), data.k, data.v
    expected = scaled.expected_decode(mask, sinks=sinks)
    expected.check((out.flatten(0, -3) / v_scales).to(dtype))
    expected.check_lse(lse.view(-1, data.heads), natural=False)


@contextlib.contextmanager
def split_by(draw: Draw, *, alone: bool) -> Iterator[None]:
    """Split the MLA requests over a drawn number of emulated SMs; with ``alone`` by their own lengths.

    With few slots, partials of such requests wait for earlier partials in their slots. CTA parts need all of their
    slots at once.
    """
    before, sms, few_slots = settings.BATCH_INVARIANT.given, draw.one("sms", (2, 4, 6, 10)), draw.maybe("few_slots")
    all_slots = (splitting.COMFORTABLE_BYTES, splitting.LATENT_IN_FLIGHT)
    comfortable, in_flight = (0, 1) if few_slots and alone else all_slots
    slots = dict(COMFORTABLE_BYTES=comfortable, LATENT_IN_FLIGHT=in_flight)
    with mock.patch.object(geometry, "EMULATED_SMS", sms), mock.patch.multiple(splitting, **slots):
        hopwell.batch_invariant(alone)
        try:
            yield
        finally:
            settings.BATCH_INVARIANT.given = before
            switches.forget_calls()


def latent(draw: Draw) -> None:
    """Draw MLA, dense and sparse, over caches of all kinds, batch invariant in a third of all draws."""
    cache = draw.for_kernel("cache", ("wide", "wide", "e4m3", "e4m3 both", "e4m3 both", "rows"))
    tokens, kv_lens = draw.for_kernel("tokens", (1, 1, 2, 4)), draw.lengths("kv_lens", DECODE_KEYS)
    top_k = draw.for_kernel("top_k", (0, 0, 64, 132, 1000))
    known = ((576, 512), *(support.SPARSE_MLA_HEAD_DIMS if top_k else support.MLA_HEAD_DIMS))
    dims = (576, 512) if cache == "rows" else draw.for_kernel("dims", known)
    kind = {"e4m3 both": Fp8MlaBatch, "rows": PackedBatch}.get(cache, MlaBatch)
    options: dict[str, Any] = dict(kv_dtype=E4M3) if cache == "e4m3" else {}
    options |= dict(dtype=draw.for_kernel("dtype", (BF16, FP16))) if cache in ("wide", "e4m3") else {}
    options |= draw.common() | dict(heads=draw.for_kernel("heads", MLA_HEADS))
    topk = draw.one("topk", ("any", "model", "one", "none"))
    data = with_topk(
        kind, [tokens] * len(kv_lens), kv_lens, top_k, topk, head_dim=dims[0], v_head_dim=dims[1], **options
    )
    page_size, sinks = draw.for_kernel("page_size", PAGE_SIZES), draw.sinks(data.heads)
    is_packed = isinstance(data, PackedBatch)  # its rows are in pages of order 0
    problem = data.decode(page_size, order=0 if is_packed else draw.number)
    more = dict(kv_cache=data.packed(page_size)) if is_packed else {}
    if cache == "e4m3 both":
        more["query"] = problem.query.view(data.size, tokens, data.heads, dims[0])
    more |= dict(sinks=sinks, return_lse=True)
    batch_invariant = draw.for_kernel("batch_invariant", (False, False, True))
    with split_by(draw, alone=batch_invariant):
        out, lse = mla(data, problem, **more)
        if batch_invariant:
            request = draw.one("request alone", range(data.size))
            check_request_alone(data, problem, request, (out, lse), **more)
    expected = data.expected_mla(sinks=sinks)
    expected.check(out.flatten(0, 1))
    expected.check_lse(lse.view(-1, data.heads), natural=False)


def check_request_alone(
    data: MlaBatch, problem: AttentionProblem, index: int, together: tuple[torch.Tensor, ...], **more: Any
) -> None:
    """Check that a request has the bits alone, with the same bounds, that it has in its batch."""
    arguments = mla_arguments(data, problem, **more)
    for name in ("query", "block_tables", "seq_lens"):
        arguments[name] = arguments[name][index : index + 1]
    alone = hopwell.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    for one, part in zip(alone, together, strict=True):
        assert torch.equal(one.flatten(), part.unflatten(0, (data.size, -1))[index].flatten()), "bits differ alone"


KINDS: tuple[Callable[[Draw], None], ...] = (
    context_call,
    fmha_v2_call,
    cudnn_call,
    fp8_prefill,
    narrow_cache_prefill,
    decode,
    decode,
    latent,
)


def problem(number: int, device: str, per_kernel: int = 1) -> tuple[Draw, Callable[[Draw], None]]:
    """Return the draw of a problem, and the function that makes and checks it. Kinds take turns, and ``per_kernel``
    problems of a kind in a row have one kernel."""
    turn, kind = divmod(number, len(KINDS))
    return Draw(number, device, turn // per_kernel * len(KINDS) + kind), KINDS[kind]
