"""A prefill kernel on the emulator under all detectors, against float64."""

from __future__ import annotations

import torch
from config_cases import check_config

from hopwell import emulator
from hopwell.kernels.config import KvFetch, PrefillConfig, shipped_configs
from hopwell.kernels.problem import MaskKind


def page_sizes(config: PrefillConfig) -> list[int | None]:
    """Those that a kernel is to be run with; None without pages."""
    if config.kv_fetch is KvFetch.CONTIGUOUS:
        return [None]
    if config.kv_fetch is KvFetch.PAGE_ROWS:
        return [1, 4]
    # Pages beyond the tallest box are several boxes.
    tallest = max(c.box_rows for c in shipped_configs(config.arch) if c.head_dim_qk == config.head_dim_qk)
    return [config.box_rows, 128] if config.box_rows == tallest else [config.box_rows]


def check(config: PrefillConfig, page_size: int | None, heads: int, kv_heads: int, **settings: object) -> None:
    """Requests of none to two tiles of queries and none to four tiles of keys, or as many as a window is cut by; some
    rows have nothing to see. Short ones make heads share tiles."""
    m, n = config.tile.m, config.tile.n
    uncut = config.mask is MaskKind.SLIDING_WINDOW and not config.short_steps
    requests = [(0, 3), (1, 0), (m, (5 if uncut else 3) * n + 1), (m + 9, n + 5)]
    if config.packs_heads:
        requests = [(5, 9), (7, 3), *requests]
    sinks = torch.linspace(-1.0, 1.0, heads).tolist()
    lengths = tuple(zip(*requests, strict=True))
    with emulator.use(config.arch, race=True, proxy=True, strict=True, **settings):
        check_config(config, lengths, page_size, sinks, kv_heads, device="cpu")
    assert not emulator.report().warnings
