"""Reference of prefill: attention of one request in float64, and the error of 16-bit rounding alone."""

from __future__ import annotations

import math

import torch

from hopwell.kernels.problem import Mask, MaskKind, Score

PLAIN = Score()


def visible(q_len: int, kv_len: int, mask: Mask, device: torch.device) -> torch.Tensor:
    """Return [q_len, kv_len], true if a row sees a key. Masks are aligned bottom right."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None]
    if mask.kind is MaskKind.FULL:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if mask.kind is MaskKind.LOCAL:
        left = kv_len + q_len if mask.window_left < 0 else mask.window_left
        return (key >= position - left) & (key <= position + mask.window_right)
    if mask.kind not in (MaskKind.CAUSAL, MaskKind.SLIDING_WINDOW, MaskKind.CHUNKED):
        raise ValueError(f"no oracle for the mask {mask.kind}")
    seen = key <= position
    if mask.kind is MaskKind.SLIDING_WINDOW:
        seen &= key >= position - mask.window_left
    if mask.kind is MaskKind.CHUNKED:
        seen &= key >= position // mask.chunk * mask.chunk
    return seen


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return the slopes of Press et al., "Train Short, Test Long".

    Powers of two have a geometric series. Further heads take every other term of the next longer series.
    """

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 1 << (heads.bit_length() - 1)
    return torch.tensor(series(power) + series(2 * power)[0::2][: heads - power], dtype=torch.float64)


def by_kv_head(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Compute rows [heads, q_len, n] @ shared [kv_heads, n, m], without a copy of ``shared`` for each query head."""
    (heads, q_len, n), (kv_heads, _, m) = rows.shape, shared.shape
    return (rows.reshape(kv_heads, heads // kv_heads * q_len, n) @ shared).reshape(heads, q_len, m)


def logits(q: torch.Tensor, k: torch.Tensor, scale: float, score: Score) -> torch.Tensor:
    """Compute natural logits [heads, q_len, kv_len] in float64 of q [q_len, heads, D] and k [kv_len, kv_heads, D]."""
    values = by_kv_head(q.double().transpose(0, 1), k.double().permute(1, 2, 0)) * scale
    if score.kind.caps:
        values = score.soft_cap * torch.tanh(values / score.soft_cap)
    if score.kind.has_slopes:
        slopes = alibi_slopes(q.shape[1]).to(q.device)[:, None, None]
        values = values + slopes * torch.arange(k.shape[0], device=q.device)
    return values


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    score: Score = PLAIN,
    rounded: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output [q_len, heads, Dv] and the natural LSE [q_len, heads] of one request in float64.

    ``q`` is [q_len, heads, D], ``k`` and ``v`` are [kv_len, kv_heads, D]. With ``rounded``
    the probabilities are rounded to the dtype of the values and the output to this dtype, as in any 16-bit kernel.
    """
    values = v.double().transpose(0, 1)
    scores = logits(q, k, scale, score).masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sink], 2)
        values = torch.cat([values, values.new_zeros(values.shape[0], 1, values.shape[2])], 1)
    lse = torch.logsumexp(scores, 2)
    top = scores.amax(2, keepdim=True) if scores.shape[2] else scores.new_zeros(*scores.shape[:2], 1)
    weights = torch.exp(scores - torch.where(top == -math.inf, 0.0, top))
    total = weights.sum(2, keepdim=True)
    if rounded is not None:
        weights = weights.to(v.dtype).double()
    out = torch.where(total > 0, by_kv_head(weights, values) / total, 0.0)
    if rounded is not None:
        out = out.to(rounded).double()
    return out.transpose(0, 1), lse.transpose(0, 1)


def statistics(
    q: torch.Tensor, k: torch.Tensor, scale: float, seen: torch.Tensor, score: Score = PLAIN
) -> torch.Tensor:
    """Return [q_len, heads, 2] in float64: a row's largest logit divided by sqrt(D), and its sum of exponentials.

    For plain scores, the logit does not include the scale. The sum is relative to this logit. Rows without visible keys
    have (-inf, 0).
    """
    # One more key, seen by no row, for requests without keys.
    scores = torch.nn.functional.pad(logits(q, k, scale, score).masked_fill(~seen, -math.inf), (0, 1), value=-math.inf)
    largest = scores.amax(2)
    total = torch.exp(scores - largest.clamp(min=-1e300)[..., None]).sum(2)
    stored = largest / math.sqrt(q.shape[2]) / (scale if score == PLAIN else 1.0)
    return torch.stack((stored, total), 2).transpose(0, 1)
