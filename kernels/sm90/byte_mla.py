"""Hopper MLA decode whose operands have 8 bits: queries, keys, weights and values in e4m3."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.mla_config import MlaConfig
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, fma, prmt, shared_address, warp_in_group
from hopwell.kernels.parts.epilogue import WARP_ROWS
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.softmax import TileSoftmax
from hopwell.kernels.pipeline import Edge
from hopwell.kernels.skeleton import example_arguments
from hopwell.kernels.sm90.attend import GROUP_BARRIER
from hopwell.kernels.sm90.byte_prefill import round_to_bytes
from hopwell.kernels.sm90.conversion import EVEN_BYTES, ODD_BYTES, PAIRED_KEYS
from hopwell.kernels.sm90.mla import WARP_SUM_BYTES, KeyParts, MlaAttend, MlaSm90
from hopwell.kernels.sm90.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.splitting import ROWS

# Rows of P in a product. Products have zero accumulators, which O, half of 64 rows, leaves few registers for: with 64
# rows the kernel spills. So it does with two products of 32 rows under way.
PRODUCT_ROWS = 32
BLOCK_REGISTERS = WARPGROUP_ROWS * ROWS // WARPGROUP  # of O, for 64 columns of the value
TILES = 2  # of a step, A and B
# What left and right tell each other of a step: for each tile and row the reference and the largest score so far, and
# the factor that brings O to the tile's reference.
ROW_STATE = TILES * 3 * WARPGROUP_ROWS


class ByteMlaSm90(MlaSm90):
    """Attention of packed rows like :class:`MlaSm90`, with products of 8-bit operands, which take half of the time.

    P V is computed as O^T = V^T P^T. A matrix product of 8 bits takes its second operand from shared memory with the
    depth, here the keys, along the rows, which P has and V does not. Its first one it takes from registers, and there
    a transposing ldmatrix puts pairs of columns; two byte permutes part their even from their odd columns. So V is
    transposed on its way to the tensor cores, by whom it is multiplied. O^T is turned when a unit ends.

    A tile's weights are relative to its own largest score, as in :class:`TileSoftmax`, and its product is added to O by
    float32 instructions: see ``byte_prefill.py`` for both. References follow each other from tile to tile, so right
    waits for those of A before it computes weights of B, but not for the weights of A.

    Edges that differ
        K, V       load_keys -> attend  four tiles, two of A and two of B, for which there is room: released by left and
                                        right when they have read their last operands of them
        reference  left -> right        references of A's rows; released when right has read them
        P of A     left -> attend       weights of A and what comes with them; released when they have been multiplied
        P of B     right -> attend      the same of B
        Q          schedule -> attend   released when O has been turned, which goes through Q's place

    Steady state: nothing says which warpgroup is ahead. Each adds both tiles to its half of O, one after the other.

        tensor cores   | left: S(A) | right: S(B) | O += V P of A, both   | O += V P of B, both  | left: S(A') | ...
        left           |   waits    | softmax of A | a part of O at a time | the same             | waits
        right          |        waits             | softmax of B | parts of O ...                       | waits
    """

    staging_bytes = WARP_SUM_BYTES + ROW_STATE * 4 // (2 * WARPS)

    @property
    def q_arrivals(self) -> dict[str, int]:
        return {**super().q_arrivals, "consumer_lanes": LANES}

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        """Lanes read values with ldmatrix."""
        return {**super().kv_arrivals(is_value), "consumer_lanes": LANES}

    def _p_edges(self) -> tuple[Edge, ...]:
        attend, lanes = 4 * self.warpgroups, (LANES, LANES)
        weights = self.tile.m * self.tile.n
        return (
            Edge("reference", "left", "right", 1, 4, 4, 0, *lanes),
            Edge("P of A", "left", "attend", 1, 4, attend, weights, *lanes),
            Edge("P of B", "right", "attend", 1, 4, attend, weights, *lanes),
        )

    def softmax(self, scale) -> TileSoftmax:
        return TileSoftmax.create(scale, RowFragment.rows)

    def consumer(self, **parts: Any) -> "ByteMlaAttend":
        return ByteMlaAttend(**parts)


@dataclass
class ByteMlaOperands(KeyParts, DeviceStruct):
    """Matrix operands of one warpgroup. ``k`` and ``k_right`` are a key's two parts and ``p`` the weights of A and of B
    side by side, in shared memory; ``o`` is its half of O, transposed until :meth:`turn`."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: Any
    k_right: Any
    p: Any
    s: Any
    o: Any
    product: Any  # of 64 columns of the value and some rows of P, with zero accumulators
    values: Any  # its first operand
    tile_n: int
    depth_qk: int
    depth_v: int

    @staticmethod
    def create(kernel, tiles) -> "ByteMlaOperands":
        t, source, (depth_qk, depth_v) = kernel.tile, warpgroup.OperandSource, kernel.config.depth
        shape = (WARPGROUP_ROWS, t.n)
        qk_mma = make_mma(kernel.dtype, shape, source.SMEM, OperandMajorMode.K, warpgroups=1)
        pv_mma = make_mma(kernel.dtype, (WARPGROUP_ROWS, PRODUCT_ROWS), source.RMEM, OperandMajorMode.K, warpgroups=1)
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        block = pv.partition_shape_C((WARPGROUP_ROWS, PRODUCT_ROWS))
        return ByteMlaOperands(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_A(qk.partition_A(tiles.q)),
            k=qk.make_fragment_B(qk.partition_B(tiles.k)),
            k_right=qk.make_fragment_B(qk.partition_B(tiles.v)),
            p=pv.make_fragment_B(pv.partition_B(tiles.p))[None, None, None, 0],
            s=cute.make_rmem_tensor(qk.partition_shape_C(shape), Float32),
            o=cute.make_rmem_tensor(depth_v * t.m // WARPGROUP, Float32),
            product=cute.make_rmem_tensor(block, Float32),
            values=pv.make_fragment_A(pv.partition_shape_A(shape)),
            tile_n=t.n,
            depth_qk=depth_qk,
            depth_v=depth_v,
        )

    def scores(self) -> RowFragment:
        return RowFragment(self.s, self.tile_n // RowFragment.lanes_per_row)

    def output(self) -> RowFragment:
        """O, when it has been turned."""
        return RowFragment(self.o, self.depth_v // RowFragment.lanes_per_row)

    @cute.jit
    def add(self, values: "Values", which: cutlass.Constexpr[int], factors) -> None:
        """Bring O to a tile's references by ``factors``, one for each of the rows that a lane holds, and add the
        product of tile A (``which`` 0) or B (1) to it."""
        for block in cutlass.range_constexpr(self.depth_v // WARPGROUP_ROWS):
            values.read(block, cute.recast_tensor(self.values, Uint32))
            for half in cutlass.range_constexpr(WARPGROUP_ROWS // PRODUCT_ROWS):
                p, first = self._weights(half), (0, which * self.tile_n)
                issue_mma(self.pv_mma, self.product, self.values, p, self.tile_n, False, first)
                warpgroup.wait_group(0)
                self._add_product(block * BLOCK_REGISTERS + half * cute.size(self.product), half, factors)

    def _weights(self, half: int):
        """The rows of P of one of a block's products."""
        p = self.p[None, half, None]
        (rows, keys), (row_step, key_step) = p.layout.shape, p.layout.stride
        return cute.make_tensor(p.iterator, cute.make_layout((rows, 1, keys), stride=(row_step, 0, key_step)))

    def _add_product(self, first: int, half: int, factors) -> None:
        """Add the product to the registers of O from ``first`` on, of the rows of a ``half``."""
        for eight in range(PRODUCT_ROWS // 8):
            pair = copy.load_shared(factors + 4 * (PRODUCT_ROWS * half + 8 * eight), 2, Float32)
            for i in range(4 * eight, 4 * eight + 4):
                self.o[first + i] = fma(self.o[first + i], pair[i % 2], self.product[i])

    @cute.jit
    def turn(self, staging, barrier) -> None:
        """Turn O^T into O: a lane that has held two columns of the value of 16 rows has two rows then. It goes through
        rows of 128 bytes at ``staging``, 32 columns at a time, for which the warps meet at a named barrier."""
        lane, warp = cute.arch.lane_idx(), warp_in_group()
        g, t = lane // 4, lane % 4
        for block in cutlass.range_constexpr(self.depth_v // WARPGROUP_ROWS):
            first, turned = block * BLOCK_REGISTERS, []
            for half in cutlass.range_constexpr(2):
                if warp // 2 == half:
                    for c in cutlass.range_constexpr(ROWS // 4):
                        row = 8 * (c // 2) + 2 * t + c % 2
                        held = first + 4 * (c // 2) + c % 2
                        place = copy.swizzled_chunk(staging, row, warp % 2 * 4 + g // 2) + g % 2 * 8
                        copy.store_shared(place, [self.o[held], self.o[held + 2]])
                _meet(barrier)
                for c in cutlass.range_constexpr(8):
                    row = warp * WARP_ROWS + g + c % 2 * 8
                    place = copy.swizzled_chunk(staging, row, c // 2 * 2 + t // 2) + t % 2 * 8
                    turned += copy.load_shared(place, 2, Float32)
                _meet(barrier)
            for i in cutlass.range_constexpr(len(turned)):
                self.o[first + i] = turned[i]


def _meet(barrier) -> None:
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP)


@dataclass
class Values(DeviceStruct):
    """A tile of keys, of which a warpgroup reads its half of the value's columns as first operands of products.

    In a product of 64 columns each warp has 16: the chunk of 16 bytes that a lane's row of ldmatrix is. Its pairs of
    columns come apart into rows g and g + 8 of the operand, so that row g is column 2 g and row g + 8 the next one.
    Keys 2t, 2t + 1, 8 + 2t and 8 + 2t + 1 of sixteen are neighbours, as in what ``round_to_bytes`` makes.
    """

    line: Any  # address of this lane's key in the first column block
    place: Any  # of this warp's chunk within 128 bytes
    columns: int  # of the tile, in units of 16 bits
    columns_first: bool
    tile_n: int

    @staticmethod
    def of(kernel, tile, columns: int, stage) -> "Values":
        n, columns_first = kernel.tile.n, kernel.source.columns_first
        lane = cute.arch.lane_idx()
        key = copy.block_row(lane, 0, n, columns, columns_first)
        line = shared_address(tile.iterator) + stage * (2 * n * columns) + key * copy.SWIZZLE_ROW_BYTES
        place = (warp_in_group() ^ (lane % copy.GROUP_ROWS)) * copy.CHUNK_BYTES
        return Values(line, place, columns, columns_first, n)

    def read(self, block: int, words) -> None:
        """Read 64 columns of all keys into the registers of an operand."""
        per_block = copy.CHUNKS_PER_ROW // WARPS
        # Four chunks further, in the other half of 128 bytes, lies what differs in the highest bit of the place.
        place = self.place ^ (block % per_block * WARPS * copy.CHUNK_BYTES)
        for i in range(self.tile_n // PAIRED_KEYS):
            row = copy.block_row(i * PAIRED_KEYS, block // per_block, self.tile_n, self.columns, self.columns_first)
            loaded = copy.load_matrix_x4(self.line + row * copy.SWIZZLE_ROW_BYTES + place, transposes=True)
            for half in range(2):
                for odd, select in enumerate((EVEN_BYTES, ODD_BYTES)):
                    words[4 * i + 2 * half + odd] = prmt(loaded[2 * half], loaded[2 * half + 1], select)


@dataclass
class ByteMlaAttend(MlaAttend):
    """The two consumer warpgroups."""

    sums_at = ROW_STATE

    def both_operands(self) -> tuple[ByteMlaOperands, ByteMlaOperands]:
        operands = ByteMlaOperands.create(self.kernel, self.tiles)
        return operands, operands

    @cute.jit
    def give_back_q(self, operands, work, group) -> None:
        q_stage = self.rings.q.stage(work)
        staging = shared_address(self.tiles.q[None, None, q_stage].iterator)
        operands.turn(staging + group * (WARPGROUP_ROWS * copy.SWIZZLE_ROW_BYTES), GROUP_BARRIER + group)
        # TMA writes the next Q through another proxy.
        cute.arch.fence_proxy("async.shared", space="cta")
        self.rings.q.release(work)

    @cute.jit
    def left_step(self, operands, q_stage, row, step, n, masked):
        left, right, reference = self.rings.k, self.rings.v, self.rings.reference
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile((2 * n + 1) * self.kernel.tile.n)
        self.scores(operands, q_stage, a, self.kernel.part_orders[0])
        warpgroup.wait_group(0)
        right.release(a)
        if row.needs_mask(masked):
            self.to_logits(operands.scores(), 2 * n + 1, row, True)
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.choose_reference(r, self.softmax.maximum(operands.scores(), r))
        reference.wait_empty(step)
        self._tell_references(0)
        cute.arch.mbarrier_arrive(reference.full_barrier(step))
        self._weights(operands, self.rings.p_of_a, step, 0)
        self._add(operands, 0, self.rings.p_of_a, step, 0)
        left.wait_full(b)
        right.release(b)
        self.rings.p_of_b.wait_full(step)
        self._follow(1)
        self._add(operands, 0, self.rings.p_of_b, step, 1)

    @cute.jit
    def right_step(self, operands, q_stage, row, step, n, masked, is_first):
        left, right, reference = self.rings.k, self.rings.v, self.rings.reference
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile(2 * n * self.kernel.tile.n)
        self.scores(operands, q_stage, b, self.kernel.part_orders[1])
        warpgroup.wait_group(0)
        left.release(b)
        scores = operands.scores()
        if row.needs_mask(masked):
            self.to_logits(scores, 2 * n, row, True)
        largest = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        reference.wait_full(step)
        self._follow(0)
        reference.release(step)
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.choose_reference(r, largest[r])
        self._weights(operands, self.rings.p_of_b, step, 1)
        right.wait_full(a)
        left.release(a)
        self._add(operands, 1, self.rings.p_of_a, step, 0)
        self._add(operands, 1, self.rings.p_of_b, step, 1)

    @cute.jit
    def _weights(self, operands, ring, step, which: cutlass.Constexpr[int]) -> None:
        """Compute P of tile A (0) or B (1) from its scores and references, and show it to both warpgroups."""
        scores = operands.scores()
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.exponentials(scores, r)
        words = cute.make_rmem_tensor(cute.size(operands.s) // 4, Uint32)
        round_to_bytes(operands.s, words)
        ring.wait_empty(step)
        lane = cute.arch.lane_idx()
        row = warp_in_group() * WARP_ROWS + lane % WARP_ROWS
        first = which * (self.kernel.tile.n // copy.CHUNK_BYTES)
        for k in cutlass.range_constexpr(cute.size(words) // 4):
            chunk = first + 2 * k + lane // WARP_ROWS
            place = copy.swizzled_chunk(shared_address(self.tiles.p.iterator), row, chunk)
            copy.store_matrix_x4(place, [words[4 * k + i] for i in range(4)])
        if const_expr(which == 1):
            self._tell_references(1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            place, factor = self._factor(which, self._row(r), 1), self.softmax.rescale[r]
            if lane % RowFragment.lanes_per_row == 0:
                place[0] = factor
        # Else ptxas would put the additions behind the products, and weights in float32 would take registers till then.
        sums = self._sums(0)
        for r in cutlass.range_constexpr(RowFragment.rows):
            sums[r] = self.softmax.row_sum[r]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_barrier(step))

    @cute.jit
    def _add(self, operands, part: cutlass.Constexpr[int], p_ring, step, which: cutlass.Constexpr[int]) -> None:
        """Add tile A (0) or B (1) to O, with values of the left (0) or right (1) part; then give both back."""
        tile, ring = (self.tiles.k, self.tiles.v)[part], (self.rings.k, self.rings.v)[part]
        tile_step = 2 * step + which
        p_ring.wait_full(step)
        factors = shared_address(self._factor(which, cute.arch.lane_idx() % 4 * 2, 2).iterator)
        values = Values.of(self.kernel, tile, self.kernel.config.columns[part], ring.stage(tile_step))
        operands.add(values, which, factors)
        ring.release(tile_step)
        p_ring.release(step)

    @cute.jit
    def _tell_references(self, which: cutlass.Constexpr[int]) -> None:
        for r in cutlass.range_constexpr(RowFragment.rows):
            state, reference, largest = self._references(which, r), self.softmax.reference[r], self.softmax.largest[r]
            if cute.arch.lane_idx() % RowFragment.lanes_per_row == 0:
                state[0] = reference
                state[1] = largest

    @cute.jit
    def _follow(self, which: cutlass.Constexpr[int]) -> None:
        """Go over to the references of tile A (0) or B (1)."""
        for r in cutlass.range_constexpr(RowFragment.rows):
            state = self._references(which, r)
            self.softmax.follow(r, state[0])
            self.softmax.largest[r] = state[1]

    def _row(self, r: int):
        """The number of a lane's row in its tile."""
        return warp_in_group() * WARP_ROWS + RowFragment.first_row() + RowFragment.row_offset(r)

    def _references(self, which: int, r: int):
        """Where the reference of a lane's row for tile A (0) or B (1) lies, and behind it the largest score so far."""
        return self._state(2 * (which * WARPGROUP_ROWS + self._row(r)), 2)

    def _factor(self, which: int, row, rows: int):
        """Where the factors of ``rows`` rows from ``row`` on lie."""
        return self._state((2 * TILES + which) * WARPGROUP_ROWS + row, rows)


def build(config: MlaConfig) -> Any:
    """The traceable launch function of a config and example arguments to compile it with."""
    return ByteMlaSm90(config), example_arguments((Addresses, DecodeGeometry), floats=3)
