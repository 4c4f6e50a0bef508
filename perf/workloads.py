"""What is measured: shapes of real models' prefill, in random data."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Prefill:
    """``batch`` requests of ``length`` new tokens without a cached prefix."""

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool

    @property
    def title(self) -> str:
        mask = "causal" if self.causal else "full"
        dims = f"d{self.head_dim}" + (f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        return f"{self.name}: {self.batch} x {self.length}, {mask}, {self.heads}/{self.kv_heads} heads, {dims}"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def flops(self) -> float:
        """Of both matrix products; a causal mask counts half."""
        products = 2.0 * self.heads * self.tokens * self.length * (self.head_dim + self.v_head_dim)
        return products / 2 if self.causal else products

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


PREFILL = (
    Prefill("P1", 1, 16384, 32, 8, 128, 128, True),
    Prefill("P2", 4, 4096, 32, 8, 128, 128, True),
    Prefill("P3", 16, 1024, 32, 8, 128, 128, True),
    Prefill("P4", 1, 8192, 32, 8, 128, 128, False),
    Prefill("P5", 2, 8192, 16, 16, 128, 128, True),
    Prefill("P6", 1, 4096, 128, 128, 192, 128, True),
    Prefill("P7", 2, 8192, 32, 8, 64, 64, True),
    Prefill("P8", 2, 4096, 16, 4, 256, 256, True),
)


class Tensors:
    """Random queries, keys and values of a workload, and the same keys and values in pages."""

    def __init__(self, work: Prefill, dtype: torch.dtype = torch.bfloat16):
        self.work, self.dtype = work, dtype
        generator = torch.Generator("cuda").manual_seed(0)
        self.q, self.k, self.v = (
            torch.randn(work.tokens, heads, dim, generator=generator, device="cuda").to(dtype)
            for heads, dim in (
                (work.heads, work.head_dim),
                (work.kv_heads, work.head_dim),
                (work.kv_heads, work.v_head_dim),
            )
        )
        self.starts = torch.arange(work.batch + 1, dtype=torch.int32, device="cuda") * work.length
        self.lengths = torch.full((work.batch,), work.length, dtype=torch.int32, device="cuda")

    def output(self) -> torch.Tensor:
        return torch.empty(self.work.tokens, self.work.heads, self.work.v_head_dim, dtype=self.dtype, device="cuda")

    @functools.cache  # noqa: B019 (lives as long as the workload is measured)
    def pages(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V [pages, page_size, kv_heads, dim] in random order, and the table [batch, pages of a request]."""
        count = self.work.tokens // page_size
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).cuda()
        pools = []
        for tokens in (self.k, self.v):
            pool = torch.empty(count, page_size, *tokens.shape[1:], dtype=self.dtype, device="cuda")
            pool[order] = tokens.view(pool.shape)
            pools.append(pool)
        return pools[0], pools[1], order.view(self.work.batch, -1).to(torch.int32)

    def error(self, out: torch.Tensor, rows: int = 24) -> float:
        """Relative error of some rows of the last request against float64."""
        work = self.work
        picked = torch.linspace(0, work.length - 1, rows, device="cuda").long()
        last = slice(work.tokens - work.length, work.tokens)
        group = work.heads // work.kv_heads
        q = self.q[last][picked].double().transpose(0, 1)
        k, v = (t[last].transpose(0, 1).repeat_interleave(group, 0).double() for t in (self.k, self.v))
        scores = q @ k.transpose(1, 2) * work.scale
        if work.causal:
            scores.masked_fill_(torch.arange(work.length, device="cuda") > picked[:, None], -math.inf)
        exact = (scores.softmax(2) @ v).transpose(0, 1)
        return ((out[last][picked].double() - exact).norm() / exact.norm()).item()
