"""Consumer warpgroups of Hopper prefill over 8-bit operands that accumulate O on the tensor cores between promotions.

Hopper's tensor cores keep 13 to 14 bits of a sum of 8-bit products, so long sums lose the contributions of single
products. Every ``PROMOTION_STEPS`` steps O is added to a float32 sum in shared memory and starts from zero (promotion).
Between promotions few additions are made by products, and the float32 additions are exact enough.

Float32 additions in every step, as in ``fp8.py``, need registers for the products of n slices. Promotion saves them, so
a step has more keys, and products wait for nothing.
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
from hopwell.kernels.parts.rows.epilogue import STAGING_BYTES
from hopwell.kernels.sm90.common.attend import WarpgroupPlace
from hopwell.kernels.sm90.common.operands import Operands
from hopwell.kernels.sm90.prefill.fp8 import Fp8Rows, fp8_fields
from hopwell.kernels.sm90.prefill.overlapped import OverlappedLoop

# Steps are counted from the first key of a request. So promotion depends only on the keys, and neither on the rows that
# share a tile nor on the batch.
PROMOTION_STEPS = 16
VECTOR_FLOATS = copy.VECTOR_BYTES // 4  # floats of a vector
# A lane's vectors of O that lie in transposed V. A row of 192 keys fills 12 of the 16 vectors of a swizzled row, and no
# product reads the other 4. All of O would not fit beside the stages.
SPARE_VECTORS = 4
PROMOTED_VECTORS = 13  # a lane's other vectors: of O, and one for its references
PROMOTED_BYTES = LANES * PROMOTED_VECTORS * copy.VECTOR_BYTES  # of a warp


class PromotingLoop(OverlappedLoop):
    """Main loop with one reference per tile, see ``TileSoftmax``. It rescales O in every step, under Q K^T."""

    @cute.jit
    def next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        # S needs no registers here. The promotion comes with the last of PROMOTION_STEPS tiles, so short requests have
        # none.
        if n % PROMOTION_STEPS == PROMOTION_STEPS - 1:
            operands.promote(attend.softmax)
        OverlappedLoop.next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked)

    @cute.jit
    def last_step(self, attend, operands, kv_step):
        OverlappedLoop.last_step(self, attend, operands, kv_step)
        operands.add_promoted(attend.softmax)


@dataclass
class PromotedOperands(Fp8Rows, Operands):
    """Operands of a lane that keeps the float32 sum of its part of O in its own vectors of shared memory."""

    staging: Int32  # of all warps that store; the vectors of all lanes follow
    values: Int32  # transposed V
    kernel: Any  # configuration only

    @staticmethod
    def create(kernel, tiles: SharedTiles, place: WarpgroupPlace, addresses, geometry) -> "PromotedOperands":
        places = dict(staging=shared_address(tiles.staging), values=shared_address(tiles.v.iterator))
        fields = fp8_fields(kernel, tiles, place, kernel.layout.depth[1])
        return PromotedOperands(**fields, kernel=kernel, **places)

    def rescale(self, softmax) -> None:
        """Rescale O in every step."""
        self.output().scale_rows(softmax.rescale)

    def vectors(self) -> list:
        """Return the addresses of this lane's vectors: first O, then its references and a flag
        whether there is a sum."""
        config = self.kernel.config
        lane = cute.arch.thread_idx()[0] - WARPGROUP
        first = self.staging + self.kernel.storing_warps * STAGING_BYTES + lane * copy.VECTOR_BYTES
        stride = self.kernel.storing_warps * LANES * copy.VECTOR_BYTES
        own = [first + i * stride for i in range(PROMOTED_VECTORS)]
        # Each lane of a warpgroup has one row in a stage of transposed V. The stage has the number of the warpgroup.
        stage = self.values + lane // WARPGROUP * config.layout.converted_bytes["v"]
        used, width = self.tile_n // copy.VECTOR_BYTES, config.layout.transposed_columns // HALFWORD_BYTES
        spare = copy.tile_vector(stage, lane % WARPGROUP, used, config.layout.depth[1], width, False)
        return own[:-1] + [spare ^ (i * copy.VECTOR_BYTES) for i in range(SPARE_VECTORS)] + own[-1:]

    @cute.jit
    def begin(self, q_stage, tile, n) -> None:
        copy.store_shared(self.vectors()[-1], [Float32(0.0)] * VECTOR_FLOATS)

    @cute.jit
    def promote(self, softmax) -> None:
        """Add O to the sum, both relative to the references that the latest step has chosen."""
        self.output().scale_rows(softmax.rescale)
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
