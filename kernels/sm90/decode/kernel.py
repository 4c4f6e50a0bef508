"""Hopper split-KV decode: the packed rows of a KV head against chunks of a paged cache, and the combine, in one launch.

This kernel serves many rows and large head dims. ``swap_ab.py`` and ``dequant_swap_ab.py`` serve few rows.
"""

from dataclasses import replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import BLOCK_COLUMNS
from hopwell.kernels.config.decode import DecodeConfig
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, DecodeGeometry, ScaledAddresses, ScaledDecodeGeometry
from hopwell.kernels.parts.combine.partials import Combine, Slots
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.barriers import NamedBarrier
from hopwell.kernels.parts.core.device import load_output_scale, load_scale, shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import example_arguments
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.parts.load.kv_rows import PageRows
from hopwell.kernels.parts.load.kv_source import KvOperand, PageBoxes
from hopwell.kernels.parts.partition.split_kv import ScheduleHooks, SplitSchedule, SplitTile
from hopwell.kernels.parts.rows.mask import IntervalMask, mask_type
from hopwell.kernels.parts.rows.packed import PackedRows
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax
from hopwell.kernels.problem import ScoreKind
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import K_WARP, Q_WARP, SCHEDULE_WARP, V_WARP, AttentionSm90
from hopwell.kernels.sm90.decode.dequant_warps import DequantCombine, DequantDecodeAttend, Exchange
from hopwell.kernels.sm90.decode.rows import DecodeAttend


