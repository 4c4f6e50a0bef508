"""Batches for MLA: all heads share one row of each token, and top-k indices may select tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from helpers.batches.decode import DecodeBatch
from helpers.batches.prefill import CAUSAL, Expected, starts
from helpers.oracles import reference
from hopwell.kernels.problem import AttentionProblem, Family, Mask
from hopwell.layouts import FP8_DS_MLA_BYTES, dequantize_fp8_ds_mla, mla_kv_views, quantize_fp8_ds_mla
from hopwell.layouts.mla_rows import LATENT
from hopwell.mla import mla_workspace_bytes

Latent = TypeVar("Latent", bound="MlaBatch")
NAN_BYTE = 0xFF  # NaN in each of the types of a row of 656 bytes


@dataclass
class MlaBatch(DecodeBatch):
    """A batch; the first ``v_head_dim`` columns of a key are its value.

    ``topk_indices`` are the indices [q_len, top_k] of each request, negative for no token. None means dense attention.
    """

    heads: int = 16
    kv_heads: int = 1
    head_dim: int = 576
    v_head_dim: int = 512
    topk_indices: Sequence[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.v = [k[..., : self.v_head_dim] for k in self.k]

    def request(self, index: int) -> MlaBatch:
        one = super().request(index)
        one.topk_indices = None if self.topk_indices is None else [self.topk_indices[index]]
        return one

    def repeated(self, count: int) -> MlaBatch:
        many = super().repeated(count)
        many.topk_indices = None if self.topk_indices is None else [*self.topk_indices] * count
        return many

    @property
    def scale(self) -> float:
        """DeepSeek's scale, for heads before absorption, 128 + 64 columns wide."""
        return 192**-0.5

    def pages(self, page_size: int, *, order: int = 0, spare: int = 3) -> tuple[torch.Tensor, ...]:
        key, _, table = super().pages(page_size, order=order, spare=spare)
        return key, key[..., : self.v_head_dim], table

    def decode(self, page_size: int, mask: Mask = CAUSAL, *, ragged: bool = False, **changes: Any) -> AttentionProblem:
        problem = super().decode(page_size, mask, ragged=ragged, **(dict(family=Family.MLA) | changes))
        if self.topk_indices is None:
            return problem
        tokens = self.token_table(problem.key, problem.page_table.key)
        top_k = tokens.shape[1]
        scratch = self.scratch(problem.key, top_k)
        return replace(problem, page_table=None, token_table=tokens, max_kv_len=top_k, scratch=scratch)

    def token_table(self, key: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return int32 [tokens, top_k]: pool slots of the top-k tokens. Entries that do not count point to NaN."""
        page_size = key.shape[2]
        unused = torch.isin(torch.arange(key.shape[0], device=table.device), table).logical_not().nonzero()[0]
        rows = []
        for request, topk in enumerate(self.topk_indices):
            tokens = topk.to(table.device)
            places = table[request, tokens.clamp(min=0) // page_size] * page_size + tokens % page_size
            places = torch.where(tokens < 0, tokens, places)
            rows.append(torch.where(self.counted(request), places, unused * page_size))
        return torch.cat(rows).to(torch.int32)

    def counted(self, request: int) -> torch.Tensor:
        """Return [q_len, top_k]: whether an entry of the top-k indices counts.

        A new token counts no more entries than it sees keys.
        """
        (q_len, top_k), kv_len = self.topk_indices[request].shape, self.kv_lens[request]
        sees = torch.arange(q_len, device=self.device) + kv_len - q_len + 1
        return torch.arange(top_k, device=self.device) < sees[:, None]

    def scratch(self, key: torch.Tensor, capacity: int) -> torch.Tensor:
        """Allocate memory for partials, full of NaN."""
        return self.workspace(capacity).view(torch.float32)

    def workspace(self, capacity: int) -> torch.Tensor:
        """Allocate a caller's workspace, full of NaN."""
        size = mla_workspace_bytes(self.heads, capacity, max(self.q_lens, default=1), self.v_head_dim, self.device)
        return torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device)

    def expected_mla(self, *, sinks: torch.Tensor | None = None) -> Expected:
        if self.topk_indices is None:
            return self.expected(CAUSAL, sinks=sinks)
        parts = [self._expected_of_topk(i, sinks) for i, q_len in enumerate(self.q_lens) if q_len]
        return Expected(*map(torch.cat, zip(*parts, strict=True)))

    def _expected_of_topk(self, request: int, sinks: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return output, rounded output and LSE of a request with top-k indices.

        Each token has its own keys for all heads, so it plays the part of a KV head elsewhere.
        """
        begin, q_len = starts(self.q_lens)[request], self.q_lens[request]
        topk = self.topk_indices[request].to(self.device)
        latent = self.k[request][:, 0]
        latent = torch.cat([latent, latent.new_zeros(1, self.head_dim)])  # the row of -1
        keys = latent[topk.clamp(min=-1)].transpose(0, 1)
        seen = (self.counted(request) & (topk >= 0)).repeat_interleave(self.heads, 0)[:, None]
        arguments = (
            self.q[begin : begin + q_len].reshape(1, q_len * self.heads, self.head_dim),
            keys,
            keys[..., : self.v_head_dim],
            self.scale,
            seen,
            None if sinks is None else sinks.repeat(q_len),
        )
        out, lse = reference.attention(*arguments)
        rounded, _ = reference.attention(*arguments, rounded=self.dtype)
        shape = (q_len, self.heads)
        return out.view(*shape, -1), rounded.view(*shape, -1), lse.view(shape)


@dataclass
class PackedBatch(MlaBatch):
    """A batch with the values of rows of 656 bytes, the cache's format."""

    power_of_two: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        scaled = (k * torch.rand(k.shape[0], 1, 1, device=k.device).add(0.1) for k in self.k)
        self.rows = [
            quantize_fp8_ds_mla(k[..., :LATENT], k[..., LATENT:], power_of_two=self.power_of_two) for k in scaled
        ]
        self.k = [dequantize_fp8_ds_mla(row) for row in self.rows]
        self.v = [k[..., : self.v_head_dim] for k in self.k]

    def request(self, index: int) -> PackedBatch:
        one = super().request(index)
        one.rows = [self.rows[index]]
        return one

    def packed(self, page_size: int) -> torch.Tensor:
        """Return the cache: uint8 [pages, 1, page_size, 656]."""
        _, _, table = self.pages(page_size)
        shape = int(table.max()) + 4, page_size, FP8_DS_MLA_BYTES
        pool = torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=self.device)
        for request, rows in enumerate(self.rows):
            token = torch.arange(len(rows), device=self.device)
            pool[table[request, token // page_size].long(), token % page_size] = rows[:, 0]
        return pool.unsqueeze(1)

    def over_fp8_ds_mla(self, problem: AttentionProblem) -> AttentionProblem:
        """Return a problem of this batch over the 656-byte cache."""
        key, value = mla_kv_views(self.packed(problem.key.shape[2]), self.v_head_dim)
        return replace(problem, key=key, value=value)


def draw_topk(kind: str, q_len: int, kv_len: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """Return [q_len, top_k] tokens of a request, negative for none."""
    generator = torch.Generator().manual_seed(seed)
    nothing = torch.full((q_len, top_k), -1)
    if kind == "none" or kv_len == 0:
        return nothing
    if kind == "any":  # some tokens twice, and gaps
        tokens = torch.randint(kv_len, (q_len, top_k), generator=generator)
        return torch.where(torch.rand(q_len, top_k, generator=generator) < 0.2, -1, tokens)
    if kind == "one":  # the last entry, if a list is that long
        nothing[:, min(kv_len, top_k) - 1] = kv_len - 1
        return nothing
    if kind == "twice":
        return (torch.randint(kv_len, (q_len, 1), generator=generator) // 2).expand(-1, top_k).contiguous()
    # A model chooses each token once, and -1 follows the last.
    chosen = torch.rand(q_len, kv_len, generator=generator).argsort(1)[:, :top_k]
    nothing[:, : chosen.shape[1]] = chosen
    return nothing


def with_topk(
    kind: type[Latent], q_lens: Sequence[int], kv_lens: Sequence[int], top_k: int, topk: str = "any", **options: Any
) -> Latent:
    """Return a batch of some kind. With a ``top_k``, its requests have this number of indices; otherwise attention is
    dense.
    """
    requests = enumerate(zip(q_lens, kv_lens, strict=True))
    topk_indices = [draw_topk(topk, *sizes, top_k, seed) for seed, sizes in requests] if top_k else None
    return kind(q_lens, kv_lens, topk_indices=topk_indices, **options)
