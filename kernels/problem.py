"""The canonical form of every entry point's arguments: one attention problem over strided views.

Kernels never see an API name. An :class:`AttentionProblem` contains only views and token counts. Differences between
input forms are converted before it exists: HND and NHD, stacked and separate caches, packed QKV, element offsets,
cumulative lengths.

Notation: T is the number of query tokens of all requests, B of requests, H of query heads and Hkv of KV heads. D is the
head dimension (Dqk and Dv if they differ) and P the page-table width.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from hopwell.kernels.masks import Mask as Mask
from hopwell.kernels.masks import MaskKind as MaskKind

MAX_KEYS = 1 << 30  # keys of a paged request: positions of its keys and rows, and sums of two of them, fit 32 bits

# The fast tanh rounds to 2^-23 of the cap. Under larger caps this error exceeds bfloat16's rounding of common logits.
SMALL_CAP = 512.0
# c tanh(x / c) is x in float32 for all x below c / 2^12. Larger logits have the softmax of their rounded values.
LARGEST_CAP = 2.0**64


class Family(enum.Enum):
    """A family of kernels, see ``registry.py``."""

    PREFILL = "prefill"
    DECODE = "decode"
    MLA = "mla"  # decode with a value that is part of the key
    APPEND = "append"  # write new tokens into a cache, see append/config.py


class ScoreKind(enum.Enum):
    """Functions applied to the scores x = softmax_scale * q k^T before the softmax."""

    SCALED = "scaled"  # x
    SOFT_CAP = "soft_cap"  # c * tanh(x / c)
    LARGE_SOFT_CAP = "large_soft_cap"  # the same function, also precise for small x / c
    ALIBI = "alibi"  # x + slope_h * key, slopes as in ALiBi's paper; see parts/rows/score.py
    CAPPED_ALIBI = "capped_alibi"  # c * tanh(x / c) + slope_h * key: the order of FlashInfer's fmha_v2 kernels

    @property
    def caps(self) -> bool:
        """Whether scores are capped."""
        return self in (ScoreKind.SOFT_CAP, ScoreKind.LARGE_SOFT_CAP, ScoreKind.CAPPED_ALIBI)

    @property
    def has_slopes(self) -> bool:
        """Whether scores get a bias by distance, with a slope for each head."""
        return self in (ScoreKind.ALIBI, ScoreKind.CAPPED_ALIBI)


@dataclass(frozen=True)
class Score:
    """A kind of score and its parameter: ``soft_cap`` is c, in natural logits."""

    kind: ScoreKind = ScoreKind.SCALED
    soft_cap: float = 0.0

    @classmethod
    def capped(cls, cap: float, has_slopes: bool = False) -> Score:
        """Return the score for a cap (0 means none), with or without ALiBi."""
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
    """Starts of requests in a ragged tensor: request b starts at token ``tensor[b] // token_elements``.

    ``tensor`` is int32, uint32 or int64 with at least B entries (B + 1 if lengths are differences of offsets). Kernels
    read only the lower 32 bits of int64 offsets, lengths and page ids. ``token_elements`` is 1 for cumulative token
    counts, and the number of elements per token for cuDNN's element offsets.
    """

    tensor: torch.Tensor
    token_elements: int = 1


@dataclass(frozen=True)
class PageTable:
    """Page ids of each request: page ``key[b, i]`` of ``AttentionProblem.key`` holds tokens [i * page_size, (i + 1) *
    page_size).

    ``value`` is the same for V; one tensor serves both if ids are shared. Both are [B, P] int32, uint32 or int64 views
    with a unit last stride. Entries at or past ceil(kv_len / page_size) are never read and may hold anything.
    """

    key: torch.Tensor
    value: torch.Tensor


class LseLayout(enum.Enum):
    """Address of the log-sum-exp of request b, query token t, head h."""

    RAGGED = "ragged"  # [T, H]: row = the token's row in the output
    PADDED = "padded"  # [B, max tokens, H]: row = (b, t)
    OFFSETS = "offsets"  # [*, H]: row = offsets[b] + t


@dataclass(frozen=True)
class LogSumExp:
    """Destination and form of the log-sum-exp: float32, base e if ``natural``, else base 2.

    Strides are free, except that requests of the padded layout are a multiple of the row stride apart.
    Rows of no request become -inf in the padded layout. In the other layouts they are not written.
    """

    tensor: torch.Tensor
    layout: LseLayout
    natural: bool
    offsets: TokenOffsets | None = None


@dataclass(frozen=True)
class BlockScales:
    """Scales of blocks of 16 elements of K and of V: e4m3 views [pages, Hkv, page_size, D / 16] with a unit last
    stride.

    V's scales are linear, or interleaved by four tokens, see :mod:`hopwell.layouts.scales`. Prefill reads both orders,
    decode the linear one.
    """

    key: torch.Tensor
    value: torch.Tensor
    interleaves_v: bool = False


@dataclass(frozen=True)
class OutputScales:
    """Scales of blocks of 16 elements of an NVFP4 output: e4m3 [rows, columns] in the 128x4 order.

    Row ``first_row`` + t has the scales of query token t. ``factor`` multiplies the output before it is rounded.
    """

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
        max_q_len, max_kv_len: the caller's upper bounds of the lengths. They size grids and select decode and MLA
            kernels. Another bound may change the rounding of decode and MLA results; another batch with the same bound
            does not.
        q_offsets: start of each request's queries; None means that the only request starts at token 0.
        o_offsets: the same in ``out``; None means equal to ``q_offsets``.
        k_offsets, v_offsets: starts in contiguous K and V; None means 0 (or paged).
        q_lens: [B] query lengths; None means differences of ``q_offsets``.
        kv_lens: [B] KV lengths, new tokens included; None means differences of ``k_offsets``.
        page_table: None for contiguous K and V.
        mask: which keys are visible.
        score: what happens to scores before the softmax.
        softmax_scale: natural scale of the logits, a host float or a one-element float32 tensor on the device.
        output_scale: factor on the output, in the same forms.
        sinks: [H] float32 or bfloat16 natural logits of one extra key per head with a zero value, or None.
        lse: destination of the log-sum-exp, or None.
        statistics: destination [T, H, 2], float32, contiguous, or None. A row's first value is its largest score q k^T
            / sqrt(Dqk), without ``softmax_scale``. The second is the sum of exponentials relative to that value. Sinks
            are not included. A row without visible keys has (-inf, 0).
        skip_softmax: kernels may skip keys whose weight is below ``skip_softmax / kv_len`` of the largest weight so
            far; 0 keeps all keys.
        skipped_tiles: one int32 on the device, to which the number of skipped (64 query rows, KV tile) pairs is added,
            or None.
        output_factor: a second factor on the output, in the same forms; only decode takes one.
        draft_mask: for MaskKind.DRAFT, contiguous uint16 pairs [T, 2 * words]. The 32-bit words of a query token have
            one bit for each query token of its request that it sees as a key. Bits at or past q_len are ignored.
            Without a mask, a query token sees itself and the query tokens before it.
        token_table: the top-k indices [T, k], int32, uint32 or int64, in place of a page table, or None. An entry is a
            token of ``key``, page * page_size + row. A query token that sees n keys takes its first min(n, k) entries
            and ignores negative ones. Only MLA decode takes a token table.
        dcp_rank: for MaskKind.CYCLIC, the share of all keys that ``key`` holds; ``kv_lens`` counts these keys. Only
            decode and MLA take one.
        kv_scales: block scales of NVFP4 K and V, which are uint8 with two elements in a byte; None for all other types.
        out_scales: block scales of an NVFP4 output, which is uint8 [T, H, Dv / 2]; None for all other types.
        scratch: memory for partial results of decode, see ``config/splitting.py``.
        programmatic_launch: let this kernel's launch overlap the tail of the preceding kernel (PDL).
        family: the family of kernels that computes the problem.
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
        """Dv in elements."""
        return self.value.shape[3] * (1 if self.kv_scales is None else 2)

    @property
    def mean_q_len(self) -> int:
        """Mean number of queries of a request, rounded up and computed from shapes only."""
        return min(self.max_q_len, -(-self.query.shape[0] // max(self.batch, 1)))

    @property
    def is_latent(self) -> bool:
        """Whether the value is part of the key, as in MLA decode."""
        return self.family is Family.MLA
