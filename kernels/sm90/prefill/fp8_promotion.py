"""Consumer warpgroups of Hopper prefill over 8-bit operands whose products accumulate O themselves, for a while.

The tensor cores of Hopper keep 13 to 14 bits of a sum of products of 8-bit operands, so that long sums lose what single
products add. Every ``PROMOTION_STEPS`` steps O goes to a sum in float32, which lies in shared memory, and begins at
zero: relative to the promote, additions in products are few, and those in float32 are exact enough. Against float32
additions in each step this saves the registers that products of n slices take, so a step has more keys, and products
wait for nothing.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import fma, shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.rows.epilogue import STAGING_BYTES, OutputRows, output_rows
from hopwell.kernels.sm90.prefill.fp8 import Fp8Operands
from hopwell.kernels.sm90.prefill.overlapped import OverlappedAttend

# Steps are counted from the first key of a request, so that what is promoted when depends on the keys alone, and
# neither on the rows that share a tile nor on the batch.
PROMOTION_STEPS = 16
VECTOR_FLOATS = copy.VECTOR_BYTES // 4  # floats of a vector
# A lane's vectors of O that lie in transposed V: a row of 192 keys takes 12 of the 16 vectors that whole rows of the
# swizzle have, and no product reads the others. All of O would not fit beside the stages.
SPARE_VECTORS = 4
PROMOTED_VECTORS = 13  # a lane's other vectors: of O, and one for its references
PROMOTED_BYTES = LANES * PROMOTED_VECTORS * copy.VECTOR_BYTES  # of a warp


@dataclass
class PromotingFp8Attend(OverlappedAttend):
    """Each tile has a reference of its own, see ``TileSoftmax``, to which O is always brought under Q K^T."""

    def operands(self, row_block, column_half, addresses, geometry) -> "PromotedOperands":
        return PromotedOperands.create(self.kernel, self.tiles, row_block, column_half)

    def output_rows(self) -> type[OutputRows]:
        return output_rows(self.kernel.out_dtype, stages_pairs=False)

    def rescale(self, operands) -> None:
        operands.rescale_output(self.softmax.rescale)

    @cute.jit
    def next_step(self, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        # Here S needs no registers. The promote comes with the last of so many tiles, so that short requests have none.
        if n % PROMOTION_STEPS == PROMOTION_STEPS - 1:
            operands.flush(self.softmax)
        OverlappedAttend.next_step(self, operands, ping_pong, q_stage, row, kv_step, n, masked)

    @cute.jit
    def last_step(self, operands, kv_step):
        OverlappedAttend.last_step(self, operands, kv_step)
        operands.add_promoted(self.softmax)


@dataclass
class PromotedOperands(Fp8Operands):
    """A lane keeps the sum of its part of O in vectors of shared memory that are its own."""

    staging: Int32  # of all warps that store; vectors of all lanes follow
    values: Int32  # transposed V
    kernel: Any  # configuration only

    @staticmethod
    def create(kernel, tiles: SharedTiles, row_block, column_half) -> "PromotedOperands":
        places = dict(staging=shared_address(tiles.staging), values=shared_address(tiles.v.iterator))
        return PromotedOperands.of_products(kernel, tiles, row_block, kernel.config.depth[1], kernel=kernel, **places)

    def vectors(self) -> list:
        """Return the addresses of this lane's vectors: those of O, then that of its references and of whether there is
        a sum."""
        config = self.kernel.config
        lane = cute.arch.thread_idx()[0] - WARPGROUP
        first = self.staging + self.kernel.storing_warps * STAGING_BYTES + lane * copy.VECTOR_BYTES
        stride = self.kernel.storing_warps * LANES * copy.VECTOR_BYTES
        own = [first + i * stride for i in range(PROMOTED_VECTORS)]
        # Lanes of a warpgroup have a row each of the stage of transposed V that has the warpgroup's number.
        stage = self.values + lane // WARPGROUP * config.converted_bytes["V"]
        used, width = self.tile_n // copy.VECTOR_BYTES, config.transposed_columns // HALFWORD_BYTES
        spare = copy.tile_vector(stage, lane % WARPGROUP, used, config.depth[1], width, False)
        return own[:-1] + [spare ^ (i * copy.VECTOR_BYTES) for i in range(SPARE_VECTORS)] + own[-1:]

    @cute.jit
    def begin(self, q_stage, tile, n) -> None:
        copy.store_shared(self.vectors()[-1], [Float32(0.0)] * VECTOR_FLOATS)

    @cute.jit
    def flush(self, softmax) -> None:
        """Add O to the sum, both at the references that the latest step has chosen."""
        self.rescale_output(softmax.rescale)
        self.add_promoted(softmax)
        vectors = self.vectors()
        for i in cutlass.range_constexpr(len(vectors) - 1):
            copy.store_shared(vectors[i], [self.o[VECTOR_FLOATS * i + k] for k in range(VECTOR_FLOATS)])
        references = [softmax.reference[r] for r in range(RowFragment.rows)]
        copy.store_shared(vectors[-1], [*references, Float32(1.0), Float32(0.0)])
        self.o.fill(0.0)

    @cute.jit
    def add_promoted(self, softmax) -> None:
        """Add the sum, if there is one, to O."""
        vectors, o = self.vectors(), self.o
        state = copy.load_shared(vectors[-1], VECTOR_FLOATS, Float32)
        references, exists = state[:2], state[2]
        if exists != 0.0:
            factors = (softmax.factor_from(0, references[0]), softmax.factor_from(1, references[1]))
            for i in cutlass.range_constexpr(len(vectors) - 1):
                sums = copy.load_shared(vectors[i], VECTOR_FLOATS, Float32)
                for k in cutlass.range_constexpr(VECTOR_FLOATS):
                    place = VECTOR_FLOATS * i + k
                    o[place] = fma(sums[k], factors[place // 2 % 2], o[place])
