"""Hopper prefill: TMA, specialised warps, wgmma; one persistent kernel for ragged and paged KV."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from hopwell.kernels.config import BLOCK_COLUMNS, SHARED_BYTES, WARPGROUP, WORK_STAGES, KvFetch, PrefillConfig
from hopwell.kernels.launch import Addresses, Geometry
from hopwell.kernels.parts import copy
from hopwell.kernels.parts.device import global_pointer, load_scale, shared_address
from hopwell.kernels.parts.epilogue import STAGING_BYTES
from hopwell.kernels.parts.fragment import RowFragment
from hopwell.kernels.parts.kv_source import (
    GROUP_ROWS,
    ContiguousBoxes,
    KvOperand,
    PageBoxes,
    PageColumnBoxes,
    PageRows,
)
from hopwell.kernels.parts.mask import IntervalMask
from hopwell.kernels.parts.scheduler import WORK_TILE_INTS, Board, TileSchedule
from hopwell.kernels.parts.score import ScoreMap
from hopwell.kernels.parts.softmax import OnlineSoftmax
from hopwell.kernels.pipeline import Edge, barrier_count, check_arrivals, create_rings
from hopwell.kernels.sm90.attend import Attend, SharedTiles
from hopwell.kernels.sm90.skip import SkippingAttend, SkipRule

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
SOURCES = {
    KvFetch.CONTIGUOUS: ContiguousBoxes,
    KvFetch.PAGE_BOXES: PageBoxes,
    KvFetch.PAGE_ROWS: PageRows,
}
K_WARP, V_WARP, Q_WARP, SCHEDULE_WARP = range(4)


class PrefillSm90:
    """Attention over query tiles of ``tile.m`` rows, in steps of ``tile.n`` keys from right to left.

    Warp roles
        warp 0 load_k      K tiles, as the KV source says
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      Q tiles
        warp 3 schedule    work tiles: which query rows, which keys, where they are
        warps 4.. attend   tile.m / 64 consumer warpgroups, each 64 query rows from Q K^T to the output

    Edges (``PrefillSm90(config).edges``, printed by ``pipeline.describe``)
        Q       load_q -> attend      released when the last S of the work tile has been computed
        K       load_k -> attend      released when S has been computed
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read

    Steady state: one step of two consumer warpgroups, A and B. "S" and "O" are matrix products on the tensor cores,
    which take about half of a step for each warpgroup; named barriers give the warpgroups turns at them.

        tensor cores   |  A: S(i) = Q K(i)^T | A: O += P(i+1) V(i+1) | B: S(i) = Q K(i)^T | B: O += P(i+1) V(i+1) |
        warpgroup A    |       waits         |  maximum of S(i)      | 2^(S(i) - reference), P(i) = round, sums   |
        warpgroup B    | 2^(S(i+1) - ...), P(i+1) = round, sums      |       waits        | maximum of S(i)       |
        load_k, load_v | fill the stages that the step before has released
    """

    def __init__(self, config: PrefillConfig):
        self.config = config
        self.tile = config.tile
        self.dtype, self.out_dtype = DTYPES[config.dtype], DTYPES[config.out_dtype]
        self.source = SOURCES[config.kv_fetch]
        if self.source is PageBoxes and config.columns != (config.head_dim_qk, config.head_dim_v):
            self.source = PageColumnBoxes
        self.warpgroups = config.consumer_warpgroups
        self.edges = self._edges()
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(
                f"{config.name} needs {self.shared_bytes} bytes of shared memory, {SHARED_BYTES} are there"
            )

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the stages of every edge, staging for the output, barriers."""
        stages = sum(edge.stages * edge.stage_bytes for edge in self.edges)
        return stages + 4 * self.warpgroups * STAGING_BYTES + 8 * self._barriers

    @property
    def _barriers(self) -> int:
        return barrier_count(self.edges) + 1  # one more for V tiles that need zeroed rows

    def _edges(self) -> tuple[Edge, ...]:
        c, t, consumers = self.config, self.tile, 4 * self.warpgroups
        roles = {"load_k": 1, "load_v": 1, "load_q": 1, "schedule": 1, "attend": consumers}
        roles["all others"] = sum(roles.values()) - 1
        edges = (
            Edge("Q", "load_q", "attend", t.q_stages, 1, consumers, t.m * c.columns[0] * 2),
            Edge("K", "load_k", "attend", t.kv_stages, 1, consumers, t.n * c.columns[0] * 2),
            Edge("V", "load_v", "attend", t.kv_stages, 1, consumers, t.n * c.columns[1] * 2),
            Edge("work", "schedule", "all others", WORK_STAGES, 1, consumers + 3, WORK_TILE_INTS * 4),
        )
        check_arrivals(edges, roles)
        return edges

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses: Addresses,
        geometry: Geometry,
        softmax_scale: Float32,
        output_scale: Float32,
        soft_cap: Float32,
        skip_softmax: Float32,
        programmatic_launch: Int32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. ``anchor`` is the output: it names the device, whose stream is used."""
        c, g, a = self.config, geometry, addresses
        q = self._row_boxes(a.query, (g.tokens, c.head_dim_qk, g.heads), (g.q_token, g.q_head), self.tile.m)
        k = self._kv_atom(a.key, c.head_dim_qk, g.kv_heads, (g.k_pages, g.k_rows), (g.k_page, g.k_head, g.k_row))
        v = self._kv_atom(a.value, c.head_dim_v, g.kv_heads, (g.v_pages, g.v_rows), (g.v_page, g.v_head, g.v_row))
        self.kernel(q, k, v, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax).launch(
            grid=[Int32(geometry.grid), 1, 1],
            block=[WARPGROUP * (self.warpgroups + 1), 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=programmatic_launch,
        )

    def _kv_atom(self, address, head_dim, heads, sizes, strides):
        """The TMA atom that the KV source issues, None where it issues none."""
        (pages, rows), (page, head, row) = sizes, strides
        if const_expr(self.source is ContiguousBoxes):
            return self._row_boxes(address, (rows, head_dim, heads), (row, head), self.tile.n)
        if const_expr(self.source is PageRows):
            return None
        slots = pages * (page // head)
        if const_expr(self.source is PageColumnBoxes):
            return self._row_boxes(address, (rows, head_dim, slots), (row, head), self.config.box_rows)
        blocks, groups = head_dim // BLOCK_COLUMNS, self.config.box_rows // GROUP_ROWS
        row, head = cute.assume(row, divby=8), cute.assume(head, divby=8)
        columns, steps = ((BLOCK_COLUMNS, blocks), (1, BLOCK_COLUMNS)) if blocks > 1 else (BLOCK_COLUMNS, 1)
        shape = ((GROUP_ROWS, Int32(rows) // GROUP_ROWS), columns, Int32(slots))
        layout = cute.make_layout(shape, stride=((row, GROUP_ROWS * row), steps, head))
        box = copy.swizzled_layout(self.dtype, self.config.box_rows, head_dim, columns_first=True)
        return self._tma_atom(address, layout, box, ((GROUP_ROWS, groups), columns))

    def _row_boxes(self, address, shape, strides, box_rows):
        """TMA boxes of box_rows x 64 columns over [rows, head_dim, heads]; strides (row, head) in elements."""
        rows, head_dim, heads = shape
        row, head = (cute.assume(stride, divby=8) for stride in strides)
        layout = cute.make_layout((Int32(rows), head_dim, Int32(heads)), stride=(row, 1, head))
        box = copy.swizzled_layout(self.dtype, box_rows, BLOCK_COLUMNS)
        return self._tma_atom(address, layout, box, (box_rows, BLOCK_COLUMNS))

    def _tma_atom(self, address, layout, box, tiler):
        tensor = cute.make_tensor(global_pointer(self.dtype, address, copy.CHUNK_BYTES), layout)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, tiler)[0]

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses: Addresses,
        geometry: Geometry,
        softmax_scale: Float32,
        output_scale: Float32,
        soft_cap: Float32,
        skip_softmax: Float32,
    ):
        smem = cutlass.memory.SmemAllocator()
        tiles = self._allocate_tiles(smem)
        slots = smem.allocate_tensor(Int32, cute.make_layout((WORK_TILE_INTS, WORK_STAGES)), copy.CHUNK_BYTES)
        barriers = smem.allocate_array(Int64, self._barriers)
        q_ring, k_ring, v_ring, work_ring = create_rings(barriers, self.edges)
        partial_barrier = barriers + barrier_count(self.edges)
        mask = IntervalMask(self.config.mask, Int32(geometry.window_left), Int32(geometry.chunk))
        board = Board(slots, work_ring)

        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_init(partial_barrier, 1)
            cute.arch.mbarrier_init_fence()
        for index, atom in ((K_WARP, k_atom), (V_WARP, v_atom), (Q_WARP, q_atom)):
            if const_expr(atom is not None):
                if warp == index:
                    cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        # Nothing above reads global memory: with PDL the grid before this one may still be writing it.
        cute.arch.griddepcontrol_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(self.tile.producer_registers)
            if warp == K_WARP:
                key = KvOperand.key(addresses, geometry, self.config)
                self.load_kv(k_atom, tiles.k, k_ring, partial_barrier, board, key)
            if warp == V_WARP:
                value = KvOperand.value(addresses, geometry, self.config)
                self.load_kv(v_atom, tiles.v, v_ring, partial_barrier, board, value)
            if warp == Q_WARP:
                self.load_q(q_atom, tiles.q, q_ring, board)
            if warp == SCHEDULE_WARP:
                TileSchedule(geometry, addresses, mask, self.tile.m, self.tile.n).publish(board)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            cute.arch.setmaxregister_increase(self.tile.consumer_registers)
            scale = load_scale(addresses.softmax_scale, softmax_scale)
            score = ScoreMap(self.config.score, scale, soft_cap, Int32(geometry.alibi_heads))
            softmax = OnlineSoftmax.create(score.softmax_scale, RowFragment.rows)
            scale = load_scale(addresses.output_scale, output_scale)
            parts = (self, tiles, (q_ring, k_ring, v_ring), board, mask, score, softmax, scale)
            if const_expr(self.config.skip_softmax):
                skip = SkipRule.create(skip_softmax, softmax.scale)
                attend = SkippingAttend(*parts, skip)
                attend.run(addresses, geometry)
                skip.report(addresses, self.config.v_parts)
            else:
                Attend(*parts).run(addresses, geometry)

    def _allocate_tiles(self, smem) -> SharedTiles:
        c, t = self.config, self.tile
        columns_first = self.source.columns_first
        layouts = (
            copy.swizzled_layout(self.dtype, t.m, c.columns[0], t.q_stages),
            copy.swizzled_layout(self.dtype, t.n, c.columns[0], t.kv_stages, columns_first=columns_first),
            copy.swizzled_layout(self.dtype, t.n, c.columns[1], t.kv_stages, columns_first=columns_first),
        )
        tensors = [smem.allocate_tensor(self.dtype, l.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=l.inner) for l in layouts]
        return SharedTiles(*tensors, smem.allocate(4 * self.warpgroups * STAGING_BYTES, copy.SWIZZLE_ROW_BYTES))

    @cute.jit
    def load_q(self, atom, tiles, ring, board):
        descriptor = copy.tma_descriptor(atom)
        step = Int32(0)
        tile = board.read(step)
        while tile.exists:
            ring.wait_empty(step)
            destination = shared_address(tiles[None, None, ring.stage(step)].iterator)
            with cute.arch.elect_one():
                barrier = ring.full_barrier(step)
                columns = self.config.columns[0]
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.tile.m * columns * 2)
                for block in cutlass.range_constexpr(columns // BLOCK_COLUMNS):
                    coordinates = (block * BLOCK_COLUMNS, tile.request.q_start + tile.first_row, tile.head)
                    offset = block * (self.tile.m * copy.SWIZZLE_ROW_BYTES)
                    copy.tma_load(descriptor, destination + offset, barrier, coordinates)
            step += 1
            tile = board.read(step)

    @cute.jit
    def load_kv(self, atom, tiles, ring, partial_barrier, board, operand: KvOperand):
        """Fill the stages of K or V for every work tile. A tile that needs zeroed rows uses ``partial_barrier``."""
        descriptor = copy.tma_descriptor(atom) if const_expr(atom is not None) else None
        shared = shared_address(tiles.iterator)
        step, work, partials = Int32(0), Int32(0), Int32(0)
        tile = board.read(work)
        while tile.exists:
            source = self.source.create(operand, tile, descriptor, shared, self.tile.n, self.config.box_rows)
            for n in cutlass.range(tile.keys.end - 1, tile.keys.begin - 1, -1, unroll=1):
                location = source.locate(n)
                ring.wait_empty(step)
                partials = source.fill(location, n, ring, step, partial_barrier, partials)
                step += 1
            work += 1
            tile = board.read(work)


def build(config: PrefillConfig) -> Any:
    """The traceable launch function of a config and example arguments to compile it with."""
    kernel = PrefillSm90(config)
    sizes = [cute.sym_int() for _ in range(3)]
    strides = (cute.sym_int64(), cute.sym_int64(), 1)
    anchor = cute.runtime.make_fake_tensor(kernel.out_dtype, sizes, stride=strides, assumed_align=copy.CHUNK_BYTES)
    integers = [kind(*[Int64(0)] * len(kind._fields)) for kind in (Addresses, Geometry)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return kernel, (anchor, *integers, *[Float32(0)] * 4, Int32(0), stream)
