"""What MLA decode is measured with: a few new tokens of each request against a cache of random latent keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hopwell.perf.decode_workloads import LENGTHS, MOST_TOKENS, Decode


@dataclass(frozen=True)
class Mla(Decode):
    """Decode whose heads share one key for each token; its first ``kv_lora_rank`` entries are the value."""

    heads: int = 128
    kv_heads: int = 1
    head_dim: int = 576
    kv_lora_rank: int = 512

    @property
    def v_head_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def sizes(self) -> str:
        """With the bytes of the keys: few heads are limited by memory, and bytes over time tell how much."""
        keys = f"{self.cache_bytes / 1e6:.0f} MB of keys"
        return f"{self.heads} heads, d{self.head_dim}/{self.v_head_dim}, {keys}"

    @property
    def cache_bytes(self) -> int:
        return sum(self.kv_lens) * self.head_dim * self.kv_dtype.itemsize

    @property
    def work(self) -> float:
        """FLOP of both matrix products, visible keys only."""
        hidden = self.q_len * (self.q_len - 1) // 2  # of a request: row t does not see the q_len - 1 - t last keys
        visible = sum(self.q_len * kv_len - hidden for kv_len in self.kv_lens)
        return 2.0 * self.heads * (self.head_dim + self.v_head_dim) * visible


def _uniform(name: str, batch: int, length: int, **options: Any) -> Mla:
    return Mla(name, f"{batch} x {length}", (length,) * batch, **options)


BATCHES = (1, 8, 64)


def _lengths(batch: int) -> list[Mla]:
    """A series over the length."""
    lengths = [length for length in LENGTHS if batch * length <= MOST_TOKENS]
    return [_uniform(f"mla-b{batch}-{n}", batch, n, series=f"batch {batch}, 128 heads") for n in lengths]


MLA = (
    _uniform("M1", 32, 8192),
    _uniform("M1-q2", 32, 8192, q_len=2),
    _uniform("M2", 128, 4096),
    _uniform("M2-q2", 128, 4096, q_len=2),
    _uniform("M3", 1, 65536),
    _uniform("M3-q2", 1, 65536, q_len=2),
    _uniform("H16", 32, 8192, heads=16),
    _uniform("H16-long", 1, 65536, heads=16),
    *(case for batch in BATCHES for case in _lengths(batch)),
)
