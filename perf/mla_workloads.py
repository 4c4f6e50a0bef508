"""Workloads of MLA decode: a few new tokens of each request against a cache of random latent keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from hopwell.layouts import FP8_DS_MLA_BYTES
from hopwell.perf.decode_workloads import LENGTHS, MOST_TOKENS, Decode, DecodeTensors
from hopwell.perf.quantized import BF16, E4M3, Stored, latent_rows


@dataclass(frozen=True)
class Mla(Decode):
    """Decode whose heads share one key per token; the first ``kv_lora_rank`` entries of the key are the value."""

    heads: int = 128
    kv_heads: int = 1
    head_dim: int = 576
    kv_lora_rank: int = 512
    top_k: int = 0  # top-k of sparse attention, for each new token; 0 for dense
    packed_rows: bool = False  # keys are rows of 656 bytes, see ``latent_rows``

    @property
    def v_head_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def sizes(self) -> str:
        """Heads, dims and keys in words. The bytes of the keys are included, since few heads are limited by memory."""
        keys = f"{self.cache_bytes / 1e6:.0f} MB of keys" + (f", {self.top_k} listed" if self.top_k else "")
        keys += f", rows of {FP8_DS_MLA_BYTES} bytes" * self.packed_rows + ", e4m3 query" * (self.q_dtype is E4M3)
        return f"{self.heads} heads, d{self.head_dim}/{self.v_head_dim}, {keys}"

    @property
    def cache_bytes(self) -> int:
        return sum(self.kv_lens) * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a key."""
        return FP8_DS_MLA_BYTES if self.packed_rows else self.head_dim * self.kv_dtype.itemsize

    @property
    def q_dtype(self) -> torch.dtype:
        """Type of the queries: the cache's type, except for packed rows."""
        return BF16 if self.packed_rows else self.kv_dtype

    @property
    def work(self) -> float:
        return self.flop

    @property
    def read_bytes(self) -> float:
        """Bytes of the keys, values included; a key in the top-k indices counts once per mention."""
        listed = self.batch * self.q_len * self.top_k
        return float(listed * self.row_bytes if self.top_k else self.cache_bytes)

    def _visible(self, kv_len: int) -> int:
        return self.q_len * self.top_k or super()._visible(kv_len)


def _uniform(name: str, batch: int, length: int, **options: Any) -> Mla:
    return Mla(name, f"{batch} x {length}", (length,) * batch, **options)


def _in_fp8(case: Mla) -> Mla:
    """Return the case with query and cache in e4m3, or, if sparse, with rows of 656 bytes and a bfloat16 query."""
    return replace(case, name=f"{case.name}-fp8", kv_dtype=E4M3, packed_rows=case.top_k > 0)


BATCHES = (1, 8, 64)


def _lengths(batch: int) -> list[Mla]:
    """Return a series over the length."""
    lengths = [length for length in LENGTHS if batch * length <= MOST_TOKENS]
    return [_uniform(f"mla-b{batch}-{n}", batch, n, series=f"batch {batch}, 128 heads") for n in lengths]


DENSE = (
    _uniform("M1", 32, 8192),
    _uniform("M1-q2", 32, 8192, q_len=2),
    _uniform("M2", 128, 4096),
    _uniform("M2-q2", 128, 4096, q_len=2),
    _uniform("M3", 1, 65536),
    _uniform("M3-q2", 1, 65536, q_len=2),
    _uniform("H16", 32, 8192, heads=16),
    _uniform("H16-long", 1, 65536, heads=16),
    _uniform("H16-deep", 32, 32768, heads=16),
)
SPARSE = (_uniform("S1", 64, 32768, top_k=2048), _uniform("S1-q2", 64, 32768, q_len=2, top_k=2048))

MLA = (
    *DENSE,
    *SPARSE,
    *map(_in_fp8, (*DENSE, _uniform("H64", 32, 8192, heads=64))),
    *map(_in_fp8, (*SPARSE, _uniform("S1-h64", 64, 32768, heads=64, top_k=2048))),
    *(case for batch in BATCHES for case in _lengths(batch)),
)


class MlaTensors(DecodeTensors):
    work: Mla

    def _stored(self, tokens: torch.Tensor) -> Stored:
        return latent_rows(tokens) if self.work.packed_rows else super()._stored(tokens)

    @cached_property
    def lists(self) -> torch.Tensor:
        """The [batch, q_len, top_k] tokens that each new token attends to, in random order and all different."""
        work, generator = self.work, torch.Generator(self.device).manual_seed(1)
        rows = [self._draw(kv_len, generator) for kv_len in work.kv_lens for _ in range(work.q_len)]
        return torch.stack(rows).view(work.batch, work.q_len, work.top_k)

    def _draw(self, kv_len: int, generator: torch.Generator) -> torch.Tensor:
        """Draw from the tokens visible to the first new token, which all new tokens see."""
        seen = kv_len - self.work.q_len + 1
        return torch.randperm(seen, generator=generator, device=self.device)[: self.work.top_k]

    def token_table(self, page_size: int) -> torch.Tensor:
        """Return the places of the tokens in the pages, in int32 like ``lists``."""
        table = self.pages(page_size).table.long()
        pages = table.gather(1, (self.lists // page_size).flatten(1)).view_as(self.lists)
        return (pages * page_size + self.lists % page_size).int()

    def _hidden(self, request: int, tokens: int) -> torch.Tensor:
        if not self.work.top_k:
            return super()._hidden(request, tokens)
        hidden = torch.ones(self.work.q_len, tokens, dtype=torch.bool, device=self.device)
        return hidden.scatter(1, self.lists[request], False)
