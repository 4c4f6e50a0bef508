"""Hopper MLA decode: heads that share one latent key, whose first columns are the value as well."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from hopwell.kernels.config import BLOCK_COLUMNS, LANES, MMA_COLUMNS, WARPGROUP
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.mla_config import MlaConfig
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import shared_address
from hopwell.kernels.parts.epilogue import WARP_ROWS
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.kv_source import KvOperand
from hopwell.kernels.parts.mask import IntervalMask, ListMask, ListRow, LogitRow
from hopwell.kernels.parts.partial import Slots
from hopwell.kernels.parts.shares import NO_SHARE, SharedMerge
from hopwell.kernels.parts.split import ListSchedule, SplitSchedule, SplitTile
from hopwell.kernels.skeleton import example_arguments
from hopwell.kernels.sm90.attend import GROUP_BARRIER, Operands
from hopwell.kernels.sm90.decode import MERGE_BARRIER, DecodeAttend, DecodeSm90
from hopwell.kernels.sm90.mma import WARPGROUP_ROWS, issue_mma, make_mma

STATE_BYTES = LANES * RowFragment.rows * 2 * 4  # of a warp: references and sums of each lane's rows
MESSAGE_PLACE = 8 * STATE_BYTES  # behind those of both warpgroups
LEFT_P_BARRIER, RIGHT_P_BARRIER, SUMS_BARRIER = 1, 2, 3  # named barriers of both consumer warpgroups


class MlaSm90(DecodeSm90):
    """Attention of packed rows, 64 of them at most, in steps of two tiles of 64 keys, A and B, from right to left.

    64 x 512 of O are more registers than a warpgroup has, so two of them share the columns: left and right. Each
    computes S and P of one of a step's tiles and gives P to the other through shared memory. A key is there once, in
    two parts: the left half of the value's columns, and all to the right of them. Once S is known, nobody needs the
    last 64 columns of the right part, which belong to the key alone: that is where P goes.

    Warp roles
        warp 0 load_k      left parts of the keys
        warp 1 load_v      right parts
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    units of work
        warps 4..7 left    S and P of tile A; left half of O
        warps 8..11 right  S and P of tile B; right half of O

    Edges
        Q       load_q -> attend      released when the last S of the unit has been computed
        K       load_k -> attend      left parts, tiles A and B by turns: released by left when its product has been
                                      added to O, by right as soon as it does not need it
        V       load_v -> attend      right parts: released when P has been read from it
        work    schedule -> all       released as soon as it has been read
        named barriers hand over P: of A from left to right, of B from right to left, with the references of its rows

    Steady state: the warpgroups are half a step apart, so that one's softmax runs under the other's products. "S" are
    9 products of 64 columns, "O" one of 256.

        tensor cores   | left: S(A) | right: S(B) | O += P(A) A  both | O += P(B) B  both | left: S(A') | right: S(B')
        left           |   waits    | softmax of A: P(A) |      waits for P(B)    | waits       | softmax of A'
        right          |        waits             | softmax of B: P(B) |        waits           |
        loads          |                          | A', left part      | A', right part | B' |
    """

    staging_bytes = STATE_BYTES + 16  # and the merge's message
    step_tiles = 2

    @property
    def schedule_type(self) -> type[SplitSchedule]:
        return ListSchedule if self.config.sparse else SplitSchedule

    @property
    def mask_type(self) -> type[IntervalMask]:
        return ListMask if self.config.sparse else IntervalMask

    def consumer(self, *parts: Any) -> "MlaAttend":
        return MlaAttend(*parts)

    def loads(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        c, a, g = self.config, addresses, geometry
        strides, table = (g.k_page, g.k_head, g.k_row), (a.key_table, g.key_table_row, g.page_shift)
        dims, columns = c.kv_dims, c.columns
        kind = dict(is_value=True, streams=c.streams_kv, element_bytes=c.kv_bytes)
        left = KvOperand(a.key, *strides, *table, dims[0], columns[0], dims[0], **kind)
        right = KvOperand(a.key + 2 * dims[0], *strides, *table, dims[1], columns[1], dims[1], **kind)
        return left, right

    def _merge(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> SharedMerge:
        slots = Slots.create(addresses, geometry, self.config.head_dim_v)
        return SharedMerge(
            slots,
            WARPGROUP,
            2 * WARPGROUP,
            MERGE_BARRIER,
            shared_address(tiles.staging) + MESSAGE_PLACE,
        )

    def _kv_atoms(self, a: Addresses, g: DecodeGeometry):
        left, right = self.config.kv_dims
        rest = (g.kv_heads, (g.k_pages, g.k_rows), (g.k_page, g.k_head, g.k_row))
        return self._kv_atom(a.key, left, *rest), self._kv_atom(a.key + 2 * left, right, *rest)


@dataclass
class MlaOperands(Operands):
    """Matrix operands of one warpgroup: ``k`` and ``k_right`` are a key's two parts, ``v`` is this warpgroup's half of
    the value, ``p_shared`` what the other warpgroup computed."""

    other_mma: Any
    k_right: Any
    p_shared: Any

    @staticmethod
    def of(kernel: MlaSm90, tiles, is_left: bool) -> "MlaOperands":
        t, half, columns = kernel.tile, kernel.config.depth[1], kernel.config.columns
        value = (tiles.k, columns[0]) if const_expr(is_left) else (tiles.v, columns[1])
        common = Operands.of_value(kernel, tiles, 0, *value)
        source = warpgroup.OperandSource.SMEM
        shape = (WARPGROUP_ROWS, half)
        other_mma = make_mma(kernel.dtype, shape, a_source=source, b_major=OperandMajorMode.MN, warpgroups=1)
        qk, other = common.qk_mma.get_slice(0), other_mma.get_slice(0)
        last_block = cute.make_layout((t.m, t.n, t.kv_stages), stride=(1, t.n, t.n * columns[1]))
        p_tiles = cute.make_tensor(tiles.v.iterator + cute.crd2idx((0, half, 0), tiles.v.layout), tiles.v.layout)
        return MlaOperands(
            **vars(common),
            other_mma=other_mma,
            k_right=qk.make_fragment_B(qk.partition_B(tiles.v)),
            p_shared=other.make_fragment_A(other.partition_A(cute.composition(p_tiles, last_block))),
        )

    def issue_qk_left(self, q_stage, stage) -> None:
        q, k = self.q[None, None, None, q_stage], self.k[None, None, None, stage]
        issue_mma(self.qk_mma, self.s, q, k, self.depth_v, False)

    def issue_qk_right(self, q_stage, stage) -> None:
        q, k = self.q[None, None, None, q_stage], self.k_right[None, None, None, stage]
        issue_mma(self.qk_mma, self.s, q, k, self.depth_qk - self.depth_v, True, self.depth_v)

    def issue_other(self, stage) -> None:
        """O += P V with the other warpgroup's P."""
        p, v = self.p_shared[None, None, None, stage], self.v[None, None, None, stage]
        issue_mma(self.other_mma, self.o, p, v, self.tile_n, True)


