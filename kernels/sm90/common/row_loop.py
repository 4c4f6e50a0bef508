"""Consumer warpgroups of Hopper kernels: from Q K^T to the rows of the output."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.mask import IntervalMask, LogitRow, TileRange
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.prefill.dequant_q import dequantize_queries


@device_struct
class Consumer:
    """State of a consumer warp."""

    kernel: Any  # configuration only
    tiles: SharedTiles
    rings: Any  # fields have the names of edges; K and V are the tiles to multiply
    work_queue: WorkQueue
    mask: IntervalMask
    score: ScoreMap
    softmax: OnlineSoftmax
    output_scale: Float32

    @cute.jit
    def rescale(self, operands):
        """Rescale O to the references that the latest step has chosen."""
        if self.softmax.reference_moved():
            operands.rescale_output(self.softmax.rescale)


@dataclass
class Attend(Consumer):
    """Row loop of the consumer warps over work tiles, for any kind of rows."""

    stages_in_q = False  # whether Q's place stays in use until the output has been written

    def logit_row(self, tile, warp_row) -> LogitRow:
        """Return the rows that a lane holds, of the rows from ``warp_row`` of the tile on."""
        raise NotImplementedError

    def operands(self, row_block, column_half, addresses: Addresses, geometry: Geometry) -> "RowOperands":
        """Return the operands of one warpgroup."""
        return Operands.create(self.kernel, self.tiles, row_block, column_half)

    def place(self, consumer) -> tuple:
        """Return the row block of this warp in consumer warpgroup ``consumer``, and its half of V's columns."""
        splits = self.kernel.config.v_splits
        return consumer // splits, consumer % splits

    def warp_row(self, row_block):
        """Return the first of this warp's rows in the tile."""
        return row_block * WARPGROUP_ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS

    def ping_pong(self, consumer) -> "PingPong":
        """Return the ping-pong turns of consumer warpgroup ``consumer``."""
        return PingPong(consumer, self.kernel.warpgroups)

    def own_keys(self, tile, row) -> TileRange:
        """Return the keys of the tile that a warpgroup's rows see; ``row`` is the first of these rows in the tile."""
        raise NotImplementedError

    def store(self, operands, tile, work, warp_row, column_half, addresses, geometry) -> None:
        """Write the results of this warp's rows."""
        raise NotImplementedError

    @cute.jit
    def run(self, addresses: Addresses, geometry: Geometry):
        q_ring = self.rings.q
        consumer = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) - 1
        row_block, column_half = self.place(consumer)
        operands = self.operands(row_block, column_half, addresses, geometry)
        ping_pong = self.ping_pong(consumer)
        ping_pong.begin()
        warp_row = self.warp_row(row_block)
        kv_step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            keys = self.own_keys(tile, row_block * WARPGROUP_ROWS)
            # The matrix products synchronize the warps anyway. This barrier tells the compiler that the warps have
            # converged. Without it matrix descriptors lose their uniform registers, 20 % more instructions in the loop.
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + consumer, number_of_threads=WARPGROUP)
            self.softmax.reset()
            operands.o.fill(0.0)
            q_ring.wait_full(work)
            kv_step = self.pass_over(ping_pong, kv_step, tile.keys.end - keys.end)
            if keys.begin < keys.end:
                row = self.logit_row(tile, warp_row)
                q_stage = q_ring.stage(work)
                if const_expr(self.kernel.config.dequantizes_q):
                    dequantize_queries(self.kernel, self.tiles.q, q_stage, row_block, NamedBarrier.WARPGROUP, consumer)
                operands.begin(q_stage, tile, keys.end - 1)
                self.first_step(operands, ping_pong, q_stage, kv_step, keys.end - 1, row)
                step = partial(self.next_step, operands, ping_pong, q_stage, row)
                if const_expr(self.mask.has_diagonal):
                    for n in cutlass.range(keys.end - 2, keys.full_end - 1, -1, unroll=1):
                        step(kv_step, n, True)
                        kv_step += 1
                kv_step = self.unmasked_steps(operands, ping_pong, q_stage, row, kv_step, keys)
                if const_expr(self.mask.has_left_edge):
                    for n in cutlass.range(keys.full_begin - 1, keys.begin - 1, -1, unroll=1):
                        step(kv_step, n, True)
                        kv_step += 1
            if const_expr(not self.stages_in_q):
                q_ring.release(work)
            if keys.begin < keys.end:
                self.last_step(operands, kv_step)
                kv_step += 1
            kv_step = self.pass_over(ping_pong, kv_step, keys.begin - tile.keys.begin)
            self.store(operands, tile, work, warp_row, column_half, addresses, geometry)
            if const_expr(self.stages_in_q):
                # The output is written through the generic proxy, the next Q through TMA's proxy.
                cute.arch.fence_proxy("async.shared", space="cta")
                q_ring.release(work)
            work += 1
            tile = self.work_queue.read(work)

    @cute.jit
    def pass_over(self, ping_pong, kv_step, tiles):
        """Release tiles that only other warpgroups need. Return the step after them."""
        k_ring, v_ring = self.rings.k, self.rings.v
        for _ in cutlass.range(tiles, unroll=1):
            k_ring.wait_full(kv_step)
            ping_pong.wait()
            ping_pong.pass_on()
            k_ring.release(kv_step)
            v_ring.wait_full(kv_step)
            v_ring.release(kv_step)
            kv_step += 1
        return kv_step

    @cute.jit
    def first_step(self, operands, ping_pong, q_stage, kv_step, n, row):
        """Compute S and P of the rightmost keys. Their P V is issued together with the next step's Q K^T."""
        k_ring = self.rings.k
        k_ring.wait_full(kv_step)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(0)
        k_ring.release(kv_step)
        self.to_logits(operands.scores(), n, row, True)
        self.softmax.step(operands.scores())
        operands.round_scores()

    @cute.jit
    def next_step(self, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        """Issue Q K^T of tile n together with P V of the tile before (``kv_step``), then compute softmax of tile n."""
        k_ring, v_ring = self.rings.k, self.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        operands.issue_pv(v_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(1)
        k_ring.release(kv_step + 1)
        self.to_logits(operands.scores(), n, row, masked)
        self.softmax.step(operands.scores())
        operands.wait(0)
        v_ring.release(kv_step)
        self.rescale(operands)
        operands.round_scores()

    @cute.jit
    def unmasked_steps(self, operands, ping_pong, q_stage, row, kv_step, keys):
        """Run the steps over tiles that every row sees completely. Return the step after them."""
        for n in cutlass.range(keys.full_end - 1, keys.full_begin - 1, -1, unroll=1):
            self.next_step(operands, ping_pong, q_stage, row, kv_step, n, False)
            kv_step += 1
        return kv_step

    @cute.jit
    def to_logits(self, scores, n, row, masked: cutlass.Constexpr):
        tile_start = n * self.kernel.tile.n
        self.score.apply(scores, row.slope, tile_start, row.positions)
        if const_expr(masked):
            self.mask.apply(scores, tile_start, row)

    @cute.jit
    def last_step(self, operands, kv_step):
        v_ring = self.rings.v
        v_ring.wait_full(kv_step)
        self.begin_pv(operands, v_ring.stage(kv_step))
        operands.wait(0)
        v_ring.release(kv_step)

    def begin_pv(self, operands, v_stage) -> None:
        """Add P V of a stage to O; the product may still be in flight on return."""
        operands.issue_pv(v_stage)


@device_struct
class RowOperands:
    """S, P and O of query rows in registers, for any matrix instruction. Accumulators and A operands of wgmma and of
    mma.sync hold the same elements of a warp's rows."""

    s: Any
    o: Any
    p: Any
    dtype: Any
    tile_n: int
    depth_qk: int
    depth_v: int

    def begin(self, q_stage, tile, n) -> None:
        """Prepare for work tile ``tile``: Q has arrived and some keys are visible, beginning with tile ``n``."""

    def wait(self, pending: int) -> None:
        """Wait until at most ``pending`` of the issued products are in flight."""
        raise NotImplementedError

    def scores(self) -> RowFragment:
        return RowFragment(self.s, self.tile_n // RowFragment.lanes_per_row)

    def output(self) -> RowFragment:
        return RowFragment(self.o, self.depth_v // RowFragment.lanes_per_row)

    @cute.jit
    def round_scores(self) -> None:
        """Round S to P in 16 bits. Accumulator and A operand hold the same elements in the same order."""
        words = cute.recast_tensor(self.p, Uint32)
        for i in cutlass.range_constexpr(cute.size(words)):
            words[i] = copy.pack_x2(self.dtype, self.s[2 * i], self.s[2 * i + 1])

    def rescale_output(self, factors) -> None:
        self.output().scale_rows(factors)


@dataclass
class Operands(RowOperands):
    """Matrix operands of one consumer warpgroup: Q, K, V in shared memory; S, O, P in registers."""

    qk_mma: Any
    pv_mma: Any
    q: Any
    k: Any
    v: Any

    @staticmethod
    def create(kernel, tiles: SharedTiles, row_block, column_half) -> "Operands":
        value = tiles.v
        if const_expr(kernel.config.v_splits > 1):
            part = cute.crd2idx((0, kernel.config.depth[1], 0), tiles.v.layout)
            value = cute.make_tensor(tiles.v.iterator + column_half * part, tiles.v.layout)
        return Operands.of_value(kernel, tiles, row_block, value, kernel.config.operand_columns[1])

    @staticmethod
    def of_value(kernel, tiles: SharedTiles, row_block, value, columns: int) -> "Operands":
        """Return operands with ``value``, a tile of ``columns`` columns; only its first columns are multiplied."""
        t, source = kernel.tile, warpgroup.OperandSource
        depth_qk, depth_v = kernel.config.depth
        mma = partial(make_mma, kernel.dtype, warpgroups=kernel.warpgroups // kernel.config.v_splits)
        qk_mma = mma((WARPGROUP_ROWS, t.n), a_source=source.SMEM, b_major=OperandMajorMode.K)
        pv_mma = mma((WARPGROUP_ROWS, kernel.config.product_columns), a_source=source.RMEM, b_major=OperandMajorMode.MN)
        qk, pv = qk_mma.get_slice(row_block * WARPGROUP), pv_mma.get_slice(row_block * WARPGROUP)
        v_transposed = cute.make_layout((depth_v, t.n, t.kv_stages), stride=(t.n, 1, t.n * columns))
        return Operands(
            qk_mma=qk_mma,
            pv_mma=pv_mma,
            q=qk.make_fragment_A(qk.partition_A(tiles.q)),
            k=qk.make_fragment_B(qk.partition_B(tiles.k)),
            v=pv.make_fragment_B(pv.partition_B(cute.composition(value, v_transposed))),
            s=cute.make_rmem_tensor(qk.partition_shape_C((t.m, t.n)), Float32),
            o=cute.make_rmem_tensor(pv.partition_shape_C((t.m, depth_v)), Float32),
            p=pv.make_fragment_A(pv.partition_shape_A((t.m, t.n))),
            dtype=kernel.dtype,
            tile_n=t.n,
            depth_qk=depth_qk,
            depth_v=depth_v,
        )

    def issue_qk(self, q_stage, k_stage) -> None:
        q, k = self.q[None, None, None, q_stage], self.k[None, None, None, k_stage]
        issue_mma(self.qk_mma, self.s, q, k, self.depth_qk, False)

    def issue_pv(self, v_stage) -> None:
        issue_mma(self.pv_mma, self.o, self.p, self.v[None, None, None, v_stage], self.tile_n, True)

    def wait(self, pending: int) -> None:
        warpgroup.wait_group(pending)


@device_struct
class PingPong:
    """Ping-pong turns: consumer warpgroups alternate in issuing products, so that the softmax of one overlaps the
    products of the other."""

    consumer: Int32
    consumers: int

    @cute.jit
    def begin(self) -> None:
        """Give warpgroup 0 the first turn: the last warpgroup passes it on before anything else."""
        if const_expr(self.consumers > 1):
            if self.consumer == self.consumers - 1:
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.PING_PONG, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def wait(self) -> None:
        if const_expr(self.consumers > 1):
            cute.arch.barrier(barrier_id=NamedBarrier.PING_PONG + self.consumer, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_on(self) -> None:
        if const_expr(self.consumers > 1):
            following = Int32(0) if self.consumer == self.consumers - 1 else self.consumer + 1
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.PING_PONG + following, number_of_threads=2 * WARPGROUP)
