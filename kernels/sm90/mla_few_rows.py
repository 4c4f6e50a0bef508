"""Hopper MLA decode of few rows: as in ``mla.py``, with products transposed so that rows waste no room.

With 16 heads, as tensor parallelism leaves of 128, memory is the limit, and what a tile of keys takes from the time at
which it is there until its place can be filled again has to be short. A matrix instruction always has 64 rows, but as
few as 8 columns: so keys, and columns of the value, become the rows of a product, S^T = K Q^T and O^T += V^T P^T. A
product then takes as long as it takes to read the keys from shared memory, about half of the time that 64 rows of Q
take, and Q and P take little room.
"""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config import WARPS
from hopwell.kernels.mla_config import MlaConfig
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import DeviceStruct, shared_address, shared_array
from hopwell.kernels.parts.epilogue import WARP_ROWS
from hopwell.kernels.parts.fragment import ColumnFragment
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.shares import largest_size, piece_scale
from hopwell.kernels.parts.softmax import ColumnSoftmax
from hopwell.kernels.parts.warp_mma import MMA_COLUMNS, QUAD, place_in_warp
from hopwell.kernels.sm90 import mla
from hopwell.kernels.sm90.column_rows import ColumnRows
from hopwell.kernels.sm90.mla import MlaAttend, MlaSm90
from hopwell.kernels.sm90.mma import WARPGROUP_ROWS, issue_mma, make_mma


