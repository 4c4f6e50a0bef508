"""Checks of device data besides Q, K and V: lengths, tables, offsets, top-k indices and scales, on demand.

A launch does not check them, because the host would wait for the device. Here all comparisons run on the device, and
the host waits once for the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hopwell.kernels.elements import INTERLEAVED_TOKENS, SCALE_COLUMNS
from hopwell.kernels.problem import AttentionProblem, BlockScales, DcpRank, Family, PageTable, TokenOffsets

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Fault:
    """An element with an invalid value. ``operand`` is its name in ``plan.operands``."""

    operand: str
    index: tuple[int, ...]
    value: float
    rule: str

    def message(self, name: str) -> str:
        """Return a message for callers who know the operand as ``name``."""
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{name}{place} must be {self.rule}, got {self.value}"


@dataclass(frozen=True)
class Rule:
    """Invalid elements of an operand. ``text`` returns the requirement for the element at an index.

    ``is_defined``: kernels clamp the value, so its effect is defined and stays within the operands.
    """

    operand: str
    values: torch.Tensor
    wrong: torch.Tensor
    text: Callable[[tuple[int, ...]], str]
    is_defined: bool = False


@dataclass(frozen=True)
class Extent:
    """Tokens of requests in a tensor: [B] starts and lengths, and the names of the operands that give them."""

    starts: torch.Tensor
    lengths: torch.Tensor
    start_operand: str
    length_operand: str


def first_fault(rules: Iterable[Rule], *, defined: bool = True) -> Fault | None:
    """Return the first element that breaks one of ``rules``, or None. ``defined``: include rules that kernels clamp.

    The host waits for the device once, and a second time if there is a fault.
    """
    counted = [rule for rule in rules if rule.wrong.numel() and (defined or not rule.is_defined)]
    if not counted:
        return None
    wrong = torch.stack([rule.wrong.any() for rule in counted]).tolist()
    for rule, is_wrong in zip(counted, wrong, strict=True):
        if is_wrong:
            index = tuple(rule.wrong.nonzero()[0].tolist())
            return Fault(rule.operand, index, rule.values[index].item(), rule.text(index))
    return None


def rules_of(problem: AttentionProblem) -> Iterator[Rule]:
    """Yield the rules for the device data that a launch of ``problem`` reads besides queries, keys and values."""
    p = problem
    yield from _scales(p)
    queries = _extent(p.q_offsets, p.q_lens, "q_offsets", "q_lens", p)
    keys = _extent(p.k_offsets, p.kv_lens, "k_offsets", "kv_lens", p)
    yield from _lengths(queries)
    yield from _at_most(queries, p.max_q_len, "the bound that the call gives", is_defined=True)
    yield from _offsets(p.q_offsets, "q_offsets", queries, p.query.shape[0])
    yield from _offsets(p.o_offsets, "o_offsets", queries, p.query.shape[0])
    if p.lse is not None:
        yield from _offsets(p.lse.offsets, "lse_offsets", queries, p.lse.tensor.shape[-2], is_clipped=True)
    yield from _lengths(keys)
    if p.dcp_rank is not None:
        yield from _dcp_rank(p.dcp_rank, queries, keys)
    if p.token_table is not None:
        yield from _at_most(keys, INT32_MAX, "what kernels read of it", is_defined=True)
        yield from _topk_page_table(p, queries, keys)
    elif p.page_table is not None:
        (_, heads, page_size, _), columns = p.key.shape, p.page_table.key.shape[1]
        held = (
            f"what {columns} pages of {page_size} tokens hold (pages are read as {page_size} tokens of {heads} heads)"
        )
        yield from _at_most(keys, columns * page_size, held)
        for operand, table, pages in (
            ("key_table", p.page_table.key, p.key.shape[0]),
            ("value_table", p.page_table.value, p.value.shape[0]),
        ):
            yield _pages(p, operand, table, pages, queries, keys)
        if p.kv_scales is not None:
            yield from _block_scales(p, p.kv_scales, p.page_table, queries, keys)
    else:
        yield from _at_most(keys, p.key.shape[2], "the rows of the keys")
        yield from _offsets(p.k_offsets, "k_offsets", keys, p.key.shape[2])
        yield from _offsets(p.v_offsets, "v_offsets", keys, p.value.shape[2])
    if p.family is Family.MLA and p.key.dtype == torch.uint8:
        yield _scales_in_rows(p, queries, keys)


def _extent(
    offsets: TokenOffsets | None,
    lengths: torch.Tensor | None,
    start_operand: str,
    length_operand: str,
    p: AttentionProblem,
) -> Extent:
    starts = torch.zeros(p.batch, dtype=torch.int64, device=p.query.device)
    if offsets is not None:
        starts = _tokens(offsets)[: p.batch]
    if lengths is not None:
        return Extent(starts, signed(lengths), start_operand, length_operand)
    if offsets is None:  # all decode requests have the same number of new tokens
        return Extent(torch.arange(p.batch, device=p.query.device) * p.max_q_len, starts + p.max_q_len, "", "")
    return Extent(starts, _tokens(offsets)[1 : p.batch + 1] - starts, start_operand, "")


def signed(indices: torch.Tensor) -> torch.Tensor:
    """Return indices as int64. uint32 is read as int32, as in kernels."""
    return indices.view(torch.int32).long() if indices.dtype == torch.uint32 else indices.long()


def _tokens(offsets: TokenOffsets) -> torch.Tensor:
    return torch.div(offsets.tensor.view(-1).long(), max(offsets.token_elements, 1), rounding_mode="floor")


def _scales(p: AttentionProblem) -> Iterator[Rule]:
    for operand, scale in (
        ("softmax_scale", p.softmax_scale),
        ("output_scale", p.output_scale),
        ("output_factor", p.output_factor),
    ):
        if isinstance(scale, torch.Tensor):
            yield scale_rule(operand, scale, is_signed=operand != "softmax_scale")
    if p.sinks is not None:
        yield Rule("sinks", p.sinks, p.sinks.isnan(), _always("a number"), is_defined=True)


def scale_rule(operand: str, scale: torch.Tensor, *, is_signed: bool = False) -> Rule:
    """Return the rule for a scale: finite, and not negative unless it ``is_signed``."""
    wrong, text = ~scale.isfinite(), "finite"
    if not is_signed:
        wrong, text = wrong | (scale < 0), "finite and not negative"
    return Rule(operand, scale, wrong, _always(text), is_defined=True)


def _always(text: str) -> Callable[[tuple[int, ...]], str]:
    return lambda index: text


def _lengths(extent: Extent) -> Iterator[Rule]:
    """Yield the rules of lengths: not negative, or ascending offsets if lengths are differences."""
    if extent.length_operand:
        text = "0 or more"
        yield Rule(extent.length_operand, extent.lengths, extent.lengths < 0, lambda index: text, is_defined=True)
    elif extent.start_operand:
        yield ascending(extent.start_operand, torch.cat([extent.starts[:1], extent.starts + extent.lengths]))


def _at_most(extent: Extent, most: int, what: str, *, is_defined: bool = False) -> Iterator[Rule]:
    operand = extent.length_operand or extent.start_operand
    if not operand:
        return
    wrong, values = extent.lengths > most, extent.lengths
    if extent.length_operand:
        yield Rule(operand, values, wrong, lambda index: f"at most {most}, {what}", is_defined)
    else:
        # The length of request b is checked at offset b + 1, its end.
        ends = torch.cat([extent.starts[:1], extent.starts + extent.lengths])
        wrong = torch.cat([torch.zeros_like(wrong[:1]), wrong])
        yield Rule(operand, ends, wrong, lambda index: f"at most {most}, {what}, more than the one before", is_defined)


def ascending(operand: str, starts: torch.Tensor) -> Rule:
    """Return the rule for starts of consecutive requests: they do not decrease."""
    falls = torch.cat([torch.zeros_like(starts[:1], dtype=torch.bool), starts[1:] < starts[:-1]])
    return Rule(operand, starts, falls, _always("at least the one before it"), is_defined=True)


def _whole_tokens(offsets: TokenOffsets | None, operand: str, batch: int) -> Iterator[Rule]:
    if offsets is not None and offsets.token_elements > 1:
        values = offsets.tensor.view(-1).long()[:batch]
        text = f"a multiple of {offsets.token_elements}, the elements of a token"
        yield Rule(operand, values, values % offsets.token_elements != 0, lambda index: text, is_defined=True)


def _offsets(
    offsets: TokenOffsets | None, operand: str, extent: Extent, rows: int, *, is_clipped: bool = False
) -> Iterator[Rule]:
    """Yield the rules that requests lie within ``rows`` tokens. ``is_clipped``: kernels skip tokens past the end."""
    if offsets is None:
        return
    yield from _whole_tokens(offsets, operand, len(extent.lengths))
    starts = _tokens(offsets)[: len(extent.lengths)]
    values = offsets.tensor.view(-1).long()[: len(extent.lengths)]
    lengths = extent.lengths.clamp(min=0)
    is_used = lengths > 0

    def text(index: tuple[int, ...]) -> str:
        return f"a place for the {lengths[index].item()} tokens of request {index[0]} among {rows}"

    yield Rule(operand, values, is_used & (starts < 0), text)
    yield Rule(operand, values, is_used & (starts + lengths > rows), text, is_clipped)


def _first_visible(p: AttentionProblem, queries: Extent, keys: Extent) -> torch.Tensor:
    """Return the first key of each request that any of its rows sees. Pages before it are not read."""
    position, bound = keys.lengths - queries.lengths, p.mask.kind.rule.first
    return torch.zeros_like(position) if bound is None else bound(position, p.mask.size)


def _used(p: AttentionProblem, count: int, step: int, queries: Extent, keys: Extent) -> torch.Tensor:
    """Return which blocks of ``step`` keys of each request any of its rows sees, as [B, count]."""
    partials = torch.arange(count, device=keys.lengths.device)
    first = _first_visible(p, queries, keys) // step
    last = torch.where(queries.lengths > 0, (keys.lengths + step - 1) // step, 0)
    return (partials >= first[:, None]) & (partials < last[:, None])


def _pages(p: AttentionProblem, operand: str, table: torch.Tensor, pages: int, queries: Extent, keys: Extent) -> Rule:
    page_size = p.key.shape[2]
    used = _used(p, table.shape[1], page_size, queries, keys)
    ids = table[: p.batch].long()

    def text(index: tuple[int, ...]) -> str:
        request, entry = index
        return (
            f"a page id in [0, {pages}), because request {request} has {keys.lengths[request].item()} keys, of which "
            f"this page holds those from {entry * page_size} on"
        )

    return Rule(operand, ids, used & ((ids < 0) | (ids >= pages)), text)


def _dcp_rank(dcp_rank: DcpRank, queries: Extent, keys: Extent) -> Iterator[Rule]:
    """Yield the rules of a DCP rank, which holds every ``count``-th key of a request, from key ``index`` on."""
    everywhere = signed(dcp_rank.kv_lens)
    yield Rule("dcp_kv_lens", everywhere, everywhere < 0, _always("0 or more"), is_defined=True)
    yield Rule("dcp_kv_lens", everywhere, everywhere > INT32_MAX, _always(f"at most {INT32_MAX}"), is_defined=True)
    here = (everywhere.clamp(min=0) - dcp_rank.rank + dcp_rank.world - 1) // dcp_rank.world

    def text(index: tuple[int, ...]) -> str:
        return (
            f"{here[index].item()}, because rank {dcp_rank.rank} of {dcp_rank.world} has each {dcp_rank.world}-th of "
            f"{everywhere[index].item()} keys"
        )

    wrong = (keys.lengths != here) & (queries.lengths > 0)
    yield Rule(keys.length_operand, keys.lengths, wrong, text, is_defined=True)


def read_rows(ids: torch.Tensor, used: torch.Tensor, rows: int) -> torch.Tensor:
    """Return which rows of a cache the ``used`` elements of ``ids`` name, as [rows]."""
    inside = used & (ids >= 0) & (ids < rows)
    # The extra last row collects invalid ids, so that the host need not wait for their number.
    read = torch.zeros(rows + 1, dtype=torch.bool, device=ids.device)
    read[torch.where(inside, ids, rows).flatten()] = True
    return read[:rows]


def _read_tokens(p: AttentionProblem, table: torch.Tensor, pages: int, queries: Extent, keys: Extent) -> torch.Tensor:
    """Return which tokens of the cache any row sees, as [pages, page_size]."""
    page_size = p.key.shape[2]
    inside = torch.arange(page_size, device=table.device)
    ids = (table[: p.batch].long()[..., None] * page_size + inside).flatten(1)
    used = _used(p, ids.shape[1], 1, queries, keys)
    return read_rows(ids, used, pages * page_size).view(pages, page_size)


def _block_scales(
    p: AttentionProblem, scales: BlockScales, table: PageTable, queries: Extent, keys: Extent
) -> Iterator[Rule]:
    """Yield the rules that block scales of read tokens are not NaN."""
    for operand, values, ids in (("key_scales", scales.key, table.key), ("value_scales", scales.value, table.value)):
        read = _read_tokens(p, ids, values.shape[0], queries, keys)
        if operand == "value_scales" and scales.interleaves_v:
            # Some of the four tokens that share rows of scales may not be read.
            interleaved = read.unflatten(1, (-1, INTERLEAVED_TOKENS))
            read = interleaved.all(-1, keepdim=True).expand_as(interleaved).flatten(1)
        numbers = values.view(torch.float8_e4m3fn).float()
        wrong = numbers.isnan() & read[:, None, :, None]
        yield Rule(operand, numbers, wrong, _read_text, is_defined=True)


def _read_text(index: tuple[int, ...]) -> str:
    return f"a number, because token {index[2]} of page {index[0]} is read"


def _scales_in_rows(p: AttentionProblem, queries: Extent, keys: Extent) -> Rule:
    """Return the rule that scales inside rows of the cache, behind the elements that they scale, are finite."""
    pages, _, page_size, _ = p.key.shape
    if p.token_table is not None:
        read = read_rows(*_topk_table(p, p.token_table, queries, keys), pages * page_size).view(pages, page_size)
    else:
        assert p.page_table is not None
        read = _read_tokens(p, p.page_table.key, pages, queries, keys)
    end = p.v_dim + 4 * p.v_dim // SCALE_COLUMNS
    numbers = p.key[..., p.v_dim : end].contiguous().view(torch.float32)
    wrong = ~numbers.isfinite() & read[:, None, :, None]
    return Rule(
        "key", numbers, wrong, lambda index: f"finite as a scale of its row: {_read_text(index)}", is_defined=True
    )


def _topk_page_table(p: AttentionProblem, queries: Extent, keys: Extent) -> Iterator[Rule]:
    """Yield the rule of top-k indices that a token sees: a token of the cache, or negative as int32."""
    tokens = p.key.shape[0] * p.key.shape[2]
    assert p.token_table is not None
    ids, used = _topk_table(p, p.token_table, queries, keys)
    text = f"negative as int32, or a token of the cache in [0, {tokens})"
    yield Rule("key_table", ids, used & ((ids >= tokens) | (ids < INT32_MIN)), lambda index: text)


def _topk_table(
    p: AttentionProblem, topk_lists: torch.Tensor, queries: Extent, keys: Extent
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top-k indices as int64, and which of them their query token sees."""
    ids = signed(topk_lists)
    seen = torch.zeros(topk_lists.shape[0], dtype=torch.int64, device=topk_lists.device)
    rows = torch.arange(topk_lists.shape[0], device=topk_lists.device)
    if p.batch:
        # A row belongs to the last request that starts at or before it.
        request = (torch.searchsorted(queries.starts.contiguous(), rows, right=True) - 1).clamp(0, p.batch - 1)
        token = rows - queries.starts[request]
        inside = (token >= 0) & (token < queries.lengths[request])
        seen = torch.where(inside, keys.lengths[request] - queries.lengths[request] + token + 1, 0)
    return ids, torch.arange(topk_lists.shape[1], device=topk_lists.device) < seen[:, None]
