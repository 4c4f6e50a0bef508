"""Products of one warp with 8-bit or 4-bit keys and values: S^T = K Q^T, and the parts shared with the products with V.

Whole warpgroups multiply 16-bit tiles from shared memory. Narrower tiles would pass through shared memory twice on that
path. Memory is the limit and the tensor cores have time to spare. So each warp reads bytes and dequantizes them in
registers into the fragments of mma.sync.

All operands are float16. It represents every e4m3 and int8 value and every scaled NVFP4 value exactly, and weights more
precisely than bf16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32

from hopwell.kernels.config.base import KvType
from hopwell.kernels.elements import HALFWORD_BYTES, Element
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, ptx, shared_address
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, QUAD, accumulate, place_in_warp
from hopwell.kernels.parts.dequant.eight_bit import dequantized, exponent, in_order
from hopwell.kernels.parts.load.block_scales import SharedScales

BLOCK_BYTES = copy.SWIZZLE_ROW_BYTES
LEAST_COLUMNS = 64  # of a block
Q_EXPONENT = 7  # exponent of the largest element of a Q row in float16
Q_EXPONENTS = {KvType.NVFP4: 14}  # and where it makes up for the exponent of dequantized keys


@dataclass(frozen=True)
class ColumnBlock:
    """``width`` columns of keys or values in a 128-byte row; each lane has an equal share of adjacent columns."""

    index: int
    first: int  # first column
    width: int

    @staticmethod
    def all(head_dim: int, bits: int = 8) -> "list[ColumnBlock]":
        """Return the column blocks of a head dim with elements of ``bits`` bits. The last block may be narrower; its
        width is a power of two."""
        most = BLOCK_BYTES * 8 // bits
        blocks = []
        for first in range(0, head_dim, most):
            width = 1 << (min(head_dim - first, most) - 1).bit_length()
            blocks.append(ColumnBlock(first // most, first, max(width, LEAST_COLUMNS)))
        return blocks

    @property
    def key_part(self) -> int:
        """Columns of Q and K that a lane holds."""
        return self.width // QUAD

    @property
    def value_part(self) -> int:
        """Columns of V and O that a lane holds."""
        return self.width // (LANES // QUAD)


def padded(head_dim: int) -> int:
    """Return the total width of all column blocks of a tile's head dim."""
    return sum(block.width for block in ColumnBlock.all(head_dim))


