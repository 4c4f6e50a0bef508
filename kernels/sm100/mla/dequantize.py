"""Dequantization of 8-bit latent keys in shared memory, box by box, between their loads and the products."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.elements import SCALE_COLUMNS
from hopwell.kernels.hardware import LANES
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.pipeline import Ring
from hopwell.kernels.parts.dequant.latent_rows import LANES_PER_ROW, LatentRowFormat
from hopwell.kernels.sm100.mla.loads import BOX_BYTES, VALUE_BOXES, value_block
from hopwell.kernels.sm100.mla.products import StepOrder


@device_struct(frozen=True)
class Dequantize(StepOrder):
    """One of the warps that dequantize stages in turn, in the order of the products. A box has 64 keys and 64 columns.

    ``EightBitRows`` puts 16 bytes of a row where the first of their two result vectors belongs, and the row's scales
    where the second belongs. A lane reads both before it writes both result vectors, so no other lane interferes.
    """

    k_ring: Ring
    v_ring: Ring
    loaded_k: Ring
    loaded_v: Ring
    k_shared: Int32  # addresses of the first stages
    v_shared: Int32
    warp: Int32  # among the warps of this role
    rank: Int32

    @property
    def warps(self) -> int:
        return self.kernel.config.warps_of("dequantize")

    @property
    def form(self) -> LatentRowFormat:
        c = self.kernel.config
        return LatentRowFormat.of(c.kv_type, self.kernel.dtype, 0, c.head_dim_qk, c.head_dim_v)

    @cute.jit
    def scores(self, work, step):
        for block in cutlass.range(self.warp, self.kernel.config.dequantized_boxes, self.warps, unroll=1):
            stage = step * self.k_stages + block
            self.loaded_k.wait_full(stage)
            self.dequantize(self.k_shared + self.k_ring.stage(stage) * BOX_BYTES, block)
            self.finish(self.k_ring, stage)

    @cute.jit
    def output(self, step, accumulate):
        for i in cutlass.range(self.warp, self.v_stages, self.warps, unroll=1):
            stage = step * self.v_stages + i
            self.loaded_v.wait_full(stage)
            place = self.v_shared + self.v_ring.stage(stage) * (VALUE_BOXES * BOX_BYTES)
            for box in cutlass.range_constexpr(VALUE_BOXES):
                block = value_block(self.kernel.config, self.rank, i, box)
                self.dequantize(place + box * BOX_BYTES, block)
            self.finish(self.v_ring, stage)

    def finish(self, ring: Ring, stage) -> None:
        """Hand a stage over to the tensor cores, which read it through another proxy."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_barrier(stage))

    @cute.jit
    def dequantize(self, box, block):
        """Dequantize column block ``block`` of the keys in ``box``."""
        form, lane = self.form, cute.arch.lane_idx()
        first = copy.swizzled_vector(box, lane // LANES_PER_ROW, lane % LANES_PER_ROW * 2)
        word = block // (SCALE_COLUMNS // BLOCK_COLUMNS) * 4  # offset of the block's scale
        # Rows that are ATOM_ROWS apart have the same swizzle.
        for i in cutlass.range(BOX_BYTES // (ATOM_ROWS * copy.SWIZZLE_ROW_BYTES), unroll=4):
            place = first + i * (ATOM_ROWS * copy.SWIZZLE_ROW_BYTES)
            loaded, scale = copy.load_shared(place, 4), None
            if const_expr(form.to_scales is not None):
                (scale,) = copy.load_shared((place ^ copy.VECTOR_BYTES) + word, 1, Float32)
            form.store(place, loaded, scale)


assert LANES // LANES_PER_ROW == ATOM_ROWS
