"""Random problems of decode and MLA, each with its check against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import hopwell
from helpers.batches.decode import NVFP4, DecodeBatch
from helpers.batches.fp8 import Fp8MlaBatch
from helpers.batches.mla import MlaBatch, PackedBatch, with_topk
from helpers.batches.prefill import starts
from helpers.calls.entries import mla, mla_arguments, xqa
from helpers.cases.decode import draft_bits
from helpers.cases.draw import BF16, E4M3, FP16, PAGE_SIZES, Draw
from hopwell._calls import switches
from hopwell.kernels import support
from hopwell.kernels.config import splitting
from hopwell.kernels.jit import settings
from hopwell.kernels.launch import geometry
from hopwell.kernels.problem import AttentionProblem, Mask, MaskKind

MLA_HEADS = (1, 5, 16, 17, 64, 65, 66, 80, 96, 127, 128, 128)
ENTRIES = ("xqa", "trtllm")
DECODE_KEYS = (0, 1, 3, 16, 63, 64, 65, 127, 128, 129, 255, 257, 511, 513, 1023, 1025, 2049, 4100)


def decode(draw: Draw) -> None:
    """Draw decode over caches of all kinds, with drafts, windows and sinks, by either entry."""
    tokens, kv_lens = draw.for_kernel("tokens", (1, 1, 1, 2, 3, 4, 7, 16)), draw.lengths("kv_lens", DECODE_KEYS)
    cache = draw.for_kernel("cache", (None, None, E4M3, torch.int8, NVFP4))
    known = support.DECODE_NVFP4_HEAD_DIMS if cache is NVFP4 else support.DECODE_HEAD_DIMS
    dims = draw.for_kernel("dims", [*known, (64, 64), *[(128, 128)] * 3])
    data = decode_batch(draw, [tokens] * len(kv_lens), kv_lens, cache, dims, draw.heads())
    check_decode(draw, data, tokens, draw.one("entry", ENTRIES))


def narrow_decode(draw: Draw) -> None:
    """Draw decode of 9 to 64 packed rows over e4m3, int8 and NVFP4 caches, with ragged drafts and e4m3 queries."""
    tokens, kv_lens = draw.for_kernel("tokens", (1, 1, 2, 3, 4, 7)), draw.lengths("kv_lens", DECODE_KEYS)
    cache, dim = draw.for_kernel("cache", (E4M3, torch.int8, NVFP4)), draw.for_kernel("dim", (64, 96, 128, 128))
    least, most = draw.for_kernel("rows", ((9, 16), (17, 32), (33, 64)))
    group = draw.one("group", [n for n in range(1, most + 1) if least <= n * tokens <= most])
    kv_heads, q_lens = draw.one("kv_heads", (1, 2, 3)), [tokens] * len(kv_lens)
    is_ragged = tokens > 1 and draw.for_kernel("ragged", (False, True))
    if is_ragged:
        q_lens = [draw.one(f"tokens{i}", range(tokens + 1)) for i in range(len(kv_lens))]
        q_lens[-1] = q_lens[-1] or 1
    sizes = dict(heads=kv_heads * group, kv_heads=kv_heads)
    data, entry = decode_batch(draw, q_lens, kv_lens, cache, (dim, dim), sizes), draw.one("entry", ENTRIES)
    options: dict[str, Any] = {}
    if entry == "trtllm" and cache is not torch.int8 and draw.maybe("e4m3 queries"):
        options |= dict(query=data.q.to(E4M3), out_dtype=data.dtype)
        data.q = options["query"].to(data.dtype)
    check_decode(draw, data, tokens, entry, is_ragged, **options)


def decode_batch(
    draw: Draw,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    cache: torch.dtype | None,
    dims: tuple[int, int],
    heads: dict[str, int],
) -> DecodeBatch:
    options = dict(head_dim=dims[0], v_head_dim=dims[1], dtype=draw.for_kernel("dtype", (BF16, FP16)))
    drafts = [draft_bits("tree", n, draw.number + i) for i, n in enumerate(q_lens)]
    return DecodeBatch(q_lens, kv_lens, kv_dtype=cache, drafts=drafts, **options, **heads, **draw.common())


def check_decode(
    draw: Draw, data: DecodeBatch, tokens: int, entry: str, is_ragged: bool = False, **options: Any
) -> None:
    """Call an entry with up to ``tokens`` new tokens a request, and check output and log-sum-exp."""
    left = draw.for_kernel("window", (-1, -1, 0, 30, 128, 700))
    kind = MaskKind.DRAFT if tokens > 1 else MaskKind.FULL if left < 0 else MaskKind.SLIDING_WINDOW
    mask, sinks = Mask(kind, left), draw.sinks(data.heads)
    problem = data.decode(draw.for_kernel("page_size", PAGE_SIZES), mask, ragged=is_ragged, order=draw.number)
    options |= dict(window_left=left, sinks=sinks)
    if is_ragged:
        offsets, mask_bits = data.ints(starts(data.q_lens)), problem.draft_mask
        bounds = dict(q_cu_seq_lens=offsets) if entry == "xqa" else dict(cum_seq_lens_q=offsets, max_q_len=tokens)
        options |= dict(mask=mask_bits, q_len_per_req=tokens if entry == "xqa" else None, **bounds)
    k_scales, v_scales = torch.ones(2, data.heads, 1, device=draw.device)
    if data.kv_dtype is not None and draw.for_kernel("scales of heads", (False, True)):
        k_scales, v_scales = (draw.powers(name, data.heads, data.kv_heads) for name in ("k_scales", "v_scales"))
        options["bmm1_scale"], options["bmm2_scale"] = (
            scales[:: data.heads // data.kv_heads, 0].contiguous() * factor
            for scales, factor in ((k_scales, data.scale), (v_scales, 1.0))
        )
    out, lse = xqa(data, problem, tokens, entry, return_lse=True, **options)
    scaled = replace(data)  # powers of two are exact
    scaled.q, scaled.k, scaled.v = (data.q * k_scales).to(data.dtype), data.k, data.v
    expected = scaled.expected_decode(mask, sinks=sinks)
    expected.check((out.flatten(0, -3) / v_scales).to(data.dtype))
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
