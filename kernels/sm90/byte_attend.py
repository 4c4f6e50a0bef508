"""The consumer warps of decode over 8-bit caches: each attends to keys of its own, widened in its registers.

Tiles of 16-bit keys are multiplied by whole warpgroups out of shared memory. Those of 8-bit keys would have to go
through it twice, and where memory is the limit, the tensor cores have time to spare. So a warp reads bytes straight
into the fragments of mma.sync, 32 keys at a time. All products are of float16, which holds every e4m3 and int8 exactly,
and weights better than bf16.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Uint32, const_expr
from cutlass.cutlass_dsl import dsl_user_op

from hopwell.kernels.config import LANES, WARPGROUP
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, shared_address
from hopwell.kernels.parts.fragment import ColumnFragment
from hopwell.kernels.parts.mask import TileRange
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import COLUMNS_AT_ONCE, PIECE, Merge, WeightedSum
from hopwell.kernels.parts.softmax import ColumnSoftmax
from hopwell.kernels.parts.split import SplitTile
from hopwell.kernels.parts.warp_mma import MMA_COLUMNS, QUAD, multiply, place_in_warp, transposed
from hopwell.kernels.parts.widen import interleaved, widened
from hopwell.kernels.sm90.decode_attend import DecodeAttend
from hopwell.kernels.splitting import ROWS

STEP_KEYS = 32  # that a warp multiplies at a time
BLOCK_BYTES = copy.SWIZZLE_ROW_BYTES
STATISTICS_BYTES = 8  # of a row: reference and sum


@dataclass(frozen=True)
class ColumnBlock:
    """``width`` columns of keys or values in a row of 128 bytes, an equal part of them side by side for each lane."""

    index: int
    width: int

    @staticmethod
    def all(head_dim: int) -> "list[ColumnBlock]":
        """Half a block is all that the last one has to be."""
        widths = [min(head_dim - first, BLOCK_BYTES) for first in range(0, head_dim, BLOCK_BYTES)]
        return [ColumnBlock(i, BLOCK_BYTES // (1 if width > BLOCK_BYTES // 2 else 2)) for i, width in enumerate(widths)]

    @property
    def first(self) -> int:
        return self.index * BLOCK_BYTES

    @property
    def key_part(self) -> int:
        """Columns of Q and K that a lane holds."""
        return self.width // QUAD

    @property
    def value_part(self) -> int:
        """Columns of V and O that a lane holds."""
        return self.width // (LANES // QUAD)


def padded(head_dim: int) -> int:
    """Columns of all blocks."""
    return sum(block.width for block in ColumnBlock.all(head_dim))


def most_products(head_dim: int) -> int:
    """Products of 8 rows that a warp has side by side; of two column blocks O takes too many registers."""
    return 2 if len(ColumnBlock.all(head_dim)) == 1 else 1


@dataclass(frozen=True)
class KeyShare(DeviceStruct):
    """What a warp has of the work: some of the rows, and which keys.

    It depends on the number of rows alone: up to ``rows`` each warp has keys of its own, up to twice as many two warps
    share keys, and so on. Where there are more warps with different keys than steps in a tile, they take turns.
    """

    sharing: Int32  # log2 of the warps that have the same keys
    steps: Int32  # of STEP_KEYS in each of its tiles
    turns: Int32  # log2 of the tiles of which it has one
    rows: int  # of a warp
    warps: int
    tile_steps: int  # in all

    @staticmethod
    def of(count, products: int, kernel) -> "KeyShare":
        """Of a tile with ``count`` rows, 8 * ``products`` for each warp."""
        rows, warps, tile_steps = products * MMA_COLUMNS, kernel.storing_warps, kernel.tile.n // STEP_KEYS
        sharing, least = Int32(0), rows
        while least < ROWS:
            sharing += (count > least).to(Int32)
            least *= 2
        steps = cutlass.max((tile_steps << sharing) // warps, 1)
        turns = cutlass.max((warps // tile_steps).bit_length() - 1 - sharing, 0)
        return KeyShare(sharing, steps, turns, rows, warps, tile_steps)

    @property
    def warp(self):
        """This one among those that attend."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPGROUP // LANES

    @property
    def first_row(self):
        return (self.warp & ((Int32(1) << self.sharing) - 1)) * self.rows

    @property
    def groups(self):
        """Warps that have different keys."""
        return Int32(self.warps) >> self.sharing

    @property
    def first_step(self):
        return (self.warp >> self.sharing) * self.steps % self.tile_steps

    def has(self, tile):
        """Whether it is the warp's turn."""
        return tile & ((Int32(1) << self.turns) - 1) == (self.warp >> self.sharing) * self.steps // self.tile_steps

    def place(self, group, row):
        """Where a row of the warp with the keys of a group is among those of all warps."""
        return ((group << self.sharing) + row // self.rows) * self.rows + row % self.rows


@dataclass
class ByteOperands(DeviceStruct):
    """Transposed products of a warp: S^T = K Q^T and O^T += V^T P^T, so that few rows of Q waste no room.

    Q, S and O are in registers; K and V in shared memory. Lane (g, t) of ``place_in_warp`` has part t of a column block
    of Q and K, and part g of V, which are its parts of O as well.
    """

    q: Any
    s: Any
    o: Any
    unit: Any  # of each row: what its scores have to be multiplied by
    q_tile: Int32  # addresses of stage 0
    k_tile: Int32
    v_tile: Int32
    products: int  # side by side: 8 rows each
    kernel: Any  # configuration only

    @staticmethod
    def create(kernel, tiles, products: int) -> "ByteOperands":
        width = padded(kernel.config.head_dim_qk)
        rows = products * MMA_COLUMNS
        return ByteOperands(
            q=cute.make_rmem_tensor(width * rows // LANES // 2, Uint32),
            s=cute.make_rmem_tensor(STEP_KEYS * rows // LANES, Float32),
            o=cute.make_rmem_tensor(width * rows // LANES, Float32),
            unit=cute.make_rmem_tensor(2 * products, Float32),
            q_tile=shared_address(tiles.q.iterator),
            k_tile=shared_address(tiles.k.iterator),
            v_tile=shared_address(tiles.v.iterator),
            products=products,
            kernel=kernel,
        )

    @property
    def blocks(self) -> list[ColumnBlock]:
        return ColumnBlock.all(self.kernel.config.head_dim_qk)

    def scores(self) -> ColumnFragment:
        return ColumnFragment(self.s, STEP_KEYS // ColumnFragment.lanes_per_row, self.products)

    def load_q(self, stage, first_row) -> None:
        """Q of the warp's rows as float16. Each row gets those of bf16's exponents that it needs."""
        g, t = place_in_warp()
        tile = self.q_tile + stage * (self.kernel.tile.m * self.kernel.config.q_columns * 2)
        for product in range(self.products):
            words = []
            for block in self.blocks:
                chunks = block.key_part * 2 // copy.CHUNK_BYTES
                for i in range(chunks):
                    chunk = block.first * 2 // copy.CHUNK_BYTES + t * chunks + i
                    column_block = tile + chunk // copy.CHUNKS_PER_ROW * (self.kernel.tile.m * copy.SWIZZLE_ROW_BYTES)
                    row = first_row + product * MMA_COLUMNS + g
                    words += copy.load_shared(copy.swizzled_chunk(column_block, row, chunk % copy.CHUNKS_PER_ROW), 4)
            if self.kernel.dtype is BFloat16:
                words = self._to_float16(words, product)
            for i, word in enumerate(words):
                self.q[i // 2 * (2 * self.products) + 2 * product + i % 2] = word

    def _to_float16(self, words: list, product: int) -> list:
        """Row g of a product, times a power of two of its own."""
        values = [half for word in words for half in copy.unpack_bf16_x2(word)]
        largest = Float32(0.0)
        for value in values:
            largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        factor, unit = power_of_two(cute.arch.warp_reduction_max(largest, threads_in_group=QUAD))
        for c in range(2):
            lane = (ColumnFragment.first_row() + c) * QUAD
            self.unit[2 * product + c] = cute.arch.shuffle_sync(unit, lane)
        return [copy.pack_x2(Float16, low * factor, high * factor) for low, high in _pairs(values)]

    def multiply_keys(self, stage, step) -> None:
        """S^T of STEP_KEYS of a tile."""
        g, t = place_in_warp()
        self.s.fill(0.0)
        eights = range(STEP_KEYS // copy.GROUP_ROWS)
        depth = 0
        for block in self.blocks:
            rows = [self._rows(self.k_tile, 0, stage, len(eights) * step + i, block) for i in eights]
            chunks = block.key_part // copy.CHUNK_BYTES
            for chunk in range(chunks):
                keys = [copy.load_shared(copy.swizzled_chunk(row, g, t * chunks + chunk), 4) for row in rows]
                for word in range(4):
                    b = _pairs([self.q[2 * self.products * depth + i] for i in range(2 * self.products)])
                    wide = [widened(self.kernel.config.kv_type, key[word]) for key in keys]
                    for i in range(0, len(wide), 2):
                        a = [wide[i + row][half] for half in range(2) for row in range(2)]
                        for product in range(self.products):
                            self._accumulate(self.s, i // 2 * self.products + product, a, b[product])
                    depth += 1
        if self.kernel.dtype is BFloat16:
            scores = self.scores()
            for r in range(scores.rows):
                for c in range(scores.columns):
                    scores.set(r, c, scores.get(r, c) * self.unit[r])

    def multiply_values(self, stage, step) -> None:
        """O^T += V^T P^T of the same keys; the scores are weights by now."""
        g, t = place_in_warp()
        eights = STEP_KEYS // copy.GROUP_ROWS
        weights = self.scores()
        p = [
            [
                transposed(copy.pack_x2(Float16, weights.get(2 * product, i), weights.get(2 * product + 1, i)))
                for i in range(eights)
            ]
            for product in range(self.products)
        ]
        for first in range(0, eights, 2):
            fragment = 0
            for block in self.blocks:
                words = block.value_part // 4
                byte, loaded = g * block.value_part, []
                for eight in (first, first + 1):
                    rows = self._rows(self.v_tile, 1, stage, eights * step + eight, block)
                    for i in range(2):
                        chunk = copy.swizzled_chunk(rows, 2 * t + i, byte // copy.CHUNK_BYTES)
                        loaded.append(copy.load_shared(chunk + byte % copy.CHUNK_BYTES, words))
                for word in range(words):
                    # Two adjacent keys are the halves of a word of A; adjacent columns its rows g and g + 8.
                    columns = []
                    for half in range(2):
                        both = interleaved(loaded[2 * half][word], loaded[2 * half + 1][word])
                        columns.append([w for pair in both for w in widened(self.kernel.config.kv_type, pair)])
                    for c in range(0, 4, 2):
                        a = [columns[half][c + row] for half in range(2) for row in range(2)]
                        for product in range(self.products):
                            self._accumulate(self.o, fragment, a, p[product][first : first + 2])
                            fragment += 1

    def _rows(self, tile, part: int, stage, eight, block: ColumnBlock):
        """Address of a column block of 8 keys of a stage of K (0) or V (1)."""
        n, columns = self.kernel.tile.n, self.kernel.config.columns[part]
        place = copy.block_row(eight * copy.GROUP_ROWS, block.index, n, columns, self.kernel.source.columns_first)
        return tile + stage * (n * columns * 2) + place * copy.SWIZZLE_ROW_BYTES

    @staticmethod
    def _accumulate(registers, fragment: int, a, b) -> None:
        d = [registers[4 * fragment + i] for i in range(4)]
        for i, value in enumerate(multiply(d, a, b)):
            registers[4 * fragment + i] = value

    def _output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    def rescale_output(self, factors) -> None:
        self._output().scale_rows(factors)

    def columns(self, block: ColumnBlock, r: int) -> list:
        """This lane's part of a column block of row r of O."""
        first, output = block.first // (LANES // QUAD), self._output()
        return [output.get(r, first + i) for i in range(block.value_part)]


def _pairs(values: list) -> list:
    return list(zip(values[::2], values[1::2], strict=True))


@dataclass(frozen=True)
class Exchange(DeviceStruct):
    """Shared memory through which the warps of attend hand over their rows."""

    statistics: Int32  # addresses
    columns: Int32
    width: int

    @staticmethod
    def warp_bytes(head_dim: int) -> int:
        """Shared memory of each warp."""
        return most_products(head_dim) * MMA_COLUMNS * (4 * padded(head_dim) + STATISTICS_BYTES)

    @staticmethod
    def create(kernel, tiles) -> "Exchange":
        begin, head_dim = shared_address(tiles.staging), kernel.config.head_dim_v
        rows = kernel.storing_warps * most_products(head_dim) * MMA_COLUMNS
        return Exchange(begin, begin + rows * STATISTICS_BYTES, padded(head_dim))

    def row_statistics(self, row):
        """Address of a row's (reference, sum). Rows are those of all warps."""
        return self.statistics + row * STATISTICS_BYTES

    def quad(self, row, quad):
        """Address of a row's columns from 4 * ``quad`` on. Lanes store columns 16 apart, of every other row: quads are
        shuffled so that these meet in no bank."""
        return self.columns + row * (4 * self.width) + (quad ^ (row // 2 % 4)) * copy.CHUNK_BYTES


@dataclass
class ByteAttend(DecodeAttend):
    """The warps of attend, which do nothing but attend: what they find is added up by the warpgroup that merges.

    With up to 8 rows, each of 8 warps has 32 of the 128 keys of every other tile:

        memory       |  K(i-2), V(i-2)  |  K(i-3), V(i-3)  |  K(i-4), V(i-4)  | ...
        warps 0..3   | S(i), softmax, O += P V  |  waits   | S(i-2), softmax, O += P V | ...
        warps 4..7   |   waits  | S(i-1), softmax, O += P V  |   waits   | S(i-3), ...
    """

    @cute.jit
    def attend(self, addresses: Addresses, geometry: DecodeGeometry):
        kv_step, work = Int32(0), Int32(0)
        tile = self.board.read(work)
        while tile.exists:
            count = cutlass.min(tile.rows(geometry.group), ROWS)
            most = most_products(self.kernel.config.head_dim_v)
            if const_expr(most > 1):
                if count <= MMA_COLUMNS:
                    self.attend_unit(1, tile, count, kv_step, work)
                else:
                    self.attend_unit(most, tile, count, kv_step, work)
            else:
                self.attend_unit(1, tile, count, kv_step, work)
            kv_step += tile.keys.end - tile.keys.begin
            work += 1
            tile = self.board.read(work)

    @cute.jit
    def attend_unit(self, products: cutlass.Constexpr[int], tile: SplitTile, count, kv_step, work) -> None:
        """A unit with ``count`` rows, 8 * ``products`` of them for each warp."""
        q_ring, *_ = self.rings
        operands = ByteOperands.create(self.kernel, self.tiles, products)
        softmax = ColumnSoftmax.over(self.softmax.scale, 2 * products)
        share = KeyShare.of(count, products, self.kernel)
        q_ring.wait_full(work)
        operands.load_q(q_ring.stage(work), share.first_row)
        cute.arch.sync_warp()
        q_ring.release(work)
        softmax.reset()
        operands.o.fill(0.0)
        row = self.logit_row(tile, share.first_row, operands.scores())
        for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
            self.attend_tile(operands, softmax, share, tile.keys, n, row, kv_step)
            kv_step += 1
        self.open_piece(tile, work)
        self.hand_over(operands, softmax, share, count)
        self.rings[-1].fill(work)

    @cute.jit
    def attend_tile(self, operands: ByteOperands, softmax, share: KeyShare, keys: TileRange, n, row, kv_step) -> None:
        """This warp's keys of tile n."""
        _, k_ring, v_ring, *_ = self.rings
        masked = n < keys.full_begin or n >= keys.full_end
        steps = share.steps if share.has(n) else Int32(0)
        k_ring.wait_full(kv_step)
        for i in cutlass.range(steps, unroll=1):
            step = share.first_step + i
            operands.multiply_keys(k_ring.stage(kv_step), step)
            if masked:
                self.mask.apply(operands.scores(), n * self.kernel.tile.n + step * STEP_KEYS, row)
            softmax.step(operands.scores())
            if softmax.reference_moved():
                operands.rescale_output(softmax.rescale)
            v_ring.wait_full(kv_step)
            operands.multiply_values(v_ring.stage(kv_step), step)
        v_ring.wait_full(kv_step)
        cute.arch.sync_warp()
        k_ring.release(kv_step)
        v_ring.release(kv_step)

    @cute.jit
    def hand_over(self, operands: ByteOperands, softmax, share: KeyShare, count) -> None:
        """Leave this warp's rows for :class:`ByteMerge`."""
        exchange = Exchange.create(self.kernel, self.tiles)
        scores, (g, _) = operands.scores(), place_in_warp()
        for r in cutlass.range_constexpr(scores.rows):
            own = scores.first_row() + scores.row_offset(r)
            row = share.warp * share.rows + own
            statistics = softmax.partial(r, scores.lanes_per_row)
            if share.first_row + own < count:
                if g == 0:
                    copy.store_shared(exchange.row_statistics(row), statistics)
                for block in operands.blocks:
                    columns = operands.columns(block, r)
                    for i in cutlass.range_constexpr(0, len(columns), COLUMNS_AT_ONCE):
                        quad = (block.first + g * block.value_part + i) // COLUMNS_AT_ONCE
                        copy.store_shared(exchange.quad(row, quad), columns[i : i + COLUMNS_AT_ONCE])


@dataclass(frozen=True)
class ByteMerge(Merge):
    """Adds up what the warps of attend have found of a unit before it merges the unit with others. What attend waits
    for is not a free slot but the exchange."""

    exchange: Exchange
    kernel: Any  # configuration only

    @cute.jit
    def run(self, board, ring, addresses, geometry, scale, out_dtype: cutlass.Constexpr) -> None:
        work = Int32(0)
        ring.release(work)
        tile = board.read(work)
        while tile.exists:
            rows = PackedRows.create(addresses, geometry, tile, scale, out_dtype.width // 8)
            ring.wait_full(work)
            self.prepare(tile)
            self.meet()
            self.gather(tile, rows, out_dtype)
            work += 1
            # Before the merge, for which attend has no reason to wait.
            ring.release(work)
            if tile.chunks > 1:
                self.complete(tile, rows, out_dtype)
            tile = board.read(work)
        self.hand_back(Int32(geometry.grid))

    @cute.jit
    def gather(self, tile: SplitTile, rows: PackedRows, out_dtype: cutlass.Constexpr) -> None:
        count = cutlass.min(rows.count, ROWS)
        if const_expr(most_products(self.kernel.config.head_dim_v) > 1):
            if count <= MMA_COLUMNS:
                self.add_up(KeyShare.of(count, 1, self.kernel), tile, rows, count, out_dtype)
            else:
                most = most_products(self.kernel.config.head_dim_v)
                self.add_up(KeyShare.of(count, most, self.kernel), tile, rows, count, out_dtype)
        else:
            self.add_up(KeyShare.of(count, 1, self.kernel), tile, rows, count, out_dtype)
        self.meet()

    @cute.jit
    def add_up(self, share: KeyShare, tile: SplitTile, rows: PackedRows, count, out_dtype: cutlass.Constexpr) -> None:
        """Add up all rows: the output, or a piece of it."""
        quads = self.slots.columns // COLUMNS_AT_ONCE
        for item in cutlass.range(self.thread, count * quads, self.threads, unroll=1):
            row = item // quads
            quad = item - row * quads
            places = [share.place(cutlass.min(i, share.groups - 1), row) for i in range(share.warps)]
            statistics = [copy.load_shared(self.exchange.row_statistics(place), 2, Float32) for place in places]
            outputs = [copy.load_shared(self.exchange.quad(place, quad), COLUMNS_AT_ONCE, Float32) for place in places]
            total = WeightedSum.nothing().plus(statistics, outputs, share.groups)
            column = quad * COLUMNS_AT_ONCE
            if tile.chunks == 1:
                factor = rows.finish(row, total.reference, total.sum, column == 0)
                copy.store_rounded(rows.output(row, column), [value * factor for value in total.values], out_dtype)
            else:
                self.slots.store_quad(tile.piece, row, column, total, PIECE)


@dsl_user_op
def power_of_two(largest, *, loc=None, ip=None) -> tuple:
    """A power of two that brings a positive number into [128, 256), and its inverse."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 e, f; mov.b32 e, {$r0}; shr.u32 e, e, 23; max.u32 e, e, 8; "
        "sub.u32 f, 261, e; shl.b32 f, f, 23; mov.b32 {$w0}, f; "
        "sub.u32 f, e, 7; shl.b32 f, f, 23; mov.b32 {$w1}, f; }",
        write_only_types=[Float32] * 2,
        read_only_args=[largest],
        loc=loc,
        ip=ip,
    )
