"""Hopper MLA decode with 8-bit operands: queries, keys, weights and values in e4m3 (fp8 MMA).

The kernel has the roles and edges of ``MlaSm90``. Its products take half of the time.

P V is computed as O^T = V^T P^T. An 8-bit wgmma reads operand B from shared memory only with the depth, here the
keys, along the rows. P has this layout, V does not. Operand A may come from registers: a transposing ldmatrix loads
pairs of columns of V, and two byte permutes separate even from odd columns. So the warpgroup that multiplies V
transposes it on the way to the tensor cores. O^T is transposed back at the end of a work tile.

A step's weights are relative to the largest score of its two tiles, see :class:`TileSoftmax`. The step's product is
added to O by float32 instructions, see ``sm90/prefill/fp8.py``. So the warpgroups meet twice in a step: when the
maxima of A and B are available, and when the weights are. There is no other dependence between them: P of both is
one tile, written between the two barriers and multiplied after the second.

Edges that differ
    k, v    load_keys -> attend  four tiles fit, two of A and two of B; left and right release a tile when they have
                                 read their last operands of it
    q       schedule -> attend   released when O has been transposed, which uses Q's place as staging

Steady state: the limit is that products wait for softmax and softmax waits for products.

    tensor cores   | left: S(A), right: S(B) |            | O += V^T P^T of A and B, both | left: S(A') ...
    left           |         waits           | softmax, A | promotes n-slices of O         | waits
    right          |         waits           | softmax, B | promotes n-slices of O         | waits
    loads          | stages released by the step before      |                               |
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import ROWS
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.device import (
    barrier_of_branches,
    device_struct,
    fma,
    prmt,
    shared_address,
    warp_in_warpgroup,
)
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, NamedBarrier, Reader, Roles
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.softmax import TileSoftmax
from hopwell.kernels.sm90.common.dequant import EVEN_BYTES, ODD_BYTES, PAIRED_KEYS
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.mla.kernel import KeyHalves, MlaSm90
from hopwell.kernels.sm90.mla.shared_steps import WARP_SUM_BYTES, SharedSteps
from hopwell.kernels.sm90.prefill.fp8 import round_to_e4m3

BLOCK_REGISTERS = WARPGROUP_ROWS * ROWS // WARPGROUP  # of O, for 64 columns of the value
TILES = 2  # of a step: A and B
# float32 values that the warpgroups exchange in a step. A row has the largest score in A and in B, and the factor that
# rescales O to the step's reference.
ROW_STATE = (TILES + 1) * WARPGROUP_ROWS


@device_struct
class Fp8MlaOperands(KeyHalves):
    """Matrix operands of one warpgroup. ``k`` and ``k_right`` are the two halves of a key. ``p`` holds the weights of A
    and B side by side in shared memory. ``o`` is this warpgroup's half of O, transposed until :meth:`turn`."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: Any
    k_right: Any
    p: Any
    s: Any
    o: Any
    product: Any  # product of 64 columns of the value, with zero accumulators
    values: Any  # operand A of the product, of both tiles
    tile_n: int
    depth_qk: int
    depth_v: int

    @staticmethod
    def create(kernel, tiles) -> "Fp8MlaOperands":
        t, source, (depth_qk, depth_v) = kernel.tile, warpgroup.OperandSource, kernel.layout.depth
        shape = (WARPGROUP_ROWS, t.n)
        qk_mma = make_mma(kernel.dtype, shape, source.SMEM, OperandMajorMode.K, warpgroups=1)
        pv_mma = make_mma(kernel.dtype, (WARPGROUP_ROWS, t.m), source.RMEM, OperandMajorMode.K, warpgroups=1)
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        return Fp8MlaOperands(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_A(qk.partition_A(tiles.q)),
            k=qk.make_fragment_B(qk.partition_B(tiles.k)),
            k_right=qk.make_fragment_B(qk.partition_B(tiles.v)),
            p=pv.make_fragment_B(pv.partition_B(tiles.p))[None, None, None, 0],
            s=cute.make_rmem_tensor(qk.partition_shape_C(shape), Float32),
            o=cute.make_rmem_tensor(depth_v * t.m // WARPGROUP, Float32),
            product=cute.make_rmem_tensor(pv.partition_shape_C((WARPGROUP_ROWS, t.m)), Float32),
            values=pv.make_fragment_A(pv.partition_shape_A((WARPGROUP_ROWS, TILES * t.n))),
            tile_n=t.n,
            depth_qk=depth_qk,
            depth_v=depth_v,
        )

    def scores(self) -> RowFragment:
        return RowFragment(self.s, self.tile_n // RowFragment.lanes_per_row)

    def output(self) -> RowFragment:
        """Return O; call after :meth:`turn`."""
        return RowFragment(self.o, self.depth_v // RowFragment.lanes_per_row)

    @cute.jit
    def add(self, values: tuple, factors) -> None:
        """Rescale O to a step's references and add the product of the step's weights with V. ``factors`` is the address
        of a float32 per row; ``values`` are the values of A and of B."""
        words = cute.recast_tensor(self.values, Uint32)
        for block in cutlass.range_constexpr(self.depth_v // WARPGROUP_ROWS):
            for tile in cutlass.range_constexpr(TILES):
                values[tile].read(block, words, tile * (cute.size(words) // TILES))
            issue_mma(self.pv_mma, self.product, self.values, self.p, TILES * self.tile_n, False)
            warpgroup.wait_group(0)
            self._add_product(block * cute.size(self.product), factors)

    def _add_product(self, first: int, factors) -> None:
        """Add a product to the registers of O, starting with register ``first``."""
        for core_matrix in range(cute.size(self.product) // 4):
            pair = copy.load_shared(factors + 32 * core_matrix, 2, Float32)
            for i in range(4 * core_matrix, 4 * core_matrix + 4):
                self.o[first + i] = fma(self.o[first + i], pair[i % 2], self.product[i])

    @cute.jit
    def turn(self, staging, barrier) -> None:
        """Transpose O^T into O. A lane holds two value columns of 16 rows before, and two rows after. The data pass
        through 128-byte rows at ``staging``, 32 columns at a time; the warps meet at a named barrier for each exchange.
        """
        lane, warp = cute.arch.lane_idx(), warp_in_warpgroup()
        g, t = lane // 4, lane % 4
        for block in cutlass.range_constexpr(self.depth_v // WARPGROUP_ROWS):
            first, turned = block * BLOCK_REGISTERS, []
            for half in cutlass.range_constexpr(2):
                if warp // 2 == half:
                    for c in cutlass.range_constexpr(ROWS // 4):
                        row = 8 * (c // 2) + 2 * t + c % 2
                        held = first + 4 * (c // 2) + c % 2
                        place = copy.swizzled_vector(staging, row, warp % 2 * 4 + g // 2) + g % 2 * 8
                        copy.store_shared(place, [self.o[held], self.o[held + 2]])
                _meet(barrier)
                for c in cutlass.range_constexpr(8):
                    row = warp * WARP_ROWS + g + c % 2 * 8
                    place = copy.swizzled_vector(staging, row, c // 2 * 2 + t // 2) + t % 2 * 8
                    turned += copy.load_shared(place, 2, Float32)
                _meet(barrier)
            for i in cutlass.range_constexpr(len(turned)):
                self.o[first + i] = turned[i]


def _meet(barrier) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


@device_struct
class Values:
    """A tile of keys, of which a warpgroup reads its half of the value's columns as operand A.

    In a product of 64 columns each warp has 16: one vector, a lane's row of ldmatrix. Byte permutes split its pairs of
    columns into rows g and g + 8 of the operand. Row g is column 2 g, and row g + 8 is column 2 g + 1. Keys 2t, 2t + 1,
    8 + 2t and 8 + 2t + 1 of sixteen are adjacent, as in the output of ``round_to_e4m3``.
    """

    address: Any  # address of this lane's key in the first column block
    place: Any  # offset of this warp's vector within 128 bytes
    columns: int  # of the tile, in halfwords
    columns_first: bool
    tile_n: int

    @staticmethod
    def of(kernel, tile, columns: int, stage) -> "Values":
        n, columns_first = kernel.tile.n, kernel.source.columns_first
        lane = cute.arch.lane_idx()
        key = copy.block_row(lane, 0, n, columns, columns_first)
        address = shared_address(tile.iterator) + stage * (n * columns * HALFWORD_BYTES) + key * copy.SWIZZLE_ROW_BYTES
        place = (warp_in_warpgroup() ^ (lane % copy.ATOM_ROWS)) * copy.VECTOR_BYTES
        return Values(address, place, columns, columns_first, n)

    def read(self, block: int, words, first: int = 0) -> None:
        """Read 64 columns of all keys into the registers of an operand, starting with register ``first``."""
        per_block = copy.VECTORS_PER_ROW // WARPS
        # Four vectors further, in the other half of the 128 bytes, only the highest bit of the offset differs.
        place = self.place ^ (block % per_block * WARPS * copy.VECTOR_BYTES)
        for i in range(self.tile_n // PAIRED_KEYS):
            row = copy.block_row(i * PAIRED_KEYS, block // per_block, self.tile_n, self.columns, self.columns_first)
            loaded = copy.load_matrix_x4(self.address + row * copy.SWIZZLE_ROW_BYTES + place, transposes=True)
            for half in range(2):
                for odd, select in enumerate((EVEN_BYTES, ODD_BYTES)):
                    words[first + 4 * i + 2 * half + odd] = prmt(loaded[2 * half], loaded[2 * half + 1], select)


@dataclass
class Fp8MlaAttend(SharedSteps):
    """The two consumer warpgroups of 8-bit products. They exchange maxima and P at barriers of both."""

    staging_bytes = WARP_SUM_BYTES + ROW_STATE * 4 // (2 * WARPS)
    stages_in_q = True
    softmax_type = TileSoftmax
    sums_at = ROW_STATE

    @staticmethod
    def edges(kernel, roles: Roles) -> list[Edge]:
        """Return no edges: the warpgroups exchange P through barriers instead."""
        return []

    @staticmethod
    def p_bytes(kernel) -> int:
        return kernel.tile.m * copy.SWIZZLE_ROW_BYTES

    @staticmethod
    def operands(kernel, tiles) -> tuple[Fp8MlaOperands, Fp8MlaOperands]:
        operands = Fp8MlaOperands.create(kernel, tiles)
        return operands, operands

    def meet(self) -> None:
        """Wait for both warpgroups. Each has its own copy of a step, so they wait at two different instructions."""
        barrier_of_branches(NamedBarrier.COMBINE, 2 * WARPGROUP)

    @cute.jit
    def give_back_q(self, operands, work, consumer) -> None:
        q_stage = self.rings.q.stage(work)
        staging = shared_address(self.tiles.q[None, None, q_stage].iterator)
        operands.turn(staging + consumer * (WARPGROUP_ROWS * copy.SWIZZLE_ROW_BYTES), NamedBarrier.WARPGROUP + consumer)
        # TMA writes the next Q through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        self.rings.q.release(work)

    @cute.jit
    def left_step(self, operands, q_stage, row, step, n, masked):
        self._step(operands, q_stage, row.of_tile((2 * n + 1) * self.kernel.tile.n), step, n, masked, 0)

    @cute.jit
    def right_step(self, operands, q_stage, row, step, n, masked, is_first):
        self._step(operands, q_stage, row.of_tile(2 * n * self.kernel.tile.n), step, n, masked, 1)

    @cute.jit
    def _step(self, operands, q_stage, row, step, n, masked, which: cutlass.Constexpr[int]) -> None:
        """Run a step in the left warpgroup (``which`` 0) or in the right one (1). Left has S of tile A and the left
        half of the value, right has S of tile B and the right half."""
        own, other = 2 * step + which, 2 * step + 1 - which
        rings, scores = (self.rings.k, self.rings.v), operands.scores()
        its_half, my_half = rings[1 - which], rings[which]
        self.scores(operands, q_stage, own, self.kernel.half_orders[which])
        warpgroup.wait_group(0)
        its_half.release(own)
        if row.needs_mask(masked):
            self.mask.apply(scores, (2 * n + 1 - which) * self.kernel.tile.n, row)
        self._choose_references(scores, which)
        self._write_weights(operands, which)
        self.meet()
        my_half.wait_full(other)
        tile, columns = (self.tiles.k, self.tiles.v)[which], self.kernel.layout.columns[which]
        a, b = (Values.of(self.kernel, tile, columns, my_half.stage(2 * step + i)) for i in range(TILES))
        factors = shared_address(self._state(TILES * WARPGROUP_ROWS + cute.arch.lane_idx() % 4 * 2, 2).iterator)
        operands.add((a, b), factors)
        my_half.release(own)
        my_half.release(other)
        its_half.wait_full(other)
        its_half.release(other)

    @cute.jit
    def _choose_references(self, scores, which: cutlass.Constexpr[int]) -> None:
        """Choose the references of a step, which are the same in both warpgroups."""
        largest = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        for r in cutlass.range_constexpr(scores.rows):
            mine, found = self._state(which * WARPGROUP_ROWS + self._row(r), 1), largest[r]
            if cute.arch.lane_idx() % RowFragment.lanes_per_row == 0:
                mine[0] = found
        self.meet()
        for r in cutlass.range_constexpr(scores.rows):
            its = self._state((1 - which) * WARPGROUP_ROWS + self._row(r), 1)[0]
            self.softmax.choose_reference(r, cute.arch.fmax(largest[r], its))

    @cute.jit
    def _write_weights(self, operands, which: cutlass.Constexpr[int]) -> None:
        """Compute P of this warpgroup's tile, and make it visible to the tensor cores."""
        scores, lane = operands.scores(), cute.arch.lane_idx()
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.exponentials(scores, r)
        words = cute.make_rmem_tensor(cute.size(operands.s) // 4, Uint32)
        round_to_e4m3(operands.s, words)
        row = warp_in_warpgroup() * WARP_ROWS + lane % WARP_ROWS
        first = which * (self.kernel.tile.n // copy.VECTOR_BYTES)
        for k in cutlass.range_constexpr(cute.size(words) // 4):
            vector = first + 2 * k + lane // WARP_ROWS
            place = copy.swizzled_vector(shared_address(self.tiles.p.iterator), row, vector)
            copy.store_matrix_x4(place, [words[4 * k + i] for i in range(4)])
        # Storing the sums here keeps ptxas from moving the additions behind the products. The float32 weights would
        # otherwise occupy registers until then.
        sums = self._sums(0)
        for r in cutlass.range_constexpr(RowFragment.rows):
            sums[r] = self.softmax.row_sum[r]
            place, factor = self._state(TILES * WARPGROUP_ROWS + self._row(r), 1), self.softmax.rescale[r]
            if const_expr(which == 0):
                if lane % RowFragment.lanes_per_row == 0:
                    place[0] = factor
        cute.arch.fence_proxy("async.shared", space="cta")

    def _row(self, r: int):
        """Return the index of a lane's row in its tile."""
        return warp_in_warpgroup() * WARP_ROWS + RowFragment.first_row() + RowFragment.row_offset(r)


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    kernel = MlaSm90(config, Fp8MlaAttend, Reader.BOTH)
    return kernel, example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