@dataclass
class MlaAttend(DecodeAttend):
    """The two consumer warpgroups."""

    @cute.jit
    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        if cute.arch.make_warp_uniform(cute.arch.warp_idx() // 4) == 1:
            self.attend(addresses, geometry, True)
        else:
            self.attend(addresses, geometry, False)

    @cute.jit
    def attend(self, addresses, geometry, is_left: cutlass.Constexpr[bool]):
        q_ring, *_ = self.rings
        operands = MlaOperands.of(self.kernel, self.tiles, is_left)
        step_function = self.left_step if const_expr(is_left) else self.right_step
        warp_row = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 * WARP_ROWS
        kv_step, work, share = Int32(0), Int32(0), Int32(NO_SHARE)
        rest = (Int32(geometry.row_tiles), addresses, geometry, self.output_scale, self.kernel.out_dtype)
        exists, done = True, SplitTile.nothing()
        while exists:
            tile = self.board.read(work)
            share = self.merge.help(share, done, tile, *rest)
            exists = tile.exists
            if exists:
                keys = tile.keys
                # As in Attend.run: tells the compiler that the warps have converged.
                cute.arch.barrier(barrier_id=GROUP_BARRIER + 1 - is_left, number_of_threads=WARPGROUP)
                self.softmax.reset()
                operands.o.fill(0.0)
                q_ring.wait_full(work)
                if keys.begin < keys.end:
                    row = self.logit_row(tile, warp_row)
                    for n in cutlass.range(keys.end - 1, keys.begin - 1, -1, unroll=1):
                        step_function(operands, q_ring.stage(work), row, kv_step, n, n >= keys.full_end)
                        kv_step += 2
                q_ring.release(work)
                if keys.begin < keys.end:
                    self.add_sums()
                self.store(operands, tile, work, warp_row, Int32(1 - is_left), addresses, geometry)
            done = tile
            work += 1

    def logit_row(self, tile, warp_row) -> LogitRow:
        request, group = tile.request, Int32(self.geometry.group)
        if const_expr(self.kernel.config.sparse):
            table, table_row = self.addresses.key_table, self.geometry.key_table_row
            positions = (request.first_position,) * RowFragment.rows
            return ListRow(positions, request.kv_len, Float32(0.0), table, table_row, request.index)
        first = tile.first_row + warp_row + RowFragment.first_row()
        tokens = [(first + RowFragment.row_offset(r)) // group for r in range(RowFragment.rows)]
        positions = tuple(request.first_position + cutlass.min(token, request.q_len - 1) for token in tokens)
        return LogitRow(positions, request.kv_len, Float32(0.0))

    # One copy of a step for each warpgroup: with copies for masked and last steps, instruction fetches made the first
    # three steps of a unit take 10000 to 16000 cycles instead of 6000 (H200, 2026-11-21). And branches only where no
    # product is under way: ptxas serialises all products where one of them meets a branch.

    @cute.jit
    def left_step(self, operands, q_stage, row, a, n, masked):
        """Tiles A and B of step ``n``, ``a`` and a + 1 of the loads."""
        _, left, right, *_ = self.rings
        b = a + 1
        self.scores(operands, q_stage, a)
        warpgroup.wait_group(0)
        if masked:
            self.to_logits(operands.scores(), 2 * n + 1, row, True)
        self.softmax.step(operands.scores())
        operands.round_scores()
        self.hand_over(operands, right.stage(a), LEFT_P_BARRIER)
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(left.stage(a))
        warpgroup.wait_group(0)
        left.release(a)
        left.wait_full(b)
        right.wait_full(b)
        cute.arch.barrier(barrier_id=RIGHT_P_BARRIER, number_of_threads=2 * WARPGROUP)
        self.follow_other()
        self.rescale(operands)
        operands.issue_other(left.stage(b))
        warpgroup.wait_group(0)
        left.release(b)
        right.release(b)

    @cute.jit
    def right_step(self, operands, q_stage, row, a, n, masked):
        """Tiles A and B of step ``n``, ``a`` and a + 1 of the loads."""
        _, left, right, *_ = self.rings
        b = a + 1
        self.scores(operands, q_stage, b)
        left.wait_full(a)
        right.wait_full(a)
        cute.arch.barrier(barrier_id=LEFT_P_BARRIER, number_of_threads=2 * WARPGROUP)
        left.release(a)
        self.follow_other()
        warpgroup.wait_group(0)
        left.release(b)
        if masked:
            self.to_logits(operands.scores(), 2 * n, row, True)
        self.rescale(operands)
        operands.issue_other(left.stage(a))
        self.softmax.step(operands.scores())
        operands.round_scores()
        self.hand_over(operands, right.stage(b), RIGHT_P_BARRIER)
        warpgroup.wait_group(0)
        right.release(a)
        self.rescale(operands)
        operands.issue_pv(left.stage(b))
        warpgroup.wait_group(0)
        right.release(b)

    def scores(self, operands, q_stage, step) -> None:
        """Issue S of a tile, part by part as they come."""
        _, left, right, *_ = self.rings
        left.wait_full(step)
        operands.issue_qk_left(q_stage, left.stage(step))
        right.wait_full(step)
        operands.issue_qk_right(q_stage, right.stage(step))

    @cute.jit
    def store_piece(self, operands, rows, piece, warp_row, column_group) -> None:
        output = operands.output()
        if warp_row < self.merge.slots.rows:
            for r in cutlass.range_constexpr(output.rows):
                reference, total = self.softmax.partial(r, output.lanes_per_row)
                if output.first_column() + column_group == 0:
                    row = warp_row + output.first_row() + output.row_offset(r)
                    self.merge.store_statistics(piece, row, reference, total)
            self.merge.store_output(piece, output, warp_row, column_group)

    @cute.jit
    def hand_over(self, operands, stage, barrier: cutlass.Constexpr[int]) -> None:
        """Give P and the references that it is relative to to the other warpgroup."""
        t, columns = self.kernel.tile, self.kernel.config.columns[1]
        warp_row = cute.arch.warp_idx() % 4 * WARP_ROWS
        lane = cute.arch.lane_idx()
        base = shared_address(self.tiles.v.iterator) + stage * (t.n * columns * 2)
        block = self.kernel.config.depth[1] // BLOCK_COLUMNS
        words = cute.recast_tensor(operands.p, cutlass.Uint32)
        row = warp_row + lane % WARP_ROWS
        line = copy.block_row(row, block, t.n, columns, self.kernel.source.columns_first)
        for k in cutlass.range_constexpr(t.n // MMA_COLUMNS):
            address = copy.swizzled_chunk(base, line, 2 * k + lane // WARP_ROWS)
            copy.store_matrix_x4(address, [words[4 * k + i] for i in range(4)])
        mine = self._state(0, 0)
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine[r] = self.softmax.reference[r]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def follow_other(self) -> None:
        """Go over to the other warpgroup's references."""
        its = self._state(0, 1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.follow(r, its[r])

    @cute.jit
    def add_sums(self) -> None:
        """Add the other warpgroup's sums to this one's: each has seen half of the keys."""
        mine, its = self._state(1, 0), self._state(1, 1)
        for r in cutlass.range_constexpr(RowFragment.rows):
            mine[r] = self.softmax.row_sum[r]
        cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=2 * WARPGROUP)
        for r in cutlass.range_constexpr(RowFragment.rows):
            self.softmax.row_sum[r] = self.softmax.row_sum[r] + its[r]

    def _state(self, kind: int, other: int):
        """What a thread, or its like in the other warpgroup, tells of its rows: references (0) or sums (1)."""
        threads = 2 * WARPGROUP
        thread = (cute.arch.thread_idx()[0] - WARPGROUP) ^ (other * WARPGROUP)
        pointer = cute.recast_ptr(self.tiles.staging, dtype=Float32)
        place = (kind * threads + thread) * RowFragment.rows
        return cute.make_tensor(pointer + place, cute.make_layout(RowFragment.rows))


def build(config: MlaConfig) -> Any:
    """The traceable launch function of a config and example arguments to compile it with."""
    kernel = MlaSm90(config)
    return kernel, example_arguments((Addresses, DecodeGeometry), floats=3)
