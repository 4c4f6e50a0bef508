"""Hopper decode of 33 to 64 rows over 8-bit and 4-bit caches: K and V^T are dequantized in registers for wgmma.

wgmma takes operand A from registers. In S^T = K Q^T and O^T = V^T P^T these are K and V^T. Each key is dequantized by
the warps that multiply it, once for all rows of a warpgroup, and never returns to shared memory. Two warpgroups have
half of a tile's rows each. Both dequantize all keys. Tiles of 32 rows have their keys split instead, see
``split_keys.py``.

Each warpgroup rearranges the block scales of V of every second tile, for both.

All operands are float16, as in ``dequant_products.py``. Lanes read 16 adjacent bytes of a key, whereas operand A has
elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of sixteen. The order of columns in a product is free. So Q is rewritten in
the order of the keys, once in a segment and in place.

The kernel has the roles and edges of ``SwapABDecodeSm90``. K and V are released when a warp has read its last bytes of
a tile, not when a product is done.

Steady state: memory is the limit. A leaf is four tiles, A to D.

    memory         | K of A' to D'                               | V of A' to D'                     | ...
    tensor cores   | S(A) | S(B) | S(C) | S(D) |                 | O += P V (A) | O += P V (B) | ... |  waits
    attend         | K(A) | K(B) | K(C) | K(D) | softmax, P, sync | V(A) | V(B) | V(C) | V(D) | nodes |  waits
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, MMA_DEPTH, place_in_warp
from hopwell.kernels.parts.rows.softmax import HalfSoftmax
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.decode.base import argument_types
from hopwell.kernels.sm90.decode.dequant_products import DequantProducts, padded
from hopwell.kernels.sm90.decode.dequant_swap_ab import DequantLeafOperands, VectorOutput, WarpColumns
from hopwell.kernels.sm90.decode.leaves import WarpgroupExchange, write_weights
from hopwell.kernels.sm90.decode.swap_ab import LeafProducts, SwapABDecodeSm90, rows_of

BUFFERS = 2  # tiles of operand A: one is multiplied while the next is dequantized
TILE_CORE_MATRICES = LANES // copy.ATOM_ROWS  # of V, that one ldmatrix loads


class DequantOperandA:
    """Mixin of operands whose K and V^T are dequantized into registers, in the order of operand A of wgmma. Q and P are
    operand B in shared memory, in float16."""

    exchange: WarpgroupExchange
    first_row: Any  # of this warpgroup in the tile

    @staticmethod
    def common_fields(kernel, tiles: SharedTiles, part, q) -> dict[str, Any]:
        """Return the fields that all kernels with these operands have. ``part``: the warpgroup's rows of the tile."""
        products = part.rows // MMA_COLUMNS
        return DequantProducts.fields(kernel, tiles, products) | dict(
            q=q,
            p_tile=shared_address(tiles.p.iterator),
            s=cute.make_rmem_tensor(4 * products * kernel.scored_tiles, Float32),
            o=cute.make_rmem_tensor(4 * products * kernel.config.value_blocks, Float32),
            leaf_tiles=kernel.step_tiles,
            at_once=1,
            columns=WarpColumns.of(kernel.config),
            exchange=kernel.exchange(tiles),
            first_row=part.first_row,
        )

    def begin(self, q_ring, work) -> None:
        """Rewrite this warpgroup's rows of Q in float16, in the order in which lanes read columns of K."""
        g, t = place_in_warp()
        m, stage = self.kernel.tile.m, q_ring.stage(work)
        words = self.read_q(stage, self.first_row)
        self.meet_for_q()  # every warp has read all rows
        tile = self.q_tile + stage * (m * self.kernel.layout.q_columns * HALFWORD_BYTES)
        for product in range(self.products):
            self._write_q(tile, product, words[product], g, t)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_for_q()

    def meet_for_q(self) -> None:
        """Wait for all warps that read or write the rows of Q that this warpgroup multiplies."""
        if self.kernel.products.splits_keys:
            self.exchange.meet_all()
        else:
            self.exchange.meet_for_products()

    def writes_q(self, product: int):
        """Whether this warp rewrites Q of a product of eight rows."""
        warp, warps = warp_in_warpgroup(), WARPS
        if self.kernel.products.splits_keys:
            warp, warps = warp + WARPS * self.exchange.warpgroup, WARPS * self.kernel.config.consumer_warpgroups
        return warp == product % warps

    @cute.jit
    def _write_q(self, tile, product: cutlass.Constexpr[int], words: list, g, t) -> None:
        """Write eight rows, by one of the warps."""
        if self.writes_q(product):
            row = self.first_row + product * MMA_COLUMNS + g
            for i in cutlass.range_constexpr(len(words)):
                block, vector = divmod(i, copy.VECTORS_PER_ROW)
                column_block = tile + block * (self.kernel.tile.m * copy.SWIZZLE_ROW_BYTES)
                shared_array(Uint32, copy.swizzled_vector(column_block, row, vector) + 4 * t)[0] = words[i]

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    @property
    def own_tiles(self) -> int:
        return self.leaf_tiles // self.kernel.config.consumer_warpgroups

    def own_tile(self, number):
        return self.kernel.tile_in_turn(number)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)

    @property
    def depth(self) -> int:
        """Columns of K that products reduce over."""
        return padded(self.kernel.layout.tile_dims[0])

    @property
    def blocks(self) -> int:
        """Products of 64 columns of V."""
        return cute.size(self.o) // (4 * self.products)

    def read_keys(self, words, stage) -> None:
        """Dequantize a tile of K into ``words``: this warp's two core matrices of eight keys."""
        first = warp_in_warpgroup() * (ColumnFragment.warp_columns // copy.ATOM_ROWS)
        for depth, keys in enumerate(self.dequantized_keys([(stage, first + i) for i in range(2)])):
            for half in range(2):
                for row in range(2):
                    words[4 * depth + 2 * half + row] = keys[row][half]

    def read_values(self, words, stage, block: int) -> None:
        """Dequantize 64 columns of a tile of V into ``words``, for all keys. A warp has a vector of 16 columns, or half
        of a vector of 32."""
        vector, pair = divmod(block, self.columns.pairs)
        for first in range(0, LEAF_TILE, LANES):
            columns = self._columns(stage, first, vector)
            for k in range(0, TILE_CORE_MATRICES, 2):
                depth = (first + k * copy.ATOM_ROWS) // MMA_DEPTH
                for half in range(2):
                    for row in range(2):
                        words[4 * depth + 2 * half + row] = columns[k + half][2 * pair + row]

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of the ``tile``-th tile whose scores this warpgroup has, in float16."""
        write_weights(p, self.kernel.tile.m, Float16, scores, self.kernel.scored_tile(tile), self.first_row)


@dataclass
class WgmmaDequantOperands(DequantOperandA, DequantLeafOperands):
    """Operands of a warpgroup. ``q`` and ``p`` are operand B in shared memory, in float16."""

    qk_mma: Any
    pv_mma: Any
    p: Any
    keys: tuple  # operand A of tiles of K, and of V
    values: tuple
    exchange: WarpgroupExchange
    first_row: Any  # of this warpgroup in the tile

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "WgmmaDequantOperands":
        part, n = kernel.product_part(), kernel.tile.n
        mma = make_mma(
            Float16, (WARPGROUP_ROWS, part.rows), warpgroup.OperandSource.RMEM, OperandMajorMode.K, warpgroups=1
        )
        thread = mma.get_slice(0)
        q, p = (rows_of(as_float16(tile), part) for tile in (tiles.q, tiles.p))

        def operand(depth: int):
            return thread.make_fragment_A(thread.partition_shape_A((WARPGROUP_ROWS, depth)))

        return WgmmaDequantOperands(
            **DequantOperandA.common_fields(kernel, tiles, part, thread.make_fragment_B(thread.partition_B(q))),
            qk_mma=mma,
            pv_mma=mma,
            p=thread.make_fragment_B(thread.partition_B(p)),
            keys=tuple(operand(padded(kernel.layout.tile_dims[0])) for _ in range(BUFFERS)),
            values=tuple(tuple(operand(n) for _ in range(kernel.config.value_blocks)) for _ in range(BUFFERS)),
        )

    def multiply_keys(self, ring, step, q_stage) -> None:
        for number in range(self.kernel.scored_tiles):
            i, operand = self.kernel.scored_tile(number), self.keys[number % BUFFERS]
            ring.wait_full(step + i)
            if number >= BUFFERS:
                warpgroup.wait_group(BUFFERS - 1)
            self.read_keys(cute.recast_tensor(operand, Uint32), self._stage(ring, step, i))
            self._give_back(ring, [step + i])
            q = self.q[None, None, None, q_stage]
            issue_mma(self.qk_mma, self._accumulators(self.s, number), operand, q, self.depth, False)
        warpgroup.wait_group(0)
        self.multiply_scores(self.scores())

    def _accumulators(self, registers, i: int):
        """Return the accumulators of 64 keys or columns: a lane's registers in the order of wgmma."""
        layout = cute.make_layout(self.qk_mma.get_slice(0).partition_shape_C((WARPGROUP_ROWS, 8 * self.products)))
        return cute.make_tensor(registers.iterator + i * cute.size(layout), layout)

    def prepare_values(self, ring, step) -> None:
        """Rearrange the block scales of V, if there are any, and make P visible to the tensor cores."""
        DequantLeafOperands.prepare_values(self, ring, step)
        cute.arch.fence_proxy("async.shared", space="cta")

    def multiply_values(self, ring, step) -> None:
        """Add O^T of a leaf. The products of its last tiles are still in flight on return."""
        for number in range(self.kernel.scored_tiles):
            i, operands = self.kernel.scored_tile(number), self.values[number % BUFFERS]
            ring.wait_full(step + i)
            if number >= BUFFERS:
                warpgroup.wait_group(self.blocks * (BUFFERS - 1))
            stage = self._stage(ring, step, i)
            for block, operand in enumerate(operands):
                self.read_values(cute.recast_tensor(operand, Uint32), stage, block)
            self._give_back(ring, [step + i])
            for block, operand in enumerate(operands):
                p = self.p[None, None, None, i]
                issue_mma(self.pv_mma, self._accumulators(self.o, block), operand, p, LEAF_TILE, True)

    def finish_values(self, ring, step) -> None:
        """Wait until O^T is complete."""
        warpgroup.wait_group(0)


def as_float16(tile):
    """Return a tile of 16-bit elements in shared memory, in rows of 128 bytes, as float16."""
    swizzle = copy.swizzled_layout(Float16, copy.ATOM_ROWS, BLOCK_COLUMNS).inner
    return cute.make_tensor(cute.recast_ptr(tile.iterator, swizzle, dtype=Float16), tile.layout)


COMMON: dict[str, Any] = dict(reader=Reader.SYNCED_LANES, softmax=HalfSoftmax, output=VectorOutput, keeps_exponent=True)
DEQUANT_WGMMA = LeafProducts(WgmmaDequantOperands, **COMMON)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABDecodeSm90(config, DEQUANT_WGMMA), example_arguments(argument_types(config), floats=3)
