"""Hopper decode: the rows that share a KV head against chunks of a paged cache, and the merge, in one launch."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config import BLOCK_COLUMNS, LANES, WARPGROUP
from hopwell.kernels.decode_config import MERGE_REGISTERS, WIDEN_REGISTERS, DecodeConfig
from hopwell.kernels.launch import Addresses, DecodeGeometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import load_scale, shared_address
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.kv_source import KvOperand, PageRows
from hopwell.kernels.parts.mask import DraftMask, DraftRow, IntervalMask, LogitRow
from hopwell.kernels.parts.packed import PackedRows
from hopwell.kernels.parts.partial import Merge, Slots
from hopwell.kernels.parts.score import ScoreMap
from hopwell.kernels.parts.softmax import OnlineSoftmax
from hopwell.kernels.parts.split import SplitSchedule, SplitTile, UnitKeeper
from hopwell.kernels.parts.widen import Widen
from hopwell.kernels.pipeline import Edge
from hopwell.kernels.problem import MaskKind, ScoreKind
from hopwell.kernels.skeleton import example_arguments
from hopwell.kernels.sm90.attend import Attend
from hopwell.kernels.sm90.kernel import K_WARP, Q_WARP, SCHEDULE_WARP, V_WARP, AttentionSm90

MERGE_BARRIER = 7  # named barrier of the merge warpgroup


class DecodeSm90(AttentionSm90):
    """Attention of packed rows, ``tile.m`` of a KV head at most, in steps of ``tile.n`` keys from right to left.

    Warp roles
        warp 0 load_k      K tiles, as the KV source says
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    units of work: which rows, which chunk of which request's keys
        warps 4.. attend   one consumer warpgroup, or two that share V's columns: from Q K^T to the output or to a
                           piece of it
        next four widen    of 8-bit caches: turns loaded tiles into 16-bit ones
        last four merge    gives units their slots and merges pieces, so that its atomics and reads cost attend nothing;
                           where attend is two warpgroups, they do it themselves

    Edges
        Q       load_q -> attend      released when the last S of the unit has been computed
        K       load_k -> attend      released when S has been computed
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        raw K, raw V       of 8-bit caches: load_k, load_v -> widen, and K, V: widen -> attend
        piece   attend -> merge       released once for each unit when its slot may be written; full when it is

    Steady state: memory is the limit, and all that attend does for a step of keys has to take less time than their
    loads. Between units, loads run ahead by as many tiles as there are stages.

        memory         |  K(i-2)  |  V(i-2)  |  K(i-3)  |  V(i-3)  |  K(i-4)  |  V(i-4)  | ...
        attend         |  S(i), O += P(i+1) V(i+1) | softmax of S(i) | waits | S(i-1), O += P(i) V(i) | softmax ...
    """

    work_tile = SplitTile

    @property
    def schedule_type(self) -> type[SplitSchedule]:
        return SplitSchedule

    @property
    def mask_type(self) -> type[IntervalMask]:
        return DraftMask if self.config.mask is MaskKind.DRAFT else IntervalMask

    @property
    def work_stages(self) -> int:
        """Units in hand. Loads of 8-bit caches run more than a unit ahead; otherwise a unit that waits in hand is one
        that another CTA could begin with. What that saves could not be told from noise (H200, 2026-11-21)."""
        return 2 if self.is_raw else 1

    @property
    def more_roles(self) -> dict[str, int]:
        return {role: 4 for role, there in (("widen", self.is_raw), ("merge", self.config.has_merge_role)) if there}

    def _more_edges(self) -> tuple[Edge, ...]:
        edges, t, row_bytes = [], self.tile, self.config.head_dim_qk
        if self.is_raw:
            lanes = LANES if self.source is PageRows else 1
            stages = (t.raw_stages, 1, 4, t.n * row_bytes, lanes, lanes)
            edges += [Edge("raw K", "load_k", "widen", *stages), Edge("raw V", "load_v", "widen", *stages)]
        if self.config.has_merge_role:
            edges.append(Edge("piece", "attend", "merge", 1, 4 * self.warpgroups, 4, 0))
        return tuple(edges)

    def _merge(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Merge:
        """The last warpgroup, or else all that attend."""
        first, warpgroups = (len(self.config.registers) - 1, 1) if self.config.has_merge_role else (1, self.warpgroups)
        slots = Slots.create(addresses, geometry, self.config.head_dim_v)
        return Merge(slots, first * WARPGROUP, warpgroups * WARPGROUP, MERGE_BARRIER)

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses: Addresses,
        geometry: DecodeGeometry,
        softmax_scale: Float32,
        output_scale: Float32,
        output_factor: Float32,
        programmatic_launch: Int32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. ``anchor`` is read by nobody: its device is the one to launch on."""
        k, v = self._kv_atoms(addresses, geometry)
        self.kernel(k, v, addresses, geometry, softmax_scale, output_scale, output_factor).launch(
            grid=[Int32(geometry.grid), 1, 1],
            block=[WARPGROUP * len(self.config.registers), 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=programmatic_launch,
        )

    @cute.kernel
    def kernel(
        self,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses: Addresses,
        geometry: DecodeGeometry,
        softmax_scale: Float32,
        output_scale: Float32,
        output_factor: Float32,
    ):
        tiles, rings, board, partial_barriers = self._allocate(cutlass.memory.SmemAllocator())
        mask = self.mask_type(self.config.mask, Int32(geometry.window_left), Int32(1))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom)), partial_barriers)

        if warp < 4:
            self.set_registers(self.tile.producer_registers)
            schedule = self._schedule(addresses, geometry, mask, tiles, rings)
            if warp == SCHEDULE_WARP:
                schedule.publish(board)
            else:
                scale = self._output_scale(addresses, output_scale, output_factor)
                self.load(
                    warp, (k_atom, v_atom), addresses, geometry, tiles, rings, partial_barriers, board, schedule, scale
                )
            cute.arch.griddepcontrol_launch_dependents()
        elif warp >= 4 * (len(self.config.registers) - self.config.has_merge_role):
            if const_expr(self.config.has_merge_role):
                self.set_registers(MERGE_REGISTERS)
                scale = self._output_scale(addresses, output_scale, output_factor)
                merge = self._merge(addresses, geometry, tiles)
                merge.run(board, rings[-1], addresses, geometry, scale, self.out_dtype)
        elif warp >= 4 * (1 + self.warpgroups):
            self.set_registers(WIDEN_REGISTERS)
            self.widen(tiles, rings, board)
        else:
            self.set_registers(self.tile.consumer_registers)
            scale = load_scale(addresses.softmax_scale, softmax_scale)
            score = ScoreMap(ScoreKind.SCALED, scale, Float32(0.0), Int32(1))
            softmax = OnlineSoftmax.create(scale, RowFragment.rows)
            scale = self._output_scale(addresses, output_scale, output_factor)
            merge = self._merge(addresses, geometry, tiles)
            parts = (self, tiles, rings, board, mask, score, softmax, scale, merge, addresses, geometry)
            self.consumer(*parts).run(addresses, geometry)

    def consumer(self, *parts: Any) -> "DecodeAttend":
        """What the consumer warpgroups run."""
        return DecodeAttend(*parts)

    def _schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, tiles, rings) -> SplitSchedule:
        sizes = (self.tile.m, self.tile.n * self.step_tiles, self.config.chunk_tokens)
        return self.schedule_type(geometry, addresses, mask, *sizes, self.keeper(addresses, geometry, tiles, rings))

    def keeper(self, addresses: Addresses, geometry: DecodeGeometry, tiles, rings) -> UnitKeeper:
        """What the warp that schedules does besides."""
        return UnitKeeper()

    @cute.jit
    def load(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, board, schedule, scale):
        """The other warps of the first warpgroup: K, V and Q."""
        operands = self.loads(addresses, geometry)
        if warp == K_WARP:
            self.load_part(0, atoms, operands, tiles, rings, partial_barriers, board)
        if warp == V_WARP:
            self.load_part(1, atoms, operands, tiles, rings, partial_barriers, board)
        if warp == Q_WARP:
            step = Int32(0)
            tile = board.read(step)
            while tile.exists:
                self.load_q(addresses, geometry, tile, tiles.q, rings[0], step)
                step += 1
                tile = board.read(step)

    def load_part(self, part: int, atoms, operands, tiles, rings, partial_barriers, board) -> None:
        """K (0) or V (1)."""
        shared, ring = self._loaded(part, tiles, rings)
        self.load_kv(atoms[part], shared, ring, partial_barriers + part, board, operands[part])

    def loads(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        """What the two loading warps fetch."""
        return KvOperand.key(addresses, geometry, self.config), KvOperand.value(addresses, geometry, self.config)

    def _output_scale(self, addresses: Addresses, output_scale, output_factor):
        return load_scale(addresses.output_scale, output_scale) * load_scale(addresses.output_factor, output_factor)

    def _loaded(self, part: int, tiles, rings):
        """Where the loads of K (0) or V (1) go, and the ring of its stages."""
        if self.is_raw:
            return shared_address((tiles.raw_k, tiles.raw_v)[part]), rings[3 + part]
        return shared_address((tiles.k, tiles.v)[part].iterator), rings[1 + part]

    @cute.jit
    def widen(self, tiles, rings, board):
        """Turn 8-bit tiles into those that attend multiplies, K and V by turns."""
        if const_expr(self.is_raw):
            _, k_ring, v_ring, raw_k_ring, raw_v_ring, *_ = rings
            c, n = self.config, self.tile.n
            sizes = (n, c.head_dim_qk, n * c.columns[0] * 2, c.kv_type, self.dtype)
            k = Widen(shared_address(tiles.raw_k), shared_address(tiles.k.iterator), *sizes, zero_outside=False)
            v = Widen(shared_address(tiles.raw_v), shared_address(tiles.v.iterator), *sizes, zero_outside=True)
            step, work = Int32(0), Int32(0)
            tile = board.read(work)
            while tile.exists:
                for i in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                    begin = cutlass.max(tile.keys.first_key - i * n, 0)
                    end = cutlass.min(tile.request.kv_len - i * n, n)
                    for widen, raw_ring, ring in ((k, raw_k_ring, k_ring), (v, raw_v_ring, v_ring)):
                        raw_ring.wait_full(step)
                        ring.wait_empty(step)
                        widen.tile(raw_ring.stage(step), ring.stage(step), begin, end)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        ring.fill(step)
                        raw_ring.release(step)
                    step += 1
                work += 1
                tile = board.read(work)

    @cute.jit
    def load_q(self, addresses: Addresses, geometry: DecodeGeometry, tile, tiles, ring, step):
        """Rows by 16-byte copies: a row is a head of a token, and the next one may be anywhere. Rows that no token has
        become zeros."""
        blocks, rows_at_once = self.config.q_columns // BLOCK_COLUMNS, LANES // copy.CHUNKS_PER_ROW
        chunk = cute.arch.lane_idx() % copy.CHUNKS_PER_ROW
        ring.wait_empty(step)
        destination = shared_address(tiles[None, None, ring.stage(step)].iterator)
        rows = PackedRows.create(addresses, geometry, tile, Float32(1.0), 2)
        for first in cutlass.range(0, self.tile.m, rows_at_once, unroll=4):
            row = first + cute.arch.lane_idx() // copy.CHUNKS_PER_ROW
            source = rows.query(cutlass.min(row, cutlass.max(rows.count - 1, 0)), tile.request.q_start)
            source += chunk * copy.CHUNK_BYTES
            target = copy.swizzled_chunk(destination, row, chunk)
            for block in cutlass.range_constexpr(blocks):
                wanted = row < rows.count and block * BLOCK_COLUMNS + chunk * 8 < self.config.head_dim_qk
                from_block = source + block * copy.SWIZZLE_ROW_BYTES
                to_block = target + block * (self.tile.m * copy.SWIZZLE_ROW_BYTES)
                copy.async_copy_or_zero(to_block, from_block, wanted)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(ring.full_barrier(step))


@dataclass
class DecodeAttend(Attend):
    merge: Merge
    addresses: Addresses
    geometry: DecodeGeometry

    def run(self, addresses: Addresses, geometry: DecodeGeometry):
        super().run(addresses, geometry)
        if not self.kernel.config.has_merge_role:
            self.merge.hand_back(Int32(geometry.grid))

    def logit_row(self, tile: SplitTile, warp_row) -> LogitRow:
        request = tile.request
        first = tile.first_row + warp_row + RowFragment.first_row()
        if const_expr(self.mask.kind is not MaskKind.DRAFT):
            return LogitRow((request.first_position,) * RowFragment.rows, request.kv_len, Float32(0.0))
        tokens = []
        for r in range(RowFragment.rows):
            token = (first + RowFragment.row_offset(r)) // Int32(self.geometry.group)
            tokens.append(cutlass.max(cutlass.min(token, request.q_len - 1), 0))
        return DraftRow.create(request, tokens, self.addresses, self.geometry)

    @cute.jit
    def store(self, operands, tile: SplitTile, work, warp_row, column_group, addresses, geometry):
        """Write this warp's rows, or leave them as a piece."""
        out_dtype = self.kernel.out_dtype
        rows = PackedRows.create(addresses, geometry, tile, self.output_scale, out_dtype.width // 8)
        if const_expr(self.kernel.config.has_merge_role):
            self.rings[-1].wait_released(work)
        else:
            self.merge.prepare(tile)
            self.merge.meet()
        if tile.chunks == 1:
            self.store_rows(operands, rows, warp_row, column_group)
        else:
            self.store_piece(operands, rows, tile.piece, warp_row, column_group)
        if const_expr(self.kernel.config.has_merge_role):
            self.rings[-1].fill(work)
        else:
            self.merge.meet()
            if tile.chunks > 1:
                self.merge.complete(tile, rows, out_dtype)

    @cute.jit
    def store_rows(self, operands, rows: PackedRows, warp_row, column_group) -> None:
        output = operands.output()
        for r in cutlass.range_constexpr(output.rows):
            row = warp_row + output.first_row() + output.row_offset(r)
            reference, total = self.softmax.partial(r, output.lanes_per_row)
            if row < rows.count:
                first_column = output.first_column()
                factor = rows.finish(row, reference, total, first_column == 0 and column_group == 0)
                for c in cutlass.range_constexpr(0, self.columns // output.lanes_per_row, 2):
                    column = column_group * self.columns + first_column + output.column_offset(c)
                    scaled = [output.get(r, c) * factor, output.get(r, c + 1) * factor]
                    copy.store_rounded(rows.output(row, column), scaled, self.kernel.out_dtype)

    @cute.jit
    def store_piece(self, operands, rows: PackedRows, piece, warp_row, column_group) -> None:
        output = operands.output()
        for r in cutlass.range_constexpr(output.rows):
            row = warp_row + output.first_row() + output.row_offset(r)
            pairs = [
                (output.get(r, c), output.get(r, c + 1)) for c in range(0, self.columns // output.lanes_per_row, 2)
            ]
            reference, total = self.softmax.partial(r, output.lanes_per_row)
            if row < rows.count:
                self.merge.slots.store(piece, row, pairs, reference, total, output.first_column(), column_group)

    @property
    def columns(self) -> int:
        """Of the output, in this warpgroup."""
        return self.kernel.config.head_dim_v // self.kernel.config.v_parts


def build(config: DecodeConfig) -> Any:
    """The traceable launch function of a config and example arguments to compile it with."""
    kernel = DecodeSm90(config)
    return kernel, example_arguments((Addresses, DecodeGeometry), floats=3)
