"""Blackwell decode of few rows (swap-AB, stream-K): the leaves of Hopper's kernels, with S and O in tensor memory.

The products are S^T = K Q^T and O^T = V^T P^T. M is 64 keys, or 64 columns of V. Over 8-bit and 4-bit caches M is 128,
see ``dequant.py``. N is up to 64 packed rows. An accumulator with M = 64 is in the first 16 lanes of each warp.
``tcgen05.ld.16x256b`` loads it into the registers in which wgmma has it. So softmax, masks, the tree, stream-K and the
output are Hopper's code, see ``SwapABDecodeSm90``.

Warp roles
    warps 0..3   load_k, load_v, load_q, schedule, as on Hopper
    warps 4..7   attend  the rows of a tile, or half of them. A thread of warp 4 issues S, and O of 16-bit caches. A
                         thread of warp 5 issues O of other caches
    warps 8..11  attend  the other half of the rows, with 32 and 64 rows

Edges, of ``SwapABDecodeSm90`` and ``TensorProducts``
    q     load_q -> attend    released after the segment's last leaf
    k, v  load -> issue       16-bit tiles: released when their products are done; dequantized tiles: load -> attend
    a     attend -> issue     dequantized tiles as operand A in tensor memory
    s, o  issue -> attend     full when products are done; never released, see ``TensorProducts``
    work  schedule -> all     released as soon as it has been read

Tensor memory: S has a column for each row and tile of a leaf, O one for each row and 64 columns of V. With 8 rows at
head dim 128 they take 32 columns, and with 64 rows 384. Over 8-bit and 4-bit caches, two tiles or two blocks of V share
a column of S or O. A dequantized pair of tiles takes a column for each two columns of K, or for each two keys and up to
128 columns of V.

Steady state: memory is the limit. A leaf is two tiles, A and B, or four.

S of the next leaf is issued behind O of this one, so that its products overlap the load of O and the tree.

    memory         | A'                                  | B'                                  | ...
    tensor cores   |                         | O = P V (A) | O += P V (B) | S(A') | S(B') | waits
    attend         | load S | P of both | meet |          waits           | load O | nodes  | load S ...
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.config.base import BLOCK_COLUMNS, KvType
from hopwell.kernels.config.splitting import LEAF_TILE
from hopwell.kernels.parts.core.device import device_struct, shared_address
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader, Ring, Rings
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS
from hopwell.kernels.parts.rows.softmax import HalfLeafSoftmax, HalfSoftmax
from hopwell.kernels.sm90.decode.base import argument_types
from hopwell.kernels.sm90.decode.dequant_swap_ab import VectorOutput
from hopwell.kernels.sm90.decode.leaves import write_weights
from hopwell.kernels.sm90.decode.swap_ab import SwapABDecodeSm90
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.accumulators import MMA_ROWS, S_WARP, Accumulators
from hopwell.kernels.sm100.common.leaves import ScoresAhead, TensorProducts
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, issue
from hopwell.kernels.sm100.decode.config import Sm100DecodeConfig
from hopwell.kernels.sm100.decode.dequant import TensorDequantOperands


@device_struct
class TensorLeafOperands(ScoresAhead):
    """Operands of the products of a leaf. K, Q, V and P are in shared memory. S and O are in tensor memory,
    and in registers once they are complete."""

    kernel: Any  # configuration only
    q: SharedOperand
    k: SharedOperand
    v: SharedOperand
    p: SharedOperand
    s: Any  # scores of the tiles of a leaf in registers, in the order of wgmma's accumulators
    o: Any
    accumulators: Accumulators
    k_ring: Ring
    end_step: Any  # in a register: the step after the segment's last tile
    q_stage: Any  # in a register

    @staticmethod
    def tiles_at_once(kernel) -> int:
        """Return the tiles whose products are waited for together: the tiles of a leaf."""
        return kernel.config.leaf_tiles

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: Rings, accumulators: Accumulators) -> "TensorLeafOperands":
        c, m, n, part = kernel.config, kernel.tile.m, kernel.tile.n, accumulators.part
        columns_first, (qk_columns, v_columns) = kernel.source.columns_first, c.layout.columns
        return TensorLeafOperands(
            kernel,
            q=SharedOperand.of(tiles.q, m, c.layout.q_columns, columns_first=False),
            k=SharedOperand.of(tiles.k, n, qk_columns, columns_first),
            v=SharedOperand.of(tiles.v, n, v_columns, columns_first, reduces_rows=True),
            p=SharedOperand.of(tiles.p, m, LEAF_TILE, columns_first=False),
            s=cute.make_rmem_tensor(part.rows * c.leaf_tiles // 2, Float32),
            o=cute.make_rmem_tensor(part.rows * c.value_blocks // 2, Float32),
            accumulators=accumulators,
            k_ring=rings.k,
            end_step=cute.make_rmem_tensor(1, Int32),
            q_stage=cute.make_rmem_tensor(1, Int32),
        )

    @property
    def products(self) -> int:
        """Products of 8 rows, side by side."""
        return self.accumulators.part.rows // MMA_COLUMNS

    @property
    def leaf_tiles(self) -> int:
        return self.kernel.config.leaf_tiles

    def begin(self, q_ring, work) -> None:
        """Do nothing: Q of a segment stays in shared memory."""

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    def multiply_keys(self, ring, step, q_stage) -> None:
        """Load S^T of a leaf, which has been issued before; ``step`` is the number of its first tile."""
        self.accumulators.take_s(step, self.s)

    @cute.jit
    def issue_scores(self, step):
        """Issue S^T of the leaf whose first tile is number ``step``, if the segment has it."""
        ring, q_stage = self.k_ring, self.q_stage[0]
        if self.accumulators.issued_by(S_WARP) and step < self.end_step[0]:
            place, rows = self.accumulators.place("s"), self.accumulators.rows
            mma, depth, q = Mma(self.kernel.dtype, rows, MMA_ROWS), self.kernel.layout.depth[0], self.q.at(q_stage)
            # Not unrolled: the compiler would compute all descriptors and barriers before the leaves, and spill.
            for i in cutlass.range(self.leaf_tiles, unroll=1):
                ring.wait_full(step + i)
                tmem.after_signal()
                with cute.arch.elect_one():
                    issue(place + i * rows, self.k.at(ring.stage(step + i)), q, mma, (0, depth))
                    tmem.commit(shared_address(ring.empty + ring.stage(step + i)))
            self.accumulators.signal(self.accumulators.s_ring, step)

    def write_weights(self, p, scores, tile: int) -> None:
        """Write P of a tile of keys to ``p`` in shared memory, as tile number ``tile``."""
        write_weights(p, self.kernel.tile.m, self.kernel.dtype, scores, tile, self.accumulators.part.first_row)

    def prepare_values(self, rings, step) -> None:
        """Make P in shared memory visible to the tensor cores, before the warps meet."""
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def multiply_values(self, ring, step):
        """Issue O^T of a leaf, and S^T of the next leaf. The products are still in flight on return."""
        if self.accumulators.issued_by(S_WARP):
            place, rows = self.accumulators.place("o"), self.accumulators.rows
            mma = Mma(self.kernel.dtype, rows, MMA_ROWS, m_major_a=True)
            for i in cutlass.range(self.leaf_tiles, unroll=1):
                ring.wait_full(step + i)
                tmem.after_signal()
                with cute.arch.elect_one():
                    stage, p = ring.stage(step + i), self.p.at(i)
                    for block in cutlass.range_constexpr(self.kernel.config.value_blocks):
                        v = self.v.from_column(block * BLOCK_COLUMNS).at(stage)
                        issue(place + block * rows, v, p, mma, (0, LEAF_TILE), (i > 0).to(Int32))
                    tmem.commit(shared_address(ring.empty + stage))
            self.accumulators.signal(self.accumulators.o_ring, step)
        self.issue_scores(step + self.leaf_tiles)

    def finish_values(self, ring, step) -> None:
        """Wait for O^T of a leaf, and load or add it."""
        self.accumulators.take_o(step, self.o, self.kernel.config.accumulated_levels > 0)

    def scores(self) -> ColumnFragment:
        """Return the scores of all tiles; a warp has 16 keys of each tile."""
        return ColumnFragment(self.s, 2 * self.leaf_tiles, self.products)

    def tile_scores(self, i: int) -> ColumnFragment:
        """Return the scores of tile i of the leaf; a warp has 16 of its keys."""
        registers = 4 * self.products
        tile = cute.make_tensor(self.s.iterator + i * registers, cute.make_layout(registers))
        return ColumnFragment(tile, 2, self.products)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)


WIDE = TensorProducts(TensorLeafOperands, Reader.TENSOR_CORES)
DEQUANT = TensorProducts(
    TensorDequantOperands,
    Reader.SYNCED_LANES,
    HalfLeafSoftmax,
    VectorOutput,
    kv_consumer="attend of one",
)


def build(config: Sm100DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    products = WIDE if config.kv_type is KvType.WIDE else DEQUANT
    if config.accumulated_levels and products is DEQUANT:
        products = replace(DEQUANT, softmax=HalfSoftmax)
    return SwapABDecodeSm90(config, products), example_arguments(argument_types(config), floats=3)
