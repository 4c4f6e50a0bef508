"""The error of MLA over 8-bit caches against float64, and the error of FlashMLA's arithmetic on the same inputs.

The reference uses the cache's values. FlashMLA is a torch model of its Hopper kernels' rounding, not a run of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.fp8 import E4M3, TILE, Fp8MlaBatch, attention_by_tiles
from helpers.batches.mla import MlaBatch, PackedBatch
from helpers.calls.entries import mla

from hopwell.layouts import FP8_DS_MLA_BYTES, dequantize_fp8_ds_mla
from hopwell.layouts.mla_rows import LATENT, SCALE_COLUMNS

MOST = {"e4m3": 1.33e-2, "rows": 6e-3}  # relative, in the norm; measured errors are a quarter less


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def flashmla_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return keys [tokens, 576] as FlashMLA's sparse kernel dequantizes rows of 656 bytes: it rounds scales to bfloat16
    first.
    """
    assert rows.shape[1] == FP8_DS_MLA_BYTES
    latent, scales, rotary = rows.split([LATENT, LATENT // SCALE_COLUMNS * 4, FP8_DS_MLA_BYTES - LATENT - 16], 1)
    scales = scales.contiguous().view(torch.float32).bfloat16().float().repeat_interleave(SCALE_COLUMNS, 1)
    dequantized = (latent.contiguous().view(E4M3).float() * scales).bfloat16()
    return torch.cat([dequantized, rotary.contiguous().view(torch.bfloat16)], 1)


def modelled(data: MlaBatch, request: int) -> torch.Tensor:
    """Return [heads, 512] of a request with one new token."""
    q = data.q[request]
    if isinstance(data, PackedBatch):
        keys = flashmla_rows(data.rows[request][:, 0])
        return attention_by_tiles(q, keys, keys[:, : data.v_head_dim], data.scale, torch.bfloat16)
    return attention_by_tiles(q, data.k[request][:, 0], data.v[request][:, 0], data.scale, E4M3)


def check_error(kind: str, device: str, kv_lens: list[int], heads: int) -> None:
    torch.manual_seed(0)
    packed = kind == "rows"
    batch = PackedBatch if packed else Fp8MlaBatch
    data = batch([1] * len(kv_lens), kv_lens, device=device, heads=heads, kv_dtype=E4M3)
    problem = data.decode(64)
    given = dict(kv_cache=data.packed(64)) if packed else dict(query=data.q.to(E4M3).unsqueeze(1))
    out = mla(data, problem, **given).flatten(0, 1)
    if packed:  # the cache's values, not rounded to bfloat16
        data.k = [dequantize_fp8_ds_mla(rows, torch.float32) for rows in data.rows]
        data.v = [k[..., :LATENT] for k in data.k]
    exact = data.expected_mla().out
    theirs = torch.stack([modelled(data, request) for request in range(data.size)])
    errors = relative(out, exact), relative(theirs, exact)
    print(f"{kind}, {kv_lens} keys: {errors[0]:.2e}, FlashMLA's arithmetic {errors[1]:.2e}")
    assert errors[0] < MOST[kind]
    assert errors[0] < errors[1]


@pytest.mark.emulator
@pytest.mark.parametrize("kind", ["e4m3", "rows"])
def test_error(kind: str) -> None:
    check_error(kind, "cpu", [700], heads=40)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["e4m3", "rows"])
@pytest.mark.parametrize("heads", [16, 128])
def test_error_of_long_requests(kind: str, heads: int) -> None:
    check_error(kind, "cuda", [8192, 2048], heads)


def over_allowed(out: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Divide errors by the tolerance of FlashInfer's test of sparse attention."""
    return (out - exact).abs() / (8e-4 + 2e-2 * exact.abs())


def test_outliers_of_few_topk_indices_are_of_rounded_weights() -> None:
    """A model of the kernels' rounding runs with the sizes and values of FlashInfer's test: a top-k of 128.

    Neither float16 partials nor the output come near the tolerance. Rounded weights do, less often if tiles have their
    own references.
    """
    generator = torch.Generator().manual_seed(1)
    errors: dict[str, list[torch.Tensor]] = {
        "output": [],
        "partials": [],
        "weights": [],
        "weights of own references": [],
    }
    for _ in range(16):
        q, keys = (torch.randn(128, 576, generator=generator).clamp(-1, 1).bfloat16().float() for _ in range(2))
        values, logits = keys[:, :LATENT].double(), (q @ keys.T).double() * 192**-0.5
        tiles = logits.split(TILE, 1)  # B, and A, which comes first
        total = logits.exp().sum(1, keepdim=True)
        exact = logits.exp() @ values / total
        first, own = [tiles[1].amax(1, keepdim=True)] * 2, [tile.amax(1, keepdim=True) for tile in tiles]

        def rounded(references: list[torch.Tensor], *, tiles: Any = tiles, values: Any = values) -> torch.Tensor:
            weights = [(s - r).exp().bfloat16().double() * r.exp() for s, r in zip(tiles, references, strict=True)]
            return torch.cat(weights, 1) @ values

        partials = [s.exp() @ v for s, v in zip(tiles, values.split(TILE), strict=True)]
        sizes = [one.abs().amax(1, keepdim=True) for one in partials]
        narrow = sum((one / size).half().double() * size for one, size in zip(partials, sizes, strict=True))
        found = {"output": exact.bfloat16().double(), "partials": narrow / total}
        found |= {"weights": rounded(first) / total, "weights of own references": rounded(own) / total}
        for name, out in found.items():
            errors[name].append(over_allowed(out, exact).flatten())
    found = {name: torch.cat(each) for name, each in errors.items()}
    print({name: (float(each.max()), int((each > 0.6).sum())) for name, each in found.items()})
    assert max(found[name].max() for name in ("output", "partials")) < 0.25
    assert found["weights"].max() < 1
    assert (found["weights"] > 0.6).sum() > 2 * (found["weights of own references"] > 0.6).sum()
