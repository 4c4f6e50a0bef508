"""Operands of leaves over 8-bit and 4-bit caches: K and V^T are dequantized into tensor memory, as operand A.

``tcgen05.st.16x128b`` stores registers in the order of wgmma's operand A. So the dequantization is the code of Hopper's
kernels with drafts. A key is dequantized once in a CTA, and its 16-bit elements never pass through shared memory.

Two warpgroups share the rows of a tile, and products have the rows of both. Each warpgroup dequantizes every second
tile of a leaf. A warp of the first one issues the products of all tiles in order, because they add to the same O.

Steady state: memory is the limit. A leaf is four tiles, A to D. A warpgroup has one or two buffers of operand A.

    memory         | K of A' to D'                               | V of A' to D'                     | ...
    tensor cores   |      | S(A) | S(B) | S(C) | S(D) |          |      | O = P V (A) | O += P V (B) | ...
    attend         | K(A) | K(B) | K(C) | K(D) | softmax, P, sync | V(A) | V(B) | V(C) | V(D) | nodes |  waits
    with two       | K(A) | K(C) | softmax, P, sync | V(A) | V(C) | nodes | waits
                   | K(B) | K(D) | softmax, P, sync | V(B) | V(D) | nodes | waits
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32

from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import Ring, Rings
from hopwell.kernels.sm90.decode.dequant_swap_ab import DequantLeafOperands
from hopwell.kernels.sm90.decode.dequant_wgmma import DequantOperandA
from hopwell.kernels.sm90.decode.leaves import WarpgroupExchange
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.accumulators import MMA_ROWS, Accumulators
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, TensorOperand, issue

VALUE_COLUMNS = LEAF_TILE // 2  # tensor-memory columns of 64 columns of V of a tile


@dataclass
class TensorDequantOperands(DequantOperandA, DequantLeafOperands):
    """Operands of a warpgroup. ``q`` and ``p`` are operand B in shared memory, in float16."""

    p: SharedOperand
    accumulators: Accumulators
    a_ring: Ring  # buffers of operand A, see :meth:`_turn`
    exchange: WarpgroupExchange
    first_row: Any  # of this warpgroup in the tile

    issues_ahead = False  # whether S of a leaf is issued before the leaf before it is complete

    @staticmethod
    def tiles_at_once(kernel) -> int:
        """Return the tiles whose products are waited for together: the tiles of a leaf."""
        return kernel.config.leaf_tiles

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: Rings, accumulators: Accumulators) -> "TensorDequantOperands":
        m, part = kernel.tile.m, accumulators.part
        q = SharedOperand.of(tiles.q, m, kernel.layout.q_columns, columns_first=False)
        return TensorDequantOperands(
            **DequantOperandA.common_fields(kernel, tiles, part, q),
            p=SharedOperand.of(tiles.p, m, LEAF_TILE, columns_first=False),
            accumulators=accumulators,
            a_ring=rings.a,
        )

    def _buffer(self, turn, block: int = 0) -> Int32:
        config = self.kernel.config
        first = config.columns.first("a") + block * VALUE_COLUMNS
        return self.accumulators.tensor_memory + first + self.a_ring.stage(turn) * config.operand_columns

    def _hand_over(self, turn) -> None:
        """Hand operand A over to the issuing thread."""
        tmem.wait_stores()
        tmem.before_signal()
        self.a_ring.fill(turn)

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Compute S^T of a leaf; ``step`` is the number of its first tile."""
        self._issue_scores(ring, step, q_stage)
        self.accumulators.take_s(step, self.s)
        self.multiply_scores(self.scores())

    # Loops over tiles are not unrolled: the compiler would compute addresses and descriptors before the leaves, and
    # spill.

    @cute.jit
    def _issue_scores(self, ring, step, q_stage):
        """Dequantize K of a leaf and issue S^T. The ring of operand A counts K of the leaf's tiles, then V."""
        for number in cutlass.range(self.own_tiles, unroll=1):
            i, words = self.own_tile(number), cute.make_rmem_tensor(self.depth // 4, Uint32)
            turn = 2 * step + i
            ring.wait_full(step + i)
            self.read_keys(words, self._stage(ring, step, i))
            self._give_back(ring, [step + i])
            self.a_ring.wait_empty(turn)
            tmem.after_signal()
            tmem.store_tile(tmem.row_address(self._buffer(turn), 0), words)
            self._hand_over(turn)
            if self.accumulators.issues:
                for _ in cutlass.range_constexpr(self.accumulators.part.warpgroups):
                    self._issue_tile_scores(turn, i, q_stage)
                    turn, i = turn + 1, i + 1
        if self.accumulators.issues:
            self.accumulators.signal(self.accumulators.s_ring, step)

    @cute.jit
    def _issue_tile_scores(self, turn, i, q_stage):
        rows = self.accumulators.rows
        self.a_ring.wait_full(turn)
        tmem.after_signal()
        with cute.arch.elect_one():
            place, a = self.accumulators.place("s") + i * rows, TensorOperand(self._buffer(turn))
            issue(place, a, self.q.at(q_stage), Mma(Float16, rows, MMA_ROWS), (0, self.depth))
            tmem.commit(shared_address(self.a_ring.empty + self.a_ring.stage(turn)))

    def prepare_values(self, ring, step) -> None:
        """Rearrange the block scales of V, if there are any, and make P visible to the tensor cores."""
        DequantLeafOperands.prepare_values(self, ring, step)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def multiply_values(self, ring, step):
        """Dequantize V of a leaf and issue O^T. The products are still in flight on return."""
        for number in cutlass.range(self.own_tiles, unroll=1):
            i = self.own_tile(number)
            turn, stage = 2 * step + self.leaf_tiles + i, self._stage(ring, step, i)
            ring.wait_full(step + i)
            self.a_ring.wait_empty(turn)
            tmem.after_signal()
            for block in cutlass.range_constexpr(self.blocks):
                words = cute.make_rmem_tensor(LEAF_TILE // 4, Uint32)
                self.read_values(words, stage, block)
                tmem.store_tile(tmem.row_address(self._buffer(turn, block), 0), words)
            self._give_back(ring, [step + i])
            self._hand_over(turn)
            if self.accumulators.issues:
                for _ in cutlass.range_constexpr(self.accumulators.part.warpgroups):
                    self._issue_tile_values(turn, i)
                    turn, i = turn + 1, i + 1
        if self.accumulators.issues:
            self.accumulators.signal(self.accumulators.o_ring, step)

    @cute.jit
    def _issue_tile_values(self, turn, i):
        rows = self.accumulators.rows
        self.a_ring.wait_full(turn)
        tmem.after_signal()
        with cute.arch.elect_one():
            for block in cutlass.range_constexpr(self.blocks):
                place, a = self.accumulators.place("o") + block * rows, TensorOperand(self._buffer(turn, block))
                issue(place, a, self.p.at(i), Mma(Float16, rows, MMA_ROWS), (0, LEAF_TILE), (i > 0).to(Int32))
            tmem.commit(shared_address(self.a_ring.empty + self.a_ring.stage(turn)))

    def finish_values(self, ring, step) -> None:
        """Wait for O^T of a leaf, and load or add it."""
        self.accumulators.take_o(step, self.o, self.kernel.config.accumulated_levels > 0, 2.0**-self.exponent)
