"""Base of the decode kernels: launch, warps, and the loads of Q, and of K and V of a paged cache."""

from dataclasses import replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import (
    Addresses,
    DecodeAddresses,
    DecodeGeometry,
    ScaledDecodeAddresses,
    ScaledDecodeGeometry,
)
from hopwell.kernels.parts.core import cluster, copy
from hopwell.kernels.parts.core.device import load_output_scale, load_scale, shared_address
from hopwell.kernels.parts.core.kernel import AttentionKernel
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Roles
from hopwell.kernels.parts.load.block_scales import SharedScales
from hopwell.kernels.parts.load.kv_source import KvOperand
from hopwell.kernels.parts.rows import head_scales
from hopwell.kernels.parts.rows.head_scales import HeadScales
from hopwell.kernels.parts.rows.mask import IntervalMask, mask_type
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import K_WARP, LOAD_ROLES, Q_WARP, SCHEDULE_WARP, V_WARP, loading_ring
from hopwell.kernels.sm90.decode.rows import PackedLogits


class DecodeKernel(AttentionKernel):
    """Attention over the packed rows of a KV head. Subclasses have the roles: schedule, loads, attend and combine."""

    reader: Reader  # of K and V
    loads: Any  # roles that load K and V
    q_role = "load_q"
    value_factor = 1.0  # factor of the output besides the caller's

    @property
    def mask_type(self) -> type[IntervalMask]:
        return mask_type(self.config.mask)

    @property
    def storing_warps(self) -> int:
        return WARPS * self.config.consumer_warpgroups

    @property
    def lanes_read_q(self) -> bool:
        """Whether lanes of attend read the tile of Q, or write to its place."""
        return self.reader in (Reader.LANES, Reader.SYNCED_LANES)

    def q_edge(self, roles: Roles) -> Edge:
        """Return the edge of Q, whose rows lanes of the role ``q_role`` copy."""
        size = self.q_rows * self.layout.q_columns * HALFWORD_BYTES
        lanes = dict(producer_lanes=LANES, consumer_lanes=LANES if self.lanes_read_q else 1)
        return roles.edge("q", self.q_role, "attend", self.tile.q_stages, size, **lanes)

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses,  # DecodeAddresses or ScaledDecodeAddresses
        geometry,  # a DecodeGeometry or a ScaledDecodeGeometry
        softmax_scale: Float32,
        output_scale: Float32,
        output_factor: Float32,
        programmatic_launch: Int32,
        stream: cuda.CUstream,
    ):
        """Build the TMA descriptors and launch. ``anchor`` only selects the device of the launch; the kernel never
        reads it."""
        k, v = self._kv_atoms(addresses, geometry)
        q = self.q_atom(addresses, geometry)
        self.kernel(q, k, v, addresses, geometry, softmax_scale, output_scale, output_factor).launch(
            grid=[Int32(geometry.grid) * self.config.work_tile_ctas, 1, 1],
            cluster=[self.config.cluster_ctas, 1, 1] if self.config.cluster_ctas > 1 else None,
            block=[WARPGROUP * len(self.config.registers), 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,
            # The carveout is in percent. Without it, compilation needs a GPU to query.
            preferred_smem_carveout=100 if self.config.ctas_per_sm > 1 else None,
            use_pdl=programmatic_launch,
            cooperative=self.config.is_cooperative,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom | None,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses,
        geometry,
        softmax_scale: Float32,
        output_scale: Float32,
        output_factor: Float32,
    ):
        tiles, rings, work_queue, zeroing_barriers = self._allocate(cutlass.memory.SmemAllocator())
        mask = self.mask_type(self.config.mask, Int32(geometry.mask_size))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom), (SCHEDULE_WARP, q_atom)), zeroing_barriers)
        shared = (tiles, rings, work_queue)
        if const_expr(self.config.cluster_ctas > 1):
            cluster.meet()  # the barriers of the other CTA are initialised

        if warp < 4:
            self.set_registers(self.tile.producer_registers)
            schedule = self.schedule(addresses, geometry, mask, q_atom, tiles, rings)
            if warp == SCHEDULE_WARP:
                schedule.publish(work_queue)
            else:
                scale = self.output_scale(addresses, output_scale, output_factor)
                self.load(warp, (k_atom, v_atom), *shared, zeroing_barriers, addresses, geometry, schedule, scale)
            cute.arch.griddepcontrol_launch_dependents()
        elif warp >= 4 * (len(self.config.registers) - self.config.has_combine_role):
            if const_expr(self.config.has_combine_role):
                self.set_registers(self.config.registers[-1])
                scale = self.output_scale(addresses, output_scale, output_factor)
                self.run_combine(*shared, addresses, geometry, scale)
        else:
            numbers = (softmax_scale, output_scale, output_factor)
            if const_expr(self.config.dequantizes_in_place):
                if warp >= 4 * (1 + self.config.consumer_warpgroups):
                    self.set_registers(self.tile.converting_registers)
                    Conversion.create(self, tiles, rings, work_queue, addresses, geometry).run()
                else:
                    self.attend(*shared, mask, addresses, geometry, *numbers)
            else:
                self.attend(*shared, mask, addresses, geometry, *numbers)
        if const_expr(self.config.cluster_ctas > 1):
            cluster.meet()  # nothing arrives at the barriers of either CTA any more

    @cute.jit
    def attend(
        self, tiles, rings, work_queue, mask, addresses, geometry, softmax_scale, output_scale, output_factor
    ) -> None:
        """Run the consumer warpgroups."""
        self.set_registers(self.tile.consumer_registers)
        scale = head_scales.softmax_scale(self.config, addresses, softmax_scale)
        softmax = self.softmax(scale)
        output_scale = self.output_scale(addresses, output_scale, output_factor)
        parts = dict(kernel=self, tiles=tiles, rings=rings, work_queue=work_queue, mask=mask, softmax=softmax)
        self.run_attend(parts, scale, output_scale, addresses, geometry)

    def schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, q_atom, tiles, rings) -> Any:
        """Return the schedule, which publishes the work tiles."""
        raise NotImplementedError

    def load(
        self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry, schedule, output_scale
    ) -> None:
        """Run the warps of the first warpgroup except the schedule warp."""
        self.loads.run(warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry)

    def softmax(self, scale) -> Any:
        """Return the softmax of a consumer warp's rows."""
        raise NotImplementedError

    def run_attend(self, parts: dict[str, Any], softmax_scale, output_scale, addresses, geometry) -> None:
        """Run the attend role; ``parts`` are fields that every such role has."""
        raise NotImplementedError

    def run_combine(self, tiles, rings, work_queue, addresses, geometry, output_scale) -> None:
        """Run the combine role, if the kernel has one."""
        raise NotImplementedError

    def q_atom(self, addresses: Addresses, geometry: DecodeGeometry) -> Any:
        """Return the TMA atom of Q, or None if lanes copy its rows."""
        return None

    def output_scale(self, addresses: Addresses, output_scale, output_factor):
        """Return the factor of the output, for each KV head if heads have scales."""
        c, factor = self.config, load_scale(addresses.output_factor, output_factor)
        if self.value_factor != 1.0:
            factor = factor * self.value_factor
        if c.k_head_scales or c.v_head_scales:
            return HeadScales(output_scale * factor, c.k_head_scales, c.v_head_scales)
        return load_output_scale(addresses, output_scale) * factor

    @cute.jit
    def load_all_q(self, addresses, geometry, tiles, rings, work_queue):
        """Load Q of every work tile."""
        step = Int32(0)
        tile = work_queue.read(step)
        while tile.exists:
            self.load_q(addresses, geometry, tile, tiles.q, rings.q, step)
            step += 1
            tile = work_queue.read(step)

    @cute.jit
    def load_q(self, addresses: Addresses, geometry: DecodeGeometry, tile, tiles, ring, step):
        """Load rows of Q by 16-byte copies. A row is one head of a token, and consecutive rows may be anywhere in
        memory. Rows without a token become zeros."""
        blocks, rows_at_once = self.layout.q_columns // BLOCK_COLUMNS, LANES // copy.VECTORS_PER_ROW
        vector = cute.arch.lane_idx() % copy.VECTORS_PER_ROW
        ring.wait_empty(step)
        destination = shared_address(tiles[None, None, ring.stage(step)].iterator)
        rows = PackedRows.create(addresses, geometry, tile, Float32(1.0), 2)
        for first in cutlass.range(0, self.q_rows, rows_at_once, unroll=4):
            row = first + cute.arch.lane_idx() // copy.VECTORS_PER_ROW
            there = cutlass.min(row, cutlass.max(rows.count - 1, 0))
            source = rows.query(there, tile.request.q_start, self.config.q_bytes)
            source += vector * copy.VECTOR_BYTES
            target = copy.swizzled_vector(destination, row, vector)
            for block in cutlass.range_constexpr(blocks):
                wanted = row < rows.count and block * BLOCK_COLUMNS + vector * 8 < self.layout.q_dim
                from_block = source + block * copy.SWIZZLE_ROW_BYTES
                to_block = target + block * (self.q_rows * copy.SWIZZLE_ROW_BYTES)
                copy.async_copy_or_zero(to_block, from_block, wanted)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_barrier(step))


