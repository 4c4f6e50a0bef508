"""Base of attention kernels on all architectures: shared-memory tiles, edges and load warps."""

from dataclasses import replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from hopwell.kernels.config.base import BLOCK_COLUMNS, WORK_STAGES, KernelConfig, KvFetch
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP
from hopwell.kernels.launch.arguments import Addresses, Geometry, ScaledAddresses, ScaledGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import device_struct, global_pointer, shared_address
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles, barrier_count, create_rings
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import ContiguousBoxes, KvOperand, KvSource, PageBoxes, PageColumnBoxes
from hopwell.kernels.parts.partition.tiles import QueryTile, WorkQueue, WorkTile
from hopwell.kernels.support import FAMILY_BUILDS

DTYPES = {
    "nvfp4": cutlass.Float4E2M1FN,
    "e4m3": cutlass.Float8E4M3FN,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
}
SOURCES = {
    KvFetch.CONTIGUOUS: ContiguousBoxes,
    KvFetch.PAGE_BOXES: PageBoxes,
    KvFetch.PAGE_ROWS: PageRows,
    KvFetch.TOPK_ROWS: PageRows,
}
LOADERS = 2  # warps that load K and V


@device_struct
class SharedTiles:
    """Tiles in shared memory: Q [query rows, dim, stages], K and V [tile.n, dim, stages], staging for the output."""

    q: Any
    k: Any
    v: Any
    staging: Any
    loaded: tuple  # K and V as in global memory: the tiles above unless they are converted
    scales: tuple  # block scales of K and V beside their tiles, if loaders copy them
    p: Any = None  # P [rows, keys, tiles], if it passes through shared memory


