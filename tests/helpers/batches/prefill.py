"""Batches of requests with known keys and values, and the ways to pass them to a kernel or an entry point.

All data that a kernel must not read, or must not propagate, is NaN. This data is unused pages, the ends of last pages,
and tokens of a ragged tensor outside every request. Unused table entries are -1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from helpers.oracles import reference
from hopwell.kernels import execute
from hopwell.kernels.problem import (
    AttentionProblem,
    LogSumExp,
    LseLayout,
    Mask,
    MaskKind,
    PageTable,
    Score,
    TokenOffsets,
)

LN_2 = math.log(2.0)
CAUSAL, FULL = Mask(MaskKind.CAUSAL), Mask(MaskKind.FULL)


def window(left: int) -> Mask:
    return Mask(MaskKind.SLIDING_WINDOW, left)


def local(left: int, right: int) -> Mask:
    return Mask(MaskKind.LOCAL, left, window_right=right)


def chunked(size: int) -> Mask:
    return Mask(MaskKind.CHUNKED, chunk=size)


def context_mask(mask: Mask) -> dict[str, Any]:
    """Return the context entry's arguments for a mask without chunks."""
    if mask.kind is MaskKind.LOCAL:
        return dict(causal=False, window_left=mask.window_left, window_right=mask.window_right)
    return dict(causal=False) if mask == FULL else dict(window_left=mask.window_left)


