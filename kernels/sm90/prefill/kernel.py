"""Hopper prefill: TMA, specialised warps, wgmma; one persistent kernel for ragged and paged KV."""

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
    """Attention over query tiles of ``tile.m`` rows, in steps of ``tile.n`` keys from right to left. The rows are of
    one head, or, where queries are few, of several heads of a KV head, see ``parts/rows/query_rows.py``.

    Warp roles
        warp 0 load_k      K tiles, as the KV source says
        warp 1 load_v      V tiles; rows past the visible keys become zeros
        warp 2 load_q      Q tiles
        warp 3 schedule    work tiles: which query rows, which keys, where they are
        last four convert  where K and V have 8 bits: their tiles in 16 bits, or, where Q has 8 bits as well, those of V
                           transposed; elsewhere there are none. K and V have four each where the tile says so
        warps 4.. attend   consumer warpgroups, each 64 query rows from Q K^T to the output; at head dim 512 two that
                           share 64 rows, each for half of V's columns

    Edges (``PrefillSm90(config).edges``, printed by ``pipeline.describe``)
        Q       load_q -> attend      released when the last S of the work tile has been computed
        K       load_k -> attend      released when S has been computed
        V       load_v -> attend      released when its product has been added to O
        work    schedule -> all       released as soon as it has been read
        What is converted ends at convert, which releases it when it has written a stage of
        converted K  convert -> attend   and
        converted V  convert -> attend   released as K and V are elsewhere
        Where K and V are dequantized in place, at head dim 256, loaded K and loaded V lead from the loaders to convert,
        and K and V from convert to attend, which gives their place back to load_k and load_v

    Steady state: one step of two consumer warpgroups, A and B. "S" and "O" are matrix products on the tensor cores,
    which take about half of a step for each warpgroup; named barriers give the warpgroups turns at them.

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
        """Return the rings as the consumers see them: what is converted comes from the converting warpgroup."""
        converted = {name.lower(): getattr(rings, f"converted_{name.lower()}") for name in self.config.converted_bytes}
        return rings._replace(**converted)

    @cute.jit
    def attend(
        self, tiles, rings, work_queue, mask, addresses, geometry, softmax_scale, output_scale, soft_cap, skip_softmax
    ) -> None:
        """Do what the consumer warpgroups do."""
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
            # The first one of the warpgroups that share rows reports.
            sharing = WARPGROUP * self.config.v_splits
            first = cute.arch.thread_idx()[0] % sharing == WARPGROUP % sharing
            skip.report(addresses.skipped, first)
        else:
            self.attend_types[0](**parts).run(addresses, geometry)

    @property
    def attend_types(self) -> tuple[type, type]:
        """Return what the consumer warpgroups do, without skip-softmax and with it."""
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
        # Zeros that load_v writes are read by lanes, not by the tensor cores, which is why all of its lanes arrive.
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
        """Return the shape of query tiles, which the compiler knows where heads are not packed."""
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
