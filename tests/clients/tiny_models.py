"""Tiny language models with random weights, and the comparison of an engine's tokens with a model's greedy choice."""

from __future__ import annotations

import pathlib
from typing import Any

import torch
import transformers

# Tokens that bf16 rounding cannot tell from the best one.
TIE = 3
SIZES: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    tie_word_embeddings=False,
)
GQA = dict(num_key_value_heads=2, head_dim=64)
MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    head_dim=64,
    first_k_dense_replace=2,
)


def save(folder: pathlib.Path, kind: str, **sizes: Any) -> Any:
    """Save a random model and return it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | sizes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def first_difference(model: Any, prompt: list[int], tokens: list[int]) -> float | None:
    """Return how far the first token that is not the model's greedy choice is below it, in bf16 steps of the logit."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0].float()
    for place, token in enumerate(tokens, len(prompt) - 1):
        best = logits[place].max()
        if logits[place, token] < best:
            step = 2.0 ** (torch.frexp(best.abs()).exponent.item() - 8)
            return ((best - logits[place, token]) / step).item()
    return None
