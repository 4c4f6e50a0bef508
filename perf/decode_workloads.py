"""Workloads of decode: a few new tokens of each request against a cache of random keys and values."""

from __future__ import annotations

import functools
import itertools
import math
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
    Stored,
    cache_pages,
    stored,
)

MASK_BITS = 32  # a row of a draft mask is a whole number of 32-bit words


@dataclass(frozen=True)
class Decode:
    """Requests with ``q_len`` new tokens each, at the ends of their ``kv_lens`` keys; each token sees those
    before it.
    """

    name: str
    what: str  # the requests in words
    kv_lens: tuple[int, ...]
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    q_len: int = 1
    kv_dtype: torch.dtype = BF16
    series: str = ""  # common to the points of a plot's line

    @property
    def x(self) -> int:
        return max(self.kv_lens)

    @property
    def title(self) -> str:
        drafts = f", {self.q_len} new tokens" if self.q_len > 1 else ""
        return f"{self.name}: {self.what}{drafts}, {self.sizes}{CACHES[self.kv_dtype]}"

    @property
    def sizes(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads, d{self.head_dim}"

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def work(self) -> float:
        return self.read_bytes

    @property
    def demand(self) -> dict[str, float]:
        """Demand of both products in FLOP, and of query, output, keys and values in bytes, each once."""
        columns = ELEMENT_BYTES[self.q_dtype] * self.head_dim + ELEMENT_BYTES[BF16] * self.v_head_dim
        tokens = self.batch * self.q_len * self.heads * columns
        return {ceilings.matmul_of(self.q_dtype, self.kv_dtype): self.flop, ceilings.READ: self.read_bytes + tokens}

    @property
    def q_dtype(self) -> torch.dtype:
        return BF16

    @property
    def read_bytes(self) -> float:
        """Bytes of keys and values, and of block scales if the cache has them."""
        return 2.0 * sum(self.kv_lens) * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    @property
    def flop(self) -> float:
        """FLOP of both matrix products, with visible keys only."""
        return 2.0 * self.heads * (self.head_dim + self.v_head_dim) * sum(map(self._visible, self.kv_lens))

    def _visible(self, kv_len: int) -> int:
        """Return the number of visible scores; row t does not see the last q_len - 1 - t keys."""
        return self.q_len * kv_len - self.q_len * (self.q_len - 1) // 2

    @property
    def v_head_dim(self) -> int:
        """Head dim of values, smaller than ``head_dim`` if values are the first columns of the keys."""
        return self.head_dim

    @property
    def max_error(self) -> float:
        return MAX_BYTE_ERROR if self.kv_dtype is E4M3 else MAX_ERROR

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def _uniform(name: str, batch: int, length: int, **options: Any) -> Decode:
    return Decode(name, f"{batch} x {length}", (length,) * batch, **options)


def _with_fp8_cache(case: Decode) -> Decode:
    return replace(case, name=f"{case.name}-fp8", kv_dtype=E4M3)


def _with_nvfp4_cache(case: Decode) -> Decode:
    return replace(case, name=f"{case.name}-nvfp4", kv_dtype=NVFP4)


BATCHES = tuple(4**i for i in range(5))  # 1 to 256
LENGTHS = tuple(1024 << i for i in range(8))  # 1024 to 131072
MOST_TOKENS = 1 << 20  # of all requests together: 4 GiB of keys and values


def _grid() -> list[Decode]:
    """Return a series over the length for each batch."""
    sizes = [(batch, length) for batch in BATCHES for length in LENGTHS if batch * length <= MOST_TOKENS]
    return [_uniform(f"b{b}-{n}", b, n, series=f"batch {b}, 64/8 heads, d128") for b, n in sizes]


LONG, SHORT = 131072, 512
UNEVEN = (*[SHORT] * 31, LONG, *[SHORT] * 32)
FEW = _uniform("D1", 1, 131072)
SIXTEEN = Decode("L16", "16 x 1024 to 8192", tuple(1024 + 7168 * i // 15 for i in range(16)))  # in equal steps
MANY = (_uniform("D2", 32, 8192), _uniform("D3", 128, 2048), _uniform("D4", 256, 1024))

DECODE = (
    FEW,
    *MANY,
    *map(_with_fp8_cache, (FEW, *MANY)),
    *map(_with_nvfp4_cache, (FEW, *MANY)),
    *(_uniform(f"D2-q{new}", 32, 8192, q_len=new) for new in (2, 4, 8)),
    _uniform("D2-h32", 32, 8192, heads=32),
    _uniform("D2-h8", 32, 8192, heads=8, kv_heads=1),
    _uniform("D2-d64", 32, 8192, head_dim=64),
    _uniform("D2-d256", 32, 8192, heads=32, kv_heads=4, head_dim=256),
    Decode("uneven", f"{LONG} among {len(UNEVEN) - 1} x {SHORT}", UNEVEN),
    _uniform("even", len(UNEVEN), sum(UNEVEN) // len(UNEVEN)),
    # With more rows, kernels dequantize 8-bit caches in registers and in place, and NVFP4 caches in registers.
    *(_with_fp8_cache(_uniform(f"D2-q{new}", 32, 8192, q_len=new)) for new in (2, 4, 8)),
    *(_with_nvfp4_cache(_uniform(f"D2-q{new}", 32, 8192, q_len=new)) for new in (2, 4, 8)),
    _with_fp8_cache(_uniform("D-d512", 32, 4096, heads=32, kv_heads=4, head_dim=512)),
    _uniform("D-d512", 32, 4096, heads=32, kv_heads=4, head_dim=512),
    _uniform("L1", 1, 1024),
    _uniform("L8", 8, 4096),
    SIXTEEN,
    _with_fp8_cache(SIXTEEN),
    _with_nvfp4_cache(SIXTEEN),
    *_grid(),
)


class DecodeTensors:
    """Random queries, keys and values of a workload, and the same keys and values in pages."""

    def __init__(self, work: Decode, device: str = "cuda"):
        self.work, self.device = work, device
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> torch.Tensor:
            return torch.randn(tokens, heads, work.head_dim, generator=generator, device=device)

        self.q = normal(work.batch * work.q_len, work.heads).to(work.q_dtype)
        self._key = self._stored(normal(sum(work.kv_lens), work.kv_heads))
        self.k = self._key.values
        own_values = work.v_head_dim == work.head_dim
        self._value = self._stored(normal(*self.k.shape[:2])) if own_values else None
        self.v = self.k[..., : work.v_head_dim] if self._value is None else self._value.values
        self.kv_lens = torch.tensor(work.kv_lens, dtype=torch.int32, device=device)
        self.mask = self._causal_drafts() if work.q_len > 1 else None
        self._pages: dict[int, CachePages] = {}

    def _stored(self, tokens: torch.Tensor) -> Stored:
        return stored(tokens, self.work.kv_dtype)

    def output(self) -> torch.Tensor:
        return torch.empty(*self.q.shape[:2], self.work.v_head_dim, dtype=BF16, device=self.device)

    def pages(self, page_size: int) -> CachePages:
        """Return the cache. Table entries past a request's last page hold a valid page id, because some peers read
        them.
        """
        if page_size not in self._pages:
            pages = cache_pages(self._key, self._value, self.work.kv_lens, page_size, interleaves=False)
            self._pages[page_size] = pages._replace(table=pages.table.clamp(min=0))
        return self._pages[page_size]

    def _causal_drafts(self) -> torch.Tensor:
        """Return uint16 [batch, q_len, words]: for each new token, a bit for every new token that it sees."""
        q_len = self.work.q_len
        bits = torch.zeros(q_len, -(-q_len // MASK_BITS) * MASK_BITS, dtype=torch.int32)
        bits[:, :q_len] = torch.ones(q_len, q_len, dtype=torch.int32).tril()
        words = (bits.view(q_len, -1, 16) << torch.arange(16, dtype=torch.int32)).sum(2)
        return words.to(torch.uint16).repeat(self.work.batch, 1, 1).to(self.device)

    def error(self, out: torch.Tensor) -> float:
        """Return the relative error of the first, the last and the longest request against float64."""
        found = out.view(-1, self.work.heads, self.work.v_head_dim)
        given = torch.cat([found[self._rows(request)] for request in self._checked]).double()
        return ((given - self._exact).norm() / self._exact.norm()).item()

    @property
    def _checked(self) -> list[int]:
        lengths = self.work.kv_lens
        return sorted({0, lengths.index(max(lengths)), self.work.batch - 1})

    def _rows(self, request: int) -> slice:
        return slice(request * self.work.q_len, (request + 1) * self.work.q_len)

    @functools.cached_property
    def _exact(self) -> torch.Tensor:
        ends, exact = list(itertools.accumulate(self.work.kv_lens)), []
        for request in self._checked:
            keys = slice(ends[request] - self.work.kv_lens[request], ends[request])
            exact.append(self._attention(request, self.q[self._rows(request)], self.k[keys], self.v[keys]))
        return torch.cat(exact)

    def _attention(self, request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute one request in float64."""
        rows = q.double().unflatten(1, (self.work.kv_heads, -1))
        scores = torch.einsum("qhgd,nhd->hgqn", rows, k.double()) * self.work.scale
        weights = scores.masked_fill(self._hidden(request, scores.shape[-1]), -math.inf).softmax(-1)
        return torch.einsum("hgqn,nhd->qhgd", weights, v.double()).flatten(1, 2)

    def _hidden(self, request: int, tokens: int) -> torch.Tensor:
        """Return a boolean [q_len, tokens]: the request's tokens hidden from each new token."""
        q_len = self.work.q_len
        return torch.ones(q_len, tokens, dtype=torch.bool, device=self.device).triu(tokens - q_len + 1)
