"""Batches in e4m3 and NVFP4 for any entry: stored data, its meaning in float64, and expected results.

``q``, ``k`` and ``v`` of a batch are the values of the stored numbers without tensor scales. A call receives these
scales as ``bmm1_scale`` and ``bmm2_scale``. All data that must not be read is NaN, block scales included. 4-bit codes
cannot represent NaN, so these codes are all ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers.batches.prefill import CAUSAL, Batch, Expected, context_mask, starts
from helpers.oracles import reference
from hopwell import FP4Tensor, layouts
from hopwell.kernels import support
from hopwell.kernels.config.base import KvType
from hopwell.kernels.problem import Mask, Score
from hopwell.kernels.warp_mma.prefill.config import dequantizes_by_warpgroup

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NVFP4 = torch.uint8  # as the entries call it
LN_2 = math.log(2.0)
SIGNED_ZERO = 0x80  # of e4m3
POISONED_CODES = 0xFF  # -6 and -6
P_SCALE = 256.0  # scale that lets weights of at most 1 use the range of e4m3


@dataclass
class LowPrecisionBatch(Batch):
    """A batch with ``q_dtype`` queries and ``kv_dtype`` keys and values, with scales of whole tensors."""

    q_dtype: torch.dtype = E4M3
    kv_dtype: torch.dtype = E4M3
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0
    softmax_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    stored_k: list[layouts.NVFP4Blocks | torch.Tensor] = field(init=False)  # of each request
    stored_v: list[layouts.NVFP4Blocks | torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q = self.q.to(self.q_dtype)
        self.store(self.k, self.v)

    def store(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        """Store these keys and values, rounded to the cache's type."""
        self.stored_k, self.stored_v = ([self._rounded(one) for one in part] for part in (k, v))
        self.k, self.v = ([meaning(one) for one in part] for part in (self.stored_k, self.stored_v))

    def _rounded(self, values: torch.Tensor) -> layouts.NVFP4Blocks | torch.Tensor:
        if self.kv_dtype is NVFP4:
            return layouts.quantize_nvfp4(values.float(), 1.0)
        return values.to(self.kv_dtype)

    @property
    def scale(self) -> float:
        """Softmax scale of the stored numbers, without scales of whole tensors."""
        return self.softmax_scale or super().scale

    @property
    def bmm1_scale(self) -> float:
        return self.scale * self.q_scale * self.k_scale

    @property
    def bmm2_scale(self) -> float:
        return self.v_scale

    def options(self, mask: Mask) -> dict[str, Any]:
        """Return the context entry's arguments for a mask without chunks, and for the scales of whole tensors."""
        return dict(bmm1_scale=self.bmm1_scale, bmm2_scale=self.bmm2_scale, **context_mask(mask))

    # -- memory
    def pages(self, page_size: int, *, order: int = 0, spare: int = 3) -> tuple[torch.Tensor, ...]:
        """Return K and V pages [pages, kv_heads, page_size, stored dim], and the table [batch, width]
        that ends in -1.
        """
        counts, ids, table = self._table(page_size, order, spare)
        places = (page_size, counts, ids)
        return self._stored_pool(self.stored_k, *places), self._stored_pool(self.stored_v, *places), table

    def block_scales(
        self, page_size: int, v_scale_layout: str, *, order: int = 0, spare: int = 3
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block scales of NVFP4 pages in the same order, [pages, kv_heads, page_size, dim / 16].

        V's scales are "linear" for XQA and "interleaved" for the context entry.
        """
        counts, ids, _ = self._table(page_size, order, spare)
        nan = torch.tensor(math.nan).to(E4M3).view(torch.uint8).item()
        key, value = (
            pooled([blocks.scales for blocks in part], page_size, counts, ids, nan)
            for part in (self.stored_k, self.stored_v)
        )
        if v_scale_layout == layouts.VScaleLayout.INTERLEAVED.value:
            value = layouts.interleave_v_scales(value, "HND")
        return key, value

    def ragged(self, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Return K and V [tokens, kv_heads, dim] of ``kv_dtype`` with ``gap`` NaN tokens before each request, and the
        starts.
        """
        begins = [begin + gap * (i + 1) for i, begin in enumerate(starts(self.kv_lens))]
        dense = []
        for part in (self.stored_k, self.stored_v):
            rows = torch.full((begins[-1], *part[0].shape[1:]), math.nan, device=self.device).to(self.kv_dtype)
            for begin, values in zip(begins, part, strict=False):
                octets(rows)[begin : begin + len(values)] = octets(values)
            dense.append(rows)
        return dense[0], dense[1], begins

    def _table(self, page_size: int, order: int, spare: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        counts = [-(-n // page_size) for n in self.kv_lens]
        ids = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(order))
        table = torch.full((self.size, max(counts, default=0) + 2), -1, dtype=torch.int32)
        for row, begin, count in zip(table, starts(counts), counts, strict=False):
            row[:count] = ids[begin : begin + count]
        return counts, ids, table.to(self.device)

    def _stored_pool(self, part: Sequence[Any], *places: Any) -> torch.Tensor:
        if self.kv_dtype is NVFP4:
            return pooled([blocks.data for blocks in part], *places, POISONED_CODES)
        nan = octets(torch.tensor([math.nan]).to(self.kv_dtype)).tolist()
        return pooled(part, *places, nan[-1]) if len(nan) == 1 else super()._pool(list(part), *places)

    # -- expected results
    def expected_low(
        self,
        mask: Mask = CAUSAL,
        *,
        sinks: torch.Tensor | None = None,
        score: Score = reference.PLAIN,
    ) -> ExpectedLow:
        """Return attention over the stored values with all scales.

        Weights of e4m3 products are e4m3; other weights have 16 bits.
        """
        exact, rounded, lse = [], [], []
        for q, k, v, seen in self.requests(mask):
            arguments = (q, k, v, self.bmm1_scale, seen, sinks)
            out, log = reference.attention(*arguments, score=score)
            exact.append(out)
            lse.append(log)
            rounded.append(self._with_rounded_weights(q, k, v, seen, sinks, score))
        scale = self.bmm2_scale
        return ExpectedLow(torch.cat(exact) * scale, torch.cat(rounded) * scale, torch.cat(lse))

    def _with_rounded_weights(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: Any, score: Score
    ) -> torch.Tensor:
        """Return [q_len, heads, v_head_dim] with weights, relative to the largest, rounded to the tensor cores' input
        type.
        """
        logits = reference.logits(q, k, self.bmm1_scale, score).masked_fill(~seen, -math.inf)
        if sinks is not None:
            sink = sinks.double()[:, None, None].expand(-1, logits.shape[1], 1)
            logits = torch.cat([logits, sink], 2)
            v = torch.cat([v.double(), v.new_zeros(1, *v.shape[1:], dtype=torch.float64)])
        if not logits.shape[2]:
            return logits.new_zeros(q.shape[0], self.heads, v.shape[2])
        top = logits.amax(2, keepdim=True)
        weights = torch.exp(logits - torch.where(top == -math.inf, 0.0, top))
        total = weights.sum(2, keepdim=True)
        if self.q_dtype is E4M3:
            taken = (weights * P_SCALE).float().to(E4M3).double() / P_SCALE
        else:
            taken = weights.to(self.q_dtype).double()
        products = reference.by_kv_head(taken, v.double().transpose(0, 1))
        return torch.where(total > 0, products / total, 0.0).transpose(0, 1)


@dataclass
class ExpectedLow(Expected):
    """Expected results; ``rounded`` is attention with rounded weights."""

    def error(self, out: torch.Tensor) -> float:
        """Return the relative error of a whole output, 0 if exact."""
        error = (out.double() - self.out).norm()
        return float(error / self.out.norm()) if error else 0.0

    def check(self, out: torch.Tensor, most: float = math.inf) -> None:
        """Check that ``out`` is within twice the rounding error of weights and output, and within ``most``."""
        assert out.shape == self.out.shape
        got = out.double()
        assert not got.isnan().any(), f"{int(got.isnan().any(2).any(1).sum())} rows hold NaN"
        if not self.out.numel():
            return
        ideal = self.rounded.to(out.dtype).double() - self.out
        unit = torch.finfo(out.dtype).eps
        error = got - self.out
        assert error.norm() <= 2 * ideal.norm() + 1e-2 * unit * self.out.norm(), f"error {self.error(out):.2e}"
        assert self.error(out) <= most, f"error {self.error(out):.2e}"
        worst = 4 * float(ideal.abs().max()) + 4 * unit * float(self.out.abs().max())
        assert error.abs().max() <= worst, f"one element is off by {error.abs().max():.2e}"
        assert (got[self.out.abs().amax(2) == 0] == 0).all(), "a row without visible keys is not zero"


ORDER_ERROR = 2e-3  # of a whole 16-bit output: the effect of another order of sums on rounding


def check_bits_of_16_bits(out: torch.Tensor, wide: torch.Tensor, qk_columns: int, kv_type: KvType) -> None:
    """Check ``out`` against the 16-bit result of the same keys and values; keys have ``qk_columns`` columns.

    The bits are equal if products have columns in the same order. Kernels of sm_120 in which each warp dequantizes for
    itself have another order.
    """
    arch = support.arch_of(out.device)
    if arch in support.HOPPER or dequantizes_by_warpgroup((qk_columns, out.shape[-1]), kv_type):
        assert torch.equal(out, wide)
    else:
        assert (out.double() - wide.double()).norm() <= ORDER_ERROR * wide.double().norm()


FLOAT_ERROR = 2.0**-21  # of a number multiplied by a row's factors in another order


def check_nvfp4_output(out: FP4Tensor, half: torch.Tensor, o_sf_scale: float) -> None:
    """Check that ``out`` has the quantizer's scales and codes for ``half``, the same output in float16.

    Rounding to float16 moves a value by up to half a unit. If this crosses an edge between two scales or codes, either
    is correct.
    """
    x = half.float()
    unit = torch.exp2(torch.frexp(x).exponent.clamp(min=-13) - 11.0)  # in the last place of float16
    off = unit / 2 + FLOAT_ERROR * x.abs()
    tokens, heads, dim = x.shape
    columns = heads * dim // layouts.NVFP4_BLOCK
    scales = layouts.unswizzle_128x4(out.scale, tokens, columns, out.scale_start_index).unflatten(1, (heads, -1))
    sizes = ((x.abs() - off).clamp(min=0), x.abs() + off)
    least, most = (layouts.quantize_nvfp4(size * o_sf_scale, 1.0).scales.float() for size in sizes)
    _check_between(scales.float(), least, most, "scales")
    assert not (scales.view(torch.uint8) == SIGNED_ZERO).any()

    factors = scales.float().repeat_interleave(layouts.NVFP4_BLOCK, -1)
    ends = (torch.where(factors == 0, 0.0, value * o_sf_scale / factors) for value in (x - off, x + off))
    least_code, most_code = (layouts.encode_e2m1(end) for end in ends)
    codes = layouts.unpack_e2m1(out.data)
    _check_between(*map(layouts.decode_e2m1, (codes, least_code, most_code)), "codes")
    settled = least_code == most_code
    assert torch.equal(codes[settled], least_code[settled])  # zeros have their signs


def check_nvfp4_near(out: FP4Tensor, expected: torch.Tensor, o_sf_scale: float, error: float) -> None:
    """Check an NVFP4 output against ``expected`` in float64.

    Before rounding, an element is within ``error`` of the largest one. The whole is hardly worse than the expected
    output in NVFP4, and an element is within the largest step of its block.
    """
    if not expected.numel():
        return
    parts = layouts.quantize_nvfp4_output(expected.float(), o_sf_scale)
    ideal = layouts.dequantize_nvfp4_output(*parts, o_sf_scale).double()
    got = layouts.dequantize_nvfp4_output(out.data, out.scale, o_sf_scale, out.scale_start_index).double()
    assert not got.isnan().any()
    off, least = got - expected, 2.0**-9 / o_sf_scale  # the smallest scale
    allowed = 1.1 * (ideal - expected).norm() + 2 * error * expected.norm()
    assert off.norm() <= allowed, f"the whole is off by {off.norm():.2e}, of {allowed:.2e} at most"
    blocks = expected.abs().unflatten(-1, (-1, layouts.NVFP4_BLOCK)).amax(-1, keepdim=True)
    steps = blocks / 4 + 4 * least + 4 * error * expected.abs().max()
    assert (off.unflatten(-1, (-1, layouts.NVFP4_BLOCK)).abs() <= steps).all(), "an element is far off"


def _check_between(got: torch.Tensor, least: torch.Tensor, most: torch.Tensor, what: str) -> None:
    wrong = ~((got >= least) & (got <= most))
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} {what} are wrong"
    assert (least == most).float().mean() > 0.9, f"rounding leaves too many {what} open"


def meaning(stored: layouts.NVFP4Blocks | torch.Tensor) -> torch.Tensor:
    """Return stored numbers in float64, without rounding."""
    if isinstance(stored, torch.Tensor):
        return stored.double()
    # A code and its scale factor have six significant bits together, so float32 is exact.
    return layouts.dequantize_nvfp4(stored.data, stored.scales).double()


def octets(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor whose last dimension is contiguous."""
    return values.view(torch.uint8)


def pooled(
    tokens: Sequence[torch.Tensor], page_size: int, counts: Sequence[int], ids: torch.Tensor, poison: int
) -> torch.Tensor:
    """Return 8-bit tokens [kv_len, kv_heads, width] of each request in pages [pages, kv_heads, page_size, width].

    All other bytes are ``poison``.
    """
    first = tokens[0]
    shape = (ids.numel(), page_size, *first.shape[1:])
    pool = torch.full(shape, poison, dtype=torch.uint8, device=first.device)
    for values, count, begin in zip(tokens, counts, starts(counts), strict=False):
        pages = torch.full((count * page_size, *first.shape[1:]), poison, dtype=torch.uint8, device=first.device)
        pages[: len(values)] = octets(values)
        pool[ids[begin : begin + count].to(first.device)] = pages.view(count, *shape[1:])
    return pool.transpose(1, 2).contiguous().view(first.dtype)


# -- difficult rows
def with_scores(batch: LowPrecisionBatch, scores: Sequence[torch.Tensor]) -> LowPrecisionBatch:
    """Return the batch with base-2 logits ``scores`` [kv_len] of each request in all of its rows.

    Logits are rounded to the cache's type; integers up to 16 are exact in e4m3. Values stay unchanged.
    """
    batch.softmax_scale = LN_2 / (batch.q_scale * batch.k_scale)
    q = torch.zeros(batch.q.shape, device=batch.device)
    q[..., 0] = 1.0
    batch.q = q.to(batch.q_dtype)
    keys = []
    for k, wanted in zip(batch.k, scores, strict=True):
        keys.append(torch.zeros_like(k))
        keys[-1][..., 0] = wanted.to(k)[:, None]
    batch.store(keys, batch.v)
    return batch


def light_weights(kv_len: int, gap: int = 12, at: int = 0) -> torch.Tensor:
    """Return scores with one key 2^gap times as heavy as any other.

    2^gap other keys together have half of the weight. All of it is lost if 2^-gap rounds to 0: e4m3 begins at 2^-9.
    """
    scores = torch.zeros(kv_len)
    scores[at] = gap
    return scores


def rising(kv_len: int, tile: int, rise: float, *, to_the_left: bool) -> torch.Tensor:
    """Return scores that rise by ``rise`` from each tile of ``tile`` keys to the next, from 0.

    Weights exceed 1 by a factor of 2^rise if the reference is stale by ``rise``.
    """
    steps = torch.arange(kv_len) // tile
    return rise * (steps.max() - steps if to_the_left else steps).float()


def at_tile_edges(batch: LowPrecisionBatch, tile: int, query: float = 16.0, key: float = -7.0) -> LowPrecisionBatch:
    """Return the batch with Q filled with ``query``, and the first and last key of each tile filled with ``key``.

    Their logits are far below the logits of other keys, and are the only ones of rows that see no other key.
    """
    batch.q = torch.full(batch.q.shape, query, device=batch.device).to(batch.q_dtype)
    keys = []
    for k in batch.k:
        place = torch.arange(len(k), device=k.device) % tile
        keys.append(k.masked_fill(((place == 0) | (place == tile - 1))[:, None, None], key))
    batch.store(keys, batch.v)
    return batch
