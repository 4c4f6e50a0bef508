"""``causal`` as a tensor: each request has the bits of a call with its own mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches.prefill import CAUSAL, FULL, Batch, Expected, starts
from helpers.calls.entries import context, context_arguments

import hopwell

Q_LENS, KV_LENS = [3, 0, 18, 1, 9], [20, 4, 18, 33, 5]
CHOICES = [True, False, False, True, False]


def expected(data: Batch, choices: list[bool]) -> Expected:
    causal, full = data.expected(CAUSAL), data.expected(FULL)
    begins = starts(data.q_lens)
    parts = [
        (causal if choice else full).of_tokens(slice(begin, end))
        for choice, begin, end in zip(choices, begins[:-1], begins[1:], strict=True)
    ]
    names = ("out", "rounded", "lse")
    return Expected(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8], ids=str)
def test_masks_by_request(device: str, dtype: torch.dtype) -> None:
    data = Batch(Q_LENS, KV_LENS, 4, 2, 64, 64, device=device)
    key, value, table = data.pages(16)
    causal = torch.tensor(CHOICES, device=device).to(dtype)
    out, lse = context(data, (key, value), table, causal=causal, return_lse=True, lse_base="ln")
    want = expected(data, CHOICES)
    want.check(out)
    want.check_lse(lse)
    assert torch.equal(context(data, (key, value), table, causal=causal), out)
    for same, choice in ((torch.ones_like(causal), True), (torch.zeros_like(causal), False)):
        assert torch.equal(
            context(data, (key, value), table, causal=same), context(data, (key, value), table, causal=choice)
        )


def test_results_to_write_into(device: str) -> None:
    """Rows of no request keep their contents."""
    data = Batch(Q_LENS, KV_LENS, 4, 2, 64, 64, device=device)
    key, value, table = data.pages(16)
    pad = torch.zeros(2, 4, 64, dtype=data.dtype, device=device)
    arguments = context_arguments(data, (key, value), table) | dict(query=torch.cat([data.q, pad]))
    out, lse = torch.full_like(arguments["query"], 7.0), torch.full((data.tokens + 2, 4), 7.0, device=device)
    options: dict[str, Any] = dict(causal=torch.tensor(CHOICES, device=device), return_lse=True, out=out, lse=lse)
    results = hopwell.trtllm_batch_context_with_kv_cache(**arguments, **options, lse_base="ln")
    assert results[0] is out
    assert results[1] is lse
    expected(data, CHOICES).check(out[: data.tokens])
    expected(data, CHOICES).check_lse(lse[: data.tokens])
    assert (out[data.tokens :] == 7).all()
    assert (lse[data.tokens :] == 7).all()


BAD = {
    "batch": (torch.ones(3).bool(), ValueError, r"^causal must have shape \[batch_size=5\], got \(3,\)$"),
    "dtype": (torch.ones(5), ValueError, "^causal must be torch.bool or torch.uint8 or .*, got torch.float32$"),
    "device": (torch.ones(5, device="meta").bool(), ValueError, "^causal must be on cpu"),
}


@pytest.mark.parametrize(("causal", "error", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_named(causal: torch.Tensor, error: type[Exception], message: str) -> None:
    data = Batch(Q_LENS, KV_LENS, 4, 2, 64, 64, device="cpu")
    key, value, table = data.pages(16)
    with pytest.raises(error, match=message):
        context(data, (key, value), table, causal=causal)


def test_a_window_is_refused() -> None:
    data = Batch(Q_LENS, KV_LENS, 4, 2, 64, 64, device="cpu")
    key, value, table = data.pages(16)
    with pytest.raises(ValueError, match=r"^window_left must be -1 where causal is a tensor, got 4$"):
        context(data, (key, value), table, causal=torch.tensor(CHOICES), window_left=4)
