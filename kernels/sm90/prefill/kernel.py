"""Hopper prefill: TMA, warp specialisation and wgmma in one persistent kernel for ragged and paged KV."""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from hopwell.kernels.config.base import TileShape
from hopwell.kernels.config.prefill import PrefillConfig
from hopwell.kernels.hardware import LANES, WARPGROUP, WARPS
from hopwell.kernels.launch.arguments import Addresses, Geometry, ScaledAddresses, ScaledGeometry
from hopwell.kernels.parts.core import copy
from hopwell.kernels.parts.core.copy import ATOM_ROWS
from hopwell.kernels.parts.core.device import load_output_scale, load_scale, shared_address
from hopwell.kernels.parts.core.fragment import RowFragment
from hopwell.kernels.parts.core.kernel import PrefillLaunch, example_arguments
from hopwell.kernels.parts.core.pipeline import Edge
from hopwell.kernels.parts.load.kv_source import KvOperand
from hopwell.kernels.parts.partition.tiles import AlternatingSchedule, TileSchedule
from hopwell.kernels.parts.rows.epilogue import STAGING_BYTES
from hopwell.kernels.parts.rows.mask import mask_type
from hopwell.kernels.parts.rows.padding import fill_padding
from hopwell.kernels.parts.rows.query_rows import request_shape
from hopwell.kernels.parts.rows.score import ScoreMap
from hopwell.kernels.parts.rows.skip import SkipRule
from hopwell.kernels.parts.rows.softmax import OnlineSoftmax, TileSoftmax
from hopwell.kernels.sm90.common.dequant import Conversion
from hopwell.kernels.sm90.common.kernel import K_WARP, Q_WARP, SCHEDULE_WARP, V_WARP, AttentionSm90
from hopwell.kernels.sm90.prefill.fp8 import Fp8Attend
from hopwell.kernels.sm90.prefill.fp8_promotion import PROMOTED_BYTES, PromotingFp8Attend
from hopwell.kernels.sm90.prefill.overlapped import OverlappedAttend, PairedAttend
from hopwell.kernels.sm90.prefill.skip import SkippingAttend, SkippingFp8Attend


