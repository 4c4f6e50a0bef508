"""Operands of leaves over 8-bit and 4-bit caches: K and V^T are dequantized into tensor memory, as operand A.

``tcgen05.st.16x128b`` stores registers in the order of wgmma's operand A. So the dequantization is the code of
``sm90/decode/dequant_wgmma.py``. A key is dequantized once in a CTA, and its 16-bit elements never pass through shared
memory.

A matrix instruction has two blocks of 64 rows: two tiles of K, or two blocks of 64 columns of V. Each warp has 16 rows
of the first one, and 16 of the second one in the next 16 lanes of tensor memory. So there are half as many
instructions as with 64 rows.

With 32 and 64 rows, two warpgroups share the rows of a tile, and products have the rows of both. Each warpgroup
dequantizes one of two pairs of tiles. A warp of the first one issues S of all tiles, and another warp O. O has one warp
because its products add to the same sums in order.

Steady state: memory, issue slots or this chain is the limit, see docs/kernels/blackwell_decode.md. A leaf is two pairs
of tiles, A and B. Primes mark the next leaf. A warpgroup has one or two buffers of operand A.

    memory         | K of A', B'              | V of A', B'                             | ...
    tensor cores   |                          |      | O = P V (A) | O += P V (B) | S(A') | S(B') |
    attend         | load S | softmax, P, sync | V(A) | V(B) | K(A') | K(B') | load O | nodes | load S ...
    with two       | load S | softmax, P, sync | V(A) | K(A') | load O | nodes | load S ...
                   | load S | softmax, P, sync | V(B) | K(B') | load O | nodes | load S ...
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Int32, Uint32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import Ring, Rings
from hopwell.kernels.parts.dequant import e2m1
from hopwell.kernels.sm90.decode.dequant_swap_ab import DequantLeafOperands
from hopwell.kernels.sm90.decode.dequant_wgmma import DequantOperandA
from hopwell.kernels.sm90.decode.leaves import WarpgroupExchange
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.accumulators import MMA_ROWS, O_WARP, S_WARP, SECOND_HALF, Accumulators
from hopwell.kernels.sm100.common.leaves import ScoresAhead
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, TensorOperand, issue
from hopwell.kernels.sm100.decode.config import PAIR

VALUE_COLUMNS = LEAF_TILE // 2  # tensor-memory columns of a tile of V: of one or two blocks of 64 columns


class ConvertedCodes:
    """Mixin of operands whose NVFP4 codes are dequantized by Blackwell's conversion instruction, without Hopper's
    factor 2^-14.

    Neighbouring codes stay neighbours. So an instruction sums over other columns of K than on Hopper.
    """

    kernel: Any  # configuration only

    @property
    def converts(self) -> bool:
        return self.kernel.config.kv_type is KvType.NVFP4

    @property
    def exponent(self) -> int:
        return 0

    def in_order(self, words: list) -> list:
        return words if self.converts else super().in_order(words)

    def dequantized(self, word, factor):
        return e2m1.converted(word, *factor) if self.converts else super().dequantized(word, factor)

    def of_two_keys(self, word, factor):
        return e2m1.converted_by_halves(word, factor) if self.converts else super().of_two_keys(word, factor)


@dataclass
class TensorDequantOperands(ScoresAhead, ConvertedCodes, DequantOperandA, DequantLeafOperands):
    """Operands of a warpgroup. ``q`` and ``p`` are operand B in shared memory, in float16."""

    p: SharedOperand
    accumulators: Accumulators
    a_ring: Ring  # buffers of operand A
    exchange: WarpgroupExchange
    first_row: Any  # of this warpgroup in the tile
    k_ring: Ring
    end_step: Any  # in a register: the step after the segment's last tile
    q_stage: Any  # in a register

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
            k_ring=rings.k,
            end_step=cute.make_rmem_tensor(1, Int32),
            q_stage=cute.make_rmem_tensor(1, Int32),
        )

    def _buffer(self, turn) -> Int32:
        """Return the address of a buffer of operand A."""
        return self.accumulators.operand_a + self.a_ring.stage(turn) * self.kernel.config.operand_columns

    @property
    def pairs(self) -> int:
        """Pairs of tiles of a leaf."""
        return self.leaf_tiles // PAIR

    @property
    def own_pairs(self) -> int:
        """Pairs of tiles of a leaf that this warpgroup dequantizes."""
        return self.pairs // self.kernel.config.consumer_warpgroups

    def _store(self, buffer, half, words) -> None:
        """Store dequantized elements of 16 rows of a half of operand A."""
        tmem.store_tile(tmem.row_address(buffer, 0) + half * SECOND_HALF, words)

    @cute.jit
    def _wait_for_buffer(self, turn, tile: cutlass.Constexpr[int]) -> None:
        """Wait until the products that read the buffer are done, before the first tile of a pair is stored."""
        if const_expr(tile == 0):
            self.a_ring.wait_empty(turn)
            tmem.after_signal()

    def _hand_over(self, turn) -> None:
        """Hand operand A over to the issuing thread."""
        tmem.wait_stores()
        tmem.before_signal()
        self.a_ring.fill(turn)

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Load S^T of a leaf, which has been issued before; ``step`` is the number of its first tile."""
        self.accumulators.take_s(step, self.s)
        self.multiply_scores(self.scores())

    # Loops over pairs are not unrolled: the compiler would compute addresses and descriptors before the leaves, and
    # spill. The ring of operand A counts pairs of K of a leaf, then pairs of V.

    @cute.jit
    def issue_scores(self, step):
        """Dequantize K of the leaf whose first tile is number ``step``, and issue S^T, if the segment has the leaf."""
        if step < self.end_step[0]:
            self._issue_leaf_scores(self.k_ring, step, self.q_stage[0])

    @cute.jit
    def _issue_leaf_scores(self, ring, step, q_stage):
        for number in cutlass.range(self.own_pairs, unroll=1):
            pair = self.own_tile(number)
            turn = step + pair
            for tile in cutlass.range_constexpr(PAIR):
                i, words = PAIR * pair + tile, cute.make_rmem_tensor(self.depth // 4, Uint32)
                ring.wait_full(step + i)
                self.read_keys(words, self._stage(ring, step, i))
                self._give_back(ring, [step + i])
                self._wait_for_buffer(turn, tile)
                self._store(self._buffer(turn), tile, words)
            self._hand_over(turn)
            if self.accumulators.issued_by(S_WARP):
                for other in cutlass.range(self.accumulators.part.warpgroups, unroll=1):
                    self._issue_pair_scores(turn + other, pair + other, q_stage)
        if self.accumulators.issued_by(S_WARP):
            self.accumulators.signal(self.accumulators.s_ring, step)

    @cute.jit
    def _issue_pair_scores(self, turn, pair, q_stage):
        rows = self.accumulators.rows
        self.a_ring.wait_full(turn)
        tmem.after_signal()
        with cute.arch.elect_one():
            place, a = self.accumulators.place("s") + pair * rows, TensorOperand(self._buffer(turn))
            if const_expr(self.accumulators.part.warpgroups > 1 or self.depth > PAIR * BLOCK_COLUMNS):
                # A zero that the compiler does not know. Otherwise it computes descriptors of Q before the leaves, and
                # spills.
                q_stage += turn >> 31
            q = self.q.at(q_stage)
            issue(place, a, q, Mma(Float16, rows), (0, self.depth))
            tmem.commit(shared_address(self.a_ring.empty + self.a_ring.stage(turn)))

    def prepare_values(self, ring, step) -> None:
        """Rearrange the block scales of V, if there are any, and make P visible to the tensor cores."""
        DequantLeafOperands.prepare_values(self, ring, step)
        cute.arch.fence_proxy("async.shared", space="cta")

    @property
    def value_products(self) -> int:
        """Products of O of a leaf, of two blocks of V each. The last one may have one."""
        return self.kernel.config.products_of_blocks[1]

    def _value_buffer(self, buffer, tile: int, product: int) -> Int32:
        """Return the address of two blocks of a tile of V in a buffer."""
        return buffer + (tile * self.value_products + product) * VALUE_COLUMNS

    @cute.jit
    def multiply_values(self, ring, step):
        """Dequantize V of a leaf and issue O^T, then S^T of the next leaf. The products are still in flight on
        return."""
        for number in cutlass.range(self.own_pairs, unroll=1):
            pair = self.own_tile(number)
            turn = step + self.pairs + pair
            for tile in cutlass.range_constexpr(PAIR):
                i = PAIR * pair + tile
                stage = self._stage(ring, step, i)
                ring.wait_full(step + i)
                self._wait_for_buffer(turn, tile)
                for block in cutlass.range_constexpr(self.blocks):
                    words = cute.make_rmem_tensor(LEAF_TILE // 4, Uint32)
                    self.read_values(words, stage, block)
                    self._store(self._value_buffer(self._buffer(turn), tile, block // PAIR), block % PAIR, words)
                self._give_back(ring, [step + i])
            self._hand_over(turn)
            if self.accumulators.issued_by(O_WARP):
                for other in cutlass.range(self.accumulators.part.warpgroups, unroll=1):
                    self._issue_pair_values(turn + other, pair + other)
        if self.accumulators.issued_by(O_WARP):
            self.accumulators.signal(self.accumulators.o_ring, step)
        self.issue_scores(step + self.leaf_tiles)

    @cute.jit
    def _issue_pair_values(self, turn, pair):
        rows = self.accumulators.rows
        self.a_ring.wait_full(turn)
        tmem.after_signal()
        with cute.arch.elect_one():
            for product in cutlass.range_constexpr(self.value_products):
                place, blocks = self.accumulators.place("o") + product * rows, min(self.blocks - PAIR * product, PAIR)
                mma = Mma(Float16, rows, blocks * MMA_ROWS)
                for tile in cutlass.range_constexpr(PAIR):
                    a = TensorOperand(self._value_buffer(self._buffer(turn), tile, product))
                    adds = True if const_expr(tile > 0) else (pair > 0).to(Int32)
                    issue(place, a, self.p.at(PAIR * pair + tile), mma, (0, LEAF_TILE), adds)
            tmem.commit(shared_address(self.a_ring.empty + self.a_ring.stage(turn)))

    def finish_values(self, ring, step) -> None:
        """Wait for O^T of a leaf, and load or add it."""
        self.accumulators.take_o(step, self.o, self.kernel.config.accumulated_levels > 0)
