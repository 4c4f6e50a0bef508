"""Hopper MLA decode: heads that share one latent key, whose first columns are the value as well."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config import BLOCK_COLUMNS, MMA_DEPTH
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.mla_config import MlaConfig
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import shared_address
from hopwell.kernels.parts.epilogue import WARP_ROWS
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.own_shares import OwnShares, OwnSlots
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import Slots
from hopwell.kernels.parts.portions import ListPortionSchedule, PortionSchedule
from hopwell.kernels.parts.shares import Pieces, Shares
from hopwell.kernels.parts.softmax import SLACK
from hopwell.kernels.parts.split import LatentSchedule, ListSchedule, SplitSchedule, UnitKeeper
from hopwell.kernels.pipeline import Edge
from hopwell.kernels.skeleton import SharedTiles, example_arguments
from hopwell.kernels.sm90.attend import WARPGROUP_BARRIER, Operands
from hopwell.kernels.sm90.decode import MERGE_BARRIER, DecodeSm90
from hopwell.kernels.sm90.decode_attend import DecodeAttend
from hopwell.kernels.sm90.kernel import SCHEDULE_WARP
from hopwell.kernels.sm90.latent import LatentKeys, LatentRows
from hopwell.kernels.sm90.mma import WARPGROUP_ROWS, issue_mma, make_mma
from hopwell.kernels.splitting import LATENT_PIECE_BYTES

# Pieces, and subtiles of each, that a warp of attend has under way when it merges. With many pieces a share is one
# subtile: 1 x 65536 tokens, 347 instead of 330 TFLOP/s (H200, 2026-11-22).
ATTEND_LOADS = ((4, 4), (8, 2), (16, 1))
LIST_ATTEND_LOADS = ((4, 4), (16, 1))  # with the third kind, ptxas spills
WARP_SUM_BYTES = LANES * RowFragment.rows * 4  # of a warp: sums of each lane's rows


class MlaSm90(LatentKeys, DecodeSm90):
    """Attention of packed rows, 64 of them at most, in steps of two tiles of 64 keys, A and B, from right to left.

    64 x 512 of O are more registers than a warpgroup has, so two of them share the columns: left and right. Each
    computes S and P of one of a step's tiles and gives P to the other through shared memory. A key is there once, in
    two sides: the left half of the value's columns, and all to the right of them. A step is a chain: S and P of A, P of
    B relative to that, the product with P of B, and S of the next A. So P of B has a tile of its own, and each side of
    a key is given back, and fetched again, as soon as one warpgroup's product is done; P of A goes where the last 64
    columns of A's right side were, which belong to the key alone.

    Warp roles
        warp 0 load_keys   both sides of the keys
        warp 1             the same where lanes copy rows, half of them each
        warps 1, 2 widen   keys of 8 bits, half of the rows each, see parts/widened_rows.py; warp 1 all of them in
                           batch-invariant kernels
        warps 1, 2 merge   in batch-invariant kernels, where they neither load nor widen: shares of rows of which all
                           pieces are there, see parts/shares.py; else attend merges, see parts/own_shares.py
        warp 3 schedule    units of work; their rows of Q, by TMA where these lie at equal distances; in batch-invariant
                           kernels slots for their pieces, which it announces
        warps 4..7 left    S and P of tile A; left half of O
        warps 8..11 right  S and P of tile B; right half of O
        Left and right are attend. Only their steps are code of their own: elsewhere there is less code to fetch when a
        unit begins, and they meet at the same instruction, as an aligned barrier wants it.

    Edges
        Q       schedule -> attend    released when the unit's last products have been computed
        loaded K, loaded V  load_keys -> widen  bytes of both sides, where keys have 8 bits; given back on K and V
        K       load_keys -> attend   left sides, tiles A and B by turns: released by left when its product has been
                                      added to O; by right, which needs B's for S only, of A when P of A is there
        V       load_keys -> attend   right sides: released by right when its product has been added to O; by left of A
                                      when P of A is there, of B, which it does not need, when P of B is
        work    schedule -> all       released as soon as it has been read; merge does not need it
        piece   attend -> schedule    there where shares are handed out: released for each unit when its slot may be
                                      written; full when it is
        P       left -> right         they take turns: full when P of A has been written, with the references of its
                                      rows, released when P of B has been

    Steady state: the warpgroups are half a step apart, so that one's softmax runs under the other's products. "S" are
    9 products of 64 columns, "O" one of 256.

        tensor cores   | left: S(A) | right: S(B) | O += P(A) A  both | O += P(B) B  both | left: S(A') | right: S(B')
        left           |   waits    | softmax of A: P(A) |      waits for P(B)    | waits       | softmax of A'
        right          |        waits             | softmax of B: P(B) |        waits           |
        loads          |                          | A', left side | A', right side | B', right side | B', left side
    """

    staging_bytes = WARP_ROWS * 4 + WARP_SUM_BYTES  # of a warp: references of its rows, sums
    step_tiles = 2
    q_role = "schedule"

    @property
    def side_orders(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the order in which sides, left (0) and right (1), of tiles A and B are multiplied. TMA fetches first
        what is given back first. Lists, whose sides are copied in turns, are 5 % faster with left sides first, tiles of
        pages 3 % slower (H200, 2026-11-22 and 23). Pages of all sizes have one order, or their sums would differ."""
        return ((0, 1), (0, 1)) if self.config.sparse else ((0, 1), (1, 0))

    @property
    def byte_widening_warps(self) -> int:
        """In batch-invariant kernels a warp has to be left that merges beside units: they wait for slots that it
        frees."""
        return 1 if self.config.batch_invariant else 2

    @property
    def schedule_type(self) -> type[SplitSchedule]:
        if self.config.batch_invariant:
            return ListSchedule if self.config.sparse else LatentSchedule
        return ListPortionSchedule if self.config.sparse else PortionSchedule

    @property
    def more_roles(self) -> dict[str, int]:
        """The halves of attend are roles too, besides those that all decode kernels have."""
        return {**super().more_roles, "left": 4, "right": 4}

    def _more_edges(self) -> tuple[Edge, ...]:
        piece = Edge("piece", "attend", "schedule", 1, 4 * self.warpgroups, 1, 0)
        return *self._p_edges(), *[piece] * self.config.batch_invariant

    def _p_edges(self) -> tuple[Edge, ...]:
        """Return the edges by which left and right give each other P."""
        # The bytes are those of P of B, which goes the other way; P of A lies in V.
        return (Edge("P", "left", "right", 1, 4, 4, self.tile.m * self.tile.n * HALFWORD_BYTES, LANES, LANES),)

    def consumer(self, **parts: Any) -> "MlaAttend":
        return MlaAttend(**parts)

    def _merge(self, addresses: Addresses, geometry: DecodeGeometry, tiles=None, loads=None) -> Pieces:
        kind, slot_kind = (Shares, Slots) if self.config.batch_invariant else (OwnShares, OwnSlots)
        slots = slot_kind.create(addresses, geometry, self.config.head_dim_v, LATENT_PIECE_BYTES)
        loads = loads or (LIST_ATTEND_LOADS if self.config.sparse else ATTEND_LOADS)
        return kind(slots, loads)

    def keeper(self, addresses: Addresses, geometry: DecodeGeometry, q_atom, tiles, rings) -> "QueryKeeper":
        common = self, copy.tma_descriptor(q_atom), tiles, rings, addresses, geometry
        if self.config.batch_invariant:
            return LatentUnits(*common, self._merge(addresses, geometry))
        return QueryKeeper(*common)

    def _allocate_tiles(self, smem) -> "MlaTiles":
        # Rows of 128 bytes: 64 columns of P of B, or with elements of 8 bits as many of A and of B.
        layout = copy.swizzled_layout(self.dtype, self.tile.m, copy.SWIZZLE_ROW_BYTES * 8 // self.dtype.width, 1)
        p = smem.allocate_tensor(self.dtype, layout.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=layout.inner)
        return MlaTiles(**vars(super()._allocate_tiles(smem)), p=p)

    def _q_atom(self, a: Addresses, g: DecodeGeometry):
        # Heads of a query that is expanded lie at one place, which TMA does not read but has to have a distance for.
        (stride,) = self.config.q_strides(g.q_head)
        rows, distance = Int64(g.tokens) * g.group, cutlass.max(Int64(stride), copy.VECTOR_BYTES // HALFWORD_BYTES)
        return self._row_boxes(a.query, (rows, self.config.q_dim, 1), (distance, distance), self.q_rows)

    @cute.jit
    def load(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, board, schedule, scale):
        """Run those warps of the first warpgroup that load keys, and those that merge."""
        if warp < SCHEDULE_WARP - self.warps_without_work:
            self.load_keys(warp, atoms, addresses, geometry, tiles, rings, partial_barriers, board)
        elif const_expr(self.warps_without_work > 0 and self.config.batch_invariant):
            merge = self._merge(addresses, geometry, loads=self.config.merge_loads)
            pieces = schedule.pieces()
            merge.run(pieces, Int32(geometry.grid), addresses, geometry, scale, self.out_dtype)
            merge.hand_back(self.merging_warps(geometry), pieces)

    @cute.jit
    def fetch_rows(self, descriptor, addresses, geometry, tile, tiles, ring, step):
        """Load rows of Q, by TMA where they lie at equal distances. Behind the rows of the request it reads those of
        the next one, whose results are not stored."""
        if geometry.q_token == geometry.q_head * geometry.group:
            row = tile.request.q_start * Int32(geometry.group) + tile.first_row
            self.fetch_q(descriptor, tiles, ring, step, row, Int32(0))
        else:
            self.load_q(addresses, geometry, tile, tiles, ring, step)

    @property
    def warps_without_work(self) -> int:
        """Say how many producer warps do not read the board: they merge in batch-invariant kernels, and end at once in
        others."""
        return SCHEDULE_WARP - self.loading_warps - self.widening_warps

    def merging_warps(self, geometry: DecodeGeometry):
        """Say how many warps of all CTAs merge."""
        return Int32(geometry.grid) * (self.warps_without_work + 4 * self.warpgroups)


@dataclass
class MlaTiles(SharedTiles):
    p: Any  # P of tile B: [rows, tile.n, 1]


@dataclass
class QueryKeeper(UnitKeeper):
    """This is what every unit needs besides its keys: rows of Q."""

    kernel: MlaSm90
    descriptor: Any  # of Q
    tiles: Any
    rings: Any
    addresses: Addresses
    geometry: DecodeGeometry

    @cute.jit
    def posted(self, step, unit, before) -> None:
        q_ring = self.rings.q
        self.kernel.fetch_rows(self.descriptor, self.addresses, self.geometry, unit, self.tiles.q, q_ring, step)


@dataclass
class LatentUnits(QueryKeeper):
    """Where shares are handed out, units need a slot for their piece as well, and that others learn of the piece."""

    merge: Shares

    @cute.jit
    def posted(self, step, unit, before) -> None:
        QueryKeeper.posted(self, step, unit, before)
        if step > 0:
            self._announce(step - 1, before)
        self.merge.wait_free(unit)
        self.rings.piece.release(step)

    @cute.jit
    def ended(self, step, last) -> None:
        if step > 0:
            self._announce(step - 1, last)

    def _announce(self, step, unit) -> None:
        self.rings.piece.wait_full(step)
        self.merge.announce(unit, self.geometry.group)


class KeySides:
    """How S is computed from a key's two sides: a base class beside operands that have them."""

    def issue_side(self, side: int, q_stage, stage, accumulate: bool) -> None:
        """Issue S (+)= Q K^T over the columns of the left (0) or right (1) side."""
        q, k = self.q[None, None, None, q_stage], (self.k, self.k_right)[side][None, None, None, stage]
        depth = (self.depth_v, self.depth_qk - self.depth_v)[side]
        issue_mma(self.qk_mma, self.s, q, k, depth, accumulate, (side * self.depth_v, 0))


@dataclass
class MlaOperands(KeySides, Operands):
    """Matrix operands of one warpgroup: ``k`` and ``k_right`` are a key's two sides, ``v`` is this warpgroup's half of
    the value, ``p_shared`` what the other warpgroup computed."""

    other_mma: Any
    k_right: Any
    p_shared: Any

    @staticmethod
    def of_both(kernel: MlaSm90, tiles) -> tuple["MlaOperands", "MlaOperands"]:
        """Return the operands of left and of right, in the same registers: what comes after the steps is the same code
        for both."""
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

    sums_at = 2 * WARPGROUP_ROWS  # where sums begin in the memory of both, behind the references

    def both_operands(self) -> tuple[Any, Any]:
        """Return the operands of left and of right."""
        return MlaOperands.of_both(self.kernel, self.tiles)

    def give_back_q(self, operands, work, consumer) -> None:
        """The unit's last products have been computed."""
        self.rings.q.release(work)

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        q_ring = self.rings.q
        consumer = cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) - 1
        left, right = self.both_operands()
        warp_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS
        step, work = Int32(0), Int32(0)
        tile = self.board.read(work)
        while tile.is_unit:
            keys = tile.keys
            # This meeting tells the compiler, as the one in Attend.run does, that the warps have converged.
            cute.arch.barrier(barrier_id=WARPGROUP_BARRIER + consumer, number_of_threads=WARPGROUP)
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
            tile = self.board.read(work)
        outputs = (addresses, geometry, self.output_scale, self.kernel.out_dtype)
        if const_expr(self.kernel.config.batch_invariant):
            # The tile after the last one says how many pieces there are.
            self.merge.run(tile.piece, Int32(0), *outputs)
            self.merge.hand_back(self.kernel.merging_warps(geometry), tile.piece)
        else:
            while tile.exists:
                self.merge.merge(tile, cute.arch.make_warp_uniform(cute.arch.warp_idx()) - WARPS, *outputs)
                work += 1
                tile = self.board.read(work)

    # Each warpgroup has one copy of a step: with copies for masked and last steps, instruction fetches made the first
    # three steps of a unit take 10000 to 16000 cycles instead of 6000 (H200, 2026-11-21). And branches only where no
    # product is under way: ptxas serialises all products where one of them meets a branch.

    @cute.jit
    def left_step(self, operands, q_stage, row, step, n, masked):
        """Take the left warpgroup through tiles A and B of step ``n`` of the unit, the ``step``-th of this CTA."""
        left, right, turns = self.rings.k, self.rings.v, self.rings.p
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile((2 * n + 1) * self.kernel.tile.n)
        self.scores(operands, q_stage, a, self.kernel.side_orders[0])
        warpgroup.wait_group(0)
        if row.needs_mask(masked):
            self.to_logits(operands.scores(), 2 * n + 1, row, True)
        self.softmax.step(operands.scores())
        operands.round_scores()
        self.write_p(operands, self.tiles.v, right.stage(a), operands.depth_v // BLOCK_COLUMNS)
        cute.arch.mbarrier_arrive(turns.full_barrier(step))
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(left.stage(a))
        warpgroup.wait_group(0)
        left.release(a)
        left.wait_full(b)
        turns.wait_released(step)
        right.release(b)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(left.stage(b), 0)
        warpgroup.wait_group(0)
        left.release(b)

    @cute.jit
    def right_step(self, operands, q_stage, row, step, n, masked, is_first):
        """Take the right warpgroup through tiles A and B of step ``n`` of the unit, the ``step``-th of this CTA.

        A weight of 1 is the only one that rounding to bfloat16 leaves alone. So in a unit's first step, which is all
        that short lists have, B's reference is its own largest logit, unless that is so far below A's that it hardly
        counts: the largest weights of both tiles are exact then.
        """
        left, right, turns = self.rings.k, self.rings.v, self.rings.p
        a, b = 2 * step, 2 * step + 1
        row = row.of_tile(2 * n * self.kernel.tile.n)
        self.scores(operands, q_stage, b, self.kernel.side_orders[1])
        warpgroup.wait_group(0)
        left.release(b)
        scores = operands.scores()
        if row.needs_mask(masked):
            self.to_logits(scores, 2 * n, row, True)
        largest = [self.softmax.maximum(scores, r) for r in range(scores.rows)]
        slack = Float32(-SLACK) if is_first else Float32(SLACK)
        right.wait_full(a)
        turns.wait_full(step)
        left.release(a)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(right.stage(a), right.stage(a))
        for r in cutlass.range_constexpr(scores.rows):
            self.softmax.choose_reference(r, largest[r], slack)
            self.softmax.exponentials(scores, r)
        operands.round_scores()
        self.write_p(operands, self.tiles.p, 0, 0)
        turns.release(step)
        warpgroup.wait_group(0)
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(right.stage(b))
        warpgroup.wait_group(0)
        right.release(b)

    def scores(self, operands, q_stage, step, sides: tuple[int, ...]) -> None:
        """Issue S of a tile, one side after the other as they come."""
        for i, side in enumerate(sides):
            ring = (self.rings.k, self.rings.v)[side]
            ring.wait_full(step)
            operands.issue_side(side, q_stage, ring.stage(step), i > 0)

    @cute.jit
    def store(self, operands, tile, work, warp_row, column_half, addresses, geometry):
        """Write this warp's rows, or leave them as a piece."""
        if const_expr(self.kernel.config.batch_invariant):
            self.rings.piece.wait_released(work)
        if tile.chunks == 1:
            rows = PackedRows.create(addresses, geometry, tile, self.output_scale, self.kernel.out_dtype.width // 8)
            self.store_rows(operands, rows, warp_row, column_half)
        else:
            self.store_piece(operands, tile.piece, warp_row, column_half)
        if const_expr(self.kernel.config.batch_invariant):
            self.rings.piece.fill(work)
        else:
            self.merge.announce(tile)

    @cute.jit
    def store_piece(self, operands, piece, warp_row, column_half) -> None:
        output = operands.output()
        if warp_row < self.merge.slots.rows:
            for r in cutlass.range_constexpr(output.rows):
                reference, total = self.softmax.partial(r, output.lanes_per_row)
                self.merge.store(piece, output, r, reference, total, warp_row, column_half)

    @cute.jit
    def write_p(self, operands, tiles, stage, block: cutlass.Constexpr[int]) -> None:
        """Write P to a column block of a stage of ``tiles``, and the references that it is relative to, before this
        lane's arrival gives the other warpgroup its turn."""
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
        """Go over to the other warpgroup's references."""
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.follow(r, self._reference(r, 1)[0])

    @cute.jit
    def add_sums(self) -> None:
        """Add the other warpgroup's sums to this one's: each has seen half of the keys."""
        mine, its = self._sums(0), self._sums(1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine[r] = self.softmax.row_sum[r]
        self.meet()
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.row_sum[r] = self.softmax.row_sum[r] + its[r]
        self.meet()

    def meet(self) -> None:
        """Wait for both warpgroups."""
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=2 * WARPGROUP)

    # Nobody writes what the other warpgroup may still read: references are written after the other's turn, which comes
    # after its reading, and the warpgroups meet before and after they read the sums.

    def _reference(self, r: int, other: int):
        """Say where the reference of a thread's row, or of that row in the other warpgroup, lies."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        row = (warp ^ (4 * other)) * WARP_ROWS + RowFragment.first_row() + RowFragment.row_offset(r)
        return self._state(row, 1)

    def _sums(self, other: int):
        """Say where the sums of a thread's rows, or of its like in the other warpgroup, lie."""
        thread = (cute.arch.thread_idx()[0] - WARPGROUP) ^ (other * WARPGROUP)
        return self._state(self.sums_at + thread * RowFragment.rows, RowFragment.rows)

    def _state(self, place, size: int):
        pointer = cute.recast_ptr(self.tiles.staging, dtype=Float32)
        return cute.make_tensor(pointer + place, cute.make_layout(size))


def build(config: MlaConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return MlaSm90(config), example_arguments((Addresses, DecodeGeometry), floats=3)
