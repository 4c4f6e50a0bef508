"""Hopper MLA decode: all heads share one latent key, and its first columns are also the value."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config.base import BLOCK_COLUMNS, MMA_DEPTH
from hopwell.kernels.config.mla import MlaConfig
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPS
from hopwell.kernels.launch.arguments import DecodeAddresses, DecodeGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.cluster import ClusterRing
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import SharedTiles, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.rows.epilogue import WARP_ROWS
from hopwell.kernels.parts.rows.softmax import SLACK, OnlineSoftmax
from hopwell.kernels.sm90.common.kernel import SCHEDULE_WARP
from hopwell.kernels.sm90.common.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.sm90.common.operands import Operands
from hopwell.kernels.sm90.decode.base import DecodeKernel
from hopwell.kernels.sm90.mla.cluster_dequant import ClusterLoads
from hopwell.kernels.sm90.mla.key_halves import LatentKernel, LatentLoads
from hopwell.kernels.sm90.mla.partition import CtaParts, RequestSplits
from hopwell.kernels.sm90.mla.shared_steps import WARP_SUM_BYTES, SharedSteps


class MlaSm90(LatentKernel, DecodeKernel):
    """Attention of up to 64 packed rows, in steps of two tiles of 64 keys, A and B, from right to left.

    Warp roles
        warp 0 load_keys   both halves of the keys
        warp 1 load_keys   if lanes copy rows: warps 0 and 1 load half of the rows each
        warps 1, 2 dequantize   8-bit keys, half of the rows each, see parts/dequant/latent_rows.py;
                           in batch-invariant kernels warp 1 dequantizes all rows
        warps 0..2 dequantize   if clusters share dequant: load and dequantize, see cluster_dequant.py
        warps 1, 2 combine   in batch-invariant kernels, if they neither load nor dequantize: row shares whose partials
                           are complete, see parts/combine/row_shares.py; in other kernels attend combines, see
                           OwnRowShares
        warp 3 schedule    work tiles and their rows of Q (by TMA if the rows have a constant stride);
                           in batch-invariant kernels also slots for their partials, which it announces
        warps 4..7 left    S and P of tile A; left half of O
        warps 8..11 right  S and P of tile B; right half of O
        Left and right together are attend. Only their steps are separate code. The rest is shared: less code is fetched
        when a work tile begins, and both meet at the same instruction, as an aligned barrier requires.

    Edges
        q       schedule -> attend    released when the work tile's last products have been computed
        loaded_k, loaded_v  load_keys -> dequantize  bytes of both halves of 8-bit keys; released on k and v
        k       load_keys -> attend   left halves, tiles A and B alternately. Left releases a half when its product has
                                      been added to O. Right needs B's only for S, and releases A's when P of A is
                                      available
        v       load_keys -> attend   right halves. Right releases a half when its product has been added to O. Left
                                      releases A's when P of A is available, and B's, which it does not need, when P of
                                      B is
        k, v    dequantize -> attend of both   if clusters share dequant: full when each CTA has stored half of the
                                      keys, released when attend of both CTAs has released the stage
        work    schedule -> all       released as soon as it has been read; combine does not need it
        partial   attend -> schedule  only in batch-invariant kernels: released for each work tile when its slot may be
                                      written; full when the slot has been written
        p       left -> right         ping-pong: full when P of A and the references of its rows have been written;
                                      released when P of B has been written

    Steady state: the warpgroups are half a step apart, so that the softmax of one overlaps the products of the other.
    "S" is 9 products of 64 columns, "O" one product of 256.

        tensor cores   | left: S(A) | right: S(B) | O += P(A) A  both | O += P(B) B  both | left: S(A') | right: S(B')
        left           |   waits    | softmax of A: P(A) |      waits for P(B)    | waits       | softmax of A'
        right          |        waits             | softmax of B: P(B) |        waits           |
        loads          |                          | A', left half | A', right half | B', right half | B', left half

    O has 64 x 512 elements, more than one warpgroup has registers for. So two warpgroups, left and right, each hold
    half of the columns. Each computes S and P of one of a step's two tiles and passes P to the other through shared
    memory.

    A key is in shared memory once, in two halves: the left half of the value's columns, and all columns to the right of
    them. A step is a chain: S and P of A, P of B relative to A's reference, the product with P of B. Then follows S of
    the next A. So P of B has a tile of its own. Each half of a key is released and reloaded as soon as one warpgroup's
    product is done. P of A overwrites the last 64 columns of A's right half, which belong to the key only.
    """

    # Rows of 128 bytes: 64 columns of P of B, or in 8-bit kernels 64 columns each of P of A and of B.
    p_tiles = 1

    def __init__(self, config: MlaConfig, attend: type[SharedSteps], reader: Reader):
        self.attend_type, self.reader = attend, reader
        self.partition = (RequestSplits if config.batch_invariant else CtaParts)(self)
        self.loads = ClusterLoads(self) if config.shares_dequant else LatentLoads(self, self.partition.dequant_warps)
        super().__init__(config)

    @property
    def half_orders(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Order in which the halves, left (0) and right (1), of tiles A and B are multiplied. TMA loads the half that
        is released first before the other. Top-k index lists copy the halves in turn and are 5 % faster with left
        halves first; tiles of pages are 3 % slower with that order (H200, 2026-11-22 and 23). All page sizes use one
        order, because another order would change the sums."""
        return ((0, 1), (0, 1)) if self.config.sparse else ((0, 1), (1, 0))

    @property
    def idle_warps(self) -> int:
        """Producer warps that do not read the work queue. They combine in batch-invariant kernels, and exit at once in
        others."""
        return SCHEDULE_WARP - self.loads.warps

    @property
    def roles(self) -> dict[str, int]:
        attend, warpgroups = {"attend": 2 * WARPS, "left": WARPS, "right": WARPS}, len(self.config.registers)
        return {**self.loads.roles, **attend, "all others": WARPS * warpgroups - 1 - self.idle_warps}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        kv, more = self.loads.edges(roles, self.reader), self.attend_type.edges(self, roles)
        return self.q_edge(roles), *kv, self._work_edge(roles), *more, *self.partition.edges(roles)

    def _allocate(self, smem):
        tiles, rings, work_queue, zeroing_barriers = super()._allocate(smem)
        if const_expr(self.config.shares_dequant):
            rings = replace(rings, k=ClusterRing.of(rings.k), v=ClusterRing.of(rings.v))
        return tiles, rings, work_queue, zeroing_barriers

    @property
    def lanes_read_q(self) -> bool:
        return self.attend_type.stages_in_q

    @property
    def staging_bytes(self) -> int:
        return self.attend_type.staging_bytes

    @property
    def more_bytes(self) -> int:
        """Bytes of P, if no edge has them."""
        return self.attend_type.p_bytes(self)

    @cute.jit
    def load(
        self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry, schedule, output_scale
    ):
        """Run the warps of the first warpgroup that load keys, and the warps that combine."""
        if warp < self.loads.warps:
            self.loads.run(warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry)
        elif const_expr(self.idle_warps > 0):
            self.partition.run_idle_warp(addresses, geometry, schedule, output_scale)

    def softmax(self, scale) -> OnlineSoftmax:
        return self.attend_type.softmax_type.create(scale, RowFragment.rows)

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        combine = self.partition.combine(addresses, geometry)
        logits = self.loads.logits(parts["mask"], addresses, geometry)
        self.attend_type(**parts, output_scale=output_scale, combine=combine, logits=logits).run(addresses, geometry)


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
    def of_both(kernel, tiles) -> tuple["MlaOperands", "MlaOperands"]:
        """Return the operands of left and of right, in the same registers, so that both share the
        code after the steps."""
        t, half, columns = kernel.tile, kernel.layout.depth[1], kernel.layout.columns
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
class MlaAttend(SharedSteps):
    """The two consumer warpgroups of 16-bit products. They pass the turn, with P and references, to each other."""

    staging_bytes = WARP_ROWS * 4 + WARP_SUM_BYTES  # of a warp: references of its rows, then sums
    stages_in_q = False
    softmax_type = OnlineSoftmax
    sums_at = 2 * WARPGROUP_ROWS  # behind the references

    @staticmethod
    def edges(kernel: MlaSm90, roles: Roles) -> list[Edge]:
        """Return the edge on which left and right exchange P."""
        # The bytes are P of B, which goes in the opposite direction. P of A lies in V.
        size = kernel.tile.m * kernel.tile.n * HALFWORD_BYTES
        return [roles.edge("p", "left", "right", 1, size, producer_lanes=LANES, consumer_lanes=LANES)]

    @staticmethod
    def p_bytes(kernel: MlaSm90) -> int:
        return 0

    @staticmethod
    def operands(kernel, tiles: SharedTiles) -> tuple[MlaOperands, MlaOperands]:
        return MlaOperands.of_both(kernel, tiles)

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
            self.mask.apply(operands.scores(), (2 * n + 1) * self.kernel.tile.n, row)
        self.softmax.step(operands.scores())
        operands.round_scores()
        self.write_p(operands, self.tiles.v, right.stage(a), operands.depth_v // BLOCK_COLUMNS)
        cute.arch.mbarrier_arrive(ping_pong.full_barrier(step))
        right.release(a)
        operands.rescale(self.softmax)
        operands.issue_pv(left.stage(a))
        warpgroup.wait_group(0)
        left.release(a)
        left.wait_full(b)
        ping_pong.wait_released(step)
        right.release(b)
        self.follow_other()
        operands.rescale(self.softmax)
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
            self.mask.apply(scores, 2 * n * self.kernel.tile.n, row)
        largest = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        slack = Float32(-SLACK) if is_first else Float32(SLACK)
        right.wait_full(a)
        ping_pong.wait_full(step)
        left.release(a)
        self.follow_other()
        operands.rescale(self.softmax)
        operands.issue_other(right.stage(a), right.stage(a))
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.choose_reference(r, largest[r], slack)
            self.softmax.exponentials(scores, r)
        operands.round_scores()
        self.write_p(operands, self.tiles.p, 0, 0)
        ping_pong.release(step)
        warpgroup.wait_group(0)
        right.release(a)
        operands.rescale(self.softmax)
        operands.issue_pv(right.stage(b))
        warpgroup.wait_group(0)
        right.release(b)

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

    # No warpgroup overwrites a value that the other may still read. References are written after the other warpgroup's
    # turn, which follows its read. The sums are read between two barriers of both warpgroups.

    def _reference(self, r: int, other: int):
        """Return the location of the reference of a thread's row, or of the same row in the other warpgroup."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        row = (warp ^ (4 * other)) * WARP_ROWS + RowFragment.first_row() + RowFragment.row_offset(r)
        return self._state(row, 1)


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    kernel = MlaSm90(config, MlaAttend, Reader.TENSOR_CORES)
    return kernel, example_arguments((DecodeAddresses, DecodeGeometry), floats=3)
