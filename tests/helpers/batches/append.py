"""Tokens to append, and the expected cache contents by the quantizers of ``hopwell.layouts``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hopwell import layouts

POISON = 0xA5  # byte value of memory that no kernel may write
FP8, BF16, FP16, NVFP4 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.uint8


@dataclass(frozen=True)
class Case:
    """Requests with old and new tokens, and the form of their cache."""

    old: Sequence[int] = (0, 5, 16, 30)
    new: Sequence[int] = (3, 0, 17, 1)
    kv_heads: int = 2
    dims: tuple[int, int] = (64, 64)
    page_size: int = 8
    dtype: torch.dtype = BF16
    cache: torch.dtype = BF16
    layout: str = "NHD"
    stacked: bool = False
    v_scale_layout: str = "linear"
    k_scale: float = 1.0
    v_scale: float = 1.0
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        return sum(self.new)

    @property
    def counts(self) -> list[int]:
        """Pages of each request."""
        return [-(-(a + b) // self.page_size) for a, b in zip(self.old, self.new, strict=True)]


def interesting(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random numbers with difficult cases for rounding: ties, zeros and NaN of both signs, tiny and
    huge blocks.
    """
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    blocks = values.flatten()[: values.numel() // 16 * 16].view(-1, 16)  # a view
    count = len(blocks)
    if not count:
        return values.to(dtype)
    blocks[0] = 0.0
    blocks[1 % count] = -0.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    blocks[2 % count] = torch.cat([ties, -ties])
    blocks[3 % count] *= 1e-3
    blocks[4 % count] *= 3e4
    blocks[5 % count, 7] = math.nan
    blocks[6 % count, 3] = math.inf
    blocks[9 % count, 5] = -math.nan
    blocks[7 % count] *= 2.0**-13
    # Scale factors between two e4m3 values: 6 x (1 + k / 16) with odd k.
    blocks[8 % count] = blocks[8 % count].clamp(-6, 6)
    blocks[8 % count, 0] = 6 * (1 + 3 / 16)
    return values.to(dtype)


class Data:
    """The tensors of a case."""

    def __init__(self, case: Case):
        self.case = case
        on, (k_dim, v_dim) = case.device, case.dims
        fused = torch.cat(
            [
                interesting((case.tokens, case.kv_heads * k_dim), case.dtype, 1),
                interesting((case.tokens, case.kv_heads * v_dim), case.dtype, 2),
            ],
            1,
        ).to(on)
        # Slices of one tensor, as from a fused projection.
        self.key = fused[:, : case.kv_heads * k_dim].unflatten(1, (case.kv_heads, k_dim))
        self.value = fused[:, case.kv_heads * k_dim :].unflatten(1, (case.kv_heads, v_dim))
        total = sum(case.counts) + 2
        self.ids = torch.randperm(total, generator=torch.Generator().manual_seed(0)).int()[: total - 2]
        self.pages = total
        requests = [b for b, new in enumerate(case.new) for _ in range(new)]
        places = [old + i for old, new in zip(case.old, case.new, strict=True) for i in range(new)]
        self.batch_indices, self.positions = self.ints(requests), self.ints(places)
        self.indptr = self.ints([sum(case.counts[:i]) for i in range(len(case.counts) + 1)])
        self.indices = self.ids.to(on)
        self.last = self.ints([(a + b - 1) % case.page_size + 1 for a, b in zip(case.old, case.new, strict=True)])
        packing = 2 if case.cache is NVFP4 else 1
        self.cache = self.pool([dim // packing for dim in case.dims], case.cache)
        self.scales = self.pool([dim // 16 for dim in case.dims], FP8) if case.cache is NVFP4 else None

    def ints(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.case.device)

    def pool(self, dims: Sequence[int], dtype: torch.dtype) -> Any:
        """Make a poisoned cache in the case's form."""
        c = self.case
        inner = (c.page_size, c.kv_heads) if c.layout == "NHD" else (c.kv_heads, c.page_size)

        def poisoned(*shape: int) -> torch.Tensor:
            octets = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device=c.device)
            return octets.view(dtype)

        if c.stacked:
            assert dims[0] == dims[1]
            return poisoned(self.pages, 2, *inner, dims[0])
        return tuple(poisoned(self.pages, *inner, dim) for dim in dims)

    def options(self) -> dict[str, Any]:
        c = self.case
        return dict(
            paged_kv_cache=self.cache,
            kv_layout=c.layout,
            k_scale=c.k_scale,
            v_scale=c.v_scale,
            kv_cache_sf=self.scales,
            v_scale_layout=c.v_scale_layout,
        )

    def block_tables(self) -> torch.Tensor:
        """Return the same pages as a table that ends in -1."""
        table = torch.full((len(self.case.new), max(self.case.counts) + 1), -1, dtype=torch.int32)
        for row, ids in zip(table, self.ids.split(self.case.counts), strict=True):
            row[: len(ids)] = ids
        return table.to(self.case.device)

    def slots(self) -> torch.Tensor:
        """Return the slot of each new token, int64."""
        size, positions = self.case.page_size, self.positions.cpu().long()
        places = self.indptr.cpu().long()[self.batch_indices.cpu().long()] + positions // size
        return (self.ids.long()[places] * size + positions % size).to(self.case.device)

    def expected(self, skipped: Sequence[int] = ()) -> list[torch.Tensor]:
        """Return the bytes of K, V, and their scales as [pages, kv_heads, page_size, n], without the tokens
        ``skipped``.
        """
        pools = [octets(view).cpu().clone() for view in self.views()]
        for part, (tokens, scale) in enumerate(((self.key, self.case.k_scale), (self.value, self.case.v_scale))):
            rows = self._quantized(tokens.cpu(), scale)
            for which, row in enumerate(rows):
                pool = pools[part + 2 * which]
                interleaved = which == 1 and part == 1 and self.case.v_scale_layout == "interleaved"
                target = layouts.interleaved_v_scale_view(pool, "HND") if interleaved else pool
                self._store(target, row, skipped, interleaved)
        return pools

    def _quantized(self, tokens: torch.Tensor, scale: float) -> list[torch.Tensor]:
        if self.case.cache is NVFP4:
            return [octets(part) for part in layouts.quantize_nvfp4(tokens, scale)]
        return [octets(layouts.quantize_fp8(tokens, scale) if self.case.cache is FP8 else tokens.contiguous())]

    def _store(self, pool: torch.Tensor, rows: torch.Tensor, skipped: Sequence[int], interleaved: bool) -> None:
        for token in set(range(self.case.tokens)) - set(skipped):
            request, position = int(self.batch_indices[token]), int(self.positions[token])
            page = int(self.ids[int(self.indptr[request]) + position // self.case.page_size])
            row = position % self.case.page_size
            if interleaved:
                place = pool[page, :, row // 4, row % 4]
                place.copy_(rows[token].view(place.shape))
            else:
                pool[page, :, row] = rows[token]

    def views(self) -> list[torch.Tensor]:
        """Return K, V and their scales, [pages, kv_heads, page_size, n]."""
        pools = [self.cache, *([] if self.scales is None else [self.scales])]
        return [view for pool in pools for view in layouts.paged_kv_views(pool, self.case.layout, same_pages=True)]

    def check(self, want: Sequence[torch.Tensor]) -> None:
        """Check that every byte of the cache is as expected."""
        for number, (view, right) in enumerate(zip(self.views(), want, strict=True)):
            differs = octets(view).cpu() != right
            assert not differs.any(), f"part {number}: {int(differs.sum())} bytes differ at {differs.nonzero()[:3]}"


def octets(view: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a view."""
    return view.view(torch.uint8)