def argument_types(config: DecodeConfig) -> tuple[Any, Any]:
    """Return the types of a kernel's addresses and geometry."""
    if config.has_block_scales:
        return ScaledDecodeAddresses, ScaledDecodeGeometry
    return DecodeAddresses, DecodeGeometry


class KvLoads:
    """Loads of K by warp 0, of V by warp 1 and of Q by warp 2."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    @property
    def roles(self) -> dict[str, int]:
        return LOAD_ROLES

    def edges(self, roles: Roles, reader: Reader, consumer: str = "attend") -> list[Edge]:
        """Return the edges of K and V."""
        return self.kernel._kv_edges(roles, (consumer, reader), (consumer, reader))

    def logits(self, mask: IntervalMask, addresses: Addresses, geometry: DecodeGeometry) -> PackedLogits:
        """Return the rows' view of the keys."""
        return PackedLogits(mask, addresses, geometry)

    @cute.jit
    def run(self, warp, atoms, tiles, rings, work_queue, zeroing_barriers, addresses, geometry):
        """Run the load warps."""
        operands = (
            KvOperand.key(addresses, geometry, self.kernel.config),
            KvOperand.value(addresses, geometry, self.kernel.config),
        )
        if warp == K_WARP:
            self._load_operand(0, atoms, operands, tiles, rings, zeroing_barriers, work_queue)
        if warp == V_WARP:
            self._load_operand(1, atoms, operands, tiles, rings, zeroing_barriers, work_queue)
        if warp == Q_WARP:
            self.kernel.load_all_q(addresses, geometry, tiles, rings, work_queue)

    def _load_operand(self, which: int, atoms, operands, tiles, rings, zeroing_barriers, work_queue) -> None:
        """Load K (0) or V (1) of every work tile."""
        shared, operand = shared_address((tiles.k, tiles.v)[which].iterator), operands[which]
        operand = self.kernel.divided(operand)
        if const_expr(self.kernel.config.copies_scales):
            operand = replace(operand, shared_scales=SharedScales.of(self.kernel, tiles, which))
        ring = loading_ring(self.kernel, rings, which)
        self.kernel.load_kv(atoms[which], shared, ring, zeroing_barriers + which, work_queue, operand)
