"""Keys and values as caches hold them, beside what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hopwell.layouts import (
    dequantize_fp8_ds_mla,
    dequantize_nvfp4,
    interleave_v_scales,
    quantize_fp8_ds_mla,
    quantize_nvfp4,
)
from hopwell.perf.paging import Pages, in_pages

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NVFP4 = torch.uint8  # two elements a byte, with a scale factor of a byte for each 16 of them
ELEMENT_BYTES = {BF16: 2.0, E4M3: 1.0, NVFP4: 1 / 2 + 1 / 16}
CACHES = {BF16: "", E4M3: ", e4m3 cache", NVFP4: ", NVFP4 cache"}  # in titles
# Errors are relative, of attention on random data, by the dtypes of the query and of the cache. A wrong mask gives ten
# times as much in prefill, and a page of 16 keys too few among 8192 five times as much in decode. Some peers quantize
# the query and the weights as the cache is.
MAX_ERROR, MAX_BYTE_ERROR = 8e-3, 6e-2


class Stored(NamedTuple):
    """[tokens, heads, width] as a cache holds it, block scales where there are any, and the values that this means."""

    data: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor


def stored(tokens: torch.Tensor, dtype: torch.dtype) -> Stored:
    """Return float32 tokens as stored in a cache of ``dtype``. Scales of whole tensors are 1: random numbers need
    none."""
    if dtype is not NVFP4:
        data = tokens.to(dtype)
        return Stored(data, None, data)
    data, scales = quantize_nvfp4(tokens, 1.0)
    # A code times a scale factor has six significant bits at most, so that nothing is lost.
    return Stored(data, scales, dequantize_nvfp4(data, scales, dtype=BF16))


class CachePages(NamedTuple):
    """Pages of keys and values, their table, and pages of their block scales where there are any."""

    key: torch.Tensor  # [pages, page_size, kv_heads, width]
    value: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None


def cache_pages(
    key: Stored, value: Stored | None, lengths: Sequence[int], page_size: int, *, interleaves: bool
) -> CachePages:
    """Put keys and values into the pages of a cache. With ``interleaves``, V's block scales are by four tokens, as the
    context entry has them, else linear."""
    pages: Pages = in_pages(key.data, None if value is None else value.data, lengths, page_size)
    if key.scales is None or value is None or value.scales is None:
        return CachePages(*pages, None)
    if interleaves and page_size % 4:
        raise NotImplementedError("block scales by four tokens need pages of four")
    # The order of the pages is the same: it depends on their number alone.
    scales = in_pages(key.scales, value.scales, lengths, page_size)
    value_scales = interleave_v_scales(scales.value, "NHD") if interleaves else scales.value
    return CachePages(*pages, (scales.key, value_scales))


def latent_rows(tokens: torch.Tensor) -> Stored:
    """Store latent keys [tokens, 1, 576] in rows of 656 bytes, as FlashMLA's sparse kernel reads them: 512 e4m3, a
    float32 scale for each 128 of them, 64 bfloat16 of the rotary part."""
    rows = quantize_fp8_ds_mla(tokens[..., :512], tokens[..., 512:])
    return Stored(rows, None, dequantize_fp8_ds_mla(rows, torch.float32))
