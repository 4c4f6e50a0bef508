"""A DeepSeek-V3 layer that decodes from its latent cache equals attention with all keys and values.

The reference uses the tokens in the cache, dequantized for narrow caches.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers.oracles import deepseek_layer
from helpers.oracles.deepseek_layer import LatentAttention, LatentCache, Sizes, generate

from hopwell import layouts

SMALL = Sizes(hidden=256, heads=8, q_lora=128, index_heads=4)
ROUNDING = {"bf16": 0.01, "e4m3": 0.04, "fp8_ds_mla": 0.04}  # relative, of a cache's rows
KINDS = [("bf16", 0), ("e4m3", 0), ("fp8_ds_mla", 0), ("fp8_ds_mla", 48)]


class RecordedLayer(LatentAttention):
    """A layer that records the tokens chosen in each step."""

    def __init__(self, sizes: Sizes, device: str):
        super().__init__(sizes, device)
        self.chosen: list[torch.Tensor] = []

    def choose(self, *arguments: torch.Tensor) -> torch.Tensor:
        self.chosen.append(super().choose(*arguments))
        return self.chosen[-1]


def latent_rows(cache: LatentCache, request: int) -> torch.Tensor:
    """Return a request's values [tokens, 576] in the cache, in float32."""
    position = torch.arange(int(cache.seq_lens[request]), device=cache.pool.device)
    rows = cache.pool.view(-1, cache.pool.shape[-1])[cache.slots(torch.full_like(position, request), position).long()]
    if cache.kind == "fp8_ds_mla":
        return layouts.dequantize_fp8_ds_mla(rows, torch.float32)
    return rows.float() if cache.scale is None else layouts.dequantize_fp8(rows, cache.scale)


def unabsorbed(wave: LatentAttention, hidden: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return the outputs [tokens, hidden] of a request's last tokens, with every head's keys and values.

    They are computed from the cache's ``rows``. ``seen`` [tokens, keys] marks the keys that count.
    """
    s, new = wave.sizes, len(seen)
    position = torch.arange(len(hidden), device=hidden.device)
    latent, k_rope = rows.to(hidden.dtype).split([s.kv_lora, s.rope], -1)
    w_k, w_v = wave.up_projections()
    k_nope, value = (torch.einsum("tl,hnl->htn", latent, weight) for weight in (w_k, w_v))
    key = torch.cat([k_nope, k_rope.expand(s.heads, -1, -1)], -1)
    query = torch.cat(wave.queries(hidden[-new:], position[-new:]), -1).transpose(0, 1)
    logits = (query @ key.mT).to(torch.promote_types(hidden.dtype, torch.float32)) * s.scale
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(0, 1).flatten(1) @ wave.project.T


def visible(wave: RecordedLayer, request: int, new: int, total: int, q_len: int) -> torch.Tensor:
    """Return [new, total]: the keys up to each new token, or only its chosen ones."""
    device = wave.project.device
    causal = torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
    if not wave.sizes.top_k:
        return causal
    chosen = torch.stack([step.unflatten(0, (-1, q_len))[request] for step in wave.chosen]).flatten(0, 1)
    counts = torch.zeros(new, total + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(1, torch.where(chosen < 0, total, chosen), torch.ones_like(chosen))
    seen = counts[:, :total] > 0
    assert not (seen & ~causal).any()
    assert torch.equal(seen.sum(1), causal.sum(1).clamp(max=wave.sizes.top_k)), "each is chosen once"
    return seen


def check_layer(
    sizes: Sizes, device: str, lengths: list[int], count: int, q_len: int, page_size: int = 64, kind: str = "bf16"
) -> None:
    """Check that the latent cache is as close to float64 as bf16 keys and values of the same cache."""
    torch.manual_seed(0)
    wave = RecordedLayer(sizes, device).bfloat16()
    prompts = [torch.randn(n, sizes.hidden, device=device).bfloat16() for n in lengths]
    steps = torch.randn(count, len(lengths), q_len, sizes.hidden, device=device).bfloat16()
    outputs, cache = generate(wave, prompts, steps, page_size, kind)
    ours, new = torch.cat(outputs, 1).double(), count * q_len
    exact_layer = copy.deepcopy(wave).double()
    for request, prompt in enumerate(prompts):
        hidden = torch.cat([prompt, steps[:, request].flatten(0, 1)])
        rows, seen = latent_rows(cache, request), visible(wave, request, new, len(hidden), q_len)
        wanted = exact_layer.latent_rows(hidden.double(), torch.arange(len(hidden), device=device))
        assert (rows - wanted).norm() < ROUNDING[kind] * wanted.norm()
        theirs = unabsorbed(wave, hidden, rows, seen).double()
        exact = unabsorbed(exact_layer, hidden.double(), rows.double(), seen)
        noise = (theirs - exact).norm(dim=1)
        error = (ours[request] - exact).norm(dim=1)
        print(
            request,
            float(error.norm() / noise.norm()),
            float((error / noise).max()),
            float(noise.norm() / exact.norm()),
        )
        assert error.norm() < 1.2 * noise.norm(), "further from float64 than the same layer in bf16"
        assert (error < 1.5 * noise).all(), "so is one of the steps"


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "q_len"), [(64, 1), (16, 4)])
@pytest.mark.parametrize(("kind", "top_k"), [*KINDS[:3], ("fp8_ds_mla", 256), ("bf16", 256)])
def test_layer(kind: str, top_k: int, count: int, q_len: int) -> None:
    """64 new tokens, one at a time and as drafts that are all accepted, across the edges of pages."""
    check_layer(Sizes(top_k=top_k), "cuda", [1000, 1, 4096, 317, 63, 30], count, q_len, kind=kind)


@pytest.mark.emulator
@pytest.mark.parametrize(("kind", "top_k"), KINDS)
def test_small_layer_on_the_emulator(kind: str, top_k: int) -> None:
    count = 3 if kind == "bf16" else 2
    check_layer(replace(SMALL, top_k=top_k), "cpu", [60, 1], count, 2, page_size=16, kind=kind)


@pytest.mark.gpu
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    deepseek_layer.main()
    assert capsys.readouterr().out.count("64 steps") == 3


@pytest.mark.emulator
@pytest.mark.skipif(torch.cuda.is_available(), reason="the example uses the GPU where there is one")
def test_example_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    deepseek_layer.main()
    assert capsys.readouterr().out.count("2 steps") == 3
