"""Consumer warps of decode with many rows over 8-bit or 4-bit caches. Each warp attends to its own keys and dequantizes
them in registers. ``dequant_swap_ab.py`` has the consumers for few rows."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from hopwell.kernels.config.splitting import ROWS
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.arguments import DecodeGeometry
from hopwell.kernels.parts.combine.partials import COLUMNS_AT_ONCE, PARTIAL, Combine, WeightedSum
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, shared_address
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import Rings
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, QUAD, place_in_warp, transposed
from hopwell.kernels.parts.dequant.eight_bit import by_columns, together
from hopwell.kernels.parts.partition.split_kv import SplitTile
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.mask import IntervalMask, TileRange
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import HalfSoftmax, OnlineSoftmax
from hopwell.kernels.sm90.decode.dequant_products import ColumnBlock, DequantProducts, accumulate, padded
from hopwell.kernels.sm90.decode.rows import PackedLogits

STEP_KEYS = 32  # keys that a warp multiplies at a time
MOST_COLUMNS = 128  # columns of Q and of O, at most, with which a warp has two products
STATISTICS_BYTES = 8  # of a row: reference and sum


def most_products(dims: tuple[int, int]) -> int:
    """Return the products of 8 rows that a warp computes side by side, for head dims (QK, V) of tiles. With more
    columns Q and O take too many registers for two."""
    return 2 if max(map(padded, dims)) <= MOST_COLUMNS else 1


@device_struct(frozen=True)
class WarpKeys:
    """Rows and keys of one warp in a work tile.

    The assignment depends only on the number of rows. With up to ``rows`` rows each warp has its own keys, with up to
    twice that number two warps share keys, and so on. If the warps have more key sets than a tile has steps, they
    alternate tiles.
    """

    sharing: Int32  # log2 of the warps that share keys
    steps: Int32  # steps of STEP_KEYS in each of its tiles
    ping_pong: Int32  # log2 of n, of which the warp takes every n-th tile
    rows: int  # of a warp
    warps: int
    tile_steps: int  # steps of a tile, of all warps together

    @staticmethod
    def of(count, products: int, kernel) -> "WarpKeys":
        """Return how warps share a tile with ``count`` rows; each warp takes 8 * ``products`` rows."""
        rows, warps, tile_steps = products * MMA_COLUMNS, kernel.storing_warps, kernel.tile.n // STEP_KEYS
        sharing, least = Int32(0), rows
        while least < ROWS:
            sharing += (count > least).to(Int32)
            least *= 2
        steps = cutlass.max((tile_steps << sharing) // warps, 1)
        ping_pong = cutlass.max((warps // tile_steps).bit_length() - 1 - sharing, 0)
        return WarpKeys(sharing, steps, ping_pong, rows, warps, tile_steps)

    @property
    def warp(self):
        """Number of this warp among the warps of attend."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPGROUP // LANES

    @property
    def first_row(self):
        return (self.warp & ((Int32(1) << self.sharing) - 1)) * self.rows

    @property
    def key_sets(self):
        """Number of key sets of all warps."""
        return Int32(self.warps) >> self.sharing

    @property
    def first_step(self):
        return (self.warp >> self.sharing) * self.steps % self.tile_steps

    def has(self, tile):
        """Return whether the tile is one of this warp's."""
        return tile & ((Int32(1) << self.ping_pong) - 1) == (self.warp >> self.sharing) * self.steps // self.tile_steps

    def place(self, key_set, row):
        """Return the index, among the rows of all warps, of a row in the warp that holds a key set."""
        return ((key_set << self.sharing) + row // self.rows) * self.rows + row % self.rows


@dataclass
class DequantDecodeOperands(DequantProducts):
    """Products over STEP_KEYS keys at a time, with O^T += V^T P^T. S and O are in registers. A lane holds part g of a
    column block of V and O."""

    s: Any
    o: Any

    @staticmethod
    def create(kernel, tiles, products: int) -> "DequantDecodeOperands":
        rows = products * MMA_COLUMNS
        return DequantDecodeOperands(
            **DequantProducts.fields(kernel, tiles, products),
            s=cute.make_rmem_tensor(STEP_KEYS * rows // LANES, Float32),
            o=cute.make_rmem_tensor(padded(kernel.layout.tile_dims[1]) * rows // LANES, Float32),
        )

    def scores(self) -> ColumnFragment:
        return ColumnFragment(self.s, STEP_KEYS // ColumnFragment.lanes_per_row, self.products)

    def multiply_values(self, stage, step) -> None:
        """Add V^T P^T of the same keys to O^T; the score registers must hold the weights."""
        core_matrices = STEP_KEYS // copy.ATOM_ROWS
        weights = self.scores()
        p = [
            [
                transposed(copy.pack_x2(Float16, weights.get(2 * product, i), weights.get(2 * product + 1, i)))
                for i in range(core_matrices)
            ]
            for product in range(self.products)
        ]
        kind = self.kernel.config.kv_type
        for first in range(0, core_matrices, 2):
            fragment, weights = 0, [pair[first : first + 2] for pair in p]
            for block in self.value_blocks:
                # Two adjacent keys are the halves of a word of A. Adjacent columns are its rows g and g + 8.
                pairs = [self._values(stage, core_matrices * step + first + i, block) for i in range(2)]
                for word in range(len(pairs[0][0])):
                    scales = [
                        self._value_scales(stage, core_matrices * step + first + i, block, word) for i in range(2)
                    ]
                    parts = [together(kind, *[key[word] for key in keys]) for keys in pairs]
                    for both in zip(*parts, strict=True):
                        columns = [by_columns(kind, *one) for one in zip(both, scales, strict=True)]
                        fragment = self._add(columns, weights, fragment)

    def _add(self, columns: list, weights: list, fragment: int) -> int:
        """Add some columns of two core matrices of keys to consecutive fragments, starting with ``fragment``. Return
        the next fragment."""
        for c in range(0, len(columns[0]), 2):
            a = [columns[half][c + row] for half in range(2) for row in range(2)]
            for product in range(self.products):
                accumulate(self.o, fragment, a, weights[product])
                fragment += 1
        return fragment

    def _values(self, stage, core_matrix, block: ColumnBlock) -> list:
        """Return this lane's part of a column block of V, for its two keys in a core matrix."""
        g, t = place_in_warp()
        part = self.element.bytes_of(block.value_part)
        rows, byte = self.rows(self.v_tile, 1, stage, core_matrix, block), g * part
        vectors = [self.vector(1, rows, 2 * t + i, byte // copy.VECTOR_BYTES) for i in range(2)]
        return [copy.load_shared(vector + byte % copy.VECTOR_BYTES, part // 4) for vector in vectors]

    def _value_scales(self, stage, core_matrix, block: ColumnBlock, word: int) -> Any:
        """Return the scales of one word of this lane's part, for its two keys in a core matrix."""
        if self.v_scales is None:
            return None
        g, t = place_in_warp()
        column = g * block.value_part + word * (32 // self.element.bits)
        return self.v_scales.of_two_rows(stage, core_matrix * copy.ATOM_ROWS + 2 * t, column // self.element.block)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    def columns(self, block: ColumnBlock, r: int) -> list:
        """Return this lane's part of a column block of row r of O."""
        first, output = block.first // (LANES // QUAD), self.output()
        return [output.get(r, first + i) * 2.0**-self.exponent for i in range(block.value_part)]


@device_struct(frozen=True)
class Exchange:
    """Shared memory through which the attend warps pass their rows to the combine warpgroup."""

    statistics: Int32  # shared-memory addresses
    columns: Int32
    width: int

    @staticmethod
    def warp_bytes(dims: tuple[int, int]) -> int:
        """Return the bytes of shared memory for one warp."""
        return most_products(dims) * MMA_COLUMNS * (4 * padded(dims[1]) + STATISTICS_BYTES)

    @staticmethod
    def create(kernel, tiles) -> "Exchange":
        begin, dims = shared_address(tiles.staging), kernel.layout.tile_dims
        rows = kernel.storing_warps * most_products(dims) * MMA_COLUMNS
        return Exchange(begin, begin + rows * STATISTICS_BYTES, padded(dims[1]))

    def row_statistics(self, row):
        """Return the address of a row's (reference, sum). Rows are numbered over all warps."""
        return self.statistics + row * STATISTICS_BYTES

    def vector(self, row, vector):
        """Return the address of a row's columns from 4 * ``vector`` on. Lanes store columns that are 16 apart, in every
        other row. The XOR of the vector number keeps these stores free of bank conflicts."""
        return self.columns + row * (4 * self.width) + (vector ^ (row // 2 % 4)) * copy.VECTOR_BYTES


@device_struct
class DequantWarps:
    """The attend warps, which only compute partials; the combine warpgroup adds them up.

    If a work tile has no more rows than one warp, each of 8 warps has 32 of the 128 keys of every other tile:

        memory       |  K(i-2), V(i-2)  |  K(i-3), V(i-3)  |  K(i-4), V(i-4)  | ...
        warps 0..3   | S(i), softmax, O += P V  |  waits   | S(i-2), softmax, O += P V | ...
        warps 4..7   |   waits  | S(i-1), softmax, O += P V  |   waits   | S(i-3), ...
    """

    kernel: Any  # configuration only
    tiles: SharedTiles
    rings: Rings
    work_queue: WorkQueue
    mask: IntervalMask
    softmax: OnlineSoftmax  # gives the scale; each warp has a softmax for its own rows
    logits: PackedLogits

    @cute.jit
    def run(self, geometry: DecodeGeometry):
        kv_step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            count = cutlass.min(tile.rows(geometry.group), ROWS)
            most = most_products(self.kernel.layout.tile_dims)
            if const_expr(most > 1):
                if count <= MMA_COLUMNS:
                    self.attend_work_tile(1, tile, count, kv_step, work)
                else:
                    self.attend_work_tile(most, tile, count, kv_step, work)
            else:
                self.attend_work_tile(1, tile, count, kv_step, work)
            kv_step += tile.keys.end - tile.keys.begin
            work += 1
            tile = self.work_queue.read(work)

    @cute.jit
    def attend_work_tile(self, products: cutlass.Constexpr[int], tile: SplitTile, count, kv_step, work) -> None:
        """Attend to a work tile with ``count`` rows; each warp takes 8 * ``products`` of them."""
        q_ring = self.rings.q
        operands = DequantDecodeOperands.create(self.kernel, self.tiles, products)
        softmax = HalfSoftmax.over(self.softmax.scale, 2 * products)
        mine = WarpKeys.of(count, products, self.kernel)
        q_ring.wait_full(work)
        operands.load_q(q_ring.stage(work), mine.first_row)
        if const_expr(self.kernel.config.k_head_scales):
            operands.scale_scores(self.logits.head_scale(tile))
        cute.arch.sync_warp()
        q_ring.release(work)
        softmax.reset()
        operands.o.fill(0.0)
        row = self.logits.logit_row(tile, mine.first_row, operands.scores())
        for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
            self.attend_tile(operands, softmax, mine, tile.keys, n, row, kv_step)
            kv_step += 1
        self.rings.partial.wait_released(work)
        self.hand_over(operands, softmax, mine, count)
        self.rings.partial.fill(work)

    @cute.jit
    def attend_tile(
        self, operands: DequantDecodeOperands, softmax, mine: WarpKeys, keys: TileRange, n, row, kv_step
    ) -> None:
        """Attend to this warp's keys of tile n."""
        k_ring, v_ring = self.rings.k, self.rings.v
        masked = n < keys.full_begin or n >= keys.full_end
        steps = mine.steps if mine.has(n) else Int32(0)
        k_ring.wait_full(kv_step)
        for i in cutlass.range(steps, unroll=1):
            step = mine.first_step + i
            scores = operands.scores()
            stage, first = k_ring.stage(kv_step), scores.columns * step
            operands.score(scores, [(stage, first + core_matrix) for core_matrix in range(scores.columns)])
            if masked:
                self.mask.apply(scores, n * self.kernel.tile.n + step * STEP_KEYS, row)
            softmax.step(scores)
            softmax.rescale_output(operands.output())
            v_ring.wait_full(kv_step)
            operands.multiply_values(v_ring.stage(kv_step), step)
        v_ring.wait_full(kv_step)
        cute.arch.sync_warp()
        k_ring.release(kv_step)
        v_ring.release(kv_step)

    @cute.jit
    def hand_over(self, operands: DequantDecodeOperands, softmax, mine: WarpKeys, count) -> None:
        """Write this warp's rows to the exchange for :class:`DequantCombine`."""
        exchange = Exchange.create(self.kernel, self.tiles)
        scores, (g, _) = operands.scores(), place_in_warp()
        for r in cutlass.range_constexpr(scores.rows):
            own = scores.first_row() + scores.row_offset(r)
            row = mine.warp * mine.rows + own
            statistics = softmax.partial(r, scores.lanes_per_row)
            if mine.first_row + own < count:
                if g == 0:
                    copy.store_shared(exchange.row_statistics(row), statistics)
                for block in operands.value_blocks:
                    columns = operands.columns(block, r)
                    for i in cutlass.range_constexpr(0, len(columns), COLUMNS_AT_ONCE):
                        vector = (block.first + g * block.value_part + i) // COLUMNS_AT_ONCE
                        copy.store_shared(exchange.vector(row, vector), columns[i : i + COLUMNS_AT_ONCE])


@dataclass(frozen=True)
class DequantCombine(Combine):
    """Combine that first adds up the attend warps' results of a work tile, then combines the work tile with others.
    Attend waits for the exchange, not for a free slot."""

    exchange: Exchange
    kernel: Any  # configuration only

    @cute.jit
    def run(self, work_queue, ring, addresses, geometry, scale, out_dtype: cutlass.Constexpr) -> None:
        work = Int32(0)
        ring.release(work)
        tile = work_queue.read(work)
        while tile.exists:
            rows = PackedRows.create(addresses, geometry, tile, scale, out_dtype.width // 8)
            ring.wait_full(work)
            self.prepare(tile)
            self.meet()
            self.gather(tile, rows, out_dtype)
            work += 1
            # Release the exchange first, so that attend does not wait for the combine.
            ring.release(work)
            if tile.chunks > 1:
                self.complete(tile, rows, out_dtype)
            tile = work_queue.read(work)
        self.hand_back(Int32(geometry.grid))

    @cute.jit
    def gather(self, tile: SplitTile, rows: PackedRows, out_dtype: cutlass.Constexpr) -> None:
        count = cutlass.min(rows.count, ROWS)
        if const_expr(most_products(self.kernel.layout.tile_dims) > 1):
            if count <= MMA_COLUMNS:
                self.add_up(WarpKeys.of(count, 1, self.kernel), tile, rows, count, out_dtype)
            else:
                most = most_products(self.kernel.layout.tile_dims)
                self.add_up(WarpKeys.of(count, most, self.kernel), tile, rows, count, out_dtype)
        else:
            self.add_up(WarpKeys.of(count, 1, self.kernel), tile, rows, count, out_dtype)
        self.meet()

    @cute.jit
    def add_up(self, mine: WarpKeys, tile: SplitTile, rows: PackedRows, count, out_dtype: cutlass.Constexpr) -> None:
        """Add up all rows and write the output or a partial."""
        vectors = self.slots.columns // COLUMNS_AT_ONCE
        for index in cutlass.range(self.thread, count * vectors, self.threads, unroll=1):
            row = index // vectors
            vector = index - row * vectors
            places = [mine.place(cutlass.min(i, mine.key_sets - 1), row) for i in range(mine.warps)]
            statistics = [copy.load_shared(self.exchange.row_statistics(place), 2, Float32) for place in places]
            outputs = [
                copy.load_shared(self.exchange.vector(place, vector), COLUMNS_AT_ONCE, Float32) for place in places
            ]
            total = WeightedSum.nothing().plus(statistics, outputs, mine.key_sets)
            column = vector * COLUMNS_AT_ONCE
            if tile.chunks == 1:
                factor = rows.finish(row, total.reference, total.sum, column == 0)
                copy.store_rounded(rows.output(row, column), [value * factor for value in total.values], out_dtype)
            else:
                self.slots.store_vector(tile.partial_id, row, column, total, PARTIAL)
