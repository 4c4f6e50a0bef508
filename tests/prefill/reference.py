"""What prefill must compute: attention of one request in float64, and how far 16-bit rounding alone strays from it."""

from __future__ import annotations

import math

import torch

from hopwell.kernels.problem import Mask, MaskKind


def visible(q_len: int, kv_len: int, mask: Mask, device: torch.device) -> torch.Tensor:
    """[q_len, kv_len], true where a row sees a key. Bottom-right aligned."""
    position = torch.arange(q_len, device=device)[:, None] + kv_len - q_len
    key = torch.arange(kv_len, device=device)[None]
    if mask.kind is MaskKind.FULL:
        return torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    seen = key <= position
    return seen & (key >= position - mask.window_left) if mask.kind is MaskKind.SLIDING_WINDOW else seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    rounded: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [q_len, heads, Dv] and natural LSE [q_len, heads] of one request in float64.

    ``q`` is [q_len, heads, D], ``k`` and ``v`` are [kv_len, kv_heads, D]. With ``rounded``
    the probabilities are rounded to the dtype of the values and the output to this dtype, as in any 16-bit kernel.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    scores = scores.masked_fill(~seen, -math.inf)
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
    out = torch.where(total > 0, weights @ values / total, 0.0)
    if rounded is not None:
        out = out.to(rounded).double()
    return out.transpose(0, 1), lse.transpose(0, 1)