class AttentionKernel:
    """Base kernel with dedicated warps that load tiles of Q, K and V for the multiplying warps."""

    work_tile: type[WorkTile] = QueryTile  # type of the tiles that the scheduler publishes
    work_stages = WORK_STAGES
    staging_bytes = 0  # shared memory per storing warp, for its own use
    p_tiles = 0  # tiles of P in shared memory, with rows of 128 bytes
    more_bytes = 0  # shared memory for tiles without an edge
    step_tiles = 1  # K and V tiles per step

    def __init__(self, config: KernelConfig):
        self.config = config
        self.tile, self.layout = config.tile, config.layout
        self.dtype, self.out_dtype = DTYPES[config.dtype], DTYPES[config.out_dtype]
        # The element type for TMA: 8-bit elements travel in pairs, as 16-bit elements of half the number of columns.
        self.word = self.dtype if self.dtype.width == 16 else cutlass.BFloat16
        self.source = self.kv_source()
        self.edges = self._edges(Roles(self.roles))
        if self.shared_bytes > config.most_shared_bytes:
            raise ValueError(
                f"{config.name} needs {self.shared_bytes} bytes of shared memory, {config.most_shared_bytes} are there"
            )

    def kv_source(self) -> type[KvSource]:
        """Return the KV source: the way that tiles of K and V reach shared memory."""
        c = self.config
        boxes_of_columns = c.kv_fetch is KvFetch.PAGE_BOXES and c.layout.columns != c.layout.kv_dims
        return PageColumnBoxes if boxes_of_columns else SOURCES[c.kv_fetch]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA: the stages of every edge, staging for the output, barriers, and others."""
        stages = sum(edge.stages * edge.stage_bytes for edge in self.edges)
        return stages + self.storing_warps * self.staging_bytes + self.more_bytes + 8 * self._barriers

    @property
    def _barriers(self) -> int:
        return barrier_count(self.edges) + LOADERS  # one more per loader, for tiles that need zeroed rows

    @property
    def q_rows(self) -> int:
        """Query rows of a stage of Q."""
        return self.tile.m

    @property
    def q_box_rows(self) -> int:
        """Rows of a TMA box of Q."""
        return self.q_rows

    @property
    def storing_warps(self) -> int:
        """Number of warps that write results."""
        raise NotImplementedError

    @property
    def roles(self) -> dict[str, int]:
        """Number of warps of each role."""
        raise NotImplementedError

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        """Return the edges q, k, v and work, and any other edges of the kernel."""
        raise NotImplementedError

    @property
    def copies_rows(self) -> bool:
        """Whether lanes of the load warps copy rows of K and V, instead of TMA."""
        return issubclass(self.source, PageRows)

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Bytes of the block scales that loaders copy beside a tile of K, and of V."""
        if not self.config.copies_scales:
            return 0, 0
        k, v = (self.tile.n * blocks for blocks in self.layout.scale_blocks)
        return k, v

    @property
    def kv_rows(self) -> tuple[int, int]:
        """Keys of a stage of K, and of V."""
        return self.tile.n, self.tile.n

    @property
    def stage_bytes(self) -> tuple[int, int]:
        """Bytes of a stage of K, and of V, with their block scales."""
        sizes = zip(self.kv_rows, self.layout.stage_columns, self.scale_bytes, strict=True)
        k, v = (rows * columns * HALFWORD_BYTES + scales for rows, columns, scales in sizes)
        return k, v

    def _kv_edges(self, roles: Roles, *readers: tuple[str, Reader]) -> list[Edge]:
        """Return the edges from the load warps to the role that reads K, and to the role that reads V."""
        edges = []
        for i, (name, (consumer, reader)) in enumerate(zip(("k", "v"), readers, strict=True)):
            arrivals = reader.arrivals(
                copies_rows=self.copies_rows, writes_zeros=name == "v", copies_scales=self.config.copies_scales
            )
            stages, size = self.tile.loaded_stages[i], self.stage_bytes[i]
            edges.append(roles.edge(name, f"load_{name}", consumer, stages, size, **arrivals))
        return edges

    def _work_edge(self, roles: Roles, producer: str = "schedule") -> Edge:
        """Return the work queue's edge to all other warps that read it."""
        size = work_queue_stride(self.work_tile.INTS) * 4
        return roles.edge("work", producer, "all others", self.work_stages, size, consumer_lanes=LANES)

    def _kv_atom(self, address, head_dim, heads, sizes, strides, stage_rows: int, columns: int = BLOCK_COLUMNS):
        """Return the TMA atom that the KV source issues, or None if it issues none. Boxes of contiguous tokens have
        ``stage_rows``, and boxes of column blocks have ``columns``."""
        (pages, rows), (page, head, row) = sizes, strides
        if const_expr(self.source is ContiguousBoxes):
            return self._row_boxes(address, (rows, head_dim, heads), (row, head), stage_rows)
        if const_expr(self.copies_rows):
            return None
        slots = pages * (page // head)
        if const_expr(self.source is PageColumnBoxes):
            return self._row_boxes(address, (rows, head_dim, slots), (row, head), self.config.box_rows, columns)
        blocks, core_matrices = head_dim // BLOCK_COLUMNS, self.config.box_rows // ATOM_ROWS
        row, head = cute.assume(row, divby=8), cute.assume(head, divby=8)
        columns, steps = ((BLOCK_COLUMNS, blocks), (1, BLOCK_COLUMNS)) if blocks > 1 else (head_dim, 1)
        shape = ((ATOM_ROWS, Int32(rows) // ATOM_ROWS), columns, Int32(slots))
        layout = cute.make_layout(shape, stride=((row, ATOM_ROWS * row), steps, head))
        box = copy.swizzled_layout(self.word, self.config.box_rows, head_dim, columns_first=True)
        return self._tma_atom(address, layout, box, ((ATOM_ROWS, core_matrices), columns))

    def _row_boxes(self, address, shape, strides, box_rows, columns: int = BLOCK_COLUMNS):
        """Make TMA boxes of box_rows x ``columns`` over [rows, head_dim, heads]; strides (row, head) in elements."""
        rows, head_dim, heads = shape
        row, head = (cute.assume(stride, divby=8) for stride in strides)
        layout = cute.make_layout((Int32(rows), head_dim, Int32(heads)), stride=(row, 1, head))
        box = copy.swizzled_layout(self.word, box_rows, columns)
        return self._tma_atom(address, layout, box, (box_rows, columns))

    def _tma_atom(self, address, layout, box, tiler):
        tensor = cute.make_tensor(global_pointer(self.word, address, copy.VECTOR_BYTES), layout)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, tiler)[0]

    def _kv_atoms(self, a: Addresses, g):
        """Make the TMA atoms of K and V."""
        (k_dim, v_dim), columns = self.layout.kv_dims, [min(each, BLOCK_COLUMNS) for each in self.layout.columns]
        k_strides = self.layout.kv_strides(g.k_page, g.k_head, g.k_row)
        v_strides = self.layout.kv_strides(g.v_page, g.v_head, g.v_row)
        k_rows, v_rows = self.kv_rows
        k = self._kv_atom(a.key, k_dim, g.kv_heads, (g.k_pages, g.k_rows), k_strides, k_rows, columns[0])
        v = self._kv_atom(a.value, v_dim, g.kv_heads, (g.v_pages, g.v_rows), v_strides, v_rows, columns[1])
        return k, v

    def _allocate(self, smem):
        """Allocate the tiles, rings, work queue and the loaders' barriers for zeroed rows."""
        tiles = self._allocate_tiles(smem)
        slots = smem.allocate_tensor(Int32, self._work_queue_layout(), copy.VECTOR_BYTES)
        barriers = smem.allocate_array(Int64, self._barriers)
        rings = create_rings(barriers, self.edges)
        work_queue = WorkQueue(slots, rings.work, self.work_tile)
        return tiles, rings, work_queue, barriers + barrier_count(self.edges)

    def _work_queue_layout(self):
        """Return a layout whose slots are 16-byte aligned, so that a vector load of one slot never touches the next."""
        ints = self.work_tile.INTS
        return cute.make_layout((ints, self.work_stages), stride=(1, work_queue_stride(ints)))

    def _allocate_p(self, smem) -> Any:
        # Columns of 128 bytes; the results of 8-bit elements may use half of them.
        columns = copy.SWIZZLE_ROW_BYTES * 8 // self.dtype.width
        layout = copy.swizzled_layout(self.dtype, self.tile.m, columns, self.p_tiles)
        return smem.allocate_tensor(self.dtype, layout.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=layout.inner)

    def _allocate_tiles(self, smem) -> SharedTiles:
        c, t = self.config, self.tile
        p = self._allocate_p(smem) if const_expr(self.p_tiles > 0) else None
        columns_first, per_word = self.source.columns_first, 16 // self.dtype.width
        layouts = [copy.swizzled_layout(self.dtype, self.q_rows, c.layout.q_columns * per_word, t.q_stages)]
        layouts += [
            copy.swizzled_layout(self.dtype, rows, columns * per_word, stages, columns_first=columns_first)
            for rows, columns, stages in zip(self.kv_rows, c.layout.stage_columns, t.loaded_stages, strict=True)
        ]
        if const_expr(c.dequantizes):
            layouts += [
                copy.swizzled_layout(self.dtype, t.n, columns, t.kv_stages) for columns in c.layout.operand_columns
            ]
        if const_expr(c.transposes_v):
            layouts += [
                copy.swizzled_layout(self.dtype, c.layout.transposed_rows, c.layout.transposed_columns, t.kv_stages)
            ]
        tensors = [smem.allocate_tensor(self.dtype, l.outer, copy.SWIZZLE_ATOM_BYTES, swizzle=l.inner) for l in layouts]
        staging = None
        if const_expr(self.staging_bytes > 0):
            staging = smem.allocate(self.storing_warps * self.staging_bytes, copy.SWIZZLE_ROW_BYTES)
        scales = ()
        if const_expr(c.copies_scales):
            sizes = [stages * size for stages, size in zip(t.loaded_stages, self.scale_bytes, strict=True)]
            scales = tuple([smem.allocate(size, copy.VECTOR_BYTES) for size in sizes])
        key = tensors[1] if const_expr(c.transposes_v) else tensors[-2]
        return SharedTiles(tensors[0], key, tensors[-1], staging, loaded=tuple(tensors[1:3]), scales=scales, p=p)

    def set_registers(self, wanted: int) -> None:
        """Set the registers per thread of this warpgroup to ``wanted``, if the target can.

        On sm_120 ptxas gives threads at most the registers of the launch, and fewer if they need fewer. The total may
        then be smaller than the roles request, and such a kernel would hang.
        """
        if self.config.target in FAMILY_BUILDS.values():
            return
        more = wanted > self.config.launch_registers
        change = cute.arch.setmaxregister_increase if more else cute.arch.setmaxregister_decrease
        change(wanted)

    @cute.jit
    def begin(self, warp, atoms, zeroing_barriers) -> None:
        """Run the common start of every kernel: loader barriers, TMA descriptors, wait for the previous grid."""
        if cute.arch.thread_idx()[0] == 0:
            for loader in cutlass.range_constexpr(LOADERS):
                cute.arch.mbarrier_init(zeroing_barriers + loader, 1)
            cute.arch.mbarrier_init_fence()
        for index, atom in atoms:
            if const_expr(atom is not None):
                if warp == index:
                    cpasync.prefetch_descriptor(atom)
        cute.arch.sync_threads()
        # No code above reads global memory: with PDL, the previous grid may still be writing it.
        cute.arch.griddepcontrol_wait()

    @cute.jit
    def fetch_q(self, descriptor, tiles, ring, step, row, head, tokens=None):
        """Fill stage ``step`` of Q with the rows from ``row`` on, once the stage is free. Called by a whole warp.

        The rows belong to ``head``. With ``tokens``, the stage holds ``tokens`` rows of each head from ``head`` on, for
        the heads that fit.
        """
        ring.wait_empty(step)
        destination = shared_address(tiles[None, None, ring.stage(step)].iterator)
        with cute.arch.elect_one():
            barrier = ring.full_barrier(step)
            columns, rows = self.layout.loaded_q_columns, self.q_box_rows
            first_block = self.layout.first_loaded_q_block
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.q_rows * columns * HALFWORD_BYTES)
            first = row
            for box in cutlass.range(self.q_rows // rows, unroll=1):
                for block in cutlass.range_constexpr(columns // BLOCK_COLUMNS):
                    offset = ((first_block + block) * self.q_rows + box * rows) * copy.SWIZZLE_ROW_BYTES
                    copy.tma_load(descriptor, destination + offset, barrier, (block * BLOCK_COLUMNS, first, head))
                first += rows
                if const_expr(tokens is not None):
                    if first == row + tokens:
                        first = row
                        head += 1
        ring.fill_rest(step)

    def divided(self, operand: KvOperand) -> KvOperand:
        """Divide the page strides for sources that load boxes, while the load warp waits for its first work tile."""
        if const_expr(issubclass(self.source, PageBoxes)):
            operand = replace(operand, page_slots=operand.slots_of_page())
        return operand

    @cute.jit
    def load_kv(self, atom, shared, ring, zeroing_barrier, work_queue, operand: KvOperand):
        """Fill the stages of K or V for every work tile; ``shared`` is the address of the first stage.

        A tile that needs zeroed rows uses ``zeroing_barrier``.
        """
        descriptor = copy.tma_descriptor(atom) if const_expr(atom is not None) else None
        step, work, zeroed = Int32(0), Int32(0), Int32(0)
        tile = work_queue.read(work)
        while tile.exists:
            rows = self.kv_rows[operand.is_value]
            source = self.source.create(operand, tile, descriptor, shared, rows, self.config.box_rows)
            first, end = tile.keys.begin * self.step_tiles, tile.keys.end * self.step_tiles
            step, zeroed = source.load(first, end, ring, step, zeroing_barrier, zeroed)
            work += 1
            tile = work_queue.read(work)


class PrefillLaunch:
    """Mixin with the launch of prefill kernels, a base beside :class:`AttentionKernel`."""

    def with_arguments(self) -> Any:
        """Return the traceable launch function and example arguments to compile it with."""
        kinds = (ScaledAddresses, ScaledGeometry) if self.config.has_block_scales else (Addresses, Geometry)
        return self, example_arguments(kinds, floats=4)

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses,  # Addresses or ScaledAddresses
        geometry,  # a Geometry or a ScaledGeometry
        softmax_scale: Float32,
        output_scale: Float32,
        soft_cap: Float32,
        skip_softmax: Float32,
        programmatic_launch: Int32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. ``anchor`` is never read: its device is the launch device."""
        c, g, a = self.config, geometry, addresses
        q = self._row_boxes(
            a.query, (g.tokens, c.layout.q_dim, g.heads), c.layout.q_strides(g.q_token, g.q_head), self.q_box_rows
        )
        k, v = self._kv_atoms(a, g)
        self.kernel(q, k, v, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax).launch(
            grid=[Int32(geometry.grid) * c.cluster_ctas, 1, 1],
            cluster=[c.cluster_ctas, 1, 1] if c.cluster_ctas > 1 else None,
            block=[WARPGROUP * len(c.registers), 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=programmatic_launch,
        )


def work_queue_stride(ints: int) -> int:
    """Return the Int32 values between the beginnings of two slots of the work queue."""
    return -(-ints * 4 // copy.VECTOR_BYTES) * copy.VECTOR_BYTES // 4


def example_arguments(integers: tuple, floats: int) -> tuple[Any, ...]:
    """Return arguments to compile a launch function with.

    They are the anchor, one tuple of integers for each type in ``integers``, floats, the PDL flag, and the stream.
    """
    anchor = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,))
    numbers = [kind(*[Int64(0)] * len(kind._fields)) for kind in integers]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return (anchor, *numbers, *[Float32(0)] * floats, Int32(0), stream)
