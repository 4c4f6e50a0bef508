"""A DeepSeek-V3 layer that decodes from its latent cache computes what attention with all keys and values computes."""

from __future__ import annotations

import copy

import deepseek_layer
import pytest
import torch
from deepseek_layer import LatentAttention, Sizes, generate


def unabsorbed(layer: LatentAttention, hidden: torch.Tensor, new: int) -> torch.Tensor:
    """The outputs of the last ``new`` tokens of a request [tokens, hidden], with every head's keys and values."""
    s, total = layer.sizes, len(hidden)
    position = torch.arange(total, device=hidden.device)
    latent, k_rope = layer.latent_rows(hidden, position).split([s.kv_lora, s.rope], -1)
    w_k, w_v = layer.up_projections()
    k_nope, value = (torch.einsum("tl,hnl->htn", latent, weight) for weight in (w_k, w_v))
    key = torch.cat([k_nope, k_rope.expand(s.heads, -1, -1)], -1)
    query = torch.cat(layer.queries(hidden[-new:], position[-new:]), -1).transpose(0, 1)
    seen = torch.ones(new, total, dtype=torch.bool, device=hidden.device).tril(total - new)
    logits = (query @ key.mT).float() * s.scale
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(0, 1).flatten(1) @ layer.project.T


def check_layer(sizes: Sizes, device: str, lengths: list[int], count: int, q_len: int, page_size: int = 64) -> None:
    """The latent cache is no further from float32 than keys and values in bf16 are."""
    torch.manual_seed(0)
    layer = LatentAttention(sizes, device).bfloat16()
    prompts = [torch.randn(n, sizes.hidden, device=device).bfloat16() for n in lengths]
    steps = torch.randn(count, len(lengths), q_len, sizes.hidden, device=device).bfloat16()
    ours = torch.cat(generate(layer, prompts, steps, page_size), 1).float()
    exact_layer = copy.deepcopy(layer).float()
    for request, prompt in enumerate(prompts):
        hidden = torch.cat([prompt, steps[:, request].flatten(0, 1)])
        theirs = unabsorbed(layer, hidden, count * q_len).float()
        exact = unabsorbed(exact_layer, hidden.float(), count * q_len)
        noise = (theirs - exact).norm(dim=1)
        error = (ours[request] - exact).norm(dim=1)
        print(
            request,
            float(error.norm() / noise.norm()),
            float((error / noise).max()),
            float(noise.norm() / exact.norm()),
        )
        assert error.norm() < 1.2 * noise.norm(), "further from float32 than the same layer in bf16"
        assert (error < 1.5 * noise).all(), "so is one of the steps"


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "q_len"), [(64, 1), (16, 4)])
def test_layer(count: int, q_len: int) -> None:
    """64 new tokens, one at a time and as drafts that are all accepted, across the edges of pages."""
    check_layer(Sizes(), "cuda", [1000, 1, 4096, 317, 63, 30], count, q_len)


@pytest.mark.emulator
def test_small_layer_on_the_emulator() -> None:
    check_layer(Sizes(hidden=256, heads=8, q_lora=128), "cpu", [60, 1], 3, 2, page_size=16)


@pytest.mark.gpu
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    deepseek_layer.main()
    assert "64 steps" in capsys.readouterr().out


@pytest.mark.emulator
@pytest.mark.skipif(torch.cuda.is_available(), reason="the example uses the GPU where there is one")
def test_example_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    deepseek_layer.main()
    assert "4 steps" in capsys.readouterr().out