class FewRowsMlaSm90(MlaSm90):
    """Attention of ``tile.m`` packed rows, 16, in the steps of :class:`MlaSm90`, whose warp roles and edges it
    has. P of both tiles has memory of its own, and Q two stages, so that a unit begins when the one before has ended.

    Steady state: memory is the limit. A tile is done in half of the time that fetching it takes, and then given back
    without a look at whether the next one is there.

        memory         | B                                               | A'
        tensor cores   | left: S(A) |            | O += P(A) A  both     | right: S(B) |      | O += P(B) B  both   |
        left           |   waits    |    P(A)    |        waits          |        waits       |       waits         |
        right          |         waits           |        waits          |   waits     | P(B) |       waits         |
    """

    p_tiles = 2

    @property
    def staging_bytes(self) -> int:
        """State of the rows, see :class:`FewRowsAttend`: a float32 of each row for both warpgroups and twice for all
        warps."""
        return (2 + 2 * 2 * WARPS) * self.tile.m * 4 // self.storing_warps

    def softmax(self, scale) -> ColumnSoftmax:
        return ColumnSoftmax.create(scale, self.tile.m // QUAD)

    def consumer(self, *parts: Any) -> "FewRowsAttend":
        return FewRowsAttend(*parts)


@dataclass
class FewRowsOperands(DeviceStruct):
    """Matrix operands of one warpgroup: keys and values are A, Q and P are B, all in shared memory; S^T and O^T are in
    registers. ``p`` is this warpgroup's own, ``p_other`` that of the other one."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: Any  # a key's two parts
    k_right: Any
    v: Any  # this warpgroup's half of the value
    p: Any
    p_other: Any
    s: Any
    o: Any
    depth_qk: int
    depth_v: int
    tile_n: int
    products: int  # of 8 rows, side by side

    @staticmethod
    def of_both(kernel, tiles) -> tuple["FewRowsOperands", "FewRowsOperands"]:
        """Those of left and of right."""
        t, (depth_qk, half), columns = kernel.tile, kernel.config.depth, kernel.config.columns
        shape, source = (WARPGROUP_ROWS, t.m), warpgroup.OperandSource.SMEM
        common = dict(a_source=source, b_major=OperandMajorMode.K, warpgroups=1)
        qk_mma = make_mma(kernel.dtype, shape, **common)
        pv_mma = make_mma(kernel.dtype, shape, a_major=OperandMajorMode.MN, **common)
        qk, pv = qk_mma.get_slice(0), pv_mma.get_slice(0)
        left_v, right_v = (
            cute.composition(part, cute.make_layout((half, t.n, t.kv_stages), stride=(t.n, 1, t.n * width)))
            for part, width in zip((tiles.k, tiles.v), columns, strict=True)
        )
        p_of_a, p_of_b = (pv.make_fragment_B(pv.partition_B(tiles.p))[None, None, None, i] for i in range(2))
        left = FewRowsOperands(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_B(qk.partition_B(tiles.q)),
            k=qk.make_fragment_A(qk.partition_A(tiles.k)),
            k_right=qk.make_fragment_A(qk.partition_A(tiles.v)),
            v=pv.make_fragment_A(pv.partition_A(left_v)),
            p=p_of_a,
            p_other=p_of_b,
            s=cute.make_rmem_tensor(qk.partition_shape_C((t.n, t.m)), Float32),
            o=cute.make_rmem_tensor(pv.partition_shape_C((half, t.m)), Float32),
            depth_qk=depth_qk,
            depth_v=half,
            tile_n=t.n,
            products=t.m // MMA_COLUMNS,
        )
        return left, replace(left, v=pv.make_fragment_A(pv.partition_A(right_v)), p=p_of_b, p_other=p_of_a)

    def issue_part(self, part: int, q_stage, stage, accumulate: bool) -> None:
        """S^T (+)= K Q^T over the columns of the left (0) or right (1) part."""
        q, k = self.q[None, None, None, q_stage], (self.k, self.k_right)[part][None, None, None, stage]
        depth = (self.depth_v, self.depth_qk - self.depth_v)[part]
        issue_mma(self.qk_mma, self.s, k, q, depth, accumulate, (0, part * self.depth_v))

    def issue_pv(self, stage) -> None:
        """O^T += V^T P^T with this warpgroup's P."""
        self._issue(stage, self.p)

    def issue_other(self, stage, p_stage) -> None:
        """The same with the other's."""
        self._issue(stage, self.p_other)

    def _issue(self, stage, p) -> None:
        issue_mma(self.pv_mma, self.o, self.v[None, None, None, stage], p, self.tile_n, True)

    def scores(self) -> ColumnFragment:
        """A warp has 16 keys of a tile."""
        return ColumnFragment(self.s, WARP_ROWS // ColumnFragment.lanes_per_row, self.products)

    def output(self) -> ColumnFragment:
        """As :meth:`ColumnRows.block` has it."""
        return ColumnFragment(self.o, self.depth_v // (WARPS * ColumnFragment.lanes_per_row), self.products)

    def rescale_output(self, factors) -> None:
        self.output().scale_rows(factors)


@dataclass
class FewRowsAttend(ColumnRows, MlaAttend):
    """The two consumer warpgroups. Rows are spread over all warps, each with keys and columns of its own, which tell
    one another what they find through shared memory."""

    operands = FewRowsOperands
    fragment = ColumnFragment

    def warp_row(self):
        return 0

    @cute.jit
    def weigh_a(self, operands, q_stage, step, n, row, masked):
        self.weigh(operands, 0, q_stage, step, n, row, masked)

    @cute.jit
    def right_step(self, operands, q_stage, row, step, n, masked):
        _, left, right, turns, _ = self.rings
        a, b = 2 * step, 2 * step + 1
        right.wait_full(a)
        turns.wait_full(step)
        left.release(a)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(right.stage(a), 0)
        warpgroup.wait_group(0)
        right.release(a)
        self.weigh(operands, 1, q_stage, b, 2 * n, row, masked)
        turns.release(step)
        left.release(b)
        self.rescale(operands)
        operands.issue_pv(right.stage(b))
        warpgroup.wait_group(0)
        right.release(b)

    @cute.jit
    def weigh(self, operands, tile: cutlass.Constexpr[int], q_stage, step, n, row, masked):
        """P of tile A (0) or B (1), the n-th of the keys."""
        self.scores(operands, q_stage, step, self.kernel.part_orders[tile])
        warpgroup.wait_group(0)
        scores = operands.scores()
        if masked:
            self.mask.apply(scores, n * self.kernel.tile.n + self.warp * WARP_ROWS, row)
        largest = self.over_warps([self.softmax.maximum(scores, r) for r in range(scores.rows)])
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.accumulate(scores, r, largest[r])
        self.give_p(operands, tile)

    @cute.jit
    def give_p(self, operands, tile: cutlass.Constexpr[int]) -> None:
        """Write P to shared memory for both warpgroups, and the references for the other one."""
        scores, (_, t) = operands.scores(), place_in_warp()
        self.write_weights(scores, tile)
        for r in cutlass.range_constexpr(scores.rows):
            mine, reference = self._reference(r, 0), self.softmax.reference[r]
            if self.warp == 0 and cute.arch.lane_idx() == t:
                mine[0] = reference
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet_group()

    @cute.jit
    def add_sums(self) -> None:
        """Add up what all warps have seen: in lane t of a row, and zero in the others."""
        _, t = place_in_warp()
        own = [
            self.softmax.sum_of_lanes(self.softmax.row_sum[r], self.fragment.lanes_per_row)
            for r in range(self.lane_rows)
        ]
        for r in cutlass.range_constexpr(self.lane_rows):
            mine, value = shared_array(Float32, self._warp_sums(r) + 4 * (WARPS * self.group + self.warp)), own[r]
            if cute.arch.lane_idx() == t:
                mine[0] = value
        self.meet()
        for r in cutlass.range_constexpr(self.lane_rows):
            halves = [copy.load_shared(self._warp_sums(r) + 16 * i, WARPS, Float32) for i in range(2)]
            a, b, c, d = (left + right for left, right in zip(*halves, strict=True))
            total = (a + b) + (c + d)
            self.softmax.row_sum[r] = total if cute.arch.lane_idx() == t else Float32(0.0)
        self.meet()

    @cute.jit
    def store_rows(self, operands, rows: PackedRows, warp_row, half) -> None:
        output = operands.output()
        statistics = [self.softmax.partial(r, output.lanes_per_row) for r in range(output.rows)]
        self.store_columns(output, statistics, rows, half * operands.depth_v)

    @cute.jit
    def store_piece(self, operands, piece, warp_row, half) -> None:
        output, (_, t) = operands.output(), place_in_warp()
        largest = [
            self.softmax.largest_of_lanes(largest_size(output, r), output.lanes_per_row) for r in range(output.rows)
        ]
        scales = []
        for r, value in enumerate(self.over_warps(largest)):
            scale, inverse = piece_scale(value)
            scales.append(scale)
            row = output.first_row() + output.row_offset(r)
            reference, total = self.softmax.partial(r, output.lanes_per_row)
            if self.warp == 0 and cute.arch.lane_idx() == t:
                self.merge.store_statistics(piece, row, reference, total, inverse, half)
        for eight in cutlass.range_constexpr(operands.products):
            for c in cutlass.range_constexpr(0, output.columns, 2):
                words = [self.word(output, eight, c + i, scales, cutlass.Float16) for i in range(2)]
                self.merge.store_block(piece, eight, self.block(c), half, words)

    # State of the rows: references of both warpgroups, largest values of their warps, sums of all warps. Nobody writes
    # what others may still read: between any two uses of the same place the warpgroups have taken turns, or have met.

    def _row(self, r: int):
        return self.fragment.first_row() + self.fragment.row_offset(r)

    def _reference(self, r: int, other: int):
        place = (self.group ^ other) * self.kernel.tile.m + self._row(r)
        return shared_array(Float32, shared_address(self.tiles.staging) + 4 * place)

    def maxima(self, r: int):
        m = self.kernel.tile.m
        return shared_address(self.tiles.staging) + 4 * (2 * m + (self.group * m + self._row(r)) * WARPS)

    def _warp_sums(self, r: int):
        """Address of the sums of all warps."""
        m = self.kernel.tile.m
        return shared_address(self.tiles.staging) + 4 * (2 * m + 2 * m * WARPS + self._row(r) * 2 * WARPS)


def build(config: MlaConfig) -> Any:
    """As :func:`mla.build`."""
    return mla.build(config, FewRowsMlaSm90)
