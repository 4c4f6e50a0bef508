"""Arguments of a compiled kernel: device addresses and the geometry. Addresses change from call to call; the geometry
is fixed for a given set of shapes and strides.

Both are flat tuples of integers, the fastest form across the host boundary. An integer takes 0.02 us, a tensor 0.15 us,
and slicing a view 2 us (torch 2.13, tvm-ffi 0.1.15). A plan builds ``Geometry`` once and keeps it as one ready-made FFI
array.
"""

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Addresses(NamedTuple):
    """Device addresses in bytes; 0 means absent. Decode kernels get ``DecodeAddresses``, which differ in one place.

    The lowest bit of an address of indices or sinks gives the width of the elements, see :func:`address_of`.
    """

    query: int
    key: int
    value: int
    out: int
    q_offsets: int = 0  # the start of each request in query; B + 1 entries if q_lens is absent
    o_offsets: int = 0  # 0: equal to q_offsets
    k_offsets: int = 0
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
    skipped: int = 0  # one int32 that counts skipped pairs of (64 query rows or a smaller tile, KV tile)
    output_factor: int = 0  # a second scale of the output; 0: passed by value
    draft_mask: int = 0  # uint32 words of each query token
    scratch: int = 0  # memory for partial results
    tickets: int = 0  # int32 that are zero before and after a launch: work handed out, CTAs done, decode's counters


def named_tuple(name: str, *fields: str) -> Any:
    """Return a named tuple type whose fields are only known at run time."""
    return namedtuple(name, fields)


def _of_decode(names: Sequence[str]) -> list[str]:
    """Return the names of decode's addresses, given the names of prefill's.

    Decode has no contiguous K, so the place of its offsets holds the keys of each request on all DCP ranks.
    """
    return ["dcp_kv_lens" if name == "k_offsets" else name for name in names]


# The tensors of prefill, in the order of their addresses, and the addresses of each kind of kernel. Only kernels with
# block scales get the addresses of SCALES. One more address or size makes kernels of sm_100a spill.
SCALES = ("key_scales", "value_scales", "out_scales")  # of K, of V and of the output
OPERANDS = (*Addresses._fields[:-1], *SCALES)
ScaledAddresses = named_tuple("ScaledAddresses", *OPERANDS, "tickets")
DecodeAddresses = named_tuple("DecodeAddresses", *_of_decode(Addresses._fields))
ScaledDecodeAddresses = named_tuple("ScaledDecodeAddresses", *_of_decode(ScaledAddresses._fields))

DIVISOR_BITS = 8  # bits of a page divisor that hold the shift


def page_divisor(size: int) -> int:
    """Return the integer with which kernels divide positions by a page size.

    It is log2 of a power of two. For other sizes it holds a multiplier, 2^shift / size rounded up, above the
    ``DIVISOR_BITS`` bits of the shift.
    """
    length = (size - 1).bit_length()
    if size & (size - 1) == 0:
        return length
    shift = 31 + length  # the multiplier then has 32 bits, and its product with a position fewer than 64
    return -(-(1 << shift) // size) << DIVISOR_BITS | shift


def address_of(name: str, view: torch.Tensor | None) -> int:
    """Return the address of operand ``name``, odd for int64 indices and for bfloat16 sinks.

    No array has an odd address, so kernels learn the width of the elements without another argument.
    """
    if view is None:
        return 0
    is_other = view.dtype == (torch.bfloat16 if name == "sinks" else torch.int64)
    return view.data_ptr() | int(is_other)


def addresses_of(views: Mapping[str, torch.Tensor | None]) -> list[int]:
    """Return the addresses of operands, given by name."""
    return [address_of(name, view) for name, view in views.items()]


class DecodeGeometry(NamedTuple):
    """Sizes, strides in elements, and the grid of decode."""

    tokens: int  # rows of query
    kv_heads: int
    batch: int
    group: int  # query heads of a KV head
    q_len: int  # new tokens of a request; the largest number if requests differ
    row_tiles: int  # tiles of the rows that have the same keys
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
    topk: int  # top-k indices of a query token; 0 without top-k indices
    lse_row: int
    lse_head: int
    lse_natural: int  # 1: base e, 0: base 2
    slots: int  # for partial results
    slot_rows: int
    cta_parts: int  # MLA: CTA parts of a row tile, into which the keys of all requests are cut
    gmem_levels: int  # swap-AB decode: levels of a CTA's tree in global memory
    dcp_world: int  # number of ranks that share the keys
    dcp_rank: int  # number of this rank
    capacity: int  # most keys of a request that the page table has room for


class Geometry(NamedTuple):
    """Sizes, strides in elements, and the grid of prefill."""

    tokens: int  # rows of query
    heads: int
    kv_heads: int
    batch: int
    head_swizzle: int  # in units of ``tile_heads`` heads: heads of a request whose tiles precede the other heads' tiles
    grid: int
    q_token: int
    q_head: int
    o_token: int
    o_head: int
    k_pages: int
    v_pages: int
    k_rows: int  # tokens in a page; for contiguous K all tokens
    v_rows: int
    page_divisor: int  # of the page size, if paged
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
    lse_request: int  # row strides between requests in a padded LSE; -1: rows are output tokens; 0: by offsets
    lse_rows: int  # of a request in a padded LSE, else of the whole tensor; rows past them are not written
    lse_row: int
    lse_head: int
    lse_natural: int  # 1: base e, 0: base 2
    mask_size: int  # of an ``IntervalMask``
    tile_heads: int  # heads that share a query tile
    capacity: int  # most keys of a request that the page table or contiguous K has room for


SCALE_STRIDES = ("k_scale_page", "k_scale_head", "k_scale_row", "v_scale_page", "v_scale_head", "v_scale_row")

# Sizes, strides in elements, and the grid of decode with block scales.
ScaledDecodeGeometry = named_tuple("ScaledDecodeGeometry", *DecodeGeometry._fields, *SCALE_STRIDES)
# Sizes, strides in elements, and the grid of prefill with block scales.
ScaledGeometry = named_tuple(
    "ScaledGeometry",
    *Geometry._fields,
    *SCALE_STRIDES,
    "out_scale_row",  # of the first query token
    "out_scale_columns",
)
