"""Keys and values as caches store them, with the values that they represent."""

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
NVFP4 = torch.uint8  # two elements a byte, with a one-byte scale factor per 16 elements
ELEMENT_BYTES = {BF16: 2.0, E4M3: 1.0, NVFP4: 1 / 2 + 1 / 16}
CACHES = {BF16: "", E4M3: ", e4m3 cache", NVFP4: ", NVFP4 cache"}  # in titles
# Relative errors of attention on random data, by the dtypes of query and cache. A wrong mask gives ten times the error
# in prefill. A missing page of 16 keys among 8192 gives five times the error in decode. Some peers quantize the query
# and the weights like the cache.
MAX_ERROR, MAX_BYTE_ERROR = 8e-3, 6e-2


class Stored(NamedTuple):
    """[tokens, heads, width] as a cache stores them, block scales if it has them, and the represented values."""

    data: torch.Tensor
    scales: torch.Tensor | None
    values: torch.Tensor


def stored(tokens: torch.Tensor, dtype: torch.dtype) -> Stored:
    """Return float32 tokens as stored in a cache of ``dtype``. Scales of whole tensors are 1, enough for random
    numbers.
    """
    if dtype is not NVFP4:
        data = tokens.to(dtype)
        return Stored(data, None, data)
    data, scales = quantize_nvfp4(tokens, 1.0)
    # A code times a scale factor has at most six significant bits, so the product is exact.
    return Stored(data, scales, dequantize_nvfp4(data, scales, dtype=BF16))


class CachePages(NamedTuple):
    """Pages of keys and values, their table, and pages of their block scales if they have any."""

    key: torch.Tensor  # [pages, page_size, kv_heads, width]
    value: torch.Tensor
    table: torch.Tensor
    used: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None


def cache_pages(
    key: Stored, value: Stored | None, lengths: Sequence[int], page_size: int, *, interleaves: bool
) -> CachePages:
    """Put keys and values into the pages of a cache.

    With ``interleaves``, block scales of V are interleaved by four tokens, as the context entry requires; otherwise
    linear.
    """
    pages: Pages = in_pages(key.data, None if value is None else value.data, lengths, page_size)
    if key.scales is None or value is None or value.scales is None:
        return CachePages(*pages, None)
    if interleaves and page_size % 4:
        raise NotImplementedError("block scales by four tokens need pages of four")
    # The order of the pages is the same, since it depends on their number alone.
    scales = in_pages(key.scales, value.scales, lengths, page_size)
    value_scales = interleave_v_scales(scales.value, "NHD") if interleaves else scales.value
    return CachePages(*pages, (scales.key, value_scales))


def latent_rows(tokens: torch.Tensor) -> Stored:
    """Store latent keys [tokens, 1, 576] in rows of 656 bytes, the format of FlashMLA's sparse kernel.

    A row has 512 e4m3 elements, a float32 scale for each 128 of them, and 64 bfloat16 elements of the rotary part.
    """
    rows = quantize_fp8_ds_mla(tokens[..., :512], tokens[..., 512:])
    return Stored(rows, None, dequantize_fp8_ds_mla(rows, torch.float32))
