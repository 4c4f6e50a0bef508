"""Consumer warpgroups of Hopper prefill with 8-bit operands (fp8 MMA): Q, K, P and V."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import fma
from hopwell.kernels.parts.core.fragment import SplitRowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.sm90.common.attend import MainLoop, WarpgroupPlace
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.common.operands import Operands

# Maximum columns of V in one product. Hopper's tensor cores add 8-bit products with 13 to 14 bits of mantissa. So O is
# accumulated by float32 instructions, tile by tile, from products with zero accumulators. These products need registers
# beside O, S and P.
N_SLICE_COLUMNS = 64
PRODUCT_REGISTERS = 184  # of a lane for S, P, O and the product of one n slice; with more, kernels spill


class NSliceLoop(MainLoop):
    """Main loop that adds P V of a tile to O rescaled to the tile's reference, see ``TileSoftmax``.

    In one turn a warpgroup issues P V of the previous tile for the first n slice, then Q K^T. The first slice is added
    to O while Q K^T runs. The other slices of P V follow. S belongs to tile i, P V to the tile before, i + 1:

        tensor cores | slice 0 of P V(i+1) | S(i) = Q K(i)^T | slice 1 of P V(i+1) |        the other warpgroup        |
        warpgroup    |        waits        | O += slice 0    |        waits        | O += slice 1 | maximum, 2^(..), P |
        convert      | V(i) from [keys, columns] to [columns, keys], while stages are free                            |
    """

    @cute.jit
    def next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        k_ring, v_ring = attend.rings.k, attend.rings.v
        v_stage = v_ring.stage(kv_step)
        k_ring.wait_full(kv_step + 1)
        v_ring.wait_full(kv_step)
        ping_pong.wait()
        operands.issue_n_slice(v_stage, 0)
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        for n_slice in cutlass.range_constexpr(operands.n_slices):
            if const_expr(n_slice == operands.n_slices - 1):
                ping_pong.pass_on()
            warpgroup.wait_group(1 if n_slice == 0 else 0)
            operands.add_n_slice(n_slice, attend.softmax.rescale)
            if const_expr(n_slice + 1 < operands.n_slices):
                operands.issue_n_slice(v_stage, n_slice + 1)
        v_ring.release(kv_step)
        warpgroup.wait_group(0)
        k_ring.release(kv_step + 1)
        attend.to_logits(operands.scores(), n, row, masked)
        attend.softmax.step(operands.scores())
        operands.round_scores()


def fp8_fields(kernel, tiles: SharedTiles, place: WarpgroupPlace, width: int) -> dict[str, Any]:
    """Return the fields of :class:`Operands` for fp8 products of ``width`` columns of V.

    ``v`` is transposed: its columns are rows, in the order of ``TransposingConverter``.
    """
    source = warpgroup.OperandSource
    mmas = [
        make_mma(
            kernel.dtype,
            (WARPGROUP_ROWS, n),
            a_source,
            OperandMajorMode.K,
            warpgroups=kernel.config.consumer_warpgroups // kernel.config.v_splits,
        )
        for n, a_source in ((kernel.tile.n, source.SMEM), (width, source.RMEM))
    ]
    value = tiles.v
    if const_expr(kernel.config.v_splits > 1):
        part = cute.crd2idx((kernel.layout.depth[1], 0, 0), tiles.v.layout)
        value = cute.make_tensor(tiles.v.iterator + place.column_half * part, tiles.v.layout)
    return Operands.fields(kernel, tiles, place.row_block, mmas, value)


class Fp8Rows:
    """Base, beside ``Operands``, of operands whose P is e4m3: the order of the elements of P and O."""

    s: Any
    o: Any
    p: Any
    depth_v: int

    def output(self) -> SplitRowFragment:
        return SplitRowFragment(self.o, self.depth_v // SplitRowFragment.lanes_per_row)

    @cute.jit
    def round_scores(self) -> None:
        """Round S to P in 8 bits, in the key order that ``TransposingConverter`` gives V."""
        round_to_e4m3(self.s, cute.recast_tensor(self.p, Uint32))


@dataclass
class NSliceOperands(Fp8Rows, Operands):
    """Operands of n slices; ``product`` is the product of P and one n slice of V."""

    product: object
    n_slices: int

    @staticmethod
    def create(kernel, tiles: SharedTiles, place: WarpgroupPlace, addresses, geometry) -> "NSliceOperands":
        depth_v = kernel.layout.depth[1]
        width = n_slice_columns(depth_v, kernel.tile.n)
        # A lane has the accumulators of wgmma: two columns of each eight, of two rows.
        product = cute.make_rmem_tensor(((2, 2, width // 8), 1, 1), Float32)
        fields = fp8_fields(kernel, tiles, place, width)
        return NSliceOperands(**fields, product=product, n_slices=depth_v // width)

    def issue_n_slice(self, v_stage, n_slice: int) -> None:
        """Issue the product of P and one n slice of V."""
        v = self.v[None, n_slice, None, v_stage]
        (values, keys), (value_step, key_step) = v.layout.shape, v.layout.stride
        v = cute.make_tensor(v.iterator, cute.make_layout((values, 1, keys), stride=(value_step, 0, key_step)))
        issue_mma(self.pv_mma, self.product, self.p, v, self.tile_n, False)

    @cute.jit
    def add_n_slice(self, n_slice: cutlass.Constexpr[int], factors) -> None:
        """Add the product to its columns of O, after multiplying them by ``factors``, one per row."""
        first = n_slice * cute.size(self.product)
        for i in cutlass.range_constexpr(cute.size(self.product)):
            self.o[first + i] = fma(self.o[first + i], factors[i // 2 % 2], self.product[i])

    @cute.jit
    def add_values(self, v_stage, softmax):
        for n_slice in cutlass.range_constexpr(self.n_slices):
            self.issue_n_slice(v_stage, n_slice)
            warpgroup.wait_group(0)
            self.add_n_slice(n_slice, softmax.rescale)

    def rescale(self, softmax) -> None:
        """Do nothing: O is rescaled when a product is added to it."""


def round_to_e4m3(s, words) -> None:
    """Round S to words of P in e4m3. A lane's operand takes four adjacent keys, but its accumulators hold two keys each
    of two core matrices. So keys 2 t, 2 t + 1, 8 + 2 t and 8 + 2 t + 1 of sixteen become adjacent."""
    for i in range(cute.size(words)):
        first = i // 2 * 8 + i % 2 * 2
        words[i] = copy.pack_e4m3_x4([s[first + k] for k in (0, 1, 4, 5)])


def n_slice_columns(depth_v: int, tile_n: int) -> int:
    """Return the columns of V in one product: the largest divisor of all columns whose product fits into registers
    beside S, P and O."""
    left = PRODUCT_REGISTERS - tile_n // 2 - tile_n // 8 - depth_v // 2
    most = min(2 * left, N_SLICE_COLUMNS)
    return max(width for width in range(8, most + 1, 8) if depth_v % width == 0)
