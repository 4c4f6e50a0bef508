"""Hopper prefill: TMA, warp specialisation and wgmma in one persistent kernel for ragged and paged KV."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.elements import HALFWORD_BYTES
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Geometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import AttentionKernel, PrefillLaunch
from hopwell.kernels.parts.core.pipeline import Edge, Reader, Rings, Roles
from hopwell.kernels.parts.load.kv_source import KvOperand
from hopwell.kernels.parts.partition.tiles import AlternatingSchedule, TileSchedule
from hopwell.kernels.parts.rows import head_scales
from hopwell.kernels.parts.rows.epilogue import STAGING_BYTES
from hopwell.kernels.parts.rows.mask import create_mask
from hopwell.kernels.parts.rows.padding import fill_padding
from hopwell.kernels.parts.rows.query_rows import request_shape
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax, TileSoftmax
from hopwell.kernels.sm90.common.attend import Attend, MainLoop, WarpgroupPlace
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import (
    K_WARP,
    LOAD_ROLES,
    Q_WARP,
    SCHEDULE_WARP,
    V_WARP,
    kv_edges_in_place,
    loading_ring,
)
from hopwell.kernels.sm90.common.operands import Operands, RowOperands
from hopwell.kernels.sm90.prefill.fp8 import NSliceLoop, NSliceOperands
from hopwell.kernels.sm90.prefill.fp8_promotion import PROMOTED_BYTES, PromotedOperands, PromotingLoop
from hopwell.kernels.sm90.prefill.overlapped import OverlappedLoop, PairedLoop, PairedOperands
from hopwell.kernels.sm90.prefill.rows import HeadScaledAttend, PrefillRows
from hopwell.kernels.sm90.prefill.skip import SkippingLoop


class PrefillSm90(PrefillLaunch, AttentionKernel):
    """Attention over query tiles of ``tile.m`` rows, in steps of ``tile.n`` keys from right to left. A tile has rows of
    one head, or for few queries rows of several heads of a KV head (packed GQA), see ``parts/rows/query_rows.py``.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      Q tiles
        warp 3 schedule    work tiles: the query rows, the keys and their locations
        last four convert  only for 8-bit and 4-bit K and V: dequantizes them to 16 bits; with 8-bit Q, transposes the
                           tiles of V. If the tile configuration says so, K and V have four warps each
        warps 4.. attend   consumer warpgroups, each 64 query rows from Q K^T to the output; at head dim 512 two share
                           64 rows, each with half of V's columns

    Edges (``PrefillSm90(config).edges``, printed by ``pipeline.describe``)
        q       load_q -> attend      released when the last S of the work tile has been computed
        k       load_k -> attend      released when S has been computed
        v       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        Edges of tiles that are converted end at convert. It releases a stage when it has written the converted one:
        converted_k  convert -> attend   released when S has been computed
        converted_v  convert -> attend   released when its product has been added to O
        With dequantization in place, above head dim 192, loaded_k and loaded_v lead from the loaders to convert. k and
        v lead from convert to attend, which releases the stages to load_k and load_v.

    Steady state: one step of two consumer warpgroups, A and B (ping-pong). "S" and "O" are matrix products on the
    tensor cores, which take about half of a step for each warpgroup. Named barriers pass the turn between the
    warpgroups.

        tensor cores   |  A: S(i) = Q K(i)^T | A: O += P(i+1) V(i+1) | B: S(i) = Q K(i)^T | B: O += P(i+1) V(i+1) |
        warpgroup A    |       waits         |  maximum of S(i)      | 2^(S(i) - reference), P(i) = round, sums   |
        warpgroup B    | 2^(S(i+1) - ...), P(i+1) = round, sums      |       waits        | maximum of S(i)       |
        load_k, load_v | fill the stages that the step before has released
    """

    @property
    def storing_warps(self) -> int:
        return WARPS * self.config.consumer_warpgroups

    @property
    def staging_bytes(self) -> int:
        return STAGING_BYTES + (PROMOTED_BYTES if self.config.promotes_output else 0)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        k_atom: cute.CopyAtom | None,
        v_atom: cute.CopyAtom | None,
        addresses,  # Addresses or ScaledAddresses
        geometry,  # a Geometry or a ScaledGeometry
        softmax_scale: Float32,
        output_scale: Float32,
        soft_cap: Float32,
        skip_softmax: Float32,
    ):
        tiles, rings, work_queue, zeroing_barriers = self._allocate(cutlass.memory.SmemAllocator())
        mask = create_mask(self.config.mask, geometry.mask_size)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom), (Q_WARP, q_atom)), zeroing_barriers)
        fill_padding(addresses, geometry)

        if warp < 4:
            self.set_registers(self.tile.producer_registers)
            if warp == K_WARP:
                key, ring = KvOperand.key(addresses, geometry, self.config), loading_ring(self, rings, 0)
                self.load_kv(k_atom, shared_address(tiles.loaded[0].iterator), ring, zeroing_barriers, work_queue, key)
            if warp == V_WARP:
                value = KvOperand.value(addresses, geometry, self.config)
                shared = shared_address(tiles.loaded[1].iterator)
                self.load_kv(v_atom, shared, loading_ring(self, rings, 1), zeroing_barriers + 1, work_queue, value)
            if warp == Q_WARP:
                self.load_q(q_atom, tiles.q, rings.q, work_queue, self.tile_shape(geometry))
            if warp == SCHEDULE_WARP:
                schedule = AlternatingSchedule if self.config.packs_heads else TileSchedule
                schedule(geometry, addresses, mask, self.tile.n, self.tile_shape(geometry)).publish(work_queue)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            numbers = (addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax)
            if const_expr(self.config.converts):
                first = WARPS * (1 + self.config.consumer_warpgroups)
                if warp >= first:
                    self.set_registers(self.tile.converting_registers)
                    conversion = Conversion.create(self, tiles, rings, work_queue, addresses, geometry)
                    conversion.run_share(warp - first)
                else:
                    self.attend(tiles, self.multiplied(rings), work_queue, mask, *numbers)
            else:
                self.attend(tiles, rings, work_queue, mask, *numbers)

    def multiplied(self, rings: Rings) -> Rings:
        """Return the rings as the consumers see them: converted tiles come from the converting warpgroup."""
        k, v = (
            loaded if converted is None else converted
            for loaded, converted in ((rings.k, rings.converted_k), (rings.v, rings.converted_v))
        )
        return replace(rings, k=k, v=v)

    @cute.jit
    def attend(
        self, tiles, rings, work_queue, mask, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax
    ) -> None:
        """Run the consumer warpgroups."""
        self.set_registers(self.tile.consumer_registers)
        scale = head_scales.softmax_scale(self.config, addresses, softmax_scale)
        score = ScoreMap(self.config.score, scale, soft_cap, Int32(geometry.heads))
        kind = TileSoftmax if self.config.uses_fp8_mma else OnlineSoftmax
        softmax = kind.create(score.softmax_scale, RowFragment.rows)
        scale = head_scales.output_scale(self.config, addresses, output_scale)
        shared = (self, tiles, mask, score, softmax)
        rows = PrefillRows(*shared, scale, self.tile_shape(geometry), addresses, geometry)
        main_loop = self.main_loop
        if const_expr(self.config.skip_softmax):
            main_loop = SkippingLoop(SkipRule.create(skip_softmax))
        role = HeadScaledAttend if const_expr(self.config.k_head_scales) else Attend
        consumer = role(
            kernel=self,
            tiles=tiles,
            rings=rings,
            work_queue=work_queue,
            mask=mask,
            score=score,
            softmax=softmax,
            rows=rows,
            main_loop=main_loop,
            operands=self.operands,
            place=self.place,
            ping_pong_warpgroups=self.ping_pong_warpgroups,
            stages_in_q=self.stages_in_q,
            peels_unmasked_step=self.peels_unmasked_step,
        )
        consumer.run(addresses, geometry)
        if const_expr(self.config.skip_softmax):
            # Only the first of the warpgroups that share rows reports.
            sharing = WARPGROUP * self.config.v_splits
            first = cute.arch.thread_idx()[0] % sharing == WARPGROUP % sharing
            main_loop.skip.report(addresses.skipped, first)

    @property
    def operands(self) -> type[RowOperands]:
        """Matrix operands of a consumer warpgroup."""
        c = self.config
        if c.uses_fp8_mma:
            return PromotedOperands if c.promotes_output else NSliceOperands
        return PairedOperands if c.pairs_steps else Operands

    @property
    def main_loop(self) -> MainLoop:
        """Main loop of the consumer warpgroups without skip-softmax."""
        c = self.config
        if c.uses_fp8_mma:
            return PromotingLoop() if c.promotes_output else NSliceLoop()
        return PairedLoop() if c.pairs_steps else OverlappedLoop()

    reader = Reader.TENSOR_CORES  # of K and V
    place: type = WarpgroupPlace
    stages_in_q = False  # whether Q's place stages the output
    peels_unmasked_step = False  # whether a loop of one step precedes the loop over unmasked steps

    @property
    def ping_pong_warpgroups(self) -> int:
        """Warpgroups that take turns at the tensor cores."""
        return self.config.consumer_warpgroups

    @property
    def stages_pairs(self) -> bool:
        """Whether a lane has pairs of adjacent columns of O."""
        return not self.config.uses_fp8_mma

    def output_staging(self, tiles, consumer_warp):
        """Return the address of the shared memory that stages a warp's output."""
        return shared_address(tiles.staging) + consumer_warp * STAGING_BYTES

    @property
    def roles(self) -> dict[str, int]:
        c = self.config
        convert = {"convert": WARPS} if c.converts else {}
        others = WARPS * len(c.registers) - 1
        return {**LOAD_ROLES, "attend": WARPS * c.consumer_warpgroups, **convert, "all others": others}

    def _edges(self, roles: Roles) -> tuple[Edge, ...]:
        c, t = self.config, self.tile
        q_bytes = t.m * c.layout.q_columns * HALFWORD_BYTES
        by_lanes = dict(consumer_lanes=LANES) if self.reader is not Reader.TENSOR_CORES else {}
        if c.dequantizes_in_place:
            kv = kv_edges_in_place(self, roles)
        else:
            converted = (c.dequantizes, c.dequantizes or c.transposes_v)
            kv = self._kv_edges(
                roles, *[("convert", Reader.LANES) if each else ("attend", self.reader) for each in converted]
            )
        return (
            roles.edge("q", "load_q", "attend", t.q_stages, q_bytes, **by_lanes),
            *kv,
            self._work_edge(roles),
            *[
                roles.edge(
                    f"converted_{name}", "convert", "attend", t.kv_stages, size, producer_lanes=LANES, **by_lanes
                )
                for name, size in (c.layout.converted_bytes if c.converts else {}).items()
            ],
        )

    @property
    def q_box_rows(self) -> int:
        return ATOM_ROWS if self.config.packs_heads else self.q_rows

    def tile_shape(self, geometry: Geometry) -> TileShape:
        """Return the shape of query tiles; it is a compile-time constant without packed GQA."""
        return TileShape.of(Int32(geometry.tile_heads) if self.config.packs_heads else 1, self.tile.m)

    @cute.jit
    def load_q(self, atom, tiles, ring, work_queue, shape: TileShape):
        descriptor = copy.tma_descriptor(atom)
        step = Int32(0)
        tile = work_queue.read(step)
        while tile.exists:
            tokens = request_shape(shape, tile.request.q_len).tokens
            self.fetch_q(descriptor, tiles, ring, step, tile.request.q_start + tile.first_row, tile.head, tokens)
            step += 1
            tile = work_queue.read(step)


def build(config: PrefillConfig) -> Any:
    """Return the traceable launch function of a config and example arguments to compile it with."""
    return PrefillSm90(config).with_arguments()
