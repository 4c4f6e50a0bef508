"""Workloads of append: new keys and values of requests, and the cache pages that receive them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hopwell.layouts import dequantize_nvfp4
from hopwell.perf import ceilings
from hopwell.perf.paging import in_pages, page_starts
from hopwell.perf.quantized import BF16, CACHES, E4M3, ELEMENT_BYTES, NVFP4, stored


@dataclass(frozen=True)
class Append:
    """Requests with ``new`` tokens each, after ``before`` earlier tokens."""

    name: str
    batch: int
    new: int
    before: int = 0
    kv_heads: int = 8
    head_dim: int = 128
    kv_dtype: torch.dtype = BF16
    series: str = ""

    @property
    def x(self) -> int:
        return self.new

    @property
    def title(self) -> str:
        behind = f" behind {self.before}" if self.before else ""
        requests = f"{self.batch} x {self.new} tokens{behind}"
        return f"{self.name}: {requests}, {self.kv_heads} heads, d{self.head_dim}{CACHES[self.kv_dtype]}"

    @property
    def work(self) -> float:
        """Bytes of the new keys and values as read, plus their bytes in the cache."""
        elements = 2.0 * self.batch * self.new * self.kv_heads * self.head_dim
        return elements * (ELEMENT_BYTES[BF16] + ELEMENT_BYTES[self.kv_dtype])

    @property
    def demand(self) -> dict[str, float]:
        """Bytes of the case, all at the rate of reads; writes count as fast as reads."""
        return {ceilings.READ: self.work}

    @property
    def max_error(self) -> float:
        """Largest relative error: rounding alone, since a cache holds the nearest representable numbers.

        A division may round to the other side.
        """
        return 1e-3 if self.kv_dtype is not NVFP4 else 2e-2


def _in_types(case: Append) -> list[Append]:
    return [case, *(replace(case, name=f"{case.name}-{s}", kv_dtype=t) for s, t in (("fp8", E4M3), ("nvfp4", NVFP4)))]


APPEND = tuple(
    case
    for plain in (
        Append("A-prompt", 4, 4096),
        Append("A-chunks", 8, 512, before=3584),
        Append("A-step", 256, 1, before=1023),
    )
    for case in _in_types(plain)
)


class AppendPages(NamedTuple):
    """Empty pages, and the places of the new tokens in them."""

    key: torch.Tensor  # [pages, page_size, kv_heads, stored head_dim]
    value: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    table: torch.Tensor  # page table of each request
    used: torch.Tensor  # the same pages in a row
    starts: torch.Tensor  # start of each request in ``used``
    in_last: torch.Tensor  # tokens in each request's last page


class AppendTensors:
    """Random new tokens in bfloat16, and the cache contents expected from them."""

    def __init__(self, work: Append, device: str = "cuda"):
        self.work, self.device = work, device
        generator = torch.Generator(device).manual_seed(0)
        shape = (work.batch * work.new, work.kv_heads, work.head_dim)
        self.key, self.value = (torch.randn(shape, generator=generator, device=device).to(BF16) for _ in range(2))
        self.requests = torch.arange(work.batch, dtype=torch.int32, device=device).repeat_interleave(work.new)
        self.positions = (work.before + torch.arange(work.new, device=device)).int().repeat(work.batch)

    def pages(self, page_size: int) -> AppendPages:
        work = self.work
        lengths = (work.before + work.new,) * work.batch
        empty = torch.zeros(1, work.kv_heads, work.head_dim, dtype=torch.float32, device=self.device)
        kept = stored(empty, work.kv_dtype)

        def pool(token: torch.Tensor) -> torch.Tensor:
            return torch.zeros(pages, page_size, *token.shape[1:], dtype=token.dtype, device=self.device)

        one = torch.zeros(sum(lengths), 1, 1, dtype=torch.uint8, device=self.device)
        _, _, table, used = in_pages(one, None, lengths, page_size)
        pages = len(used)
        starts, in_last = page_starts(torch.tensor(lengths, dtype=torch.int32, device=self.device), page_size)
        scales = None if kept.scales is None else (pool(kept.scales), pool(kept.scales))
        return AppendPages(pool(kept.data), pool(kept.data), scales, table, used, starts, in_last)

    def places(self, table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return page and row of each new token."""
        positions = self.positions.long()
        return table[self.requests.long(), positions // page_size].long(), positions % page_size

    def error(self, out: AppendPages) -> float:
        """Return the relative error of the pages' contents, against the quantizers of ``hopwell.layouts``."""
        page, row = self.places(out.table, out.key.shape[1])
        halves = (out.key, out.value)
        scales: tuple[torch.Tensor | None, ...] = (None, None) if out.scales is None else out.scales
        difference = size = 0.0
        for pool, block_scales, tokens in zip(halves, scales, (self.key, self.value), strict=True):
            codes = pool.view(torch.uint8)[page, row].view(pool.dtype)
            factors = None if block_scales is None else block_scales.view(torch.uint8)[page, row].view(E4M3)
            held = codes if factors is None else dequantize_nvfp4(codes, factors, dtype=BF16)
            exact = stored(tokens.float(), self.work.kv_dtype).values.double()
            difference += float((held.double() - exact).square().sum())
            size += float(exact.square().sum())
        return (difference / size) ** 0.5
