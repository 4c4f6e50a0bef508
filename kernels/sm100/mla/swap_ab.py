"""Blackwell MLA decode of few rows (swap-AB, stream-K): the leaves of Hopper's kernel, with S and O in tensor memory.

The kernel is ``SwapABMlaSm90`` with the products of ``TensorProducts``: up to 16 packed rows, tile by tile of 64 keys.
A tile's product with V is complete in tensor memory before it is added to O in registers. So O is never rescaled in
tensor memory. 8-bit keys with 16-bit queries are dequantized in shared memory, as on Hopper. In e4m3, tcgen05 reads
V with its columns innermost (MN-major), so there is no transpose.

Warp roles and edges are the ones of ``SwapABMlaSm90``. ``TensorProducts`` adds the role issue, a thread of warp 4, and
the edges s and o. K and V are released when their products are done.

Tensor memory: a column for each row of S, and for each row and 64 columns of O: 144 with 16 rows at head dim 576/512.

    memory         | A'                                                              | ...
    tensor cores   | S(A)  |                       | P V, all columns |      waits
    attend         | waits | load S | P of A | meet |      waits       | load, add to O | node | waits
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint16

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, prmt, shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader, Rings
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, place_in_warp, transposed
from hopwell.kernels.sm90.decode.leaves import write_weights
from hopwell.kernels.sm90.mla.swap_ab import SwapABMlaSm90
from hopwell.kernels.sm90.mla.swap_ab_fp8 import BYTES_APART, TileColumnSoftmax
from hopwell.kernels.sm100.common import tmem
from hopwell.kernels.sm100.common.accumulators import MMA_ROWS, S_WARP, Accumulators
from hopwell.kernels.sm100.common.leaves import TensorProducts
from hopwell.kernels.sm100.common.mma import Mma, SharedOperand, issue
from hopwell.kernels.sm100.mla.config import Sm100SwapABMlaConfig


@device_struct
class TensorLatentOperands:
    """Operands of the products of a tile. Keys, in a left and a right half, are also the values."""

    kernel: Any  # configuration only
    q: SharedOperand
    k: tuple  # of both halves
    v: tuple
    p: SharedOperand
    s: Any  # in registers, in the order of wgmma's accumulators
    o: Any
    accumulators: Accumulators

    issues_ahead = False  # whether S of a leaf is issued before the leaf before it is complete

    @staticmethod
    def tiles_at_once(kernel) -> int:
        """Return the tiles whose products are waited for together."""
        return 1

    @staticmethod
    def create(kernel, tiles: SharedTiles, rings: Rings, accumulators: Accumulators) -> "TensorLatentOperands":
        layout, m, n = kernel.layout, kernel.tile.m, kernel.tile.n
        columns_first = kernel.source.columns_first
        halves = list(zip((tiles.k, tiles.v), layout.columns, strict=True))
        return TensorLatentOperands(
            kernel,
            q=SharedOperand.of(tiles.q, m, layout.q_columns, columns_first=False),
            k=tuple(SharedOperand.of(tile, n, columns, columns_first) for tile, columns in halves),
            v=tuple(SharedOperand.of(tile, n, columns, columns_first, reduces_rows=True) for tile, columns in halves),
            p=SharedOperand.of(tiles.p, m, BLOCK_COLUMNS, columns_first=False),
            s=cute.make_rmem_tensor(m // 2, Float32),
            o=cute.make_rmem_tensor(m * (kernel.config.head_dim_v // MMA_ROWS) // 2, Float32),
            accumulators=accumulators,
        )

    @property
    def products(self) -> int:
        """Products of 8 rows, side by side."""
        return self.accumulators.rows // MMA_COLUMNS

    def begin(self, q_ring, work) -> None:
        """Do nothing: Q of a segment stays in shared memory."""

    def end(self, q_ring, work) -> None:
        """Release Q after the segment's last product."""
        q_ring.release(work)

    def multiply_keys(self, rings, step, q_stage) -> None:
        """Compute S^T of tile ``step``, over the columns of its left half (0) and then of its right half (1)."""
        self._issue_scores(rings, step, q_stage)
        self.accumulators.take_s(step, self.s)

    @cute.jit
    def _issue_scores(self, rings, step, q_stage):
        if self.accumulators.issued_by(S_WARP):
            config, place = self.kernel.config, self.accumulators.place("s")
            mma, left = Mma(self.kernel.dtype, self.accumulators.rows, MMA_ROWS), config.head_dim_v // 2
            for half in cutlass.range_constexpr(2):
                rings[half].wait_full(step)
                tmem.after_signal()
                with cute.arch.elect_one():
                    q = self.q.from_column(half * self.kernel.layout.kv_dims[0]).at(q_stage)
                    k, depth = self.k[half].at(rings[half].stage(step)), (left, config.head_dim_qk - left)[half]
                    issue(place, k, q, mma, (0, depth), half > 0)
            self.accumulators.signal(self.accumulators.s_ring, step)

    @cute.jit
    def write_weights(self, p, scores, tile: cutlass.Constexpr[int]) -> None:
        """Write P of a tile of keys to ``p`` in shared memory."""
        if cutlass.const_expr(self.kernel.dtype.width == 16):
            write_weights(p, self.kernel.tile.m, self.kernel.dtype, scores, tile)
        else:
            g, t = place_in_warp()
            for product in cutlass.range_constexpr(scores.products):
                # A lane holds rows 2t and 2t + 1 of keys g and 8 + g. Two bytes are one element of the matrix
                # transpose. After it, a lane has row g of keys 2t and 8 + 2t, 2t + 1 and 9 + 2t.
                pairs = [scores.get(2 * product + row, c) for row in range(2) for c in range(2)]
                word = transposed(copy.pack_e4m3_x4(pairs))
                word = prmt(word, word, BYTES_APART)
                vector = copy.swizzled_vector(
                    shared_address(p.iterator), MMA_COLUMNS * product + g, warp_in_warpgroup()
                )
                for half in cutlass.range_constexpr(2):
                    keys = (word >> (16 * half)).to(Uint16)
                    shared_array(Uint16, vector + 8 * half + 2 * t)[0] = keys

    def rescale(self, softmax) -> None:
        """Rescale O to the references that the latest step has chosen."""
        softmax.rescale_output(self.output())

    def prepare_values(self, rings, step) -> None:
        """Make P in shared memory visible to the tensor cores, before the warps meet."""
        cute.arch.fence_proxy("async.shared", space="cta")

    def multiply_values(self, rings, step) -> None:
        """Add V^T P^T of tile ``step`` to O^T, and release the tile's halves."""
        self._issue_values(rings, step)
        self.accumulators.take_o(step, self.o, adds=True)

    @cute.jit
    def _issue_values(self, rings, step):
        if self.accumulators.issued_by(S_WARP):
            rows, dtype = self.accumulators.rows, self.kernel.dtype
            mma, width = Mma(dtype, rows, MMA_ROWS, m_major_a=True), MMA_ROWS * dtype.width // 16
            blocks = self.kernel.config.head_dim_v // (2 * MMA_ROWS)  # of a half
            tmem.after_signal()
            with cute.arch.elect_one():
                p = self.p.at(0)
                for half in cutlass.range_constexpr(2):
                    ring, stage = rings[half], rings[half].stage(step)
                    for block in cutlass.range_constexpr(blocks):
                        place = self.accumulators.place("o") + (half * blocks + block) * rows
                        v = self.v[half].from_column(block * width).at(stage)
                        issue(place, v, p, mma, (0, self.kernel.tile.n))
                    tmem.commit(shared_address(ring.empty + stage))
            self.accumulators.signal(self.accumulators.o_ring, step)

    def scores(self) -> ColumnFragment:
        """Return the scores of the tile; a warp has 16 of its keys."""
        return ColumnFragment(self.s, 2, self.products)

    def output(self) -> ColumnFragment:
        return ColumnFragment(self.o, cute.size(self.o) // (2 * self.products), self.products)


WIDE = TensorProducts(TensorLatentOperands, Reader.TENSOR_CORES)
FP8 = TensorProducts(TensorLatentOperands, Reader.TENSOR_CORES, TileColumnSoftmax)


def build(config: Sm100SwapABMlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    products = FP8 if config.uses_fp8_mma else WIDE
    return SwapABMlaSm90(config, products), example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
