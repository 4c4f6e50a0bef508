"""Workloads of prefill: shapes of real models, with random data."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch

from hopwell.perf import ceilings
from hopwell.perf.quantized import (
    BF16,
    CACHES,
    E4M3,
    ELEMENT_BYTES,
    MAX_BYTE_ERROR,
    MAX_ERROR,
    NVFP4,
    CachePages,
    cache_pages,
    stored,
)

STRETCH = 512  # keys in a stretch, either all negligible or all needed
NEEDED = 4  # one stretch in this number is needed


@dataclass(frozen=True)
class Prefill:
    """Requests with new tokens (``q_lens``) at the ends of their keys (``kv_lens``)."""

    name: str
    what: str  # the requests in words
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    causal: bool = True
    window_left: int = -1
    sinks: bool = False
    skip_softmax: float = 0.0  # keys whose weight is below this factor / kv_len may be left out
    q_dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    series: str = ""  # common to the points of a plot's line

    @property
    def x(self) -> int:
        return max(self.q_lens)

    @property
    def title(self) -> str:
        mask = f"window {self.window_left}" if self.window_left >= 0 else "causal" if self.causal else "full"
        dims = f"d{self.head_dim}" + (f"/{self.v_head_dim}" if self.v_head_dim != self.head_dim else "")
        extra = ", sinks" * self.sinks + ", three of four keys negligible" * (self.skip_softmax > 0)
        types = ", e4m3" if self.q_dtype is E4M3 and self.kv_dtype is E4M3 else CACHES[self.kv_dtype]
        types += ", e4m3 query" * (self.q_dtype is E4M3 and self.kv_dtype is NVFP4)
        return f"{self.name}: {self.what}, {mask}{extra}, {self.heads}/{self.kv_heads} heads, {dims}{types}"

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def kv_tokens(self) -> int:
        return sum(self.kv_lens)

    @property
    def uniform(self) -> bool:
        """Whether all requests have one length and no cached prefix, so that tensors can be [batch, length, ...]."""
        return len({*self.q_lens, *self.kv_lens}) == 1

    @property
    def work(self) -> float:
        """FLOP of both matrix products, visible keys only; the diagonal of a causal mask counts half."""
        return 2.0 * self.heads * (self.head_dim + self.v_head_dim) * sum(map(self._visible, self.q_lens, self.kv_lens))

    @property
    def demand(self) -> dict[str, float]:
        """Demand of both products in FLOP, and of query, output, keys and values in bytes, each once.

        Values of negligible keys may be left out.
        """
        values = self.v_head_dim / (NEEDED if self.skip_softmax else 1)
        q_bytes, kv_bytes = ELEMENT_BYTES[self.q_dtype], ELEMENT_BYTES[self.kv_dtype]
        queries = self.tokens * self.heads * (q_bytes * self.head_dim + ELEMENT_BYTES[BF16] * self.v_head_dim)
        keys = self.kv_tokens * self.kv_heads * kv_bytes * (self.head_dim + values)
        return {
            ceilings.matmul_of(self.q_dtype, self.kv_dtype): self.work
            * (self.head_dim + values)
            / (self.head_dim + self.v_head_dim),
            ceilings.READ: queries + keys,
        }

    def _visible(self, q_len: int, kv_len: int) -> float:
        if not self.causal:
            return q_len * kv_len
        all_keys = q_len * (kv_len - q_len) + q_len * q_len / 2
        hidden_rows = max(kv_len - self.window_left - 1, 0) if self.window_left >= 0 else 0
        # Row t sees kv_len - q_len + t + 1 keys; a window removes the excess over window_left + 1.
        first = max(hidden_rows - q_len, 0)
        return all_keys - (hidden_rows * (hidden_rows + 1) - first * (first + 1)) / 2

    @property
    def max_error(self) -> float:
        return MAX_ERROR if self.q_dtype is BF16 and self.kv_dtype is BF16 else MAX_BYTE_ERROR

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


Sizes = tuple[int, int, int, int]  # heads, kv_heads, head_dim, v_head_dim


def _uniform(name: str, batch: int, length: int, sizes: Sizes, *, causal: bool = True, **options: Any) -> Prefill:
    lengths = (length,) * batch
    return Prefill(name, f"{batch} x {length}", lengths, lengths, *sizes, causal=causal, **options)


def _mixed(name: str, batch: int, shortest: int, longest: int, sizes: Sizes) -> Prefill:
    """Make a workload of lengths drawn evenly on a logarithmic scale."""
    draw = random.Random(0)
    ends = math.log(shortest), math.log(longest)
    lengths = tuple(round(math.exp(draw.uniform(*ends))) for _ in range(batch))
    return Prefill(name, f"{batch} x {shortest} to {longest}", lengths, lengths, *sizes)


LENGTHS = tuple(512 << i for i in range(7))  # 512 to 32768
TOKENS = 16384  # of all requests together, or of one longer request


def _lengths(sizes: Sizes) -> list[Prefill]:
    """Return a series over the sequence length."""
    heads, kv_heads, dim, _ = sizes
    series = f"causal, {heads}/{kv_heads} heads, d{dim}"
    return [_uniform(f"d{dim}-{n}", max(TOKENS // n, 1), n, sizes, series=series) for n in LENGTHS]


def _in_types(case: Prefill, suffix: str, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> Prefill:
    return replace(case, name=f"{case.name}-{suffix}", q_dtype=q_dtype, kv_dtype=kv_dtype)


BF16_CASES = (
    _uniform("P1", 1, 16384, (32, 8, 128, 128)),
    _uniform("P2", 4, 4096, (32, 8, 128, 128)),
    _uniform("P3", 16, 1024, (32, 8, 128, 128)),
    _uniform("P4", 1, 8192, (32, 8, 128, 128), causal=False),
    _uniform("P5", 2, 8192, (16, 16, 128, 128)),
    _uniform("P6", 1, 4096, (128, 128, 192, 128)),
    _uniform("P7", 2, 8192, (32, 8, 64, 64)),
    _uniform("P8", 2, 4096, (16, 4, 256, 256)),
    _uniform("d512", 1, 4096, (8, 2, 512, 512)),
    _uniform("short", 64, 256, (32, 8, 128, 128)),
    _uniform("short-128", 64, 128, (32, 8, 128, 128)),
    _uniform("short-512", 64, 512, (32, 8, 128, 128)),
    _mixed("mixed", 128, 16, 8192, (32, 8, 128, 128)),
    Prefill("chunk", "8 x 512 of 16384", (512,) * 8, (16384,) * 8, 32, 8, 128, 128),
    Prefill("few", "32 x 16 of 8192", (16,) * 32, (8192,) * 32, 32, 8, 128, 128),
    Prefill("serve", "4096, and 127 x 1 of 4096", (4096, *(1,) * 127), (4096,) * 128, 32, 8, 128, 128),
    _uniform("window", 1, 32768, (32, 8, 128, 128), window_left=1023),
    _uniform("gpt-oss", 2, 8192, (64, 8, 64, 64), window_left=127, sinks=True),
    _uniform("skip", 1, 16384, (32, 8, 128, 128), skip_softmax=1.0),
    *_lengths((32, 8, 128, 128)),
    *_lengths((32, 8, 64, 64)),
    *_lengths((16, 4, 256, 256)),
)
_NAMED = {case.name: case for case in BF16_CASES}
PREFILL = (
    *BF16_CASES,
    *(_in_types(_NAMED[name], "fp8", E4M3, E4M3) for name in ("P1", "P2", "P3", "P4")),
    *(_in_types(_NAMED[name], "fp8-cache", BF16, E4M3) for name in ("P1", "P2", "chunk")),
    *(_in_types(_NAMED[name], "nvfp4-cache", BF16, NVFP4) for name in ("P1", "P2", "chunk")),
    _in_types(_NAMED["P1"], "fp8-nvfp4", E4M3, NVFP4),
)


class Tensors:
    """Random queries, keys and values of a workload, and the same keys and values in pages."""

    def __init__(self, work: Prefill, device: str = "cuda"):
        self.work, self.device, self.dtype = work, device, work.q_dtype
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(tokens, heads, dim, generator=generator, device=device)
            for tokens, heads, dim in (
                (work.tokens, work.heads, work.head_dim),
                (work.kv_tokens, work.kv_heads, work.head_dim),
                (work.kv_tokens, work.kv_heads, work.v_head_dim),
            )
        )
        if work.skip_softmax:
            # Logits have a standard deviation of 6 in a needed stretch, and of almost zero in the others.
            stretch = torch.arange(work.kv_tokens, device=device) // STRETCH
            k *= torch.where(stretch % NEEDED == 0, 6.0, 0.01)[:, None, None]
        self.q = q.to(work.q_dtype)
        self._key, self._value = stored(k, work.kv_dtype), stored(v, work.kv_dtype)
        self.k, self.v = self._key.values, self._value.values
        self.q_lens, self.kv_lens = (
            torch.tensor(lengths, dtype=torch.int32, device=self.device) for lengths in (work.q_lens, work.kv_lens)
        )
        self.q_starts, self.kv_starts = (
            torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int() for lengths in (self.q_lens, self.kv_lens)
        )
        self.sinks = torch.randn(work.heads, generator=generator, device=self.device) if work.sinks else None
        self._pages: dict[int, CachePages] = {}

    def output(self) -> torch.Tensor:
        """Allocate an output in bfloat16, for inputs of any type."""
        return torch.empty(self.work.tokens, self.work.heads, self.work.v_head_dim, dtype=BF16, device=self.device)

    def pages(self, page_size: int) -> CachePages:
        """Return the cache; block scales of V, if any, are interleaved by four tokens."""
        if page_size not in self._pages:
            lengths = self.work.kv_lens
            self._pages[page_size] = cache_pages(self._key, self._value, lengths, page_size, interleaves=True)
        return self._pages[page_size]

    def error(self, out: torch.Tensor, rows: int = 24) -> float:
        """Return the relative error of some rows of the last request against float64."""
        work = self.work
        q_len, kv_len = work.q_lens[-1], work.kv_lens[-1]
        picked = torch.linspace(0, q_len - 1, min(rows, q_len), device=self.device).long()
        group = work.heads // work.kv_heads
        q = self.q[-q_len:][picked].double().transpose(0, 1)
        k, v = (t[-kv_len:].transpose(0, 1).repeat_interleave(group, 0).double() for t in (self.k, self.v))
        scores = q @ k.transpose(1, 2) * work.scale
        if work.causal:
            key, position = torch.arange(kv_len, device=self.device), picked[:, None] + kv_len - q_len
            scores.masked_fill_(key > position, -math.inf)
            if work.window_left >= 0:
                scores.masked_fill_(key < position - work.window_left, -math.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None, None].expand(-1, len(picked), 1)], 2)
            v = torch.nn.functional.pad(v, (0, 0, 0, 1))
        exact = (scores.softmax(2) @ v).transpose(0, 1)
        return ((out[-q_len:][picked].double() - exact).norm() / exact.norm()).item()
