"""Rules for the device data of an append: scales, and the destination of each new token.

The kernel does not write a token without a valid destination, so breaking any rule here has a defined outcome: a lost
token. A negative batch index or position marks padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hopwell.kernels.append.config import SMALLEST_SCALE, AppendProblem, pool_distance
from hopwell.kernels.launch.device_data import Rule, ascending, read_rows, signed
from hopwell.kernels.problem import PageTable


def rules_of(problem: AppendProblem) -> Iterator[Rule]:
    """Yield the rules for the device data that a launch of ``problem`` reads besides the new tokens."""
    p = problem
    for operand, scale in (("k_scale", p.k_scale), ("v_scale", p.v_scale)):
        if isinstance(scale, torch.Tensor):
            wrong = ~(scale.isfinite() & (scale >= SMALLEST_SCALE))
            yield _rule(operand, scale, wrong, f"finite and at least {SMALLEST_SCALE}")
    if p.batch_indices is None or p.page_table is None:
        yield _slots(p)
    else:
        yield from _requests(p, p.page_table, signed(p.batch_indices), signed(p.positions))


def _slots(p: AppendProblem) -> Rule:
    """Return the rule that slots are slots of the cache."""
    pages, _, page_size, _ = p.key_cache.shape
    slots = signed(p.positions)
    text = f"less than {pages * page_size}, because the cache has {pages} pages of {page_size}, or negative for padding"
    return _rule("positions", slots, slots >= pages * page_size, text)


def _requests(p: AppendProblem, table: PageTable, requests: torch.Tensor, positions: torch.Tensor) -> Iterator[Rule]:
    """Yield the rules that tokens belong to requests, and that their positions have pages."""
    is_token = (requests >= 0) & (positions >= 0)
    text = f"less than {p.batch}, the number of requests, or negative for padding"
    yield _rule("batch_indices", requests, is_token & (requests >= p.batch), text)
    if p.page_starts is not None:
        yield from _starts(signed(p.page_starts), table.key.shape[-1])
    if p.batch:
        is_token &= requests < p.batch
        yield from _places(p, table, requests.clamp(0, p.batch - 1), positions, is_token)


def _places(
    p: AppendProblem, table: PageTable, requests: torch.Tensor, positions: torch.Tensor, is_token: torch.Tensor
) -> Iterator[Rule]:
    """Yield the rules that tokens lie within the pages of their requests, and that page ids name pages of the cache."""
    page_size, width = p.key_cache.shape[2], table.key.shape[-1]
    if p.page_starts is None:
        first = torch.arange(p.batch, device=requests.device) * width
        room = torch.full_like(first, width)
    else:
        starts = signed(p.page_starts)
        first = starts[:-1].clamp(0, width)
        room = torch.where(starts[:-1] < 0, 0, (starts[1:].clamp(0, width) - first).clamp(min=0))
    page = positions // page_size
    fits = page < room[requests]

    def text(index: tuple[int, ...]) -> str:
        request = int(requests[index])
        pages = int(room[request])
        return (
            f"less than {pages * page_size}, because request {request} has {pages} pages of {page_size}, or negative "
            "for padding"
        )

    yield Rule("positions", positions, is_token & ~fits, text, is_defined=True)
    entry = first[requests] + page
    used = []
    for operand, ids, cache in (("key_table", table.key, p.key_cache), ("value_table", table.value, p.value_cache)):
        is_used = read_rows(entry, is_token & fits, ids.numel()).view(ids.shape)
        values, pages = signed(ids), cache.shape[0]
        wrong = is_used & ((values < 0) | (values >= pages))
        yield _rule(operand, values, wrong, f"a page id in [0, {pages}), because a new token goes to this page")
        used.append((values, is_used))
    distance = pool_distance(p.key_cache, p.value_cache)
    if distance is not None:
        yield _shared_pages(p.key_cache.shape[0], distance, *used)


def _shared_pages(
    pages: int, distance: int, keys: tuple[torch.Tensor, torch.Tensor], values: tuple[torch.Tensor, torch.Tensor]
) -> Rule:
    """Return the rule that no page of a pool takes both new keys and new values.

    Args:
        pages: pages of K.
        distance: see :func:`pool_distance`.
        keys: page ids of K, and whether new tokens go to them.
        values: the same for V.
    """
    takes_keys = read_rows(*keys, pages)
    ids, is_used = values
    key_page = ids + distance  # the page of K with the memory of a page of V
    inside = is_used & (key_page >= 0) & (key_page < pages)
    wrong = inside & takes_keys[torch.where(inside, key_page, 0)]
    text = "another page, because new keys go to the memory of this page of V"
    return _rule("value_table", ids, wrong, text)


def _starts(starts: torch.Tensor, width: int) -> Iterator[Rule]:
    """Yield the rules that page ids of requests are consecutive."""
    outside = (starts < 0) | (starts > width)
    yield _rule("page_starts", starts, outside, f"in [0, {width}], the number of page ids")
    yield ascending("page_starts", starts)


def _rule(operand: str, values: torch.Tensor, wrong: torch.Tensor, text: str) -> Rule:
    return Rule(operand, values, wrong, lambda index: text, is_defined=True)
