"""Oracles for the outputs of examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


def check_attention(
    query: torch.Tensor,
    out: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
) -> None:
    """Check that ``out`` is the causal attention of the queries over a stacked HND cache."""
    begin = 0
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        pages = block_tables[request, : math.ceil(kv_len / kv_cache.shape[3])].long()
        key, value = kv_cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :kv_len].double()
        rows = query[begin : begin + q_len].double().transpose(0, 1)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=rows.device).tril(kv_len - q_len)
        want = torch.nn.functional.scaled_dot_product_attention(rows, key, value, visible, enable_gqa=True)
        got = out[begin : begin + q_len].double().transpose(0, 1)
        assert (got - want).norm() < 5e-3 * want.norm()
        begin += q_len


def check_generation(model: Any, prompts: Sequence[bytes], logits: Sequence[Any], tokens: Sequence[Any]) -> None:
    """Check that logits are as good as with torch's attention in bf16, and that tokens are float32's choices.

    Tokens may differ if bf16 cannot distinguish them. torch gets each request's prompt and its chosen tokens, one
    request at a time.
    """
    model.set_attn_implementation("sdpa")
    prompt_logits = logits[0].split([len(prompt) for prompt in prompts])
    chosen = torch.stack(list(tokens), 1)
    texts = [[*prompt, *ids] for prompt, ids in zip(prompts, chosen[:, :-1].tolist(), strict=True)]
    ours = [torch.cat([first, *(step[i : i + 1] for step in logits[1:])]) for i, first in enumerate(prompt_logits)]

    def alone(text: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(text, device=model.device)[None], use_cache=False).logits[0].float()

    theirs = [alone(text) for text in texts]
    model.float()
    exact = [alone(text) for text in texts]
    decided = 0
    for i, prompt in enumerate(prompts):
        for rows in (slice(len(prompt)), slice(len(prompt), None)):
            our_error, their_error = (x[i][rows].float() - exact[i][rows] for x in (ours, theirs))
            noise = their_error.norm()
            assert our_error.norm() < 1.2 * noise, "further from float32 than torch's attention in bf16"
            assert (our_error - their_error).norm() < 1.5 * noise
        # The noise of a logit; two logits that are further apart keep their order.
        margin = 8 * (theirs[i] - exact[i]).square().mean().sqrt()
        best, second = exact[i][len(prompt) - 1 :].topk(2).values.unbind(1)
        clear = best - second > margin
        assert torch.equal(chosen[i][clear], exact[i][len(prompt) - 1 :].argmax(1)[clear])
        decided += int(clear.sum())
    assert decided > chosen.numel() / 4, "the tokens were hardly compared"
