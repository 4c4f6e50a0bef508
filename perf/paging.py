"""Keys and values of requests in the pages of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Pages(NamedTuple):
    key: torch.Tensor  # [pages, page_size, kv_heads, dim]
    value: torch.Tensor
    table: torch.Tensor  # int32 [batch, pages of the longest request], -1 past a request's last page
    used: torch.Tensor  # int32, the ids of the table without -1


def in_pages(key: torch.Tensor, value: torch.Tensor | None, lengths: Sequence[int], page_size: int) -> Pages:
    """Copy ``key`` and ``value`` [tokens, kv_heads, dim], consecutive requests of ``lengths``, to pages in random
    order.

    Without ``value``, the pages of both are the pages of ``key``.
    """
    counts = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int().to(key.device)
    ids = order.split(counts)
    table = torch.stack([torch.nn.functional.pad(i, (0, max(counts) - len(i)), value=-1) for i in ids])

    def pool(tokens: torch.Tensor) -> torch.Tensor:
        octets = tokens.view(torch.uint8)  # some dtypes do not support indexed copies
        filled = torch.empty(sum(counts), page_size, *octets.shape[1:], dtype=torch.uint8, device=tokens.device)
        for request, pages in zip(octets.split(list(lengths)), ids, strict=True):
            padded = torch.nn.functional.pad(request, (0, 0, 0, 0, 0, len(pages) * page_size - len(request)))
            filled[pages.long()] = padded.view(len(pages), *filled.shape[1:])
        return filled.view(tokens.dtype)

    keys = pool(key)
    return Pages(keys, keys if value is None else pool(value), table, order)


def page_starts(kv_lens: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of FlashInfer's wrappers: int32 [batch + 1] and [batch].

    The first is the start of each request among the used pages, the second the tokens in its last page.
    """
    counts = (kv_lens + page_size - 1) // page_size
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), kv_lens - (counts - 1) * page_size
