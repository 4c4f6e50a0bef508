"""What a compiled kernel is called with: device addresses that change from call to call, and the geometry that stays
the same for a given set of shapes and strides.

Both are flat tuples of integers because that is what crosses the host boundary fastest (0.02 us an integer against
0.15 us a tensor and 2 us for slicing a view, measured with torch 2.13 and tvm-ffi 0.1.15). A plan builds ``Geometry``
once and keeps it as one ready-made FFI array.
"""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Addresses(NamedTuple):
    """Device addresses in bytes; 0 means absent. The lowest bit of indices' and of sinks' addresses says how wide
    elements are, see :func:`address_of`."""

    query: int
    key: int
    value: int
    out: int
    q_offsets: int = 0  # where each request starts in query; with q_lens absent B + 1 entries
    o_offsets: int = 0  # 0: as q_offsets
    k_offsets: int = 0  # of a DCP rank: the keys of each request on all ranks, as there is no contiguous K
    v_offsets: int = 0
    q_lens: int = 0
    kv_lens: int = 0  # 0: differences of k_offsets
    key_table: int = 0
    value_table: int = 0
    softmax_scale: int = 0  # 0: the scale is passed by value
    output_scale: int = 0
    sinks: int = 0
    lse: int = 0
    lse_offsets: int = 0
    statistics: int = 0  # two float32 for each output row and head
    skipped: int = 0  # one int32 that counts skipped pairs of 64 rows, or a tile of fewer, and a KV tile
    output_factor: int = 0  # a second scale of the output; 0: passed by value
    draft_mask: int = 0  # uint32 words of each query token
    scratch: int = 0  # memory for partial results
    tickets: int = 0  # zero int32 that the kernel leaves zero: work handed out, CTAs done, decode's counters


def named_tuple(name: str, *fields: str) -> Any:
    """Return a named tuple whose fields are known when it runs."""
    return namedtuple(name, fields)


# The tensors that a kernel gets, in the order of their addresses.
Operands = named_tuple("Operands", *Addresses._fields[:-1])

# What kernels with scales of blocks are called with: one address or one size more makes kernels of sm_100a spill, which
# have no such scales. OPERANDS names all that lie in tensors, in order.
SCALES = ("key_scales", "value_scales", "out_scales")  # of K, of V and of the output
OPERANDS = (*Operands._fields, *SCALES)
ScaledOperands = named_tuple("ScaledOperands", *OPERANDS)
ScaledAddresses = named_tuple("ScaledAddresses", *OPERANDS, "tickets")

DIVISOR_BITS = 8  # of a page divisor, for the shift


def page_divisor(size: int) -> int:
    """Return what kernels divide positions by a page size with: log2 of a power of two; of any other size a multiplier,
    2^shift / size rounded up, above the ``DIVISOR_BITS`` bits of the shift."""
    length = (size - 1).bit_length()
    if size & (size - 1) == 0:
        return length
    shift = 31 + length  # so that the multiplier has 32 bits and the product of both less than 64
    return -(-(1 << shift) // size) << DIVISOR_BITS | shift


def address_of(name: str, view: torch.Tensor | None) -> int:
    """Return the address of operand ``name``. It is odd for int64 indices and for bfloat16 sinks: no array's address is
    odd, so kernels learn the width of elements without another argument."""
    if view is None:
        return 0
    is_other = view.dtype == (torch.bfloat16 if name == "sinks" else torch.int64)
    return view.data_ptr() | int(is_other)


def addresses_of(views: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the addresses of the first operands."""
    return [address_of(name, view) for name, view in zip(OPERANDS, views, strict=False)]


class DecodeGeometry(NamedTuple):
    """Sizes, strides in elements, and the grid of decode."""

    tokens: int  # rows of query
    kv_heads: int
    batch: int
    group: int  # query heads of a KV head
    q_len: int  # new tokens of a request, of the longest where they differ
    row_tiles: int  # of rows that have the same keys
    grid: int
    q_token: int
    q_head: int
    o_token: int
    o_head: int
    k_pages: int
    v_pages: int
    k_rows: int
    v_rows: int
    page_divisor: int
    k_page: int
    k_head: int
    k_row: int
    v_page: int
    v_head: int
    v_row: int
    key_table_row: int
    value_table_row: int
    mask_size: int  # of an ``IntervalMask``
    draft_words: int  # of a token in the draft mask
    topk: int  # tokens in the list of a query token; 0 where there are no lists
    lse_row: int
    lse_head: int
    lse_natural: int  # 1: base e, 0: base 2
    slots: int  # for partial results
    slot_rows: int
    cta_parts: int  # of MLA: that the keys of all requests are cut into for a row tile
    gmem_levels: int  # of decode with few rows: those of a CTA's tree in global memory
    dcp_world: int  # ranks that share the keys
    dcp_rank: int  # this one
    capacity: int  # keys of a request that the table has room for


class Geometry(NamedTuple):
    """Sizes, strides in elements, and the grid of prefill."""

    tokens: int  # rows of query
    heads: int
    kv_heads: int
    batch: int
    head_swizzle: int  # counts ``tile_heads`` heads: those of a request whose tiles come before others'
    grid: int
    q_token: int
    q_head: int
    o_token: int
    o_head: int
    k_pages: int
    v_pages: int
    k_rows: int  # tokens in a page; for contiguous K all of them
    v_rows: int
    page_divisor: int  # paged: of the page size
    k_page: int
    k_head: int
    k_row: int
    v_page: int
    v_head: int
    v_row: int
    key_table_row: int
    value_table_row: int
    q_token_elements: int  # elements of an offset array that make one token
    o_token_elements: int
    k_token_elements: int
    v_token_elements: int
    lse_token_elements: int
    lse_request: int  # rows between requests in a padded LSE; -1: rows are output tokens; 0: offsets place them
    lse_rows: int  # of a request in a padded LSE, else of the whole tensor; none past them is written
    lse_row: int
    lse_head: int
    lse_natural: int  # 1: base e, 0: base 2
    mask_size: int  # of an ``IntervalMask``
    tile_heads: int  # heads that share a query tile
    capacity: int  # keys of a request that the table, or contiguous K, has room for


SCALE_STRIDES = ("k_scale_page", "k_scale_head", "k_scale_row", "v_scale_page", "v_scale_head", "v_scale_row")

# These are sizes, strides in elements, and the grid of decode with scales of blocks.
ScaledDecodeGeometry = named_tuple("ScaledDecodeGeometry", *DecodeGeometry._fields, *SCALE_STRIDES)
# These are sizes, strides in elements, and the grid of prefill with scales of blocks.
ScaledGeometry = named_tuple(
    "ScaledGeometry",
    *Geometry._fields,
    *SCALE_STRIDES,
    "out_scale_row",  # of the first query token
    "out_scale_columns",
)
