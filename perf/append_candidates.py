"""Implementations of append to compare. As for decode, each candidate's call returns its output: the written pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import hopwell
from hopwell.perf.append_workloads import AppendPages, AppendTensors
from hopwell.perf.family import Call, Candidate
from hopwell.perf.peers import flashinfer, for_pages
from hopwell.perf.quantized import NVFP4, stored


def _returning(pages: AppendPages, call: Call) -> Call:
    def run() -> AppendPages:
        call()
        return pages

    return run


def hopwell_paged(page_size: int) -> Candidate:
    def prepare(t: AppendTensors) -> Call:
        pages = t.pages(page_size)
        call = partial(
            hopwell.append_paged_kv_cache,
            t.key,
            t.value,
            t.requests,
            t.positions,
            (pages.key, pages.value),
            kv_layout="NHD",
            kv_cache_sf=pages.scales,
            block_tables=pages.table,
        )
        return _returning(pages, call)

    return prepare


def flashinfer_append(page_size: int) -> Candidate:
    """Prepare FlashInfer's kernels, which copy or quantize to NVFP4; for e4m3, torch converts before them."""

    def prepare(t: AppendTensors) -> Call:
        peer, pages, dtype = flashinfer().page, t.pages(page_size), t.work.kv_dtype
        new: tuple[Any, ...] = (t.requests, t.positions, (pages.key, pages.value))
        where = (pages.used, pages.starts, pages.in_last)
        if dtype is NVFP4:
            function = peer.nvfp4_quantize_append_paged_kv_cache
            call = partial(function, t.key, t.value, *new, pages.scales, *where, 1.0, 1.0, kv_layout="NHD")
            return _returning(pages, call)

        def convert_and_append() -> None:
            peer.append_paged_kv_cache(t.key.to(dtype), t.value.to(dtype), *new, *where, kv_layout="NHD")

        return _returning(pages, convert_and_append)

    return prepare


def torch_indexing(page_size: int) -> Candidate:
    """Prepare an append without a kernel of its own: torch quantizes and assigns to cache positions."""

    def prepare(t: AppendTensors) -> Call:
        pages = t.pages(page_size)
        places = t.places(pages.table, page_size)
        scales: tuple[torch.Tensor | None, ...] = pages.scales or (None, None)
        targets = list(zip((pages.key, pages.value), scales, (t.key, t.value), strict=True))

        def call() -> None:
            for pool, block_scales, tokens in targets:
                kept = stored(tokens.float(), t.work.kv_dtype) if t.work.kv_dtype != tokens.dtype else (tokens, None)
                for target, source in ((pool, kept[0]), (block_scales, kept[1])):
                    if target is not None and source is not None:
                        # Some dtypes do not support indexed copies.
                        target.view(torch.uint8)[places] = source.view(torch.uint8)

        return _returning(pages, call)

    return prepare


APPEND: dict[str, Candidate] = {
    **for_pages("hopwell", hopwell_paged, 16, 64),
    **for_pages("FlashInfer append", flashinfer_append, 16, 64),
    **for_pages("torch indexing", torch_indexing, 16),
}