@dataclass
class Batch:
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    v_head_dim: int = 0  # 0: equal to head_dim
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    seed: int = 0
    magnitude: float = 1.0  # of queries and keys
    q: torch.Tensor = field(init=False)  # [tokens, heads, head_dim]
    k: list[torch.Tensor] = field(init=False)  # of each request [kv_len, kv_heads, head_dim]
    v: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def normal(tokens: int, heads: int, dim: int, magnitude: float) -> torch.Tensor:
            values = torch.randn(tokens, heads, dim, generator=generator, device=self.device)
            return (values * magnitude).to(self.dtype)

        self.v_head_dim = self.v_head_dim or self.head_dim
        self.q = normal(sum(self.q_lens), self.heads, self.head_dim, self.magnitude)
        self.k = [normal(n, self.kv_heads, self.head_dim, self.magnitude) for n in self.kv_lens]
        self.v = [normal(n, self.kv_heads, self.v_head_dim, 1.0) for n in self.kv_lens]

    def request(self, index: int) -> Batch:
        """Return a batch of one of the requests."""
        one = replace(self, q_lens=[self.q_lens[index]], kv_lens=[self.kv_lens[index]])
        begin, end = starts(self.q_lens)[index : index + 2]
        one.q, one.k, one.v = self.q[begin:end], [self.k[index]], [self.v[index]]
        return one

    @property
    def size(self) -> int:
        return len(self.q_lens)

    @property
    def tokens(self) -> int:
        return sum(self.q_lens)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    def ints(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(torch.int32).view(dtype).to(self.device)

    def output(self) -> torch.Tensor:
        """Allocate an output full of NaN, so that a missing row is visible."""
        shape = (self.tokens, self.heads, self.v_head_dim)
        return torch.full(shape, math.nan, dtype=self.dtype, device=self.device)

    def pages(self, page_size: int, *, order: int = 0, spare: int = 3) -> tuple[torch.Tensor, ...]:
        """Return K and V pages [pages, kv_heads, page_size, dim], and the table [batch, width].

        ``order`` is the seed of the pages' permutation.
        """
        counts = [-(-n // page_size) for n in self.kv_lens]
        total = sum(counts) + spare
        ids = torch.randperm(total, generator=torch.Generator().manual_seed(order))
        table = torch.full((self.size, max(counts, default=0) + 2), -1, dtype=torch.int32)
        for request, begin in enumerate(starts(counts)[:-1]):
            table[request, : counts[request]] = ids[begin : begin + counts[request]]
        return (
            self._pool(self.k, page_size, counts, ids),
            self._pool(self.v, page_size, counts, ids),
            table.to(self.device),
        )

    def _pool(self, tokens: list[torch.Tensor], page_size: int, counts: list[int], ids: torch.Tensor) -> torch.Tensor:
        pool = torch.full(
            (ids.numel(), page_size, *tokens[0].shape[1:]), math.nan, dtype=self.dtype, device=self.device
        )
        for values, count, begin in zip(tokens, counts, starts(counts), strict=False):
            padded = pool.new_full((count * page_size, *values.shape[1:]), math.nan)
            padded[: values.shape[0]] = values
            pool[ids[begin : begin + count].to(self.device)] = padded.view(count, page_size, *values.shape[1:])
        return pool.transpose(1, 2).contiguous()

    def ragged(self, gap: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Return K and V [tokens, kv_heads, dim], and the starts of requests.

        ``gap`` tokens outside every request precede each request.
        """
        begins = [begin + gap * (i + 1) for i, begin in enumerate(starts(self.kv_lens))]
        total = begins[-1]
        key, value = (
            torch.full((total, *tokens[0].shape[1:]), math.nan, dtype=self.dtype, device=self.device)
            for tokens in (self.k, self.v)
        )
        for begin, k, v in zip(begins, self.k, self.v, strict=False):
            key[begin : begin + k.shape[0]] = k
            value[begin : begin + v.shape[0]] = v
        return key, value, begins

    def problem(self, page_size: int | None = None, mask: Mask = CAUSAL, **changes: Any) -> AttentionProblem:
        """Return the batch as a problem, with paged KV or (``page_size`` None) contiguous KV.

        ``changes`` are fields of the problem.
        """
        common: dict[str, Any] = dict(
            query=self.q,
            out=self.output(),
            batch=self.size,
            max_q_len=max(self.q_lens, default=0),
            max_kv_len=max(self.kv_lens, default=0),
            q_offsets=TokenOffsets(self.ints(starts(self.q_lens))),
            mask=mask,
            softmax_scale=self.scale,
        )
        if page_size is None:
            key, value, begins = self.ragged()
            common |= dict(
                key=key.transpose(0, 1)[None],
                value=value.transpose(0, 1)[None],
                k_offsets=TokenOffsets(self.ints(begins)),
                kv_lens=None,
            )
        else:
            key, value, table = self.pages(page_size)
            common |= dict(key=key, value=value, page_table=PageTable(table, table), kv_lens=self.ints(self.kv_lens))
        return AttentionProblem(**(common | changes))

    def ragged_lse(self, natural: bool = True) -> LogSumExp:
        rows = torch.full((self.tokens, self.heads), math.nan, device=self.device)
        return LogSumExp(rows, LseLayout.RAGGED, natural=natural)

    def statistics(self) -> torch.Tensor:
        return torch.full((self.tokens, self.heads, 2), math.nan, device=self.device)

    def expected(
        self,
        mask: Mask = CAUSAL,
        *,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        score: Score = reference.PLAIN,
    ) -> Expected:
        exact, rounded, lse = [], [], []
        for q, k, v, seen in self.requests(mask):
            arguments = (q, k, v, self.scale if scale is None else scale, seen, sinks)
            out, log = reference.attention(*arguments, score=score)
            exact.append(out)
            lse.append(log)
            rounded.append(reference.attention(*arguments, score=score, rounded=out_dtype or self.dtype)[0])
        return Expected(torch.cat(exact), torch.cat(rounded), torch.cat(lse))

    def expected_statistics(
        self, mask: Mask = CAUSAL, *, scale: float | None = None, score: Score = reference.PLAIN
    ) -> torch.Tensor:
        scale = self.scale if scale is None else scale
        return torch.cat([reference.statistics(q, k, scale, seen, score) for q, k, _, seen in self.requests(mask)])

    def requests(self, mask: Mask) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield q, k and v of each request, and the mask of keys that its rows see."""
        for request, begin in enumerate(starts(self.q_lens)[:-1]):
            q_len, kv_len = self.q_lens[request], self.kv_lens[request]
            seen = reference.visible(q_len, kv_len, mask, self.q.device)
            yield self.q[begin : begin + q_len], self.k[request], self.v[request], seen


@dataclass
class Expected:
    out: torch.Tensor  # float64
    rounded: torch.Tensor  # the same with the roundings that every 16-bit kernel has
    lse: torch.Tensor  # natural

    def of_tokens(self, tokens: slice) -> Expected:
        return Expected(self.out[tokens], self.rounded[tokens], self.lse[tokens])

    def check(self, out: torch.Tensor, factor: float = 1.0) -> None:
        """Check that ``out`` is within twice the 16-bit rounding error of ``factor`` times the expected output."""
        assert out.shape == self.out.shape
        exact, got = self.out * factor, out.double()
        assert not got.isnan().any(), f"{int(got.isnan().any(2).any(1).sum())} rows hold NaN"
        if exact.numel() == 0:
            return
        unit = torch.finfo(out.dtype).eps
        allowed = 2 * (self.rounded * factor - exact).norm() + 1e-2 * unit * exact.norm()
        assert (got - exact).norm() <= allowed, f"error {(got - exact).norm() / exact.norm():.2e} of the norm"
        worst, largest = (got - exact).abs().max(), exact.abs().max()
        assert worst <= 4 * unit * largest, f"one element is off by {worst:.2e}, the largest is {largest:.2e}"
        unseen = exact.abs().amax(2) == 0
        assert (got[unseen] == 0).all(), "a row without visible keys is not zero"

    def check_lse(self, lse: torch.Tensor, *, natural: bool = True) -> None:
        """Check that ``lse`` [tokens, heads] matches; rows without visible keys have -inf."""
        want = self.lse if natural else self.lse / LN_2
        assert lse.shape == want.shape
        infinite = want == -math.inf
        assert (lse[infinite] == -math.inf).all()
        error = (lse.double() - want)[~infinite].abs()
        assert (error <= 1e-5 * (1 + want[~infinite].abs())).all(), f"LSE off by {error.max():.2e}"

    def check_merged(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], *, natural: bool) -> None:
        """Check that the parts (output, log-sum-exp) of disjoint keys combine to the expected output."""
        outs, logs = (torch.stack(list(values)).double() for values in zip(*parts, strict=True))
        logs *= 1.0 if natural else LN_2
        lse = logs.logsumexp(0)
        weights = (logs - lse).exp().nan_to_num(0.0)  # rows for which no rank sees a key
        assert (outs[logs == -math.inf] == 0).all(), "a row without visible keys is not zero"
        self.check((weights[..., None] * outs).sum(0).to(parts[0][0].dtype))
        self.check_lse(lse)


def check_statistics(got: torch.Tensor, want: torch.Tensor) -> None:
    """Check that statistics [tokens, heads, 2] match :meth:`Batch.expected_statistics`."""
    (largest, total), (want_largest, want_total) = got.double().unbind(2), want.unbind(2)
    unseen = want_largest == -math.inf
    assert torch.equal(largest == -math.inf, unseen)
    error = (largest - want_largest)[~unseen].abs()
    assert (error <= 1e-5 * (1 + want_largest[~unseen].abs())).all(), f"the largest logit is off by {error.max():.2e}"
    error = (total - want_total).abs()
    assert (error <= 1e-4 * want_total).all(), f"the sum is off by {error.max():.2e}"


def same(problem: AttentionProblem, **changes: object) -> None:
    """Check that the problem gives bitwise the same output after the changes."""
    before = execute(problem)
    after = execute(replace(problem, out=torch.full_like(before, math.nan), **changes))
    assert not before.isnan().any()
    assert torch.equal(before, after)


def check_requests_alone(data: Any, out: torch.Tensor, *ways: object, **options: Any) -> None:
    """Check that each request, decoded alone in these ways, has bitwise the output that it has in the batch."""
    begins = starts(data.q_lens)
    for index in range(data.size):
        alone = execute(data.request(index).decode(*ways, **options))
        assert torch.equal(out[begins[index] : begins[index + 1]], alone), index


def starts(lengths: Sequence[int]) -> list[int]:
    out = [0]
    for n in lengths:
        out.append(out[-1] + n)
    return out