class DecodeSm90(AttentionSm90):
    """Attention of up to ``tile.m`` packed rows of a KV head, in steps of ``tile.n`` keys from right to left.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      the packed rows of Q
        warp 3 schedule    work tiles: the rows, the request and the chunk of its keys
        warps 4.. attend   one consumer warpgroup, or two that share V's columns: from Q K^T to the output or to a
                           partial; if they dequantize in registers, eight independent warps, see dequant_warps.py
        next four dequantize   8-bit caches with many rows or large head dims: convert K and V to 16 bits in place
        last four combine  assign slots to work tiles and combine partials, so that their atomics and reads do not delay
                           attend; if two warpgroups share V's columns, attend does this itself

    Edges
        Q       load_q -> attend      released when the last S of the work tile has been computed; over 8-bit caches
                                      when Q is in registers
        K       load_k -> attend      released when S has been computed; over 8-bit caches together with V
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        partial   attend -> combine   released once for each work tile when its slot may be written, over 8-bit caches
                                      when the exchange may be; full when it has been written
        With dequantization in place, K and V have two edges each:
        loaded K, loaded V  load_k, load_v -> dequantize   bytes from memory; released on K and V
        K, V                dequantize -> attend           released as above

    Steady state: memory is the limit. The work of attend in a step must take less time than the step's loads. Between
    work tiles, loads run ahead by the number of stages.

        memory         |  K(i-2)  |  V(i-2)  |  K(i-3)  |  V(i-3)  |  K(i-4)  |  V(i-4)  | ...
        attend         |  S(i), O += P(i+1) V(i+1) | softmax of S(i) | waits | S(i-1), O += P(i) V(i) | softmax ...
    """

    work_tile = SplitTile

    @property
    def schedule_type(self) -> type[SplitSchedule]:
        return SplitSchedule

    @property
    def mask_type(self) -> type[IntervalMask]:
        return mask_type(self.config.mask)

    @property
    def weights_dtype(self) -> type:
        """Element type of P in shared memory."""
        return self.dtype

    @property
    def q_arrivals(self) -> dict[str, int]:
        return dict(producer_lanes=LANES, consumer_lanes=LANES if self.config.dequantizes_in_registers else 1)

    def _kv_edges(self, consumer: str, warps: int) -> list[Edge]:
        edges = super()._kv_edges(consumer, warps)
        return self.edges_in_place(edges, "dequantize") if self.config.dequantizes_in_place else edges

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        """Return the arrive counts of K or V. Over 8-bit caches lanes read the tiles, and write some themselves: row
        copies, or zeros into V."""
        if self.config.dequantizes_in_registers:
            copies_rows = issubclass(self.source, PageRows)
            lanes = LANES if is_value or copies_rows else 1
            # Copies of rows and copies of their scales arrive together.
            copying = LANES if self.config.copies_scales and not copies_rows else 0
            return dict(producer_lanes=lanes, consumer_lanes=max(lanes, copying), copying_lanes=copying)
        if self.config.dequantizes_in_place:
            return {}
        return super().kv_arrivals(is_value)

    @property
    def staging_bytes(self) -> int:
        return Exchange.warp_bytes(self.config.head_dim_v) if self.config.dequantizes_in_registers else 0

    @property
    def more_roles(self) -> dict[str, int]:
        dequant = {"dequantize": WARPS} if self.config.dequantizes_in_place else {}
        return {"combine": 4, **dequant} if self.config.has_combine_role else dequant

    def _more_edges(self) -> tuple[Edge, ...]:
        return (
            (Edge("partial", "attend", "combine", 1, 4 * self.warpgroups, 4, 0),)
            if self.config.has_combine_role
            else ()
        )

    def _combine(self, addresses: Addresses, geometry: DecodeGeometry, tiles) -> Combine:
        """Return the combine. The last warpgroup runs it, or all attend warpgroups if there is no combine role."""
        first, warpgroups = (
            (len(self.config.registers) - 1, 1) if self.config.has_combine_role else (1, self.warpgroups)
        )
        threads = (first * WARPGROUP, warpgroups * WARPGROUP, NamedBarrier.COMBINE)
        slots = Slots.create(addresses, geometry, self.config.head_dim_v)
        if self.config.dequantizes_in_registers:
            return DequantCombine(slots, *threads, Exchange.create(self, tiles), self)
        return Combine(slots, *threads)

    @cute.jit
    def __call__(
        self,
        anchor: cute.Tensor,
        addresses,  # Addresses or ScaledAddresses
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
        q = self._q_atom(addresses, geometry)
        self.kernel(q, k, v, addresses, geometry, softmax_scale, output_scale, output_factor).launch(
            grid=[Int32(geometry.grid), 1, 1],
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
        tiles, rings, work_queue, partial_barriers = self._allocate(cutlass.memory.SmemAllocator())
        mask = self.mask_type(self.config.mask, Int32(geometry.mask_size))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom), (SCHEDULE_WARP, q_atom)), partial_barriers)

        if warp < 4:
            self.set_registers(self.tile.producer_registers)
            schedule = self._schedule(addresses, geometry, mask, q_atom, tiles, rings)
            if warp == SCHEDULE_WARP:
                schedule.publish(work_queue)
            else:
                scale = self._output_scale(addresses, output_scale, output_factor)
                self.load(
                    warp,
                    (k_atom, v_atom),
                    addresses,
                    geometry,
                    tiles,
                    rings,
                    partial_barriers,
                    work_queue,
                    schedule,
                    scale,
                )
            cute.arch.griddepcontrol_launch_dependents()
        elif warp >= 4 * (len(self.config.registers) - self.config.has_combine_role):
            if const_expr(self.config.has_combine_role):
                self.set_registers(self.config.registers[-1])
                scale = self._output_scale(addresses, output_scale, output_factor)
                self.run_combine(tiles, rings, work_queue, addresses, geometry, scale)
        else:
            numbers = (softmax_scale, output_scale, output_factor)
            if const_expr(self.config.dequantizes_in_place):
                if warp >= 4 * (1 + self.config.consumer_warpgroups):
                    self.set_registers(self.tile.converting_registers)
                    Conversion.create(self, tiles, rings, work_queue, addresses, geometry).run()
                else:
                    self.attend(tiles, rings, work_queue, mask, addresses, geometry, *numbers)
            else:
                self.attend(tiles, rings, work_queue, mask, addresses, geometry, *numbers)

    @cute.jit
    def attend(
        self, tiles, rings, work_queue, mask, addresses, geometry, softmax_scale, output_scale, output_factor
    ) -> None:
        """Run the consumer warpgroups."""
        self.set_registers(self.tile.consumer_registers)
        scale = load_scale(addresses.softmax_scale, softmax_scale)
        score = ScoreMap(ScoreKind.SCALED, scale, Float32(0.0), Int32(1))
        softmax = self.softmax(scale)
        scale = self._output_scale(addresses, output_scale, output_factor)
        combine = self._combine(addresses, geometry, tiles)
        consumer = self.consumer(
            kernel=self,
            tiles=tiles,
            rings=rings,
            work_queue=work_queue,
            mask=mask,
            score=score,
            softmax=softmax,
            output_scale=scale,
            combine=combine,
            addresses=addresses,
            geometry=geometry,
        )
        consumer.run(addresses, geometry)

    def run_combine(self, tiles, rings, work_queue, addresses, geometry, scale) -> None:
        """Run the combine warpgroup."""
        combine = self._combine(addresses, geometry, tiles)
        combine.run(work_queue, rings.partial, addresses, geometry, scale, self.out_dtype)

    def softmax(self, scale) -> OnlineSoftmax:
        """Return the softmax of a consumer warp's rows."""
        return OnlineSoftmax.create(scale, RowFragment.rows)

    def consumer(self, **parts: Any) -> "DecodeAttend":
        """Return the consumer that the attend warpgroups run."""
        return (DequantDecodeAttend if self.config.dequantizes_in_registers else DecodeAttend)(**parts)

    def _schedule(self, addresses: Addresses, geometry: DecodeGeometry, mask, q_atom, tiles, rings) -> SplitSchedule:
        c = self.config
        sizes = (self.tile.m, self.tile.n * self.step_tiles, c.chunk_tokens, c.halves_chunks)
        hooks = self.hooks(addresses, geometry, q_atom, tiles, rings)
        return self.schedule_type(geometry, addresses, mask, *sizes, hooks)

    def hooks(self, addresses: Addresses, geometry: DecodeGeometry, q_atom, tiles, rings) -> ScheduleHooks:
        """Return the additional work of the schedule warp."""
        return ScheduleHooks()

    @cute.jit
    def load(self, warp, atoms, addresses, geometry, tiles, rings, partial_barriers, work_queue, schedule, scale):
        """Run the warps of the first warpgroup that load K, V and Q."""
        operands = self.loads(addresses, geometry)
        if warp == K_WARP:
            self.load_operand(0, atoms, operands, tiles, rings, partial_barriers, work_queue)
        if warp == V_WARP:
            self.load_operand(1, atoms, operands, tiles, rings, partial_barriers, work_queue)
        if warp == Q_WARP:
            self.load_all_q(addresses, geometry, tiles, rings, work_queue)

    @cute.jit
    def load_all_q(self, addresses, geometry, tiles, rings, work_queue):
        """Load Q of every work tile."""
        step = Int32(0)
        tile = work_queue.read(step)
        while tile.exists:
            self.load_q(addresses, geometry, tile, tiles.q, rings.q, step)
            step += 1
            tile = work_queue.read(step)

    def divided(self, operand: KvOperand) -> KvOperand:
        """Divide the page strides for sources that load boxes, while the load warp waits for its first work tile."""
        if const_expr(issubclass(self.source, PageBoxes)):
            operand = replace(operand, page_slots=operand.slots_of_page())
        return operand

    def load_operand(self, which: int, atoms, operands, tiles, rings, partial_barriers, work_queue) -> None:
        """Load K (0) or V (1) of every work tile."""
        shared, operand = shared_address((tiles.k, tiles.v)[which].iterator), operands[which]
        operand = self.divided(operand)
        if const_expr(self.config.copies_scales):
            operand = replace(operand, shared_scales=shared_address(tiles.scales[which]))
        ring = self.loading_ring(rings, which)
        self.load_kv(atoms[which], shared, ring, partial_barriers + which, work_queue, operand)

    def _q_atom(self, addresses: Addresses, geometry: DecodeGeometry):
        """Return the TMA atom of Q, or None if lanes copy its rows."""
        return None

    def loads(self, addresses: Addresses, geometry: DecodeGeometry) -> tuple[KvOperand, KvOperand]:
        """Return the operands of the two load warps."""
        return KvOperand.key(addresses, geometry, self.config), KvOperand.value(addresses, geometry, self.config)

    def _output_scale(self, addresses: Addresses, output_scale, output_factor):
        return load_output_scale(addresses, output_scale) * load_scale(addresses.output_factor, output_factor)

    @cute.jit
    def load_q(self, addresses: Addresses, geometry: DecodeGeometry, tile, tiles, ring, step):
        """Load rows of Q by 16-byte copies. A row is one head of a token, and consecutive rows may be anywhere in
        memory. Rows without a token become zeros."""
        blocks, rows_at_once = self.config.q_columns // BLOCK_COLUMNS, LANES // copy.VECTORS_PER_ROW
        vector = cute.arch.lane_idx() % copy.VECTORS_PER_ROW
        ring.wait_empty(step)
        destination = shared_address(tiles[None, None, ring.stage(step)].iterator)
        rows = PackedRows.create(addresses, geometry, tile, Float32(1.0), 2)
        for first in cutlass.range(0, self.tile.m, rows_at_once, unroll=4):
            row = first + cute.arch.lane_idx() // copy.VECTORS_PER_ROW
            there = cutlass.min(row, cutlass.max(rows.count - 1, 0))
            source = rows.query(there, tile.request.q_start, self.config.q_bytes)
            source += vector * copy.VECTOR_BYTES
            target = copy.swizzled_vector(destination, row, vector)
            for block in cutlass.range_constexpr(blocks):
                wanted = row < rows.count and block * BLOCK_COLUMNS + vector * 8 < self.config.q_dim
                from_block = source + block * copy.SWIZZLE_ROW_BYTES
                to_block = target + block * (self.tile.m * copy.SWIZZLE_ROW_BYTES)
                copy.async_copy_or_zero(to_block, from_block, wanted)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(ring.full_barrier(step))


def argument_types(config: DecodeConfig) -> tuple[Any, Any]:
    """Return the types of a kernel's addresses and geometry."""
    return (ScaledAddresses, ScaledDecodeGeometry) if config.has_block_scales else (Addresses, DecodeGeometry)


def build(config: DecodeConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return DecodeSm90(config), example_arguments(argument_types(config), floats=3)
