"""Batches for prefill and MLA in e4m3, with bounds on the error against float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from helpers.batches.mla import MlaBatch
from helpers.batches.prefill import CAUSAL, Batch, Expected, starts
from helpers.oracles import reference
from hopwell.kernels.problem import AttentionProblem, Mask, Score

E4M3 = torch.float8_e4m3fn
TILE = 64  # keys whose weights are rounded together
# A weight rounded to e4m3 is off by half a unit in the last of four bits. Below 2^-14 of its tile's largest weight, it
# is off by half of the smallest step.
WEIGHT_ERROR, SMALLEST_WEIGHT = 2.0**-4, 2.0**-18
# The tensor cores add 32 products of 8-bit elements at a time. They keep 13 or more bits of mantissa after the leading
# bit of the largest summand, and truncate the rest.
SUMMAND_ERROR, SUMMED_AT_ONCE = 2.0**-13, 32
LOGIT_ERROR = 2.0**-9  # error of prefill's logits, by the same sums, for logits of ordinary size
# Error of a whole prefill output. Each weight errs on its own, so the whole is far better than each element.
# Measurements at head dim 128 gave 2.0e-2 to 2.3e-2, and 2.4e-2 for FlashAttention 3; see docs/kernels/prefill.md.
WHOLE_ERROR = 2.4e-2


def round_keys_and_values(data: Batch) -> None:
    """Give a 16-bit batch the keys and values of an e4m3 cache."""
    for tensors in (data.k, data.v):
        tensors[:] = [values.to(E4M3).to(data.dtype) for values in tensors]


def with_fp8_cache(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem with keys and values in e4m3. NaN stays NaN."""
    return replace(problem, key=to_e4m3(problem.key), value=to_e4m3(problem.value))


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return the values in e4m3, with rows of whole 16 bytes, as TMA needs them; NaN fills the rest of a row."""
    columns, nan = values.shape[-1], 0x7F
    if columns % 16 == 0:
        return values.to(E4M3)
    padded = torch.nn.functional.pad(values.to(E4M3).view(torch.uint8), (0, -columns % 16), value=nan)
    return padded.view(E4M3)[..., :columns]


class Fp8Batch(Batch):
    """A batch of values that e4m3 can represent, in 16 bits for the reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q = self.q.to(E4M3).to(self.dtype)
        round_keys_and_values(self)

    def in_fp8(self, page_size: int | None, mask: Mask, out: torch.dtype, **changes: Any) -> AttentionProblem:
        """Return the batch as a problem in e4m3, with an output full of NaN."""
        wide = self.problem(page_size, mask, **changes)
        assert wide.out is not None
        narrow = {name: to_e4m3(getattr(wide, name)) for name in ("query", "key", "value")}
        return replace(wide, out=wide.out.to(out), **narrow)

    def check_fp8(
        self,
        out: torch.Tensor,
        mask: Mask,
        *,
        factor: float = 1.0,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        score: Score = reference.PLAIN,
        whole_error: float = WHOLE_ERROR,
    ) -> None:
        """Check every element, and the whole output of each request, against ``factor`` times attention.

        The bound of an element follows from rounded weights and a rounded output. The whole output is within
        ``whole_error`` of its norm.
        """
        unit = torch.finfo(out.dtype).eps / 2
        begins = starts(self.q_lens)
        for (q, k, v, seen), begin in zip(self.requests(mask), begins, strict=False):
            options = dict(scale=self.scale if scale is None else scale, seen=seen, sinks=sinks, score=score)
            exact = reference.attention(q, k, v, **options)[0] * factor
            sizes = reference.attention(q, k, v.abs(), **options)[0] * factor
            largest = v.double().abs().sum(0).max() * factor if v.numel() else 0.0
            got = out[begin : begin + q.shape[0]].double()
            logit_error = max(LOGIT_ERROR, largest_logit_error(q, k, options["scale"]))
            allowed = (WEIGHT_ERROR + logit_error) * sizes + SMALLEST_WEIGHT * largest
            allowed = allowed + unit * (exact.abs() + allowed) + torch.finfo(out.dtype).smallest_normal
            assert ((got - exact).abs() <= allowed).all(), f"off by {((got - exact).abs() / allowed).max():.2f} of it"
            if exact.numel():
                # Subnormal elements are off by up to half of the smallest step, however small they are.
                smallest = torch.finfo(out.dtype).smallest_normal * torch.finfo(out.dtype).eps
                error = (got - exact).norm()
                most = (whole_error + unit) * exact.norm() + smallest / 2 * exact.numel() ** 0.5
                assert error <= most, f"the whole is off by {error:.2e}, of {most:.2e} at most"

    def check_fp8_lse(
        self,
        lse: torch.Tensor,
        mask: Mask,
        *,
        sinks: torch.Tensor | None = None,
        score: Score = reference.PLAIN,
    ) -> None:
        """Check a natural log-sum-exp [tokens, heads] within the error of logits."""
        begins = starts(self.q_lens)
        for (q, k, v, seen), begin in zip(self.requests(mask), begins, strict=False):
            want = reference.attention(q, k, v, self.scale, seen, sinks, score=score)[1]
            got = lse[begin : begin + q.shape[0]].double()
            infinite = want == -math.inf
            assert (got[infinite] == -math.inf).all()
            allowed = max(LOGIT_ERROR, largest_logit_error(q, k, self.scale)) + 1e-5 * want.abs()
            assert ((got - want).abs() <= allowed)[~infinite].all(), "the log-sum-exp is wrong"