@device_struct
class DequantProducts:
    """Products of 8 * ``products`` rows with 8-bit or 4-bit K and V. Q is in registers, K and V are in shared memory.
    Lane (g, t) of ``place_in_warp`` holds part t of a column block of Q and K."""

    q: Any
    row_factor: Any  # factor of each row's scores
    q_tile: Int32  # addresses of stage 0
    k_tile: Int32
    v_tile: Int32
    k_scales: SharedScales | None  # block scales, or None for elements without them
    v_scales: SharedScales | None
    products: int
    kernel: Any  # configuration only

    @staticmethod
    def fields(kernel, tiles, products: int) -> dict[str, Any]:
        """Return the values of the fields above by name."""
        width, scales = padded(kernel.layout.tile_dims[0]), [None, None]
        if kernel.config.copies_scales:
            scales = [SharedScales.of(kernel, tiles, part) for part in range(2)]
        return dict(
            q=cute.make_rmem_tensor(width * products * MMA_COLUMNS // LANES // 2, Uint32),
            row_factor=cute.make_rmem_tensor(2 * products, Float32),
            q_tile=shared_address(tiles.q.iterator),
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator),
            k_scales=scales[0],
            v_scales=scales[1],
            products=products,
            kernel=kernel,
        )

    @property
    def key_blocks(self) -> list[ColumnBlock]:
        """Column blocks of Q and K."""
        return ColumnBlock.all(self.kernel.layout.tile_dims[0], self.element.bits)

    @property
    def value_blocks(self) -> list[ColumnBlock]:
        """Column blocks of V and O."""
        return ColumnBlock.all(self.kernel.layout.tile_dims[1], self.element.bits)

    @property
    def element(self) -> Element:
        return self.kernel.config.kv_element

    @property
    def exponent(self) -> int:
        """Exponent of the power of two by which K and V are multiplied in products."""
        return exponent(self.kernel.config.kv_type)

    def in_order(self, words: list) -> list:
        """Reorder words of Q into the element order of :meth:`dequantized`."""
        return in_order(self.kernel.config.kv_type, words)

    def dequantized(self, word, factor):
        """Return the elements of a word of K as pairs of float16. ``factor`` has their block scale."""
        return dequantized(self.kernel.config.kv_type, word, factor)

    def load_q(self, stage, first_row) -> None:
        """Load Q of the warp's rows into registers."""
        for product, words in enumerate(self.read_q(stage, first_row)):
            for i, word in enumerate(words):
                self.q[i // 2 * (2 * self.products) + 2 * product + i % 2] = word

    def read_q(self, stage, first_row) -> list:
        """Return Q of the warp's rows as float16, for each product of eight rows. A bf16 row is scaled by a power of
        two that brings it into the float16 range."""
        g, t = place_in_warp()
        rows = []
        tile = self.q_tile + stage * (self.kernel.tile.m * self.kernel.layout.q_columns * HALFWORD_BYTES)
        for product in range(self.products):
            words = []
            for block in self.key_blocks:
                vectors = block.key_part * HALFWORD_BYTES // copy.VECTOR_BYTES
                for i in range(vectors):
                    vector = block.first * HALFWORD_BYTES // copy.VECTOR_BYTES + t * vectors + i
                    column_block = tile + vector // copy.VECTORS_PER_ROW * (self.kernel.tile.m * copy.SWIZZLE_ROW_BYTES)
                    row = first_row + product * MMA_COLUMNS + g
                    words += copy.load_shared(copy.swizzled_vector(column_block, row, vector % copy.VECTORS_PER_ROW), 4)
            words = self.in_order(words)
            if self.kernel.dtype is BFloat16:
                words = self._to_float16(words, product)
            rows.append(words)
        if self.kernel.dtype is not BFloat16:
            self.row_factor.fill(2.0**-self.exponent)
        return rows

    def scale_scores(self, scale) -> None:
        """Multiply the scores of the loaded Q by ``scale``."""
        for i in range(cute.size(self.row_factor)):
            self.row_factor[i] = self.row_factor[i] * scale

    def _to_float16(self, words: list, product: int) -> list:
        """Return row g of a product, scaled by a power of two of its own."""
        values = [half for word in words for half in copy.unpack_bf16_x2(word)]
        largest = Float32(0.0)
        for value in values:
            largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        # A scale of the keys below 1 leaves headroom for larger queries. The row factors undo both scales.
        largest = cute.arch.warp_reduction_max(largest, threads_in_group=QUAD)
        of_q = Q_EXPONENTS.get(self.kernel.config.kv_type, Q_EXPONENT)
        factor, row_factor = power_of_two(largest, of_q, self.exponent)
        for c in range(2):
            lane = (ColumnFragment.first_row() + c) * QUAD
            self.row_factor[2 * product + c] = cute.arch.shuffle_sync(row_factor, lane)
        return [copy.pack_x2(Float16, low * factor, high * factor) for low, high in _pairs(values)]

    def score(self, scores: ColumnFragment, core_matrices: list[tuple]) -> None:
        """Compute S^T of several core matrices of keys; ``core_matrices`` lists each one's stage and its number in the
        stage."""
        scores.registers.fill(0.0)
        for depth, keys in enumerate(self.dequantized_keys(core_matrices)):
            self._multiply(scores, keys, depth)
        self.multiply_scores(scores)

    def dequantized_keys(self, core_matrices: list[tuple]) -> Iterator[list]:
        """Yield the keys for each depth step of the products: two words of each core matrix, from left to right."""
        g, t = place_in_warp()
        scales = self._key_scales(core_matrices)
        for block in self.key_blocks:
            rows = [self.rows(self.k_tile, 0, *core_matrix, block) for core_matrix in core_matrices]
            part = self.element.bytes_of(block.key_part)
            load_bytes = min(part, copy.VECTOR_BYTES)
            for first in range(0, part, load_bytes):
                keys = [copy.load_shared(self._place(row, g, t, part, first), load_bytes // 4) for row in rows]
                for word in range(load_bytes // 4):
                    factors = self._factors(scales, first // 4 + word)
                    wide = [self.dequantized(key[word], factor) for key, factor in zip(keys, factors, strict=True)]
                    for step in range(len(wide[0]) // 2):
                        yield [words[2 * step : 2 * step + 2] for words in wide]

    def multiply_scores(self, scores: ColumnFragment) -> None:
        """Multiply scores by their row's factor, if it may differ from 1."""
        if self.kernel.dtype is BFloat16 or self.exponent != 0 or self.kernel.config.k_head_scales:
            for r in range(scores.rows):
                for c in range(scores.columns):
                    scores.set(r, c, scores.get(r, c) * self.row_factor[r])

    def _multiply(self, scores: ColumnFragment, keys: list, depth: int) -> None:
        """Add one depth step of the product. ``keys`` has two words for each core matrix of eight keys."""
        b = _pairs([self.q[2 * self.products * depth + i] for i in range(2 * self.products)])
        for i in range(0, len(keys), 2):
            a = [keys[i + row][half] for half in range(2) for row in range(2)]
            for product in range(self.products):
                accumulate(scores.registers, i // 2 * self.products + product, a, b[product])

    def _key_scales(self, core_matrices: list[tuple]) -> list:
        """Return the block scales of this lane's part of its key in each core matrix; None for elements without block
        scales."""
        if self.k_scales is None:
            return [None] * len(core_matrices)
        g, t = place_in_warp()
        return [
            self.k_scales.of_part(stage, core_matrix * copy.ATOM_ROWS + g, t, QUAD)
            for stage, core_matrix in core_matrices
        ]

    def _factors(self, scales: list, word: int) -> list:
        """Return the scales for one word of a lane's part, taken from pairs of scales."""
        if self.k_scales is None:
            return scales
        block = word * (32 // self.element.bits) // self.element.block
        return [(pairs[block // 2], block % 2) for pairs in scales]

    def rows(self, tile, part: int, stage, core_matrix, block: ColumnBlock):
        """Return the address of a column block of 8 keys in a stage of K (0) or V (1)."""
        n, columns = self.kernel.tile.n, self.kernel.layout.columns[part]
        place = copy.block_row(core_matrix * copy.ATOM_ROWS, block.index, n, columns, self.kernel.source.columns_first)
        return tile + stage * (n * columns * HALFWORD_BYTES) + place * copy.row_bytes(columns)

    def vector(self, part: int, rows, row, number):
        """Return the address of a vector in a row of K (0) or V (1); ``rows`` is an address from :meth:`rows`."""
        return copy.swizzled_vector(rows, row, number, copy.row_bytes(self.kernel.layout.columns[part]))

    def _place(self, rows, row, part, part_bytes: int, first: int):
        """Return the address of byte ``first`` in part ``part`` of a key's column block; parts have ``part_bytes``
        bytes each."""
        if part_bytes < copy.VECTOR_BYTES:
            per_vector = copy.VECTOR_BYTES // part_bytes
            return self.vector(0, rows, row, part // per_vector) + part % per_vector * part_bytes
        number = part * (part_bytes // copy.VECTOR_BYTES) + first // copy.VECTOR_BYTES
        return self.vector(0, rows, row, number)


def _pairs(values: list) -> list:
    return list(zip(values[::2], values[1::2], strict=True))


def power_of_two(largest, exponent: int, others: int = 0) -> tuple:
    """Return a power of two (``factor``) that scales a positive number to this exponent, and 1 / (``factor`` *
    2^``others``)."""
    return ptx(
        f"{{ .reg .b32 e, f; mov.b32 e, {{$r0}}; shr.u32 e, e, 23; max.u32 e, e, {exponent + 1}; "
        f"sub.u32 f, {254 + exponent}, e; shl.b32 f, f, 23; mov.b32 {{$w0}}, f; "
        f"sub.u32 f, e, {exponent + others}; shl.b32 f, f, 23; mov.b32 {{$w1}}, f; }}",
        largest,
        results=[Float32] * 2,
    )
