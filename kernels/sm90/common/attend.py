"""The consumer role of Hopper kernels whose rows are rows of Q: from Q K^T to the output.

:class:`Attend` runs over the work tiles. Its parts decide the rest: the rows, the matrix operands, the place of a
warp's rows in a tile, and the main loop. The main loop orders the products and the softmax of a step.
"""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from hopwell.kernels.hardware import WARPGROUP
from hopwell.kernels.launch.arguments import Addresses, Geometry
from hopwell.kernels.parts.core.device import device_struct
from hopwell.kernels.parts.core.kernel import SharedTiles
from hopwell.kernels.parts.core.pipeline import NamedBarrier
from hopwell.kernels.parts.partition.tiles import WorkQueue
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.mask import IntervalMask
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.sm90.common.dequant import dequantize_queries
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS


@device_struct(frozen=True)
class WarpgroupPlace:
    """Place of a consumer warpgroup in a tile: 64 rows, and all of V's columns or one of two halves."""

    consumer: Any  # number of the warpgroup
    row_block: Any
    column_half: Any

    has_own_keys = True  # whether the warpgroup may skip tiles of keys that only other warpgroups see

    @staticmethod
    def of(kernel, consumer) -> "WarpgroupPlace":
        """Return the place of consumer warpgroup ``consumer``."""
        splits = kernel.config.v_splits
        return WarpgroupPlace(consumer, consumer // splits, consumer % splits)

    @property
    def warp_row(self):
        """The first of this warp's rows in the tile."""
        return self.row_block * WARPGROUP_ROWS + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS

    def meet(self) -> None:
        """Do nothing: no warpgroup stages its output in Q's place."""


@device_struct
class Attend:
    """Consumer warps that run over the work tiles, for any kind of rows."""

    kernel: Any  # configuration only
    tiles: SharedTiles
    rings: Any  # fields have the names of edges; K and V are the tiles to multiply
    work_queue: WorkQueue
    mask: IntervalMask
    score: ScoreMap
    softmax: OnlineSoftmax
    rows: Any  # positions, visible keys and results of a warp's rows: PrefillRows or SplitKvRows
    main_loop: "MainLoop"
    operands: type  # of Q, K, V, S, P and O
    place: type = WarpgroupPlace
    ping_pong_warpgroups: int = 1  # warpgroups that take turns at the tensor cores
    stages_in_q: bool = False  # whether Q's place stages the output, and stays in use until the output is written
    peels_unmasked_step: bool = False  # whether a loop of one step precedes the loop over unmasked steps

    @cute.jit
    def run(self, addresses: Addresses, geometry: Geometry):
        q_ring, main_loop = self.rings.q, self.main_loop
        consumer = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) - 1
        place = self.place.of(self.kernel, consumer)
        operands = self.operands.create(self.kernel, self.tiles, place, addresses, geometry)
        ping_pong = PingPong(consumer, self.ping_pong_warpgroups)
        ping_pong.begin()
        warp_row = place.warp_row
        kv_step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.exists:
            keys = tile.keys
            if const_expr(place.has_own_keys):
                keys = self.rows.own_keys(tile, place.row_block * WARPGROUP_ROWS)
            # The matrix products synchronize the warps anyway. This barrier tells the compiler that the warps have
            # converged. Without it matrix descriptors lose their uniform registers, 20 % more instructions in the loop.
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + consumer, number_of_threads=WARPGROUP)
            attend = self.of_tile(tile)
            attend.softmax.reset()
            operands.o.fill(0.0)
            q_ring.wait_full(work)
            kv_step = self.pass_over(ping_pong, kv_step, tile.keys.end - keys.end)
            if keys.begin < keys.end:
                row = self.rows.logit_row(tile, warp_row)
                q_stage = q_ring.stage(work)
                if const_expr(self.kernel.config.dequantizes_q):
                    dequantize_queries(
                        self.kernel, self.tiles.q, q_stage, place.row_block, NamedBarrier.WARPGROUP, consumer
                    )
                operands.begin(q_stage, tile, keys.end - 1)
                main_loop.first_step(attend, operands, ping_pong, q_stage, kv_step, keys.end - 1, row)
                step = partial(main_loop.next_step, attend, operands, ping_pong, q_stage, row)
                if const_expr(self.mask.has_diagonal):
                    for n in cutlass.range(keys.end - 2, keys.full_end - 1, -1, unroll=1):
                        step(kv_step, n, True)
                        kv_step += 1
                kv_step = main_loop.unmasked_steps(attend, operands, ping_pong, q_stage, row, kv_step, keys)
                if const_expr(self.mask.has_left_edge):
                    for n in cutlass.range(keys.full_begin - 1, keys.begin - 1, -1, unroll=1):
                        step(kv_step, n, True)
                        kv_step += 1
            if const_expr(not self.stages_in_q):
                q_ring.release(work)
            if keys.begin < keys.end:
                main_loop.last_step(attend, operands, kv_step)
                kv_step += 1
            kv_step = self.pass_over(ping_pong, kv_step, keys.begin - tile.keys.begin)
            if const_expr(self.stages_in_q):
                place.meet()  # other lanes may have read the rows of Q that the output now overwrites
            attend.rows.store(operands, tile, work, warp_row, place.column_half)
            if const_expr(self.stages_in_q):
                # The output is written through the generic proxy, the next Q through TMA's proxy.
                cute.arch.fence_proxy("async.shared", space="cta")
                q_ring.release(work)
            work += 1
            tile = self.work_queue.read(work)

    def of_tile(self, tile) -> "Attend":
        """Return this role as it processes a work tile. By default it is the same for all tiles."""
        return self

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
    def to_logits(self, scores, n, row, masked: cutlass.Constexpr):
        """Convert S of tile ``n`` to logits."""
        tile_start = n * self.kernel.tile.n
        self.score.apply(scores, row.slope, tile_start, row.positions)
        if const_expr(masked):
            self.mask.apply(scores, tile_start, row)


