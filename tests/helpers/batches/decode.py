"""Batches for decode: a few new tokens a request over a paged cache, with draft masks and expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.batches.prefill import Batch, Expected, starts
from helpers.oracles import reference
from hopwell import layouts
from hopwell._entries.decoding import workspace_bytes
from hopwell.kernels.problem import AttentionProblem, BlockScales, Family, Mask, MaskKind, PageTable, TokenOffsets

DRAFT = Mask(MaskKind.DRAFT)
FULL = Mask(MaskKind.FULL)
NVFP4 = torch.uint8  # as the entries call it
INT8_UNIT = 40.0  # the element that represents 1


def draft_words(visible: Sequence[torch.Tensor], words: int, generator: torch.Generator) -> torch.Tensor:
    """Return uint16 [tokens, 2 * words] with each request's [q_len, q_len] bits; bits outside every query token are
    random.
    """
    rows = []
    for bits in visible:
        q_len = bits.shape[0]
        noise = torch.randint(0, 2, (q_len, 32 * words), generator=generator, dtype=torch.int64)
        noise[:, :q_len] = bits.cpu()
        weights = 1 << torch.arange(16, dtype=torch.int64)
        rows.append((noise.view(q_len, 2 * words, 16) * weights).sum(2))
    return torch.cat(rows).to(torch.int32).to(torch.uint16)


def nvfp4(values: torch.Tensor) -> layouts.NVFP4Blocks:
    """Return codes and block scales that equal the values if NVFP4 can represent them.

    NaN is in the scales, with codes of all ones.
    """
    data, scales = layouts.quantize_nvfp4(values, 1.0)
    poisoned = scales.float().isnan().repeat_interleave(8, -1)
    return layouts.NVFP4Blocks(data.masked_fill(poisoned, 0xFF), scales)


def aligned(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return a copy whose rows begin at a multiple of this many bytes. Between the rows are NaN scales."""
    gap = -rows.shape[-1] % multiple
    padded = torch.nn.functional.pad(rows.view(torch.uint8), (0, gap), value=0x7F)
    return padded[..., : rows.shape[-1]].view(rows.dtype)


@dataclass
class DecodeBatch(Batch):
    """A batch of new tokens.

    ``drafts`` are [q_len, q_len] of each request, true if a new token sees another; None means causal. With a
    ``kv_dtype`` of 8 bits or NVFP4, K and V hold values that it can represent.
    """

    drafts: Sequence[torch.Tensor] | None = None
    kv_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.k, self.v = ([self._quantized(one) for one in tokens] for tokens in (self.k, self.v))
        if self.drafts is None:
            self.drafts = [torch.ones(n, n, dtype=torch.bool).tril() for n in self.q_lens]

    def request(self, index: int) -> DecodeBatch:
        one = super().request(index)
        one.drafts = [self.drafts[index]]
        return one

    def dcp_rank(self, world: int, rank: int) -> DecodeBatch:
        """Return one DCP rank's keys: every ``world``-th key."""
        one = replace(self, kv_lens=[len(range(rank, n, world)) for n in self.kv_lens])
        one.q, one.k, one.v = self.q, *([own[rank::world] for own in tokens] for tokens in (self.k, self.v))
        return one

    def repeated(self, count: int) -> DecodeBatch:
        """Return the batch with all requests repeated ``count`` times."""
        many = replace(self, q_lens=[*self.q_lens] * count, kv_lens=[*self.kv_lens] * count)
        many.q, many.k, many.v = self.q.repeat(count, 1, 1), self.k * count, self.v * count
        many.drafts = [*self.drafts] * count
        return many

    def _quantized(self, values: torch.Tensor) -> torch.Tensor:
        if self.kv_dtype is torch.int8:
            return (values * INT8_UNIT).round().clamp(-127, 127)
        if self.kv_dtype is NVFP4:
            return layouts.dequantize_nvfp4(*nvfp4(values), dtype=self.dtype)
        return values if self.kv_dtype is None else values.to(self.kv_dtype).to(self.dtype)

    @property
    def scale(self) -> float:
        """Softmax scale that gives logits as large as with other caches."""
        return super().scale / (INT8_UNIT if self.kv_dtype is torch.int8 else 1)

    def _pool(self, *arguments: Any) -> torch.Tensor:
        pool = super()._pool(*arguments)
        if self.kv_dtype is torch.int8:  # int8 cannot represent NaN
            pool = pool.nan_to_num(127)
        return pool if self.kv_dtype in (None, NVFP4) else pool.to(self.kv_dtype)

    def decode(self, page_size: int, mask: Mask = FULL, *, ragged: bool = False, **changes: Any) -> AttentionProblem:
        """Return the batch as a decode problem. With ``ragged``, query lengths come from offsets."""
        key, value, table = self.pages(page_size, order=changes.pop("order", 0))
        scales = None
        if self.kv_dtype is NVFP4:
            key, value = nvfp4(key), nvfp4(value)
            scales = BlockScales(aligned(key.scales, 4), aligned(value.scales, 4))
            key, value = aligned(key.data, 16), aligned(value.data, 16)
        longest = max(self.q_lens, default=0)
        generator = torch.Generator().manual_seed(self.seed)
        words = draft_words(self.drafts, -(-longest // 32), generator).to(self.device)
        problem = dict(
            query=self.q,
            key=key,
            value=value,
            out=self.output(),
            batch=self.size,
            max_q_len=longest,
            max_kv_len=table.shape[1] * page_size,
            q_offsets=TokenOffsets(self.ints(starts(self.q_lens))) if ragged else None,
            kv_lens=self.ints(self.kv_lens),
            page_table=PageTable(table, table),
            mask=mask,
            draft_mask=words if mask.kind is MaskKind.DRAFT else None,
            softmax_scale=self.scale,
            kv_scales=scales,
            scratch=self.scratch(key, table.shape[1] * page_size),
            family=Family.DECODE,
        )
        return AttentionProblem(**(problem | changes))

    def scratch(self, key: torch.Tensor, capacity: int) -> torch.Tensor:
        """Allocate memory for partials, full of NaN."""
        rows = self.heads // self.kv_heads * max(self.q_lens, default=0)
        size = workspace_bytes(rows, self.kv_heads, self.v_head_dim, capacity, key.device)
        return torch.full((size // 4,), float("nan"), device=self.device)

    def expected_decode(
        self, mask: Mask = FULL, *, sinks: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Expected:
        exact, rounded, lse = [], [], []
        begins = starts(self.q_lens)
        for i, q_len in enumerate(self.q_lens):
            q = self.q[begins[i] : begins[i] + q_len]
            seen = self.visible(i, mask)
            arguments = (q, self.k[i], self.v[i], self.scale, seen, sinks)
            out, log = reference.attention(*arguments)
            exact.append(out)
            lse.append(log)
            rounded.append(reference.attention(*arguments, rounded=out_dtype or self.dtype)[0])
        return Expected(torch.cat(exact), torch.cat(rounded), torch.cat(lse))

    def visible(self, request: int, mask: Mask) -> torch.Tensor:
        """Return [q_len, kv_len]: the keys that each new token of a request sees."""
        q_len, kv_len = self.q_lens[request], self.kv_lens[request]
        device = self.q.device
        seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
        key = torch.arange(kv_len, device=device)
        position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
        if mask.window_left >= 0:
            seen &= key >= position - mask.window_left
        if mask.kind is MaskKind.SLIDING_WINDOW:
            seen &= key <= position
        if mask.kind is MaskKind.DRAFT:
            new = min(q_len, kv_len)
            seen[:, kv_len - new :] &= self.drafts[request].to(device)[:, q_len - new :]
        return seen
