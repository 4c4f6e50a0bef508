"""The append kernel: writes new keys and values into the pages of a cache and quantizes them. One source serves all
archs.

A CTA processes one token, of K or of V. All of its threads look up the same page, and then take neighbouring elements,
16 bytes at a time. K and V of a token have separate CTAs, so that all threads have work with few heads.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, const_expr

from hopwell.kernels.append.config import AppendAddresses, AppendConfig, AppendGeometry, CacheType
from hopwell.kernels.elements import HALFWORD_BYTES, INTERLEAVED_TOKENS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, load_float, load_scale, load_wide_index
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.dequant import quantize

THREADS = 128
UNPACK = {"bf16": copy.unpack_bf16_x2, "fp16": copy.unpack_f16_x2}


@device_struct(frozen=True)
class Destination:
    """K or V: the new rows, and their destination in the cache. Strides are in elements."""

    rows: Int64
    token: Int64
    head: Int64
    cache: Int64
    page: Int64
    cache_head: Int64
    row: Int64
    scales: Int64
    scale_page: Int64
    scale_head: Int64
    scale_row: Int64
    dim: Int32
    interleaves: bool

    @staticmethod
    def of_keys(a: AppendAddresses, g: AppendGeometry) -> "Destination":
        source = (a.key, g.key_token, g.key_head)
        cache = (a.key_cache, g.k_page, g.k_head, g.k_row)
        scales = (a.key_scales, g.k_scale_page, g.k_scale_head, g.k_scale_row)
        return Destination(*source, *cache, *scales, Int32(g.k_dim), interleaves=False)

    @staticmethod
    def of_values(a: AppendAddresses, g: AppendGeometry, interleaves: bool) -> "Destination":
        source = (a.value, g.value_token, g.value_head)
        cache = (a.value_cache, g.v_page, g.v_head, g.v_row)
        scales = (a.value_scales, g.v_scale_page, g.v_scale_head, g.v_scale_row)
        return Destination(*source, *cache, *scales, Int32(g.v_dim), interleaves)

    @cute.jit
    def store_scale(self, factor, page, head, row, block, blocks) -> None:
        """Write the scale of a block of 16 elements."""
        column = block
        if const_expr(self.interleaves):
            quarter = blocks // INTERLEAVED_TOKENS
            column = block % quarter * INTERLEAVED_TOKENS + row % INTERLEAVED_TOKENS
            row = row // INTERLEAVED_TOKENS * INTERLEAVED_TOKENS + block // quarter
        place = page * self.scale_page + head * self.scale_head + row * self.scale_row + column
        copy.store_element("b8", self.scales + place, factor)


class Append:
    """The kernel for one type of cache. A CTA writes one token, of K or of V.

    Warp roles
        warps 0..3         all the same: a thread takes every 128th block of the token's heads

    Edges: none. Blocks go through registers, and threads share nothing. The first load waits for the preceding grid
    (programmatic dependent launch).

    Steady state: memory is the limit, except for NVFP4, which instructions limit.

        memory  | request, position, page id | blocks of 16 bytes | | stores of blocks, and of block scales
        threads | waits                      | waits              | divide, round, pack | next block ...
    """

    def __init__(self, config: AppendConfig):
        self.config, self.kind = config, config.kind

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses: AppendAddresses,
        geometry: AppendGeometry,
        k_scale: Float32,
        v_scale: Float32,
        programmatic_launch: Int32,
        stream: cuda.CUstream,
    ):
        """Launch the kernel. No code reads ``anchor``; it selects the device."""
        self.kernel(addresses, geometry, k_scale, v_scale).launch(
            grid=[Int32(geometry.tokens), 2, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=programmatic_launch,
        )

    @cute.kernel
    def kernel(self, a: AppendAddresses, g: AppendGeometry, k_scale: Float32, v_scale: Float32):
        token, part, _ = cute.arch.block_idx()
        # The preceding grid may still be computing the new tokens, or reading the pages.
        cute.arch.griddepcontrol_wait()
        if part == 0:
            scale = load_scale(a.k_scale, k_scale)
            page, row = self.place(a, g, token, a.key_table, g.key_table_row)
            if page >= 0 and page < g.k_pages:
                to, scales = Destination.of_keys(a, g), a.k_scale if self.config.k_head_scales else None
                self.write(to, Int32(g.kv_heads), token, page, row, scale, scales)
        else:
            scale = load_scale(a.v_scale, v_scale)
            page, row = self.place(a, g, token, a.value_table, g.value_table_row)
            if page >= 0 and page < g.v_pages:
                interleaves = self.kind is CacheType.NVFP4_INTERLEAVED
                to, scales = Destination.of_values(a, g, interleaves), a.v_scale if self.config.v_head_scales else None
                self.write(to, Int32(g.kv_heads), token, page, row, scale, scales)

    @cute.jit
    def place(self, a, g, token, table, table_row):
        """Return the page of a token, -1 if there is none, and its row in the page."""
        position = load_wide_index(a.positions, token)
        index, row = self.split(g, position)
        page = index
        if table != 0:
            page = Int64(-1)
            request = load_wide_index(a.batch_indices, token)
            if request >= 0 and request < g.batch and position >= 0:
                first, end = request * table_row, request * table_row + g.table_width
                if a.page_starts != 0:
                    first = load_wide_index(a.page_starts, request)
                    end = cutlass.min(load_wide_index(a.page_starts, request + 1), g.table_width)
                # The first two conditions rule out an overflow of the difference.
                if first >= 0 and first < end and index < end - first:
                    page = load_wide_index(table, first + index)
        return page, row

    @cute.jit
    def split(self, g, position):
        """Return the number of pages before a position, -1 or less if the position is negative, and its row."""
        page, size = Int64(-1), Int64(g.page_size)
        if g.page_shift >= 0:
            page = position >> Int64(g.page_shift)
        elif position >= 0:
            page = (position.to(Uint64) // size.to(Uint64)).to(Int64)
        return page, position - page * size

    @cute.jit
    def write(self, to: Destination, heads, token, page, row, scale, scales) -> None:
        """Write a token's heads into a row of a page; ``scales`` is the address of a scale for each head, or None."""
        elements = self.kind.elements
        blocks = to.dim // elements
        source = to.rows + token * to.token * HALFWORD_BYTES
        for index in cutlass.range(cute.arch.thread_idx()[0], heads * blocks, THREADS, unroll=1):
            head, block = index // blocks, index % blocks
            words = self.load(source + (head * to.head + block * elements) * HALFWORD_BYTES)
            place = page * to.page + head * to.cache_head + row * to.row
            if const_expr(self.kind is CacheType.WIDE):
                copy.store_global(to.cache + (place + block * elements) * HALFWORD_BYTES, words)
            else:
                divisor = scale if const_expr(scales is None) else load_float(scales, head, 1.0)
                values = [quantize.divided(half, divisor) for word in words for half in UNPACK[self.config.dtype](word)]
                if const_expr(self.kind is CacheType.E4M3):
                    copy.store_global(to.cache + place + block * elements, quantize.e4m3_words(values))
                else:
                    codes, factor = quantize.nvfp4_block(values)
                    copy.store_global(to.cache + place + block * (elements // 2), codes)
                    to.store_scale(factor, page, head, row, block, blocks)

    def load(self, address) -> list:
        """Load the elements that a thread processes at a time, two in a word."""
        bytes_ = self.kind.elements * HALFWORD_BYTES
        vectors = range(0, bytes_, copy.VECTOR_BYTES)
        return [word for offset in vectors for word in copy.load_global(address + offset, 4, Uint32)]


def build(config: AppendConfig) -> tuple[Any, tuple[Any, ...]]:
    """Return the launch function and example arguments to compile it with."""
    return Append(config), example_arguments((AppendAddresses, AppendGeometry), floats=2)
