"""Hopper MLA decode of few rows with 8-bit operands: queries, keys, weights and values in e4m3 (fp8 MMA).

The kernel has the roles and edges of ``SwapABMlaSm90``. Its products are already transposed, so O needs no transpose at
the end. ``fp8.py`` explains how the value gets into registers for its products. A lane holds two adjacent columns of
every sixteen of O.

Steady state: memory is the limit. Each tile has a reference of its own. P V of a half starts at zero. The half is
released when its product is done, before the product is added to O.

    memory         | A'                                                                                          | ...
    tensor cores   | S(A)  |        |              | V^T P^T, left |      |              | V^T P^T, right |      | waits
    attend         | waits | P of A | reads V left |     waits     | O += | reads V right |     waits     | O += | waits
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import device_struct, fma, prmt, shared_address, shared_array, warp_in_warpgroup
from hopwell.kernels.parts.core.fragment import ColumnFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Reader
from hopwell.kernels.parts.core.warp_mma import MMA_COLUMNS, QUAD, place_in_warp, transposed
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import ColumnSoftmax, TileSoftmax
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.decode.leaves import row_factors
from hopwell.kernels.sm90.decode.swap_ab import LeafProducts
from hopwell.kernels.sm90.mla.fp8 import Values
from hopwell.kernels.sm90.mla.swap_ab import LatentOperands, SwapABMlaSm90

# Byte permute that splits two 16-bit elements: both lower bytes first, then both upper bytes.
BYTES_APART = 0x3120


@dataclass
class TileColumnSoftmax(ColumnSoftmax, TileSoftmax):
    """Softmax of rows held by a :class:`ColumnFragment`, for weights of few bits."""


@dataclass
class Fp8LatentOperands(LatentOperands):
    """Operands whose values are loaded into registers. The products have zero accumulators and are added to O."""

    values: tuple  # operand A of the products with a half of the value, 64 columns each
    added: tuple  # the products to add to O
    factors: Any  # for each row of a lane: the factor that rescales O to the tile's reference
    tiles: Any

    @staticmethod
    def create(kernel, tiles: SharedTiles) -> "Fp8LatentOperands":
        t, source, shape = kernel.tile, warpgroup.OperandSource, (WARPGROUP_ROWS, kernel.tile.m)
        qk_mma, pv_mma = (
            make_mma(kernel.dtype, shape, place, OperandMajorMode.K, warpgroups=1)
            for place in (source.SMEM, source.RMEM)
        )
        pv, blocks = pv_mma.get_slice(0), range(kernel.layout.depth[1] // 2 // WARPGROUP_ROWS)
        product = pv.partition_shape_C(shape)
        return Fp8LatentOperands(
            **LatentOperands.latent_fields(kernel, tiles, (qk_mma, pv_mma)),
            values=tuple(pv.make_fragment_A(pv.partition_shape_A((WARPGROUP_ROWS, t.n))) for _ in blocks),
            added=tuple(cute.make_rmem_tensor(product, Float32) for _ in blocks),
            factors=cute.make_rmem_tensor(t.m // QUAD, Float32),
            tiles=tiles,
        )

    def multiply_values(self, rings, step) -> None:
        """Rescale O^T to the tile's references and add V^T P^T, first the left (0) and then the right (1) half."""
        for kv_half, ring in enumerate(rings):
            tile, columns = (self.tiles.k, self.tiles.v)[kv_half], self.kernel.layout.columns[kv_half]
            values = Values.of(self.kernel, tile, columns, ring.stage(step))
            for block, operand in enumerate(self.values):
                values.read(block, cute.recast_tensor(operand, Uint32))
            p = self.p[None, None, None, 0]
            for operand, product in zip(self.values, self.added, strict=True):
                issue_mma(self.pv_mma, product, operand, p, self.kernel.tile.n, False)
            warpgroup.wait_group(0)
            ring.release(step)
            for block, product in enumerate(self.added):
                self._add(product, (kv_half * len(self.added) + block) * cute.size(product))

    def _add(self, product, first: int) -> None:
        for i in range(cute.size(product)):
            # Registers of a product alternate between two rows, four registers for every eight rows.
            row = i // 4 * 2 + i % 2
            self.o[first + i] = fma(self.o[first + i], self.factors[row], product[i])

    def rescale(self, softmax) -> None:
        """Save the factors; O is rescaled when a product is added to it."""
        for r in range(cute.size(self.factors)):
            self.factors[r] = softmax.rescale[r]

    @cute.jit
    def write_weights(self, p, scores, tile: cutlass.Constexpr[int]) -> None:
        """Write P in the key order of :class:`Values`."""
        g, t = place_in_warp()
        base = shared_address(p.iterator)
        for product in cutlass.range_constexpr(scores.products):
            # A lane holds rows 2t and 2t + 1 of keys g and 8 + g. Two bytes are one element of the matrix transpose.
            # After it, a lane has row g of keys 2t and 8 + 2t, 2t + 1 and 9 + 2t.
            pairs = [scores.get(2 * product + row, c) for row in range(2) for c in range(2)]
            word = transposed(copy.pack_e4m3_x4(pairs))
            vector = copy.swizzled_vector(base, MMA_COLUMNS * product + g, warp_in_warpgroup())
            shared_array(Uint32, vector + 4 * t)[0] = prmt(word, word, BYTES_APART)


@device_struct
class ColumnPairOutput:
    """Output whose accumulators have pairs of adjacent columns."""

    kernel: Any  # configuration only

    @cute.jit
    def store(self, output, statistics, rows: PackedRows) -> None:
        """Write the results of all rows; a lane holds pairs of adjacent columns."""
        g, _ = place_in_warp()
        factors = row_factors(output, statistics, rows)
        for r in cutlass.range_constexpr(output.rows):
            row = output.first_row() + output.row_offset(r)
            target = rows.output(row, 0)
            if row < rows.count:
                for c in cutlass.range_constexpr(0, output.columns, 2):
                    scaled = [output.get(r, c + k) * factors[r] for k in range(2)]
                    column = (4 * (c // 2) + warp_in_warpgroup()) * ColumnFragment.warp_columns + 2 * g
                    copy.store_rounded(target + column * rows.out_bytes, scaled, self.kernel.out_dtype)


FP8 = LeafProducts(Fp8LatentOperands, Reader.BOTH, TileColumnSoftmax, ColumnPairOutput)


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return SwapABMlaSm90(config, FP8), example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
