"""What every entry point reduces its arguments to: one attention problem over canonical strided views.

No kernel sees an API name. HND and NHD, stacked and separate caches, packed QKV, element offsets, cumulative lengths
and the rest have become views and token counts by the time a :class:`AttentionProblem` exists.

Notation: T query tokens in all, B requests, H query heads, Hkv KV heads, D head dimension (Dqk and Dv where they
differ), P page-table width.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from hopwell.kernels.masks import Mask as Mask
from hopwell.kernels.masks import MaskKind as MaskKind

MAX_KEYS = 1 << 30  # of a request, where pages hold them: positions of its keys and rows, and sums of two, fit 32 bits

# The fast tanh rounds to 2^-23 of the cap, which under larger ones is more than bfloat16 makes of common logits.
SMALL_CAP = 512.0
# c tanh(x / c) is x in float32 for all x below c / 2^12. The softmax of larger logits is that of their rounding.
LARGEST_CAP = 2.0**64


class Family(enum.Enum):
    """A family of kernels, see ``registry.py``."""

    PREFILL = "prefill"
    DECODE = "decode"
    MLA = "mla"  # decode whose value is part of the key
    APPEND = "append"  # new tokens into a cache, see append_config.py


class ScoreKind(enum.Enum):
    """What becomes of the scores x = softmax_scale * q k^T before the softmax."""

    SCALED = "scaled"  # x
    SOFT_CAP = "soft_cap"  # c * tanh(x / c)
    LARGE_SOFT_CAP = "large_soft_cap"  # the same, precise where x / c is small as well
    ALIBI = "alibi"  # x + slope_h * key, slopes as in ALiBi's paper; see parts/rows/score.py
    CAPPED_ALIBI = "capped_alibi"  # c * tanh(x / c) + slope_h * key: the order of FlashInfer's fmha_v2 kernels

    @property
    def caps(self) -> bool:
        """Tell whether scores are capped."""
        return self in (ScoreKind.SOFT_CAP, ScoreKind.LARGE_SOFT_CAP, ScoreKind.CAPPED_ALIBI)

    @property
    def has_slopes(self) -> bool:
        """Tell whether distances count, by a slope for each head."""
        return self in (ScoreKind.ALIBI, ScoreKind.CAPPED_ALIBI)


@dataclass(frozen=True)
class Score:
    """A kind of score with its parameter: ``soft_cap`` is c, in natural logits."""

    kind: ScoreKind = ScoreKind.SCALED
    soft_cap: float = 0.0

    @classmethod
    def capped(cls, cap: float, has_slopes: bool = False) -> Score:
        """Return the score for a cap, where 0 means none, with ALiBi or without."""
        if not 0 < cap <= LARGEST_CAP:
            return cls(ScoreKind.ALIBI) if has_slopes else cls()
        if has_slopes:
            return cls(ScoreKind.CAPPED_ALIBI, cap)
        return cls(ScoreKind.SOFT_CAP if cap <= SMALL_CAP else ScoreKind.LARGE_SOFT_CAP, cap)


@dataclass(frozen=True)
class DcpRank:
    """The keys that one rank holds in decode context parallel (DCP), for MaskKind.CYCLIC.

    Attributes:
        kv_lens: keys of each request on all ranks together, new tokens included.
        world: number of ranks.
        rank: this rank. Its key c is key c * world + rank of the request.

    Row t of q_len is at position kv_len - q_len + t of all keys. It sees this rank's keys up to that position.
    """

    kv_lens: torch.Tensor
    world: int
    rank: int


@dataclass(frozen=True)
class TokenOffsets:
    """Where requests start in a ragged tensor: request b starts at token ``tensor[b] // token_elements``.

    ``tensor`` is int32, uint32 or int64 with at least B entries (B + 1 where lengths are taken from differences).
    Kernels read the lower 32 bits of int64 offsets, as of all int64 lengths and page ids. ``token_elements`` is 1 for
    cumulative token counts and the number of elements per token for cuDNN's element offsets.
    """

    tensor: torch.Tensor
    token_elements: int = 1


@dataclass(frozen=True)
class PageTable:
    """Page ids of each request: ``key[b, i]`` is the page of ``AttentionProblem.key`` that holds its tokens
    [i * page_size, (i + 1) * page_size). ``value`` is the same for V; one tensor serves both when ids are shared.

    Both are [B, P] int32, uint32 or int64 views with a unit last stride. Entries at or past
    ceil(kv_len / page_size) are never read and may hold anything.
    """

    key: torch.Tensor
    value: torch.Tensor


class LseLayout(enum.Enum):
    """How the log-sum-exp of request b, query token t, head h is addressed."""

    RAGGED = "ragged"  # [T, H]: row = the token's row in the output
    PADDED = "padded"  # [B, max tokens, H]: row = (b, t)
    OFFSETS = "offsets"  # [*, H]: row = offsets[b] + t


@dataclass(frozen=True)
class LogSumExp:
    """Where and how to write LSE: float32, ``natural`` for base e, otherwise base 2. Rows that no request has become
    -inf where it is padded, else they stay as they are."""

    tensor: torch.Tensor
    layout: LseLayout
    natural: bool
    offsets: TokenOffsets | None = None


@dataclass(frozen=True)
class BlockScales:
    """Scales of blocks of 16 elements of K and of V: e4m3 views [pages, Hkv, page_size, D / 16] with a unit last
    stride. V's are interleaved by four tokens for prefill, see :mod:`hopwell.layouts.scales`, and not for decode."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class OutputScales:
    """Scales of blocks of 16 elements of an NVFP4 output: e4m3 [rows, columns] in the 128x4 order. The scales of query
    token t are in row ``first_row`` + t. ``factor`` multiplies the output before it is rounded."""

    tensor: torch.Tensor
    first_row: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """One batched attention call: ``out = output_scale * softmax(softmax_scale * q k^T, mask) v``.

    Attributes:
        query: [T, H, Dqk], unit last stride.
        key: [pages, Hkv, page_size, Dqk], unit last stride. Contiguous (ragged) K is one page of all KV tokens.
        value: [pages, Hkv, page_size, Dv], unit last stride; strides independent of ``key``'s.
        out: [T, H, Dv], unit last stride, or None: the launch allocates it like a contiguous [T, H, Dv].
        batch: B.
        max_q_len, max_kv_len: the caller's upper bounds of the lengths. They size grids and select the kernel of decode
            and MLA: another bound may change the rounding of their results, another batch with the same bound does not.
        q_offsets: start of each request's queries; None means that the only request starts at token 0.
        o_offsets: the same in ``out``; None means as ``q_offsets``.
        k_offsets, v_offsets: starts in contiguous K and V; None means 0 (or paged).
        q_lens: [B] query lengths; None means differences of ``q_offsets``.
        kv_lens: [B] KV lengths, new tokens included; None means differences of ``k_offsets``.
        page_table: None for contiguous K and V.
        mask: which keys are visible.
        score: what happens to scores before the softmax.
        softmax_scale: natural scale of the logits, a host float or a one-element float32 tensor on the device.
        output_scale: factor on the output, likewise.
        sinks: [H] float32 or bfloat16 natural logits of one extra key per head with a zero value, or None.
        lse: where to store log-sum-exp, or None.
        statistics: [T, H, 2] float32, contiguous, or None: where to store for each row of the output the largest logit
            divided by sqrt(Dqk), for plain scores without ``softmax_scale``, and the sum of exponentials relative to
            that logit. Sinks are not in it. A row without visible keys has (-inf, 0).
        skip_softmax: keys whose weight is below ``skip_softmax / kv_len`` of the largest so far may be left out; 0
            keeps all of them.
        skipped_tiles: one int32 on the device to which the number of left-out (64 query rows, KV tile) pairs is added,
            or None.
        output_factor: a second factor on the output, likewise; only decode takes one.
        draft_mask: for MaskKind.DRAFT, contiguous uint16 pairs [T, 2 * words]: the words of 32 bits of a query token
            say which of its request's query tokens, as keys, it sees; bits at or past q_len are ignored. Without it a
            query token sees itself and those before it.
        token_table: [T, k] int32, uint32 or int64, or None: what a query token attends to, in place of a page table. An
            entry is a token of ``key``, page * page_size + row. A query token takes the first entries, as many as it
            sees keys and k at most, and ignores negative ones. Only MLA decode takes one.
        DCP rank: for MaskKind.CYCLIC, which of all keys ``key`` holds; ``kv_lens`` counts those. Only decode and MLA
        take
            one.
        kv_scales: for NVFP4 K and V, which are uint8 with two elements in a byte; None for all others.
        out_scales: for an NVFP4 output, which is uint8 [T, H, Dv / 2]; None for all others.
        scratch: memory for partial results of decode, see ``splitting.py``.
        programmatic_launch: let this kernel's launch overlap the tail of the one before it (PDL).
        family: the kernels that are to compute it.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor | None
    batch: int
    max_q_len: int
    max_kv_len: int
    q_offsets: TokenOffsets | None
    kv_lens: torch.Tensor | None
    mask: Mask
    softmax_scale: float | torch.Tensor
    output_scale: float | torch.Tensor = 1.0
    q_lens: torch.Tensor | None = None
    o_offsets: TokenOffsets | None = None
    k_offsets: TokenOffsets | None = None
    v_offsets: TokenOffsets | None = None
    page_table: PageTable | None = None
    sinks: torch.Tensor | None = None
    lse: LogSumExp | None = None
    score: Score = Score()
    statistics: torch.Tensor | None = None
    skip_softmax: float = 0.0
    skipped_tiles: torch.Tensor | None = None
    output_factor: float | torch.Tensor = 1.0
    draft_mask: torch.Tensor | None = None
    token_table: torch.Tensor | None = None
    dcp_rank: DcpRank | None = None
    kv_scales: BlockScales | None = None
    out_scales: OutputScales | None = None
    scratch: torch.Tensor | None = None
    programmatic_launch: bool = False
    family: Family = Family.PREFILL

    @property
    def v_dim(self) -> int:
        """Return Dv in elements."""
        return self.value.shape[3] * (1 if self.kv_scales is None else 2)

    @property
    def mean_q_len(self) -> int:
        """Return the mean number of queries of a request, rounded up, as far as shapes tell."""
        return min(self.max_q_len, -(-self.query.shape[0] // max(self.batch, 1)))

    @property
    def is_latent(self) -> bool:
        """Tell whether the value is part of the key, as in MLA decode."""
        return self.family is Family.MLA
