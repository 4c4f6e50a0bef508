"""Operands of sm_120 prefill over 8-bit or 4-bit K and V without a dequant warpgroup. Each warp converts the operands
of its products in registers.

ldmatrix moves units of 16 bits of any type. Rows of K keep their order: a word has four or eight adjacent columns of a
key. They are adjacent in the product too if Q is read in the same order. V is transposed by pairs of bytes: a word has
16 bits each of two adjacent keys, and is split into words of one column.
"""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32, const_expr, extract_mlir_values

from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, prmt, selected
from hopwell.kernels.parts.core.fragment import SplitRowFragment
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, multiply_e4m3, place_in_warp
from hopwell.kernels.parts.dequant import e2m1
from hopwell.kernels.parts.dequant.eight_bit import adjacent, dequantized
from hopwell.kernels.parts.load.block_scales import TOKENS, ScaleRows
from hopwell.kernels.parts.partition.tiles import QueryTile
from hopwell.kernels.sm90.common.dequant import EVEN_BYTES, ODD_BYTES
from hopwell.kernels.sm90.prefill.fp8 import round_to_e4m3
from hopwell.kernels.warp_mma.common.operands import WarpOperands, WideElements


@dataclass
class NarrowOperands(WarpOperands):
    """Operands of which a warp converts K and V on the way to its products, by ``elements``."""

    def output(self) -> SplitRowFragment:
        fragments = self.elements.vector_fragments
        return SplitRowFragment(self.o, self.depth_v // SplitRowFragment.lanes_per_row, fragments)

    def issue_pv(self, v_stage) -> None:
        config, lane = self.kernel.config, cute.arch.lane_idx()
        columns, columns_first = config.layout.operand_columns[1], self.columns_first
        stage = self.v_tile + v_stage * (self.tile_n * columns * HALFWORD_BYTES)
        words_of_p, cache = LANES * self.elements.p_bits // 64, self.elements
        for part in range(self.tile_n // LANES):
            p, scales = [self.p[words_of_p * part + i] for i in range(words_of_p)], None
            for vector in range(self.depth_v // (MMA_COLUMNS * self.elements.vector_fragments)):
                place = copy.tile_vector(stage, LANES * part + lane, vector, self.tile_n, columns, columns_first)
                words = copy.load_matrix_x4(place, transposes=True)
                scales = cache.scales_of(part, vector, scales)
                for first, fragments in enumerate(cache.values(words, vector, scales)):
                    for i, b in enumerate(fragments):
                        self.accumulate(
                            self.o, self.elements.vector_fragments * vector + i, p[4 * first : 4 * first + 4], b
                        )


@device_struct
class NarrowElements(WideElements):
    """Base of the conversions of 8-bit and 4-bit K and V."""

    vector_fragments = 2  # fragments of O that a vector of V contributes to
    most_q_words = 16  # conversion needs the other registers

    def scales_of(self, part: int, vector: int, before: Any) -> Any:
        """Return the scales of V of 32 keys in a vector of columns; ``before`` is the result for
        the preceding vector."""
        return before

    def values(self, words: list, vector: int, scales: Any) -> list[list]:
        """Return operand B of each product of 32 keys and a vector of V's columns. ``words`` is a lane's part of four
        core matrices of keys. The result has one list for each operand A of P for these keys."""
        raise NotImplementedError


@device_struct
class Fp8Elements(NarrowElements):
    """Q, K, V and P in e4m3. A lane's P has keys 2 t, 2 t + 1, 8 + 2 t and 8 + 2 t + 1 of sixteen side by side.
    Reassembled words of V have the same order."""

    p_bits = 8

    def values(self, words: list, vector: int, scales: Any) -> list[list]:
        return [[[prmt(words[i], words[i + 1], select) for i in (0, 2)] for select in (EVEN_BYTES, ODD_BYTES)]]

    def round_scores(self, s, p) -> None:
        round_to_e4m3(s, p)

    def product(self, d, a, b) -> tuple:
        return multiply_e4m3(d, a, b, self.kernel.config.block_scaled)


def read_spread_q(elements, tile, step: int) -> list:
    """Read Q of rows g and g + 8, with columns in the order of a word of K."""
    m, columns = elements.kernel.tile.m, elements.kernel.layout.q_columns
    (g, t), size = place_in_warp(), 2 * elements.neighbours
    words = []
    for vector in (2 * step, 2 * step + 1):  # of K
        first = (4 * vector + t) * size  # byte of a row of Q
        low, high = (
            copy.load_shared(
                copy.tile_vector(tile, g + row, first // copy.VECTOR_BYTES, m, columns, False)
                + first % copy.VECTOR_BYTES,
                size // 4,
            )
            for row in (0, 8)
        )
        for i in range(0, size // 4, 2):
            words += [low[i], high[i], low[i + 1], high[i + 1]]
    return words


def by_keys(words: list[list]) -> list[list]:
    """Return operand B of each product of 16 keys, from the words of core matrices of keys: one for each fragment
    of O."""
    return [[list(b) for b in zip(words[i], words[i + 1], strict=True)] for i in (0, 2)]


@device_struct
class E4m3Elements(NarrowElements):
    """16-bit Q over K and V in e4m3. The products equal the products of 16-bit K and V, with adjacent elements in other
    positions."""

    step_products = 2
    neighbours = 4  # adjacent columns of a key in a word

    def read_q(self, tile, step: int) -> list:
        return read_spread_q(self, tile, step)

    def keys(self, words: list, step: int, core_matrix: int) -> list:
        return [self.wide(word) for word in words]

    def values(self, words: list, vector: int, scales: Any) -> list[list]:
        return by_keys([self.wide(adjacent(word)) for word in words])

    def wide(self, word) -> list:
        """Return four elements as two words, with two elements each in the type of Q."""
        words = dequantized(self.kernel.config.kv_type, word)
        if const_expr(self.kernel.dtype is BFloat16):
            words = [copy.pack_x2(BFloat16, *copy.unpack_f16_x2(word)) for word in words]
        return list(words)


# Byte permutes of two words. Lanes in the first of two blocks of 16 columns take the first byte of both words, then the
# third byte of both. Lanes in the second block take the bytes one further on.
PAIRED_SCALES, NEXT_SCALE = 0x6240, 0x1111


@device_struct
class Nvfp4Elements(NarrowElements):
    """16-bit Q over K and V in NVFP4. Lane i holds the scales of key i of 32, and other lanes read them by shuffles.
    The scales come from global memory. Scales of K are read after the preceding product has been issued, scales of V
    when P is known."""

    k_scales: ScaleRows
    v_scales: ScaleRows
    tile: Any  # the work tile as integers, then the number of the next tile of keys
    k_pages: Any  # page ids of the lane's keys in the next tile
    v_pages: Any  # page ids of the lane's keys in the tile whose scores have been computed
    k_words: Any  # scales
    v_words: Any

    step_products = 4
    neighbours = 8
    vector_fragments = 4

    @classmethod
    def create(cls, kernel, addresses, geometry) -> "Nvfp4Elements":
        k_scales = ScaleRows.key(kernel.config, addresses, geometry)
        interleaves = not kernel.config.linear_v_scales
        v_scales = ScaleRows.value(kernel.config, addresses, geometry, interleaves=interleaves)
        rows = kernel.tile.n // LANES  # of a lane
        return cls(
            kernel,
            k_scales=k_scales,
            v_scales=v_scales,
            tile=cute.make_rmem_tensor(QueryTile.INTS + 1, Int32),
            k_pages=cute.make_rmem_tensor(rows, Int32),
            v_pages=cute.make_rmem_tensor(rows, Int32),
            k_words=cute.make_rmem_tensor(rows * (k_scales.blocks // TOKENS), Uint32),
            v_words=cute.make_rmem_tensor(rows * (v_scales.blocks // TOKENS), Uint32),
        )

    def read_q(self, tile, step: int) -> list:
        return read_spread_q(self, tile, step)

    def begin(self, tile, n) -> None:
        for i, value in enumerate(extract_mlir_values(tile)):
            self.tile[i] = Int32(value)
        self._look_up(self.k_scales, self.k_pages, n)
        self._read(self.k_scales, self.k_pages, self.k_words, n)
        self._look_up(self.k_scales, self.k_pages, n - 1)
        self.tile[QueryTile.INTS] = n
        cute.arch.sync_warp()  # lanes whose keys are not needed have run ahead

    def after_qk(self) -> None:
        n = self.tile[QueryTile.INTS]
        self._look_up(self.v_scales, self.v_pages, n)
        self._read(self.k_scales, self.k_pages, self.k_words, n - 1)
        self._look_up(self.k_scales, self.k_pages, n - 2)
        self.tile[QueryTile.INTS] = n - 1
        cute.arch.sync_warp()

    def after_rounding(self) -> None:
        self._read(self.v_scales, self.v_pages, self.v_words, self.tile[QueryTile.INTS] + 1)
        cute.arch.sync_warp()

    def _work_tile(self) -> QueryTile:
        return QueryTile.from_ints([self.tile[i] for i in range(QueryTile.INTS)])

    def _keys_of_lane(self, n) -> list:
        first = n * self.kernel.tile.n + cute.arch.lane_idx()
        return [first + i for i in range(0, self.kernel.tile.n, LANES)]

    def _look_up(self, scales: ScaleRows, pages, n) -> None:
        for i, key in enumerate(self._keys_of_lane(n)):
            pages[i] = scales.look_up(self._work_tile(), key, n)

    def _read(self, scales: ScaleRows, pages, words, n) -> None:
        count = scales.blocks // TOKENS
        for i, key in enumerate(self._keys_of_lane(n)):
            for k, word in enumerate(scales.read(self._work_tile(), key, pages[i], 0, 1)):
                words[count * i + k] = word

    def _word(self, words, scales: ScaleRows, key: int, lane, word: int):
        """Return scales ``4 * word`` to ``4 * word + 3`` of the key that is ``lane`` keys after ``key``."""
        own = scales.blocks // TOKENS * (key // LANES) + word
        return cute.arch.shuffle_sync(words[own], key % LANES + lane)

    def keys(self, words: list, step: int, core_matrix: int) -> list:
        g, t = place_in_warp()
        scales = self._word(self.k_words, self.k_scales, MMA_COLUMNS * core_matrix, g, step)
        scales = selected(scales, scales, PAIRED_SCALES + t // 2 * NEXT_SCALE)
        found = []
        for half, word in enumerate(words):
            wide = e2m1.scaled(word, e2m1.dequantized_half(scales, half, self.kernel.dtype), self.kernel.dtype)
            found += [wide[:2], wide[2:]]
        return found

    def scales_of(self, part: int, vector: int, before: Any) -> list:
        """Return one word for every eight keys: scales of keys 2 t and 2 t + 1 for this vector and for the next."""
        if vector % 2 == 1:
            return before
        (g, t), found = place_in_warp(), []
        for key in range(LANES * part, LANES * (part + 1), MMA_COLUMNS):
            low, high = (self._word(self.v_words, self.v_scales, key, 2 * t + k, vector // 2) for k in range(2))
            found.append(selected(low, high, PAIRED_SCALES + g // 4 * NEXT_SCALE))
        return found

    def values(self, words: list, vector: int, scales: Any) -> list[list]:
        factors = [e2m1.dequantized_half(pair, vector % 2, self.kernel.dtype) for pair in scales]
        wide = [e2m1.scaled(*each, self.kernel.dtype, pairs_halves=True) for each in zip(words, factors, strict=True)]
        return by_keys(wide)
