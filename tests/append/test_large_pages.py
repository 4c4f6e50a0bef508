"""Pages of a hybrid model, which also hold states of other layers: over 1024 tokens, and room between the pages."""

from __future__ import annotations

import pytest
import torch

import hopwell

PAGES = (1040, 1056, 2048)
HEADS, DIM = 2, 64
TABLE = [[3, 1], [0, -1]]
NEW = [9, 3]  # the first request's new tokens begin its second page


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return causal attention of the last tokens of ``key`` [tokens, 1, dim] in float64."""
    rows, keys = len(query), len(key)
    visible = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]
    parts = (part.double().cpu().transpose(0, 1) for part in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*parts, visible, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("page", PAGES)
def test_append_context_and_decode(device: str, page: int) -> None:
    draw, of_requests = torch.Generator().manual_seed(0), [page + 9, 20]
    room = torch.full((4, 2, 1, page + 24, DIM), torch.nan, dtype=torch.bfloat16)
    cache = room[..., :page, :].to(device)
    parts = [torch.randn(2, length, 1, DIM, generator=draw).bfloat16() for length in of_requests]
    pages, table = torch.tensor(TABLE), torch.tensor(TABLE, dtype=torch.int32, device=device)
    slots = []
    for row, new, (key, value) in zip(pages, NEW, parts, strict=True):
        positions = torch.arange(len(key))
        place = row[positions // page], positions % page
        cache.movedim(3, 1)[tuple(index.to(device) for index in place)] = torch.stack([key, value], 1).to(device)
        slots.append((place[0] * page + place[1])[-new:])
        cache.movedim(3, 1)[tuple(index[-new:].to(device) for index in place)] = torch.nan
    key, value = (
        torch.cat([part[i][-new:] for part, new in zip(parts, NEW, strict=True)]).to(device) for i in range(2)
    )
    hopwell.append_paged_kv_cache_with_slot_mapping(key, value, torch.cat(slots).to(device), cache, "HND")

    query = torch.randn(sum(NEW), HEADS, DIM, generator=draw).bfloat16()
    starts, lengths = (
        torch.tensor(of, dtype=torch.int32, device=device) for of in ([0, NEW[0], sum(NEW)], of_requests)
    )
    places, scale = (torch.empty(0, device=device), table, lengths), DIM**-0.5
    prefill = hopwell.trtllm_batch_context_with_kv_cache(
        query.to(device), cache, *places, max(NEW), max(of_requests), scale, 1.0, 2, starts, starts
    )
    last = query[[NEW[0] - 1, -1]].to(device)
    decode = hopwell.xqa_batch_decode_with_kv_cache(last, cache, *places, max(of_requests), scale, kv_layout="HND")
    for request, (rows, (keys, values)) in enumerate(zip(query.split(NEW), parts, strict=True)):
        want = expected(rows, keys, values)
        got = prefill.cpu().split(NEW)[request]
        for result, right in ((got, want), (decode[request].cpu(), want[-1])):
            assert (result - right).norm() < 5e-3 * right.norm()