class PrefillSm90(PrefillLaunch, AttentionSm90):
    """Attention over query tiles of ``tile.m`` rows, in steps of ``tile.n`` keys from right to left. A tile has rows of
    one head, or for few queries rows of several heads of a KV head (packed GQA), see ``parts/rows/query_rows.py``.

    Warp roles
        warp 0 load_k      K tiles, through the KV source
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      Q tiles
        warp 3 schedule    work tiles: the query rows, the keys and their locations
        last four convert  only for narrow K and V: dequantizes their tiles to 16 bits; with 8-bit Q, transposes the
                           tiles of V. If the tile configuration says so, K and V have four warps each
        warps 4.. attend   consumer warpgroups, each 64 query rows from Q K^T to the output; at head dim 512 two share
                           64 rows, each with half of V's columns

    Edges (``PrefillSm90(config).edges``, printed by ``pipeline.describe``)
        Q       load_q -> attend      released when the last S of the work tile has been computed
        K       load_k -> attend      released when S has been computed
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        Edges of tiles that are converted end at convert. It releases a stage when it has written the converted one:
        converted K  convert -> attend   released when S has been computed
        converted V  convert -> attend   released when its product has been added to O
        With dequantization in place, at head dim 256, loaded K and loaded V lead from the loaders to convert. K and V
        lead from convert to attend, which releases the stages to load_k and load_v.

    Steady state: one step of two consumer warpgroups, A and B (ping-pong). "S" and "O" are matrix products on the
    tensor cores, which take about half of a step for each warpgroup. Named barriers pass the turn between the
    warpgroups.

        tensor cores   |  A: S(i) = Q K(i)^T | A: O += P(i+1) V(i+1) | B: S(i) = Q K(i)^T | B: O += P(i+1) V(i+1) |
        warpgroup A    |       waits         |  maximum of S(i)      | 2^(S(i) - reference), P(i) = round, sums   |
        warpgroup B    | 2^(S(i+1) - ...), P(i+1) = round, sums      |       waits        | maximum of S(i)       |
        load_k, load_v | fill the stages that the step before has released
    """

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
        tiles, rings, work_queue, partial_barriers = self._allocate(cutlass.memory.SmemAllocator())
        mask = mask_type(self.config.mask)(self.config.mask, Int32(geometry.mask_size))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.begin(warp, ((K_WARP, k_atom), (V_WARP, v_atom), (Q_WARP, q_atom)), partial_barriers)
        fill_padding(addresses, geometry)

        if warp < 4:
            self.set_registers(self.tile.producer_registers)
            if warp == K_WARP:
                key, ring = KvOperand.key(addresses, geometry, self.config), self.loading_ring(rings, 0)
                self.load_kv(k_atom, shared_address(tiles.loaded[0].iterator), ring, partial_barriers, work_queue, key)
            if warp == V_WARP:
                value = KvOperand.value(addresses, geometry, self.config)
                shared = shared_address(tiles.loaded[1].iterator)
                self.load_kv(v_atom, shared, self.loading_ring(rings, 1), partial_barriers + 1, work_queue, value)
            if warp == Q_WARP:
                self.load_q(q_atom, tiles.q, rings.q, work_queue, self.tile_shape(geometry))
            if warp == SCHEDULE_WARP:
                schedule = AlternatingSchedule if self.config.packs_heads else TileSchedule
                schedule(geometry, addresses, mask, self.tile.n, self.tile_shape(geometry)).publish(work_queue)
            cute.arch.griddepcontrol_launch_dependents()
        else:
            numbers = (addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax)
            if const_expr(self.config.converts):
                first = WARPS * (1 + self.warpgroups)
                if warp >= first:
                    self.set_registers(self.tile.converting_registers)
                    conversion = Conversion.create(self, tiles, rings, work_queue, addresses, geometry)
                    conversion.run_share(warp - first)
                else:
                    self.attend(tiles, self.multiplied(rings), work_queue, mask, *numbers)
            else:
                self.attend(tiles, rings, work_queue, mask, *numbers)

    def multiplied(self, rings) -> Any:
        """Return the rings as the consumers see them: converted tiles come from the converting warpgroup."""
        converted = {name.lower(): getattr(rings, f"converted_{name.lower()}") for name in self.config.converted_bytes}
        return rings._replace(**converted)

    @cute.jit
    def attend(
        self, tiles, rings, work_queue, mask, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax
    ) -> None:
        """Run the consumer warpgroups."""
        self.set_registers(self.tile.consumer_registers)
        scale = load_scale(addresses.softmax_scale, softmax_scale)
        score = ScoreMap(self.config.score, scale, soft_cap, Int32(geometry.heads))
        kind = TileSoftmax if self.config.uses_fp8_mma else OnlineSoftmax
        softmax = kind.create(score.softmax_scale, RowFragment.rows)
        scale = load_output_scale(addresses, output_scale)
        parts = dict(
            kernel=self,
            tiles=tiles,
            rings=rings,
            work_queue=work_queue,
            mask=mask,
            score=score,
            softmax=softmax,
            output_scale=scale,
            tile_shape=self.tile_shape(geometry),
        )
        if const_expr(self.config.skip_softmax):
            skip = SkipRule.create(skip_softmax, softmax.scale)
            attend = self.attend_types[1](**parts, skip=skip)
            attend.run(addresses, geometry)
            # Only the first of the warpgroups that share rows reports.
            sharing = WARPGROUP * self.config.v_splits
            first = cute.arch.thread_idx()[0] % sharing == WARPGROUP % sharing
            skip.report(addresses.skipped, first)
        else:
            self.attend_types[0](**parts).run(addresses, geometry)

    @property
    def attend_types(self) -> tuple[type, type]:
        """Consumer types without and with skip-softmax."""
        if self.config.uses_fp8_mma:
            return PromotingFp8Attend if self.config.promotes_output else Fp8Attend, SkippingFp8Attend
        return PairedAttend if self.config.pairs_steps else OverlappedAttend, SkippingAttend

    def _kv_edges(self, consumer: str, warps: int) -> list[Edge]:
        edges = super()._kv_edges(consumer, warps)
        if self.config.dequantizes_in_place:
            return self.edges_in_place(edges, "convert")
        converted = [self._is_converted(is_value) for is_value in (False, True)]
        readers = [("convert", WARPS) if is_converted else (consumer, warps) for is_converted in converted]
        return [
            replace(edge, consumer=role, consumer_warps=count)
            for edge, (role, count) in zip(edges, readers, strict=True)
        ]

    def _is_converted(self, is_value: bool) -> bool:
        return self.config.dequantizes or (is_value and self.config.transposes_v)

    @property
    def more_roles(self) -> dict[str, int]:
        return {"convert": WARPS} if self.config.converts else {}

    def kv_arrivals(self, is_value: bool) -> dict[str, Any]:
        if self.config.dequantizes_in_place:
            return {}
        arrivals = super().kv_arrivals(is_value)
        if not self._is_converted(is_value):
            return arrivals
        # Lanes, not the tensor cores, read the zeros that load_v writes. So all of its lanes arrive.
        zeroes = dict(producer_lanes=LANES) if is_value else {}
        return arrivals | zeroes | dict(consumer_lanes=LANES, consumer_fences=False)

    def _more_edges(self) -> tuple[Edge, ...]:
        if not self.config.converts:
            return ()
        stages, consumers = self.tile.kv_stages, 4 * self.warpgroups
        return tuple(
            Edge(f"converted {name}", "convert", "attend", stages, WARPS, consumers, size, LANES)
            for name, size in self.config.converted_bytes.items()
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
    return with_arguments(PrefillSm90(config))


def with_arguments(kernel: PrefillSm90) -> Any:
    """Return a kernel's traceable launch function and example arguments to compile it with."""
    kinds = (ScaledAddresses, ScaledGeometry) if kernel.config.has_block_scales else (Addresses, Geometry)
    return kernel, example_arguments(kinds, floats=4)
