"""Hopper MLA decode: all heads share one latent key, and its first columns are also the value."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.base import BLOCK_COLUMNS, MMA_DEPTH
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.config.splitting import LATENT_PARTIAL_BYTES
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry
from hopwell.kernels.parts.combine.own_row_shares import OwnRowShares, OwnSlots
from hopwell.kernels.parts.combine.partials import Slots
from hopwell.kernels.parts.combine.row_shares import Partials, RowShares
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.parts.partition.cta_parts import CtaPartSchedule, TopkCtaPartSchedule
from hopwell.kernels.parts.partition.split_kv import LatentSchedule, SplitSchedule, TopkSchedule
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.softmax import SLACK
from hopwell.kernels.sm90.common.kernel import SCHEDULE_WARP
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.common.row_loop import Operands
from hopwell.kernels.sm90.decode.kernel import DecodeSm90
from hopwell.kernels.sm90.decode.rows import DecodeAttend
from hopwell.kernels.sm90.mla.hooks import LatentWorkTiles, QueryHooks
from hopwell.kernels.sm90.mla.key_halves import LatentKeys, LatentRows

# Pairs (partials, subtiles of each) that an attend warp keeps in flight when it combines. With many partials a row
# share is one subtile: 1 x 65536 tokens, 347 instead of 330 TFLOP/s (H200, 2026-11-22).
ATTEND_LOADS = ((4, 4), (8, 2), (16, 1))
LIST_ATTEND_LOADS = ((4, 4), (16, 1))  # with all three pairs, ptxas spills
WARP_SUM_BYTES = LANES * RowFragment.rows * 4  # of a warp: the row sums of each lane


class MlaSm90(LatentKeys, DecodeSm90):
    """Attention of up to 64 packed rows, in steps of two tiles of 64 keys, A and B, from right to left.

    O has 64 x 512 elements, more than one warpgroup has registers for. So two warpgroups, left and right, each hold
    half of the columns. Each computes S and P of one of a step's two tiles and passes P to the other through shared
    memory.

    A key is in shared memory once, in two halves: the left half of the value's columns, and all columns to the right of
    them. A step is a chain: S and P of A, then P of B relative to A's reference, the product with P of B, and S of the
    next A. So P of B has a tile of its own, and each half of a key is released and reloaded as soon as one warpgroup's
    product is done. P of A overwrites the last 64 columns of A's right half, which belong to the key only.

    Warp roles
        warp 0 load_keys   both halves of the keys
        warp 1 load_keys   if lanes copy rows: warps 0 and 1 load half of the rows each
        warps 1, 2 dequantize   8-bit keys, half of the rows each, see parts/dequant/latent_rows.py;
                           in batch-invariant kernels warp 1 dequantizes all rows
        warps 1, 2 combine   in batch-invariant kernels, if they neither load nor dequantize: row shares whose partials
                           are complete, see parts/combine/row_shares.py; in other kernels attend combines, see
                           parts/combine/own_row_shares.py
        warp 3 schedule    work tiles and their rows of Q (by TMA if the rows have a constant stride);
                           in batch-invariant kernels also slots for their partials, which it announces
        warps 4..7 left    S and P of tile A; left half of O
        warps 8..11 right  S and P of tile B; right half of O
        Left and right together are attend. Only their steps are separate code. The rest is shared: less code is fetched
        when a work tile begins, and both meet at the same instruction, as an aligned barrier requires.

    Edges
        Q       schedule -> attend    released when the work tile's last products have been computed
        loaded K, loaded V  load_keys -> dequantize  bytes of both halves of 8-bit keys; released on K and V
        K       load_keys -> attend   left halves, tiles A and B alternately. Left releases a half when its product has
                                      been added to O. Right needs B's only for S, and releases A's when P of A is
                                      available
        V       load_keys -> attend   right halves. Right releases a half when its product has been added to O. Left
                                      releases A's when P of A is available, and B's, which it does not need, when P of
                                      B is
        work    schedule -> all       released as soon as it has been read; combine does not need it
        partial   attend -> schedule  only in batch-invariant kernels: released for each work tile when its slot may be
                                      written; full when the slot has been written
        P       left -> right         ping-pong: full when P of A and the references of its rows have been written;
                                      released when P of B has been written

    Steady state: the warpgroups are half a step apart, so that the softmax of one overlaps the products of the other.
    "S" is 9 products of 64 columns, "O" one product of 256.

        tensor cores   | left: S(A) | right: S(B) | O += P(A) A  both | O += P(B) B  both | left: S(A') | right: S(B')
        left           |   waits    | softmax of A: P(A) |      waits for P(B)    | waits       | softmax of A'
        right          |        waits             | softmax of B: P(B) |        waits           |
        loads          |                          | A', left half | A', right half | B', right half | B', left half
    """

    staging_bytes = WARP_ROWS * 4 + WARP_SUM_BYTES  # of a warp: references of its rows, then sums
    step_tiles = 2
    q_role = "schedule"

    @property
    def half_orders(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Order in which the halves, left (0) and right (1), of tiles A and B are multiplied. TMA loads the half that
        is released first before the other. Top-k index lists copy the halves in turn and are 5 % faster with left
        halves first; tiles of pages are 3 % slower with that order (H200, 2026-11-22 and 23). All page sizes use one
        order, because another order would change the sums."""
        return ((0, 1), (0, 1)) if self.config.sparse else ((0, 1), (1, 0))

    @property
    def dequant_warps_of_8_bits(self) -> int:
        """Warps that dequantize 8-bit keys. A batch-invariant kernel keeps one warp free to combine beside work tiles,
        because work tiles wait for the slots that it frees."""
        return 1 if self.config.batch_invariant else 2

    @property
    def schedule_type(self) -> type[SplitSchedule]:
        if self.config.batch_invariant:
            return TopkSchedule if self.config.sparse else LatentSchedule
        return TopkCtaPartSchedule if self.config.sparse else CtaPartSchedule

    @property
    def more_roles(self) -> dict[str, int]:
        """Warps of the additional roles. The two halves of attend, left and right, are roles too."""
        return {**super().more_roles, "left": 4, "right": 4}

    def _more_edges(self) -> tuple[Edge, ...]:
        partial_id = Edge("partial", "attend", "schedule", 1, 4 * self.warpgroups, 1, 0)
        return *self._p_edges(), *[partial_id] * self.config.batch_invariant

    def _p_edges(self) -> tuple[Edge, ...]:
        """Return the edges on which left and right exchange P."""
        # The bytes are P of B, which goes in the opposite direction. P of A lies in V.
        return (Edge("P", "left", "right", 1, 4, 4, self.tile.m * self.tile.n * HALFWORD_BYTES, LANES, LANES),)

    def consumer(self, **parts: Any) -> "MlaAttend":
        return MlaAttend(**parts)

    def _combine(self, addresses: Addresses, geometry: DecodeGeometry, tiles=None, loads=None) -> Partials:
        kind, slot_kind = (RowShares, Slots) if self.config.batch_invariant else (OwnRowShares, OwnSlots)
        slots = slot_kind.create(addresses, geometry, self.config.head_dim_v, LATENT_PARTIAL_BYTES)
        loads = loads or (LIST_ATTEND_LOADS if self.config.sparse else ATTEND_LOADS)
        return kind(slots, loads)

    def hooks(self, addresses: Addresses, geometry: DecodeGeometry, q_atom, tiles, rings) -> QueryHooks:
        common = self, copy.tma_descriptor(q_atom), tiles, rings, addresses, geometry
        if self.config.batch_invariant:
            return LatentWorkTiles(*common, self._combine(addresses, geometry))
        return QueryHooks(*common)

    def _allocate_tiles(self, smem) -> "MlaTiles":
        # Rows of 128 bytes: 64 columns of P of B, or in 8-bit kernels 64 columns each of P of A and of B.
        layout = copy.swizzled_layout(self.dtype, self.tile.m, copy.SWIZZLE_ROW_BYTES * 8 // self.dtype.width, 1)
        p = smem.allocate_tensor(self.dtype, layout.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=layout.inner)
        return MlaTiles(**vars(super()._allocate_tiles(smem)), p=p)

    def _q_atom(self, a: Addresses, g: DecodeGeometry):
        # The heads of an expanded query share one address. TMA does not load such a query, but its descriptor needs a
        # nonzero stride.
        (stride,) = self.config.q_strides(g.q_head)
        rows, distance = Int64(g.tokens) * g.group, cutlass.max(Int64(stride), copy.VECTOR_BYTES // HALFWORD_BYTES)
        return self._row_boxes(a.query, (rows, self.config.q_dim, 1), (distance, distance), self.q_rows)

    @cute.jit
    def load(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue, schedule, scale):
        """Run the warps of the first warpgroup that load keys, and the warps that combine."""
        if warp < SCHEDULE_WARP - self.warps_without_work:
            self.load_keys(warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue)
        elif const_expr(self.warps_without_work > 0 and self.config.batch_invariant):
            combine = self._combine(addresses, geometry, loads=self.config.combine_loads)
            partials = schedule.partials()
            combine.run(partials, Int32(geometry.grid), addresses, geometry, scale, self.out_dtype)
            combine.hand_back(self.merging_warps(geometry), partials)

    @cute.jit
    def fetch_rows(self, descriptor, addresses, geometry, tile, tiles, ring, step):
        """Load rows of Q, by TMA if they have a constant stride. TMA may also read rows of the next request; their
        results are not stored."""
        if geometry.q_token == geometry.q_head * geometry.group:
            row = tile.request.q_start * Int32(geometry.group) + tile.first_row
            self.fetch_q(descriptor, tiles, ring, step, row, Int32(0))
        else:
            self.load_q(addresses, geometry, tile, tiles, ring, step)

    @property
    def warps_without_work(self) -> int:
        """Producer warps that do not read the work queue. They combine in batch-invariant kernels, and exit at once in
        others."""
        return SCHEDULE_WARP - self.loading_warps - self.dequant_warps

    def merging_warps(self, geometry: DecodeGeometry):
        """Return the number of warps of all CTAs that combine."""
        return Int32(geometry.grid) * (self.warps_without_work + 4 * self.warpgroups)


@dataclass
class MlaTiles(SharedTiles):
    p: Any  # P of tile B: [rows, tile.n, 1]


class KeyHalves:
    """Mixin for operands with the two halves of a key: computes S from both halves."""

    def issue_half(self, kv_half: int, q_stage, stage, accumulate: bool) -> None:
        """Issue S (+)= Q K^T over the columns of the left (0) or right (1) half."""
        q, k = self.q[None, None, None, q_stage], (self.k, self.k_right)[kv_half][None, None, None, stage]
        depth = (self.depth_v, self.depth_qk - self.depth_v)[kv_half]
        issue_mma(self.qk_mma, self.s, q, k, depth, accumulate, (kv_half * self.depth_v, 0))


@dataclass
class MlaOperands(KeyHalves, Operands):
    """Matrix operands of one warpgroup. ``k`` and ``k_right`` are the two halves of a key. ``v`` is this warpgroup's
    half of the value, and ``p_shared`` is the P of the other warpgroup."""

    other_mma: Any
    k_right: Any
    p_shared: Any

    @staticmethod
    def of_both(kernel: MlaSm90, tiles) -> tuple["MlaOperands", "MlaOperands"]:
        """Return the operands of left and of right, in the same registers, so that both share the
        code after the steps."""
        t, half, columns = kernel.tile, kernel.config.depth[1], kernel.config.columns
        common, right = (Operands.of_value(kernel, tiles, 0, *v) for v in zip((tiles.k, tiles.v), columns, strict=True))
        source = warpgroup.OperandSource.SMEM
        shape = (WARPGROUP_ROWS, half)
        other_mma = make_mma(kernel.dtype, shape, a_source=source, b_major=OperandMajorMode.MN, warpgroups=1)
        qk, other = common.qk_mma.get_slice(0), other_mma.get_slice(0)
        last_block = cute.make_layout((t.m, t.n, t.kv_stages), stride=(1, t.n, t.n * columns[1]))
        blocks = cute.make_tensor(tiles.v.iterator + cute.crd2idx((0, half, 0), tiles.v.layout), tiles.v.layout)
        p_of_a, p_of_b = (
            other.make_fragment_A(other.partition_A(tile)) for tile in (cute.composition(blocks, last_block), tiles.p)
        )
        left = MlaOperands(
            **vars(common),
            other_mma=other_mma,
            k_right=qk.make_fragment_B(qk.partition_B(tiles.v)),
            p_shared=p_of_b,
        )
        return left, replace(left, v=right.v, p_shared=p_of_a)

    def issue_other(self, stage, p_stage) -> None:
        """Issue O += P V with the other warpgroup's P."""
        p, v = self.p_shared[None, None, None, p_stage], self.v[None, None, None, stage]
        issue_mma(self.other_mma, self.o, p, v, self.tile_n, True)


@dataclass
class MlaAttend(LatentRows, DecodeAttend):
    """The two consumer warpgroups."""

    sums_at = 2 * WARPGROUP_ROWS  # start of the sums in the memory of both, behind the references

    def both_operands(self) -> tuple[Any, Any]:
        """Return the operands of left and of right."""
        return MlaOperands.of_both(self.kernel, self.tiles)

    def give_back_q(self, operands, work, consumer) -> None:
        """Release Q after the work tile's last products."""
        self.rings.q.release(work)

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        q_ring = self.rings.q
        consumer = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) - 1
        left, right = self.both_operands()
        warp_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS
        step, work = Int32(0), Int32(0)
        tile = self.work_queue.read(work)
        while tile.is_work_tile:
            keys = tile.keys
            # This barrier, like the barrier in Attend.run, tells the compiler that the warps have converged.
            cute.arch.barrier(barrier_id=NamedBarrier.WARPGROUP + consumer, number_of_threads=WARPGROUP)
            self.softmax.reset()
            left.o.fill(0.0)
            row, q_stage = self.logit_row(tile, warp_row), q_ring.stage(work)
            q_ring.wait_full(work)
            if keys.begin < keys.end:
                if consumer == 0:
                    for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                        self.left_step(left, q_stage, row, step, n, n >= keys.full_end)
                        step += 1
                else:
                    for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                        self.right_step(right, q_stage, row, step, n, n >= keys.full_end, n == keys.end - 1)
                        step += 1
            self.give_back_q(left, work, consumer)
            self.add_sums()
            self.store(left, tile, work, warp_row, consumer, addresses, geometry)
            work += 1
            tile = self.work_queue.read(work)
        outputs = (addresses, geometry, self.output_scale, self.kernel.out_dtype)
        if const_expr(self.kernel.config.batch_invariant):
            # The tile after the last work tile has the number of partials.
            self.combine.run(tile.partial_id, Int32(0), *outputs)
            self.combine.hand_back(self.kernel.merging_warps(geometry), tile.partial_id)
        else:
            while tile.exists:
                self.combine.combine(tile, cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS, *outputs)
                work += 1
                tile = self.work_queue.read(work)

    # Each warpgroup has a single copy of its step. With copies for masked and last steps, instruction fetches slowed
    # the first three steps of a work tile. They took 10000 to 16000 cycles instead of 6000 (H200, 2026-11-21). Branches
    # occur only while no product is in flight: ptxas serialises all products if one of them meets a branch.

    @cute.jit
    def left_step(self, operands, q_stage, row, step, n, masked):
        """Run the left warpgroup through tiles A and B of step ``n`` of the work tile, the ``step``-th of this CTA."""
        left, right, ping_pong = self.rings.k, self.rings.v, self.rings.p
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile((2 * n + 1) * self.kernel.tile.n)
        self.scores(operands, q_stage, a, self.kernel.half_orders[0])
        warpgroup.wait_group(0)
        if row.needs_mask(masked):
            self.to_logits(operands.scores(), 2 * n + 1, row, True)
        self.softmax.step(operands.scores())
        operands.round_scores()
        self.write_p(operands, self.tiles.v, right.stage(a), operands.depth_v // BLOCK_COLUMNS)
        cute.arch.mbarrier_arrive(ping_pong.full_barrier(step))
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(left.stage(a))
        warpgroup.wait_group(0)
        left.release(a)
        left.wait_full(b)
        ping_pong.wait_released(step)
        right.release(b)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(left.stage(b), 0)
        warpgroup.wait_group(0)
        left.release(b)

    @cute.jit
    def right_step(self, operands, q_stage, row, step, n, masked, is_first):
        """Run the right warpgroup through tiles A and B of step ``n`` of the work tile, the ``step``-th of this CTA.

        Rounding to bfloat16 leaves only a weight of 1 exact. So in a work tile's first step, the only step of short
        lists, B's reference is its own largest logit. The exception is a logit so far below A's that its weight is
        negligible. The largest weights of both tiles are then exact.
        """
        left, right, ping_pong = self.rings.k, self.rings.v, self.rings.p
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile(2 * n * self.kernel.tile.n)
        self.scores(operands, q_stage, b, self.kernel.half_orders[1])
        warpgroup.wait_group(0)
        left.release(b)
        scores = operands.scores()
        if row.needs_mask(masked):
            self.to_logits(scores, 2 * n, row, True)
        largest = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        slack = Float32(-SLACK) if is_first else Float32(SLACK)
        right.wait_full(a)
        ping_pong.wait_full(step)
        left.release(a)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(right.stage(a), right.stage(a))
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.choose_reference(r, largest[r], slack)
            self.softmax.exponentials(scores, r)
        operands.round_scores()
        self.write_p(operands, self.tiles.p, 0, 0)
        ping_pong.release(step)
        warpgroup.wait_group(0)
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(right.stage(b))
        warpgroup.wait_group(0)
        right.release(b)

    def scores(self, operands, q_stage, step, kv_halves: tuple[int, ...]) -> None:
        """Issue S of a tile, one half at a time as they arrive."""
        for i, kv_half in enumerate(kv_halves):
            ring = (self.rings.k, self.rings.v)[kv_half]
            ring.wait_full(step)
            operands.issue_half(kv_half, q_stage, ring.stage(step), i > 0)

    @cute.jit
    def store(self, operands, tile, work, warp_row, column_half, addresses, geometry):
        """Write this warp's rows to the output, or to a partial if the request has several chunks."""
        if const_expr(self.kernel.config.batch_invariant):
            self.rings.partial.wait_released(work)
        if tile.chunks == 1:
            rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
            self.store_rows(operands, rows, warp_row, column_half)
        else:
            self.store_partial(operands, tile.partial_id, warp_row, column_half)
        if const_expr(self.kernel.config.batch_invariant):
            self.rings.partial.fill(work)
        else:
            self.combine.announce(tile)

    @cute.jit
    def store_partial(self, operands, partial_id, warp_row, column_half) -> None:
        output = operands.output()
        if warp_row < self.combine.slots.rows:
            for r in cutlass.range_constexpr(output.rows):
                reference, total = self.softmax.partial(r, output.lanes_per_row)
                self.combine.store(partial_id, output, r, reference, total, warp_row, column_half)

    @cute.jit
    def write_p(self, operands, tiles, stage, block: cutlass.Constexpr[int]) -> None:
        """Write P to a column block of a stage of ``tiles``, and the references that P is relative to. This lane's next
        arrival then passes the turn to the other warpgroup."""
        warp_row = cute.arch.warp_idx() % 4 * WARP_ROWS
        lane = cute.arch.lane_idx()
        rows, columns = (cute.size(tiles, mode=[mode]) for mode in range(2))
        base = shared_address(tiles.iterator) + stage * (rows * columns * HALFWORD_BYTES)
        swizzle_row = copy.block_row(
            warp_row + lane % WARP_ROWS, block, rows, columns, self.kernel.source.columns_first
        )
        words = cute.recast_tensor(operands.p, cutlass.Uint32)
        for k in cutlass.range_constexpr(self.kernel.tile.n // MMA_DEPTH):
            address = copy.swizzled_vector(base, swizzle_row, 2 * k + lane // WARP_ROWS)
            copy.store_matrix_x4(address, [words[4 * k + i] for i in range(4)])
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine, reference = self._reference(r, 0), self.softmax.reference[r]
            if lane % RowFragment.lanes_per_row == 0:
                mine[0] = reference
        cute.arch.sync_warp()
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def follow_other(self) -> None:
        """Switch to the other warpgroup's references."""
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.follow(r, self._reference(r, 1)[0])

    @cute.jit
    def add_sums(self) -> None:
        """Add the other warpgroup's row sums to this one's; each has processed half of the keys."""
        mine, its = self._sums(0), self._sums(1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine[r] = self.softmax.row_sum[r]
        self.meet()
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.row_sum[r] = self.softmax.row_sum[r] + its[r]
        self.meet()

    def meet(self) -> None:
        """Wait for both warpgroups."""
        cute.arch.barrier(barrier_id=NamedBarrier.COMBINE, number_of_threads=2 * WARPGROUP)

    # No warpgroup overwrites a value that the other may still read. References are written after the other warpgroup's
    # turn, which follows its read. The sums are read between two barriers of both warpgroups.

    def _reference(self, r: int, other: int):
        """Return the location of the reference of a thread's row, or of the same row in the other warpgroup."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        row = (warp ^ (4 * other)) * WARP_ROWS + RowFragment.first_row() + RowFragment.row_offset(r)
        return self._state(row, 1)

    def _sums(self, other: int):
        """Return the location of the sums of a thread's rows, or of the matching thread's rows in
        the other warpgroup."""
        thread = (cute.arch.thread_idx()[0] - WARPGROUP) ^ (other * WARPGROUP)
        return self._state(self.sums_at + thread * RowFragment.rows, RowFragment.rows)

    def _state(self, place, size: int):
        pointer = cute.recast_ptr(self.tiles.staging, dtype=Float32)
        return cute.make_tensor(pointer + place, cute.make_layout(size))


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return MlaSm90(config), example_arguments((Addresses, DecodeGeometry), floats=3)
