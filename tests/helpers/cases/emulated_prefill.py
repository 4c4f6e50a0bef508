"""A prefill kernel in the emulator under all detectors, checked against float64."""

from __future__ import annotations

import torch

from helpers.cases.prefill_configs import check_config, mask_of
from hopwell import emulator
from hopwell.kernels.config.base import KvFetch
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.registry import shipped_configs


def page_sizes(config: PrefillConfig) -> list[int | None]:
    """Return the page sizes to test a kernel with; None without pages."""
    if config.kv_fetch is KvFetch.CONTIGUOUS:
        return [None]
    if config.kv_fetch is KvFetch.PAGE_ROWS:
        return [1, 4]
    # Pages beyond the tallest box take several boxes.
    tallest = max(c.box_rows for c in shipped_configs(config.arch) if c.head_dim_qk == config.head_dim_qk)
    return [config.box_rows, 128] if config.box_rows == tallest else [config.box_rows]


def check(config: PrefillConfig, page_size: int | None, heads: int, kv_heads: int, **settings: object) -> None:
    """Check requests of zero to three query tiles and zero to four key tiles.

    A window gets enough key tiles to leave some out. Some rows see no key. Heads are packed if requests have less than
    one query tile on average.
    """
    m, n = config.tile.m, config.tile.n
    most = max(3 * n, mask_of(config).window_left + n) + 1
    requests = [(5, 9), (0, 3), (1, 0), (7, 3), (m, most), ((1 if config.packs_heads else 2) * m + 3, n + 5)]
    sinks = torch.linspace(-1.0, 1.0, heads).tolist()
    lengths = tuple(zip(*requests, strict=True))
    with emulator.use(config.arch, race=True, proxy=True, strict=True, **settings):
        check_config(config, lengths, page_size, sinks, kv_heads, device="cpu")
    assert not emulator.report().warnings