@device_struct
class MainLoop:
    """Order of products and softmax: P V of a tile is issued together with Q K^T of the next.

    Each method is a part of :meth:`Attend.run`, and ``attend`` is the role that runs it.
    """

    @cute.jit
    def first_step(self, attend, operands, ping_pong, q_stage, kv_step, n, row):
        """Compute S and P of the rightmost keys. Their P V is issued together with the next step's Q K^T."""
        k_ring = attend.rings.k
        k_ring.wait_full(kv_step)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(0)
        k_ring.release(kv_step)
        attend.to_logits(operands.scores(), n, row, True)
        attend.softmax.step(operands.scores())
        operands.round_scores()

    @cute.jit
    def next_step(self, attend, operands, ping_pong, q_stage, row, kv_step, n, masked: cutlass.Constexpr):
        """Issue Q K^T of tile n together with P V of the tile before (``kv_step``), then compute softmax of tile n."""
        k_ring, v_ring = attend.rings.k, attend.rings.v
        k_ring.wait_full(kv_step + 1)
        ping_pong.wait()
        operands.issue_qk(q_stage, k_ring.stage(kv_step + 1))
        v_ring.wait_full(kv_step)
        operands.issue_pv(v_ring.stage(kv_step))
        ping_pong.pass_on()
        operands.wait(1)
        k_ring.release(kv_step + 1)
        attend.to_logits(operands.scores(), n, row, masked)
        attend.softmax.step(operands.scores())
        operands.wait(0)
        v_ring.release(kv_step)
        operands.rescale(attend.softmax)
        operands.round_scores()

    @cute.jit
    def unmasked_steps(self, attend, operands, ping_pong, q_stage, row, kv_step, keys):
        """Run the steps over tiles that every row sees completely. Return the step after them."""
        start, end = keys.full_end - 1, keys.full_begin - 1
        if const_expr(attend.peels_unmasked_step):
            rest = cutlass.max(start - 1, end)
            for n in cutlass.range(start, rest, -1, unroll=1):
                self.next_step(attend, operands, ping_pong, q_stage, row, kv_step, n, False)
                kv_step += 1
            start = rest
        for n in cutlass.range(start, end, -1, unroll=1):
            self.next_step(attend, operands, ping_pong, q_stage, row, kv_step, n, False)
            kv_step += 1
        return kv_step

    @cute.jit
    def last_step(self, attend, operands, kv_step):
        """Add P V of the leftmost keys."""
        v_ring = attend.rings.v
        v_ring.wait_full(kv_step)
        operands.add_values(v_ring.stage(kv_step), attend.softmax)
        operands.wait(0)
        v_ring.release(kv_step)


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