@dataclass
class Fp8MlaBatch(MlaBatch):
    """Queries, keys and values that e4m3 can represent, in 16 bits for the reference."""

    kv_dtype: torch.dtype | None = E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.q = self.q.to(E4M3).to(self.dtype)

    def decode(self, page_size: int, mask: Mask = CAUSAL, *, ragged: bool = False, **changes: Any) -> AttentionProblem:
        problem = super().decode(page_size, mask, ragged=ragged, **changes)
        return replace(problem, query=self.q.to(E4M3))

    def keep(self) -> Fp8MlaBatch:
        """Round keys that a test has changed, and update the values."""
        for k in self.k:
            k.copy_(k.to(E4M3))
        return self

    @classmethod
    def with_light_keys(cls, heads: int) -> Fp8MlaBatch:
        """Return a request with 128 heavy keys whose values are 0. The other 512 keys are lighter by e^18, at the scale
        1 / sqrt(192)."""
        data = cls([1], [640], heads=heads, device="cpu")
        data.q.zero_()
        data.q[..., -1] = 1.0
        data.k[0][:, 0, -1] = 0.0
        data.k[0][:128, 0, -1] = 256.0
        data.k[0][:128, 0, :512] = 0.0
        return data.keep()

    def expected_mla(self, *, sinks: torch.Tensor | None = None, scale: float | None = None) -> Fp8Expected:
        parts = [self._expected(i, sinks, self.scale if scale is None else scale) for i in range(self.size)]
        return Fp8Expected(*map(torch.cat, zip(*(part for part in parts if len(part[0])), strict=True)))

    def _expected(self, request: int, sinks: torch.Tensor | None, scale: float) -> tuple[torch.Tensor, ...]:
        """Return the fields of a request's expected result."""
        begin, q_len = starts(self.q_lens)[request], self.q_lens[request]
        rows = [self._row(request, token, begin, sinks, scale) for token in range(q_len)]
        if rows:
            return tuple(map(torch.stack, zip(*rows, strict=True)))
        return (self.q[begin:begin],) * 6

    def _row(
        self, request: int, token: int, begin: int, sinks: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the fields of a new token's expected result."""
        q, keys = self.q[begin + token], self.seen_keys(request, token)
        values = keys[:, : self.v_head_dim]
        seen = torch.ones(1, len(keys), dtype=torch.bool, device=keys.device)
        fields = [
            reference.attention(q[None], keys[:, None], v[:, None], scale, seen, sinks) for v in (values, values.abs())
        ]
        (out, lse), (sizes, _) = fields
        largest = values.double().abs().sum(0).amax() if len(values) else keys.new_zeros((), dtype=torch.float64)
        modelled = attention_by_tiles(q, keys, values, scale, E4M3, sinks)
        logit_error = self.head_dim // SUMMED_AT_ONCE * SUMMAND_ERROR * scale * largest_sum(q, keys)
        return out[0], modelled, lse[0], sizes[0], largest.expand(self.heads), logit_error

    def seen_keys(self, request: int, token: int) -> torch.Tensor:
        """Return [keys, head_dim] that a new token of a request sees, in the order of its top-k indices."""
        latent = self.k[request][:, 0]
        if self.topk_indices is None:
            return latent[: max(self.kv_lens[request] - self.q_lens[request] + token + 1, 0)]
        topk = self.topk_indices[request][token].to(self.device)
        return latent[topk[self.counted(request)[token] & (topk >= 0)]]


def largest_sum(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return [heads]: an upper bound of partial sums in a product of a query and a key, before scaling."""
    if not len(keys):
        return q.new_zeros(len(q), dtype=torch.float64)
    blocks = zip(q.double().split(SUMMED_AT_ONCE, 1), keys.double().split(SUMMED_AT_ONCE, 1), strict=True)
    sums = torch.stack([one @ other.T for one, other in blocks]).cumsum(0)
    return sums.abs().amax((0, 2))


def largest_logit_error(q: torch.Tensor, k: torch.Tensor, scale: float) -> float:
    """Return an upper bound of the error of logits of queries [tokens, heads, head_dim] and keys, by fp8 MMA."""
    if not len(q) or not len(k):
        return 0.0
    group = q.shape[1] // k.shape[1]
    sums = torch.stack([largest_sum(q[:, head], k[:, head // group]) for head in range(q.shape[1])])
    return float(q.shape[2] // SUMMED_AT_ONCE * SUMMAND_ERROR * abs(scale) * sums.max())


def attention_by_tiles(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    weight_type: torch.dtype,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output [heads, columns] in bfloat16, by float32 products with tiles of weights in ``weight_type``.

    Weights are relative to the largest logit so far, so none exceeds 1. Row sums add weights before rounding.
    """
    logits = q.float() @ keys.float().T * scale
    largest = logits.new_full((len(q), 1), -torch.inf)
    total, out = torch.zeros_like(largest), logits.new_zeros(len(q), values.shape[1])
    for tile, tile_values in zip(logits.split(TILE, 1), values.float().split(TILE), strict=True):
        if not len(tile_values):
            continue
        before, largest = largest, torch.maximum(largest, tile.amax(1, keepdim=True))
        weights, moved = (tile - largest).exp(), (before - largest).exp()
        total = total * moved + weights.sum(1, keepdim=True)
        out = out * moved + weights.to(weight_type).float() @ tile_values
    if sinks is not None:
        total += (sinks.float()[:, None] - largest.nan_to_num(neginf=0.0)).exp()
    return (out / total).nan_to_num(0.0).bfloat16()


@dataclass
class Fp8Expected(Expected):
    """Expected results; ``rounded`` has FlashMLA's arithmetic."""

    sizes: torch.Tensor  # attention to the absolute values
    largest: torch.Tensor  # [tokens, heads]: the largest sum of absolute values over all columns
    logit_error: torch.Tensor  # [tokens, heads]

    def of_tokens(self, tokens: slice) -> Fp8Expected:
        return Fp8Expected(*(getattr(self, name)[tokens] for name in vars(self)))

    def check(self, out: torch.Tensor, factor: float = 1.0) -> None:
        """Check that every element is within the error of rounded weights and a rounded output of ``factor`` times
        attention.

        The whole output is as close as FlashMLA's arithmetic.
        """
        assert out.shape == self.out.shape
        exact, got = self.out * factor, out.double()
        assert not got.isnan().any(), f"{int(got.isnan().any(2).any(1).sum())} rows hold NaN"
        if exact.numel() == 0:
            return
        unit = torch.finfo(out.dtype).eps / 2
        size, largest = self.sizes * abs(factor), self.largest[..., None] * abs(factor)
        allowed = (WEIGHT_ERROR + self.logit_error[..., None]) * size + SMALLEST_WEIGHT * largest
        allowed = allowed + unit * (exact.abs() + allowed) + torch.finfo(out.dtype).smallest_normal
        error = (got - exact).abs()
        assert (error <= allowed).all(), f"off by {(error / allowed).max():.2f} of what is allowed"
        theirs = (self.rounded.double() * factor - exact).norm() + unit * exact.norm()
        assert (got - exact).norm() <= theirs, f"error {(got - exact).norm() / theirs:.2f} of FlashMLA's"
        unseen = exact.abs().amax(2) == 0
        assert (got[unseen] == 0).all(), "a row without visible keys is not zero"

    def check_lse(self, lse: torch.Tensor, *, natural: bool = True) -> None:
        want = self.lse if natural else self.lse / math.log(2.0)
        assert lse.shape == want.shape
        infinite = want == -math.inf
        assert (lse[infinite] == -math.inf).all()
        allowed = self.logit_error / (1.0 if natural else math.log(2.0)) + 1e-5 * (1 + want.abs())
        error = (lse.double() - want).abs()
        assert (error <= allowed)[~infinite].all(), f"LSE off by {(error / allowed)[~infinite].max():.2f} of it"
