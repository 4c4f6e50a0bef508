"""Scales of blocks of K and V in pages, as ``hopwell.layouts.scales`` describes them."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr

from hopwell.kernels.launch import Addresses
from hopwell.kernels.parts.device import DeviceStruct, global_array, load_index
from hopwell.kernels.parts.page_size import page_size

TOKENS = 4  # whose scales of a block are neighbours where they are interleaved, and scales in a word


@dataclass
class ScaleRows(DeviceStruct):
    """The scales of K or of V. Strides are in bytes."""

    address: Int64
    page: Int64
    head: Int64
    row: Int64
    table: Int64
    table_row: Int64
    pages: Any  # their size
    blocks: int  # of a row
    interleaves: bool

    @staticmethod
    def of(config, a: Addresses, g) -> "tuple[ScaleRows, ScaleRows]":
        """Return the scales of K, and those of V."""
        size, block = config.kv_element.block, config.uneven_pages
        key = ScaleRows(
            a.key_scales,
            g.k_scale_page,
            g.k_scale_head,
            g.k_scale_row,
            a.key_table,
            g.key_table_row,
            page_size(g.page_divisor, g.k_rows, block),
            config.head_dim_qk // size,
            interleaves=False,
        )
        value = ScaleRows(
            a.value_scales,
            g.v_scale_page,
            g.v_scale_head,
            g.v_scale_row,
            a.value_table,
            g.value_table_row,
            page_size(g.page_divisor, g.v_rows, block),
            config.head_dim_v // size,
            interleaves=True,
        )
        return key, value

    @cute.jit
    def look_up(self, tile, key, n):
        """The page of a key of tile ``n``; -1 where the key is not needed."""
        entry = Int32(-1)
        if n >= tile.keys.begin and key >= tile.keys.first_key and key < tile.request.kv_len:
            entry = load_index(self.table + 4 * self.table_row * tile.request.index, self.pages.split(key)[0])
        return entry

    def read(self, tile, key, page, part, parts: int) -> list:
        """The scales of an equal part of a row, four in a word; 0 where ``page`` is negative."""
        head = self.address + page * self.page + tile.kv_head * self.head
        row = self.pages.split(key)[1]
        count = self.blocks // parts
        words = [Uint32(0) for _ in range(-(-count // TOKENS))]
        return self._read(head, row, page, part * count, count, words)

    @cute.jit
    def _read(self, head, row, page, first, count: cutlass.Constexpr[int], words):
        if page >= 0:
            if const_expr(self.interleaves):
                # A quarter of a row's blocks lies in each of the four rows that four tokens share.
                quarter = self.blocks // TOKENS
                for i in cutlass.range_constexpr(count):
                    block = first + i
                    place = head + (row // TOKENS * TOKENS + block // quarter) * self.row
                    place += block % quarter * TOKENS + row % TOKENS
                    scale = global_array(Uint8, place)[0].to(Uint32)
                    words[i // TOKENS] = words[i // TOKENS] | (scale << (8 * (i % TOKENS)))
            elif const_expr(count % TOKENS == 0):
                for i in cutlass.range_constexpr(len(words)):
                    words[i] = global_array(Uint32, head + row * self.row + first)[i]
            else:  # a part of a row of 4 or 12 blocks begins in the middle of a word
                for i in cutlass.range_constexpr(count // 2):
                    pair = global_array(Uint16, head + row * self.row + first)[i].to(Uint32)
                    words[i // 2] = words[i // 2] | (pair << (16 * (i % 2)))
        return words
